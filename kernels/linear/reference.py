"""The W4A16 linear layer in readable float32 torch: what every other path is compared with."""

from __future__ import annotations

import torch

from nybble.kernels.packing import SYMMETRIC_ZERO, W4A16Weight, unpack_rows


def dequantize(weight: W4A16Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(q - z) * s as [N, K] of `dtype`.

    q - z is exact in every type used here, so only the product with the scale rounds, once: float32 product,
    then one rounding to `dtype`.
    """
    q = unpack_rows(weight.q).to(torch.float32)
    scales = weight.scales.to(torch.float32)
    if weight.zeros is None:
        zeros = torch.full_like(scales, SYMMETRIC_ZERO)
    else:
        zeros = weight.zeros.to(torch.float32)
    if weight.g_idx is None:
        g = weight.group_size
        grouped = q.view(weight.n, weight.k // g, g)
        w = (grouped - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)
        return w.view(weight.n, weight.k).to(dtype)
    group_of_k = weight.g_idx.long()
    return ((q - zeros[:, group_of_k]) * scales[:, group_of_k]).to(dtype)


def linear_reference(x: torch.Tensor, weight: W4A16Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] -> float32 [..., N], computed in float32 throughout."""
    return torch.nn.functional.linear(
        x.to(torch.float32), dequantize(weight), None if bias is None else bias.to(torch.float32)
    )
