"""What a check says: one finding, with what was found, what is accepted and what to change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from nybble.service.memory import GIB


class Severity(IntEnum):
    """OK: nothing to do. NOTE: worth knowing, nothing to do. WARNING: it runs, worse than it could or not for sure.
    ERROR: it does not run, or is known to crash, until it is changed."""

    OK = 0
    NOTE = 1
    WARNING = 2
    ERROR = 3

    @property
    def word(self) -> str:
        return self.name.lower()


# By the worst finding: the numbers that monitoring plugins use. Wrong usage is 2, too, as of every command.
EXIT_CODES = {Severity.OK: 0, Severity.NOTE: 0, Severity.WARNING: 1, Severity.ERROR: 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """accepted, change, source: empty where there is nothing to say. source: where the fact behind it is published."""

    severity: Severity
    found: str
    accepted: str = ""
    change: str = ""
    source: str = ""


def ok(found: str, accepted: str = "") -> Finding:
    return Finding(Severity.OK, found, accepted)


def note(found: str, accepted: str = "", change: str = "", source: str = "") -> Finding:
    return Finding(Severity.NOTE, found, accepted, change, source)


def warning(found: str, accepted: str, change: str, source: str = "") -> Finding:
    return Finding(Severity.WARNING, found, accepted, change, source)


def error(found: str, accepted: str, change: str, source: str = "") -> Finding:
    return Finding(Severity.ERROR, found, accepted, change, source)


def worst(findings: Iterable[Finding]) -> Severity:
    return max((finding.severity for finding in findings), default=Severity.OK)


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.0f} MiB"
