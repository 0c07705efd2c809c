"""Which sequences run in the next step, and which rows of them. No torch here.

    waiting --(slots and blocks free)--> running: prefill in chunks, then decode, one row a step
                                            |
    waiting (front) <--preempted (blocks ran out: recomputed later, nothing is lost)

Decode comes first: every running sequence that is past its prompt gets its row. Then prompts are computed, at most
`prefill_tokens` rows a step, or `prefill_tokens_busy` while others are decoding.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from nybble.service.engine.kv_blocks import BlockPool
from nybble.service.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows computed..computed + count of a sequence's tokens."""

    sequence: Sequence
    count: int

    @property
    def completes(self) -> bool:
        """Whether the chunk's last row gives the sequence's next token."""
        return self.sequence.computed + self.count == len(self.sequence.tokens)


@dataclass(slots=True)
class Step:
    """decode: one row each. prefill: chunks of prompts."""

    decode: list[Sequence] = field(default_factory=list)
    prefill: list[Chunk] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_running: int,
        prefill_tokens: int,
        prefill_tokens_busy: int,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_running = max_running
        self.prefill_tokens = prefill_tokens
        self.prefill_tokens_busy = prefill_tokens_busy
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival: the last one is preempted first
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those of its priority; preempted ones keep their place in front."""
        place = len(self.waiting)
        while place and self._yields(self.waiting[place - 1], sequence):
            place -= 1
        self.waiting.insert(place, sequence)

    @staticmethod
    def _yields(waiting: Sequence, newcomer: Sequence) -> bool:
        return waiting.scheduled_s is None and waiting.request.priority > newcomer.request.priority

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is, and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._free(sequence)

    def schedule(self) -> Step:
        """The next step; its sequences hold the blocks that it needs. Empty only when nothing is waiting or running."""
        step = Step()
        for sequence in list(self.running):
            if sequence.pending == 1 and sequence in self.running and self._grow(sequence, 1):
                step.decode.append(sequence)
        # Growing a later sequence may have preempted an earlier entry of the list.
        step.decode = [s for s in step.decode if s in self.running]
        budget = self.prefill_tokens_busy if step.decode else self.prefill_tokens
        stalled = False
        for sequence in list(self.running):
            if budget > 0 and sequence.pending > 1 and sequence in self.running:
                rows = self._prefill(step, sequence, budget)
                budget -= rows
                stalled |= rows == 0
        # A prompt that waits for blocks must not lose them to a newcomer.
        while not stalled and budget > 0 and self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            count = min(sequence.pending, budget)
            if not self._admit(sequence, count):
                break
            self.waiting.popleft()
            self.running.append(sequence)
            step.prefill.append(Chunk(sequence, count))
            budget -= count
        return step

    def _prefill(self, step: Step, sequence: Sequence, budget: int) -> int:
        count = min(sequence.pending, budget)
        if not self._grow(sequence, count, preempt=not step):
            return 0
        step.prefill.append(Chunk(sequence, count))
        return count

    def _admit(self, sequence: Sequence, count: int) -> bool:
        """Start a sequence if its whole present length fits: a prompt that is sure to be preempted is not begun."""
        whole = self._blocks_for(len(sequence.tokens) + 1)
        if whole > self.pool.free:
            return False
        sampling = sequence.request.sampling
        taken = self.pool.start(
            self._blocks_for(count), self._blocks_for(sequence.prompt_len + sampling.max_tokens)
        )
        assert taken is not None
        sequence.blocks, sequence.reserved = taken
        if sequence.scheduled_s is None:
            sequence.scheduled_s = time.monotonic()
        return True

    def _grow(self, sequence: Sequence, rows: int, preempt: bool = True) -> bool:
        """Blocks for `rows` more; preempts the youngest sequences if it must. False: not this step (or preempted)."""
        needed = self._blocks_for(sequence.computed + rows) - len(sequence.blocks)
        while needed > 0 and not self.pool.extend(sequence.blocks, needed):
            if not preempt:
                return False
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        sequence.computed = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks, sequence.reserved)
        sequence.blocks, sequence.reserved = [], None

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
