"""What is compiled: one kernel of csrc, specialised by macros, and the text of all of csrc."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

SUFFIXES = (".h", ".hpp", ".cpp", ".hip", ".cu")


@dataclass(frozen=True, slots=True)
class Program:
    """One specialisation of one kernel.

    source   a file of csrc, "skinny_w4a16.cpp"; it includes others of csrc by quoted name
    entry    the kernel's name, declared extern "C"
    defines  macros that specialise it, "NYBBLE_M=4"
    """

    source: str
    entry: str
    defines: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.entry} ({' '.join(self.defines)})" if self.defines else self.entry


@dataclass(frozen=True)
class Sources:
    """Every source file of a folder by its name relative to it, "/" between parts.

    digest: over all names and texts. A change in any file makes another digest: which file includes which is not looked at.
    """

    files: dict[str, str]
    digest: str

    @classmethod
    def read(cls, folder: Traversable) -> Sources:
        files = dict(sorted(_walk(folder, "")))
        return cls(files, digest_of([part for item in files.items() for part in item]))

    def text(self, program: Program) -> str:
        """The program's own file. Raises ValueError when there is none of that name."""
        if program.source not in self.files:
            raise ValueError(
                f"program {program}: given source {program.source!r}, accepted one of {sorted(self.files)}"
            )
        return self.files[program.source]

    def headers(self, program: Program) -> dict[str, str]:
        """All files but the program's own."""
        return {name: text for name, text in self.files.items() if name != program.source}


@cache
def csrc() -> Sources:
    """The sources that this installation carries, read once."""
    return Sources.read(resources.files("nybble.csrc"))


def digest_of(parts: Sequence[str]) -> str:
    """SHA-256 over the parts with their lengths, so that no two lists of parts read the same. Hexadecimal."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode()
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)
    return sha.hexdigest()


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(SUFFIXES):
            yield prefix + entry.name, entry.read_text(encoding="utf-8")
