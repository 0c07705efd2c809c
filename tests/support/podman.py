"""Podman, as it comes with Debian, in a folder of its own: it needs no daemon and no systemd, and touches no other store."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("podman", "runc", "mmdebstrap")
DEBIAN = "bookworm"
# Cgroups of either version, limits that also a machine has which allows less than podman's defaults, the host's network.
CONFIGURATION = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
netns = "host"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


def why_not() -> str | None:
    """The reason why images cannot be built here, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}: not installed"
    return None if os.geteuid() == 0 else "needs root"


@dataclass(frozen=True)
class Podman:
    folder: Path

    @classmethod
    def in_folder(cls, folder: Path) -> Podman:
        (folder / "containers.conf").write_text(CONFIGURATION)
        return cls(folder)

    def command(self, *arguments: str) -> list[str]:
        storage = ["--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run")]
        return ["podman", *storage, "--storage-driver", "overlay", *arguments]

    def call(
        self, *arguments: str, check: bool = True, timeout_s: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """check: a failure is an AssertionError that has the end of what podman said."""
        done = subprocess.run(
            self.command(*arguments),
            env=os.environ | {"CONTAINERS_CONF": str(self.folder / "containers.conf")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, f"{arguments}: {(done.stdout + done.stderr)[-4000:]}"
        return done

    def import_debian(self, name: str) -> None:
        """A Debian without anything that is not essential, as image `name`: no registry is asked."""
        archive = self.folder / "debian.tar"
        made = subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", DEBIAN, str(archive)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0, made.stderr[-4000:]
        self.call("import", "--quiet", str(archive), name)
        archive.unlink()

    def remove_all(self) -> None:
        self.call("rm", "--all", "--force", "--time", "0", check=False)
        self.call("rmi", "--all", "--force", check=False)
        # Its mount of itself, which a folder that is removed may not be.
        subprocess.run(
            ["umount", str(self.folder / "storage/overlay")], stderr=subprocess.DEVNULL, check=False
        )
        shutil.rmtree(self.folder)
