"""The recorded instruction counts: within budget, and still those of the code."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from rdna_cases import needs_clang, needs_triton

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RECORDED: dict[str, list[dict[str, Any]]] = json.loads(
    (BENCHMARKS / "results" / "rdna_gemm.json").read_text()
)["triton"]
CSRC: dict[str, list[dict[str, Any]]] = json.loads((BENCHMARKS / "results" / "rdna_skinny.json").read_text())[
    "clang"
]

# Vector instructions per WMMA, whole kernel at K = 512 on gfx1151, G 128: (tile, type, symmetric) -> at most.
BUDGET = {
    ("large", "fp16", True): 3.5,
    ("large", "fp16", False): 3.5,
    ("large", "bf16", True): 5.6,
    ("large", "bf16", False): 6.0,
    ("M <= 16", "fp16", True): 12.5,
    ("M <= 16", "fp16", False): 12.5,
    ("M <= 16", "bf16", True): 13.0,
    ("M <= 16", "bf16", False): 13.0,
}


@pytest.mark.parametrize("key", BUDGET, ids=lambda k: f"{k[0]}-{k[1]}-{'sym' if k[2] else 'asym'}")
@pytest.mark.parametrize("triton_version", RECORDED)
def test_within_budget(triton_version: str, key: tuple[str, str, bool]):
    size, dtype, symmetric = key
    rows = [
        row
        for row in RECORDED[triton_version]
        if (row["arch"], row["kernel"], row["g"]) == ("gfx1151", "skinny_rdna", 128)
        and (row["dtype"], row["symmetric"]) == (dtype, symmetric)
        and (row["tile"]["block_m"] <= 16 if size == "M <= 16" else row["tile"]["block_m"] >= 128)
    ]
    assert rows
    for row in rows:
        assert row["valu_per_wmma"] <= BUDGET[key], row


@pytest.mark.parametrize("triton_version", RECORDED)
def test_no_scratch_and_every_product_on_the_matrix_unit(triton_version: str):
    for row in RECORDED[triton_version]:
        assert row["scratch_bytes"] == 0
        assert row["executed"]["wmma"] == row["executed"]["useful"]


@pytest.mark.slow
@needs_triton
def test_counts_belong_to_the_code():
    if version("triton") not in RECORDED:
        pytest.skip(f"no counts recorded for triton {version('triton')}, only for {', '.join(RECORDED)}")
    run = subprocess.run(
        [sys.executable, BENCHMARKS / "gemm_rdna_counts.py", "--check"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


# csrc's decode kernel on gfx1151, G 128, in the steady state. At one row: vector instructions per pair of weights and lane,
# of which and-or, shift and dot product alone are 2.25 (fp16) and 2.75 (bf16), were none dual. At 16 rows: weights per clock
# and SIMD; 215 GB/s is 1.85.
PER_PAIR = {("fp16", True): 2.3, ("fp16", False): 2.45, ("bf16", True): 2.9, ("bf16", False): 3.15}
WEIGHTS_PER_CLOCK = 3.7


@pytest.mark.parametrize("clang", CSRC)
def test_decode_within_budget(clang: str):
    rows = [r for r in CSRC[clang] if (r["arch"], r["g"]) == ("gfx1151", 128)]
    one_row = [r for r in rows if r["m"] == 1]
    assert {(r["dtype"], r["symmetric"]) for r in one_row} == set(PER_PAIR)
    for row in one_row:
        assert row["valu_per_pair"] <= PER_PAIR[row["dtype"], row["symmetric"]], row
    tiles = [r for r in rows if r["m"] == 16]
    assert len(tiles) == 8
    for row in tiles:
        assert row["weights_per_clock"] >= WEIGHTS_PER_CLOCK, row


@pytest.mark.parametrize("clang", CSRC)
def test_decode_keeps_no_scratch(clang: str):
    assert all(row["scratch_bytes"] == 0 for row in CSRC[clang])


@pytest.mark.slow
@needs_triton
@needs_clang
def test_decode_counts_belong_to_the_code():
    run = subprocess.run(
        [sys.executable, BENCHMARKS / "skinny_rdna_counts.py", "--check"], capture_output=True, text=True
    )
    if run.returncode == 3:
        pytest.skip(run.stdout.strip())
    assert run.returncode == 0, run.stdout + run.stderr
