"""All that doctor asks the machine: files under a root, device nodes, environment, user. Nothing here raises.

Tests give a folder as root, and a table of device nodes.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# The longest file that is read is dpkg's list of packages, some megabytes.
_MOST_BYTES = 64 << 20
# The later one counts more, as in modprobe.d(5).
_MODPROBE = ("/lib/modprobe.d", "/usr/lib/modprobe.d", "/run/modprobe.d", "/etc/modprobe.d")
_NUMBER = re.compile(r"(0[xX][0-9a-fA-F]{1,16}|[0-9]{1,20})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Node:
    """A device node. refused: "" where this process may open it for reading and writing, else the name of the error,
    as EACCES (mode and groups) or EPERM (a container's or unit's list of devices)."""

    uid: int
    gid: int
    mode: int
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Parameter:
    """What a module is given. file: of modprobe; "" for the kernel's command line."""

    value: str
    file: str = ""


def read_node(path: str) -> Node | None:
    """The node itself is asked, by opening it: access lists and device cgroups do not show in its mode."""
    try:
        about = os.stat(path)
    except (OSError, ValueError):
        return None
    refused = "" if stat.S_ISCHR(about.st_mode) else "ENOTTY"
    if not refused:
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as error:
            refused = errno.errorcode.get(error.errno or 0, str(error.errno))
    return Node(about.st_uid, about.st_gid, stat.S_IMODE(about.st_mode), refused)


@dataclass(frozen=True)
class Host:
    """root: where /sys, /proc, /etc and so on are looked for. node: how a device node, by its path on the machine, is
    read. uid, gids: of this process."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    uid: int = field(default_factory=os.geteuid)
    gids: frozenset[int] = field(default_factory=lambda: frozenset((os.getegid(), *os.getgroups())))
    node: Callable[[str], Node | None] = read_node

    def at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def text(self, path: str | Path) -> str:
        """A file's text, "" where there is none or it cannot be read."""
        file = self.at(path) if isinstance(path, str) else path
        try:
            if not file.is_file():  # a pipe would never end
                return ""
            with file.open("rb") as opened:
                return opened.read(_MOST_BYTES).decode("utf-8", "replace").replace("\0", "").strip()
        except (OSError, ValueError):
            return ""

    def number(self, path: str | Path) -> int | None:
        """A file that holds one number, decimal or as 0x83; None for all else."""
        text = self.text(path)
        return int(text, 0 if text[:2].lower() == "0x" else 10) if _NUMBER.fullmatch(text) else None

    def names(self, folder: str) -> list[str]:
        """What is in a folder, numbers in their order; [] where there is none."""
        try:
            names = [entry.name for entry in self.at(folder).iterdir()]
        except (OSError, ValueError):
            return []
        return sorted(names, key=lambda name: (len(name), name) if name.isdecimal() else (99, name))

    def exists(self, path: str) -> bool:
        try:
            return self.at(path).exists()
        except (OSError, ValueError):
            return False

    def link_name(self, path: str) -> str:
        """The last part of where a symbolic link points; "" where it is none."""
        try:
            return self.at(path).readlink().name
        except (OSError, ValueError):
            return ""

    @property
    def kernel(self) -> str:
        """As `uname -r`."""
        return self.text("/proc/sys/kernel/osrelease")

    @property
    def command_line(self) -> list[str]:
        return self.text("/proc/cmdline").split()

    def module_parameters(self) -> dict[str, Parameter]:
        """By module and name, such as amdgpu.gttsize; the kernel's command line counts more than modprobe's files."""
        words = []
        for file in (f"{folder}/{name}" for folder in _MODPROBE for name in self.names(folder)):
            text = self.text(file).replace("\\\n", " ") if file.endswith(".conf") else ""
            for module, given in re.findall(r"^[ \t]*options[ \t]+(\S+)[ \t]+(.*)$", text, re.MULTILINE):
                words += [(f"{module}.{word}", file) for word in given.split()]
        words += [(word, "") for word in self.command_line]
        split = [(*word.split("=", 1), file) for word, file in words if "=" in word]
        return {name.replace("-", "_"): Parameter(value, file) for name, value, file in split}

    @property
    def in_container(self) -> bool:
        marks = ("/run/.containerenv", "/.dockerenv")
        return bool(self.environ.get("container")) or any(self.exists(mark) for mark in marks)

    def group_name(self, gid: int) -> str:
        """ "render", or "" where no group of /etc/group has this id."""
        return next((name for name, number in self.groups().items() if number == gid), "")

    def groups(self) -> dict[str, int]:
        """Name -> id, of /etc/group."""
        rows = [line.split(":") for line in self.text("/etc/group").splitlines()]
        return {row[0]: int(row[2]) for row in rows if len(row) > 2 and _NUMBER.fullmatch(row[2])}

    def meminfo(self) -> dict[str, int]:
        """Bytes by name, of /proc/meminfo."""
        found = {}
        for line in self.text("/proc/meminfo").splitlines():
            name, _, rest = line.partition(":")
            words = rest.split()
            if words and _NUMBER.fullmatch(words[0]):
                found[name] = int(words[0]) * 1024
        return found


def version_numbers(text: str) -> tuple[int, ...]:
    """6.14.0-1018-oem -> (6, 14, 0): the numbers that a version begins with; () where it begins with none."""
    found = re.match(r"v?([0-9]{1,9}(?:\.[0-9]{1,9})*)", text, re.ASCII)
    return tuple(map(int, found[1].split("."))) if found else ()
