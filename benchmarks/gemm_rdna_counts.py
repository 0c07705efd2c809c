"""Executed instructions per WMMA of the RDNA GEMM kernels, counted by running their machine code, kept with its hash.

    python benchmarks/gemm_rdna_counts.py --write     run every tile in the emulator and record this Triton's counts
    python benchmarks/gemm_rdna_counts.py --check     recompile and compare hashes: exit 1 when a count is stale

--write needs RDNA_TINYGRAD and clang-22 (see tests/rdna), --check triton only. Counts belong to one Triton version and
are filed under it; --check of a version never recorded exits 3.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rdna_counts import Counts, of_launch

from nybble.kernels.tiles import rows_for

RESULTS = Path(__file__).parent / "results" / "rdna_gemm.json"
K, LONG_K = 512, 1536


def cases() -> list[dict[str, Any]]:
    """One workgroup of every tile, type and format; the other group sizes on gfx1151's own tiles."""
    found = []
    for arch in ("gfx1151", "gfx1100", "gfx1201"):
        for kernel in ("skinny_rdna", "skinny"):
            if kernel == "skinny" and arch != "gfx1151":
                continue
            for tile in dict.fromkeys(row.tile for row in rows_for(arch, kernel)):
                groups = (128, 64, 32) if (arch, kernel) == ("gfx1151", "skinny_rdna") else (128,)
                for g in groups:
                    for dtype in ("fp16", "bf16"):
                        for symmetric in (True, False):
                            found.append(_case(arch, kernel, asdict(tile), g, dtype, symmetric))
    return found


def _case(
    arch: str, kernel: str, tile: dict[str, Any], g: int, dtype: str, symmetric: bool
) -> dict[str, Any]:
    tile = tile | {"block_k": min(tile["block_k"], g)}
    shape = {"m": tile["block_m"], "n": tile["block_n"], "k": K}
    return {
        "arch": arch,
        "kernel": kernel,
        "tile": tile,
        "g": g,
        "dtype": dtype,
        "symmetric": symmetric,
        **shape,
    }


def per_wmma(case: dict[str, Any], result: dict[str, Any]) -> dict[str, int]:
    """Counts of the first launch, with the WMMAs the product itself needs."""
    useful = case["m"] // 16 * (case["n"] // 16) * (case["k"] // 16)
    return {"useful": useful, **result["counts"][0]}


def record(case: dict[str, Any], short: dict[str, Any], long: dict[str, Any]) -> dict[str, Any]:
    """One row of the results file."""
    a, b = per_wmma(case, short), per_wmma(longer(case), long)
    return {
        **{key: case[key] for key in ("arch", "kernel", "dtype", "symmetric", "g")},
        "tile": case["tile"],
        "valu_per_wmma": round(a["valu"] / a["useful"], 2),
        "steady_valu_per_wmma": round((b["valu"] - a["valu"]) / (b["useful"] - a["useful"]), 2),
        "lds_per_wmma": round(a["lds"] / a["useful"], 2),
        "all_per_wmma": round(a["all"] / a["useful"], 2),
        "executed": a,
        **of_launch(short),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'arch':9}{'kernel':13}{'tile':>16}{'type':>6}{'sym':>6}{'G':>5}{'VALU':>8}{'steady':>8}{'LDS':>7}{'all':>7}{'VGPR':>6}"
    ]
    for r in rows:
        t = r["tile"]
        name = f"{t['block_m']}x{t['block_n']}x{t['block_k']}/{t['num_warps']}"
        lines.append(
            f"{r['arch']:9}{r['kernel']:13}{name:>16}{r['dtype']:>6}{r['symmetric']!s:>6}{r['g']:5}{r['valu_per_wmma']:8}"
            f"{r['steady_valu_per_wmma']:8}{r['lds_per_wmma']:7}{r['all_per_wmma']:7}{r['registers']:6}"
        )
    return "\n".join(lines)


def longer(case: dict[str, Any]) -> dict[str, Any]:
    return case | {"k": LONG_K}


COUNTS = Counts(
    path=RESULTS,
    compiler="triton",
    version=lambda: version("triton"),
    about="Executed wave instructions of one workgroup at K=512, per 16x16x16 WMMA the product needs; steady: the loop "
    "alone, from K=512 to 1536. Every run matched the float32 reference. By python benchmarks/gemm_rdna_counts.py.",
    cases=cases,
    longer=longer,
    record=record,
    identity=lambda case: {
        name: case[name] for name in ("arch", "kernel", "dtype", "symmetric", "g", "tile")
    },
    table=table,
)

if __name__ == "__main__":
    sys.exit(COUNTS.main(__doc__))
