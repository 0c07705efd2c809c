"""Every (kernel, tile, type) compiles for every target within its resources: no scratch, no spills, bounded registers."""

from dataclasses import asdict
from typing import Any

import pytest
from rdna_cases import case_id, needs_triton, results_by_id

from nybble.kernels.tiles import rows_for

pytestmark = needs_triton

ARCHES = ("gfx1100", "gfx1151", "gfx1201", "gfx942", "sm_90")
LDS_LIMIT = {"sm_90": 227 * 1024}
KIB_64 = 65536


def _cases() -> list[dict[str, Any]]:
    cases = []
    for arch in ARCHES:
        kernels = ("skinny_rdna", "skinny", "kn") if arch.startswith(("gfx11", "gfx12")) else ("skinny", "kn")
        for kernel in kernels:
            tiles = {row.tile: None for row in rows_for(arch, kernel)}
            for tile in tiles:
                for dtype in ("fp16", "bf16"):
                    for symmetric in (True, False):
                        cases.append(
                            {
                                "arch": arch,
                                "kernel": kernel,
                                "dtype": dtype,
                                "symmetric": symmetric,
                                "g": 128,
                                "m": tile.block_m,
                                "n": tile.block_n,
                                "k": 256,
                                "tile": asdict(tile),
                            }
                        )
    return cases


CASES = _cases()


def register_limit(case: dict[str, Any]) -> int:
    """Registers a lane may use. RDNA: 1536 a SIMD lane, so 128 leave 12 waves, 192 leave 8, 256 leave 6.

    CDNA: 512 a lane with accumulation registers counted in, 256 leave 2 waves. CUDA: 255 is the machine's own limit.
    """
    if case["arch"] == "sm_90":
        return 255
    if case["kernel"] == "skinny_rdna":
        block_m = case["tile"]["block_m"]
        return 128 if block_m <= 16 else 192 if block_m <= 32 else 240
    return 256


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    return results_by_id(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_fits(case: dict[str, Any], results: dict[str, dict[str, Any]]):
    result = results[case_id(case)]
    assert "error" not in result, result["error"]
    launch = result["launches"][0]
    assert launch["scratch_bytes"] == 0
    assert launch["spills"] == 0
    assert launch["lds_bytes"] <= LDS_LIMIT.get(case["arch"], KIB_64)
    assert launch["registers"] <= register_limit(case)
