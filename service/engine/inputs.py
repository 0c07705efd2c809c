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
from nybble.kernels.attention.paged import StepBuffers
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


class StaticInputs:
    """Buffers for every decode batch size, and one for prefill."""

    def __init__(self, limits: Limits, block_size: int, device: torch.device) -> None:
        blocks = -(-limits.max_model_len // block_size)
        self.buckets = decode_buckets(limits.max_running)
        self.rungs = prefill_rungs(limits.prefill_tokens)
        self._decode = {b: StepBuffers(b, b, blocks, block_size, device) for b in self.buckets}
        self._batches = {b: _decode_batch(buffers) for b, buffers in self._decode.items()}
        self._prefill = StepBuffers(self.rungs[-1], limits.max_running, blocks, block_size, device)

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
        self._prefill.fill(ids, positions, spans, logit_rows or (), rows, len(spans))
        # One row is a tile of its own (see triton_paged.py), which decode uses.
        plan = self._prefill.plan(rows, len(spans), max(2, *(s.q_len for s in spans)))
        wanted = None if logit_rows is None else self._prefill.logit_rows(self.bucket(len(logit_rows)))
        return Batch(*self._prefill.tokens(rows), spans, wanted, plan)

    def decode(self, ids: Sequence[int], positions: Sequence[int], spans: Sequence[Span]) -> Batch:
        """One row a sequence. Always the same Batch for a bucket: what is captured from it stays right."""
        bucket = self.bucket(len(ids))
        self._decode[bucket].fill(ids, positions, spans, (), bucket, bucket)
        return self._batches[bucket]

    def bucket(self, count: int) -> int:
        return self.buckets[bisect_left(self.buckets, count)]

    def decode_batch(self, bucket: int) -> Batch:
        return self._batches[bucket]


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
