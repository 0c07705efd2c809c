"""The residual's addition and the RMSNorm after it in one launch: residual += x; y = rms_norm(residual) * weight.

A program owns one row. x may be a GEMM's parts, which are added up as they are loaded, may be normed itself before it is
added (Gemma), and may be scaled (Granite). The sum is rounded to the residual's type before the norm sees it, as it
would be in two steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nybble.kernels import dependent
from nybble.kernels.dependent import let_next_start, wait_for_last
from nybble.kernels.fused.parts import check_parts, load_parts, padded_splits
from nybble.kernels.launch import HALF_TYPES, check, power_of_two
from nybble.kernels.norm import rms_norm_reference
from nybble.kernels.parts import parts_reference

MAX_WIDTH = 32768

# ------------------------------------------------------------------------------------------------------------ kernel


@triton.jit
def _normed(x, weight, eps, N: tl.constexpr):
    """rms_norm(x) * weight in fp32; elements outside are 0."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / N + eps) * weight


@triton.jit(do_not_specialize=["splits", "stride_part"])
def add_rms_norm_kernel(
    y_ptr,
    residual_ptr,
    x_ptr,
    bias_ptr,
    weight_ptr,
    x_weight_ptr,
    splits,
    stride_part,
    eps,
    x_eps,
    x_scale,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORM_X: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (T). SPLITS 0: there is no x, the residual is only read."""
    let_next_start(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * N
    column = tl.arange(0, BLOCK)
    inside = column < N
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if NORM_X:
        x_weight = tl.load(x_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_last(DEPENDENT)
    h = tl.load(residual_ptr + row + column, mask=inside, other=0.0)
    if SPLITS > 0:
        x = load_parts(x_ptr, bias_ptr, row + column, column, inside, splits, stride_part, SPLITS, HAS_BIAS)
        if NORM_X:
            x = _normed(x, x_weight, x_eps, N)
        h = (h.to(tl.float32) + x * x_scale).to(h.dtype)
        tl.store(residual_ptr + row + column, h, mask=inside)
    y = _normed(h.to(tl.float32), weight, eps, N)
    tl.store(y_ptr + row + column, y.to(y_ptr.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------------------------------------------------- launcher


@torch.library.custom_op("nybble::add_rms_norm", mutates_args=("residual",))
def add_rms_norm(
    residual: torch.Tensor,
    x: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    x_weight: torch.Tensor | None,
    x_eps: float,
    x_scale: float,
) -> torch.Tensor:
    """residual += x_scale * x, in place; returns rms_norm(residual) * weight, [T, N].

    residual  [T, N] float16 or bfloat16, contiguous, N at most 32768
    x, bias   a GEMM's parts, [S, T, N] of the residual's type or float32, and [N]; x None: nothing is added
    weight    [N] of the residual's type or float32
    x_weight  [N] likewise: x is rms_norm(x) * x_weight first; None: x as it is

    Not written by the launch ahead in the stream (see kernels/dependent.py): weight, x_weight.

    Raises ValueError for any other shape, type, stride or device, before anything is launched.
    """
    check("residual", residual, HALF_TYPES, ("T", "N"), residual.device)
    rows, n = residual.shape
    if not 0 < n <= MAX_WIDTH:
        raise ValueError(f"residual: given N={n}, accepted 1 to {MAX_WIDTH}")
    for name, w in (("weight", weight), ("x_weight", x_weight)):
        if w is not None:
            check(name, w, (residual.dtype, torch.float32), (n,), residual.device)
    if x is not None:
        check_parts("x", x, bias, rows, n, residual.device)
    y = torch.empty_like(residual)
    if rows == 0:
        return y
    block = power_of_two(n)
    add_rms_norm_kernel[(rows,)](
        y,
        residual,
        residual if x is None else x,
        weight if bias is None else bias,
        weight,
        weight if x_weight is None else x_weight,
        0 if x is None else x.shape[0],
        rows * n,
        eps,
        x_eps,
        x_scale,
        N=n,
        BLOCK=block,
        SPLITS=0 if x is None else padded_splits(x),
        HAS_BIAS=bias is not None,
        NORM_X=x_weight is not None,
        num_warps=min(16, max(2, block // 512)),
        **dependent.options(residual.device),
    )
    return y


@add_rms_norm.register_fake
def _(
    residual: torch.Tensor,
    x: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    x_weight: torch.Tensor | None,
    x_eps: float,
    x_scale: float,
) -> torch.Tensor:
    return torch.empty_like(residual)


# --------------------------------------------------------------------------------------------------------- reference


def add_rms_norm_reference(
    residual: torch.Tensor,
    x: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    x_weight: torch.Tensor | None,
    x_eps: float,
    x_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(new residual of the residual's type, normed float32), each [T, N]."""
    if x is not None:
        added = parts_reference(x, bias)
        if x_weight is not None:
            added = rms_norm_reference(added, x_weight, x_eps)
        residual = (residual.to(torch.float32) + x_scale * added).to(residual.dtype)
    return residual, rms_norm_reference(residual, weight, eps)
