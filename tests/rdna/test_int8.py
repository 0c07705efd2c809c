"""The int8 GEMM for the three RDNA chips: compiled within their resources, and run in the emulator."""

from itertools import product
from typing import Any

import pytest
from rdna_cases import case_id, needs_emulator, needs_triton, results_by_id

pytestmark = needs_triton

CHIPS = ("gfx1100", "gfx1151", "gfx1201")
SHUFFLED = {"wave_order": "rand", "quantum": 3, "vgpr_poison": 255}


def _case(arch: str, dtype: str, m: int, n: int, k: int, **more: Any) -> dict[str, Any]:
    shape = {"m": m, "n": n, "k": k}
    return {"arch": arch, "kernel": "int8", "dtype": dtype, "symmetric": True, "g": k} | shape | more


# Every tile; K that a tile's step divides, that only a smaller one does, and that none does.
COMPILED = [
    _case(arch, dtype, m, 256, k)
    for arch, dtype, m, k in product(CHIPS, ("fp16", "bf16"), (1, 32, 64, 128), (512, 576, 520))
]
RUN = [
    _case(arch, ("fp16", "bf16")[(i + j) % 2], m, n, k, run=True, schedule=SHUFFLED)
    for i, arch in enumerate(CHIPS)
    for j, (m, n, k) in enumerate([(1, 40, 576), (17, 72, 256), (3, 65, 104)])
]


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    return results_by_id(COMPILED)


@pytest.fixture(scope="module")
def executed() -> dict[str, dict[str, Any]]:
    return results_by_id(RUN)


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED, ids=case_id)
def test_fits(case: dict[str, Any], compiled: dict[str, dict[str, Any]]):
    result = compiled[case_id(case)]
    assert "error" not in result, result["error"]
    (launch,) = result["launches"]
    assert launch["scratch_bytes"] == 0 and launch["spills"] == 0, launch
    assert launch["registers"] <= 256 and launch["lds_bytes"] <= 65536, launch


@needs_emulator
@pytest.mark.parametrize("case", RUN, ids=case_id)
def test_matches_the_reference(case: dict[str, Any], executed: dict[str, dict[str, Any]]):
    result = executed[case_id(case)]
    assert "error" not in result, result["error"]
    assert result["close"], f"worst {result['worst']:.3g}, rms {result['rms']:.3g}"
    assert sum(c["wmma"] for c in result["counts"]) > 0, "no matrix instruction ran"
