"""Attention over a paged KV cache.

    spans (one per sequence of the step) --plan()--> what every layer of the step shares
    kv [T, 2 Hkv, D], keys first --write()--> the cache of one layer
    q [T, H, D] --attend()--> [T, H, D]

A back end chooses its own cache layout; everybody else knows block numbers alone. Rows of one step lie one sequence
after the other; a sequence's last q_len positions are its rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch

from nybble.kernels.target import Target

# Of the Triton back end: its tiles hold whole heads; bf16 tensor cores start with sm_80.
MAX_HEAD_DIM = 256
_CUDA_FROM = 80


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence in one step: q_len new rows that end at position kv_len - 1, cached in `blocks`."""

    q_len: int
    kv_len: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class CacheShape:
    layers: int
    blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return 2 * self.layers * self.block_size * self.kv_heads * self.head_dim * self.dtype.itemsize


class AttentionBackend(ABC):
    """One way to keep and read the KV cache."""

    name: str
    # Whether one plan may hold rows of decoding sequences and of prompts.
    mixes_rows = False

    @abstractmethod
    def allocate(self, shape: CacheShape, device: torch.device) -> None:
        """Create the cache. Positions never written are never read."""

    @abstractmethod
    def plan(self, spans: Sequence[Span], windows: Sequence[int | None]) -> Any:
        """Everything layers share in one step. windows: the distinct sliding windows of the model's layers."""

    @abstractmethod
    def write(self, layer: int, kv: torch.Tensor, plan: Any) -> None:
        """Store kv [T, 2 Hkv, D], keys first, at the rows' positions."""

    @abstractmethod
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        plan: Any,
        window: int | None,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """q [T, H, D] -> [T, H, D]. A row at position p sees positions max(0, p - window + 1)..p.

        softcap: a score s (already scaled) becomes softcap * tanh(s / softcap) before the mask, as in Gemma 2.
        """


@dataclass(frozen=True, slots=True)
class Choice:
    """A back end, and why each earlier row of the table declined (name -> reason)."""

    backend: AttentionBackend
    declined: dict[str, str]


# Per platform, in order of preference.
BACKENDS: dict[str, tuple[str, ...]] = {
    "cpu": ("sdpa",),
    "rocm": ("triton", "sdpa"),
    "cuda": ("triton", "sdpa"),
    "xpu": ("sdpa",),
}


def choose(
    target: Target,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    broken: Mapping[str, str] = MappingProxyType({}),
) -> Choice:
    """The first back end of the target's row that fits. broken: those that failed their self-check here, and how."""
    declined: dict[str, str] = {}
    for name in BACKENDS[target.kind]:
        reason = broken.get(name)
        if reason is None and name == "triton":
            reason = _why_not_triton(target, dtype, head_dim, block_size)
        if reason is None:
            return Choice(_make(name), declined)
        declined[name] = reason
    raise ValueError(f"no attention back end for {target.kind} {target.arch}: {declined}")


def _make(name: str) -> AttentionBackend:
    if name == "triton":
        from nybble.kernels.attention.paged import PagedAttention

        return PagedAttention()
    from nybble.kernels.attention.sdpa import SdpaAttention

    return SdpaAttention()


def _why_not_triton(target: Target, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed (on ROCm it comes with AMD's torch; elsewhere: pip install triton)"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"activations {str(dtype).removeprefix('torch.')}: accepted float16, bfloat16"
    if head_dim % 2 or not 0 < head_dim <= MAX_HEAD_DIM:
        return f"head dimension {head_dim}: accepted even ones up to {MAX_HEAD_DIM}"
    if block_size & (block_size - 1):
        return f"KV block size {block_size}: accepted powers of two"
    if target.kind == "cuda" and target.sm < _CUDA_FROM:
        return f"{target.arch}: accepted sm_{_CUDA_FROM} or newer"
    return None
