"""deploy/systemd and deploy/quadlet, by the programs that read them: systemd-analyze, and podman's quadlet."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nybble.service.doctor.report import CPU_PROFILE

pytestmark = pytest.mark.deploy

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SERVICE = DEPLOY / "systemd/nybble.service"
CONTAINER = DEPLOY / "quadlet/nybble.container"
QUADLETS = (Path("/usr/libexec/podman/quadlet"), ROOT / "build/quadlet/quadlet")
# systemd's scale goes from 0, closed, to 10. Debian 12's systemd gives 1.8; half a point is for other versions' measures.
MOST_EXPOSURE = 2.3
# [Container] keys of podman 4.6 (podman-systemd.unit.5), which is what the unit says it needs.
PODMAN_4_6 = {
    *(
        "AddCapability",
        "AddDevice",
        "Annotation",
        "AutoUpdate",
        "ContainerName",
        "DropCapability",
        "Environment",
    ),
    *("EnvironmentFile", "EnvironmentHost", "Exec", "ExposeHostPort", "Group", "HealthCmd", "HealthInterval"),
    *("HealthOnFailure", "HealthRetries", "HealthStartPeriod", "HealthStartupCmd", "HealthStartupInterval"),
    *(
        "HealthStartupRetries",
        "HealthStartupSuccess",
        "HealthStartupTimeout",
        "HealthTimeout",
        "HostName",
        "Image",
    ),
    *(
        "IP",
        "IP6",
        "Label",
        "LogDriver",
        "Mask",
        "Mount",
        "Network",
        "NoNewPrivileges",
        "Notify",
        "PodmanArgs",
    ),
    *(
        "PublishPort",
        "Pull",
        "ReadOnly",
        "Rootfs",
        "RunInit",
        "SeccompProfile",
        "Secret",
        "SecurityLabelDisable",
    ),
    *("SecurityLabelFileType", "SecurityLabelLevel", "SecurityLabelNested", "SecurityLabelType", "ShmSize"),
    *("Sysctl", "Timezone", "Tmpfs", "Ulimit", "Unmask", "User", "UserNS", "Volume", "WorkingDir"),
}


def values(text: str, key: str) -> list[str]:
    """What a key is given, each time that it stands in a unit."""
    return re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)


def section(text: str, name: str) -> str:
    return re.split(r"^\[.*\]$", text.split(f"[{name}]\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.fixture(scope="module")
def analyze() -> str:
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("needs systemd-analyze: not installed")
    return found


@pytest.fixture(scope="module")
def quadlet() -> Path:
    found = next((path for path in QUADLETS if os.access(path, os.X_OK)), None)
    if found is None:
        pytest.skip("needs podman's quadlet: not installed")
    return found


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    """The unit with a program that exists on this machine: verify looks for it."""
    unit = tmp_path / "nybble.service"
    unit.write_text(SERVICE.read_text().replace("/opt/nybble/bin/nybble ", f"{sys.executable} "))
    yield unit


def verify(analyze: str, unit: Path) -> tuple[int, str]:
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


def test_systemd_accepts_the_unit(analyze: str, installed: Path) -> None:
    assert verify(analyze, installed) == (0, "")


@pytest.mark.parametrize("planted", ["ProtectSytem=strict", "TimeoutStopSec=soon", "DeviceAllow=/dev/kfd rx"])
def test_systemd_would_not_accept_a_mistake(planted: str, analyze: str, installed: Path) -> None:
    installed.write_text(installed.read_text().replace("[Install]", f"{planted}\n\n[Install]"))
    assert "nybble.service" in verify(analyze, installed)[1]


def test_the_unit_is_as_closed_as_it_can_be(analyze: str) -> None:
    command = [
        analyze,
        "security",
        "--offline=true",
        "--no-pager",
        f"--threshold={MOST_EXPOSURE * 10:.0f}",
        str(SERVICE),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout
    assert re.search(r"Overall exposure level for nybble.service: \d", done.stdout)


def test_the_unit_writes_where_it_may() -> None:
    text = SERVICE.read_text()
    assert values(text, "CacheDirectory") == ["nybble"]
    environment = dict(
        pair.split("=", 1) for line in values(text, "Environment") for pair in shlex.split(line)
    )
    assert environment["XDG_CACHE_HOME"] == "/var/cache"
    for name in ("HOME", "HF_HOME", "TRITON_CACHE_DIR"):
        assert environment[name].startswith("/var/cache/nybble")


def test_the_units_devices_are_those_that_doctor_looks_at() -> None:
    text = SERVICE.read_text()
    assert values(text, "DevicePolicy") == ["closed"]
    assert values(text, "DeviceAllow") == ["/dev/kfd rw", "char-drm rw"]


# --- quadlet ---


def test_the_container_has_only_keys_that_its_podman_knows() -> None:
    keys = re.findall(r"^(\w+)=", section(CONTAINER.read_text(), "Container"), re.MULTILINE)
    assert set(keys) <= PODMAN_4_6
    repeated = {key for key in keys if keys.count(key) > 1}
    assert repeated <= {"AddDevice", "PodmanArgs", "Volume", "Environment"}


def generated(quadlet: Path, units: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [quadlet, "-dryrun"], capture_output=True, text=True, check=False, timeout=60,
        env=os.environ | {"QUADLET_UNIT_DIRS": str(units)},
    )  # fmt: skip


def run_command(text: str) -> list[str]:
    """podman's arguments."""
    return shlex.split(next(line for line in values(text, "ExecStart") if " run " in line))


def test_quadlet_makes_a_service_of_it(quadlet: Path) -> None:
    done = generated(quadlet, CONTAINER.parent)
    assert done.returncode == 0, done.stderr
    command = run_command(done.stdout)
    assert command[-1] == "localhost/nybble:${NYBBLE_ARCH}"
    joined = " ".join(command)
    for part in (
        *(
            "--read-only",
            "--cap-drop all",
            "--security-opt=no-new-privileges",
            "--device /dev/kfd",
            "--device /dev/dri",
        ),
        *("--group-add=${NYBBLE_RENDER_GID}", "--group-add=${NYBBLE_VIDEO_GID}", "--stop-timeout=50"),
        *("-v nybble-cache:/cache", "--publish 127.0.0.1:8000:8000", "--env-file /etc/nybble/nybble.env"),
    ):
        assert part in joined
    assert "--privileged" not in joined and "--network" not in joined
    assert "podman volume create --ignore nybble-cache" in done.stdout


def test_quadlet_would_not_take_a_mistake(quadlet: Path, tmp_path: Path) -> None:
    units = tmp_path / "units"
    shutil.copytree(CONTAINER.parent, units)
    file = units / CONTAINER.name
    file.write_text(file.read_text().replace("ReadOnly=", "ReadOnlyRoot="))
    done = generated(quadlet, units)
    assert done.returncode != 0 and "ReadOnlyRoot" in done.stderr


def test_systemd_accepts_what_quadlet_makes(quadlet: Path, analyze: str, tmp_path: Path) -> None:
    text = generated(quadlet, CONTAINER.parent).stdout
    parts = re.split(r"^---(.+)---$", text, flags=re.MULTILINE)[1:]
    for name, unit in zip(parts[::2], parts[1::2], strict=True):
        (tmp_path / name).write_text(unit.replace("/usr/bin/podman", "/bin/true"))
    assert verify(analyze, tmp_path / "nybble.service") == (0, "")


def test_every_variable_of_the_container_has_a_value() -> None:
    """systemd runs a service with an unset ${...} all the same, as nothing."""
    text = CONTAINER.read_text()
    used = set(
        re.findall(r"\$\{(\w+)\}", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    )
    given = {
        pair.split("=")[0]
        for line in values(section(text, "Service"), "Environment")
        for pair in line.split()
    }
    assert used == given == {"NYBBLE_ARCH", "NYBBLE_RENDER_GID", "NYBBLE_VIDEO_GID"}
    assert "NYBBLE_ARCH=cpu" in CPU_PROFILE
