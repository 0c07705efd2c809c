"""Reading a GEMM's parts (kernels/parts.py) inside a kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nybble.kernels.launch import FLOAT_TYPES, HALF_TYPES, check, power_of_two


@triton.jit
def load_parts(
    ptr, bias_ptr, at, column, inside, splits, stride, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """fp32: elements `at` of every part added up in order, plus the bias of their columns; 0 outside.

    SPLITS is `splits` rounded up to a power of two, so that few compiled variants serve every count. Unrolled: all loads
    are in flight together.
    """
    y = tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)
    for s in tl.static_range(1, SPLITS):
        y += tl.load(ptr + s * stride + at, mask=tl.where(s < splits, inside, False), other=0.0).to(
            tl.float32
        )
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return y


def check_parts(
    name: str,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    m: int | str,
    n: int | str,
    device: torch.device,
) -> None:
    """Raise ValueError unless values [S, m, n] and bias [n] are the parts of a result."""
    check(name, values, (*HALF_TYPES, *FLOAT_TYPES), ("S", m, n), device)
    if values.shape[0] == 0:
        raise ValueError(f"{name}: given no part, accepted at least one")
    if bias is not None:
        check(f"{name}'s bias", bias, HALF_TYPES, (values.shape[2],), device)


def padded_splits(values: torch.Tensor) -> int:
    return power_of_two(values.shape[0])
