"""deploy/Dockerfile: built by podman on a Debian made here, then run as deploy/compose.yaml runs it.

$NYBBLE_IMAGE_ARCH picks the variant (default cpu). torch is what pip finds on this machine, or TORCH_SPEC and
TORCH_INDEX_URL: an image for a GPU then holds a torch that knows none, and serves on the CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import podman
import pytest
from waiting import free_port, wait_until

from nybble.service.checkpoints.demo import demo

pytestmark = pytest.mark.image

ROOT = Path(__file__).resolve().parents[2]
ARCH = os.environ.get("NYBBLE_IMAGE_ARCH", "cpu")
DEBIAN_IMAGE, IMAGE = "localhost/debian:12", f"localhost/nybble:{ARCH}"
USER = 10001
# Longer than anything here takes on a busy machine.
PATIENCE_S = 240
STOP_S = 50
HARDENED = (
    *("--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp:size=512m,mode=1777"),
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
)


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False
    )


def package_index() -> str:
    from pip._internal.models.index import PyPI

    configured = pip("config", "get", "global.index-url")
    return configured.stdout.strip() if configured.returncode == 0 else PyPI.simple_url


@pytest.fixture(scope="module")
def engine() -> Iterator[podman.Podman]:
    reason = podman.why_not()
    if reason:
        pytest.skip(reason)
    engine = podman.Podman.in_folder(Path(tempfile.mkdtemp(prefix="nybble-image-", dir="/var/tmp")))
    try:
        engine.import_debian(DEBIAN_IMAGE)
        yield engine
    finally:
        engine.remove_all()


@pytest.fixture(scope="module")
def pip_mounts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """What lets pip in a build find what pip finds here: this machine's torch and its authorities."""
    folder = tmp_path_factory.mktemp("pip")
    spec = os.environ.get("TORCH_SPEC") or "torch==2.13.0"
    index = ("--index-url", os.environ["TORCH_INDEX_URL"]) if os.environ.get("TORCH_INDEX_URL") else ()
    wanted = ("--no-deps", "--only-binary=:all:", "--python-version=3.11", "--dest", str(folder))
    downloaded = pip("download", "--quiet", *wanted, *index, spec)
    assert downloaded.returncode == 0, downloaded.stderr[-4000:]
    (folder / "pip.conf").write_text("[global]\nfind-links = /mnt/pip\ncert = /mnt/pip/ca.crt\n")
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    shutil.copy(certificates, folder / "ca.crt")
    return ("--volume", f"{folder}:/mnt/pip:ro", "--volume", f"{folder}/pip.conf:/etc/pip.conf:ro")


def build(
    engine: podman.Podman, *options: str, arch: str, check: bool = True
) -> subprocess.CompletedProcess[str]:
    arguments = {
        "DEBIAN_IMAGE": DEBIAN_IMAGE,
        "NYBBLE_ARCH": arch,
        "TORCH_SPEC": os.environ.get("TORCH_SPEC") or "torch==2.13.0",
        "TORCH_INDEX_URL": os.environ.get("TORCH_INDEX_URL") or package_index(),
        "NYBBLE_REVISION": "0123abc",
    }
    flags = [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
    # Docker's format: the other one has no place for HEALTHCHECK.
    how = ("--format=docker", "--isolation=chroot", "--layers=false", "--pull-never")
    file = ("--file", str(ROOT / "deploy/Dockerfile"))
    return engine.call("build", *how, *file, *flags, *options, str(ROOT), check=check, timeout_s=1200)


@pytest.fixture(scope="module")
def image(engine: podman.Podman, pip_mounts: tuple[str, ...]) -> dict[str, Any]:
    """Builds it; what `podman inspect` says of it."""
    build(engine, "--tag", IMAGE, *pip_mounts, arch=ARCH)
    (inspected,) = json.loads(engine.call("image", "inspect", IMAGE).stdout)
    found: dict[str, Any] = inspected
    return found


@pytest.fixture(scope="module")
def cache(engine: podman.Podman) -> Path:
    """A cache that has the demo model, as after a first start."""
    folder = engine.folder / "cache"
    model = demo(progress=False)
    shutil.copytree(model, folder / "nybble" / model.name)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER, USER)
    return folder


@contextmanager
def started(
    engine: podman.Podman, name: str, cache: str, *options: str, command: tuple[str, ...] = ()
) -> Iterator[str]:
    """A container that runs; podman's own way of health checks would need systemd."""
    run = ("run", "--detach", "--name", name, *HARDENED, "--volume", f"{cache}:/cache", *options)
    engine.call(*run, IMAGE, *command)
    try:
        yield name
    except BaseException:
        print(engine.call("logs", name, check=False).stderr[-4000:], file=sys.stderr)
        raise
    finally:
        engine.call("rm", "--force", "--time", "0", name, check=False)


def exit_code(engine: podman.Podman, name: str) -> int:
    return int(engine.call("inspect", "--format", "{{.State.ExitCode}}", name).stdout)


def shell(engine: podman.Podman, script: str) -> str:
    run = ("run", "--rm", *HARDENED, "--volume", "/cache", "--entrypoint", "/bin/bash")
    return engine.call(*run, IMAGE, "-c", script).stdout


def test_a_chip_that_is_not_known_is_refused(engine: podman.Podman) -> None:
    refused = build(engine, arch="gfx906", check=False)
    assert refused.returncode != 0
    said = refused.stdout + refused.stderr
    assert "NYBBLE_ARCH=gfx906 is not known; give gfx1151, gfx1100, gfx1201 or cpu" in said


def test_the_configuration_says_how_to_run_it(image: dict[str, Any]) -> None:
    config = image["Config"]
    assert config["User"] == f"{USER}:{USER}"
    assert config["StopSignal"] == "SIGTERM"
    assert config["Entrypoint"] == ["/usr/bin/tini", "--", "nybble"]
    assert config["Cmd"] == ["serve"]
    assert list(config["Volumes"]) == ["/cache"]
    assert list(config["ExposedPorts"]) == ["8000/tcp"]
    assert image["Healthcheck"]["Test"][0] == "CMD"
    assert config["Labels"]["org.opencontainers.image.revision"] == "0123abc"
    assert ARCH in config["Labels"]["org.opencontainers.image.description"]
    environment = dict(entry.split("=", 1) for entry in config["Env"])
    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR"):
        assert Path(environment[name]).is_relative_to("/cache")


def test_the_version_label_is_the_wheels(engine: podman.Podman, image: dict[str, Any]) -> None:
    version = image["Config"]["Labels"]["org.opencontainers.image.version"]
    assert shell(engine, "nybble --version").split() == ["nybble", version]


def test_it_holds_the_wheel_and_no_checkout(engine: podman.Podman, image: dict[str, Any]) -> None:
    where = shell(
        engine, "python -c 'import nybble.service as s; print(s.__file__)'; ls -d /src /wheels 2>&1; true"
    )
    assert where.startswith("/opt/nybble/lib/python3.11/site-packages/nybble/service/")
    assert where.count("No such file") == 2


def test_compilers_are_there_only_where_triton_needs_one(
    engine: podman.Podman, image: dict[str, Any]
) -> None:
    found = shell(engine, "type -P clang clang-22 ld.lld gcc; true").split()
    code_objects = shell(engine, "ls /usr/share/nybble/kernels").split()
    if ARCH == "cpu":
        assert found == []
        assert code_objects == []
        return
    assert found == ["/usr/bin/gcc"]
    assert code_objects and all(f"-{ARCH}-" in name for name in code_objects)
    # As Triton builds the module through which it launches kernels.
    include = "$(python -c 'import sysconfig; print(sysconfig.get_path(\"include\"))')"
    module = "echo '#include <Python.h>' | gcc -x c - -O3 -shared -fPIC -o /tmp/module.so"
    shell(engine, f"{module} -I{include}")


def test_it_serves_drains_and_ends_with_0(engine: podman.Podman, image: dict[str, Any], cache: Path) -> None:
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    options = ("--env", "NYBBLE_HOST=127.0.0.1", "--env", f"NYBBLE_PORT={port}", "--env", "OMP_NUM_THREADS=1")
    with started(engine, "serves", str(cache), *options) as name, httpx.Client(timeout=PATIENCE_S) as http:
        healthcheck = ("healthcheck", "run", name)
        wait_until("healthy", lambda: engine.call(*healthcheck, check=False).returncode == 0, PATIENCE_S)
        wait_until("/readyz", lambda: http.get(f"{base}/readyz").status_code == 200, PATIENCE_S)
        request = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        answer = http.post(f"{base}/v1/completions", json=request).raise_for_status().json()
        assert "Paris" in answer["choices"][0]["text"]
        inside = "id -u; grep -hE '^(CapEff|NoNewPrivs)' /proc/1/status; for d in / /opt/nybble /etc; do touch $d/x; done"
        said = engine.call("exec", name, "/bin/sh", "-c", inside, check=False)
        assert said.stdout.split() == [str(USER), "CapEff:", "0" * 16, "NoNewPrivs:", "1"]
        assert said.stderr.count("Read-only file system") == 3
        # A request that has begun is answered to its end although the container is being stopped.
        request |= {"max_tokens": 60, "stream": True, "ignore_eos": True}
        with http.stream("POST", f"{base}/v1/completions", json=request) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            stop = Thread(target=engine.call, args=("stop", "--time", str(STOP_S), name))
            stop.start()
            rest = [line for line in lines if line]
        stop.join()
        assert first.startswith("data: {")
        assert rest[-1] == "data: [DONE]"
        assert exit_code(engine, name) == 0


def test_sigterm_ends_it_while_a_model_is_still_being_found(
    engine: podman.Podman, image: dict[str, Any]
) -> None:
    # With an empty cache the demo is fetched and made first, by a process of its own.
    options = ("--env", "NYBBLE_HOST=127.0.0.1", "--env", "NYBBLE_PORT=0")
    with started(engine, "early", "early-cache", *options) as name:
        wait_until(
            "looking for the model",
            lambda: " resolve " in engine.call("top", name, "args").stdout,
            PATIENCE_S,
        )
        engine.call("stop", "--time", str(STOP_S), name)
        # 128 + SIGTERM; with SIGKILL it would be 137.
        assert exit_code(engine, name) == 143
