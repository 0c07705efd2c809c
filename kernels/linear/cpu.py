"""W4A16 on the CPU.

`CpuInt4` runs torch's own int4 GEMM: w = (q - 8) * s + zero, so an asymmetric weight passes zero = (8 - z) * s, which
bf16 rounds once more (0.16 % of a scale step: as much as the output's own rounding). `CpuExact` keeps the exactly
dequantised weight in the activation type: for every shape and type the int4 GEMM refuses or is slow in (measured on
Zen 4: fp16 and fp32 activations cost 30 times the bf16 form).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from nybble.kernels.linear.config import LinearConfig, LinearKernel
from nybble.kernels.linear.reference import dequantize
from nybble.kernels.packing import SYMMETRIC_ZERO, W4A16Weight, unpack_rows
from nybble.kernels.target import Target

_GROUPS = (32, 64, 128, 256)
_N_MULTIPLE = 16
# Rows unpacked at once while preparing: bounds the int32 temporary of the packer to 16 MiB at K = 4096.
_CHUNK_ELEMENTS = 4 << 20


@cache
def _int4_mm() -> Callable[..., torch.Tensor]:
    """The one overload, looked up once: resolving the packet at each call costs a microsecond of twenty."""
    op: Callable[..., torch.Tensor] = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    return op


@dataclass(frozen=True, slots=True)
class CpuInt4State:
    """packed: torch's own block layout. scales_and_zeros [K/G, N, 2]."""

    packed: torch.Tensor
    scales_and_zeros: torch.Tensor
    group_size: int


class CpuInt4(LinearKernel):
    name = "cpu_int4"
    paths = ("cpu",)

    def can_implement(self, config: LinearConfig, target: Target) -> tuple[bool, str]:
        if target.kind != "cpu":
            return False, f"device {target.kind}: runs on a CPU"
        if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
            return False, f"torch {torch.__version__} has no _weight_int4pack_mm_for_cpu"
        if config.dtype is not torch.bfloat16:
            return False, f"activations {config.dtype}: fast in bfloat16 alone"
        if config.group_size not in _GROUPS:
            return False, f"group_size {config.group_size}: accepted {_GROUPS}"
        if config.n % _N_MULTIPLE:
            return False, f"N={config.n}: accepted multiples of {_N_MULTIPLE}"
        if config.act_order:
            return False, "act-order: the groups of K must be consecutive"
        return True, "torch's int4 CPU GEMM"

    def prepare(self, weight: W4A16Weight, config: LinearConfig, device: torch.device) -> CpuInt4State:
        scales = weight.scales.to(torch.float32)
        if weight.zeros is None:
            shift = torch.zeros_like(scales)
        else:
            shift = (SYMMETRIC_ZERO - weight.zeros.to(torch.float32)) * scales
        scales_and_zeros = torch.stack((scales, shift), dim=-1).transpose(0, 1).to(config.dtype).contiguous()
        # The packed layout is made of independent blocks of 64 rows (fewer at the end), so chunks concatenate.
        rows = max(64, _CHUNK_ELEMENTS // weight.k // 64 * 64)
        packed = torch.cat(
            [
                torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack_rows(chunk).to(torch.int32), 1)
                for chunk in torch.split(weight.q, rows)
            ]
        )
        return CpuInt4State(packed, scales_and_zeros, weight.group_size)

    def apply(
        self, state: CpuInt4State, x: torch.Tensor, bias: torch.Tensor | None, path: str
    ) -> torch.Tensor:
        y: torch.Tensor = _int4_mm()(x.contiguous(), state.packed, state.group_size, state.scales_and_zeros)
        return y if bias is None else y.add_(bias)

    def nbytes(self, state: CpuInt4State) -> int:
        return state.packed.nbytes + state.scales_and_zeros.nbytes


class CpuExact(LinearKernel):
    name = "cpu_exact"
    paths = ("cpu",)

    def can_implement(self, config: LinearConfig, target: Target) -> tuple[bool, str]:
        if target.kind != "cpu":
            return False, f"device {target.kind}: runs on a CPU"
        return True, f"exactly dequantised once into {str(config.dtype).removeprefix('torch.')}"

    def prepare(self, weight: W4A16Weight, config: LinearConfig, device: torch.device) -> torch.Tensor:
        return dequantize(weight, config.dtype)

    def apply(
        self, state: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, path: str
    ) -> torch.Tensor:
        return torch.nn.functional.linear(x, state, bias)

    def nbytes(self, state: torch.Tensor) -> int:
        return state.nbytes
