"""The gated activations of the MLP."""

from __future__ import annotations

import math

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 I], gate first -> silu(gate) * up, [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 I], gate first -> gelu(gate) * up, [T, I], with the tanh form of GELU."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh").mul_(up)


# By the name that the model's config reader uses.
GATED = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The same in float32."""
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def gelu_tanh_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The same in float32: gelu(x) = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))), arXiv 1606.08415."""
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(inner)) * up


REFERENCES = {"silu": silu_mul_reference, "gelu_tanh": gelu_tanh_mul_reference}
