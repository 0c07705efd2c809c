"""`nybble doctor`: what this machine has, whether Nybble runs well on it, and what to change.

    host       files, device nodes and environment, under a root that tests make up
    gpus       compute nodes and PCI devices as the kernel lists them
    facts      all of it read once, torch asked in a process of its own
    known      chips and versions that are known good or bad, with their sources
    devices, software, memory_checks      the checks: Facts -> Finding, or None where a check does not apply
    report     as text, JSON, and the .env of deploy/compose.yaml

To add a check: a function and a row in CHECKS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nybble.service.doctor import devices, memory_checks, software
from nybble.service.doctor.facts import Facts
from nybble.service.doctor.findings import EXIT_CODES, Finding, Severity, warning, worst

__all__ = ["CHECKS", "Facts", "Report", "examine"]

CHECKS: tuple[tuple[str, Callable[[Facts], Finding | None]], ...] = (
    ("chip", devices.chip),
    ("driver", devices.driver),
    ("kernel", software.kernel),
    ("firmware", software.firmware),
    ("/dev/kfd", devices.kfd_node),
    ("render node", devices.render_node),
    ("memory", memory_checks.pools),
    ("mapping limit", memory_checks.mapping_limit),
    ("torch", software.torch),
    ("ROCm", software.rocm),
    ("Triton", software.triton),
    ("GFX override", software.override),
    ("hipBLASLt", software.hipblaslt),
    ("kernels", software.warmed),
    ("settings", software.settings),
    ("plan", memory_checks.plan),
)


@dataclass(frozen=True)
class Report:
    """Findings by the name of their check, in the table's order."""

    findings: dict[str, Finding]

    @property
    def severity(self) -> Severity:
        return worst(self.findings.values())

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.severity]


def examine(facts: Facts) -> Report:
    """Every check that applies. One that breaks is a finding of its own: a machine that is odd is looked at all the same."""
    findings = {}
    for name, check in CHECKS:
        finding = _checked(check, facts)
        if finding is not None:
            findings[name] = finding
    return Report(findings)


def _checked(check: Callable[[Facts], Finding | None], facts: Facts) -> Finding | None:
    try:
        return check(facts)
    except Exception as problem:  # noqa: BLE001
        return warning(
            f"this check broke: {type(problem).__name__}: {problem}",
            "a machine that can be read",
            "report it with the output of `nybble doctor --json`",
        )
