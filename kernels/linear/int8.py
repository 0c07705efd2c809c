"""Weight-only int8 with one scale a row, for the output head: y[M, N] = (x[M, K] @ q[N, K]^T) * scales[N].

A head in 16 bits is a quarter of what a decode step of a 4-bit 4-8B model reads; in int8 it is an eighth, and rounds to
1/254 of each row's largest weight, which no perplexity tells from the 16-bit head (benchmarks/results/quality-demo.md).
Values of int8 are exact in either 16-bit type, so the product is that of the rounded weight, summed in float32.
On a GPU one Triton kernel runs it, for few rows and many; on a CPU torch's own int8 GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nybble.kernels.launch import HALF_TYPES, given
from nybble.kernels.linear.recorder import RECORDER

# torch's CPU kernel reads past the end of a row that is no multiple of this (torch 2.13: wrong numbers, then a crash).
CPU_K_MULTIPLE = 32
_LEVELS = 127
_CHUNK_ELEMENTS = 16 << 20


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """q int8 [N, K]; scales [N] in the activation type."""

    q: torch.Tensor
    scales: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.scales.nbytes


def quantize_rows(weight: torch.Tensor, dtype: torch.dtype) -> Int8Weight:
    """weight [N, K] of a floating type -> int8 with the scale max|row| / 127, rounded to dtype before it is used.

    Raises ValueError for another shape or type, and for values that are not finite.
    """
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(f"weight: given {given(weight)}, accepted a floating [N, K]")
    n, k = weight.shape
    q = torch.empty(n, k, dtype=torch.int8, device=weight.device)
    scales = torch.empty(n, dtype=dtype, device=weight.device)
    rows = max(1, _CHUNK_ELEMENTS // max(k, 1))
    for first in range(0, n, rows):
        part = slice(first, first + rows)
        w = weight[part].to(torch.float32)
        if not bool(torch.isfinite(w).all()):
            raise ValueError("weight: holds values that are not finite (inf or nan)")
        tiny = torch.finfo(dtype).tiny
        scale = (w.abs().amax(dim=1) / _LEVELS).clamp_min(tiny).to(dtype)
        scales[part] = scale
        q[part] = (w / scale.to(torch.float32).unsqueeze(1)).round().clamp(-_LEVELS, _LEVELS).to(torch.int8)
    return Int8Weight(q, scales)


def int8_reference(x: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
    """x [M, K] -> float32 [M, N]."""
    w = weight.q.to(torch.float32) * weight.scales.to(torch.float32).unsqueeze(1)
    return torch.nn.functional.linear(x.to(torch.float32), w)


def can_run(device: torch.device, dtype: torch.dtype, k: int) -> tuple[bool, str]:
    """Whether `Int8Linear` runs there, and why not."""
    if dtype not in HALF_TYPES:
        return False, f"activations {str(dtype).removeprefix('torch.')}: runs in float16 and bfloat16"
    if device.type == "cpu":
        if dtype is not torch.bfloat16:
            return False, "activations float16: on a CPU it runs in bfloat16"
        if k % CPU_K_MULTIPLE:
            return False, f"K={k}: on a CPU it takes multiples of {CPU_K_MULTIPLE}"
        if not hasattr(torch, "_weight_int8pack_mm"):
            return False, f"torch {torch.__version__} has no _weight_int8pack_mm"
        return True, "torch's int8 CPU GEMM"
    return True, "Triton"


class Int8Linear:
    """One int8 linear layer on one device: y[M, N] = x[M, K] @ w^T. Raises ValueError where `can_run` says no.

    label: what kind of layer this is ("lm_head"), for the recorder.
    """

    path = "int8"

    def __init__(
        self, weight: Int8Weight, dtype: torch.dtype, device: torch.device, label: str = "lm_head"
    ) -> None:
        runs, self.reason = can_run(device, dtype, weight.q.shape[1])
        if not runs:
            raise ValueError(f"int8 linear layer: {self.reason}")
        self.weight = Int8Weight(weight.q.to(device), weight.scales.to(device, dtype))
        self.label = label
        self._on_cpu = device.type == "cpu"

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 0:
            return x.new_empty(0, self.weight.q.shape[0])
        RECORDER.calls[self.path, RECORDER.phase] += 1
        if not RECORDER.sampling:
            return self._run(x)
        mark = RECORDER.start(x.device)
        y = self._run(x)
        RECORDER.stop(mark, self.path, self.label, x.shape[0])
        return y

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        if self._on_cpu:
            y: torch.Tensor = torch._weight_int8pack_mm(x.contiguous(), self.weight.q, self.weight.scales)
            return y
        from nybble.kernels.linear.triton_int8 import int8_gemm

        out: torch.Tensor = int8_gemm(x, self.weight.q, self.weight.scales)
        return out
