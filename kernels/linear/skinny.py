"""The decode GEMM: y[M, N] = x[M, K] @ w^T + bias for few rows M, at the speed at which the packed weights can be read.

The kernel is csrc/skinny_w4a16.cpp, one source for HIP and CUDA; how it works is told in csrc/skinny_w4a16.h. Here a call
gets a `Plan`, how the problem is cut up, a pure function of chip and shape; a plan and the types name one `Program`, which
is compiled for the chip that is there (kernels/native). Arguments are checked once: a call with the same shapes and the
same weights finds its launch ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import torch

from nybble.kernels import native
from nybble.kernels.launch import given, power_of_two, target_of
from nybble.kernels.linear import operands
from nybble.kernels.native import Launch, Program
from nybble.kernels.skinny_layout import SkinnyWeight
from nybble.kernels.target import Target

MAX_M = 64  # of any chip; see max_m
_TILE_M = 16  # most rows of a plan whose waves each read x for themselves
SOURCE, ENTRY = "skinny_w4a16.cpp", "nybble_skinny_w4a16"
# x, w, scales, zeros, bias, y, partial, counters; M, N, K, row strides of x, w, scales, zeros in bytes, splits
LAYOUT = "PPPPPPPPiiiiiiii"
_GRANULE, _WAVE = 32, 32  # k, threads; see csrc/skinny_w4a16.h
_TYPE = {torch.float16: "Half", torch.bfloat16: "BFloat", torch.float32: "Float"}
_GATE = {"silu": "SILU", "gelu_tanh": "GELU_TANH"}
_ALIGNMENT_BYTES = 16
_ROW_BYTES = 1 << 25  # most between two rows: offsets inside a block are 32 bits wide
_READY_AT_MOST = 1 << 16  # launches kept ready
_RESERVED_BYTES = 1024  # of a multiprocessor's shared memory that CUDA keeps for each block
# Splits are for problems too small to fill the chip: this holds the partial sums of any of them.
_PARTIAL_BYTES, _COUNTERS = 16 << 20, 4096
_LONG_K = 8192  # from here on a row of w is worth 16 waves
_WIDE_BLOCKS, _WIDE_LEAST_K = 3, 1024  # of BlockTile: blocks for each multiprocessor, K of a part

# --------------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True, slots=True)
class Plan:
    """How one problem is cut up.

    engine  "DotRows", "WmmaTile", "MmaTile", "BlockTile" or "WarpgroupTile" (csrc)
    m       rows of x that the code is made for, at least the call's
    rows    of w that a block owns; the block's `waves` share K, of BlockTile and WarpgroupTile the rows
    step    granules of 32 k that a wave takes at a time
    stages  of the ring in shared memory; 1 for DotRows and WmmaTile, which have none
    splits  blocks that share those rows and cut K once more
    teams   of BlockTile and WarpgroupTile: waves that share their rows and cut each step; 0 for the others
    """

    engine: str
    m: int
    rows: int
    waves: int
    step: int
    stages: int = 1
    splits: int = 1
    teams: int = 0

    def __str__(self) -> str:
        split = f", K in {self.splits} parts" if self.splits > 1 else ""
        return f"{self.engine} {self.m}x{self.rows}, {self.waves} waves{split}"

    def steps(self, k: int) -> int:
        return -(-k // (_GRANULE * self.step))

    def blocks(self, n: int) -> int:
        return -(-n // self.rows)

    def program(
        self,
        dtype: torch.dtype,
        scale_dtype: torch.dtype,
        group_size: int,
        zeros: bool,
        gate: str | None = None,
    ) -> Program:
        """The code for this plan; splits and shape are its arguments."""
        return Program(
            SOURCE,
            ENTRY,
            (
                f"NYBBLE_ENGINE={self.engine}",
                f"NYBBLE_TYPE={_TYPE[dtype]}",
                f"NYBBLE_SCALE={_TYPE[scale_dtype]}",
                f"NYBBLE_GROUP={group_size}",
                f"NYBBLE_ZEROS={int(zeros)}",
                f"NYBBLE_M={self.m}",
                f"NYBBLE_ROWS={self.rows}",
                f"NYBBLE_WAVES={self.waves}",
                f"NYBBLE_STEP={self.step}",
                f"NYBBLE_STAGES={self.stages}",
                *([f"NYBBLE_TEAMS={self.teams}"] if self.teams else []),
                *([] if gate is None else [f"NYBBLE_GATE={_GATE[gate]}"]),
            ),
        )

    def shared_bytes(self, k: int, group_size: int, scale_bytes: int, zeros: bool) -> int:
        """Dynamic shared memory of a block, as csrc lays it out: the sums of its waves, in the place of the engine's own."""
        if self.engine in ("DotRows", "WmmaTile"):
            return self.waves * self.m * self.rows * 4
        # A ring and the scales and zero points of a slice, of each wave or of the whole block.
        sharers, slices = (1, self.splits) if self.teams else (self.waves, self.splits * self.waves)
        ring = self.stages * self.step * (self.rows * 16 + self.m * 64)
        steps = -(-self.steps(k) // slices)  # most of a slice
        groups = self.step * _GRANULE // group_size  # of a step
        unit = max(4, groups * scale_bytes)
        scale_rows = -(-steps * groups * scale_bytes // unit) * unit * self.rows
        zero_rows = steps * groups * self.rows // 8 * 4 if zeros else 0
        side = (scale_rows + zero_rows + 15) // 16 * 16
        return max(sharers * (ring + side), self._sum_bytes())

    def _sum_bytes(self) -> int:
        if self.teams:  # rows four floats longer, and a word that says who is the last to come
            return self.teams * self.m * (self.rows + 4) * 4 + 4
        return self.waves * self.m * self.rows * 4

    def partial_bytes(self, m: int, n: int) -> int:
        """Sums of all splits in global memory, 0 where K is not split."""
        if self.splits == 1:
            return 0
        return self.splits * 4 * (self.m * self.blocks(n) * self.rows if self.teams else m * n)


def max_m(target: Target) -> int:
    """Most rows of x that the kernel takes: on RDNA those of one matrix tile."""
    return MAX_M if target.kind == "cuda" else _TILE_M


def plan_for(target: Target, m: int, n: int, k: int, group_size: int, scale_bytes: int, zeros: bool) -> Plan:
    """The plan for M rows of a layer. Raises ValueError for M outside 1..max_m, a layer without rows, a chip without such a
    kernel, and a layer that the chip has too little shared memory for."""
    if not 1 <= m <= max_m(target):
        raise ValueError(f"skinny: given M={m}, accepted 1 to {max_m(target)}")
    if n < 1:
        raise ValueError(f"skinny: given N={n}, accepted at least 1")
    if target.is_rdna:
        plan = _rdna_plan(target, m, n)
    elif target.kind == "cuda":
        plan = _cuda_plan(target, m, n, k, group_size, scale_bytes, zeros)
    else:
        raise ValueError(f"skinny: given {target.kind} {target.arch}, accepted gfx11*, gfx120* and CUDA")
    return plan if plan.teams else replace(plan, splits=_splits(target, plan, n, k))


def _rdna_plan(target: Target, m: int, n: int) -> Plan:
    if m <= 2:
        return Plan("DotRows", m, rows=16, waves=4, step=32)
    # x is read once by each block: more rows of w in it are less of that, but every CU should have a block.
    rows = 64 if n >= 128 * target.compute_units else 32
    return Plan("WmmaTile", _TILE_M, rows, waves=8, step=4)


def _cuda_plan(
    target: Target, m: int, n: int, k: int, group_size: int, scale_bytes: int, zeros: bool
) -> Plan:
    """Measured on an H200 over rows, waves, step and stages (benchmarks/skinny_tune.py), mostly with G 128 and bf16."""
    units = target.compute_units
    if units < 1:
        raise ValueError(f"skinny: given {target.arch} with {units} multiprocessors, accepted at least 1")
    bucket = power_of_two(m)
    if m > _TILE_M:
        return _wide_plan(target, bucket, n, k, group_size, scale_bytes, zeros)
    if bucket > 8 and n >= 64 * units and k >= _WIDE_LEAST_K:
        sharing = _sharing_plan(target, bucket, n, k, group_size, scale_bytes, zeros)
        if sharing is not None:
            return sharing
    if group_size == _GRANULE and zeros:
        plan = _short_groups_plan(target, bucket, n, k, group_size, scale_bytes, zeros)
        if plan.shared_bytes(k, group_size, scale_bytes, zeros) <= target.lds_bytes:
            return plan
    plan = _private_plan(target, bucket, n, k, group_size, scale_bytes, zeros)
    while plan.shared_bytes(k, group_size, scale_bytes, zeros) > target.lds_bytes and plan.waves > 1:
        plan = replace(plan, waves=plan.waves // 2, rows=16)
    needed = plan.shared_bytes(k, group_size, scale_bytes, zeros)
    if needed > target.lds_bytes:
        raise ValueError(
            f"skinny: given K={k}, G={group_size} and scales of {scale_bytes} bytes, which take {needed} bytes of shared "
            f"memory, accepted at most {target.lds_bytes} on {target.arch}"
        )
    return plan


# Of a thread of MmaTile, about, by rows of w: with one row of x, with up to eight, in groups of 128. Shorter groups take more;
# so do more rows of x, where shared memory is what is short.
_REGISTERS = {16: (72, 80), 32: (96, 96), 48: (112, 128), 64: (128, 144), 96: (160, 168)}
_MORE_REGISTERS = {32: 32, 64: 16, 128: 0}
_ALL_REGISTERS = 65536


def _private_plan(
    target: Target, bucket: int, n: int, k: int, group_size: int, scale_bytes: int, zeros: bool
) -> Plan:
    """For up to 16 rows of x: waves with a ring each. Measured in chains of the layers of nine models, as they follow
    each other in a decode step (benchmarks/results/skinny_h200.md). May be more than the chip has shared memory for."""
    units, large = target.compute_units, n >= 64 * target.compute_units
    long = group_size == 128

    def used(plan: Plan) -> int:
        return plan.shared_bytes(k, group_size, scale_bytes, zeros)

    # Rows and waves; of equals the first is taken.
    if large and bucket > 8:
        blocks = [(48, 2), (32, 2)]
    elif large:
        blocks = [(32, 4), (48, 4)] + [(64, 4), (96, 4)] * (long and bucket > 4)
    elif bucket > 8:
        blocks = [(48, 8), (32, 8), (16, 8)]
    elif n <= 16 * units:
        blocks = [(16, 16)]
    elif k >= _LONG_K:
        blocks = [(32, 16)] + [(48, 16)] * long + [(48, 8), (16, 8), (32, 8)]
    elif bucket > 4:
        blocks = [(48, 8), (16, 8), (32, 8)]
    else:
        blocks = [(16, 8), (32, 8), (48, 8)]

    def registers(plan: Plan) -> int:
        return _REGISTERS[plan.rows][plan.m > 1] + _MORE_REGISTERS[group_size]

    def fits(plan: Plan) -> bool:
        return _room_for_two(target, used(plan)) if large else used(plan) <= target.lds_bytes

    plans = [Plan("MmaTile", bucket, rows, waves, step=4, stages=3) for rows, waves in blocks]
    return _quickest(target, plans, n, used, registers, fits)


def _quickest(
    target: Target,
    plans: Sequence[Plan],
    n: int,
    used: Callable[[Plan], int],
    registers: Callable[[Plan], int],
    fits: Callable[[Plan], bool],
) -> Plan:
    """Of the plans that fit, the one whose last block is done first, of equals the first; of none, that of the fewest rows.

    used, registers: shared memory of a block, bytes, and registers of a thread
    """
    units = target.compute_units

    def rows_in_time(plan: Plan) -> tuple[int, ...]:
        """Rows of w that a multiprocessor has time for until then: a started turn is a whole one, since where there is room
        for more blocks some get more. Of equals, turns, then rows that the busiest has, were they spread evenly."""
        by_registers = _ALL_REGISTERS // (_WAVE * registers(plan) * plan.waves)
        by_memory = (target.lds_bytes + _RESERVED_BYTES) // (used(plan) + _RESERVED_BYTES)
        at_once = max(1, min(by_registers, by_memory))
        turns = -(-plan.blocks(n) // (at_once * units))
        return turns * at_once * plan.rows, turns, -(-plan.blocks(n) // units) * plan.rows

    return min(filter(fits, plans), key=rows_in_time, default=min(plans, key=lambda plan: plan.rows))


def _sharing_plan(
    target: Target, bucket: int, n: int, k: int, group_size: int, scale_bytes: int, zeros: bool
) -> Plan | None:
    """For 9 to 16 rows of x and many of w: waves that share x. Measured likewise, also with the shapes of other models. None
    where a multiprocessor has no room for two blocks."""
    # As much shared memory as two blocks can have: with less, some multiprocessors get three blocks and others one, which took
    # up to a third longer.
    if zeros or group_size < 128:
        rings = [(16, 2)] + [(8, 3), (8, 2)] * (group_size == _GRANULE and zeros)
    else:
        rings = [(8, 4)]

    def plan_of(rows: int) -> Plan | None:
        plans = (Plan("BlockTile", bucket, rows, 4, step, stages, teams=2) for step, stages in rings)
        fitting = (
            p for p in plans if _room_for_two(target, p.shared_bytes(k, group_size, scale_bytes, zeros))
        )
        return next(fitting, None)

    def cost(plan: Plan) -> int:
        """Two blocks at a time on each multiprocessor, a started turn is a whole one, and beginning it costs as much as 18
        rows."""
        return -(-plan.blocks(n) // (2 * target.compute_units)) * (plan.rows + 18)

    return min(filter(None, map(plan_of, (64, 96, 128))), key=cost, default=None)


def _room_for_two(target: Target, shared_bytes: int) -> bool:
    """Whether two blocks fit on a multiprocessor: CUDA keeps some of its memory for each."""
    return 2 * (shared_bytes + _RESERVED_BYTES) <= target.lds_bytes + _RESERVED_BYTES


_WIDE_ROWS = (96, 64)
_WARPGROUP_CHIP = "sm_90"  # no later one has its instructions
_MOST_PARTS = 16  # of K: more are slower to add up than they are worth


def _warpgroup_plans(bucket: int) -> list[Plan]:
    """Rows of w of a block, and stages."""
    blocks = ((64, 4), (128, 3), (192, 3))
    return [Plan("WarpgroupTile", bucket, r, 8, step=8, stages=s, teams=2) for r, s in blocks]


def _warpgroup_plan(
    target: Target, bucket: int, n: int, k: int, group_size: int, scale_bytes: int, zeros: bool
) -> Plan | None:
    """Rows and parts of K of the least time, by a fit to those measured on an H200, with scales of x's type
    (benchmarks/results/skinny_h200.md)."""
    units = target.compute_units

    def used(plan: Plan) -> int:
        return plan.shared_bytes(k, group_size, scale_bytes, zeros)

    def estimate_us(plan: Plan) -> float:
        """The rows of x cost as much as 24 more of w; adding up the parts, which the last block to come does alone, by their
        size. Where a multiprocessor has room for two blocks, some get two, however few there are."""
        at_once = 2 if _room_for_two(target, used(plan)) else 1
        turns = -(-plan.blocks(n) * plan.splits // (at_once * units))
        adding = 1.2 + 0.0045 * plan.rows * plan.splits if plan.splits > 1 else 0
        return turns * (1 + 31e-6 * at_once * (plan.rows + 24) * k / plan.splits) + adding

    choice = [
        parts
        for plan in _warpgroup_plans(bucket)
        for splits in range(1, max(1, min(_MOST_PARTS, plan.steps(k) // 2)) + 1)
        if used(parts := replace(plan, splits=splits)) <= target.lds_bytes
        and parts.partial_bytes(bucket, n) <= _PARTIAL_BYTES
    ]
    return min(choice, key=estimate_us, default=None)


def _wide_plans(bucket: int, rows: Sequence[int] = _WIDE_ROWS) -> list[Plan]:
    """With blocks of these rows of w, then with ever less shared memory."""
    step = 8 if bucket <= 32 else 4
    blocks = [*((r, 4, step, 3) for r in rows), (64, 4, 4, 3), (64, 4, 4, 2), (32, 2, 4, 2)]
    plans = (Plan("BlockTile", bucket, r, waves, step, stages, teams=2) for r, waves, step, stages in blocks)
    return list(dict.fromkeys(plans))


def _wide_plan(
    target: Target, bucket: int, n: int, k: int, group_size: int, scale_bytes: int, zeros: bool
) -> Plan:
    """The first that the chip has shared memory for, in as many parts of K as fill it. Measured likewise, M 32 and 64."""
    if target.arch == _WARPGROUP_CHIP:
        plan = _warpgroup_plan(target, bucket, n, k, group_size, scale_bytes, zeros)
        if plan is not None:
            return plan
    units = target.compute_units

    def fits(plan: Plan) -> bool:
        return plan.shared_bytes(k, group_size, scale_bytes, zeros) <= target.lds_bytes

    def split(plan: Plan) -> Plan:
        """Three blocks a multiprocessor; more parts only where scales and zero points of fewer do not fit."""
        room = 2 * _PARTIAL_BYTES // replace(plan, splits=2).partial_bytes(bucket, n)
        most = max(1, min(room, plan.steps(k) // 2))
        parts = max(1, min(_WIDE_BLOCKS * units // plan.blocks(n), k // _WIDE_LEAST_K, most))
        choice = [replace(plan, splits=s) for s in range(parts, most + 1)]
        return next(filter(fits, choice), choice[-1])

    rows = next((r for r in _WIDE_ROWS if n >= r * units), _WIDE_ROWS[-1])
    plans = [split(plan) for plan in _wide_plans(bucket, (rows,))]
    for plan in plans:
        if fits(plan):
            return plan
    needed = plans[-1].shared_bytes(k, group_size, scale_bytes, zeros)
    raise ValueError(
        f"skinny: given K={k}, G={group_size} and scales of {scale_bytes} bytes, which take {needed} bytes of shared "
        f"memory for {bucket} rows of x, accepted at most {target.lds_bytes} on {target.arch}"
    )


# Of a thread of MmaTile with zero points of groups of 32, by rows of w: with up to eight rows of x, with more.
_SHORT_REGISTERS = {16: (128, 128), 32: (168, 224), 48: (208, 255)}


def _short_groups_plan(
    target: Target, bucket: int, n: int, k: int, group_size: int, scale_bytes: int, zeros: bool
) -> Plan:
    """For zero points of groups of 32: mostly steps of eight groups in a ring of two. Measured likewise, G 32. May be more than
    the chip has shared memory for."""
    units, few = target.compute_units, bucket <= 8
    if n >= 64 * units:
        rings = [(48, 2, 8, 2), (48, 4, 8, 2)] if few else [(48, 2, 4, 2)]
    elif n > 32 * units and k < _LONG_K:
        rings = [(32, 4, 8, 3)] if few else [(48, 4, 8, 2), (32, 4, 8, 2)]
    elif few and k < _LONG_K:
        rings = [(16, 8, 8, 2)]
    else:
        rings = [(32, 8, 8, 2)] + [(48, 8, 8, 2), (48, 4, 8, 2)] * (n > 32 * units)

    def used(plan: Plan) -> int:
        return plan.shared_bytes(k, group_size, scale_bytes, zeros)

    def registers(plan: Plan) -> int:
        return _SHORT_REGISTERS[plan.rows][not few]

    plans = [Plan("MmaTile", bucket, *ring) for ring in rings]
    return _quickest(target, plans, n, used, registers, lambda plan: used(plan) <= target.lds_bytes)


def _splits(target: Target, plan: Plan, n: int, k: int) -> int:
    """Enough that every compute unit has a block, as long as every wave keeps a step."""
    wanted = target.compute_units // plan.blocks(n)
    return max(1, min(wanted, plan.steps(k) // plan.waves))


_BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # of M: the others have the plan of the next one
# Layers whose programs are those of all layers up to the last K: rows of w per unit, and K, so near each other that with scales
# of 16 bits every plan is one of theirs.
_ROWS_PER_UNIT = tuple(range(16, 320, 8))
_EVERY_K = (512, 1024, 2048, 4096, 6144, 8192, 12288, 16384, 20480, 28672)
_ANY_UNITS = 64


def programs_for(
    target: Target,
    dtype: torch.dtype,
    group_size: int,
    symmetric: bool,
    scale_dtypes: Sequence[torch.dtype] = (),
    shapes: Iterable[tuple[int, int]] | None = None,
    gates: Iterable[str | None] = (None,),
) -> tuple[Program, ...]:
    """Every program that layers of these (N, K) need for M up to max_m, each once.

    scale_dtypes: by default the activations' type and float16, which GPTQ and AWQ files keep whatever the model's type is.
    shapes: by default layers of every size. A target whose number of compute units is not known (0) will do for those: plans
    ask how many rows each unit gets. gates: activations applied in the same launch, None for none.
    """
    gates = tuple(gates)
    chip = target if target.compute_units else replace(target, compute_units=_ANY_UNITS)
    plans: dict[tuple[Plan, torch.dtype], None] = {}
    scale_dtypes = tuple(scale_dtypes or {dtype, torch.float16})
    buckets = [m for m in _BUCKETS if m <= max_m(chip)]
    if shapes is None:
        kinds = [_wide_plans, *([_warpgroup_plans] if chip.arch == _WARPGROUP_CHIP else [])]
        wide = (plan for m in buckets if m > _TILE_M for plans_of in kinds for plan in plans_of(m))
        plans |= dict.fromkeys(product(wide, scale_dtypes))
        buckets = [m for m in buckets if m <= _TILE_M]
        shapes = [(rows * chip.compute_units, k) for rows, k in product(_ROWS_PER_UNIT, _EVERY_K)]
    sizes = {scale_dtype.itemsize for scale_dtype in scale_dtypes}
    for (n, k), size, m in product(shapes, sizes, buckets):
        plan = plan_for(chip, m, n, k, group_size, size, not symmetric)
        plans |= dict.fromkeys((plan, s) for s in scale_dtypes if s.itemsize == size)
    found = {
        plan.program(dtype, scale_dtype, group_size, not symmetric, gate)
        for (plan, scale_dtype), gate in product(plans, gates)
    }
    return tuple(sorted(found, key=lambda program: program.defines))


# ----------------------------------------------------------------------------------------------------------- launcher

_LIBRARY = torch.library.Library("nybble", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "skinny_gemm(Tensor x, Tensor words, Tensor scales, Tensor? zeros, Tensor? bias, int group_size, bool dependent=False, "
    "str? gate=None) -> Tensor"
)


def skinny_gemm(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    dependent: bool = False,
    gate: str | None = None,
) -> torch.Tensor:
    """y [M, N] of x's type = x @ ((q - z) * s)^T + bias, products summed in fp32. The same call gives the same bits.

    x, words, scales, zeros, bias, group_size   as operands.check says; M up to max_m; rows of words a multiple of 16 bytes
                                                apart, of scales a multiple of their own size
    dependent   where the chip can (sm_90 and newer), start before the launch ahead in the stream has ended, which must not
                be the one that writes the weights
    gate        "silu" or "gelu_tanh": rows 2i of the weight are gates, rows 2i + 1 ups, and y [M, N/2] is
                gate(y[:, 0::2]) * y[:, 1::2]

    Raises ValueError for anything else, before anything is launched; DriverError when the chip refuses the launch.
    Where K is split, partial sums share one workspace per stream (one for all captured graphs of a device: they may not
    run at the same time).
    """
    y: torch.Tensor = torch.ops.nybble.skinny_gemm.default(
        x, words, scales, zeros, bias, group_size, dependent, gate
    )
    return y


def apply(
    weight: SkinnyWeight, x: torch.Tensor, bias: torch.Tensor | None, gate: str | None = None
) -> torch.Tensor:
    """`skinny_gemm` as a layer calls it, dependent; outside of tracing without the detour through torch's dispatcher.

    The weight's tensors stay where they are, so that a call is known by x's form, the bias and the gate alone.
    """
    w = weight
    if type(x) is not torch.Tensor or not x.is_cuda or torch.compiler.is_compiling():
        return skinny_gemm(x, w.words, w.scales, w.zeros, bias, w.group_size, True, gate)
    aligned = x.data_ptr() % _ALIGNMENT_BYTES == 0
    key = (x.shape, x.stride(0), x.dtype, aligned, gate, None if bias is None else bias.data_ptr())
    ready = w.calls.get(key)
    if ready is None:
        ready = _prepare(x, w.words, w.scales, w.zeros, bias, w.group_size, True, gate)
        w.calls[key] = ready
    return ready(x)


def _run(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    dependent: bool = False,
    gate: str | None = None,
) -> torch.Tensor:
    # Everything that the checks, the plan and the launch depend on, and the addresses: what is found here was checked.
    key = (
        x.shape,
        x.stride(),
        x.dtype,
        x.device.index,
        x.data_ptr() % _ALIGNMENT_BYTES,
        *_identity(words),
        *_identity(scales),
        None if zeros is None else _identity(zeros),
        None if bias is None else _identity(bias),
        group_size,
        dependent,
        gate,
    )
    ready = _READY.get(key)
    if ready is None:
        ready = _prepare(x, words, scales, zeros, bias, group_size, dependent, gate)
        if len(_READY) >= _READY_AT_MOST:
            _READY.clear()
        _READY[key] = ready
    return ready(x)


def _identity(t: torch.Tensor) -> tuple[object, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype


_READY: dict[tuple[object, ...], Callable[[torch.Tensor], torch.Tensor]] = {}


def _prepare(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    dependent: bool,
    gate: str | None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Check the arguments, plan, compile or find the code: x -> y for calls like this one."""
    check(x, words, scales, zeros, bias, group_size, gate)
    m, k = x.shape
    n = words.shape[0]
    if m == 0 or n == 0:
        return lambda x: x.new_empty(m, _columns(n, gate))
    row_bytes = x.stride(0) * x.element_size()
    if m > 1 and (row_bytes % _ALIGNMENT_BYTES or row_bytes > _ROW_BYTES) or x.data_ptr() % _ALIGNMENT_BYTES:
        # Rows that 16-byte loads cannot start at, or far apart: rare, and a copy of a few rows is cheap.
        inner = _prepare(
            x.clone(memory_format=torch.contiguous_format),
            words,
            scales,
            zeros,
            bias,
            group_size,
            dependent,
            gate,
        )
        return lambda x: inner(x.clone(memory_format=torch.contiguous_format))
    target = target_of(x.device)
    plan = plan_for(target, m, n, k, group_size, scales.element_size(), zeros is not None)
    return bind(plan, x, words, scales, zeros, bias, group_size, dependent, gate)


def bind(
    plan: Plan,
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    dependent: bool = False,
    gate: str | None = None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """x -> y with a plan of the caller's choice, for arguments already checked and any x shaped like this one."""
    m, k = x.shape
    n = words.shape[0]
    device = x.device
    kernel = native.load(plan.program(x.dtype, scales.dtype, group_size, zeros is not None, gate), device)
    dependent = dependent and kernel.target.sm >= native.DEPENDENT_FROM_SM
    launch = _launch(
        kernel,
        (plan.blocks(n), plan.splits, 1),
        plan.waves * 32,
        plan.shared_bytes(k, group_size, scales.element_size(), zeros is not None),
        dependent,
    )
    w, s = words.data_ptr(), scales.data_ptr()
    z, b = (0 if t is None else t.data_ptr() for t in (zeros, bias))
    numbers = (
        m,
        n,
        k,
        x.stride(0) * x.element_size(),
        words.stride(0) * words.element_size(),
        scales.stride(0) * scales.element_size(),
        0 if zeros is None else zeros.stride(0) * zeros.element_size(),
        plan.splits,
    )
    columns = _columns(n, gate)
    stream_of, index, split = _current_stream, device.index, plan.splits > 1

    def call(x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty((m, columns))
        stream = stream_of(index)
        partial, counters = _workspace(device, stream, plan, m, n) if split else (0, 0)
        launch(stream, x.data_ptr(), w, s, z, b, y.data_ptr(), partial, counters, *numbers)
        return y

    return call


def check(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    gate: str | None = None,
) -> None:
    """Raise ValueError unless the arguments are what `skinny_gemm` documents."""
    operands.check(x, words, scales, zeros, bias, group_size)
    if gate is not None and (gate not in _GATE or words.shape[0] % 2):
        raise ValueError(
            f"gate: given {gate!r} for N={words.shape[0]}, accepted {', '.join(_GATE)} and an even N"
        )
    if x.shape[0] > MAX_M:
        raise ValueError(f"x: given {given(x)}, accepted at most {MAX_M} rows")
    stride = words.stride(0) * words.element_size()
    if words.data_ptr() % _ALIGNMENT_BYTES or (words.shape[0] > 1 and stride % _ALIGNMENT_BYTES):
        raise ValueError(
            f"words: given rows {stride} bytes apart from address {words.data_ptr():#x}, accepted multiples of "
            f"{_ALIGNMENT_BYTES} bytes"
        )
    for name, t in {"words": words, "scales": scales, "zeros": zeros}.items():
        if t is not None and (t.stride(0) * t.element_size() > _ROW_BYTES or max(t.shape) >= 2**31):
            raise ValueError(
                f"{name}: given {given(t)} with strides {list(t.stride())}, accepted rows at most {_ROW_BYTES} bytes "
                "apart"
            )


def _columns(n: int, gate: str | None) -> int:
    return n if gate is None else n // 2


_COMPILING: set[tuple[object, ...]] = set()


def compile_ahead(target: Target, weight: SkinnyWeight, dtype: torch.dtype, gate: str | None = None) -> None:
    """Begin, in the background, to compile what calls with this weight need. Its errors wait for the call that needs it;
    ValueError as plan_for."""
    zeros = weight.zeros is not None
    key = (target.arch, dtype, weight.scales.dtype, weight.group_size, zeros, weight.n, weight.k, gate)
    if key in _COMPILING or not (target.is_rdna or target.kind == "cuda"):
        return
    programs = programs_for(
        target,
        dtype,
        weight.group_size,
        not zeros,
        [weight.scales.dtype],
        [(weight.n, weight.k)],
        [gate],
    )
    _COMPILING.add(key)
    native.compile_all(programs, target)


@cache
def _launch(
    kernel: native.Kernel, grid: tuple[int, int, int], threads: int, shared_bytes: int, dependent: bool
) -> Launch:
    return kernel.prepare(grid, threads, shared_bytes, LAYOUT, dependent=dependent)


def _current_stream(index: int) -> int:
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return stream


_WORKSPACES: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
_OF_GRAPHS = -1


def _workspace(device: torch.device, stream: int, plan: Plan, m: int, n: int) -> tuple[int, int]:
    """Addresses of partial sums and counters: of this stream, or, while a graph is captured, of the device's graphs."""
    assert plan.partial_bytes(m, n) <= _PARTIAL_BYTES and plan.blocks(n) <= _COUNTERS
    capturing = torch.cuda.is_current_stream_capturing()
    key = (device.index, _OF_GRAPHS if capturing else stream)
    if key not in _WORKSPACES:
        for new in {key, (device.index, _OF_GRAPHS)} - _WORKSPACES.keys():
            _WORKSPACES[new] = (
                torch.empty(_PARTIAL_BYTES, dtype=torch.uint8, device=device),
                torch.zeros(_COUNTERS, dtype=torch.int32, device=device),
            )
    partial, counters = _WORKSPACES[key]
    return partial.data_ptr(), counters.data_ptr()


def _fake(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    dependent: bool = False,
    gate: str | None = None,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], _columns(words.shape[0], gate))


def _refuse(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    dependent: bool = False,
    gate: str | None = None,
) -> torch.Tensor:
    check(x, words, scales, zeros, bias, group_size, gate)
    raise ValueError(f"x: given a tensor on {x.device}, accepted a GPU (gfx11*, gfx120* or CUDA)")


_LIBRARY.impl("skinny_gemm", _run, "CUDA")  # type: ignore[no-untyped-call]
_LIBRARY.impl("skinny_gemm", _refuse, "CPU")  # type: ignore[no-untyped-call]
_LIBRARY.impl("skinny_gemm", _fake, "Meta")  # type: ignore[no-untyped-call]
