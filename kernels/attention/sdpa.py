"""Paged attention through torch's scaled_dot_product_attention: the CPU's back end, and a stand-in on a GPU.

The cache of a layer is [slots, 2 Hkv, D], keys first, slot = block * block_size + offset. Where a sequence's blocks
follow one another (the block pool tries to make them), its keys are a view; otherwise its slots are gathered, once per
layer. What a layer does per sequence is laid down once a step, as arguments of one as_strided call: on a CPU a decode
step is made of operations that take a microsecond or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from nybble.kernels.attention import AttentionBackend, CacheShape, Span


@dataclass(frozen=True, slots=True)
class _Keys:
    """What one sequence reads under one window: `length` slots from slot `first` on, or those listed in `index`; and
    the additive mask [q_len, length], None for a single row, which sees them all."""

    length: int
    first: int
    index: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(slots=True)
class SdpaPlan:
    """write_slots: where the step's rows go. keys: per sequence, by window."""

    q_lens: list[int]
    write_slots: slice | torch.Tensor
    keys: list[dict[int | None, _Keys]] = field(default_factory=list)


class SdpaAttention(AttentionBackend):
    name = "sdpa"

    def allocate(self, shape: CacheShape, device: torch.device) -> None:
        size = (shape.blocks * shape.block_size, 2 * shape.kv_heads, shape.head_dim)
        self.shape = shape
        self.device = device
        # Pages of a CPU's cache cost nothing before they are first written, so it is not filled.
        self.cache = [torch.empty(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)]

    def plan(self, spans: Sequence[Span], windows: Sequence[int | None]) -> SdpaPlan:
        written = [self._slots(s, s.kv_len - s.q_len, s.kv_len) for s in spans]
        slots = written[0] if len(written) == 1 else torch.cat([self._as_index(s) for s in written])
        plan = SdpaPlan([s.q_len for s in spans], slots)
        for span in spans:
            plan.keys.append({window: self._keys(span, window) for window in windows})
        return plan

    def write(self, layer: int, kv: torch.Tensor, plan: SdpaPlan) -> None:
        slots = plan.write_slots
        if isinstance(slots, slice):
            self.cache[layer][slots].copy_(kv)
        else:
            self.cache[layer].index_copy_(0, slots, kv)

    def attend(
        self, layer: int, q: torch.Tensor, plan: SdpaPlan, window: int | None, scale: float
    ) -> torch.Tensor:
        heads, dim = q.shape[1], q.shape[2]
        kv_heads = self.shape.kv_heads
        group = heads // kv_heads
        parts = []
        rows_of = (q,) if len(plan.q_lens) == 1 else torch.split(q, plan.q_lens)
        for rows, q_len, keys in zip(rows_of, plan.q_lens, plan.keys, strict=True):
            seen = keys[window]
            if q_len == 1:
                # The query heads of one KV head become rows, so that its keys are read once.
                k, v = self._read(layer, seen, 1)
                out = scaled_dot_product_attention(rows.view(kv_heads, 1, group, dim), k, v, scale=scale)
                parts.append(out.view(1, heads, dim))
            else:
                k, v = self._read(layer, seen, group)
                grouped = rows.transpose(0, 1).reshape(kv_heads, group, q_len, dim)
                out = scaled_dot_product_attention(grouped, k, v, attn_mask=seen.mask, scale=scale)
                parts.append(out.reshape(heads, q_len, dim).transpose(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, layer: int, keys: _Keys, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [Hkv, group, length, D]; the heads of a group share one copy."""
        kv_heads, dim = self.shape.kv_heads, self.shape.head_dim
        slot = 2 * kv_heads * dim
        source, first = self.cache[layer], keys.first * slot
        if keys.index is not None:
            source, first = source.index_select(0, keys.index), 0
        size, stride = (kv_heads, group, keys.length, dim), (dim, 0, slot, 1)
        return source.as_strided(size, stride, first), source.as_strided(size, stride, first + kv_heads * dim)

    def _keys(self, span: Span, window: int | None) -> _Keys:
        # A row before the last sees further back than the last one does, by its distance to it.
        first = 0 if window is None else max(0, span.kv_len - window - span.q_len + 1)
        slots = self._slots(span, first, span.kv_len)
        mask = self._mask(span, first, window) if span.q_len > 1 else None
        length = span.kv_len - first
        if isinstance(slots, slice):
            return _Keys(length, slots.start, None, mask)
        return _Keys(length, 0, slots, mask)

    def _slots(self, span: Span, start: int, stop: int) -> slice | torch.Tensor:
        size = self.shape.block_size
        first, last = start // size, (stop - 1) // size
        blocks = span.blocks[first : last + 1]
        base = blocks[0] * size - first * size
        if blocks[-1] - blocks[0] == last - first and all(b == blocks[0] + i for i, b in enumerate(blocks)):
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
