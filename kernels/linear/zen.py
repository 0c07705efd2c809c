"""W4A16, or W4A8, on an AMD Zen CPU through the package `zentorch` (PyPI; each release fits one minor of torch).

    y = zentorch_woq_linear(x, packed.t(), scales, zeros, bias)       int4 weights, bf16 activations
    y = zentorch_dynamic_qlinear(x, packed, scales, bias)             the same weights, int8 activations per token

Established with zentorch 2.13.0.2, whose ops check little of this:
- zeros decide how a nibble is read: signed -8..7 without, unsigned 0..15 with int8 zero points [K/G, N]. The wrong
  reading, transposed views in place of contiguous scales, and float16 scales all give wrong numbers, no error.
  float32 scales cost the same time as bf16 ones and keep a checkpoint's float16 scales exact.
- Right for any N and M, G % 4 == 0 (500 random shapes); G of 1, and at times 2, gave garbage. float16 and float32 activations raise.
- The library reorders a weight at its first use and keeps that copy by the weight's address, for good: a second
  weight at the address of a freed one would be answered with the first one's values. So the packed tensors live
  as long as the process (`_KEPT`), and a layer costs twice its int4 bytes.
- Importing it registers its ops, 65 Inductor lowerings (none replaced), a Dynamo backend and two entries of
  Inductor's config; eager torch, its thread count and the environment stay as they were. Still: only when needed.

Zen 4 (a shared machine, best of 5 to 15), one thread, bf16, N=K=4096, G=128, microseconds for zentorch W4A16 /
torch int4 / dense / zentorch W4A8:
M=1 1518 / 882 / 3067 / 1104; M=8 3798 / 3150 / 3521 / 1727; M=16 6238 / 6254 / 4656 / 2376; M=64 28499 / 32914 /
15899 / 6417; M=256 57683 / 144779 / 58750 / 33325. So the row stands after torch's int4 GEMM, which decodes faster,
and before the exact dense copy, which decodes slower and holds four times the bytes.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import cache

import torch

from nybble.kernels.linear.config import LinearConfig, LinearKernel
from nybble.kernels.packing import SYMMETRIC_ZERO, W4A16Weight, unpack_rows
from nybble.kernels.target import Target, cpu_traits

_OPS = ("zentorch_woq_repack_weight", "zentorch_woq_linear", "zentorch_dynamic_qlinear")
_GROUP_MULTIPLE = 4
# Values unpacked at once while preparing: 4 MiB as int8.
_CHUNK_ELEMENTS = 4 << 20
_KEPT: list[torch.Tensor] = []


@cache
def why_no_zentorch() -> str:
    """Imports zentorch. "" when its ops are there, else the reason they are not."""
    if importlib.util.find_spec("zentorch") is None:
        return "the package zentorch is not installed"
    try:
        importlib.import_module("zentorch")
    except Exception as e:  # ImportError for another torch minor, OSError for a library that does not load
        return f"zentorch does not import beside torch {torch.__version__}: {e}"
    absent = [op for op in _OPS if not hasattr(torch.ops.zentorch, op)]
    return f"this zentorch has no {', '.join(absent)}" if absent else ""


@dataclass(frozen=True, slots=True)
class ZenState:
    """packed int32 [N, K/8], scales float32 [K/G, N], zeros int8 [K/G, N] or None for a symmetric weight."""

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None


class ZenInt4(LinearKernel):
    """int8_activations: round each row of x to int8 (W4A8, symmetric weights only), at 0.3 to 1.1 % relative error by
    construction. From M = 4 to 256 it took 0.4 to 0.6 of the time of the best other CPU path, at M = 1 more time."""

    name = "zen_int4"
    paths = ("cpu",)

    def __init__(self, int8_activations: bool = False) -> None:
        self.int8_activations = int8_activations
        self.added_error = 0.02 if int8_activations else 0.0

    def can_implement(self, config: LinearConfig, target: Target) -> tuple[bool, str]:
        if target.kind != "cpu":
            return False, f"device {target.kind}: runs on a CPU"
        if not cpu_traits().is_zen_avx512:
            return (
                False,
                f"CPU vendor {cpu_traits().vendor or 'unknown'}: accepted AMD with AVX-512 (Zen 4 and newer)",
            )
        if config.dtype is not torch.bfloat16:
            return False, f"activations {config.dtype}: accepted bfloat16"
        if config.group_size % _GROUP_MULTIPLE:
            return False, f"group_size {config.group_size}: accepted multiples of {_GROUP_MULTIPLE}"
        if config.act_order:
            return False, "act-order: the groups of K must be consecutive"
        if self.int8_activations and not config.symmetric:
            return False, "zero points: int8 activations take a symmetric weight"
        if missing := why_no_zentorch():
            return False, missing
        return True, "zentorch's int4 GEMM, " + ("int8" if self.int8_activations else "bf16") + " activations"

    def prepare(self, weight: W4A16Weight, config: LinearConfig, device: torch.device) -> ZenState:
        shift = SYMMETRIC_ZERO if weight.zeros is None else 0
        packed = torch.empty(weight.n, weight.k // 8, dtype=torch.int32)
        rows = max(1, _CHUNK_ELEMENTS // weight.k)
        for words, out in zip(torch.split(weight.q, rows), torch.split(packed, rows), strict=True):
            out.copy_(
                torch.ops.zentorch.zentorch_woq_repack_weight(unpack_rows(words).to(torch.int8) - shift)
            )
        _KEPT.append(packed)
        zeros = None if weight.zeros is None else weight.zeros.to(torch.int8).t().contiguous()
        return ZenState(packed, weight.scales.to(torch.float32).t().contiguous(), zeros)

    def apply(self, state: ZenState, x: torch.Tensor, bias: torch.Tensor | None, path: str) -> torch.Tensor:
        y: torch.Tensor
        if self.int8_activations:
            y = torch.ops.zentorch.zentorch_dynamic_qlinear(x.contiguous(), state.packed, state.scales, bias)
        else:
            y = torch.ops.zentorch.zentorch_woq_linear(
                x.contiguous(), state.packed.t(), state.scales, state.zeros, bias
            )
        return y

    def nbytes(self, state: ZenState) -> int:
        reordered_copy = state.packed.nbytes
        zeros = 0 if state.zeros is None else state.zeros.nbytes
        return state.packed.nbytes + reordered_copy + state.scales.nbytes + zeros
