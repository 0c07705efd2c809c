"""W4A16 GEMM in Triton on the skinny layout: y[M, N] = x[M, K] @ w[N, K]^T + bias, dequantised inside.

Every target Triton has, RDNA included. On RDNA the Gluon kernel of `triton_skinny_rdna` is preferred where Triton ships
Gluon; both stand behind `skinny_gemm` here, with one contract.

How it works. A program owns block_n weight rows and block_m activation rows and walks K in steps of block_k <= G, so that a
step has one scale and one zero point per weight row. The dot takes exact integers q - z in the activation type and the
scale meets the fp32 result of a step; tiles with `scale_weights` round (q - z) * s to the activation type instead, as a
dequantised copy does, which leaves the matrix unit one running sum. The weight is the dot's first operand: its rows fill the matrix unit's fixed
64 or 16 rows while block_m follows the batch down to 16. Where one wave of programs would leave the chip idle, K is
split; partial sums go to fp32 scratch and a second small kernel adds them in a fixed order.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from types import ModuleType

import torch
import triton
import triton.language as tl

from nybble.kernels import dependent
from nybble.kernels import launch as launching
from nybble.kernels.dependent import let_next_start_and_wait
from nybble.kernels.fused.activation import activate, check_activation
from nybble.kernels.linear import operands
from nybble.kernels.tiles import Tile, tile_for

RDNA = ("gfx11", "gfx120")
_X_CLIFF_BYTES = 2048
_X_PAD_BYTES = 128
# Rows up to which the gate is applied inside the gate_up GEMM whatever its tile: a decode step's launches are its limit.
_GATED_ALWAYS_ROWS = 64

_log = logging.getLogger(__name__)

# ----------------------------------------------------------------------------------------------------------- kernel


@triton.jit
def _pair(
    words, zero, scale, P: tl.constexpr, BF16: tl.constexpr, SCALED: tl.constexpr, BACKEND: tl.constexpr
):
    """Values 2P and 2P+1 of each word as two 16-bit lanes: q - z in fp16 or bf16, exactly, or SCALED, (q - z) * s.

    OR-ing q into 1024.0 (fp16) or 128.0 (bf16) makes 1024 + q or 128 + q; subtracting 1024 + z or 128 + z is exact.
    zero int32 and scale int32 (s in both lanes) [BN, 1].
    """
    nibbles = (words >> (4 * P)) & 0x000F000F
    if BACKEND == "cuda" and BF16:
        magic, offset = nibbles | 0x43004300, (zero * 0x00010001) | -0x3CFF3D00
        if SCALED:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 one, nil, w; mov.b32 one, 0x3F803F80; mov.b32 nil, 0x80008000; "
                "fma.rn.bf16x2 w, $1, one, $2; fma.rn.bf16x2 $0, w, $3, nil; }",
                "=r,r,r,r",
                [magic, offset, scale],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        else:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 one; mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, $1, one, $2; }",
                "=r,r,r",
                [magic, offset],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
    elif BACKEND == "cuda":
        magic, offset = nibbles | 0x64006400, (zero * 0x00010001) | 0x64006400
        if SCALED:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 w; sub.f16x2 w, $1, $2; mul.f16x2 $0, w, $3; }",
                "=r,r,r,r",
                [magic, offset, scale],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        else:
            return tl.inline_asm_elementwise(
                "sub.f16x2 $0, $1, $2;", "=r,r,r", [magic, offset], dtype=tl.int32, is_pure=True, pack=1
            )
    elif BACKEND == "hip" and not BF16 and not SCALED:
        return tl.inline_asm_elementwise(
            "v_pk_add_f16 $0, $1, $2 neg_lo:[0,1] neg_hi:[0,1]",
            "=v,v,v",
            [nibbles | 0x64006400, (zero * 0x00010001) | 0x64006400],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        low = ((nibbles & 0xF) - zero).to(tl.float32)
        high = ((nibbles >> 16) - zero).to(tl.float32)
        if SCALED:
            lane = scale.to(tl.int16)
            factor = lane.to(tl.bfloat16 if BF16 else tl.float16, bitcast=True).to(tl.float32)
            low *= factor
            high *= factor
        if BF16 and not SCALED:
            # A small integer's fp32 has a zero lower half: cutting it off is exact.
            return (low.to(tl.int32, bitcast=True) >> 16 & 0xFFFF) | (
                high.to(tl.int32, bitcast=True) & -0x10000
            )
        elif BF16:
            low16 = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            return low16 | (high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
        else:
            low16 = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            return low16 | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _unpack(
    words,
    zero,
    scale,
    DTYPE: tl.constexpr,
    SCALED: tl.constexpr,
    BACKEND: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """int32 [BN, BK/8], z and s int32 [BN, 1] -> q - z or (q - z) * s as DTYPE [BN, BK] in natural k order."""
    bf16: tl.constexpr = DTYPE == tl.bfloat16
    p0 = _pair(words, zero, scale, 0, bf16, SCALED, BACKEND)
    p1 = _pair(words, zero, scale, 1, bf16, SCALED, BACKEND)
    p2 = _pair(words, zero, scale, 2, bf16, SCALED, BACKEND)
    p3 = _pair(words, zero, scale, 3, bf16, SCALED, BACKEND)
    pairs = tl.reshape(tl.join(tl.join(p0, p2), tl.join(p1, p3)), (BN, BK // 2))
    low = pairs.to(tl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.reshape(tl.join(low, high), (BN, BK))


@triton.jit
def w4a16_skinny(
    x_ptr,
    w_ptr,
    s_ptr,
    z_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    stride_sn,
    stride_zn,
    stride_ym,
    part,
    G: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    GATED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BACKEND: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One [block_m, block_n] tile over `part` groups of K. Where the grid splits K in S, y is fp32 [S, M, N], no bias.

    GATED, a name or None: rows of the weight alternate gate and up, y is GATED(gate) * up, [M, N/2].
    """
    let_next_start_and_wait(DEPENDENT)
    pid = tl.program_id(0)
    split = tl.program_id(1)
    tiles_m = tl.cdiv(M, BM)
    # Neighbouring programs share weight rows: the weight is read from memory once, x comes from the cache.
    pid_m = pid % tiles_m
    pid_n = pid // tiles_m
    rows_m = pid_m * BM + tl.arange(0, BM)
    rows_n = pid_n * BN + tl.arange(0, BN)
    # Rows past the end read the last one: no mask, no access outside the tensors. With fewer rows of x than one tile, on CUDA
    # with any that do not fill their last tile, they are masked instead: programs would fetch one line of x many times at
    # the same moment (on an H200 a pass of 320 rows took 1.8 times as long as one of 512). K has no tail: BK | G | K.
    safe_m = tl.minimum(rows_m, M - 1).to(tl.int64)
    safe_n = tl.minimum(rows_n, N - 1).to(tl.int64)

    first = split * part * (G // BK)
    last = tl.minimum(first + part * (G // BK), K // BK)
    x_ptrs = x_ptr + safe_m[None, :] * stride_xm + tl.arange(0, BK)[:, None]
    w_ptrs = w_ptr + safe_n[:, None] * stride_wn + tl.arange(0, BK // 8)[None, :]
    s_ptrs = s_ptr + safe_n * stride_sn
    z_ptrs = z_ptr + (safe_n // 8) * stride_zn
    z_shift = ((safe_n % 8) * 4).to(tl.int32)

    acc = tl.zeros((BN, BM), tl.float32)
    # Scales and zero points run a step ahead: Triton pipelines the dot's operands only.
    scale = tl.load(s_ptrs + first * BK // G)
    if BACKEND == "hip" and not HAS_ZEROS:
        # An 8 that Triton up to 3.8 does not see through (3.9 does). With a constant it unpacks in the dot's own layout,
        # in which RDNA's lanes hold each weight several times, and does the work as often: 17 instructions per WMMA, not 7.
        zero = tl.inline_asm_elementwise(
            "v_mov_b32 $0, 8", "=v,v", [z_shift], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        zero = tl.full((BN,), 8, tl.int32)
    if HAS_ZEROS:
        zero_word = tl.load(z_ptrs + first * BK // G)
    for step in range(first, last):
        if MASKED:
            x = tl.load(x_ptrs + step * BK, mask=(rows_m < M)[None, :], other=0.0)
        else:
            x = tl.load(x_ptrs + step * BK)
        words = tl.load(w_ptrs + step * (BK // 8))
        group = tl.minimum(step + 1, last - 1) * BK // G
        now = scale
        scale = tl.load(s_ptrs + group)
        if HAS_ZEROS:
            zero = (zero_word >> z_shift) & 0xF
            zero_word = tl.load(z_ptrs + group)
        if SCALED:
            lanes = (now.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x00010001
            w = _unpack(words, zero[:, None], lanes[:, None], x_ptr.dtype.element_ty, True, BACKEND, BN, BK)
            if BACKEND == "interpreter":  # its dot multiplies the bit patterns of bf16
                acc += tl.dot(w.to(tl.float32), x.to(tl.float32))
            else:
                acc = tl.dot(w, x, acc)
        else:
            w = _unpack(words, zero[:, None], zero[:, None], x_ptr.dtype.element_ty, False, BACKEND, BN, BK)
            if BACKEND == "interpreter":
                product = tl.dot(w.to(tl.float32), x.to(tl.float32))
            else:
                product = tl.dot(w, x)
            acc += product * now.to(tl.float32)[:, None]

    out = tl.trans(acc)
    if HAS_BIAS:
        out += tl.load(bias_ptr + safe_n).to(tl.float32)[None, :]
    if GATED is not None:
        gate, up = tl.split(tl.reshape(out, (BM, BN // 2, 2)))
        out = activate(gate, GATED) * up
        rows_n = pid_n * (BN // 2) + tl.arange(0, BN // 2)
        inside = (rows_m < M)[:, None] & (rows_n < N // 2)[None, :]
    else:
        inside = (rows_m < M)[:, None] & (rows_n < N)[None, :]
    y_ptrs = y_ptr + (split.to(tl.int64) * M + rows_m)[:, None] * stride_ym + rows_n[None, :]
    tl.store(y_ptrs, out.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def w4a16_reduce(
    partial_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    stride_ym,
    SPLIT_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y[m, n] = sum over splits of fp32 [SPLIT_K, M, N], in order, + bias."""
    let_next_start_and_wait(DEPENDENT)
    m = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < N
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLIT_K):
        total += tl.load(partial_ptr + (split * M + m) * N + cols, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + m * stride_ym + cols, total.to(y_ptr.dtype.element_ty), mask=inside)


# --------------------------------------------------------------------------------------------------------- launcher


@torch.library.custom_op("nybble::w4a16_triton_skinny", mutates_args=())
def skinny_gemm(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    """y [M, N] of x's type = x @ ((q - z) * s)^T + bias, products summed in fp32.

    x       [M, K] float16 or bfloat16, unit column stride, any row stride
    words   int32 [N, K/8] in the skinny layout, unit column stride, any row stride
    scales  [N, K/G] float16, bfloat16 or float32, unit column stride, any row stride
    zeros   int32 [N/8, K/G] packed along N, unit column stride, or None for z = 8
    bias    [N] of x's type, or None

    Raises ValueError for any other shape, type, stride or device, before anything is launched.
    """
    operands.check(x, words, scales, zeros, bias, group_size)
    return launch(x, words, scales, zeros, bias, group_size)


@skinny_gemm.register_fake
def _(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], words.shape[0])


@torch.library.custom_op("nybble::w4a16_triton_skinny_parts", mutates_args=())
def skinny_gemm_parts(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    """`skinny_gemm` before the addition of its K parts: fp32 [S, M, N] without bias where the chip's tile splits K, else
    [1, M, N], the finished result."""
    operands.check(x, words, scales, zeros, bias, group_size)
    return launch_parts(x, words, scales, zeros, bias, group_size, _tile(x, words, zeros, group_size))


@skinny_gemm_parts.register_fake
def _(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    return _empty_parts(x, words.shape[0], _tile(x, words, zeros, group_size))


@torch.library.custom_op("nybble::w4a16_triton_skinny_gated", mutates_args=())
def skinny_gemm_gated(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    activation: str,
) -> torch.Tensor:
    """activation(gate) * up, [M, N/2] of x's type, where rows 2i of the weight are gates and rows 2i + 1 ups; see
    `skinny_gemm` for the other arguments. activation: "silu" or "gelu_tanh". K is never split.

    Raises ValueError as `skinny_gemm` does, and for an odd N.
    """
    operands.check(x, words, scales, zeros, bias, group_size)
    check_activation(activation)
    if words.shape[0] % 2:
        raise ValueError(f"words: given N={words.shape[0]}, accepted an even N (gates and ups alternate)")
    tile = replace(_tile(x, words, zeros, group_size), split_k=1)
    return launch_parts(x, words, scales, zeros, bias, group_size, tile, activation)[0]


@skinny_gemm_gated.register_fake
def _(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    activation: str,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], words.shape[0] // 2)


def gates(x: torch.Tensor, words: torch.Tensor, zeros: torch.Tensor | None, group_size: int) -> bool:
    """Whether `skinny_gemm_gated` pays: where K would be split for many rows, parts are faster; for few rows the launch
    it saves is worth more."""
    return words.shape[0] % 2 == 0 and (
        x.shape[0] <= _GATED_ALWAYS_ROWS or _tile(x, words, zeros, group_size).split_k == 1
    )


def launch(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    tile: Tile | None = None,
) -> torch.Tensor:
    """`skinny_gemm` on arguments already checked, with a tile of the caller's choice (default: the chip's table)."""
    if tile is None:
        tile = _tile(x, words, zeros, group_size)
    parts = launch_parts(x, words, scales, zeros, bias, group_size, tile)
    if tile.split_k == 1:
        return parts[0]
    y = x.new_empty(parts.shape[1:])
    if y.numel():
        reduce_splits(parts, bias, y)
    return y


def launch_parts(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    tile: Tile,
    gated: str | None = None,
) -> torch.Tensor:
    """The GEMM kernel alone, on arguments already checked: [1, M, N], or fp32 [S, M, N] without bias where the tile
    splits K; gated, by an activation's name, [1, M, N/2]."""
    check_step(tile, group_size)
    out = _empty_parts(x, words.shape[0] // (2 if gated else 1), tile)
    if out.numel() == 0:
        return out
    arch = launching.target_of(x.device).arch
    gluon = _gluon_kernel() if arch.startswith(RDNA) else None
    x = _off_the_cliff(x, arch)
    y = out[0] if tile.split_k == 1 else out
    if gluon:
        gluon.launch_tiles(
            x, words, scales, zeros, bias, y, group_size, tile, arch.startswith("gfx12"), gated
        )
    else:
        _launch_tiles(x, words, scales, zeros, bias, y, group_size, tile, gated)
    return out


def _tile(x: torch.Tensor, words: torch.Tensor, zeros: torch.Tensor | None, group_size: int) -> Tile:
    """The chip's tile for these arguments."""
    arch = launching.target_of(x.device).arch
    (m, k), n = x.shape, words.shape[0]
    return tile_for(arch, max(m, 1), max(n, 1), k, group_size, x.dtype, zeros is None, table_name(arch))


def _empty_parts(x: torch.Tensor, n: int, tile: Tile) -> torch.Tensor:
    if tile.split_k == 1:
        return x.new_empty(1, x.shape[0], n)
    return x.new_empty(tile.split_k, x.shape[0], n, dtype=torch.float32)


def _launch_tiles(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    group_size: int,
    tile: Tile,
    gated: str | None,
) -> None:
    m, k = x.shape
    n = words.shape[0]
    backend = launching.backend_of(x.device)
    grid = (triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n), tile.split_k)
    w4a16_skinny[grid](
        x,
        words,
        scales,
        words if zeros is None else zeros,
        x if bias is None else bias,
        out,
        m,
        n,
        k,
        x.stride(0),
        words.stride(0),
        scales.stride(0),
        0 if zeros is None else zeros.stride(0),
        n // 2 if gated else n,
        triton.cdiv(k // group_size, tile.split_k),
        G=group_size,
        HAS_ZEROS=zeros is not None,
        HAS_BIAS=bias is not None and tile.split_k == 1,
        # A scale of another type would be rounded twice on its way into the weight.
        SCALED=tile.scale_weights and scales.dtype == x.dtype,
        MASKED=m < tile.block_m or (backend == "cuda" and m % tile.block_m > 0),
        GATED=gated,
        BM=tile.block_m,
        BN=tile.block_n,
        BK=tile.block_k,
        BACKEND=backend,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent.options(x.device),
    )


def check_step(tile: Tile, group_size: int) -> None:
    """Raise ValueError unless each step along K lies within one group."""
    if tile.block_k > group_size or group_size % tile.block_k:
        raise ValueError(
            f"tile block_k {tile.block_k}: given group_size {group_size}, accepted a block_k that divides it "
            "(a wider step would take one group's scale for its neighbour)"
        )


def _off_the_cliff(x: torch.Tensor, arch: str) -> torch.Tensor:
    """x, or on gfx1151 a copy with padded rows where x's row stride aliases in the vector caches (2048 bytes)."""
    if arch != "gfx1151" or x.shape[0] < 2 or x.stride(0) * x.element_size() % _X_CLIFF_BYTES:
        return x
    m, k = x.shape
    padded = x.new_empty(m, k + _X_PAD_BYTES // x.element_size())[:, :k]
    return padded.copy_(x)


def reduce_splits(partial: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
    """y [M, N] = sum of fp32 partial [S, M, N] over S, in order, + bias."""
    splits, m, n = partial.shape
    block = 512
    w4a16_reduce[(triton.cdiv(n, block), m)](
        partial,
        partial if bias is None else bias,
        y,
        m,
        n,
        y.stride(0),
        SPLIT_K=splits,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        num_warps=4,
        **dependent.options(y.device),
    )


def table_name(arch: str) -> str:
    """Which tile table serves `skinny_gemm` on this chip."""
    return "skinny_rdna" if arch.startswith(RDNA) and _gluon_kernel() else "skinny"


@functools.cache
def _gluon_kernel() -> ModuleType | None:
    """The RDNA kernel's module, or None, said once, where this Triton has no usable Gluon."""
    try:
        from nybble.kernels.linear import triton_skinny_rdna
    except (ImportError, AttributeError) as error:
        _log.warning("no Gluon in this Triton (%s): the plain Triton kernel serves RDNA", error)
        return None
    return triton_skinny_rdna
