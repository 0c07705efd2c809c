"""The kernels between a layer's GEMMs and those that read logits for the three RDNA chips: compiled within their resources, and run in the emulator."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from rdna_cases import HERE, case_id, needs_emulator, needs_triton, results_by_id

pytestmark = needs_triton

CHIPS = ("gfx1100", "gfx1151", "gfx1201")
REVERSED = {"wave_order": "rev", "vgpr_poison": 255}
SHUFFLED = {"wave_order": "rand", "quantum": 5, "vgpr_poison": 255}

# id -> the case without chip and type. heads: (query heads, key-value heads, head dimension).
SHAPES: dict[str, dict[str, Any]] = {
    "decode": {
        "kernel": "attention",
        "heads": (8, 2, 64),
        "spans": [(1, 50), (1, 1), (1, 97)],
        "kv_splits": 3,
    },
    "decode-unsplit": {"kernel": "attention", "heads": (4, 4, 32), "spans": [(1, 40)], "kv_splits": 1},
    "few-rows": {"kernel": "attention", "heads": (6, 2, 64), "spans": [(5, 60), (1, 33)], "kv_splits": 2},
    "prefill": {"kernel": "attention", "heads": (4, 2, 64), "spans": [(24, 24), (3, 41)]},
    "prefix-128": {"kernel": "attention", "heads": (2, 1, 128), "spans": [(20, 53)]},
    "window-cap": {
        "kernel": "attention",
        "heads": (2, 1, 64),
        "spans": [(18, 70), (1, 80)],
        "window": 21,
        "softcap": 3.0,
    },
    "head-256": {"kernel": "attention", "heads": (2, 1, 256), "spans": [(1, 40), (1, 20)], "kv_splits": 2},
    "parts": {"kernel": "add_norm", "shape": (3, 576), "splits": 3},
    "normed": {"kernel": "add_norm", "shape": (2, 1024), "norm_x": True},
    "qk-norm": {"kernel": "write", "heads": (4, 2, 128), "rows": 3, "norm": True, "splits": 5},
    "no-norm": {"kernel": "write", "heads": (3, 1, 96), "rows": 5},
    "halves": {"kernel": "gate", "shape": (3, 600), "splits": 2},
    "interleaved": {"kernel": "gate", "shape": (2, 520), "interleaved": True, "activation": "gelu_tanh"},
    **{
        f"csrc-{m}-{gate}": {
            "kernel": "csrc",
            "symmetric": m == 2,
            "g": 64,
            "m": m,
            "n": 80,
            "k": 512,
            "gate": gate,
            "bias": m != 2,
            "plan": {"splits": splits},
        }
        for m, gate, splits in ((1, "silu", 1), (2, "gelu_tanh", 2), (5, "silu", 2))
    },
    "in-gemm": {
        "kernel": "skinny_gated",
        "symmetric": False,
        "g": 64,
        "m": 5,
        "n": 144,
        "k": 256,
        "bias": True,
    },
    "in-gemm-gelu": {
        "kernel": "skinny_gated",
        "symmetric": True,
        "g": 32,
        "m": 20,
        "n": 40,
        "k": 128,
        "activation": "gelu_tanh",
    },
    "best": {"kernel": "best", "shape": (3, 4999)},
    "best-inf": {"kernel": "best", "shape": (2, 70), "last": float("-inf")},
    "rescored": {"kernel": "rescored", "shape": (2, 2999), "count": 32, "k": 96},
    "rescored-few": {"kernel": "rescored", "shape": (3, 100), "count": 5, "k": 1100},
}

# Real sizes, compiled for every chip.
REAL: dict[str, dict[str, Any]] = {
    **{
        f"{rows}x{kv_len}-{heads}-{kv_heads}-{dim}": {
            "kernel": "attention",
            "heads": (heads, kv_heads, dim),
            "spans": [(rows, kv_len)],
        }
        for heads, kv_heads, dim in ((32, 8, 128), (9, 3, 64), (8, 4, 256))
        for rows, kv_len in ((1, 64), (16, 64), (64, 64))
    },
    "window": {
        "kernel": "attention",
        "heads": (8, 4, 256),
        "spans": [(1, 64)],
        "window": 32,
        "softcap": 50.0,
    },
    "4096": {"kernel": "add_norm", "shape": (1, 4096), "splits": 8},
    "5376-normed": {"kernel": "add_norm", "shape": (1, 5376), "splits": 4, "norm_x": True},
    "8b": {"kernel": "write", "heads": (32, 8, 128), "rows": 1, "norm": True, "splits": 8},
    "12288": {"kernel": "gate", "shape": (1, 12288), "splits": 2},
    "151936": {"kernel": "best", "shape": (1, 151936)},
    "151936x32": {"kernel": "rescored", "shape": (1, 151936), "count": 32, "k": 64},
    "262144x32": {"kernel": "rescored", "shape": (2, 262144), "count": 32, "k": 64},
}


def _cases(shapes: dict[str, dict[str, Any]], run: bool) -> list[dict[str, Any]]:
    cases = []
    for i, (name, shape) in enumerate(shapes.items()):
        # Run: one chip and type each, in turn; compile only: all chips.
        for j in (i,) if run else range(3):
            dtype = ("fp16", "bf16")[(i + j) % 2] if run else "bf16"
            schedule = {"schedule": (REVERSED, SHUFFLED)[i % 2]} if run else {}
            cases.append({"arch": CHIPS[j % 3], "dtype": dtype, "id": name, "run": run} | schedule | shape)
    if run:  # attention, the most intricate, on every chip
        for chip in CHIPS:
            for dtype in ("fp16", "bf16"):
                case = {"arch": chip, "dtype": dtype, "id": "decode-all-chips", "run": True} | SHAPES[
                    "decode"
                ]
                cases.append(case | {"schedule": SHUFFLED})
    return cases


RUN, COMPILED = _cases(SHAPES, True), _cases(REAL, False)

# id -> the case, and from what its kernels may load before they wait for the launch before them.
STEP = {"q_start_ptr", "kv_len_ptr", "table_ptr"}
DEPENDENT: dict[str, tuple[dict[str, Any], set[str]]] = {
    "decode": (SHAPES["decode"], STEP),
    "prefill": (SHAPES["prefill"], STEP),
    "prefill-unsplit": (SHAPES["prefill"] | {"kv_splits": 1}, STEP - {"table_ptr"}),
    "parts": (SHAPES["parts"], {"weight_ptr"}),
    "normed": (SHAPES["normed"], {"weight_ptr", "x_weight_ptr"}),
    "qk-norm": (SHAPES["qk-norm"], {"norm_ptr", "angles_ptr", "position_ptr", "slot_ptr"}),
    "no-norm": (SHAPES["no-norm"], {"angles_ptr", "position_ptr", "slot_ptr"}),
    "halves": (SHAPES["halves"], set()),
    "in-gemm": (SHAPES["in-gemm"], set()),
    "best": (SHAPES["best"], set()),
    "rescored": (SHAPES["rescored"], set()),
    "split": (
        {"kernel": "skinny", "symmetric": True, "g": 64, "m": 40, "n": 64, "k": 512}
        | {"tile": {"block_m": 16, "block_n": 64, "block_k": 64, "num_warps": 4, "split_k": 4}},
        set(),
    ),
}


@pytest.fixture(scope="module")
def executed() -> dict[str, dict[str, Any]]:
    return results_by_id(RUN)


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    return results_by_id(COMPILED)


@pytest.fixture(scope="module")
def dependent() -> dict[str, dict[str, Any]]:
    cases = [{"arch": "sm_90", "dtype": "bf16", "id": name} | case for name, (case, _) in DEPENDENT.items()]
    return dict(zip(DEPENDENT, results_by_id(cases).values(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", DEPENDENT)
def test_a_dependent_launch_waits_before_it_touches_what_others_write(
    name: str, dependent: dict[str, dict[str, Any]]
):
    assert "error" not in dependent[name], dependent[name]["error"]
    seen: set[str] = set()
    for launch in dependent[name]["launches"]:
        first, *others, last = launch["until_wait"]
        assert (first, last) == ("next", "wait"), launch["until_wait"]
        assert set(others) <= {f"load {argument}" for argument in DEPENDENT[name][1]}, launch["until_wait"]
        seen |= set(others)
    assert len(seen) == len(DEPENDENT[name][1])


WITHOUT_CUDA = """
import sys
import triton.language.extra

sys.modules["triton.language.extra.cuda"] = None  # importing it raises ImportError
import rdna_layer
from nybble.kernels import dependent

assert dependent.gdc_wait is None
case = {"arch": "gfx1151", "kernel": "add_norm", "dtype": "bf16", "shape": (3, 576), "splits": 3}
print([launch.kernel for launch in rdna_layer.add_norm(case)[2]])
"""


@pytest.mark.slow
def test_a_triton_without_nvidias_part_compiles_for_rdna():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_CUDA], cwd=HERE, env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "['add_rms_norm_kernel']", done.stderr[-2000:]


@needs_emulator
@pytest.mark.parametrize("case", RUN, ids=case_id)
def test_matches_the_reference(case: dict[str, Any], executed: dict[str, dict[str, Any]]):
    result = executed[case_id(case)]
    assert "error" not in result, result["error"]
    assert result["close"], f"worst {result['worst']:.3g}, rms {result['rms']:.3g}"
    assert result["unreplicated"] == 0, "WMMA operands differ between half waves"


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED, ids=case_id)
def test_fits(case: dict[str, Any], compiled: dict[str, dict[str, Any]]):
    """No scratch, no spills, at least 6 waves a SIMD (256 registers), LDS for two workgroups a WGP."""
    result = compiled[case_id(case)]
    assert "error" not in result, result["error"]
    for launch in result["launches"]:
        assert launch["scratch_bytes"] == 0 and launch["spills"] == 0, launch
        assert launch["registers"] <= 256 and launch["lds_bytes"] <= 32768, launch
