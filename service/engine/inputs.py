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
        kind: str,
        ids: Sequence[int],
        positions: Sequence[int],
        spans: Sequence[Span],
        logit_rows: Sequence[int] | None,
        streams: int = 0,
    ) -> Batch:
        """logit_rows: the rows whose logits are wanted, None for all."""

        def tensor(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self._device)

        rows = None if logit_rows is None else tensor(logit_rows)
        return Batch(tensor(ids), tensor(positions), spans, rows)


# A longer pass of prompts takes the device longer than launching it takes Python, and the start longer: capturing is four
# passes.
CAPTURED_PROMPT_ROWS = 512
# Sequences that the fixed prefill batch of many rows has room for: each costs a few empty programs, and a row of the head.
_TOGETHER = 8
# Streams beside prompts have room for a multiple of it: where theirs ends, what the kernels read begins at 16 bytes.
_ROOM = 4


class StaticInputs:
    """Buffers for every decode batch size, and one for prompts, alone ("prefill") or beside streams, one row of each, which
    come first ("mixed").

    A number of rows has one Batch of each kind, always the same, so that what is captured from it stays right. Only prompts
    that are more than the fixed batch is made for, or of which all logits are wanted, get one of their own.
    """

    def __init__(self, limits: Limits, block_size: int, device: torch.device) -> None:
        blocks = -(-limits.max_model_len // block_size)
        self.buckets = decode_buckets(limits.max_running)
        self.rungs = prefill_rungs(limits.prefill_tokens)
        self._decode = {b: StepBuffers(b, b, blocks, block_size, device) for b in self.buckets}
        self._streams, self._together = _places(limits.max_running)
        self._logits = self._streams + self._together
        sequences = self._streams + limits.max_running
        self._prefill = StepBuffers(self.rungs[-1], sequences, blocks, block_size, device)
        self._fixed: dict[str, dict[int, Batch]] = {
            "decode": {b: _decode_batch(buffers) for b, buffers in self._decode.items()},
            "prefill": {r: self._prompt_batch(r, 0) for r in self.rungs},
            # Where only one sequence can run, nothing is beside it.
            "mixed": {
                r: self._prompt_batch(r, self._streams)
                for r in self.rungs
                if min(limits.max_running, limits.kv_blocks) > 1
            },
        }

    def batch(
        self,
        kind: str,
        ids: Sequence[int],
        positions: Sequence[int],
        spans: Sequence[Span],
        logit_rows: Sequence[int] | None,
        streams: int = 0,
        least: int = 0,
    ) -> Batch:
        """As FreshInputs.batch, with rows of padding, to `least` rows at least: the first rows of the logits are those asked
        for. streams: of "mixed", how many of the spans, the first, are streams."""
        if kind == "decode":
            return self.decode(ids, positions, spans)
        rows = self.rungs[bisect_left(self.rungs, max(len(ids), least))]
        room = self._streams if streams else 0
        prompts = spans[streams:]
        fixed = logit_rows is not None and len(prompts) <= self._together
        together = self._together if fixed else len(prompts)
        groups = [(spans[:streams], room), (prompts, together)]
        self._prefill.fill(ids, positions, groups, logit_rows or (), rows)
        if fixed:
            return self._fixed[kind][rows]
        # One row is a tile of its own, too, which decode uses.
        longest = max(2, *(s.q_len for s in spans))
        plan = self._prefill.plan(rows, room + together, longest, room)
        wanted = None if logit_rows is None else self._prefill.logit_rows(self.bucket(len(logit_rows)))
        return Batch(*self._prefill.tokens(rows), spans, wanted, plan)

    def _prompt_batch(self, rows: int, streams: int) -> Batch:
        plan = self._prefill.plan(rows, streams + self._together, rows, streams)
        wanted = self._prefill.logit_rows(self._logits if streams else self.bucket(self._together))
        return Batch(*self._prefill.tokens(rows), (), wanted, plan)

    def decode(self, ids: Sequence[int], positions: Sequence[int], spans: Sequence[Span]) -> Batch:
        """One row a sequence."""
        bucket = self.bucket(len(ids))
        self._decode[bucket].fill(ids, positions, [(spans, bucket)], (), bucket)
        return self._fixed["decode"][bucket]

    def bucket(self, count: int) -> int:
        return self.buckets[bisect_left(self.buckets, count)]

    def holds(self, rows: int) -> bool:
        """Whether so many rows of streams and prompts fit into one pass."""
        return rows <= self.rungs[-1]

    def fixed(self, kind: str) -> dict[int, Batch]:
        """Number of rows -> the one Batch of it."""
        return self._fixed[kind]

    def is_fixed(self, kind: str, batch: Batch) -> bool:
        return self._fixed[kind].get(len(batch.token_ids)) is batch


def _places(max_running: int) -> tuple[int, int]:
    """Of streams and of prompts in a fixed batch."""
    return -(-max_running // _ROOM) * _ROOM, min(max_running, _TOGETHER)


def captured_logit_rows(max_running: int, prefill_tokens: int) -> int:
    """Rows of logits that captured passes keep, at most."""
    streams, together = _places(max_running)
    prompts = sum(rows <= CAPTURED_PROMPT_ROWS for rows in prefill_rungs(prefill_tokens))
    return sum(decode_buckets(max_running)) + prompts * (streams + 2 * together)


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
