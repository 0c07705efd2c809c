"""Whatever runs the service waits for as long as it takes to stop, and does not wait for less anywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from nybble.service.client import GONE_S
from nybble.service.server import ENGINE_EXIT_S, GRACE_S
from nybble.service.settings import Settings

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DRAIN_S = Settings.model_fields["shutdown_timeout_s"].default
# At most: the last events leave, the engine is asked to end, and killed.
END_S = GRACE_S + ENGINE_EXIT_S + GONE_S
# What the files below allow after DRAIN_S.
ALLOWED_S = 20


def read(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def deployment() -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load(read("k8s/base/deployment.yaml"))["spec"]["template"]["spec"]
    return spec


def test_the_allowance_is_enough() -> None:
    assert END_S <= ALLOWED_S


def test_the_dockerfile_says_how_long() -> None:
    text = read("Dockerfile")
    assert "STOPSIGNAL SIGTERM\n" in text
    assert f"NYBBLE_SHUTDOWN_TIMEOUT_S ({DRAIN_S:g} s)" in text
    assert f"within {ALLOWED_S} s after that" in text
    assert f"docker stop --time {DRAIN_S + ALLOWED_S:g}" in text


@pytest.mark.parametrize("name", ["nybble", "nybble-cpu"])
def test_compose_waits(name: str) -> None:
    assert (
        yaml.safe_load(read("compose.yaml"))["services"][name]["stop_grace_period"]
        == f"{DRAIN_S + ALLOWED_S:g}s"
    )


def test_kubernetes_waits_and_for_its_own_hook_too() -> None:
    spec = deployment()
    (container,) = spec["containers"]
    assert {"name": "NYBBLE_SHUTDOWN_TIMEOUT_S", "value": f"{DRAIN_S:g}"} in container["env"]
    _, hook_s = container["lifecycle"]["preStop"]["exec"]["command"]
    assert spec["terminationGracePeriodSeconds"] == int(hook_s) + DRAIN_S + ALLOWED_S


def seconds(name: str, key: str) -> int:
    (value,) = re.findall(rf"^{key}=(\d+)$", read(name), re.MULTILINE)
    return int(value)


def test_systemd_waits() -> None:
    assert seconds("systemd/nybble.service", "TimeoutStopSec") == DRAIN_S + ALLOWED_S


def test_podman_waits_and_systemd_for_podman() -> None:
    podman_s = seconds("quadlet/nybble.container", "PodmanArgs=--stop-timeout")
    assert podman_s == DRAIN_S + ALLOWED_S
    assert seconds("quadlet/nybble.container", "TimeoutStopSec") >= podman_s + 10


def test_the_docs_say_the_same() -> None:
    text = (DEPLOY.parent / "docs/deploy.md").read_text(encoding="utf-8")
    assert f"{DRAIN_S + ALLOWED_S:g} s" in text
