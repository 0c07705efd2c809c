"""Executed instructions of csrc's decode kernel on RDNA, counted by running its machine code, kept with its hash.

    python benchmarks/skinny_rdna_counts.py --write     run every program in the emulator and record the counts
    python benchmarks/skinny_rdna_counts.py --check     recompile and compare hashes: exit 1 when a count is stale

--write needs RDNA_TINYGRAD and clang-22 (see tests/rdna), --check clang-22 only. Counts belong to one clang version and are
filed under it; --check of a version never recorded exits 3.

Two runs that differ in K alone give the steady state: the loop, with scales, zero points and addresses, without what comes
before and after. A dual instruction counts once. A lane's share of a block is rows * K / 32 weights.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

from rdna_counts import Counts, of_launch

RESULTS = Path(__file__).parent / "results" / "rdna_skinny.json"
WMMA_CLOCKS = 32  # of a SIMD, for one 16x16x16
# rows of x, rows of w (the plan's own), the two K: one step of each wave, and three
CASES = ((1, 16, 4096, 12288), (2, 16, 4096, 12288), (16, 32, 1024, 3072), (16, 64, 1024, 3072))


def cases() -> list[dict[str, Any]]:
    found = []
    for arch in ("gfx1151", "gfx1100", "gfx1201"):
        for g in (128, 32) if arch == "gfx1151" else (128,):
            for dtype, symmetric, (m, rows, k, _) in product(("fp16", "bf16"), (True, False), CASES):
                found.append(
                    {
                        "arch": arch,
                        "kernel": "csrc",
                        "dtype": dtype,
                        "symmetric": symmetric,
                        "g": g,
                        "m": m,
                        "n": rows,
                        "k": k,
                        "plan": {"rows": rows, "splits": 1},
                    }
                )
    return found


def longer(case: dict[str, Any]) -> dict[str, Any]:
    return case | {"k": next(long for m, rows, _, long in CASES if (m, rows) == (case["m"], case["n"]))}


def record(case: dict[str, Any], short: dict[str, Any], long: dict[str, Any]) -> dict[str, Any]:
    """One row of the results file."""
    loop = {name: long["counts"][0][name] - short["counts"][0][name] for name in short["counts"][0]}
    weights = case["n"] * (longer(case)["k"] - case["k"])
    return {
        **{key: case[key] for key in ("arch", "dtype", "symmetric", "g", "m")},
        "rows": case["n"],
        "valu_per_pair": round(loop["valu"] / (weights / 64), 3),
        "weights_per_clock": round(weights / (loop["valu"] + WMMA_CLOCKS * loop["wmma"]), 2),
        "loop": loop,
        **of_launch(short),
    }


def clang_version() -> str:
    run = subprocess.run(["clang++-22", "-dumpversion"], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'arch':9}{'type':>6}{'sym':>6}{'G':>5}{'M':>4}{'rows':>6}{'/pair':>8}{'w/clock':>9}{'VGPR':>6}"
    ]
    for r in rows:
        lines.append(
            f"{r['arch']:9}{r['dtype']:>6}{r['symmetric']!s:>6}{r['g']:5}{r['m']:4}{r['rows']:6}{r['valu_per_pair']:8}"
            f"{r['weights_per_clock']:9}{r['registers']:6}"
        )
    return "\n".join(lines)


COUNTS = Counts(
    path=RESULTS,
    compiler="clang",
    version=clang_version,
    about="Vector instructions (dot products included, a dual instruction once) per pair of weights and lane in the "
    "steady state, and weights per clock and SIMD with a WMMA at 32 clocks. Every run matched the float32 reference. By "
    "python benchmarks/skinny_rdna_counts.py.",
    cases=cases,
    longer=longer,
    record=record,
    identity=lambda case: (
        {name: case[name] for name in ("arch", "dtype", "symmetric", "g", "m")} | {"rows": case["n"]}
    ),
    table=table,
)

if __name__ == "__main__":
    sys.exit(COUNTS.main(__doc__))
