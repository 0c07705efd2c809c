"""What the readers of the skinny layout accept: one check for the csrc kernel and the Triton one."""

from __future__ import annotations

import torch

from nybble.kernels.launch import HALF_TYPES, dtype_name, given
from nybble.kernels.packing import PER_WORD
from nybble.kernels.skinny_layout import GROUP_SIZES, K_MULTIPLE


def check(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> None:
    """Raise ValueError unless these are the operands of y[M, N] = x[M, K] @ w^T + bias that every reader of the layout takes.

    x       [M, K] float16 or bfloat16, unit column stride, any row stride
    words   int32 [N, K/8], unit column stride, any row stride
    scales  [N, K/G] float16, bfloat16 or float32, unit column stride, any row stride
    zeros   int32 [N/8, K/G] packed along N, unit column stride, or None for z = 8
    bias    [N] of x's type, or None
    """
    if x.ndim != 2 or x.dtype not in HALF_TYPES:
        raise ValueError(f"x: given {given(x)}, accepted float16 or bfloat16 [M, K]")
    k = x.shape[1]
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size: given {group_size}, accepted {', '.join(map(str, GROUP_SIZES))}")
    if k == 0 or k % K_MULTIPLE or k % group_size:
        raise ValueError(
            f"x: given K={k}, accepted a positive multiple of {K_MULTIPLE} and of group_size {group_size}"
        )
    if words.ndim != 2 or words.dtype != torch.int32 or words.shape[1] != k // PER_WORD:
        raise ValueError(
            f"words: given {given(words)}, accepted int32 [N, {k // PER_WORD}] (K/8 words a row, K={k})"
        )
    n, groups = words.shape[0], k // group_size
    if scales.dtype not in (*HALF_TYPES, torch.float32) or tuple(scales.shape) != (n, groups):
        raise ValueError(
            f"scales: given {given(scales)}, accepted float16, bfloat16 or float32 [{n}, {groups}]"
        )
    if zeros is not None:
        if n % PER_WORD:
            raise ValueError(
                f"zeros: given N={n}, accepted a multiple of {PER_WORD} (eight rows share one word)"
            )
        if zeros.dtype != torch.int32 or tuple(zeros.shape) != (n // PER_WORD, groups):
            raise ValueError(
                f"zeros: given {given(zeros)}, accepted int32 [{n // PER_WORD}, {groups}], packed along N "
                "(zero points expanded to the activation type are not read)"
            )
    if bias is not None and (bias.dtype != x.dtype or tuple(bias.shape) != (n,) or not bias.is_contiguous()):
        raise ValueError(f"bias: given {given(bias)}, accepted contiguous {dtype_name(x.dtype)} [{n}]")
    check_placement(x, {"words": words, "scales": scales, "zeros": zeros, "bias": bias})


def check_placement(x: torch.Tensor, others: dict[str, torch.Tensor | None]) -> None:
    for name, t in {"x": x, **others}.items():
        if t is None:
            continue
        if t.device != x.device:
            raise ValueError(f"{name}: given {t.device}, accepted x's device {x.device}")
        if t.ndim == 2 and t.numel():
            rows, cols = t.shape
            # A view can promise more than its storage holds (as_strided, resized storages): it would be read past its end.
            end = t.storage_offset() + (rows - 1) * t.stride(0) + cols
            if (t.stride(1) != 1 and cols > 1) or (rows > 1 and t.stride(0) < cols and name != "x"):
                raise ValueError(
                    f"{name}: given strides {list(t.stride())} for {list(t.shape)}, accepted unit column stride and "
                    f"a row stride of at least {cols}"
                )
            if end * t.element_size() > t.untyped_storage().nbytes():
                raise ValueError(
                    f"{name}: given a view of {end} elements over {t.untyped_storage().nbytes()} bytes, "
                    f"accepted a storage of at least {end * t.element_size()} bytes"
                )
