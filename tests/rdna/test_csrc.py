"""csrc's kernel as RDNA machine code: compiled by clang for chips that are not there, and run in the emulator."""

from itertools import product
from typing import Any

import pytest
import torch
from rdna_cases import case_id, needs_clang, needs_emulator, needs_triton, results_by_id

from nybble.kernels.code_object import CodeObject
from nybble.kernels.linear import skinny
from nybble.kernels.native import compile_offline
from nybble.kernels.target import Target

ARCHES = ("gfx1100", "gfx1151", "gfx1201")

# Registers a lane may use, by engine and rows of w. RDNA has 1536 for each lane of a SIMD: 160 leave 9 waves, 256 leave 6.
REGISTERS = {("DotRows", 16): 176, ("WmmaTile", 32): 168, ("WmmaTile", 64): 256}
LDS_BYTES = 32 * 1024  # two blocks a CU
# Scalar registers kept in lanes of vector registers, which the loop would read back by vector instructions.
SCALAR_SPILLS = 0


def _programs() -> list[Any]:
    found = []
    for arch, dtype, g, symmetric in product(
        ARCHES, (torch.float16, torch.bfloat16), (32, 64, 128), (True, False)
    ):
        target = Target("rocm", arch, "", 0, 65536)
        for program in skinny.programs_for(target, dtype, g, symmetric, [dtype]):
            found.append(pytest.param(arch, program, id=f"{arch}-{'-'.join(program.defines)}"))
    # scales of another type than the activations
    target = Target("rocm", "gfx1151", "", 0, 65536)
    for scales in (torch.float16, torch.float32):
        for program in skinny.programs_for(target, torch.bfloat16, 128, True, [scales]):
            found.append(pytest.param("gfx1151", program, id=f"gfx1151-{'-'.join(program.defines)}"))
    return found


@pytest.mark.slow
@needs_clang
@pytest.mark.parametrize(("arch", "program"), _programs())
def test_fits(arch, program):
    defines = dict(d.removeprefix("NYBBLE_").split("=") for d in program.defines)
    engine, rows, m, waves = defines["ENGINE"], *(int(defines[name]) for name in ("ROWS", "M", "WAVES"))
    found = CodeObject(compile_offline(program, arch)).kernel(program.entry).meta
    assert found[".private_segment_fixed_size"] == 0, "scratch"
    assert found.get(".vgpr_spill_count", 0) == 0
    assert found.get(".sgpr_spill_count", 0) <= SCALAR_SPILLS
    assert found[".vgpr_count"] <= REGISTERS[engine, rows]
    assert found[".group_segment_fixed_size"] == 0, "LDS is all dynamic"
    step, stages = int(defines["STEP"]), int(defines["STAGES"])
    plan = skinny.Plan(engine, m, rows, waves, step, stages)
    assert plan.shared_bytes(4096, int(defines["GROUP"]), 2, defines["ZEROS"] == "1") <= LDS_BYTES


SHUFFLED = {"wave_order": "rand", "quantum": 3, "vgpr_poison": 255}
REVERSED = {"wave_order": "rev", "vgpr_poison": 255}
PLAIN: dict[str, Any] = {"vgpr_poison": 255}


def _case(
    arch: str, dtype: str, symmetric: bool, g: int, shape: tuple[int, int, int], **more: Any
) -> dict[str, Any]:
    m, n, k = shape
    case = {"arch": arch, "kernel": "csrc", "dtype": dtype, "symmetric": symmetric, "g": g}
    return case | {"m": m, "n": n, "k": k, "run": True} | more


def _cases() -> list[dict[str, Any]]:
    cases = []
    formats = list(product(("fp16", "bf16"), (True, False)))
    # every type, format and group size; one row to a whole tile; ragged N, tails of K, at the tensors' ends
    for i, (dtype, symmetric) in enumerate(formats):
        for j, (m, g) in enumerate([(1, 32), (2, 64), (1, 128), (3, 32), (9, 64), (16, 128)]):
            n, k = [(8, 1056), (24, 1984), (40, 1152), (72, 608), (8, 576), (136, 640)][j]
            arch = ARCHES[(i + j) % 3]
            schedule = (SHUFFLED, REVERSED, PLAIN)[(i + j) % 3]
            cases.append(
                _case(arch, dtype, symmetric, g, (m, n, k), bias=bool((i + j) % 2), schedule=schedule)
            )
    for i, arch in enumerate(ARCHES):
        # K split between blocks; N that nothing divides; rows off gfx1151's stride cliff; scales of another type
        cases.append(_case(arch, "fp16", True, 32, (2, 5, 2080), plan={"splits": 2}, schedule=SHUFFLED))
        cases.append(_case(arch, "bf16", False, 64, (7, 40, 1088), plan={"splits": 3}, schedule=REVERSED))
        cases.append(_case(arch, "bf16", True, 128, (1, 33, 2048), units=1, schedule=SHUFFLED, bias=True))
        cases.append(_case(arch, "fp16", False, 128, (16, 64, 2048), units=1, schedule=SHUFFLED))
        cases.append(
            _case(
                arch,
                "bf16",
                bool(i % 2),
                32,
                (1 + 4 * i, 48, 1024),
                units=1,
                scales="fp16",
                plan={"rows": 16} if i == 0 else {"rows": 64},
                schedule=REVERSED,
            )
        )
    return cases


CASES = _cases()


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    return results_by_id(CASES)


@needs_triton
@needs_emulator
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_matches_the_reference(case: dict[str, Any], results: dict[str, dict[str, Any]]):
    result = results[case_id(case)]
    assert "error" not in result, result["error"]
    assert result["close"], f"worst {result['worst']:.3g}, rms {result['rms']:.3g}"
    assert result["unreplicated"] == 0, "WMMA operands differ between half waves"
    assert bool(sum(c["wmma"] for c in result["counts"])) == (case["m"] > 2)
