"""Attention over a paged KV cache.

    spans (one per sequence of the step) --plan()--> what every layer of the step shares
    kv [T, 2 Hkv, D], keys first --write()--> the cache of one layer
    q [T, H, D] --attend()--> [T, H, D]

A back end chooses its own cache layout; everybody else knows block numbers alone. Rows of one step lie one sequence
after the other; a sequence's last q_len positions are its rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nybble.kernels.target import Target


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
        self, layer: int, q: torch.Tensor, plan: Any, window: int | None, scale: float
    ) -> torch.Tensor:
        """q [T, H, D] -> [T, H, D]. A row at position p sees positions max(0, p - window + 1)..p."""


def backend_for(target: Target) -> AttentionBackend:
    from nybble.kernels.attention.sdpa import SdpaAttention

    return SdpaAttention()
