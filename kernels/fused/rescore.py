"""The largest of each row of logits, and their exact values: what an output head read in int4 needs (RescoredHead).

    logits [R, V] --group_best, grid (programs, R)--> the best of every 64 neighbours [R, V / 64]
                  --select_groups, grid (R)--> the groups that hold the `count` largest of those [R, count]
                  --select_columns, grid (R)--> the `count` largest of these groups' logits [R, count]
                  --rescore, grid (count, R)--> logits[r, best] = weight[best] . x[r], in place

The first step reads the logits once; the next two look at a few thousand numbers each, in registers. No group is missed:
each of `count` groups holds a number at least as large as anything in the others. A threshold is found bit by bit,
counting what is not below it, so nothing is sorted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nybble.kernels import dependent
from nybble.kernels.dependent import let_next_start_and_wait
from nybble.kernels.fused.argmax import INFINITY, bits_of, check_logits, load_bits
from nybble.kernels.launch import HALF_TYPES, INT_TYPES, check, power_of_two

_GROUP = 64
_GROUPS_PER_PROGRAM = 32
MAX_VOCAB = _GROUP * 32768
MAX_COUNT = 64
_BLOCK_K = 1024

# ------------------------------------------------------------------------------------------------------------ kernel


@triton.jit
def _load_keys(ptr, inside, BITS: tl.constexpr, INF: tl.constexpr):
    """int32 that order as the floats do, NaN below minus infinity, less than all of them outside."""
    negative, magnitude = load_bits(ptr, inside, BITS)
    key = tl.where(magnitude > INF, -INF - 1, tl.where(negative, -magnitude, magnitude))
    return tl.where(inside, key, -INF - 2)


@triton.jit
def _largest(key, COUNT: tl.constexpr, BITS: tl.constexpr):
    """(which of key [N] are the COUNT largest, the first among equals; the place of each among them). N up to 32768."""
    least = tl.where(tl.sum((key >= 0).to(tl.int32), axis=0) >= COUNT, 0, -(1 << (BITS - 1)))
    for i in range(BITS - 1):
        raised = least + (1 << (BITS - 2 - i))
        least = tl.where(tl.sum((key >= raised).to(tl.int32), axis=0) >= COUNT, raised, least)
    above = key > least
    equal = key == least
    # Two counts in one scan: fewer than COUNT are above, in the upper half.
    before = tl.cumsum(above.to(tl.int32) * 65536 + equal.to(tl.int32), axis=0)
    count_above = tl.sum(above.to(tl.int32), axis=0)
    place = tl.where(above, before >> 16, count_above + (before & 65535)) - 1
    return above | (equal & (place < COUNT)), place


@triton.jit
def group_best_kernel(
    parts_ptr,
    logits_ptr,
    stride,
    V: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    INF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (cdiv(GROUPS, BLOCK), R)."""
    let_next_start_and_wait(DEPENDENT)
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    key = _load_keys(logits_ptr + row * stride + column, column < V, BITS, INF)
    tl.store(parts_ptr + row * GROUPS + group, tl.max(key, axis=1), mask=group < GROUPS)


@triton.jit
def select_groups_kernel(
    y_ptr,
    best_ptr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    BITS: tl.constexpr,
    INF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (R)."""
    let_next_start_and_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK)
    key = tl.load(best_ptr + row * GROUPS + group, mask=group < GROUPS, other=-INF - 2)
    chosen, place = _largest(key, COUNT, BITS)
    tl.store(y_ptr + row * COUNT + place, group, mask=chosen)


@triton.jit
def select_columns_kernel(
    y_ptr,
    groups_ptr,
    logits_ptr,
    stride,
    V: tl.constexpr,
    CHOSEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    BITS: tl.constexpr,
    INF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (R)."""
    let_next_start_and_wait(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    real = i < CHOSEN * GROUP
    group = tl.load(groups_ptr + row * CHOSEN + i // GROUP, mask=real, other=0)
    column = group * GROUP + i % GROUP
    key = _load_keys(logits_ptr + row * stride + column, real & (column < V), BITS, INF)
    chosen, place = _largest(key, COUNT, BITS)
    tl.store(y_ptr + row * COUNT + place, column, mask=chosen)


@triton.jit
def rescore_kernel(
    y_ptr,
    best_ptr,
    weight_ptr,
    x_ptr,
    stride_y,
    stride_x,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (count, R)."""
    let_next_start_and_wait(DEPENDENT)
    row = tl.program_id(1).to(tl.int64)
    column = tl.load(best_ptr + row * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    k = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in tl.static_range(0, K, BLOCK):
        inside = first + k < K
        w = tl.load(weight_ptr + column * K + first + k, mask=inside, other=0.0).to(tl.float32)
        total += w * tl.load(x_ptr + row * stride_x + first + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * stride_y + column, tl.sum(total, axis=0).to(y_ptr.dtype.element_ty))


# ---------------------------------------------------------------------------------------------------------- launcher


@torch.library.custom_op("nybble::largest", mutates_args=())
def largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """int32 [R, count]: the indices of each row's `count` largest logits, in no order; of equals always the
    same ones.

    logits  [R, V] float16, bfloat16 or float32, V at most 2 Mi, contiguous but for any stride of the rows. A NaN is less
            than every number, so that it is not chosen while there are others
    count   1 to V, at most 64

    Raises ValueError for anything else, before anything is launched.
    """
    check_logits(logits)
    rows, vocab = logits.shape
    if vocab > MAX_VOCAB:
        raise ValueError(f"logits: given V={vocab}, accepted at most {MAX_VOCAB}")
    if not 1 <= count <= min(vocab, MAX_COUNT):
        raise ValueError(f"count: given {count}, accepted 1 to {min(vocab, MAX_COUNT)}")
    y = torch.empty(rows, count, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return y
    bits, stride = bits_of(logits), logits.stride(0)
    form = {"BITS": 8 * logits.element_size(), "INF": INFINITY[logits.dtype]}
    overlap = dependent.options(logits.device)
    groups = triton.cdiv(vocab, _GROUP)
    parts = torch.empty(rows, groups, dtype=torch.int32, device=logits.device)
    group_best_kernel[(triton.cdiv(groups, _GROUPS_PER_PROGRAM), rows)](
        parts,
        bits,
        stride,
        V=vocab,
        GROUPS=groups,
        GROUP=_GROUP,
        BLOCK=_GROUPS_PER_PROGRAM,
        **form,
        **overlap,
        num_warps=4,
    )
    chosen = min(count, groups)
    held = torch.empty(rows, chosen, dtype=torch.int32, device=logits.device)
    block = power_of_two(groups)
    select_groups_kernel[(rows,)](
        held, parts, GROUPS=groups, BLOCK=block, COUNT=chosen, **form, **overlap, num_warps=_warps(block)
    )
    block = power_of_two(chosen) * _GROUP
    select_columns_kernel[(rows,)](
        y,
        held,
        bits,
        stride,
        V=vocab,
        CHOSEN=chosen,
        GROUP=_GROUP,
        BLOCK=block,
        COUNT=count,
        **form,
        **overlap,
        num_warps=_warps(block),
    )
    return y


@largest.register_fake
def _(logits: torch.Tensor, count: int) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], count, dtype=torch.int32)


def _warps(block: int) -> int:
    """8 numbers a lane, as far as there are warps."""
    return min(16, max(1, block // 256))


@torch.library.custom_op("nybble::rescore", mutates_args=("logits",))
def rescore(logits: torch.Tensor, best: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> None:
    """logits[r, best[r, i]] = weight[best[r, i]] . x[r], in place, summed in float32.

    logits  [R, V] float16, bfloat16 or float32, contiguous but for any stride of the rows
    best    [R, C] int32, 0 to V - 1, distinct in a row
    weight  [V, K] and x [R, K] of one 16-bit type or float32, contiguous but for any stride of x's rows

    Raises ValueError for any other shape, type, stride or device, before anything is launched.
    """
    check_logits(logits)
    rows, vocab = logits.shape
    types = (*HALF_TYPES, torch.float32)
    check("best", best, INT_TYPES, (rows, "C"), logits.device)
    check("x", x, types, (rows, "K"), logits.device, row_stride=True)
    check("weight", weight, (x.dtype,), (vocab, x.shape[1]), logits.device)
    count = best.shape[1]
    if rows == 0 or count == 0:
        return
    k = x.shape[1]
    rescore_kernel[(count, rows)](
        logits,
        best,
        weight,
        x,
        logits.stride(0),
        x.stride(0),
        K=k,
        BLOCK=min(_BLOCK_K, power_of_two(k)),
        num_warps=4,
        **dependent.options(logits.device),
    )


# --------------------------------------------------------------------------------------------------------- reference


def largest_reference(logits: torch.Tensor, count: int) -> torch.Tensor:
    """int32 [R, count]: indices of the `count` largest."""
    return _with_nan_last(logits).topk(count, dim=1).indices.to(torch.int32)


def are_largest(logits: torch.Tensor, best: torch.Tensor) -> bool:
    """Whether best [R, C] are distinct indices of the C largest of each row, whichever of equals."""
    values = _with_nan_last(logits)
    if not bool(
        ((best >= 0) & (best < logits.shape[1])).all() and (best.sort(dim=1).values.diff() > 0).all()
    ):
        return False
    taken = values.gather(1, best.long()).sort(dim=1, descending=True).values
    return torch.equal(taken, values.topk(best.shape[1], dim=1).values)


def _with_nan_last(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.float64).nan_to_num(nan=-1e41, neginf=-1e40, posinf=1e40)


def rescore_reference(
    logits: torch.Tensor, best: torch.Tensor, weight: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """float32 [R, V]: the new logits."""
    rows = weight.to(torch.float32)[best.long()]
    exact = torch.einsum("rck,rk->rc", rows, x.to(torch.float32))
    return logits.to(torch.float32).scatter(1, best.long(), exact)
