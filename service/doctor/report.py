"""A report as text for people, as JSON, and the .env that deploy/compose.yaml reads."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from typing import Any

from nybble.service.doctor import Facts, Report
from nybble.service.doctor.devices import KFD, render_path
from nybble.service.doctor.findings import Finding, Severity
from nybble.service.doctor.host import Host
from nybble.service.doctor.known import is_supported

WIDTH = 110
# What compose takes for a host without a GPU that Nybble is made for.
CPU_PROFILE = "COMPOSE_PROFILES=cpu\nNYBBLE_ARCH=cpu"
_WORDS = 8  # "warning" and a space
_FIELDS = ("accepted", "change", "source")


def as_text(report: Report) -> str:
    """A line or more per check, aligned; what is fine says no more than what was found."""
    names = max((len(name) for name in report.findings), default=0) + 1
    lines = [line for name, finding in report.findings.items() for line in _lines(name, finding, names)]
    return "\n".join([*lines, "", _verdict(report)])


def _lines(name: str, finding: Finding, names: int) -> list[str]:
    head = f"{finding.severity.word:<{_WORDS}}{name:<{names}} "
    lines = _wrapped(head, finding.found)
    if finding.severity > Severity.OK:
        for field in _FIELDS:
            value = getattr(finding, field)
            if value:
                lines += _wrapped(" " * len(head) + f"{field + ':':<10}", value)
    return lines


def _wrapped(head: str, text: str) -> list[str]:
    wrapper = textwrap.TextWrapper(
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
    # Of what files and environment say, nothing may steer the terminal.
    printable = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return wrapper.wrap(printable) or [head.rstrip()]


def _verdict(report: Report) -> str:
    counts = {
        severity: sum(finding.severity is severity for finding in report.findings.values())
        for severity in (Severity.ERROR, Severity.WARNING)
    }
    told = ", ".join(f"{count} {severity.word}{'s' * (count != 1)}" for severity, count in counts.items())
    return f"{told}: exit code {report.exit_code}"


def as_json(report: Report) -> str:
    """An object: severity, exit_code, checks (a list of check, severity, found, accepted, change, source)."""
    checks: list[dict[str, Any]] = [
        {"check": name, **asdict(finding), "severity": finding.severity.word}
        for name, finding in report.findings.items()
    ]
    whole = {"severity": report.severity.word, "exit_code": report.exit_code, "checks": checks}
    return json.dumps(whole, indent=2)


def as_env(facts: Facts) -> tuple[str, str]:
    """The lines, and what the reader has to know of them ("" for nothing).

    NYBBLE_RENDER_GID owns the render node. NYBBLE_VIDEO_GID owns /dev/kfd where that is another group, else the display
    node /dev/dri/card*: a container that has both may open all it needs, on whichever distribution.
    """
    gpu, arch, hint = facts.gpu, facts.arch, ""
    if facts.first is not None and not arch:
        index, gpu = next(((i, g) for i, g in enumerate(facts.gpus) if is_supported(g.arch)), (0, None))
        arch = gpu.arch if gpu else ""
        hint = f"the service needs HIP_VISIBLE_DEVICES={index}, too: its first GPU is another" if gpu else ""
    if not arch:
        return CPU_PROFILE, ""
    lines = ["COMPOSE_PROFILES=gpu", f"NYBBLE_ARCH={arch}"]
    render = _gid(facts.host, render_path(gpu) if gpu else "/dev/dri/renderD128", "render")
    if render is None:
        return "\n".join(lines), "no render node here and no group `render`: NYBBLE_RENDER_GID is not known"
    kfd = _gid(facts.host, KFD, "render")
    video = kfd if kfd not in (None, render) else _display_gid(facts.host)
    lines += [f"NYBBLE_RENDER_GID={render}", f"NYBBLE_VIDEO_GID={render if video is None else video}"]
    return "\n".join(lines), hint


def _gid(host: Host, path: str, group: str) -> int | None:
    """Of the group that owns a node; of the group by name where root's own does, or there is no node."""
    node = host.node(path)
    if node is not None and node.gid:
        return node.gid
    return host.groups().get(group, None if node is None else node.gid)


def _display_gid(host: Host) -> int | None:
    cards = [name for name in host.names("/dev/dri") if name.startswith("card")]
    return _gid(host, f"/dev/dri/{cards[0]}" if cards else "/dev/dri/card0", "video")
