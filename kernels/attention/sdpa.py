"""Paged attention through torch's scaled_dot_product_attention: the CPU's back end, and a stand-in on a GPU.

The cache of a layer is [slots, Hkv, D], slot = block * block_size + offset. Where a sequence's blocks follow one
another (the block pool tries to make them), its keys are a view; otherwise they are gathered, once per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from nybble.kernels.attention import AttentionBackend, CacheShape, Span


@dataclass(slots=True)
class _SpanPlan:
    rows: slice
    q_len: int
    kv_len: int
    # window -> the slots that are read, and the additive mask [q_len, keys] (None for a single row: it sees them all)
    keys: dict[int | None, slice | torch.Tensor] = field(default_factory=dict)
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)


@dataclass(slots=True)
class SdpaPlan:
    write_slots: slice | torch.Tensor
    spans: list[_SpanPlan]


class SdpaAttention(AttentionBackend):
    name = "sdpa"

    def allocate(self, shape: CacheShape, device: torch.device) -> None:
        slots = shape.blocks * shape.block_size
        size = (slots, shape.kv_heads, shape.head_dim)
        self.shape = shape
        self.device = device
        self.k = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)]
        self.v = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)]

    def plan(self, spans: Sequence[Span], windows: Sequence[int | None]) -> SdpaPlan:
        plans: list[_SpanPlan] = []
        written: list[slice | torch.Tensor] = []
        row = 0
        for span in spans:
            p = _SpanPlan(slice(row, row + span.q_len), span.q_len, span.kv_len)
            row += span.q_len
            for window in windows:
                # A row before the last sees further back than the last one does, by its distance to it.
                first = 0 if window is None else max(0, span.kv_len - window - span.q_len + 1)
                p.keys[window] = self._slots(span, first, span.kv_len)
                p.masks[window] = self._mask(span, first, window) if span.q_len > 1 else None
            plans.append(p)
            written.append(self._slots(span, span.kv_len - span.q_len, span.kv_len))
        if len(written) == 1:
            return SdpaPlan(written[0], plans)
        return SdpaPlan(torch.cat([self._as_index(s) for s in written]), plans)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, plan: SdpaPlan) -> None:
        slots = plan.write_slots
        if isinstance(slots, slice):
            self.k[layer][slots].copy_(k)
            self.v[layer][slots].copy_(v)
        else:
            self.k[layer].index_copy_(0, slots, k)
            self.v[layer].index_copy_(0, slots, v)

    def attend(
        self, layer: int, q: torch.Tensor, plan: SdpaPlan, window: int | None, scale: float
    ) -> torch.Tensor:
        heads, dim = q.shape[1], q.shape[2]
        kv_heads = self.shape.kv_heads
        group = heads // kv_heads
        cached_k, cached_v = self.k[layer], self.v[layer]
        parts = []
        for span in plan.spans:
            keys = span.keys[window]
            k = cached_k[keys].transpose(0, 1).unsqueeze(1)  # [Hkv, 1, L, D]
            v = cached_v[keys].transpose(0, 1).unsqueeze(1)
            if span.q_len == 1:
                # The query heads of one KV head become rows, so that its keys are read once.
                rows = q[span.rows].view(kv_heads, 1, group, dim)
                parts.append(scaled_dot_product_attention(rows, k, v, scale=scale).view(1, heads, dim))
            else:
                rows = q[span.rows].transpose(0, 1).reshape(kv_heads, group, span.q_len, dim)
                out = scaled_dot_product_attention(
                    rows,
                    k.expand(-1, group, -1, -1),
                    v.expand(-1, group, -1, -1),
                    attn_mask=span.masks[window],
                    scale=scale,
                )
                parts.append(out.reshape(heads, span.q_len, dim).transpose(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _slots(self, span: Span, start: int, stop: int) -> slice | torch.Tensor:
        size = self.shape.block_size
        first, last = start // size, (stop - 1) // size
        blocks = span.blocks[first : last + 1]
        if all(b - a == 1 for a, b in zip(blocks, blocks[1:], strict=False)):
            base = blocks[0] * size - first * size
            return slice(base + start, base + stop)
        table = torch.tensor(blocks, dtype=torch.int64).unsqueeze(1) * size + torch.arange(size)
        return table.view(-1)[start - first * size : stop - first * size].to(self.device)

    def _as_index(self, slots: slice | torch.Tensor) -> torch.Tensor:
        if isinstance(slots, slice):
            return torch.arange(slots.start, slots.stop, device=self.device)
        return slots

    def _mask(self, span: Span, first: int, window: int | None) -> torch.Tensor:
        position = torch.arange(span.kv_len - span.q_len, span.kv_len, device=self.device).unsqueeze(1)
        key = torch.arange(first, span.kv_len, device=self.device)
        visible = key <= position
        if window is not None:
            visible &= key > position - window
        mask = torch.zeros(visible.shape, dtype=self.shape.dtype, device=self.device)
        return mask.masked_fill_(~visible, float("-inf"))
