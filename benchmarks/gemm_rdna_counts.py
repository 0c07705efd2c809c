"""Executed instructions per WMMA of the RDNA GEMM kernels, counted by running their machine code, kept with its hash.

    python benchmarks/gemm_rdna_counts.py --write     run every tile in the emulator and record this Triton's counts
    python benchmarks/gemm_rdna_counts.py --check     recompile and compare hashes: exit 1 when a count is stale

--write needs RDNA_TINYGRAD and clang-22 (see tests/rdna), --check triton only. Counts belong to one Triton version and
are filed under it; --check of a version never recorded exits 3.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "rdna"))

from rdna_cases import run_cases  # noqa: E402

from nybble.kernels.tiles import rows_for  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "rdna_gemm.json"
K, LONG_K = 512, 1536
NEVER_RECORDED = 3


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
    for result in (short, long):
        if "error" in result or not result["close"]:
            raise RuntimeError(f"{case}: {result.get('error') or result}")
    a, b = per_wmma(case, short), per_wmma(case | {"k": LONG_K}, long)
    launch = short["launches"][0]
    return {
        **{key: case[key] for key in ("arch", "kernel", "dtype", "symmetric", "g")},
        "tile": case["tile"],
        "valu_per_wmma": round(a["valu"] / a["useful"], 2),
        "steady_valu_per_wmma": round((b["valu"] - a["valu"]) / (b["useful"] - a["useful"]), 2),
        "lds_per_wmma": round(a["lds"] / a["useful"], 2),
        "all_per_wmma": round(a["all"] / a["useful"], 2),
        "executed": a,
        "rms_error": float(f"{short['rms']:.3g}"),
        **{key: launch[key] for key in ("registers", "scratch_bytes", "lds_bytes", "code_sha256")},
    }


def write() -> int:
    wanted = cases()
    runs = [case | {"run": True, "k": k} for case in wanted for k in (K, LONG_K)]
    results = run_cases(runs)
    rows = [record(case, *results[2 * i : 2 * i + 2]) for i, case in enumerate(wanted)]
    content = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    content["about"] = (
        "Executed wave instructions of one workgroup at K=512, per 16x16x16 WMMA the product needs; steady: the loop "
        "alone, from K=512 to 1536. Every run matched the float32 reference. By python benchmarks/gemm_rdna_counts.py."
    )
    content.setdefault("triton", {})[version("triton")] = rows
    text = json.dumps(content, indent=1)
    RESULTS.write_text(text + "\n")
    print(table(rows))
    return 0


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


def check() -> int:
    installed = version("triton")
    recorded = json.loads(RESULTS.read_text())["triton"].get(installed)
    if recorded is None:
        print(f"no counts recorded for triton {installed}: run --write")
        return NEVER_RECORDED

    def key(row: dict[str, Any]) -> str:
        return json.dumps(
            [row[k] for k in ("arch", "kernel", "dtype", "symmetric", "g", "tile")], sort_keys=True
        )

    known = {key(r): r["code_sha256"] for r in recorded}
    wanted = cases()
    stale = []
    for case, result in zip(wanted, run_cases(wanted), strict=True):
        found = result["launches"][0]["code_sha256"] if "launches" in result else result["error"]
        if known.pop(key(case), None) != found:
            stale.append(key(case))
    stale += [f"no such tile any more: {k}" for k in known]
    for line in stale:
        print("stale:", line)
    print(f"{len(wanted)} code objects, {len(stale)} counts stale (triton {installed})")
    return 1 if stale else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true")
    mode.add_argument("--check", action="store_true")
    sys.exit(write() if parser.parse_args().write else check())
