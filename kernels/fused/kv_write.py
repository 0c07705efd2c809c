"""Everything between the qkv GEMM and attention in one launch: q/k norm, rotation, and the write into the KV cache.

    qkv [T, (H + 2 Hkv) D], heads of q, then k, then v
      q heads:  norm, rotate ----> q [T, H, D]
      k heads:  norm, rotate ----> cache, at the row's slot
      v heads:  as they are -----> cache

A program takes a few heads of one row as two tiles, the lower and the upper halves of each head, which rotation mixes.
Models without q/k norm leave it out (HAS_NORM).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nybble.kernels import dependent
from nybble.kernels.dependent import let_next_start, wait_for_last
from nybble.kernels.fused.parts import check_parts, load_parts, padded_splits
from nybble.kernels.launch import FLOAT_TYPES, HALF_TYPES, INT_TYPES, check, power_of_two
from nybble.kernels.norm import rms_norm_reference
from nybble.kernels.parts import parts_reference

_HEADS_PER_PROGRAM = 4

# ------------------------------------------------------------------------------------------------------------ kernel


@triton.jit(do_not_specialize=["splits", "stride_part", "eps"])
def norm_rope_write_kernel(
    y_ptr,
    cache_ptr,
    x_ptr,
    bias_ptr,
    norm_ptr,
    angles_ptr,
    position_ptr,
    slot_ptr,
    splits,
    stride_part,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HB: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (T, cdiv(H + 2 Hkv, HB)). HALF: D / 2 rounded up to a power of two."""
    let_next_start(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HB + tl.arange(0, HB)
    half = tl.arange(0, HALF)
    turned = (head < HEADS + KV_HEADS)[:, None]
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (half < D // 2)[None, :]
    column = head[:, None] * D + half[None, :]
    at = row * ((HEADS + 2 * KV_HEADS) * D) + column
    if HAS_NORM:
        weight_at = tl.where(head < HEADS, 0, D)[:, None] + half[None, :]
        low_weight = tl.load(norm_ptr + weight_at, mask=inside, other=0.0).to(tl.float32)
        high_weight = tl.load(norm_ptr + weight_at + D // 2, mask=inside, other=0.0).to(tl.float32)
    angle_at = tl.load(position_ptr + row).to(tl.int64) * D + half
    cos = tl.load(angles_ptr + angle_at, mask=half < D // 2, other=0.0)[None, :]
    sin = tl.load(angles_ptr + angle_at + D // 2, mask=half < D // 2, other=0.0)[None, :]
    slot = tl.load(slot_ptr + row)
    wait_for_last(DEPENDENT)
    low = load_parts(x_ptr, bias_ptr, at, column, inside, splits, stride_part, SPLITS, HAS_BIAS)
    high = load_parts(
        x_ptr, bias_ptr, at + D // 2, column + D // 2, inside, splits, stride_part, SPLITS, HAS_BIAS
    )
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / D + eps)
        low = tl.where(turned, low * scale[:, None] * low_weight, low)
        high = tl.where(turned, high * scale[:, None] * high_weight, high)
    out_low = tl.where(turned, low * cos - high * sin, low).to(y_ptr.dtype.element_ty)
    out_high = tl.where(turned, high * cos + low * sin, high).to(y_ptr.dtype.element_ty)

    is_q = (head < HEADS)[:, None] & inside
    y_at = y_ptr + row * (HEADS * D) + column
    tl.store(y_at, out_low, mask=is_q)
    tl.store(y_at + D // 2, out_high, mask=is_q)

    written = tl.where(slot < 0, 0, HEADS + 2 * KV_HEADS)
    is_kv = ((head >= HEADS) & (head < written))[:, None] & (half < D // 2)[None, :]
    block = (slot // BLOCK_SIZE).to(tl.int64) * (2 * KV_HEADS * BLOCK_SIZE * D) + (slot % BLOCK_SIZE) * D
    cache_at = cache_ptr + block + ((head - HEADS) * (BLOCK_SIZE * D))[:, None] + half[None, :]
    tl.store(cache_at, out_low, mask=is_kv)
    tl.store(cache_at + D // 2, out_high, mask=is_kv)


# ---------------------------------------------------------------------------------------------------------- launcher


@torch.library.custom_op("nybble::norm_rope_write", mutates_args=("cache",))
def norm_rope_write(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    angles: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """q [T, H, D], normed and rotated; keys and values go to the cache.

    x, bias    the qkv GEMM's parts, [S, T, (H + 2 Hkv) D] of the cache's type or float32, and [(H + 2 Hkv) D] or None
    norm       [2, D] weights of the q and the k norm, or None for a model without
    angles     float32 [P, D], a position's cosines, then its sines
    positions  int32 [T], each under P
    slots      int32 [T], where a row's key and value go: block * block_size + offset, or negative for nowhere
    cache      [blocks, 2, Hkv, block_size, D] float16 or bfloat16, keys first, D even

    Not written by the launch ahead in the stream (see kernels/dependent.py): norm, angles, positions, slots.

    Raises ValueError for any other shape, type, stride or device, before anything is launched.
    """
    heads = _check(x, bias, norm, angles, positions, slots, cache)
    rows = x.shape[1]
    _, _, kv_heads, block_size, dim = cache.shape
    q = cache.new_empty(rows, heads, dim)
    if rows == 0:
        return q
    norm_rope_write_kernel[(rows, triton.cdiv(heads + 2 * kv_heads, _HEADS_PER_PROGRAM))](
        q,
        cache,
        x,
        x if bias is None else bias,
        angles if norm is None else norm,
        angles,
        positions,
        slots,
        x.shape[0],
        rows * x.shape[2],
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=dim,
        HALF=power_of_two(dim // 2),
        BLOCK_SIZE=block_size,
        HB=_HEADS_PER_PROGRAM,
        SPLITS=padded_splits(x),
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        num_warps=2,
        **dependent.options(cache.device),
    )
    return q


@norm_rope_write.register_fake
def _(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    angles: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    dim = cache.shape[4]
    return cache.new_empty(x.shape[1], x.shape[2] // dim - 2 * cache.shape[2], dim)


def _check(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    angles: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
) -> int:
    """H. Raises ValueError unless the arguments are what `norm_rope_write` documents."""
    device = cache.device
    check("cache", cache, HALF_TYPES, ("blocks", 2, "Hkv", "block_size", "D"), device)
    kv_heads, dim = cache.shape[2], cache.shape[4]
    if dim % 2 or dim == 0:
        raise ValueError(f"cache: given head dimension {dim}, accepted an even one")
    check_parts("x", x, bias, "T", "(H + 2 Hkv) D", device)
    rows, width = x.shape[1:]
    heads = width // dim - 2 * kv_heads
    if width % dim or heads < 1:
        raise ValueError(
            f"x: given {width} columns, accepted (H + 2 * {kv_heads}) * {dim} with at least one query head"
        )
    if norm is not None:
        check("norm", norm, HALF_TYPES, (2, dim), device)
    check("angles", angles, FLOAT_TYPES, ("P", dim), device)
    check("positions", positions, INT_TYPES, (rows,), device)
    check("slots", slots, INT_TYPES, (rows,), device)
    return heads


# --------------------------------------------------------------------------------------------------------- reference


def norm_rope_write_reference(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    angles: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q float32 [T, H, D], the cache after the write in float32)."""
    _, _, kv_heads, block_size, dim = cache.shape
    qkv = parts_reference(x, bias)
    qkv = qkv.view(len(qkv), qkv.shape[1] // dim, dim)
    heads = qkv.shape[1] - 2 * kv_heads
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    if norm is not None:
        q, k = rms_norm_reference(q, norm[0], eps), rms_norm_reference(k, norm[1], eps)
    cos, sin = angles[positions.long()].unsqueeze(1).chunk(2, dim=-1)

    def turn(t: torch.Tensor) -> torch.Tensor:
        low, high = t.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    after = cache.to(torch.float32)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            where = after[slot // block_size, :, :, slot % block_size]
            where[0], where[1] = turn(k)[row], v[row]
    return turn(q), after
