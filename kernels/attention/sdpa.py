"""Paged attention through torch's scaled_dot_product_attention: the CPU's back end, and a stand-in on a GPU.

The cache of a layer is [2 Hkv, slots, D], keys first, slot = block * block_size + offset: one head's keys lie together,
which halves the time of a long context against token-major rows (144 to 272 us at 1000 tokens, Zen 4). Where a
sequence's blocks follow one another (the block pool tries to make them), its keys are a view; otherwise its slots are
gathered, once per layer. Several decoding sequences of like length are gathered together, padded, and run as one call:
on a CPU a call costs more than copying a few hundred keys. All of that is laid down once a step, in the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from nybble.kernels.attention import AttentionBackend, CacheShape, Span

# Sequences share a call while the shortest has at least this part of the longest one's keys: the rest is padding.
_LIKE_LENGTH = 0.5


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of a step that run as one call: one sequence, or several with one row each.

    rows: the step's rows, a slice or an index. count sequences of q_len rows read `length` keys each, from slot `first`
    on (one sequence whose blocks follow one another) or from the slots in `index` [count * length]. mask: additive,
    broadcast over heads, or None where every row sees every key.
    """

    rows: slice | torch.Tensor
    count: int
    q_len: int
    length: int
    first: int
    index: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(slots=True)
class SdpaPlan:
    """write_slots: where the step's rows go. parts: by window."""

    rows: int
    write_slots: slice | torch.Tensor
    parts: dict[int | None, list[_Part]] = field(default_factory=dict)


class SdpaAttention(AttentionBackend):
    name = "sdpa"
    mixes_rows = True

    def allocate(self, shape: CacheShape, device: torch.device) -> None:
        size = (2 * shape.kv_heads, shape.blocks * shape.block_size, shape.head_dim)
        self.shape = shape
        self.device = device
        # Pages of a CPU's cache cost nothing before they are first written, so it is not filled.
        self.cache = [torch.empty(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)]

    def plan(self, spans: Sequence[Span], windows: Sequence[int | None]) -> SdpaPlan:
        written = [self._slots(s, s.kv_len - s.q_len, s.kv_len) for s in spans]
        slots = written[0] if len(written) == 1 else torch.cat([self._as_index(s) for s in written])
        plan = SdpaPlan(sum(s.q_len for s in spans), slots)
        for window in windows:
            plan.parts[window] = self._parts(spans, window)
        return plan

    def write(self, layer: int, kv: torch.Tensor, plan: SdpaPlan) -> None:
        slots, by_head = plan.write_slots, kv.transpose(0, 1)
        if isinstance(slots, slice):
            self.cache[layer].narrow(1, slots.start, slots.stop - slots.start).copy_(by_head)
        else:
            self.cache[layer].index_copy_(1, slots, by_head)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        plan: SdpaPlan,
        window: int | None,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        parts = plan.parts[window]
        if len(parts) == 1:
            return self._run(layer, q, parts[0], scale, softcap)
        out = torch.empty_like(q)
        for part in parts:
            out[part.rows] = self._run(layer, q[part.rows], part, scale, softcap)
        return out

    def _run(
        self, layer: int, q: torch.Tensor, part: _Part, scale: float, softcap: float | None
    ) -> torch.Tensor:
        """q [count * q_len, H, D] -> the same shape."""
        heads, dim = q.shape[1], q.shape[2]
        kv_heads = self.shape.kv_heads
        group = heads // kv_heads
        source, slots, first = self.cache[layer], self.cache[layer].shape[1], part.first
        if part.index is not None:
            source, slots, first = source.index_select(1, part.index), len(part.index), 0
        if part.q_len == 1:
            # The query heads of one KV head become rows, so that its keys are read once.
            size = (part.count, kv_heads, part.length, dim)
            stride = (part.length * dim, slots * dim, dim, 1)
            rows = q.view(part.count, kv_heads, group, dim)
        else:
            size = (kv_heads, group, part.length, dim)
            stride = (slots * dim, 0, dim, 1)
            rows = q.transpose(0, 1).reshape(kv_heads, group, part.q_len, dim)
        k = source.as_strided(size, stride, first * dim)
        v = source.as_strided(size, stride, (kv_heads * slots + first) * dim)
        if softcap is None:
            out = scaled_dot_product_attention(rows, k, v, attn_mask=part.mask, scale=scale)
        else:
            out = _capped(rows, k, v, part.mask, scale, softcap)
        if part.q_len == 1:
            return out.reshape(part.count, heads, dim)
        return out.reshape(heads, part.q_len, dim).transpose(0, 1)

    def _parts(self, spans: Sequence[Span], window: int | None) -> list[_Part]:
        """Prompts one by one; decoding sequences in groups of like length."""
        parts = []
        decoding = []  # (keys, row, span)
        row = 0
        for span in spans:
            if span.q_len == 1:
                keys = span.kv_len if window is None else min(span.kv_len, window)
                decoding.append((keys, row, span))
            else:
                parts.append(self._prompt(span, row, window))
            row += span.q_len
        decoding.sort(key=lambda entry: entry[0], reverse=True)
        while decoding:
            longest = decoding[0][0]
            count = sum(keys >= _LIKE_LENGTH * longest for keys, _, _ in decoding)
            parts.append(self._group(decoding[:count]))
            decoding = decoding[count:]
        return parts

    def _prompt(self, span: Span, row: int, window: int | None) -> _Part:
        # A row before the last sees further back than the last one does, by its distance to it.
        first = 0 if window is None else max(0, span.kv_len - window - span.q_len + 1)
        slots = self._slots(span, first, span.kv_len)
        start, index = (slots.start, None) if isinstance(slots, slice) else (0, slots)
        mask = self._causal_mask(span, first, window)
        return _Part(slice(row, row + span.q_len), 1, span.q_len, span.kv_len - first, start, index, mask)

    def _group(self, entries: list[tuple[int, int, Span]]) -> _Part:
        """One row each of sequences sorted by falling length."""
        length = entries[0][0]
        slots = [self._slots(span, span.kv_len - keys, span.kv_len) for keys, _, span in entries]
        if len(entries) == 1:
            row, only = entries[0][1], slots[0]
            start, index = (only.start, None) if isinstance(only, slice) else (0, only)
            return _Part(slice(row, row + 1), 1, 1, length, start, index, None)
        rows = torch.tensor([row for _, row, _ in entries], device=self.device)
        # Shorter sequences are padded with their own last slot: a number that was written, and is masked out.
        index = torch.stack([_padded(self._as_index(s), length) for s in slots])
        keys = torch.tensor([keys for keys, _, _ in entries], device=self.device)
        mask = self._additive(torch.arange(length, device=self.device) < keys.unsqueeze(1))
        order = torch.argsort(rows)
        return _Part(
            rows[order], len(entries), 1, length, 0, index[order].view(-1), mask[order].view(-1, 1, 1, length)
        )

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

    def _causal_mask(self, span: Span, first: int, window: int | None) -> torch.Tensor:
        position = torch.arange(span.kv_len - span.q_len, span.kv_len, device=self.device).unsqueeze(1)
        key = torch.arange(first, span.kv_len, device=self.device)
        visible = key <= position
        if window is not None:
            visible &= key > position - window
        return self._additive(visible)

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        """0 where visible, minus infinity elsewhere, in the cache's type."""
        mask = torch.zeros(visible.shape, dtype=self.shape.dtype, device=self.device)
        return mask.masked_fill_(~visible, float("-inf"))


def _capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """scaled_dot_product_attention with capped scores, which torch's own cannot do.

    q [A, B, R, D], k and v [A, B, L, D]. One A at a time: the float32 scores then stay at B * R * L elements.
    """
    out = torch.empty_like(q)
    for a in range(q.shape[0]):
        scores = torch.matmul(q[a], k[a].transpose(-1, -2)).to(torch.float32).mul_(scale / softcap)
        scores.tanh_().mul_(softcap)
        if mask is not None:
            scores += mask[a] if mask.dim() == 4 else mask
        out[a] = torch.matmul(scores.softmax(dim=-1).to(v.dtype), v[a])
    return out


def _padded(index: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat((index, index[-1:].expand(length - len(index))))
