"""Counts of executed RDNA instructions, kept with the hash of the code they belong to: writing and checking them.

Counts belong to one version of the compiler and are filed under it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "rdna"))

from rdna_cases import run_cases  # noqa: E402

NEVER_RECORDED = 3
Case = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Counts:
    """One file of counts.

    compiler, version  what they depend on: "triton", and which one is here
    about              the file's own words
    cases              what is counted
    longer             the same case with a larger K: the difference of the two is the steady state
    record             (case, its result, the longer one's) -> a row; identity: the fields of a row that name its case
    table              rows for people
    """

    path: Path
    compiler: str
    version: Callable[[], str]
    about: str
    cases: Callable[[], list[Case]]
    longer: Callable[[Case], Case]
    record: Callable[[Case, Row, Row], Row]
    identity: Callable[[Case], Row]
    table: Callable[[list[Row]], str]

    def main(self, description: str | None) -> int:
        """--write or --check; the exit code."""
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        mode = parser.add_mutually_exclusive_group(required=True)
        mode.add_argument("--write", action="store_true")
        mode.add_argument("--check", action="store_true")
        return self.write() if parser.parse_args().write else self.check()

    def write(self) -> int:
        wanted = self.cases()
        runs = [variant | {"run": True} for case in wanted for variant in (case, self.longer(case))]
        results = run_cases(runs)
        for run, result in zip(runs, results, strict=True):
            if "error" in result or not result["close"]:
                raise RuntimeError(f"{run}: {result.get('error') or result}")
        rows = [self.record(case, *results[2 * i : 2 * i + 2]) for i, case in enumerate(wanted)]
        content = json.loads(self.path.read_text()) if self.path.exists() else {}
        content["about"] = self.about
        content.setdefault(self.compiler, {})[self.version()] = rows
        self.path.write_text(json.dumps(content, indent=1) + "\n")
        print(self.table(rows))
        return 0

    def check(self) -> int:
        version = self.version()
        recorded = json.loads(self.path.read_text())[self.compiler].get(version)
        if recorded is None:
            print(f"no counts recorded for {self.compiler} {version}: run --write")
            return NEVER_RECORDED
        wanted = self.cases()
        names = list(self.identity(wanted[0]))
        known = {_key({name: row[name] for name in names}): row["code_sha256"] for row in recorded}
        stale = []
        for case, result in zip(wanted, run_cases(wanted), strict=True):
            key = _key(self.identity(case))
            found = result["launches"][0]["code_sha256"] if "launches" in result else result["error"]
            if known.pop(key, None) != found:
                stale.append(key)
        stale += [f"no such case any more: {key}" for key in known]
        for line in stale:
            print("stale:", line)
        print(f"{len(wanted)} code objects, {len(stale)} counts stale ({self.compiler} {version})")
        return 1 if stale else 0


def of_launch(result: Row) -> Row:
    """What every row ends with: the error, and the code object's resources and hash."""
    launch = result["launches"][0]
    return {
        "rms_error": float(f"{result['rms']:.3g}"),
        **{key: launch[key] for key in ("registers", "scratch_bytes", "lds_bytes", "code_sha256")},
    }


def _key(identity: Row) -> str:
    return json.dumps(identity, sort_keys=True)
