"""W4A16 GEMM in Triton on the [K, N/8] layout, for CDNA, CUDA and anything else Triton compiles for.

Eight consecutive n-values share an int32 word, low nibble first, so that a step along K reads whole rows of the weight.
Unlike the skinny layout it takes any group size that is a power of two from 32 on, and one group spanning K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nybble.kernels import launch as launching
from nybble.kernels.launch import HALF_TYPES, given
from nybble.kernels.linear import operands, triton_skinny
from nybble.kernels.packing import PER_WORD, W4A16Weight, pack_rows, unpack_rows
from nybble.kernels.tiles import Tile, tile_for

GROUP_SIZES = (32, 64, 128, 256)
_CHUNK_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class KNWeight:
    """A W4A16 weight in the [K, N/8] layout.

    words   int32 [K, N/8]
    scales  [K/G, N] float16, bfloat16 or float32
    zeros   int32 [K/G, N/8], or None when symmetric (z = 8)
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    n: int
    k: int

    @property
    def nbytes(self) -> int:
        """Resident bytes."""
        parts = (self.words, self.scales, self.zeros)
        return sum(t.untyped_storage().nbytes() for t in parts if t is not None)


def pack_kn(weight: W4A16Weight, *, device: torch.device | None = None) -> KNWeight:
    """Lay a logical weight out as [K, N/8] on `device` (default: where it is), a strip of rows at a time.

    Raises ValueError for N % 8, act-order, or a group size the kernel has not.
    """
    n, k, g = weight.n, weight.k, weight.group_size
    if n % PER_WORD:
        raise ValueError(f"[K, N/8] layout: given N={n}, accepted a multiple of {PER_WORD}")
    if weight.g_idx is not None:
        raise ValueError(
            "[K, N/8] layout: given an act-order weight (g_idx), accepted groups of consecutive k only"
        )
    check_group_size(g, k)
    device = weight.q.device if device is None else device
    words = torch.empty(k, n // PER_WORD, dtype=torch.int32, device=device)
    for start in range(0, n, _CHUNK_COLUMNS):
        strip = unpack_rows(weight.q[start : start + _CHUNK_COLUMNS].to(device))
        words[:, start // PER_WORD : (start + strip.shape[0]) // PER_WORD] = pack_rows(strip.t())
    scales = weight.scales.to(device).t().contiguous()
    zeros = None if weight.zeros is None else pack_rows(weight.zeros.to(device).t())
    return KNWeight(words, scales, zeros, g, n, k)


def unpack_kn(weight: KNWeight) -> W4A16Weight:
    """The exact inverse of `pack_kn`."""
    q = torch.empty(weight.n, weight.k // PER_WORD, dtype=torch.int32, device=weight.words.device)
    for start in range(0, weight.n, _CHUNK_COLUMNS):
        strip = unpack_rows(weight.words[:, start // PER_WORD : (start + _CHUNK_COLUMNS) // PER_WORD])
        q[start : start + strip.shape[1]] = pack_rows(strip.t())
    zeros = None if weight.zeros is None else unpack_rows(weight.zeros).t().contiguous()
    return W4A16Weight(q, weight.scales.t().contiguous(), zeros, None, weight.group_size, weight.n, weight.k)


def orient_zeros(zeros: torch.Tensor, groups: int, n: int, *, orientation: str | None = None) -> torch.Tensor:
    """Packed zero points as this kernel reads them, int32 [K/G, N/8].

    orientation  "gn" for [K/G, N/8] (GPTQ, AWQ), "ng" for [N/8, K/G] (compressed-tensors: transposed here), or None when
                 the format is unknown: the shape decides, and a square one counts as "ng".

    Raises ValueError when the shape fits neither.
    """
    accepted = {"gn": (groups, n // PER_WORD), "ng": (n // PER_WORD, groups)}
    shape = tuple(zeros.shape)
    if orientation is None:
        orientation = "ng" if shape == accepted["ng"] else "gn"
    if zeros.dtype != torch.int32 or shape != accepted[orientation]:
        raise ValueError(
            f"zeros: given {zeros.dtype} {list(shape)}, accepted int32 {list(accepted['gn'])} "
            f"or its transpose {list(accepted['ng'])}"
        )
    return zeros.t().contiguous() if orientation == "ng" else zeros


def check_group_size(group_size: int, k: int) -> None:
    """Raise ValueError unless the kernel takes this group size for this K."""
    if k <= 0 or k % group_size or not (group_size in GROUP_SIZES or group_size == k):
        raise ValueError(
            f"group_size: given {group_size} for K={k}, accepted {', '.join(map(str, GROUP_SIZES))} dividing K, or K itself"
        )


# ----------------------------------------------------------------------------------------------------------- kernel


@triton.jit
def w4a16_kn(
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
    stride_wk,
    stride_sg,
    stride_zg,
    stride_ym,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One [block_m, block_n] tile. GROUP 0: one group spans K, whatever K is."""
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BM)
    pid_m = pid % tiles_m
    pid_n = pid // tiles_m
    rows_m = pid_m * BM + tl.arange(0, BM)
    cols_n = pid_n * BN + tl.arange(0, BN)
    cols_w = pid_n * (BN // 8) + tl.arange(0, BN // 8)
    safe_m = tl.minimum(rows_m, M - 1).to(tl.int64)
    safe_n = tl.minimum(cols_n, N - 1)
    safe_w = tl.minimum(cols_w, N // 8 - 1)
    ks = tl.arange(0, BK)
    shifts = tl.arange(0, 8) * 4

    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + ks
        if EVEN_K:
            x = tl.load(x_ptr + safe_m[:, None] * stride_xm + k[None, :])
        else:
            x = tl.load(x_ptr + safe_m[:, None] * stride_xm + k[None, :], mask=(k < K)[None, :], other=0.0)
            k = tl.minimum(k, K - 1)
        words = tl.load(w_ptr + k.to(tl.int64)[:, None] * stride_wk + safe_w[None, :])
        if GROUP == 0:
            group = 0
        else:
            group = k0 // GROUP
        scale = tl.load(s_ptr + group * stride_sg + safe_n).to(tl.float32)
        q = tl.reshape((words[:, :, None] >> shifts[None, None, :]) & 0xF, (BK, BN))
        if HAS_ZEROS:
            z_words = tl.load(z_ptr + group * stride_zg + safe_w)
            zero = tl.reshape((z_words[:, None] >> shifts[None, :]) & 0xF, (BN,))
            q -= zero[None, :]
        else:
            q -= 8
        if INTERPRETED:  # the interpreter's dot multiplies the bit patterns of bf16
            acc += tl.dot(x.to(tl.float32), q.to(tl.float32)) * scale[None, :]
        else:
            acc += tl.dot(x, q.to(tl.float32).to(x_ptr.dtype.element_ty)) * scale[None, :]

    if HAS_BIAS:
        acc += tl.load(bias_ptr + safe_n).to(tl.float32)[None, :]
    inside = (rows_m < M)[:, None] & (cols_n < N)[None, :]
    y_ptrs = y_ptr + rows_m.to(tl.int64)[:, None] * stride_ym + cols_n[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=inside)


# --------------------------------------------------------------------------------------------------------- launcher


@torch.library.custom_op("nybble::w4a16_triton_kn", mutates_args=())
def kn_gemm(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    """y [M, N] of x's type = x @ ((q - z) * s) + bias, products summed in fp32.

    x       [M, K] float16 or bfloat16, unit column stride, any row stride
    words   int32 [K, N/8], unit column stride, any row stride
    scales  [K/G, N] float16, bfloat16 or float32, unit column stride, any row stride
    zeros   int32 [K/G, N/8], unit column stride, or None for z = 8
    bias    [N] of x's type, or None
    group_size  32, 64, 128, 256, K, or -1 for K

    Raises ValueError for any other shape, type, stride or device, before anything is launched.
    """
    group_size = x.shape[-1] if group_size == -1 else group_size
    check_arguments(x, words, scales, zeros, bias, group_size)
    return launch(x, words, scales, zeros, bias, group_size)


@kn_gemm.register_fake
def _(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], words.shape[1] * PER_WORD)


def launch(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
    tile: Tile | None = None,
) -> torch.Tensor:
    """`kn_gemm` on arguments already checked, with a tile of the caller's choice (default: the chip's table)."""
    m, k = x.shape
    n = scales.shape[1]
    y = x.new_empty(m, n)
    if m == 0 or n == 0:
        return y
    whole = group_size == k
    if tile is None:
        arch = launching.target_of(x.device).arch
        tile = tile_for(arch, m, n, k, 256 if whole else group_size, x.dtype, zeros is None, "kn")
    if not whole:
        triton_skinny.check_step(tile, group_size)
    backend = launching.backend_of(x.device)
    w4a16_kn[(triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n),)](
        x,
        words,
        scales,
        words if zeros is None else zeros,
        x if bias is None else bias,
        y,
        m,
        n,
        k,
        x.stride(0),
        words.stride(0),
        scales.stride(0),
        0 if zeros is None else zeros.stride(0),
        n,
        GROUP=0 if whole else group_size,
        EVEN_K=k % tile.block_k == 0,
        HAS_ZEROS=zeros is not None,
        HAS_BIAS=bias is not None,
        BM=tile.block_m,
        BN=tile.block_n,
        BK=tile.block_k,
        INTERPRETED=backend == "interpreter",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return y


def check_arguments(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> None:
    """Raise ValueError unless the arguments are what `kn_gemm` documents (group_size -1 already replaced by K)."""
    if x.ndim != 2 or x.dtype not in HALF_TYPES:
        raise ValueError(f"x: given {given(x)}, accepted float16 or bfloat16 [M, K]")
    k = x.shape[1]
    check_group_size(group_size, k)
    if words.ndim != 2 or words.dtype != torch.int32 or words.shape[0] != k:
        raise ValueError(f"words: given {given(words)}, accepted int32 [{k}, N/8] (K={k})")
    n, groups = words.shape[1] * PER_WORD, k // group_size
    if scales.dtype not in (*HALF_TYPES, torch.float32) or tuple(scales.shape) != (groups, n):
        raise ValueError(
            f"scales: given {given(scales)}, accepted float16, bfloat16 or float32 [{groups}, {n}]"
        )
    if zeros is not None and (zeros.dtype != torch.int32 or tuple(zeros.shape) != (groups, n // PER_WORD)):
        raise ValueError(
            f"zeros: given {given(zeros)}, accepted int32 [{groups}, {n // PER_WORD}], packed along N "
            "(see orient_zeros for the transpose; zero points of the activation type are not read)"
        )
    if bias is not None and (bias.dtype != x.dtype or tuple(bias.shape) != (n,) or not bias.is_contiguous()):
        raise ValueError(f"bias: given {given(bias)}, accepted contiguous {x.dtype} [{n}]")
    operands.check_placement(x, {"words": words, "scales": scales, "zeros": zeros, "bias": bias})
