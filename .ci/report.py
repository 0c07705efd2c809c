"""The end of .ci/run: reads what each suite left behind and says whether the run is green.

`python3 .ci/report.py SUITES ALLOWED`. SUITES has a line per suite, tab separated: name, seconds, exit status, and
either its junit file, "-" (the exit status is all there is), or "skip: REASON" (it was not started). ALLOWED lists the
skips that may happen (see .ci/allowed_skips.txt).

A suite fails when its exit status is not 0, a test in it fails, no test in it ran, or its junit file is missing. The run
fails when a suite does, or when a test or suite was skipped for a reason that is not allowed. An expected failure counts
as a skip.
"""

from __future__ import annotations

import ast
import contextlib
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path


@dataclass(frozen=True)
class Skip:
    test: str
    reason: str


@dataclass(frozen=True)
class Allowed:
    """One line of the list: shell patterns for the test's id and for the reason."""

    test: str
    reason: str

    def covers(self, skip: Skip) -> bool:
        return fnmatchcase(skip.test, self.test) and fnmatchcase(skip.reason, self.reason)


@dataclass
class Suite:
    name: str
    seconds: float
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    # What is wrong with the suite as a whole, beyond single tests.
    problem: str = ""
    counts_tests: bool = True
    not_started: bool = False

    @property
    def result(self) -> str:
        if self.not_started:
            return "skipped"
        if self.failed:
            return f"FAILED: {len(self.failed)} failed"
        return f"FAILED: {self.problem}" if self.problem else "ok"

    @property
    def red(self) -> bool:
        return bool(self.failed or self.problem)


def read_suites(lines: Iterable[str]) -> list[Suite]:
    return [read_suite(*line.split("\t")) for line in map(str.strip, lines) if line]


def read_suite(name: str, seconds: str, status: str, results: str) -> Suite:
    suite = Suite(name, float(seconds))
    if results.startswith("skip:"):
        suite.not_started = True
        suite.skipped.append(Skip(f"suite:{name}", results.removeprefix("skip:").strip()))
        return suite
    if status != "0":
        suite.problem = f"exit {status}" + (" (over its time limit)" if status in ("124", "137") else "")
    if results == "-":
        suite.counts_tests = False
        return suite
    try:
        cases = list(ET.parse(results).iter("testcase"))
    except (OSError, ET.ParseError) as e:
        suite.problem = ", ".join(filter(None, [suite.problem, f"no test results ({e})"]))
        return suite
    for case in cases:
        sort_case(case, suite)
    if not suite.passed and not suite.failed:
        suite.problem = ", ".join(filter(None, ["no test ran", suite.problem]))
    return suite


def sort_case(case: ET.Element, suite: Suite) -> None:
    skipped = case.find("skipped")
    if case.find("failure") is not None or case.find("error") is not None:
        suite.failed.append(test_id(case))
    elif skipped is not None:
        suite.skipped.append(Skip(test_id(case), skip_reason(skipped)))
    else:
        suite.passed += 1


def skip_reason(skipped: ET.Element) -> str:
    message = skipped.get("message") or "no reason given"
    if message == "collection skipped":
        # A module skipped whole: the text is the repr of (file, line, "Skipped: reason").
        with contextlib.suppress(ValueError, SyntaxError, IndexError, TypeError):
            message = str(ast.literal_eval(skipped.text or "")[2]).removeprefix("Skipped: ")
    return ("xfail: " if skipped.get("type") == "pytest.xfail" else "") + message


def test_id(case: ET.Element) -> str:
    """tests/service/test_text.py::TestStop::test_x[a-b], from junit's file (family xunit1), classname and name."""
    file, classname, name = (case.get(key) or "" for key in ("file", "classname", "name"))
    module = file.removesuffix(".py").replace("/", ".")
    if not classname:
        return file or name
    within = classname.removeprefix(module).strip(".")
    return "::".join(filter(None, [file or classname, within if file else "", name]))


def read_allowed(lines: Iterable[str]) -> list[Allowed]:
    """Raises ValueError for a line that is not `test | reason`."""
    entries = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        test, bar, reason = (part.strip() for part in line.partition(" | "))
        if not (test and bar and reason):
            raise ValueError(
                f"allowed skips, line {number}: {line!r} is not of the form: TEST PATTERN | REASON PATTERN"
            )
        entries.append(Allowed(test, reason))
    return entries


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * w for w in widths], *rows]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def suites_table(suites: Sequence[Suite]) -> str:
    def row(s: Suite) -> list[str]:
        counts = [str(s.passed), str(len(s.skipped))] if s.counts_tests and not s.not_started else ["-", "-"]
        return [s.name, f"{s.seconds:.0f}", *counts, s.result]

    return table(["suite", "seconds", "passed", "skipped", "result"], [row(s) for s in suites])


def skips_table(suites: Sequence[Suite], allowed: Sequence[Allowed]) -> tuple[str, int]:
    """The table, and how many of the skips in it are not allowed. Equal reasons of one file share a row."""
    rows: dict[tuple[str, str, str, str], int] = {}
    unlisted = 0
    for suite in suites:
        for skip in suite.skipped:
            known = any(entry.covers(skip) for entry in allowed)
            unlisted += not known
            where = skip.test.partition("::")[0] if known else skip.test
            key = (suite.name, where, "yes" if known else "NO", skip.reason)
            rows[key] = rows.get(key, 0) + 1
    cells = [[suite, str(n), where, ok, reason] for (suite, where, ok, reason), n in rows.items()]
    return table(["suite", "skips", "where", "allowed", "reason"], cells) if cells else "no skips", unlisted


def report(suites: Sequence[Suite], allowed: Sequence[Allowed]) -> tuple[str, bool]:
    """The text to print, and whether the run is green."""
    skips, unlisted = skips_table(suites, allowed)
    every_skip = [skip for suite in suites for skip in suite.skipped]
    unused = [a for a in allowed if not any(a.covers(skip) for skip in every_skip)]
    failed = sum(len(s.failed) or s.red for s in suites) + unlisted
    nothing = not any(s.passed for s in suites)
    parts = [suites_table(suites), skips]
    parts += ["\n".join(f"failed: {s.name}: {test}" for s in suites for test in s.failed)]
    parts += ["\n".join(f"allowed skip that did not happen here: {a.test} | {a.reason}" for a in unused)]
    if unlisted:
        parts += [f"{unlisted} skipped for a reason that is not in .ci/allowed_skips.txt: counted as failed"]
    if nothing:
        parts += ["no test passed in any suite: the run fails"]
    parts += [
        f"{sum(s.passed for s in suites)} passed, {failed} failed, {len(every_skip) - unlisted} skipped"
    ]
    return "\n\n".join(filter(None, parts)), not failed and not nothing


def main(arguments: Sequence[str]) -> int:
    suites_file, allowed_file = map(Path, arguments)
    suites = read_suites(suites_file.read_text(encoding="utf-8").splitlines())
    allowed = read_allowed(allowed_file.read_text(encoding="utf-8").splitlines())
    text, green = report(suites, allowed)
    print(text)
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
