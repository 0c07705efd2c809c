"""W4A8 on an Intel XPU: int4 weights, activations rounded to int8 per token, one op of the package vllm-xpu-kernels.

    _xpu_C::int4_gemm_w4a8(Tensor A_, Tensor A_scale, Tensor A_zp, Tensor B, Tensor B_scale, Tensor B_zp,
                           int group_size, Tensor? g_idx, Tensor? bias) -> Tensor

    A_      int8 [M, K]; A_scale [M, 1] in the activation type; A_zp int32 [M, 1], all 0
    B       int32 [K/8, N], a transposed view of [N, K/8] (eight consecutive k per word, low nibble first)
    B_scale [K/G, N]; B_zp int8 [1] holding 8: one value selects the symmetric form
    result  float16 [M, N] whatever the activations are, so a bfloat16 result beyond 65504 is lost

Never run on such a device: the op's contract is its published schema, and the tests hold this file to a CPU stand-in
written from it. `w4a8_reference` says what the whole layer has to compute.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache

import torch

from nybble.kernels.linear.config import LinearConfig, LinearKernel
from nybble.kernels.linear.reference import linear_reference
from nybble.kernels.packing import SYMMETRIC_ZERO, W4A16Weight
from nybble.kernels.target import Target

_INT8_MAX = 127
# Keeps a row of zeros from dividing by zero.
_MIN_SCALE = 1e-5
_GROUP_MULTIPLE = 32
_SIZE_MULTIPLE = 8


@cache
def _load_package() -> None:
    """The package registers its ops on import; without it, or without its libraries, the op stays absent."""
    try:
        importlib.import_module("vllm_xpu_kernels._xpu_C")
    except (ImportError, OSError):
        pass


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] -> int8 [M, K] and scales [M, 1] of x's type, x ~ q * scale: symmetric, the largest |x| at 127.

    The scale is rounded to x's type first and the values by that rounded scale, so that q * scale has no bias.
    """
    largest = x.abs().amax(dim=1, keepdim=True).to(torch.float32)
    scale = (largest / _INT8_MAX).clamp(min=_MIN_SCALE).to(x.dtype)
    q = (x.to(torch.float32) / scale.to(torch.float32)).round().clamp(-_INT8_MAX - 1, _INT8_MAX)
    return q.to(torch.int8), scale


def w4a8_reference(x: torch.Tensor, weight: W4A16Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] -> float32 [M, N]: activations rounded to int8 and back, all else in float32."""
    q, scale = quantize_rows(x)
    return linear_reference(q.to(torch.float32) * scale.to(torch.float32), weight, bias)


@dataclass(frozen=True, slots=True)
class XpuState:
    """packed int32 [N, K/8], scales [K/G, N] in the activation type, zero int8 [1]. group_size -1: one group spans K."""

    packed: torch.Tensor
    scales: torch.Tensor
    zero: torch.Tensor
    group_size: int


class XpuW4A8(LinearKernel):
    name = "xpu_w4a8"
    paths = ("general",)
    added_error = 0.02

    def can_implement(self, config: LinearConfig, target: Target) -> tuple[bool, str]:
        if target.kind != "xpu":
            return False, f"device {target.kind}: runs on an Intel XPU"
        if not config.symmetric:
            return False, "zero points: accepted symmetric weights"
        if config.dtype not in (torch.float16, torch.bfloat16):
            return False, f"activations {config.dtype}: accepted float16 and bfloat16"
        if config.group_size != config.k and config.group_size % _GROUP_MULTIPLE:
            return False, f"group_size {config.group_size}: accepted multiples of {_GROUP_MULTIPLE}, or K"
        if config.k % _SIZE_MULTIPLE or config.n % _SIZE_MULTIPLE:
            return False, f"K={config.k}, N={config.n}: accepted multiples of {_SIZE_MULTIPLE}"
        if config.act_order:
            return False, "act-order: the groups of K must be consecutive"
        _load_package()
        if not hasattr(torch.ops._xpu_C, "int4_gemm_w4a8"):
            return False, "no torch.ops._xpu_C.int4_gemm_w4a8: it comes with the package vllm-xpu-kernels"
        return True, "int4 weights, int8 activations per token"

    def prepare(self, weight: W4A16Weight, config: LinearConfig, device: torch.device) -> XpuState:
        return XpuState(
            packed=weight.q.to(device).contiguous(),
            scales=weight.scales.to(device, config.dtype).t().contiguous(),
            zero=torch.tensor([SYMMETRIC_ZERO], dtype=torch.int8, device=device),
            group_size=-1 if weight.group_size == weight.k else weight.group_size,
        )

    def apply(self, state: XpuState, x: torch.Tensor, bias: torch.Tensor | None, path: str) -> torch.Tensor:
        q, scale = quantize_rows(x)
        no_shift = torch.zeros(scale.shape, dtype=torch.int32, device=x.device)
        y: torch.Tensor = torch.ops._xpu_C.int4_gemm_w4a8(
            q, scale, no_shift, state.packed.t(), state.scales, state.zero, state.group_size, None, bias
        )
        return y.to(x.dtype)

    def nbytes(self, state: XpuState) -> int:
        return state.packed.nbytes + state.scales.nbytes + state.zero.nbytes
