"""The recorded instruction counts: within budget, and still those of the code."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from rdna_cases import needs_triton

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RECORDED: dict[str, list[dict[str, Any]]] = json.loads(
    (BENCHMARKS / "results" / "rdna_gemm.json").read_text()
)["triton"]

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
