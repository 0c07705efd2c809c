"""The GEMM kernels as real RDNA machine code, run in the emulator against the float32 reference.

Guard pages stand around every tensor: an access past one is a fault. Wave order, preemption and poisoned registers shake
out missing barriers and unwritten registers.
"""

from typing import Any

import pytest
from rdna_cases import case_id, needs_emulator, needs_triton, results_by_id, run_cases

pytestmark = [needs_triton, needs_emulator]

SHUFFLED = {"wave_order": "rand", "quantum": 3, "vgpr_poison": 255}
REVERSED = {"wave_order": "rev", "vgpr_poison": 255}


def _case(
    arch: str, dtype: str, symmetric: bool, g: int, shape: tuple[int, int, int], **more: Any
) -> dict[str, Any]:
    m, n, k = shape
    case = {"arch": arch, "dtype": dtype, "symmetric": symmetric, "g": g, "m": m, "n": n, "k": k, "run": True}
    return case | more


def _cases() -> list[dict[str, Any]]:
    cases = []
    formats = [(d, s) for d in ("fp16", "bf16") for s in (True, False)]
    # every format, every way through the tile table, ragged in M and N, at the tensors' ends
    for i, (dtype, symmetric) in enumerate(formats):
        for j, (m, g) in enumerate([(1, 32), (6, 64), (17, 128), (40, 32), (130, 64), (96, 128)]):
            n = (8, 24, 136, 200, 72, 144)[j]
            arch = ("gfx1151", "gfx1100", "gfx1201")[(i + j) % 3]
            schedule = (SHUFFLED, REVERSED)[(i + j) % 2]
            cases.append(
                _case(arch, dtype, symmetric, g, (m, n, 384), bias=bool((i + j) % 2), schedule=schedule)
            )
    # N without zero points need not divide by 8; K % 128 groups of one step; rows on both stride cliffs; split K
    cases.append(_case("gfx1151", "fp16", True, 64, (3, 9, 576), bias=True, schedule=REVERSED))
    cases.append(_case("gfx1151", "bf16", True, 64, (5, 1, 192), schedule=SHUFFLED))
    cases.append(_case("gfx1151", "bf16", False, 128, (16, 40, 2048), bias=True, schedule=REVERSED))
    cases.append(_case("gfx1151", "fp16", False, 32, (70, 40, 2048), schedule=REVERSED))
    # the plain kernel, for builds without Gluon, and the [K, N/8] kernel
    for kernel in ("skinny", "kn"):
        for dtype, symmetric in formats:
            cases.append(
                _case(
                    "gfx1100",
                    dtype,
                    symmetric,
                    64,
                    (19, 72, 192),
                    bias=True,
                    kernel=kernel,
                    schedule=REVERSED,
                )
            )
    return cases


CASES = _cases()


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    return results_by_id(CASES)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_matches_the_reference(case: dict[str, Any], results: dict[str, dict[str, Any]]):
    result = results[case_id(case)]
    assert "error" not in result, result["error"]
    assert result["close"], f"worst {result['worst']:.3g}, rms {result['rms']:.3g}"
    assert result["unreplicated"] == 0, "WMMA operands differ between half waves"
    assert sum(c["wmma"] for c in result["counts"]) > 0, "no matrix instruction ran"


def test_an_access_past_a_tensor_is_a_fault():
    case = _case("gfx1151", "fp16", True, 128, (16, 128, 256), short_scales=True)
    (result,) = run_cases([case], processes=1)
    assert "memory fault" in result["error"]
    assert "buffer_load" in result["error"]
