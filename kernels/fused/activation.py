"""The MLP's gate in one launch, from a GEMM's parts: activation(gate) * up.

Gate and up are halves of a row, or neighbours (gate_0, up_0, gate_1, ...), as the layer was loaded (see
linear/triton_skinny.py, which can do the same before it stores its result).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nybble.kernels import dependent
from nybble.kernels.activation import GATED, REFERENCES
from nybble.kernels.dependent import let_next_start_and_wait
from nybble.kernels.fused.parts import check_parts, load_parts, padded_splits
from nybble.kernels.launch import HALF_TYPES
from nybble.kernels.parts import parts_reference

_BLOCK = 512

# ------------------------------------------------------------------------------------------------------------ kernel


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """silu(x) = x * sigmoid(x), or the tanh form of GELU, which is x * sigmoid(2 * its inner polynomial). fp32."""
    if ACTIVATION == "silu":
        inner = x
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1 + tl.exp2(-1.4426950408889634 * inner))


@triton.jit(do_not_specialize=["splits", "stride_part"])
def gated_kernel(
    y_ptr,
    x_ptr,
    bias_ptr,
    splits,
    stride_part,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (cdiv(WIDTH, BLOCK), T): y [T, WIDTH] of x [S, T, 2 WIDTH]."""
    let_next_start_and_wait(DEPENDENT)
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    if INTERLEAVED:
        pair = tl.program_id(0) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
        both = load_parts(
            x_ptr,
            bias_ptr,
            row * 2 * WIDTH + pair,
            pair,
            pair < 2 * WIDTH,
            splits,
            stride_part,
            SPLITS,
            HAS_BIAS,
        )
        gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        at = row * 2 * WIDTH + column
        gate = load_parts(x_ptr, bias_ptr, at, column, inside, splits, stride_part, SPLITS, HAS_BIAS)
        up = load_parts(
            x_ptr, bias_ptr, at + WIDTH, column + WIDTH, inside, splits, stride_part, SPLITS, HAS_BIAS
        )
    tl.store(
        y_ptr + row * WIDTH + column,
        (activate(gate, ACTIVATION) * up).to(y_ptr.dtype.element_ty),
        mask=inside,
    )


# ---------------------------------------------------------------------------------------------------------- launcher


@torch.library.custom_op("nybble::gated", mutates_args=())
def gated(
    x: torch.Tensor, bias: torch.Tensor | None, interleaved: bool, dtype: torch.dtype, activation: str
) -> torch.Tensor:
    """[T, I] of `dtype` (float16 or bfloat16): activation(gate) * up.

    x, bias      a GEMM's parts, [S, T, 2 I] of `dtype` or float32, and [2 I] of `dtype` or None
    interleaved  column 2i is gate i and column 2i + 1 up i; else the first I columns are gates
    activation   "silu" or "gelu_tanh"

    Raises ValueError for any other shape, type, stride or device, before anything is launched.
    """
    check_parts("x", x, bias, "T", "2 I", x.device)
    rows, both = x.shape[1:]
    if both % 2 or dtype not in HALF_TYPES:
        raise ValueError(
            f"x: given {both} columns for {dtype}, accepted an even number for float16 or bfloat16"
        )
    check_activation(activation)
    width = both // 2
    y = x.new_empty(rows, width, dtype=dtype)
    if rows == 0 or width == 0:
        return y
    gated_kernel[(triton.cdiv(width, _BLOCK), rows)](
        y,
        x,
        x if bias is None else bias,
        x.shape[0],
        rows * both,
        WIDTH=width,
        BLOCK=_BLOCK,
        SPLITS=padded_splits(x),
        HAS_BIAS=bias is not None,
        INTERLEAVED=interleaved,
        ACTIVATION=activation,
        num_warps=4,
        **dependent.options(x.device),
    )
    return y


@gated.register_fake
def _(
    x: torch.Tensor, bias: torch.Tensor | None, interleaved: bool, dtype: torch.dtype, activation: str
) -> torch.Tensor:
    return x.new_empty(x.shape[1], x.shape[2] // 2, dtype=dtype)


def check_activation(activation: str) -> None:
    """Raise ValueError for a name that `activate` has not."""
    if activation not in GATED:
        raise ValueError(f"activation: given {activation!r}, accepted {', '.join(GATED)}")


# --------------------------------------------------------------------------------------------------------- reference


def gated_reference(
    x: torch.Tensor, bias: torch.Tensor | None, interleaved: bool, activation: str
) -> torch.Tensor:
    """float32 [T, I]."""
    both = parts_reference(x, bias)
    if interleaved:
        both = torch.cat((both[:, 0::2], both[:, 1::2]), dim=1)
    return REFERENCES[activation](both)
