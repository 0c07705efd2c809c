"""Paged attention in Triton: decode split along the sequence, and prefill over cached prefixes, from one kernel.

A layer's cache is [blocks, 2, Hkv, block_size, D], keys first: one head's keys of a block lie together, so a tile of keys
is a few contiguous pieces. Everything an element of the cache needs to be found is its block, head and offset: an 8-bit
cache would add scales [blocks, 2, Hkv, block_size] beside it and change no index here.

    q [T, H, D], rows of sequence b at q_start[b]..q_start[b+1]
    table[b, i], the block of its positions i * block_size..     kv_len[b], cached positions, those of its rows included

    paged_attention      a program takes block_m (row, query head) pairs that share one key-value head and walks its keys in
                         steps of block_n, softmax running in fp32
    reduce_splits        where the keys are split over programs (decode: few rows, many keys), adds the parts up
    reduce_prompt_splits the same for prompts whose rows alone would leave much of the chip idle. Those with few keys have one
                         part, which is stored as the result at once

The query heads of a key-value head are rows of one tile, so that its keys are read once for all of them. Splits are cut
from kv_len on the device: a captured launch stays right while sequences grow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nybble.kernels import dependent, launch
from nybble.kernels.attention import MAX_HEAD_DIM
from nybble.kernels.attention.paged import FEW_ROWS
from nybble.kernels.dependent import (
    fetch_into_l2,
    let_next_start,
    let_next_start_and_wait,
    wait_for_last,
)
from nybble.kernels.launch import HALF_TYPES, INT_TYPES, check, power_of_two
from nybble.kernels.target import Target

MAX_SPLITS = 64
# Programs that a decode launch aims at, per compute unit: several share one to hide the latency of memory.
_PROGRAMS_PER_UNIT = 4
# Of prompts, whose tiles are larger: two find room on one. A part is worth at least so many steps.
MAX_PROMPT_SPLITS, _PROMPT_PROGRAMS_PER_UNIT, _LEAST_TILES = 16, 2, 8
# Heads of a program that adds up a prompt's parts, and sequences up to which all launches are one kernel.
_REDUCED_HEADS, _KNOWN_SEQUENCES = 4, 256
# Rows of streams beside prompts: parts of the keys of each at least, since few of them may be there.
_STREAM_SPLITS = 8
# Of a few rows of prompts, of which mostly one is there, no more are needed than fill the chip for it, nor than these.
_FEW_ROWS_SPLITS = 32
_LOG2_E = 1.4426950408889634

# ----------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _split_tiles(
    kv_len, q_len, window, splits, LEAST: tl.constexpr, WINDOWED: tl.constexpr, BN: tl.constexpr
):
    """(first tile any row sees, tiles, tiles per split, at least LEAST): the same for all kernels."""
    first = 0
    if WINDOWED:
        first = tl.maximum(kv_len - q_len - window + 1, 0) // BN
    tiles = tl.cdiv(kv_len, BN) - first
    return first, tiles, tl.maximum(tl.cdiv(tiles, splits), LEAST)


@triton.jit
def _key_offset(block, key, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Elements from a head's first key in the cache to `key`, which lies in this block."""
    return block.to(tl.int64) * (2 * KV_HEADS * BLOCK_SIZE * D) + (key % BLOCK_SIZE) * D


@triton.jit
def _fetch_tile(
    k_ptr,
    table_ptr,
    stride_table_block,
    start,
    stop,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BN: tl.constexpr,
):
    """Keys and values of the first step of start..stop into L2: all but the newest were written by steps before this one."""
    LINE: tl.constexpr = 64  # elements
    key = tl.minimum(start + tl.arange(0, BN), tl.maximum(stop - 1, 0))
    block = tl.load(table_ptr + (key // BLOCK_SIZE) * stride_table_block)
    at = _key_offset(block, key, KV_HEADS, D, BLOCK_SIZE)
    lines = tl.minimum(tl.arange(0, max(DP // LINE, 1)) * LINE, D - 1)
    pointers = k_ptr + at[:, None] + lines[None, :]
    fetch_into_l2(pointers)
    fetch_into_l2(pointers + KV_HEADS * BLOCK_SIZE * D)


@triton.jit
def _attend(
    acc,
    top,
    total,
    q,
    k_ptr,
    table_ptr,
    stride_table_block,
    start,
    stop,
    kv_len,
    position,
    window,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BN: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Keys start..stop (start a multiple of BN) added to the running softmax. Without MASKED every row sees all of them."""
    dims = tl.arange(0, DP)
    for key0 in range(start, stop, BN):
        key = key0 + tl.arange(0, BN)
        # A key that no row sees is not read: its block may be anybody's.
        if MASKED:
            known = key < kv_len
            block = tl.load(table_ptr + (key // BLOCK_SIZE) * stride_table_block, mask=known, other=0)
        else:
            block = tl.load(table_ptr + (key // BLOCK_SIZE) * stride_table_block)
        at = _key_offset(block, key, KV_HEADS, D, BLOCK_SIZE)
        pointers = k_ptr + at[:, None] + dims[None, :]
        values = pointers + KV_HEADS * BLOCK_SIZE * D
        if MASKED and D == DP:
            k = tl.load(pointers, mask=known[:, None], other=0.0)
            v = tl.load(values, mask=known[:, None], other=0.0)
        elif MASKED:
            k = tl.load(pointers, mask=known[:, None] & (dims < D)[None, :], other=0.0)
            v = tl.load(values, mask=known[:, None] & (dims < D)[None, :], other=0.0)
        elif D == DP:
            k = tl.load(pointers)
            v = tl.load(values)
        else:
            k = tl.load(pointers, mask=(dims < D)[None, :], other=0.0)
            v = tl.load(values, mask=(dims < D)[None, :], other=0.0)
        if INTERPRETED:
            scores = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)))
        else:
            scores = tl.dot(q, tl.trans(k))
        # In units of log2, for exp2. tanh(x) = 1 - 2 / (e^2x + 1), right at both infinities.
        if CAPPED:
            scores = softcap * (1 - 2 / (tl.exp2(scores * scale) + 1))
        else:
            scores = scores * scale
        if MASKED:
            visible = key[None, :] <= position[:, None]
            if WINDOWED:
                visible &= key[None, :] > position[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # A row that has seen no key yet: minus infinity less minus infinity would be NaN.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(scores - shift[:, None])
        keep = tl.exp2(top - shift)
        total = total * keep + tl.sum(p, axis=1)
        if INTERPRETED:
            acc = acc * keep[:, None] + tl.dot(p, v.to(tl.float32))
        else:
            acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None])
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["stride_table", "stride_table_block", "row_blocks", "splits", "window"])
def paged_attention_kernel(
    y_ptr,
    parts_ptr,
    lse_ptr,
    q_ptr,
    cache_ptr,
    table_ptr,
    q_start_ptr,
    kv_len_ptr,
    stride_qt,
    stride_table,
    stride_table_block,
    row_blocks,
    splits,
    window,
    scale,
    softcap,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    LEAST: tl.constexpr,
    PEEL: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (sequences * row_blocks, Hkv, splits). Without SPLIT y [T, H, D]; with it the part of each split: its own
    softmax, fp32 [T, H, splits, D], and the log2 of that softmax's sum, [T, H, splits]. LEAST > 1: a sequence that has
    one part alone goes to y."""
    let_next_start(DEPENDENT)
    sequence = tl.program_id(0) // row_blocks
    # The last rows of a prompt see the most keys: they go first.
    row_block = row_blocks - 1 - tl.program_id(0) % row_blocks
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    first_row = tl.load(q_start_ptr + sequence)
    q_len = tl.load(q_start_ptr + sequence + 1) - first_row
    kv_len = tl.load(kv_len_ptr + sequence)
    if row_block * BM >= q_len * GROUP:
        return

    first_position = kv_len - q_len + row_block * BM // GROUP
    start = 0
    if WINDOWED:
        start = tl.maximum(first_position - window + 1, 0) // BN * BN
    stop = tl.minimum(kv_len, kv_len - q_len + (row_block * BM + BM - 1) // GROUP + 1)
    if SPLIT:
        first_tile, tiles, per_split = _split_tiles(kv_len, q_len, window, splits, LEAST, WINDOWED, BN)
        # Of a sequence that is not there LEAST > 1 has the first split store zeros; else reduce_splits does.
        if split * per_split >= (tl.maximum(tiles, 1) if LEAST > 1 else tiles):
            return
        start = tl.maximum(start, (first_tile + split * per_split) * BN)
        stop = tl.minimum(stop, (first_tile + (split + 1) * per_split) * BN)
    k_ptr = cache_ptr + kv_head * BLOCK_SIZE * D
    table_ptr += sequence * stride_table
    if DEPENDENT and SPLIT:
        _fetch_tile(k_ptr, table_ptr, stride_table_block, start, stop, KV_HEADS, D, DP, BLOCK_SIZE, BN)
    # Of every sequence that is there at least the first split has come to here.
    wait_for_last(DEPENDENT)

    pair = row_block * BM + tl.arange(0, BM)
    inside = pair < q_len * GROUP
    position = kv_len - q_len + pair // GROUP
    row = (first_row + pair // GROUP).to(tl.int64)
    head = kv_head * GROUP + pair % GROUP
    dims = tl.arange(0, DP)
    q = tl.load(
        q_ptr + row[:, None] * stride_qt + head[:, None] * D + dims[None, :],
        mask=inside[:, None] & (dims < D)[None, :],
        other=0.0,
    )
    # Up to here every row sees every key.
    plain = start
    if PEEL:
        plain = tl.maximum(start, tl.minimum(stop, (first_position + 1) // BN * BN))

    acc = tl.zeros((BM, DP), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    if PEEL:
        acc, top, total = _attend(
            acc, top, total, q, k_ptr, table_ptr, stride_table_block, start, plain, kv_len, position, window,
            scale, softcap, KV_HEADS, D, DP, BLOCK_SIZE, BN, False, WINDOWED, CAPPED, INTERPRETED,
        )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q, k_ptr, table_ptr, stride_table_block, plain, stop, kv_len, position, window,
        scale, softcap, KV_HEADS, D, DP, BLOCK_SIZE, BN, True, WINDOWED, CAPPED, INTERPRETED,
    )  # fmt: skip

    total = tl.where(total == 0, 1.0, total)
    out = acc / total[:, None]
    here = row * (KV_HEADS * GROUP) + head
    stored = inside[:, None] & (dims < D)[None, :]
    if SPLIT:
        alone = False
        if LEAST > 1:
            alone = tiles <= per_split
        if alone:
            tl.store(y_ptr + here[:, None] * D + dims[None, :], out.to(y_ptr.dtype.element_ty), mask=stored)
        else:
            tl.store(parts_ptr + (here * splits + split)[:, None] * D + dims[None, :], out, mask=stored)
            tl.store(lse_ptr + here * splits + split, top + tl.log2(total), mask=inside)
    else:
        tl.store(y_ptr + here[:, None] * D + dims[None, :], out.to(y_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["rows", "splits", "window"])
def reduce_splits(
    y_ptr,
    parts_ptr,
    lse_ptr,
    q_start_ptr,
    kv_len_ptr,
    rows,
    splits,
    window,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BN: tl.constexpr,
    WINDOWED: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (sequences * rows, H): y[t, h] = the parts of the splits, each weighed by its share of the softmax's sum."""
    let_next_start(DEPENDENT)
    sequence = tl.program_id(0) // rows
    first_row = tl.load(q_start_ptr + sequence)
    q_len = tl.load(q_start_ptr + sequence + 1) - first_row
    kv_len = tl.load(kv_len_ptr + sequence)
    if tl.program_id(0) % rows >= q_len:
        return
    row = (first_row + tl.program_id(0) % rows).to(tl.int64)
    here = row * HEADS + tl.program_id(1)
    _, tiles, per_split = _split_tiles(kv_len, q_len, window, splits, 1, WINDOWED, BN)
    split = tl.arange(0, MAX_SPLITS)
    written = split < tl.cdiv(tiles, per_split)
    dims = tl.arange(0, DP)
    wait_for_last(DEPENDENT)
    lse = tl.load(lse_ptr + here * splits + split, mask=written, other=float("-inf"))
    parts = tl.load(
        parts_ptr + (here * splits + split)[:, None] * D + dims[None, :],
        mask=written[:, None] & (dims < D)[None, :],
        other=0.0,
    )
    top = tl.max(lse, axis=0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, axis=0)
    out = tl.sum(parts * weight[:, None], axis=0) / tl.where(total == 0, 1.0, total)
    tl.store(y_ptr + here * D + dims, out.to(y_ptr.dtype.element_ty), mask=dims < D)


@triton.jit(do_not_specialize=["sequences", "splits", "window"])
def reduce_prompt_splits(
    y_ptr,
    parts_ptr,
    lse_ptr,
    q_start_ptr,
    kv_len_ptr,
    sequences,
    splits,
    window,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BN: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    WINDOWED: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MAX_SEQUENCES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (T, H / HEAD_BLOCK), behind the first row of these sequences: as reduce_splits, for rows whose sequence has more
    than one part."""
    # Even a program that has nothing to do: where all have, the next launch must not overtake the one before this.
    let_next_start_and_wait(DEPENDENT)
    row = tl.load(q_start_ptr) + tl.program_id(0)
    order = tl.arange(0, MAX_SEQUENCES)
    ends = tl.load(q_start_ptr + 1 + order, mask=order < sequences, other=2147483647)
    sequence = tl.sum((ends <= row).to(tl.int32), axis=0)
    if sequence >= sequences:
        return
    first_row = tl.load(q_start_ptr + sequence)
    q_len = tl.load(q_start_ptr + sequence + 1) - first_row
    kv_len = tl.load(kv_len_ptr + sequence)
    _, tiles, per_split = _split_tiles(kv_len, q_len, window, splits, LEAST, WINDOWED, BN)
    if tiles <= per_split:
        return
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    known = head < HEADS
    here = row.to(tl.int64) * HEADS + head
    used = tl.cdiv(tiles, per_split)
    dims = tl.arange(0, DP)
    split = tl.arange(0, MAX_SPLITS)
    lse = tl.load(
        lse_ptr + here[:, None] * splits + split[None, :],
        mask=known[:, None] & (split < used)[None, :],
        other=float("-inf"),
    )
    top = tl.max(lse, axis=1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse - shift[:, None]), axis=1)
    stored = known[:, None] & (dims < D)[None, :]
    out = tl.zeros((HEAD_BLOCK, DP), tl.float32)
    for i in range(used):
        weight = tl.exp2(tl.load(lse_ptr + here * splits + i, mask=known, other=float("-inf")) - shift)
        part = tl.load(parts_ptr + (here * splits + i)[:, None] * D + dims[None, :], mask=stored, other=0.0)
        out += part * weight[:, None]
    out /= tl.where(total == 0, 1.0, total)[:, None]
    tl.store(y_ptr + here[:, None] * D + dims[None, :], out.to(y_ptr.dtype.element_ty), mask=stored)


# ---------------------------------------------------------------------------------------------------------- launcher


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """block_m: (row, head) pairs of a program; block_n: keys of a step. peel: steps that need no mask run in a loop of
    their own, which pays where arithmetic is the limit and costs registers."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 1
    peel: bool = False


def tile_for(target: Target, group: int, head_dim: int, few_rows: bool, max_q: int) -> AttentionTile:
    """The tile for `group` query heads a key-value head. few_rows: at most FEW_ROWS rows a sequence; then there are two
    tiles, for one row and for more, so that no row count needs a compilation of its own."""
    wide = head_dim > 128
    if target.kind == "rocm":
        # Operands live in registers: 64 rows of 128 elements with 32 keys take 242 of RDNA3's 256. Two loops would spill,
        # and so would the addresses that split keys need (Triton 3.6).
        rows = 16 if wide else 32 if few_rows and head_dim > 64 else 64
        block_n, stages, most, peel = (16 if wide else 32), 1, rows, False
    elif target.lds_bytes >= 160 << 10:
        block_n, stages, most, peel = (32 if wide else 64), 3, (64 if wide else 128), True
    else:
        block_n, stages, most, peel = 32, 2, (32 if wide else 64), True
    if few_rows:
        rows = 1 if max_q == 1 else FEW_ROWS
        block_m = min(max(16, power_of_two(rows * group)), 64, most)
        if target.kind != "rocm" and block_m == 16 and not wide:
            # On an H200 the whole of a decode step is 2 % shorter than with 4 warps and 3 stages, at 1k and at 16k positions:
            # a program leaves room on its multiprocessor for the launches that come after it.
            return AttentionTile(block_m, block_n, 2, 2)
        return AttentionTile(block_m, block_n, 4, stages)
    return AttentionTile(most, block_n, 8 if most == 128 else 4, stages, peel)


def splits_for(target: Target, sequences: int, kv_heads: int, row_blocks: int) -> int:
    """Parts to cut each sequence's keys into, so that a launch of few programs fills the chip. No function of the
    length: the kernel itself leaves the parts empty that a short sequence does not need."""
    programs = max(1, sequences * kv_heads * row_blocks)
    return max(1, min(MAX_SPLITS, _PROGRAMS_PER_UNIT * target.compute_units // programs))


def prompt_splits_for(target: Target, kv_heads: int, row_blocks: int) -> int:
    """The same for prompts' rows, as if all were one sequence's: the others of its launch need not be there. fp32 parts of
    all rows take as many bytes whatever that is. RDNA has no registers left for it (tile_for)."""
    if target.kind == "rocm":
        return 1
    programs = _PROMPT_PROGRAMS_PER_UNIT * target.compute_units
    return max(1, min(MAX_PROMPT_SPLITS, programs // (kv_heads * row_blocks)))


@torch.library.custom_op("nybble::paged_attention", mutates_args=())
def paged_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    q_start: torch.Tensor,
    kv_len: torch.Tensor,
    max_q: int,
    window: int,
    scale: float,
    softcap: float,
    streams: int = 0,
) -> torch.Tensor:
    """Causal attention [T, H, D] of q's rows over their sequences' cached keys.

    q        [T, H, D] float16 or bfloat16, rows of any stride; the rows of sequence b are its last positions
    cache    [blocks, 2, Hkv, block_size, D] of q's type, keys first; H a multiple of Hkv, block_size a power of two
    table    int32 [B, W], any strides: the blocks of each sequence, as many as kv_len needs
    q_start  int32 [B + 1], first row of each sequence, and one past the last
    kv_len   int32 [B], cached positions, those of the rows included; 0 (with one row) for a sequence that is not there
    max_q    no sequence has more rows
    streams  so many sequences, the first, have one row at most, however many others have: they are computed as in a decode
             step. Of these, and of the others, at least one is there; 0: no such distinction
    window   a row sees this many positions, itself included; 0 for all
    softcap  a scaled score s becomes softcap * tanh(s / softcap); 0 for none

    Not written by the launch ahead in the stream (see kernels/dependent.py): table, q_start, kv_len.

    Rows that belong to no sequence are left as they come. Raises ValueError for any other shape, type, stride or device,
    before anything is launched.
    """
    check_arguments(q, cache, table, q_start, kv_len, max_q, window, softcap, streams)
    return launch_attention(q, cache, table, q_start, kv_len, max_q, window, scale, softcap, streams)


@paged_attention.register_fake
def _(
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    q_start: torch.Tensor,
    kv_len: torch.Tensor,
    max_q: int,
    window: int,
    scale: float,
    softcap: float,
    streams: int = 0,
) -> torch.Tensor:
    return q.new_empty(q.shape)


def launch_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    q_start: torch.Tensor,
    kv_len: torch.Tensor,
    max_q: int,
    window: int,
    scale: float,
    softcap: float,
    streams: int = 0,
    tile: AttentionTile | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """`paged_attention` on arguments already checked, with a tile and splits of the caller's choice."""
    y = q.new_empty(q.shape)
    target = launch.target_of(q.device)
    heads, dim = q.shape[1:]
    kv_heads = cache.shape[2]
    for first, last, most in ((0, streams, 1), (streams, len(kv_len), max_q)):
        sequences = last - first
        if sequences == 0 or len(q) == 0:
            continue
        few_rows = most <= FEW_ROWS
        chosen = tile_for(target, heads // kv_heads, dim, few_rows, most) if tile is None else tile
        row_blocks = triton.cdiv(most * heads // kv_heads, chosen.block_m)
        if splits is not None:
            parts = splits
        elif few_rows:
            # Some, however many sequences: without splits it would be another kernel, compiled while requests wait.
            least = _STREAM_SPLITS if streams else 1
            if most > 1:
                # A pass of many such prompts fills the chip, and its parts are large.
                wanted = _FEW_ROWS_SPLITS * FEW_ROWS // max(FEW_ROWS, len(q))
                least = max(2, min(wanted, splits_for(target, 1, kv_heads, row_blocks)))
            parts = max(splits_for(target, sequences, kv_heads, row_blocks), least)
        else:
            parts = prompt_splits_for(
                target, kv_heads, triton.cdiv(len(q) * heads // kv_heads, chosen.block_m)
            )
        _launch(
            y,
            q,
            cache,
            table[first:last],
            q_start[first : last + 1],
            kv_len[first:last],
            len(q) if last > streams else min(streams, len(q)),
            most,
            window,
            scale,
            softcap,
            chosen,
            parts,
        )
    return y


def _launch(
    y: torch.Tensor,
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    q_start: torch.Tensor,
    kv_len: torch.Tensor,
    rows: int,
    max_q: int,
    window: int,
    scale: float,
    softcap: float,
    tile: AttentionTile,
    splits: int,
) -> None:
    """The rows of these sequences, which are among the first `rows`, into y."""
    heads, dim = q.shape[1:]
    _, _, kv_heads, block_size, _ = cache.shape
    sequences = kv_len.shape[0]
    group = heads // kv_heads
    row_blocks = triton.cdiv(max_q * group, tile.block_m)
    split, few_rows = splits > 1, max_q <= FEW_ROWS
    least = 1 if few_rows else _LEAST_TILES
    parts = q.new_empty(rows, heads, splits, dim, dtype=torch.float32) if split else q
    lse = q.new_empty(rows, heads, splits, dtype=torch.float32) if split else q
    padded = power_of_two(dim)
    paged_attention_kernel[(sequences * row_blocks, kv_heads, splits)](
        y,
        parts,
        lse,
        q,
        cache,
        table,
        q_start,
        kv_len,
        q.stride(0),
        table.stride(0),
        table.stride(1),
        row_blocks,
        splits,
        window,
        2 * scale * _LOG2_E / softcap if softcap else scale * _LOG2_E,
        softcap * _LOG2_E,
        GROUP=group,
        KV_HEADS=kv_heads,
        D=dim,
        DP=padded,
        BLOCK_SIZE=block_size,
        BM=tile.block_m,
        BN=tile.block_n,
        SPLIT=split,
        LEAST=least,
        PEEL=tile.peel and window == 0,
        WINDOWED=window > 0,
        CAPPED=softcap > 0,
        INTERPRETED=launch.backend_of(q.device) == "interpreter",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent.options(q.device),
    )
    if split and few_rows:
        reduce_splits[(sequences * max_q, heads)](
            y,
            parts,
            lse,
            q_start,
            kv_len,
            max_q,
            splits,
            window,
            HEADS=heads,
            D=dim,
            DP=padded,
            BN=tile.block_n,
            WINDOWED=window > 0,
            MAX_SPLITS=MAX_SPLITS,
            num_warps=4,
            **dependent.options(q.device),
        )
    elif split:
        reduce_prompt_splits[(rows, triton.cdiv(heads, _REDUCED_HEADS))](
            y,
            parts,
            lse,
            q_start,
            kv_len,
            sequences,
            splits,
            window,
            HEADS=heads,
            D=dim,
            DP=padded,
            BN=tile.block_n,
            HEAD_BLOCK=_REDUCED_HEADS,
            LEAST=least,
            WINDOWED=window > 0,
            MAX_SPLITS=MAX_PROMPT_SPLITS,
            MAX_SEQUENCES=max(_KNOWN_SEQUENCES, power_of_two(sequences)),
            num_warps=2,
            **dependent.options(q.device),
        )


def check_arguments(
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    q_start: torch.Tensor,
    kv_len: torch.Tensor,
    max_q: int,
    window: int,
    softcap: float,
    streams: int = 0,
) -> None:
    """Raise ValueError unless the arguments are what `paged_attention` documents."""
    device = q.device
    check("q", q, HALF_TYPES, ("T", "H", "D"), device, row_stride=True)
    heads, dim = q.shape[1:]
    check("cache", cache, (q.dtype,), ("blocks", 2, "Hkv", "block_size", dim), device)
    kv_heads, block_size = cache.shape[2:4]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q: given {heads} heads, accepted a multiple of the cache's {kv_heads}")
    if not 0 < dim <= MAX_HEAD_DIM:
        raise ValueError(f"q: given head dimension {dim}, accepted 1 to {MAX_HEAD_DIM}")
    if block_size != power_of_two(block_size):
        raise ValueError(f"cache: given block_size {block_size}, accepted a power of two")
    check("kv_len", kv_len, INT_TYPES, ("B",), device)
    sequences = kv_len.shape[0]
    check("q_start", q_start, INT_TYPES, (sequences + 1,), device)
    if table.ndim != 2 or table.dtype != torch.int32 or table.shape[0] != sequences or table.device != device:
        raise ValueError(
            f"table: given {launch.given(table)} on {table.device}, accepted int32 [{sequences}, W] on {device}"
        )
    if max_q < 1 or window < 0 or softcap < 0:
        raise ValueError(
            f"max_q, window, softcap: given {max_q}, {window}, {softcap}, accepted at least 1, 0, 0 "
            "(window 0: all positions, softcap 0: none)"
        )
    if not 0 <= streams < max(sequences, 1):
        raise ValueError(
            f"streams: given {streams}, accepted 0 to {max(sequences - 1, 0)}, of {sequences} sequences"
        )


# --------------------------------------------------------------------------------------------------------- reference


def paged_attention_reference(
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    q_start: torch.Tensor,
    kv_len: torch.Tensor,
    window: int,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """float32 [T, H, D] of `paged_attention`'s arguments: each sequence's keys gathered, then plain attention. Rows of
    sequences that are not there are 0."""
    from nybble.kernels.attention.reference import attention_reference

    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    starts = q_start.tolist()
    for b, length in enumerate(kv_len.tolist()):
        if length == 0:
            continue
        blocks = table[b, : -(-length // cache.shape[3])].long()
        # [n, 2, Hkv, block_size, D] -> [2, n * block_size, Hkv, D]
        k, v = cache[blocks].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
        rows = slice(starts[b], starts[b + 1])
        out[rows] = attention_reference(q[rows], k, v, scale, window or None, softcap or None)
    return out
