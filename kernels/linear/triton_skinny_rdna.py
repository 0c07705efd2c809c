"""The skinny-layout GEMM written for RDNA's issue slots, in Gluon (Triton's layout-explicit language).

A 16x16x16 WMMA keeps a SIMD busy for 32 cycles and every vector instruction beside it costs one more, so what counts is
the number of vector instructions per WMMA. Each weight is unpacked once per workgroup, into LDS as exact q - z; the scale
never meets a weight: a group's products are summed alone and folded into the running fp32 sum with one fma per output.
Addresses are a scalar base that moves plus lane offsets that never change (buffer loads). Global loads run one step
ahead in registers; LDS is double-buffered, so a step has one barrier.

For bf16 at block_m <= 32, where unpacking dominates, the products take raw 128 + q and (128 + z) * sum(x) leaves the
sum once per group; the row sums come from the same pass, in fp32.

`triton_skinny.launch` chooses this kernel; importing this module fails where Triton ships no Gluon.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import AMDWMMALayout
from triton.experimental.gluon.language.amd.cdna3 import buffer_load, buffer_store
from triton.experimental.gluon.language.amd.rdna3 import wmma as wmma_rdna3
from triton.experimental.gluon.language.amd.rdna4 import wmma as wmma_rdna4

from nybble.kernels.tiles import Tile

# One word of eight nibbles -> four registers of two fp16 lanes, 1024 + q (or 1024 + 16 q where the nibble sits at bits
# 4-7), minus the offset: 9 instructions. As assembly, because LLVM splits the packed arithmetic into scalars.
_FP16_ASM = """
v_and_or_b32 $0, $4, $5, $7
v_and_or_b32 $1, $4, $6, $7
v_lshrrev_b32 $3, 8, $4
v_and_or_b32 $2, $3, $5, $7
v_and_or_b32 $3, $3, $6, $7
v_pk_add_f16 $0, $0, $9
v_pk_fma_f16 $1, $1, $8, $10
v_pk_add_f16 $2, $2, $9
v_pk_fma_f16 $3, $3, $8, $10
"""

# The same into bf16 lanes: RDNA3 has no packed bf16 arithmetic, but v_fma_mix reads one fp16 lane and yields fp32, whose
# upper half is the exact bf16 of a small integer: 17 instructions.
_BF16_ASM = """
v_and_or_b32 $0, $6, $7, $9
v_lshrrev_b32 $4, 8, $6
v_and_or_b32 $1, $6, $8, $9
v_and_or_b32 $2, $4, $7, $9
v_and_or_b32 $3, $4, $8, $9
v_fma_mix_f32 $4, $0, $14, $11 op_sel_hi:[1,0,0]
v_fma_mix_f32 $5, $0, $14, $11 op_sel:[1,0,0] op_sel_hi:[1,0,0]
v_perm_b32 $0, $5, $4, $13
v_fma_mix_f32 $4, $1, $10, $12 op_sel_hi:[1,0,0]
v_fma_mix_f32 $5, $1, $10, $12 op_sel:[1,0,0] op_sel_hi:[1,0,0]
v_perm_b32 $1, $5, $4, $13
v_fma_mix_f32 $4, $2, $14, $11 op_sel_hi:[1,0,0]
v_fma_mix_f32 $5, $2, $14, $11 op_sel:[1,0,0] op_sel_hi:[1,0,0]
v_perm_b32 $2, $5, $4, $13
v_fma_mix_f32 $4, $3, $10, $12 op_sel_hi:[1,0,0]
v_fma_mix_f32 $5, $3, $10, $12 op_sel:[1,0,0] op_sel_hi:[1,0,0]
v_perm_b32 $3, $5, $4, $13
"""
_FP16_ASM_C = gl.constexpr(_FP16_ASM.strip())
_BF16_ASM_C = gl.constexpr(_BF16_ASM.strip())


# Public from Triton 3.9 on, underscored before.
_PUBLIC_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def _lanes_of(lds, DTYPE: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, LAYOUT: gl.constexpr):
    """LDS words [ROWS, COLS/2] seen as [ROWS, COLS] of a 16-bit type."""
    if _PUBLIC_REINTERPRET:
        return lds.reinterpret(DTYPE, (ROWS, COLS), LAYOUT)
    else:
        return lds._reinterpret(DTYPE, (ROWS, COLS), LAYOUT)


@gluon.jit
def _wmma(a, b, acc, RDNA4: gl.constexpr):
    if RDNA4:
        return wmma_rdna4(a, b, acc)
    else:
        return wmma_rdna3(a, b, acc)


@gluon.jit
def _unpack(words, z, BF16: gl.constexpr, HAS_ZEROS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr):
    """int32 [BN, BK/8] -> int32 [BN, BK/2], each two lanes of q - z in natural k order. z int32 [BN, 1]."""
    if BF16:
        if HAS_ZEROS:
            near = -1024.0 - z.to(gl.float32)
            far = -64.0 - z.to(gl.float32)
            p0, p1, p2, p3, t0, t1 = gl.inline_asm_elementwise(
                _BF16_ASM_C,
                "=&v,=&v,=&v,=&v,=&v,=&v,v,s,s,s,s,v,v,s,s",
                [words, 0x000F000F, 0x00F000F0, 0x64006400, 0x3D800000, near, far, 0x07060302, 1.0],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
                is_pure=True,
                pack=1,
            )
        else:
            p0, p1, p2, p3, t0, t1 = gl.inline_asm_elementwise(
                _BF16_ASM_C,
                "=&v,=&v,=&v,=&v,=&v,=&v,v,s,s,s,s,s,s,s,s",
                [words, 0x000F000F, 0x00F000F0, 0x64006400, 0x3D800000, -1032.0, -72.0, 0x07060302, 1.0],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
                is_pure=True,
                pack=1,
            )
    else:
        if HAS_ZEROS:
            # fp16 -(1024 + z) is 0xE400 | z; fp16 -(64 + z) is 0xD400 | z << 4
            near = (z * 0x00010001) | -0x1BFF1C00
            far = (z * 0x00100010) | -0x2BFF2C00
            p0, p1, p2, p3 = gl.inline_asm_elementwise(
                _FP16_ASM_C,
                "=&v,=&v,=&v,=&v,v,s,s,s,s,v,v",
                [words, 0x000F000F, 0x00F000F0, 0x64006400, 0x2C002C00, near, far],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
                is_pure=True,
                pack=1,
            )
        else:
            p0, p1, p2, p3 = gl.inline_asm_elementwise(
                _FP16_ASM_C,
                "=&v,=&v,=&v,=&v,v,s,s,s,s,s,s",
                [words, 0x000F000F, 0x00F000F0, 0x64006400, 0x2C002C00, -0x1BF71BF8, -0x2B7F2B80],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
                is_pure=True,
                pack=1,
            )
    return gl.reshape(gl.join(gl.join(p0, p2), gl.join(p1, p3)), (BN, BK // 2))


@gluon.jit
def _unpack_raw(words, BN: gl.constexpr, BK: gl.constexpr):
    """int32 [BN, BK/8] -> int32 [BN, BK/2], each two bf16 lanes of 128 + q: 7 instructions a word, z still inside."""
    p0 = (words & 0x000F000F) | 0x43004300
    p1 = ((words >> 4) & 0x000F000F) | 0x43004300
    p2 = ((words >> 8) & 0x000F000F) | 0x43004300
    p3 = ((words >> 12) & 0x000F000F) | 0x43004300
    return gl.reshape(gl.join(gl.join(p0, p2), gl.join(p1, p3)), (BN, BK // 2))


@gluon.jit
def _row_sums(x, start, BM: gl.constexpr, BK: gl.constexpr):
    """start + the sums of eight neighbouring bf16 of x (int32 [BM, BK/2]) in fp32 -> [BM, BK/8]."""
    first, second = gl.split(gl.reshape(x, (BM, BK // 8, 2, 2)))
    a, b = gl.split(first)
    c, d = gl.split(second)
    return gl.inline_asm_elementwise(
        "v_dot2_f32_bf16 $0, $1, $5, $6\nv_dot2_f32_bf16 $0, $2, $5, $0\n"
        "v_dot2_f32_bf16 $0, $3, $5, $0\nv_dot2_f32_bf16 $0, $4, $5, $0",
        "=&v,v,v,v,v,s,v",
        [a, b, c, d, 0x3F803F80, start],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _round_to_bf16(x):
    """fp32 -> bf16, nearest even: three instructions where LLVM's expansion, which also quiets NaNs, takes six.

    A NaN keeps its upper half. Only one with all upper bits and bit 15 set would round away, and no sum of bf16 products
    makes that.
    """
    bits = x.to(gl.int32, bitcast=True)
    return ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def w4a16_skinny_rdna(
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
    G: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    DTYPE: gl.constexpr,
    RDNA4: gl.constexpr,
    ROW_SUMS: gl.constexpr,
    GATED: gl.constexpr,
    X_REGS: gl.constexpr,
    W_REGS: gl.constexpr,
    ACC: gl.constexpr,
    K_WIDTH: gl.constexpr,
    X_LDS: gl.constexpr,
    X_LDS_16: gl.constexpr,
    W_LDS: gl.constexpr,
    W_LDS_16: gl.constexpr,
    Y_REGS: gl.constexpr,
    GATED_REGS: gl.constexpr,
):
    """One [block_m, block_n] tile over `part` groups of K. Where the grid splits K in S, y is fp32 [S, M, N], no bias.

    x is read as int32, two values of DTYPE each. With ROW_SUMS (bf16) the products take 128 + q as it stands, and
    (128 + z) * sum of the row's activations leaves the sum once per group.
    GATED, a name or None: rows of the weight alternate gate and up, y is GATED(gate) * up, [M, N/2].
    """
    bf16: gl.constexpr = DTYPE == gl.bfloat16
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, K_WIDTH)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, K_WIDTH)
    steps: gl.constexpr = G // BK
    gl.static_assert(steps % 2 == 0 or steps == 1)

    pid = gl.program_id(0)
    split = gl.program_id(1)
    tiles_m = gl.cdiv(M, BM)
    first_m = (pid % tiles_m) * BM
    first_n = (pid // tiles_m) * BN
    groups = K // G
    first = split * part
    last = gl.minimum(first + part, groups)

    # Rows past the end read the last row: nothing is masked in the loop, nothing outside the tensors is touched.
    left_m = M - first_m
    left_n = N - first_n
    x_rows = gl.minimum(gl.arange(0, BM, gl.SliceLayout(1, X_REGS)), left_m - 1)
    x_off = x_rows[:, None] * stride_xm + gl.arange(0, BK // 2, gl.SliceLayout(0, X_REGS))[None, :]
    w_rows = gl.minimum(gl.arange(0, BN, gl.SliceLayout(1, W_REGS)), left_n - 1)
    w_off = w_rows[:, None] * stride_wn + gl.arange(0, BK // 8, gl.SliceLayout(0, W_REGS))[None, :]
    s_rows = gl.minimum(gl.arange(0, BN, gl.SliceLayout(0, ACC)), left_n - 1)
    s_off = s_rows * stride_sn
    # Zero points belong to the unpacking lanes, or to the sums. first_n is a multiple of 8, so a row's word and nibble
    # can be told from its place in the tile.
    Z_ROWS: gl.constexpr = gl.SliceLayout(0, ACC) if ROW_SUMS else gl.SliceLayout(1, W_REGS)
    if ROW_SUMS:
        z_rows = s_rows
    else:
        z_rows = w_rows
    z_off = (z_rows // 8) * stride_zn
    z_shift = (z_rows % 8) * 4

    x_base = x_ptr + first_m.to(gl.int64) * stride_xm + first * (G // 2)
    w_base = w_ptr + first_n.to(gl.int64) * stride_wn + first * (G // 8)
    s_base = s_ptr + first_n.to(gl.int64) * stride_sn
    z_base = z_ptr + (first_n // 8).to(gl.int64) * stride_zn

    x_lds0 = gl.allocate_shared_memory(gl.int32, (BM, BK // 2), X_LDS)
    x_lds1 = gl.allocate_shared_memory(gl.int32, (BM, BK // 2), X_LDS)
    w_lds0 = gl.allocate_shared_memory(gl.int32, (BN, BK // 2), W_LDS)
    w_lds1 = gl.allocate_shared_memory(gl.int32, (BN, BK // 2), W_LDS)
    x_view0 = _lanes_of(x_lds0, DTYPE, BM, BK, X_LDS_16)
    x_view1 = _lanes_of(x_lds1, DTYPE, BM, BK, X_LDS_16)
    w_view0 = _lanes_of(w_lds0, DTYPE, BN, BK, W_LDS_16).permute((1, 0))
    w_view1 = _lanes_of(w_lds1, DTYPE, BN, BK, W_LDS_16).permute((1, 0))

    # Added to a column's scale: the pair of additions puts neighbouring columns' scales into registers of both parities,
    # which is what lets the compiler pair the fma of two columns into one v_dual_fmac.
    zero = gl.full((BM, BN), 0.0, gl.float32, ACC)
    total = gl.full((BM, BN), 0.0, gl.float32, ACC)
    x = buffer_load(x_base, x_off)
    words = buffer_load(w_base, w_off)
    if HAS_ZEROS:
        z_word = buffer_load(z_base + first, z_off)
    for group in range(first, last):
        scale = buffer_load(s_base + group, s_off)
        if HAS_ZEROS:
            z = (z_word >> z_shift) & 0xF
            z_word = buffer_load(z_base + gl.minimum(group + 1, last - 1), z_off)
        else:
            z = gl.full((BN,), 8, gl.int32, Z_ROWS)
        partial = gl.full((BM, BN), 0.0, gl.float32, ACC)
        for step in gl.static_range(steps):
            if ROW_SUMS:
                pairs = _unpack_raw(words, BN, BK)
                if step == 0:
                    sums = _row_sums(x, 0.0, BM, BK)
                else:
                    sums = _row_sums(x, sums, BM, BK)
            else:
                pairs = _unpack(words, z[:, None], bf16, HAS_ZEROS, BN, BK)
            # Two buffers in turn: a store meets no wave still reading the other one. (A group of one step has but the
            # first buffer, and the compiler puts a second barrier there.)
            if step % 2 == 0:
                x_lds0.store(x)
                w_lds0.store(pairs)
            else:
                x_lds1.store(x)
                w_lds1.store(pairs)
            # The last step of all reads its own tile again rather than past the end.
            more = gl.where((step + 1 < steps) | (group + 1 < last), 1, 0)
            x_base += more * (BK // 2)
            w_base += more * (BK // 8)
            x = buffer_load(x_base, x_off)
            words = buffer_load(w_base, w_off)
            if step % 2 == 0:
                for k0 in gl.static_range(0, BK, 16):
                    a = x_view0.slice(k0, 16, dim=1).load(A)
                    partial = _wmma(a, w_view0.slice(k0, 16, dim=0).load(B), partial, RDNA4)
            else:
                for k0 in gl.static_range(0, BK, 16):
                    a = x_view1.slice(k0, 16, dim=1).load(A)
                    partial = _wmma(a, w_view1.slice(k0, 16, dim=0).load(B), partial, RDNA4)
        if ROW_SUMS:
            row_sum = gl.convert_layout(gl.sum(sums, axis=1), gl.SliceLayout(1, ACC))
            excess = scale.to(gl.float32) * (-128.0 - z.to(gl.float32))
            total = gl.fma(row_sum[:, None] - zero, excess[None, :] + zero, total)
        total = gl.fma(partial, scale.to(gl.float32)[None, :] + zero, total)

    out_type: gl.constexpr = y_ptr.dtype.element_ty
    if HAS_BIAS:
        bias = buffer_load(bias_ptr + first_n, s_rows)
        total += bias.to(gl.float32)[None, :]
    COLUMNS: gl.constexpr = BN if GATED is None else BN // 2
    REGS: gl.constexpr = Y_REGS if GATED is None else GATED_REGS
    if GATED is not None:
        gate, up = gl.split(gl.reshape(gl.convert_layout(total, Y_REGS), (BM, COLUMNS, 2)))
        if GATED == "silu":
            inner = gate
        else:  # the tanh form of GELU is a sigmoid too
            gl.static_assert(GATED == "gelu_tanh")
            inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        total = gl.convert_layout(gate / (1 + gl.exp2(-1.4426950408889634 * inner)) * up, REGS)
        first_n = first_n // 2
        left_n = left_n // 2
    y_n = gl.arange(0, COLUMNS, gl.SliceLayout(0, REGS))
    y_m = gl.arange(0, BM, gl.SliceLayout(1, REGS))
    if out_type == gl.bfloat16:
        out = gl.convert_layout(_round_to_bf16(total), REGS)
    else:
        out = gl.convert_layout(total.to(out_type), REGS)
    y_base = y_ptr + (split.to(gl.int64) * M + first_m) * stride_ym + first_n
    inside = (y_m < left_m)[:, None] & (y_n < left_n)[None, :]
    buffer_store(out, y_base, y_m[:, None] * stride_ym + y_n[None, :], inside)


ROW_SUMS_MAX_BLOCK_M = 32


def launch_tiles(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    group_size: int,
    tile: Tile,
    rdna4: bool,
    gated: str | None = None,
) -> None:
    """Run the kernel into `out`: y [M, N], or with split_k > 1 fp32 [S, M, N] without bias; gated [M, N/2]. Arguments
    are checked."""
    m, k = x.shape
    n = words.shape[0]
    if x.stride(0) % 2 or x.data_ptr() % 4:  # read as int32
        x = x.contiguous()
    pairs = x.view(torch.int32)
    grid = (triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n), tile.split_k)
    w4a16_skinny_rdna[grid](
        pairs,
        words,
        scales,
        words if zeros is None else zeros,
        x if bias is None else bias,
        out,
        m,
        n,
        k,
        pairs.stride(0),
        words.stride(0),
        scales.stride(0),
        0 if zeros is None else zeros.stride(0),
        n // 2 if gated else n,
        triton.cdiv(k // group_size, tile.split_k),
        G=group_size,
        HAS_ZEROS=zeros is not None,
        HAS_BIAS=bias is not None and tile.split_k == 1,
        BM=tile.block_m,
        BN=tile.block_n,
        BK=tile.block_k,
        DTYPE=gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16,
        RDNA4=rdna4,
        ROW_SUMS=x.dtype == torch.bfloat16 and tile.block_m <= ROW_SUMS_MAX_BLOCK_M,
        GATED=gated,
        num_warps=tile.num_warps,
        **layouts(tile, rdna4),
    )


def _log2(value: int) -> int:
    return value.bit_length() - 1


def wmma_layout(rdna4: bool, warps_m: int, warps_n: int) -> AMDWMMALayout:
    """Accumulator layout with warps_m x warps_n waves; Triton 3.6 spells the waves differently from later ones."""
    version = 2 if rdna4 else 1
    names = {f for f in AMDWMMALayout.__dataclass_fields__}
    if "warps_per_cta" in names:
        return AMDWMMALayout(version=version, transposed=False, warps_per_cta=[warps_m, warps_n])
    bases = [[0, 1 << i] for i in range(_log2(warps_n))] + [[1 << i, 0] for i in range(_log2(warps_m))]
    return AMDWMMALayout(version=version, transposed=False, warp_bases=bases)


def _rows_layout(rows: int, cols: int, per_thread: int, warps: int) -> gl.BlockedLayout:
    """[rows, cols] row-major: `per_thread` consecutive columns a lane, lanes along the row first, then waves down."""
    lanes = min(32, max(1, cols // per_thread))
    return gl.BlockedLayout([1, per_thread], [32 // lanes, lanes], [warps, 1], [1, 0])


@functools.cache
def layouts(tile: Tile, rdna4: bool) -> dict[str, Any]:
    """Layout arguments of `w4a16_skinny_rdna` for a tile."""
    bm, bn, bk, warps = tile.block_m, tile.block_n, tile.block_k, tile.num_warps
    warps_m = 1 if bm < 64 else 2 if warps >= 2 else 1
    acc = wmma_layout(rdna4, warps_m, warps // warps_m)
    words_per_thread = max(1, bn * (bk // 8) // (32 * warps))
    words_per_thread = min(words_per_thread, bk // 8)
    pad = gl.PaddedSharedLayout.with_identity_for
    return {
        "X_REGS": _rows_layout(bm, bk // 2, 4, warps),
        "W_REGS": _rows_layout(bn, bk // 8, words_per_thread, warps),
        "ACC": acc,
        "K_WIDTH": 8 if rdna4 else 16,
        "X_LDS": pad([[bk // 2, 4]], [bm, bk // 2], [1, 0]),
        "X_LDS_16": pad([[bk, 8]], [bm, bk], [1, 0]),
        "W_LDS": pad([[bk // 2, 4]], [bn, bk // 2], [1, 0]),
        "W_LDS_16": pad([[bk, 8]], [bn, bk], [1, 0]),
        "Y_REGS": _rows_layout(bm, bn, 8, warps),
        "GATED_REGS": _rows_layout(bm, bn // 2, 4, warps),
    }
