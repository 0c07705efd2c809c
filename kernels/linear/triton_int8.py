"""The int8 GEMM in Triton: see kernels/linear/int8.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nybble.kernels import launch
from nybble.kernels.launch import HALF_TYPES, given
from nybble.kernels.linear import operands

# (most rows, BM, BN, BK, warps, stages), the first that fits. Few rows are bound by reading q: rows of BK bytes each, many
# programs, and the rows of x padded to the 16 that a matrix instruction takes. Not tuned per chip.
_TILES = (
    (16, 16, 64, 256, 4, 3),
    (32, 32, 64, 128, 4, 3),
    (64, 64, 64, 128, 4, 3),
    (None, 128, 128, 64, 8, 3),
)
_LEAST_STEP = 32  # of k, masked where K is no multiple of it


@triton.jit
def w8a16_gemm(
    x_ptr,
    q_ptr,
    s_ptr,
    y_ptr,
    M,
    N,
    K,
    x_stride,
    EVEN_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    # x [M, K] with unit column stride, q int8 [N, K] contiguous, s [N], y [M, N] contiguous
    tiles_m = tl.cdiv(M, BM)
    pid = tl.program_id(0)
    # Neighbours share columns: with several tiles of rows, q is read from memory once.
    rm = (pid % tiles_m) * BM + tl.arange(0, BM)
    rn = (pid // tiles_m) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    # An index past the end reads a valid row instead; the store is masked.
    safe_m = tl.where(rm < M, rm, 0)
    safe_n = tl.where(rn < N, rn, 0)
    x_at = x_ptr + safe_m[:, None] * x_stride + rk[None, :]
    q_at = q_ptr + safe_n[None, :].to(tl.int64) * K + rk[:, None]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        if EVEN_K:
            x = tl.load(x_at)
            q = tl.load(q_at)
        else:
            x = tl.load(x_at, mask=rk[None, :] < K - k, other=0.0)
            q = tl.load(q_at, mask=rk[:, None] < K - k, other=0)
        if INTERPRETED:
            # numpy has no bfloat16 to multiply in.
            acc += tl.dot(x.to(tl.float32), q.to(tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(x, q.to(x.dtype), acc)
        x_at += BK
        q_at += BK
    scale = tl.load(s_ptr + safe_n).to(tl.float32)
    acc *= scale[None, :]
    y_at = y_ptr + rm[:, None].to(tl.int64) * N + rn[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None, :] < N))


@torch.library.custom_op("nybble::w8a16_gemm", mutates_args=())
def int8_gemm(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """y[M, N] = (x @ q^T) * scales.

    x       [M, K] float16 or bfloat16, unit column stride
    q       int8 [N, K], contiguous
    scales  [N] of x's type, contiguous

    Raises ValueError for any other shape, type, stride or device, before anything is launched.
    """
    check_arguments(x, q, scales)
    m, k = x.shape
    n = q.shape[0]
    y = x.new_empty(m, n)
    if m == 0 or n == 0:
        return y
    _, bm, bn, bk, warps, stages = next(t for t in _TILES if t[0] is None or m <= t[0])
    # Steps that divide K need no mask: masked loads of long rows take RDNA more registers than it has.
    bk = min(bk, max(k & -k, _LEAST_STEP))
    w8a16_gemm[(triton.cdiv(m, bm) * triton.cdiv(n, bn),)](
        x,
        q,
        scales,
        y,
        m,
        n,
        k,
        x.stride(0),
        EVEN_K=k % bk == 0,
        INTERPRETED=launch.backend_of(x.device) == "interpreter",
        BM=bm,
        BN=bn,
        BK=bk,
        num_warps=warps,
        num_stages=stages,
    )
    return y


@int8_gemm.register_fake
def _(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], q.shape[0])


def check_arguments(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor) -> None:
    """Raise ValueError unless the arguments are what `int8_gemm` documents."""
    if x.ndim != 2 or x.dtype not in HALF_TYPES or x.shape[1] == 0:
        raise ValueError(f"x: given {given(x)}, accepted float16 or bfloat16 [M, K]")
    k = x.shape[1]
    if q.ndim != 2 or q.dtype != torch.int8 or q.shape[1] != k or not q.is_contiguous():
        raise ValueError(f"q: given {given(q)}, accepted contiguous int8 [N, {k}] (K={k})")
    n = q.shape[0]
    if scales.dtype != x.dtype or tuple(scales.shape) != (n,) or not scales.is_contiguous():
        raise ValueError(f"scales: given {given(scales)}, accepted contiguous {x.dtype} [{n}]")
    operands.check_placement(x, {"q": q, "scales": scales})
