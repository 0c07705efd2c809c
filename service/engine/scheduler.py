"""Which sequences run in the next step, and which rows of them. No torch here.

    waiting --(slots and blocks free)--> running: prefill in chunks, then decode, one row a step
                                            |
    waiting (front) <--preempted (blocks ran out: recomputed later, nothing is lost)

Decode comes first: every running sequence that is past its prompt gets its row. Then prompts are computed, as many rows
as the step's budget has (service/engine/pacing.py): the shortest first, so that a short prompt behind a long one is not
kept waiting; but the oldest gets a part of every step, so that it is not kept waiting for ever.

A prompt whose beginning is in the prefix cache starts behind it. One whose next block is being computed for another
sequence right now waits until it is there: of prompts that begin alike and come together, the first computes for all.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from nybble.service.engine.kv_blocks import BlockPool
from nybble.service.engine.pacing import Budget, Pacer
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


# The oldest prompt gets this part of a step's rows at least, however many shorter ones there are.
_OLDEST_SHARE = 0.25


def _shortest_first(candidate: tuple[Sequence, int]) -> tuple[int, int]:
    sequence, context = candidate
    return sequence.request.priority, len(sequence.tokens) - context


class Scheduler:
    """pool, pacer: see there. prefix_cache: whether prompts share what others have computed.

    limit is how many may run at once for now: max_running, or fewer after the device ran out of memory.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_running: int,
        pacer: Pacer,
        prefix_cache: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_running = max_running
        self.limit = max_running
        self.pacer = pacer
        self.prefix_cache = prefix_cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival: the last one is preempted first
        self.preemptions = 0
        self.queries_tokens = 0
        self.hits_tokens = 0
        self._clock = clock
        self._computing: dict[bytes, Sequence] = {}  # key of a block -> who is computing it

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
            self.limit = min(self.limit + 1, self.max_running)
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
        self._prefill(step)
        return step

    def commit(self, sequence: Sequence) -> None:
        """Make what is computed of a running sequence known to the prefix cache."""
        full = sequence.computed // self.block_size
        if not self.prefix_cache or full == sequence.committed:
            return
        keys = sequence.block_keys(full, self.block_size)
        for index in range(sequence.committed, full):
            self.pool.register(sequence.blocks[index], keys[index])
            self._release_claim(keys[index], sequence)
        sequence.committed = full

    def discard(self, sequence: Sequence) -> None:
        """What this sequence computed or shared is not to be trusted: nobody else shall find it."""
        self.pool.forget(sequence.blocks)

    def preempt(self, sequence: Sequence) -> None:
        """Back to the front of the queue, without its blocks."""
        self.running.remove(sequence)
        self._free(sequence)
        sequence.computed = sequence.committed = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _prefill(self, step: Step) -> None:
        """Fill the rest of the step with prompt rows."""
        budget = self.pacer.budget(len(step.decode))
        candidates = [(s, s.computed) for s in self.running if s.pending > 1] + self._newcomers()
        if not candidates:
            return
        oldest, context = candidates[0]
        if len(candidates) > 1:
            budget.hold(len(oldest.tokens) - context, context, _OLDEST_SHARE)
        stalled = False
        for sequence, _ in sorted(candidates, key=_shortest_first):
            if sequence is oldest:
                budget.let_go()
            if sequence in self.running:
                stalled |= not self._continue(step, sequence, budget)
            # A prompt that waits for blocks must not lose them to a newcomer.
            elif sequence in self.waiting and not stalled:
                self._begin(step, sequence, budget)

    def _newcomers(self) -> list[tuple[Sequence, int]]:
        """The waiting sequences that could start now and the positions they would share; in the queue's order, which a
        sequence that does not fit stops."""
        found: list[tuple[Sequence, int]] = []
        slots, room = self.limit - len(self.running), self.pool.free
        for sequence in self.waiting:
            if len(found) >= slots:
                break
            shared = self._shareable(sequence)
            if self._in_progress(sequence, shared):
                continue
            room -= self._needed(sequence, shared)
            if room < 0:
                break
            found.append((sequence, len(shared) * self.block_size))
        return found

    def _needed(self, sequence: Sequence, shared: list[int]) -> int:
        """Free blocks that a sequence's whole present length and its next token take, behind the shared ones."""
        whole = -(-(len(sequence.tokens) + 1) // self.block_size)
        return whole - len(shared) + self.pool.unused(shared)

    def _shareable(self, sequence: Sequence) -> list[int]:
        """Cached blocks that a sequence can start behind; its last token always has to be computed."""
        if not self.prefix_cache or sequence.scored is not None:
            return []
        full = (len(sequence.tokens) - 1) // self.block_size
        return self.pool.find(sequence.block_keys(full, self.block_size))

    def _in_progress(self, sequence: Sequence, shared: list[int]) -> bool:
        """Whether the block after the shared ones is being computed for another sequence."""
        if not self.prefix_cache or sequence.scored is not None:
            return False
        if (len(sequence.tokens) - 1) // self.block_size <= len(shared):
            return False
        return sequence.block_keys(len(shared) + 1, self.block_size)[-1] in self._computing

    def _continue(self, step: Step, sequence: Sequence, budget: Budget) -> bool:
        """The next rows of a prompt that has begun. False when there were no blocks for them."""
        count = budget.take(sequence.pending, sequence.computed, self.block_size)
        if not count:
            return True
        if not self._grow(sequence, count, preempt=not step):
            budget.give_back()
            return False
        step.prefill.append(Chunk(sequence, count))
        return True

    def _begin(self, step: Step, sequence: Sequence, budget: Budget) -> None:
        """Start a sequence if its whole present length fits: a prompt that is sure to be preempted is not begun."""
        # Looked up again: what ran before it in this step may have taken blocks, or begun the same prompt.
        shared = self._shareable(sequence)
        if self._needed(sequence, shared) > self.pool.free or self._in_progress(sequence, shared):
            return
        context = len(shared) * self.block_size
        count = budget.take(len(sequence.tokens) - context, context, self.block_size)
        if not count:
            return
        self.pool.share(shared)
        longest = sequence.prompt_len + sequence.request.sampling.max_tokens
        taken = self.pool.start(
            self._blocks_for(context + count) - len(shared),
            self._blocks_for(longest) - len(shared),
            after=shared[-1] if shared else None,
        )
        assert taken is not None
        own, sequence.reserved = taken
        sequence.blocks = shared + own
        sequence.computed, sequence.committed = context, len(shared)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self._first_seen(sequence)
        self._claim(sequence)
        step.prefill.append(Chunk(sequence, count))

    def _first_seen(self, sequence: Sequence) -> None:
        if sequence.scheduled_s is None:
            sequence.scheduled_s = self._clock()
            sequence.cached = sequence.computed
            if self.prefix_cache and sequence.scored is None:
                self.queries_tokens += sequence.prompt_len
                self.hits_tokens += sequence.computed

    def _claim(self, sequence: Sequence) -> None:
        """Say which blocks of its prompt a sequence is going to compute."""
        if self.prefix_cache:
            full = len(sequence.tokens) // self.block_size
            for key in sequence.block_keys(full, self.block_size)[sequence.committed :]:
                self._computing.setdefault(key, sequence)

    def _release_claim(self, key: bytes, sequence: Sequence) -> None:
        if self._computing.get(key) is sequence:
            del self._computing[key]

    def _grow(self, sequence: Sequence, rows: int, preempt: bool = True) -> bool:
        """Blocks for `rows` more; preempts the youngest sequences if it must. False: not this step (or preempted)."""
        needed = self._blocks_for(sequence.computed + rows) - len(sequence.blocks)
        while needed > 0 and not self.pool.extend(sequence.blocks, needed):
            if not preempt:
                return False
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _free(self, sequence: Sequence) -> None:
        if self.prefix_cache and sequence.blocks:
            full = len(sequence.tokens) // self.block_size
            for key in sequence.block_keys(full, self.block_size)[sequence.committed :]:
                self._release_claim(key, sequence)
        self.pool.release(sequence.blocks, sequence.reserved)
        sequence.blocks, sequence.reserved = [], None

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
