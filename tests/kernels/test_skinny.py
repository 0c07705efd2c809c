"""The csrc kernel's launcher without a GPU: plans, programs, what is refused and how."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from weights import make_weight

from nybble.kernels.linear import skinny
from nybble.kernels.skinny_layout import pack
from nybble.kernels.target import Target

STRIX = Target("rocm", "gfx1151", "", 40, 65536)
RADEON = Target("rocm", "gfx1201", "", 64, 65536)
HOPPER = Target("cuda", "sm_90", "", 132, 232448)
A100 = Target("cuda", "sm_80", "", 108, 166912)
AMPERE = Target("cuda", "sm_86", "", 84, 101376)
TARGETS = pytest.mark.parametrize("target", [STRIX, RADEON, HOPPER, A100, AMPERE], ids=lambda t: t.arch)
SHAPES = [
    (n, k)
    for n in (1, 8, 24, 1440, 4096, 24576, 151936)
    for k in (32, 64, 576, 4096, 12288, 20992, 28672, 65536)
]


def test_large_layers_have_room_for_two_blocks_on_a_multiprocessor():
    """Each block takes 1 KiB more than it asks for: with 48 rows, 50688 bytes, a multiprocessor of 100 KiB holds one."""
    rows_48 = skinny.Plan("MmaTile", 16, rows=48, waves=2, step=4, stages=3)
    assert rows_48.shared_bytes(4096, 64, 2, True) == 50688
    assert skinny.plan_for(AMPERE, 16, 7168, 4096, 64, 2, True).rows == 32


@pytest.mark.parametrize(
    ("target", "m", "n", "k", "group_size", "zeros", "ring"),
    [
        (HOPPER, 16, 24576, 4096, 128, False, (8, 4)),
        (HOPPER, 9, 24576, 4096, 64, False, (16, 2)),
        (HOPPER, 16, 24576, 4096, 128, True, (16, 2)),
        (HOPPER, 16, 24576, 4096, 32, True, (16, 2)),
        (HOPPER, 16, 24576, 5120, 32, True, (8, 3)),  # more scales and zero points beside it
        (HOPPER, 16, 24576, 8192, 32, True, (8, 2)),
        (A100, 16, 24576, 4096, 32, True, (8, 3)),
        (AMPERE, 16, 24576, 4096, 128, False, None),  # room for one
        (HOPPER, 16, 24576, 28672, 32, True, None),
        (HOPPER, 8, 24576, 4096, 128, False, None),  # x is little beside the weights
        (HOPPER, 16, 4096, 4096, 128, False, None),  # few blocks
    ],
)
def test_nine_to_sixteen_rows_of_large_layers_share_x_where_two_blocks_fit(
    target, m, n, k, group_size, zeros, ring
):
    plan = skinny.plan_for(target, m, n, k, group_size, 2, zeros)
    found = plan.engine, (plan.step, plan.stages) if ring else None
    assert found == ("BlockTile" if ring else "MmaTile", ring)
    if ring:
        used = plan.shared_bytes(k, group_size, 2, zeros) + 1024
        assert 2 * used <= target.lds_bytes + 1024
        assert 3 * used > target.lds_bytes + 1024 or plan.rows < 96, "three blocks here, one there"


@pytest.mark.parametrize(
    ("n", "rows"),
    [
        (12288, 64),  # 192 blocks
        (24576, 96),  # 256 at once, 264 find room
        (28672, 128),  # 299 of 96 rows were two turns
        (34816, 96),  # 363 in two turns; 272 of 128 rows were two, too
        (120000, 96),  # in five turns; of 128 rows four, which begin less often
    ],
)
def test_blocks_that_share_x_take_few_turns(n, rows):
    assert skinny.plan_for(HOPPER, 16, n, 4096, 128, 2, False).rows == rows


@pytest.mark.parametrize(
    ("m", "n", "k", "group_size", "rows", "waves"),
    [
        (1, 24576, 4096, 128, 48, 4),  # of an 8B model: 512 blocks in one turn of 528
        (4, 24576, 4096, 64, 32, 4),  # registers for three of 48 rows: two turns are more than of four of 32
        (1, 28672, 4096, 128, 32, 4),  # 896 in two turns of 660, or 598 in two of 528
        (4, 19456, 2560, 128, 32, 4),  # 608 in one of 660
        (8, 19456, 2560, 128, 64, 4),  # 304 in one of 396
        (8, 24576, 4096, 128, 96, 4),  # 256 in one of 264
        (8, 28672, 4096, 128, 32, 4),
        (8, 34816, 5120, 128, 48, 4),  # 726 in two of 396; of 32 rows 1088 in three of 528
        (1, 6144, 4096, 128, 16, 8),  # three of 16 rows on each multiprocessor instead of one or two of 32
        (1, 6144, 4096, 64, 32, 8),  # in one turn; of 16 rows, of which two have registers, in two
        (4, 6144, 4096, 32, 48, 8),
        (8, 6144, 4096, 128, 48, 8),
        (1, 7168, 5120, 128, 32, 8),
        (8, 7168, 5120, 128, 32, 8),
        (8, 2560, 4096, 128, 16, 8),  # 160 blocks keep more multiprocessors busy than 54 of 48 rows
        (1, 4096, 12288, 128, 32, 16),  # one each
        (1, 5120, 17408, 128, 48, 16),
        (4, 5120, 17408, 64, 48, 8),  # no registers for 16 waves
        (8, 5120, 17408, 128, 48, 8),  # nor shared memory
        (8, 2560, 17408, 32, 16, 8),  # no shared memory for 16 waves of 32 rows
        (16, 6144, 4096, 128, 48, 8),
        (16, 7168, 5120, 128, 32, 8),
        (16, 24576, 512, 128, 32, 2),
        (16, 28672, 512, 128, 48, 2),
        (16, 1024, 1024, 128, 16, 8),
        (1, 1024, 4096, 128, 16, 16),
    ],
)
def test_no_multiprocessor_waits_long_for_others(m, n, k, group_size, rows, waves):
    plan = skinny.plan_for(HOPPER, m, n, k, group_size, 2, False)
    assert (plan.engine, plan.rows, plan.waves) == ("MmaTile", rows, waves)


@pytest.mark.parametrize(
    ("m", "n", "k", "plan"),
    [
        (1, 24576, 4096, (48, 2, 8, 2)),  # 512 blocks in one turn of 528
        (1, 28672, 4096, (48, 4, 8, 2)),  # 598 in three turns of 264, or in two of 528
        (16, 24576, 20992, (48, 2, 4, 2)),
        (1, 6144, 4096, (32, 4, 8, 3)),
        (1, 4096, 12288, (32, 8, 8, 2)),
        (1, 5120, 17408, (48, 8, 8, 2)),
        (8, 5120, 17408, (48, 4, 8, 2)),  # no shared memory for eight waves
        (16, 6144, 4096, (48, 4, 8, 2)),
        (16, 7168, 5120, (32, 4, 8, 2)),
    ],
)
def test_nor_with_zero_points_of_short_groups(m, n, k, plan):
    found = skinny.plan_for(HOPPER, m, n, k, 32, 2, True)
    assert (found.engine, found.rows, found.waves, found.step, found.stages) == ("MmaTile", *plan)


def test_where_sixteen_waves_do_not_fit():
    """In as many turns as rows of w allow: blocks of 16 rows would take four."""
    plan = skinny.plan_for(AMPERE, 4, 4096, 14336, 128, 2, False)
    assert (plan.rows, plan.waves) == (32, 8)


ROWS = (8, 1440, 2816, 4096, 5120, 6144, 7168, 8192, 13824, 19456, 24576, 28672, 34816, 37888, 57344, 151936)
LENGTHS = (512, 1024, 2048, 3584, 4096, 5120, 8192, 12288, 14336, 18944, 20992, 28672)  # K of real models


@TARGETS
@pytest.mark.parametrize("n, k", SHAPES)
def test_every_shape_has_a_plan_that_fits_the_chip(target, n, k):
    for m in range(1, skinny.max_m(target) + 1):
        for group_size, scale_bytes, zeros in ((32, 2, True), (128, 4, False)):
            if m > 16 and target in (A100, AMPERE) and k > 20000 and n * k > 10**9:
                continue  # scales of a whole row of w beside 64 rows of x: refused in words
            plan = skinny.plan_for(target, m, n, k, group_size, scale_bytes, zeros)
            assert plan.m >= m and plan.blocks(n) * plan.rows >= n
            assert plan.rows % 16 == 0 and plan.waves * 32 <= 1024
            assert plan.shared_bytes(k, group_size, scale_bytes, zeros) <= target.lds_bytes
            sharers = 1 if plan.teams else plan.waves
            assert 1 <= plan.splits <= max(1, plan.steps(k) // sharers), "a wave without work"
            assert plan.partial_bytes(m, n) <= skinny._PARTIAL_BYTES
            assert plan.splits == 1 or plan.blocks(n) <= skinny._COUNTERS


@TARGETS
def test_small_layers_split_k_and_large_ones_do_not(target):
    assert skinny.plan_for(target, 1, 24576, 4096, 128, 2, False).splits == 1
    assert skinny.plan_for(target, 1, 8, 20992, 128, 2, False).splits > 1


def test_many_rows_fill_the_chip_once():
    """Blocks, or parts of K, for nearly every multiprocessor, and no more than find room at a time; a part is no sliver."""
    for n, k in ((24576, 4096), (4096, 12288), (6144, 4096), (4096, 4096)):
        for m in (17, 64):
            plan = skinny.plan_for(HOPPER, m, n, k, 128, 2, False)
            assert plan.engine == "WarpgroupTile"
            assert 0.7 * HOPPER.compute_units <= plan.blocks(n) * plan.splits <= 2 * HOPPER.compute_units
            assert k // plan.splits >= 1024
            plan = skinny.plan_for(replace(HOPPER, arch="sm_100"), m, n, k, 128, 2, False)
            assert plan.engine == "BlockTile"
            assert 0.9 * HOPPER.compute_units <= plan.blocks(n) * plan.splits <= 3 * HOPPER.compute_units
            assert k // plan.splits >= 1024


def test_the_sums_of_teams_have_room_beside_each_other():
    """64 rows of x, two teams, rows four floats longer, and a word; the ring has 48 KiB, which is less."""
    plan = skinny.Plan("BlockTile", 64, rows=128, waves=8, step=4, stages=2, teams=2)
    assert plan.shared_bytes(128, 128, 2, False) == 2 * 64 * 132 * 4 + 4


def test_zero_points_of_short_groups_have_plans_of_their_own():
    """Longer steps; where those take too much shared memory, what other groups take."""
    short, other = (skinny.plan_for(HOPPER, 8, 24576, 4096, g, 2, True) for g in (32, 64))
    assert short.step > other.step
    assert skinny.plan_for(HOPPER, 1, 24576, 4096, 32, 2, False).step == other.step
    assert skinny.plan_for(HOPPER, 16, 4096, 20992, 32, 2, True).step == 4


@TARGETS
def test_a_layer_needs_few_programs(target):
    programs = skinny.programs_for(target, torch.bfloat16, 128, True, [torch.bfloat16], [(4096, 4096)])
    assert 2 <= len(programs) <= (7 if target.kind == "cuda" else 5)
    assert len(set(programs)) == len(programs)
    for program in programs:
        assert {"NYBBLE_TYPE=BFloat", "NYBBLE_SCALE=BFloat", "NYBBLE_GROUP=128", "NYBBLE_ZEROS=0"} <= set(
            program.defines
        )


@TARGETS
@pytest.mark.parametrize("group_size, symmetric", [(32, False), (32, True), (64, False), (128, True)])
def test_programs_compiled_ahead_are_those_that_calls_need(target, group_size, symmetric):
    """Also where the chip's size is not known: `nybble warm`."""
    dtype, zeros = torch.bfloat16, not symmetric
    ahead = set(skinny.programs_for(target, dtype, group_size, symmetric))
    assert ahead == set(skinny.programs_for(replace(target, compute_units=0), dtype, group_size, symmetric))
    layers = [(n, k) for n in ROWS for k in LENGTHS]
    for (n, k), m in product(layers, range(1, skinny.max_m(target) + 1)):
        if m > 16 and n * k > 8 * 10**8:
            continue  # larger than any layer of a model: a chip of little shared memory has no plan
        plan = skinny.plan_for(target, m, n, k, group_size, 2, zeros)
        for scales in (torch.float16, dtype):
            assert plan.program(dtype, scales, group_size, zeros) in ahead, (m, n, k, str(plan))


def test_other_chips_and_rows_are_refused_in_words():
    with pytest.raises(ValueError, match="given rocm gfx942, accepted gfx11"):
        skinny.plan_for(Target("rocm", "gfx942", "", 304, 65536, wave=64), 1, 64, 64, 32, 2, False)
    for m in (0, 17):
        with pytest.raises(ValueError, match=f"given M={m}, accepted 1 to 16"):
            skinny.plan_for(STRIX, m, 64, 64, 32, 2, False)
    with pytest.raises(ValueError, match="given M=65, accepted 1 to 64"):
        skinny.plan_for(HOPPER, 65, 64, 64, 32, 2, False)
    with pytest.raises(
        ValueError, match="given K=96000, .* for 32 rows of x, accepted at most 101376 on sm_86"
    ):
        skinny.plan_for(AMPERE, 17, 151936, 96000, 32, 2, True)
    with pytest.raises(ValueError, match="given N=0, accepted at least 1"):
        skinny.plan_for(HOPPER, 1, 0, 64, 32, 2, False)
    with pytest.raises(ValueError, match="given sm_90 with 0 multiprocessors"):
        skinny.plan_for(replace(HOPPER, compute_units=0), 1, 64, 64, 32, 2, False)
    with pytest.raises(
        ValueError, match="given K=96000, G=32 and scales of 2 bytes, which take 135360 bytes"
    ):
        skinny.plan_for(AMPERE, 16, 4096, 96000, 32, 2, True)


def arguments(**change):
    weight = make_weight(24, 128, 64, symmetric=False)
    packed = pack(weight, arch="gfx1100", scale_dtype=torch.float16)
    given = {
        "x": torch.zeros(3, 128, dtype=torch.float16),
        "words": packed.words,
        "scales": packed.scales,
        "zeros": packed.zeros,
        "bias": torch.zeros(24, dtype=torch.float16),
        "group_size": 64,
    }
    return given | change


def unaligned(shape, dtype):
    """A tensor whose first element lies 4 bytes past a 16-byte boundary."""
    size = torch.empty(0, dtype=dtype).element_size()
    count = shape[0] * shape[1]
    return torch.zeros(count + 16 // size, dtype=dtype)[4 // size :][:count].view(shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "x: given a tensor on cpu, accepted a GPU"),
        (
            {"x": torch.zeros(65, 128, dtype=torch.float16)},
            r"given float16 \[65, 128\], accepted at most 64 rows",
        ),
        ({"x": torch.zeros(3, 96, dtype=torch.float16)}, "given K=96, accepted a positive multiple of"),
        ({"x": torch.zeros(3, 128)}, "accepted float16 or bfloat16"),
        ({"x": torch.zeros(128, dtype=torch.float16)}, "accepted float16 or bfloat16"),
        ({"words": torch.zeros(24, 17, dtype=torch.int32)[:, :16]}, "words: given rows 68 bytes apart"),
        ({"words": unaligned((24, 16), torch.int32)}, "accepted multiples of 16 bytes"),
        ({"words": torch.zeros(24, 16)}, "words: given float32"),
        ({"scales": torch.zeros(24, 3, dtype=torch.float16)}, r"scales: given float16 \[24, 3\]"),
        ({"zeros": torch.zeros(24, 2, dtype=torch.float16)}, "zeros: given float16"),
        ({"zeros": torch.zeros(3, 3, dtype=torch.int32)}, r"zeros: given int32 \[3, 3\]"),
        ({"bias": torch.zeros(24)}, "bias: given float32"),
        ({"bias": torch.zeros(23, dtype=torch.float16)}, "bias: given"),
        ({"group_size": 256}, "group_size: given 256, accepted 32, 64, 128"),
    ],
    ids=str,
)
def test_bad_calls_are_refused_in_words(change, message):
    with pytest.raises(ValueError, match=message):
        skinny.skinny_gemm(**arguments(**change))


def test_the_fake_implementation_knows_the_result():
    given = arguments()
    meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    y = skinny.skinny_gemm(**meta)
    assert y.shape == (3, 24) and y.dtype is torch.float16
