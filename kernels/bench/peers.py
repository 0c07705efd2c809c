"""The kernels of others on the same problem: 16-bit torch, torch's tinygemm, gemlite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from nybble.kernels.linear import LinearConfig, dequantize
from nybble.kernels.packing import SYMMETRIC_ZERO, W4A16Weight, unpack_rows
from nybble.kernels.target import Target

Gemm = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Peer:
    """declined: why it cannot run a layer here, or None. make: the layer, ready to be called with x [M, K]. dense: it
    reads 16-bit weights."""

    declined: Callable[[LinearConfig, Target], str | None]
    make: Callable[[W4A16Weight, torch.dtype], Gemm]
    dense: bool = False


def dense(weight: W4A16Weight, dtype: torch.dtype) -> Gemm:
    """The weight in 16 bits, through torch's own GEMM."""
    w = dequantize(weight, dtype)
    return lambda x: torch.nn.functional.linear(x, w)


def tinygemm(weight: W4A16Weight, dtype: torch.dtype) -> Gemm:
    """torch's int4 GEMM for CUDA."""
    q = unpack_rows(weight.q).to(torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack((q[:, ::2] << 4 | q[:, 1::2]).to(torch.uint8), 8)
    # Its zero is an offset from (q - 8) * s.
    offset = torch.zeros_like(weight.scales)
    if weight.zeros is not None:
        offset = ((SYMMETRIC_ZERO - weight.zeros.float()) * weight.scales.float()).to(dtype)
    scales_zeros = torch.stack((weight.scales.to(dtype), offset), dim=-1).transpose(0, 1).contiguous()
    group_size = weight.group_size
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, group_size, scales_zeros)


def gemlite(weight: W4A16Weight, dtype: torch.dtype) -> Gemm:
    """Its autotuner runs at the first call of each M and takes long."""
    import gemlite.core as g

    kind = g.DType.BF16 if dtype is torch.bfloat16 else g.DType.FP16
    layer = g.GemLiteLinearTriton(
        4,
        group_size=weight.group_size,
        in_features=weight.k,
        out_features=weight.n,
        input_dtype=kind,
        output_dtype=kind,
    )
    zeros = torch.full_like(weight.scales, SYMMETRIC_ZERO)
    if weight.zeros is not None:
        zeros = weight.zeros.to(weight.scales.dtype)
    layer.pack(unpack_rows(weight.q), weight.scales, zeros, None)
    forward: Gemm = layer.forward
    return forward


def _tinygemm_declined(config: LinearConfig, target: Target) -> str | None:
    if target.kind != "cuda":
        return f"device {target.kind}: measured on CUDA alone (on a CPU it is the kernel cpu_int4)"
    if config.dtype is not torch.bfloat16:
        return f"activations {config.dtype}: accepted bfloat16"
    if config.n % 8 or config.k % 128:
        return f"N={config.n}, K={config.k}: accepted N % 8 and K % 128 of 0"
    return None


def _gemlite_declined(config: LinearConfig, target: Target) -> str | None:
    if target.kind not in ("cuda", "rocm"):
        return f"device {target.kind}: runs on CUDA and ROCm"
    if find_spec("gemlite") is None:
        return "the package gemlite is not installed"
    return None


PEERS: dict[str, Peer] = {
    "dense 16-bit": Peer(lambda config, target: None, dense, dense=True),
    "tinygemm": Peer(_tinygemm_declined, tinygemm),
    "gemlite": Peer(_gemlite_declined, gemlite),
}
