"""How a step's tokens reach the model: a Batch made anew each time, or static buffers on the device.

The static buffers serve the paged attention of a GPU. Shapes come from two short ladders, one of decode batches and one of
prefill rows, with padding up to the next rung: whatever runs later was run once at the start, so that nothing compiles.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nybble.kernels.attention import Span
from nybble.kernels.attention.paged import FEW_ROWS, StepBuffers
from nybble.service.models import Batch


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that a step may hold: sequences, prefill rows, and positions of one sequence; blocks of the whole cache."""

    max_running: int
    prefill_tokens: int
    max_model_len: int
    kv_blocks: int


class FreshInputs:
    """A Batch of new tensors for every pass: the CPU's way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def batch(
        self,
        phase: str,
        ids: Sequence[int],
        positions: Sequence[int],
        spans: Sequence[Span],
        logit_rows: Sequence[int] | None,
    ) -> Batch:
        """logit_rows: the rows whose logits are wanted, None for all."""

        def tensor(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self._device)

        rows = None if logit_rows is None else tensor(logit_rows)
        return Batch(tensor(ids), tensor(positions), spans, rows)


# Sequences that the fixed prefill batch of many rows has room for: each costs a few empty programs, and a row of the head.
_TOGETHER = 8


class StaticInputs:
    """Buffers for every decode batch size, and one for prefill.

    A number of rows has one Batch, always the same, so that what is captured from it stays right. Only prompts that are
    more, or shorter beside each other, than the fixed batch of their rows is made for get one of their own.
    """

    def __init__(self, limits: Limits, block_size: int, device: torch.device) -> None:
        blocks = -(-limits.max_model_len // block_size)
        self.buckets = decode_buckets(limits.max_running)
        self.rungs = prefill_rungs(limits.prefill_tokens)
        self._decode = {b: StepBuffers(b, b, blocks, block_size, device) for b in self.buckets}
        self._batches = {b: _decode_batch(buffers) for b, buffers in self._decode.items()}
        self._prefill = StepBuffers(self.rungs[-1], limits.max_running, blocks, block_size, device)
        self._together = {r: 1 if r <= FEW_ROWS else min(limits.max_running, _TOGETHER) for r in self.rungs}
        self._prompts = {r: self._prompt_batch(r) for r in self.rungs}

    def batch(
        self,
        phase: str,
        ids: Sequence[int],
        positions: Sequence[int],
        spans: Sequence[Span],
        logit_rows: Sequence[int] | None,
    ) -> Batch:
        """As FreshInputs.batch, with rows of padding: the first rows of the logits are those asked for."""
        if phase == "decode":
            return self.decode(ids, positions, spans)
        rows = self.rungs[bisect_left(self.rungs, len(ids))]
        longest = max(s.q_len for s in spans)
        # Few rows of each sequence have a tile of their own, whatever their sum (see triton_paged.py).
        if (
            logit_rows is not None
            and len(spans) <= self._together[rows]
            and (longest <= FEW_ROWS) == (rows <= FEW_ROWS)
        ):
            self._prefill.fill(ids, positions, spans, logit_rows, rows, self._together[rows])
            return self._prompts[rows]
        self._prefill.fill(ids, positions, spans, logit_rows or (), rows, len(spans))
        # One row is a tile of its own, too, which decode uses.
        plan = self._prefill.plan(rows, len(spans), max(2, longest))
        wanted = None if logit_rows is None else self._prefill.logit_rows(self.bucket(len(logit_rows)))
        return Batch(*self._prefill.tokens(rows), spans, wanted, plan)

    def _prompt_batch(self, rows: int) -> Batch:
        together = self._together[rows]
        plan = self._prefill.plan(rows, together, rows)
        return Batch(*self._prefill.tokens(rows), (), self._prefill.logit_rows(self.bucket(together)), plan)

    def decode(self, ids: Sequence[int], positions: Sequence[int], spans: Sequence[Span]) -> Batch:
        """One row a sequence."""
        bucket = self.bucket(len(ids))
        self._decode[bucket].fill(ids, positions, spans, (), bucket, bucket)
        return self._batches[bucket]

    def bucket(self, count: int) -> int:
        return self.buckets[bisect_left(self.buckets, count)]

    def decode_batch(self, bucket: int) -> Batch:
        return self._batches[bucket]

    def fill_prompt(self, rows: int, ids: Sequence[int], span: Span) -> None:
        """A whole prompt into the fixed batch of a rung, whatever its length."""
        self._prefill.fill(ids, range(len(ids)), [span], [len(ids) - 1], rows, self._together[rows])

    def prompt_batch(self, rows: int) -> Batch:
        """The fixed one of a rung."""
        return self._prompts[rows]

    def is_fixed(self, phase: str, batch: Batch) -> bool:
        """Whether this is the one Batch of its rows."""
        fixed = self._batches if phase == "decode" else self._prompts
        return fixed.get(len(batch.token_ids)) is batch


def _decode_batch(buffers: StepBuffers) -> Batch:
    rows = buffers.rows
    return Batch(*buffers.tokens(rows), (), None, buffers.plan(rows, rows, 1))


def decode_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, ... 64, 96, 128, ... up to `most`, which is one whatever it is."""
    steps = (1, 2, 4, *range(8, 64, 8), *range(64, most, 32))
    return (*(b for b in steps if b < most), most)


def prefill_rungs(most: int) -> tuple[int, ...]:
    """Row counts of a prefill pass: 16, 32, 64, then in steps of 64, 128 and 256; the last holds `most`."""
    rungs = [16]
    while rungs[-1] < most:
        rows = rungs[-1]
        rungs.append(rows + (rows if rows < 64 else 64 if rows < 512 else 128 if rows < 1024 else 256))
    return tuple(rungs)
