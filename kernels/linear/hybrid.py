"""The RDNA hybrid: one packed weight in the skinny layout, read by every path. On CUDA too, where it is developed.

Paths: "skinny", the csrc kernel for up to 16 rows, on CUDA 64 (skinny.py), and "triton", fused dequantisation in a Triton GEMM
(triton_skinny.py). The rows of the kernel table that need Triton stand here and import it only when they run, so that a
host without it can still read the table.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from nybble.kernels.launch import HALF_TYPES
from nybble.kernels.linear.config import LinearConfig, LinearKernel
from nybble.kernels.packing import PER_WORD, W4A16Weight
from nybble.kernels.parts import Parts
from nybble.kernels.skinny_layout import GROUP_SIZES, K_MULTIPLE, SkinnyWeight
from nybble.kernels.target import Target, detect
from nybble.kernels.tiles import tile_for

if TYPE_CHECKING:
    from nybble.kernels.linear.skinny import Plan

# bf16 tensor cores and the Triton that is supported start here.
_CUDA_FROM = 80


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def declined(config: LinearConfig, group_sizes: tuple[int, ...]) -> str | None:
    """Why a Triton row cannot take a layer, or None: what both rows below have in common."""
    if not has_triton():
        return "triton is not installed (on ROCm it comes with AMD's torch; elsewhere: pip install triton)"
    if config.dtype not in HALF_TYPES:
        return f"activations {str(config.dtype).removeprefix('torch.')}: accepted float16, bfloat16"
    if config.group_size not in group_sizes:
        return f"group_size {config.group_size}: accepted {', '.join(map(str, group_sizes))}"
    if config.act_order:
        return "act-order: the groups of K must be consecutive"
    return None


class Hybrid(LinearKernel):
    name = "hybrid"
    paths = ("skinny", "triton")

    def can_implement(self, config: LinearConfig, target: Target) -> tuple[bool, str]:
        from nybble.kernels.linear.skinny import max_m

        if not target.is_rdna and target.sm < _CUDA_FROM:
            return (
                False,
                f"{target.kind} {target.arch}: runs on gfx11*, gfx120* and CUDA sm_{_CUDA_FROM} or newer",
            )
        reason = declined(config, GROUP_SIZES)
        if reason is not None:
            return False, reason
        if config.k % K_MULTIPLE:
            return False, f"K={config.k}: accepted multiples of {K_MULTIPLE}"
        if not config.symmetric and config.n % PER_WORD:
            return False, f"N={config.n} with zero points: accepted multiples of {PER_WORD}"
        try:
            for m in (16, max_m(target)):  # with the most rows of a kind of plan: the most shared memory
                _plan(config, target, m)
        except ValueError as error:
            return False, str(error)
        return True, "one packed weight, read by every path"

    def prepare(self, weight: W4A16Weight, config: LinearConfig, device: torch.device) -> SkinnyWeight:
        from nybble.kernels import skinny_layout
        from nybble.kernels.linear import skinny

        target = detect(device)
        packed = skinny_layout.pack(weight, arch=target.arch, device=device)
        skinny.compile_ahead(target, packed, config.dtype)
        if device.type == "cuda":
            # The skinny kernel may read weights before the launch ahead of it has ended: that must not be the packing.
            torch.cuda.current_stream(device).synchronize()
        return packed

    def apply(
        self, state: SkinnyWeight, x: torch.Tensor, bias: torch.Tensor | None, path: str
    ) -> torch.Tensor:
        if path == "skinny":
            from nybble.kernels.linear import skinny

            return skinny.apply(state, x, bias)
        from nybble.kernels.linear.triton_skinny import skinny_gemm as triton_gemm

        y: torch.Tensor = triton_gemm(x, state.words, state.scales, state.zeros, bias, state.group_size)
        return y

    def apply_parts(
        self, state: SkinnyWeight, x: torch.Tensor, bias: torch.Tensor | None, path: str
    ) -> Parts:
        from nybble.kernels.linear.triton_skinny import skinny_gemm_parts

        if path != "triton":
            return super().apply_parts(state, x, bias, path)
        values = skinny_gemm_parts(x, state.words, state.scales, state.zeros, bias, state.group_size)
        # One part is the finished result, bias included.
        return Parts(values, bias if values.shape[0] > 1 else None)

    def apply_gated(
        self, state: SkinnyWeight, x: torch.Tensor, bias: torch.Tensor | None, path: str, activation: str
    ) -> torch.Tensor | None:
        if path == "skinny":
            from nybble.kernels.linear import skinny

            return skinny.apply(state, x, bias, activation)
        from nybble.kernels.linear.triton_skinny import gates, skinny_gemm_gated

        if path != "triton" or not gates(x, state.words, state.zeros, state.group_size):
            return None
        y: torch.Tensor = skinny_gemm_gated(
            x, state.words, state.scales, state.zeros, bias, state.group_size, activation
        )
        return y

    def expect_gate(
        self, state: SkinnyWeight, config: LinearConfig, device: torch.device, activation: str
    ) -> None:
        from nybble.kernels.linear import skinny

        skinny.compile_ahead(detect(device), state, config.dtype, activation)

    def nbytes(self, state: SkinnyWeight) -> int:
        return state.nbytes

    def describe(self, config: LinearConfig, target: Target, m: int, path: str) -> str | None:
        if path == "skinny":
            return str(_plan(config, target, m))
        from nybble.kernels.linear.triton_skinny import table_name

        return _tile(config, target, m, table_name(target.arch)) if path == "triton" else None


class TritonKN(LinearKernel):
    """The [K, N/8] kernel: CDNA, and whatever the hybrid declines (group size 256 or one group spanning K)."""

    name = "triton_kn"
    paths = ("triton",)

    def can_implement(self, config: LinearConfig, target: Target) -> tuple[bool, str]:
        if target.kind != "rocm" and target.sm < _CUDA_FROM:
            return False, f"{target.kind} {target.arch}: runs on ROCm and CUDA sm_{_CUDA_FROM} or newer"
        reason = declined(config, (32, 64, 128, 256, config.k))
        if reason is not None:
            return False, reason
        if config.n % PER_WORD:
            return False, f"N={config.n}: accepted multiples of {PER_WORD}"
        return True, "fused dequantisation on the [K, N/8] layout"

    def prepare(self, weight: W4A16Weight, config: LinearConfig, device: torch.device) -> object:
        from nybble.kernels.linear.triton_kn import pack_kn

        return pack_kn(weight, device=device)

    def apply(self, state: object, x: torch.Tensor, bias: torch.Tensor | None, path: str) -> torch.Tensor:
        from nybble.kernels.linear.triton_kn import KNWeight, kn_gemm

        assert isinstance(state, KNWeight)
        y: torch.Tensor = kn_gemm(x, state.words, state.scales, state.zeros, bias, state.group_size)
        return y

    def nbytes(self, state: object) -> int:
        from nybble.kernels.linear.triton_kn import KNWeight

        assert isinstance(state, KNWeight)
        return state.nbytes

    def describe(self, config: LinearConfig, target: Target, m: int, path: str) -> str | None:
        return _tile(config, target, m, "kn") if path == "triton" else None


def _plan(config: LinearConfig, target: Target, m: int) -> Plan:
    """Of the csrc kernel, with scales of the activations' size."""
    from nybble.kernels.linear.skinny import plan_for

    c = config
    return plan_for(target, m, c.n, c.k, c.group_size, c.dtype.itemsize, not c.symmetric)


def _tile(config: LinearConfig, target: Target, m: int, kernel: str) -> str:
    c = config
    tile = tile_for(target.arch, m, c.n, c.k, c.group_size, c.dtype, c.symmetric, kernel)
    split = f", K in {tile.split_k} parts" if tile.split_k > 1 else ""
    return f"{tile.block_m}x{tile.block_n}x{tile.block_k}, {tile.num_warps} warps{split}"
