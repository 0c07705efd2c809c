"""The GPU's attention back end: the Triton kernels of triton_paged.py over one paged cache, and how a step's numbers get
onto the device.

The cache is [layers, blocks, 2, Hkv, block_size, D], one allocation. Everything about a step that changes from one to the
next (tokens, positions, slots, lengths, block tables) is a handful of int32 arrays, side by side in a StepBuffers: one
copy moves them, and a captured graph finds them where they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nybble.kernels.attention import AttentionBackend, CacheShape, Span

# Kernels are compiled for pointers that are multiples of 16 bytes.
_ALIGN = 4
# Rows of one sequence up to which its keys may be split over programs (triton_paged.py).
FEW_ROWS = 16


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """int32 on the device: slots [T] (negative: a row of padding), q_start [B + 1], kv_len [B], table [B, W].

    max_q: no sequence has more rows. streams: so many sequences, the first, have one row at most, whatever max_q is.
    """

    slots: torch.Tensor
    q_start: torch.Tensor
    kv_len: torch.Tensor
    table: torch.Tensor
    max_q: int
    streams: int = 0


class StepBuffers:
    """The arrays of a pass of up to `rows` rows of `sequences` sequences of up to `blocks` KV blocks, on the host (pinned
    where the device is a GPU) and at fixed addresses on the device.

    The table lies block-major, [blocks, sequences], so that the part in use is one piece with everything before it.
    """

    def __init__(self, rows: int, sequences: int, blocks: int, block_size: int, device: torch.device) -> None:
        self.rows = rows
        self.sequences = sequences
        self.block_size = block_size
        sizes = {
            "ids": rows,
            "positions": rows,
            "slots": rows,
            "q_start": sequences + 1,
            "kv_len": sequences,
            "logit_rows": sequences,
            "table": sequences * blocks,
        }
        starts, end = {}, 0
        for name, size in sizes.items():
            starts[name] = end
            end += -(-size // _ALIGN) * _ALIGN
        self._table_start = starts["table"]
        self._host = torch.zeros(end, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(end, dtype=torch.int32, device=device)
        array = self._host.numpy()
        host = {name: array[start : start + sizes[name]] for name, start in starts.items()}
        self.ids, self.positions, self.slots = host["ids"], host["positions"], host["slots"]
        self._q_start, self._kv_len, self._logit_rows = host["q_start"], host["kv_len"], host["logit_rows"]
        self._table = host["table"].reshape(blocks, sequences)
        self._copied: Any = None
        self._known: list[list[int]] = [[] for _ in range(sequences)]
        on_device = {name: self._device[start : start + sizes[name]] for name, start in starts.items()}
        self._on = on_device
        self._table_on = on_device["table"].view(blocks, sequences)

    def fill(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        groups: Sequence[tuple[Sequence[Span], int]],
        logit_rows: Sequence[int],
        rows: int,
    ) -> None:
        """Write a pass and start its copy to the device. groups: spans, and for how many there is room, one group after the
        other. Rows up to `rows` and sequences that are not given are padding: token 0 at position 0, cached nowhere, seen
        by nobody. Those of the last group have a row of it each, as far as there are any, the others none."""
        if self._copied is not None:
            self._copied.synchronize()
        count = len(ids)
        self.ids[:count], self.positions[:count] = ids, positions
        self.ids[count:rows] = self.positions[count:rows] = 0
        self.slots[count:rows] = -1
        row = 0
        size = self.block_size
        most = 1
        start = 0
        for spans, room in groups:
            for b, span in enumerate(spans, start):
                self._q_start[b] = row
                self._kv_len[b] = span.kv_len
                row = self._fill_slots(row, span)
                known = self._known[b]
                used = -(-span.kv_len // size)
                most = max(most, used)
                # Most steps of a decoding sequence change nothing here.
                if known != span.blocks:
                    self._table[: len(span.blocks), b] = span.blocks
                    self._known[b] = list(span.blocks)
            absent = start + len(spans)
            start += room
            self._q_start[absent:start] = row
            self._kv_len[absent:start] = 0
        padding = start - absent
        self._q_start[absent : start + 1] = np.minimum(row + np.arange(padding + 1), max(row, rows))
        self._logit_rows[: len(logit_rows)] = logit_rows
        # To the end: a pass may have more rows of logits than sequences, and those of an earlier one need not exist in it.
        self._logit_rows[len(logit_rows) :] = 0
        end = self._table_start + most * self.sequences
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        if self._device.device.type == "cuda":
            # The next fill waits for it: the host's array is not to change under the copy.
            self._copied = torch.cuda.current_stream(self._device.device).record_event()

    def _fill_slots(self, row: int, span: Span) -> int:
        """Slots of a sequence's rows, from `row` on; the row after them."""
        size = self.block_size
        if span.q_len == 1:
            last = span.kv_len - 1
            self.slots[row] = span.blocks[last // size] * size + last % size
            return row + 1
        position = np.arange(span.kv_len - span.q_len, span.kv_len)
        blocks = np.asarray(span.blocks, dtype=np.int32)
        self.slots[row : row + span.q_len] = blocks[position // size] * size + position % size
        return row + span.q_len

    def plan(self, rows: int, sequences: int, max_q: int, streams: int = 0) -> PagedPlan:
        """Views of the device's arrays for a pass of this shape."""
        return PagedPlan(
            self._on["slots"][:rows],
            self._on["q_start"][: sequences + 1],
            self._on["kv_len"][:sequences],
            self._table_on[:, :sequences].t(),
            max_q,
            streams,
        )

    def tokens(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, positions), int32 [rows] on the device."""
        return self._on["ids"][:rows], self._on["positions"][:rows]

    def logit_rows(self, count: int) -> torch.Tensor:
        """int32 [count] on the device; rows past those filled repeat row 0."""
        return self._on["logit_rows"][:count]


class PagedAttention(AttentionBackend):
    """float16 and bfloat16 on a GPU; in Triton's interpreter on a CPU, for tests."""

    name = "triton"
    mixes_rows = True

    def allocate(self, shape: CacheShape, device: torch.device) -> None:
        size = (shape.layers, shape.blocks, 2, shape.kv_heads, shape.block_size, shape.head_dim)
        self.shape = shape
        self.device = device
        self.whole = torch.empty(size, dtype=shape.dtype, device=device)
        self.cache = self.whole.unbind(0)

    def plan(self, spans: Sequence[Span], windows: Sequence[int | None]) -> PagedPlan:
        """Of any step, through buffers of its own: for callers that keep none (see StepBuffers)."""
        rows, size = sum(s.q_len for s in spans), self.shape.block_size
        blocks = max(len(s.blocks) for s in spans)
        buffers = StepBuffers(rows, len(spans), blocks, size, self.device)
        buffers.fill([0] * rows, [0] * rows, [(spans, len(spans))], [], rows)
        return buffers.plan(rows, len(spans), max(s.q_len for s in spans))

    def write(self, layer: int, kv: torch.Tensor, plan: PagedPlan) -> None:
        size = self.shape.block_size
        slots = plan.slots.long()
        self.cache[layer].flatten(1, 2)[slots // size, :, slots % size] = kv

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        plan: Any,
        window: int | None,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        from nybble.kernels.attention.triton_paged import paged_attention

        out: torch.Tensor = paged_attention(
            q,
            self.cache[layer],
            plan.table,
            plan.q_start,
            plan.kv_len,
            plan.max_q,
            window or 0,
            scale,
            softcap or 0.0,
            plan.streams,
        )
        return out
