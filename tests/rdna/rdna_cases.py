"""Cases for `rdna_worker.py`, run in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
WORKER = HERE / "rdna_worker.py"


def run_cases(cases: list[dict[str, Any]], *, processes: int = 2) -> list[dict[str, Any]]:
    """Results of `rdna_worker.py` for the cases, in order; a worker that stops takes its error along."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    shares = [cases[i::processes] for i in range(processes)]
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER)],
            cwd=HERE,
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in shares
    ]
    for worker, share in zip(workers, shares, strict=True):
        assert worker.stdin is not None
        worker.stdin.write(json.dumps(share))
        worker.stdin.close()
        worker.stdin = None
    results: list[dict[str, Any]] = [{} for _ in cases]
    for i, (worker, share) in enumerate(zip(workers, shares, strict=True)):
        out, err = worker.communicate()
        lines = out.splitlines()
        for j in range(len(share)):
            result = json.loads(lines[j]) if j < len(lines) else {"error": err[-3000:] or "no result"}
            results[i + j * processes] = result
    return results


def results_by_id(cases: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """`run_cases`, by test id."""
    return dict(zip(map(case_id, cases), run_cases(cases), strict=True))


def case_id(case: dict[str, Any]) -> str:
    """Readable test id: the case's own, or one made of a GEMM's fields."""
    if "id" in case:
        return f"{case['arch']}-{case['kernel']}-{case['dtype']}-{case['id']}"
    tile = case.get("tile")
    parts = [
        case["arch"],
        case.get("kernel", "skinny_rdna"),
        case["dtype"],
        "sym" if case["symmetric"] else "asym",
        f"G{case['g']}",
        f"{case['m']}x{case['n']}x{case['k']}",
    ]
    if tile:
        parts.append("x".join(str(tile[b]) for b in ("block_m", "block_n", "block_k")))
    parts += [f"{k}={v}" for k, v in case.get("schedule", {}).items()]
    return "-".join(parts)


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
needs_clang = pytest.mark.skipif(shutil.which("clang++-22") is None, reason="clang++-22 is not on PATH")
needs_emulator = pytest.mark.skipif(
    not (os.environ.get("RDNA_TINYGRAD") and shutil.which("clang-22")),
    reason="RDNA_TINYGRAD is not set, or clang-22 is not on PATH: no RDNA emulator here",
)
