"""The path for every layer no fast kernel fits: dequantise on the device at each call, then a library GEMM.

Any group size that divides K, act-order, any N. Resident bytes stay those of the int4 weight.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from nybble.kernels.linear.config import LinearConfig, LinearKernel
from nybble.kernels.linear.reference import dequantize
from nybble.kernels.packing import W4A16Weight
from nybble.kernels.target import Target


class General(LinearKernel):
    name = "general"
    paths = ("general",)

    def can_implement(self, config: LinearConfig, target: Target) -> tuple[bool, str]:
        return True, "dequantised at each call: any group size, act-order, any N"

    def prepare(self, weight: W4A16Weight, config: LinearConfig, device: torch.device) -> W4A16Weight:
        def move(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if t is None else t.to(device)

        return replace(
            weight,
            q=weight.q.to(device),
            scales=weight.scales.to(device),
            zeros=move(weight.zeros),
            g_idx=move(weight.g_idx),
        )

    def apply(
        self, state: W4A16Weight, x: torch.Tensor, bias: torch.Tensor | None, path: str
    ) -> torch.Tensor:
        return torch.nn.functional.linear(x, dequantize(state, x.dtype), bias)

    def nbytes(self, state: W4A16Weight) -> int:
        return state.nbytes
