"""csrc's decode kernel as nvrtc compiles it for CUDA, executed on this CPU, against the float32 reference."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from ptx_emulator import Fault, Kernel, Memory
from torch.nn.functional import gelu, silu
from weights import make_weight

from nybble.kernels.bench.problem import QWEN3_8B
from nybble.kernels.linear import skinny
from nybble.kernels.linear.reference import linear_reference
from nybble.kernels.native.compilers import Nvrtc
from nybble.kernels.native.libraries import LibraryNotFound
from nybble.kernels.native.program import Sources, csrc
from nybble.kernels.skinny_layout import SkinnyWeight, pack
from nybble.kernels.target import Target
from nybble.kernels.testing import assert_close

ARCH = "sm_90"
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
FORMATS = pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
GATES = {"silu": silu, "gelu_tanh": partial(gelu, approximate="tanh")}
GROUPS = pytest.mark.parametrize("g", [32, 64, 128])


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    try:
        return Nvrtc()
    except LibraryNotFound:
        pytest.skip("needs the library nvrtc: it is not installed")


def plan(
    m: int, rows: int = 16, waves: int = 2, splits: int = 1, step: int = 4, stages: int = 3
) -> skinny.Plan:
    return skinny.Plan("MmaTile", m, rows, waves, step, stages, splits)


def wide(
    m: int, rows: int = 32, waves: int = 2, splits: int = 1, step: int = 4, stages: int = 3, teams: int = 1
) -> skinny.Plan:
    return skinny.Plan("BlockTile", m, rows, waves, step, stages, splits, teams)


def warpgroups(
    m: int, rows: int = 64, waves: int = 4, splits: int = 1, step: int = 4, stages: int = 3, teams: int = 1
) -> skinny.Plan:
    return skinny.Plan("WarpgroupTile", m, rows, waves, step, stages, splits, teams)


def bits(t: torch.Tensor) -> np.ndarray:
    """All bytes between a tensor's first and last, those between its rows too."""
    flat = t.as_strided(((t.shape[0] - 1) * t.stride(0) + t.shape[1],), (1,)) if t.dim() == 2 else t
    return flat.view(torch.uint8).numpy()


def run(
    nvrtc: Nvrtc,
    plan: skinny.Plan,
    x: torch.Tensor,
    w: SkinnyWeight,
    bias: torch.Tensor | None = None,
    gate: str | None = None,
    order: str = "random",
    source: Sources | None = None,
) -> torch.Tensor:
    """y, from memory where nothing but the operands may be touched."""
    m, k = x.shape
    n = w.words.shape[0]
    zeros = w.zeros is not None
    program = plan.program(x.dtype, w.scales.dtype, w.group_size, zeros, gate)
    kernel = Kernel(nvrtc.ptx(program, source or csrc(), ARCH))
    memory = Memory()
    columns = n if gate is None else n // 2
    operands = [0 if t is None else memory.put(bits(t)) for t in (x, w.words, w.scales, w.zeros, bias)]
    y = memory.room(m * columns * 2)
    partial = memory.room(plan.partial_bytes(m, n))
    counters = memory.put(np.zeros(plan.blocks(n), np.uint32), writable=True)
    strides = [0 if t is None else t.stride(0) * t.element_size() for t in (x, w.words, w.scales, w.zeros)]
    kernel.launch(
        (plan.blocks(n), plan.splits),
        plan.waves * 32,
        [*operands, y, partial, counters, m, n, k, *strides, plan.splits],
        memory,
        plan.shared_bytes(k, w.group_size, w.scales.element_size(), zeros),
        order,
    )
    assert not memory.get(counters, [plan.blocks(n)], np.uint32).any(), "counters are 0 between calls"
    return torch.from_numpy(memory.get(y, (m, columns), np.int16)).view(x.dtype)


def problem(
    m: int,
    n: int,
    k: int,
    g: int,
    symmetric: bool,
    dtype: torch.dtype,
    scale_dtype: torch.dtype | None = None,
):
    weight = make_weight(n, k, g, symmetric, seed=n + k)
    gen = torch.Generator().manual_seed(m * k)
    x = (torch.randn(m, k, generator=gen) * torch.linspace(0.5, 2, k)).to(dtype)
    return weight, pack(weight, arch=ARCH, device=torch.device("cpu"), scale_dtype=scale_dtype or dtype), x


def agrees(
    nvrtc: Nvrtc, plan: skinny.Plan, n: int, k: int, g: int, symmetric: bool, dtype: torch.dtype, **more
) -> None:
    scale_dtype, gate = more.pop("scale_dtype", dtype), more.get("gate")
    weight, w, x = problem(more.pop("m", plan.m), n, k, g, symmetric, dtype, scale_dtype)
    bias = torch.linspace(-2, 2, n).to(dtype)
    want = linear_reference(x, replace(weight, scales=w.scales[:n]), bias)
    if gate is not None:
        want = GATES[gate](want[:, 0::2]) * want[:, 1::2]
    assert_close(run(nvrtc, plan, x, w, bias, **more), want.float(), dtype)


@DTYPES
@FORMATS
@GROUPS
@pytest.mark.parametrize("m", [1, 16])
def test_matches_the_reference(m, g, symmetric, dtype, nvrtc):
    agrees(nvrtc, plan(m), 40, 640, g, symmetric, dtype)


@DTYPES
@GROUPS
def test_up_to_eight_rows_a_last_step_past_k_and_parts_of_k(g, dtype, nvrtc):
    """Two tiles of rows of which the last is not full; two splits, whose blocks come in any order."""
    agrees(nvrtc, plan(8, rows=32, splits=2), 56, 9 * max(g, 64), g, False, dtype)


@pytest.mark.parametrize("g", [32, 64])
@pytest.mark.parametrize(
    "scale_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"]
)
def test_scales_of_every_type_whose_rows_begin_in_the_middle_of_a_word(scale_dtype, g, nvrtc):
    agrees(nvrtc, plan(4), 24, 9 * g, g, False, torch.bfloat16, scale_dtype=scale_dtype)


H200 = Target("cuda", "sm_90", "", 132, 232448)
CHOSEN = {
    (symmetric, g, skinny.plan_for(H200, m, n, k, g, 2, not symmetric))
    for symmetric, g in ((False, 32), (True, 128))
    for n, k in QWEN3_8B.values()
    for m in (1, 4, 8, 16)
}


@pytest.mark.slow
@pytest.mark.parametrize("symmetric, g, chosen", sorted(CHOSEN, key=str), ids=str)
def test_the_plans_of_a_large_model(symmetric, g, chosen, nvrtc):
    """Every wave has a step more than its ring has stages."""
    k = chosen.waves * (chosen.stages + 1) * chosen.step * 32
    agrees(nvrtc, chosen, chosen.rows + 8, k, g, symmetric, torch.bfloat16)


@DTYPES
@pytest.mark.parametrize("g", [32, 128])
@pytest.mark.parametrize("m, step, stages", [(1, 8, 3), (4, 4, 4), (16, 4, 2), (16, 8, 3)])
def test_steps_and_stages(m, step, stages, g, dtype, nvrtc):
    """More steps than stages; the last one past K."""
    agrees(nvrtc, plan(m, step=step, stages=stages), 24, 10 * step * 32 + 4 * 32, g, False, dtype)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_long_steps_of_short_groups(symmetric, nvrtc):
    """Scales of fp32, two reads a step; rows of scales that begin at no multiple of what a copy takes."""
    one = plan(8, rows=32, splits=2, step=8, stages=2)
    agrees(nvrtc, one, 40, 1056, 32, symmetric, torch.bfloat16, scale_dtype=torch.float32)
    agrees(nvrtc, one, 40, 1088, 32, symmetric, torch.bfloat16)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("splits", [1, 2])
def test_gates(splits, gate, nvrtc):
    agrees(nvrtc, plan(2, splits=splits), 24, 512, 32, False, torch.float16, gate=gate)


def test_the_plan_of_a_real_chip_needs_the_shared_memory_that_it_asks_for(nvrtc):
    """48 rows, 4 waves, and not a byte more than Plan.shared_bytes."""
    agrees(nvrtc, plan(16, rows=48, waves=4), 48, 1088, 32, False, torch.bfloat16)


def test_any_n_and_rows_farther_apart(nvrtc):
    dtype = torch.bfloat16
    weight, w, x = problem(3, 7, 320, 64, True, dtype)
    wide = torch.full((3, 384), float("nan"), dtype=dtype)
    wide[:, :320] = x
    want = linear_reference(x, replace(weight, scales=w.scales[:7]))
    assert_close(run(nvrtc, plan(4), wide[:, :320], w), want)


@DTYPES
@FORMATS
@GROUPS
@pytest.mark.parametrize("m, bucket", [(17, 32), (64, 64)])
def test_many_rows_match_the_reference(m, bucket, g, symmetric, dtype, nvrtc):
    """Two blocks of which the second is not full, and a last step past K; m rows of x where the code is for more."""
    agrees(nvrtc, wide(bucket), 40, 5 * max(g, 64), g, symmetric, dtype, m=m)


@pytest.mark.parametrize("g", [32, 128])
@pytest.mark.parametrize(
    "one, m",
    [
        (wide(16, rows=96, stages=2), 16),
        (wide(16, rows=96, waves=4, step=8, teams=2, stages=2), 13),
        (wide(16, rows=64, waves=4, step=16, teams=2, stages=2), 10),
        (wide(24, rows=64, waves=4, step=8), 24),
        (wide(32, rows=64, waves=4, teams=2), 32),
        (wide(48, rows=96, waves=4, splits=2, step=8, teams=2), 40),
        (wide(64, rows=64, waves=8, splits=3, step=8, teams=2, stages=2), 33),
    ],
    ids=str,
)
def test_teams_and_parts_of_k(one, m, g, nvrtc):
    """More steps than stages, any N without zero points; teams cut a group where its granules are more than a share."""
    agrees(nvrtc, one, 71 if g == 128 else 72, 1024 * one.splits + 128, g, g == 128, torch.bfloat16, m=m)


@DTYPES
@FORMATS
@GROUPS
@pytest.mark.parametrize("m, bucket", [(5, 8), (64, 64)])
def test_warpgroups_match_the_reference(m, bucket, g, symmetric, dtype, nvrtc):
    """Two blocks of which the second is not full, a last step past K, more steps than stages."""
    agrees(nvrtc, warpgroups(bucket), 72, 5 * 128 + max(g, 64), g, symmetric, dtype, m=m)


@pytest.mark.parametrize("g", [32, 128])
@pytest.mark.parametrize(
    "one, m",
    [
        (warpgroups(16, rows=128, stages=4), 16),
        (warpgroups(32, rows=192, waves=8, step=8, teams=2), 17),
        (warpgroups(64, rows=128, waves=8, splits=2, step=8), 40),
        (warpgroups(64, waves=8, splits=3, step=8, teams=2, stages=4), 33),
    ],
    ids=str,
)
def test_tiles_and_teams_of_warpgroups(one, m, g, nvrtc):
    agrees(nvrtc, one, 71 if g == 128 else 72, 1024 * one.splits + 128, g, g == 128, torch.bfloat16, m=m)


@pytest.mark.parametrize("m", [32, 64])
@pytest.mark.parametrize(
    "scale_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"]
)
def test_scales_of_every_type_for_many_rows(scale_dtype, m, nvrtc):
    for g in (32, 64):
        agrees(nvrtc, wide(m), 24, 9 * g, g, False, torch.float16, scale_dtype=scale_dtype)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("splits", [1, 2])
def test_gates_of_many_rows(splits, gate, nvrtc):
    agrees(nvrtc, wide(32, splits=splits), 24, 512, 32, False, torch.float16, gate=gate, m=19)


def test_many_rows_farther_apart(nvrtc):
    dtype = torch.bfloat16
    weight, w, x = problem(35, 7, 320, 64, True, dtype)
    apart = torch.full((35, 384), float("nan"), dtype=dtype)
    apart[:, :320] = x
    want = linear_reference(x, replace(weight, scales=w.scales[:7]))
    assert_close(run(nvrtc, wide(48), apart[:, :320], w), want)


def test_the_same_bits_of_many_rows_whatever_comes_first(nvrtc):
    _, w, x = problem(24, 40, 1024, 32, False, torch.bfloat16)
    one = wide(32, waves=4, splits=2, teams=2)
    first, *others = (run(nvrtc, one, x, w, order=order) for order in ("forward", "reversed", "random"))
    assert all(torch.equal(first, other) for other in others)


def test_large_means_do_not_drown_the_rest(nvrtc):
    """sum x is thousands of times what is left after the bias came off."""
    plans = (plan(8), plan(8, step=8), wide(8), wide(8, step=8))
    for dtype, one in product((torch.float16, torch.bfloat16), plans):
        weight, w, x = problem(8, 16, 640, 32, False, dtype)
        x = x + 100
        y = run(nvrtc, one, x, w)
        assert_close(y, linear_reference(x, replace(weight, scales=w.scales[:16])))


def test_what_is_cut_off_of_zero_points_adds_up_to_nothing(nvrtc):
    """Weights near their zero points, x all of one sign: over a large K any error of one sign would be seen, and is."""
    n, k = 16, 12288
    weight, _, x = problem(8, n, k, 32, False, torch.float16)
    gen = torch.Generator().manual_seed(1)
    zeros = weight.zeros.to(torch.int64)
    q = (zeros.repeat_interleave(32, 1) + torch.randint(-2, 3, (n, k), generator=gen)).clamp(0, 15)
    words = (q.reshape(n, k // 8, 8) << torch.arange(0, 32, 4)).sum(2)
    weight = replace(
        weight, q=(words - (words >> 31 << 32)).to(torch.int32), scales=torch.full((n, k // 32), 0.01)
    )
    w = pack(weight, arch=ARCH, device=torch.device("cpu"), scale_dtype=torch.float16)
    want = linear_reference(x + 10, replace(weight, scales=w.scales[:n]))
    one = plan(8, step=8, stages=2)
    assert_close(run(nvrtc, one, x + 10, w), want)
    with pytest.raises(AssertionError, match="worst"):
        cut = edited("staged_tile.h", "sum_of_t[c][2 + four], true)", "sum_of_t[c][2 + four], false)")
        assert_close(run(nvrtc, one, x + 10, w, source=cut), want)


def test_the_same_bits_whatever_comes_first(nvrtc):
    _, w, x = problem(4, 40, 1024, 32, False, torch.bfloat16)
    first, *others = (
        run(nvrtc, plan(4, splits=2), x, w, order=order) for order in ("forward", "reversed", "random")
    )
    assert all(torch.equal(first, other) for other in others)


# What is left out of a source, and what the emulator says of the code without it, if not that its numbers are wrong.
PLANTED = {
    "copies that are not waited for": (
        "mma_tile.h",
        "    for (int step = 0; step < steps; step++) {\n      wait_for_copies<STAGES - 2>();",
        "    for (int step = 0; step < steps; step++) {",
        "before the copy to it was waited for",
    ),
    "no barrier before the waves' sums": (
        "skinny_w4a16.cpp",
        "  engine.deposit(sums + wave * NYBBLE_M * NYBBLE_ROWS);\n  block_barrier();",
        "  engine.deposit(sums + wave * NYBBLE_M * NYBBLE_ROWS);",
        "another wave (wrote|used), with no barrier between",
    ),
    "a counter that is not put back": (
        "skinny_w4a16.h",
        "if (thread_index() == 0) p.counters[block_x()] = 0;",
        "",
        "counters are 0 between calls",
    ),
    "a row of x read that the call has not": (
        "mma_tile.h",
        "smaller(i * X_COPIED + copied_m, p.m - 1)",
        "(i * X_COPIED + copied_m)",
        "reads global memory that it may not",
    ),
    "another row's zero point": ("staged_tile.h", "at - 4 * g", "at - 4 - 4 * g", "worst"),
    "a stage overwritten while it is read": (
        "mma_tile.h",
        "fetch_w(step + STAGES - 1, last_stage);",
        "fetch_w(step + STAGES - 1, stage);",
        "before the copy to it was waited for",
    ),
    "the part of sum x that one multiplication loses": (
        "staged_tile.h",
        "low = value - high;",
        "low = 0;",
        "worst",
    ),
}


# Likewise, of the engine for many rows.
PLANTED_WIDE = {
    "no barrier in a step": (
        "block_tile.h",
        "show_to_warpgroups();\n      block_barrier();",
        "show_to_warpgroups();",
        "before the copy to it was waited for|another wave (wrote|used), with no barrier between",
    ),
    "copies that are not waited for": (
        "block_tile.h",
        "      wait_for_copies<AHEAD - 1>();\n      if (WARPGROUPS)",
        "      if (WARPGROUPS)",
        "before the copy to it was waited for",
    ),
    "no barrier before the sums": (
        "skinny_w4a16.cpp",
        "  engine.deposit(sums);\n  block_barrier();",
        "  engine.deposit(sums);",
        "another wave (wrote|used), with no barrier between",
    ),
    "a row of x read that the call has not": (
        "block_tile.h",
        "present && copied_m < p.m - i * X_COPIED",
        "present",
        "reads global memory that it may not",
    ),
    "a counter that is not put back": (
        "block_tile.h",
        "if (thread_index() == 0) p.counters[block_x()] = 0;",
        "",
        "counters are 0 between calls",
    ),
}


# And of what it does with the zero points of groups of 32.
PLANTED_TOGETHER = {
    "a team's zero points taken off with the scales of the other": (
        "block_tile.h",
        "group = granule0 / PER_GROUP;",
        "group = 0;",
        "worst",
    ),
    "sums over x of the group after": ("staged_tile.h", "group % 4 * 2", "(group + 1) % 4 * 2", "worst"),
    "the part of a zero point that one multiplication loses": (
        "staged_tile.h",
        "low.high, high.high, low.low, high.low, x.high",
        "low.high, high.high, 0, 0, x.high",
        "worst",
    ),
}


# And with the instructions of warpgroups.
PLANTED_WARPGROUPS = {
    "copies that are not shown": (
        "block_tile.h",
        "if (WARPGROUPS) show_to_warpgroups();",
        "",
        "was not shown to warpgroups",
    ),
    "a stage overwritten while it is multiplied": (
        "block_tile.h",
        "AHEAD = WARPGROUPS ? STAGES - 2 : STAGES - 1",
        "AHEAD = STAGES - 1",
        "shared memory was changed meanwhile|before the copy to it was waited for",
    ),
    "registers that are not settled": (
        "block_tile.h",
        "      begin_multiplications();\n",
        "",
        "with no wgmma.fence between",
    ),
    "sums that are not waited for": (
        "block_tile.h",
        "    if constexpr (WARPGROUPS) wait_for_multiplications<0>();\n",
        "",
        "which nothing was written to",
    ),
    "x in another order": ("block_tile.h", "(chunk % 8 ^ m % 8)", "(chunk % 8)", "worst"),
    "another lane's weights": ("block_tile.h", ">> (4 * lane.t)", ">> (4 * (3 - lane.t))", "worst"),
}


def edited(file: str, old: str, new: str) -> Sources:
    files = csrc().files
    assert files[file].count(old) == 1
    return Sources(files | {file: files[file].replace(old, new)}, digest="")


@pytest.mark.parametrize(
    "one, m, mean, planted",
    [
        pytest.param(one, m, mean, planted, id=name)
        for one, m, mean, faults in (
            (warpgroups(8), 5, 0, PLANTED_WARPGROUPS),
            (wide(32, waves=4, splits=2, teams=2), 21, 0, PLANTED_WIDE),
            (wide(16, waves=4, step=8, teams=2, stages=2), 9, 100, PLANTED_TOGETHER),
        )
        for name, planted in faults.items()
    ],
)
def test_planted_faults_of_many_rows_are_found(one, m, mean, planted, nvrtc):
    *edit, words = planted
    source = edited(*edit)
    weight, w, x = problem(m, 24, 1280, 32, False, torch.bfloat16)
    x = x + mean
    with pytest.raises((Fault, AssertionError), match=words):
        y = run(nvrtc, one, x, w, source=source)
        assert_close(y, linear_reference(x, replace(weight, scales=w.scales[:24])))


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name, nvrtc):
    *edit, words = PLANTED[name]
    source = edited(*edit)
    with pytest.raises((Fault, AssertionError), match=words):
        for dtype in (torch.float16, torch.bfloat16):
            weight, w, x = problem(5, 24, 2560, 32, False, dtype)
            x = x + 100
            y = run(nvrtc, plan(8, splits=2), x, w, source=source)
            assert_close(y, linear_reference(x, replace(weight, scales=w.scales[:24])))
