"""The gated activation of the MLP."""

from __future__ import annotations

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 I], gate first -> silu(gate) * up, [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The same in float32."""
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
