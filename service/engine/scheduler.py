"""Which sequences run in the next step, and which rows of them. No torch here.

    waiting --(slots and blocks free)--> running: prefill in chunks, then decode, one row a step
                                            |
    waiting (front) <--preempted (blocks ran out, or another's turn: recomputed later, nothing is lost)

Decode comes first: every running sequence that is past its prompt gets its row. Then prompts are computed, as many rows
as the step's budget has (service/engine/pacing.py): the shortest first, so that a short prompt behind a long one is not
kept waiting; but the oldest gets a part of every step, so that it is not kept waiting for ever.

Slots go by priority, then to the request that holds fewest of them. When all are held, one that runs makes way for one that
waits if it is less urgent, if its request holds two slots more, or if it has long to go and the other is short: see
_offers. At most one does so in a step, in the moment in which the other one starts.

A prompt whose beginning is in the prefix cache starts behind it. One whose next block is being computed for another
sequence right now waits until it is there: of prompts that begin alike and come together, the first computes for all.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
        """Whether the chunk's last row gives a token of the answer: the next, or, one step ahead, that after it."""
        return self.sequence.computed + self.count >= len(self.sequence.tokens)


@dataclass(slots=True)
class Step:
    """decode: one row each. prefill: chunks of prompts. growth: see Budget."""

    decode: list[Sequence] = field(default_factory=list)
    prefill: list[Chunk] = field(default_factory=list)
    growth: float = 1.0

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)

    def drop(self, sequence: Sequence) -> None:
        self.decode = [s for s in self.decode if s is not sequence]
        self.prefill = [chunk for chunk in self.prefill if chunk.sequence is not sequence]


# The oldest prompt gets this part of a step's rows at least, however many shorter ones there are.
_OLDEST_SHARE = 0.25
# Looking for one that could make way takes a pass over the queue: it is done for newcomers and every so many steps.
_LOOK_EVERY = 8
# One that has made way does so again only when it has made this part of its tokens since: computing them again is a prefill,
# whose rows cost a small part of what decoding them did, so that most of the time still goes into new tokens.
_PROGRESS = 1 / 16
# "Short" is what takes at most this part of what the other one may still generate.
_SHORT = 1 / 4


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A prompt that could get rows in this step. context: positions it need not compute. instead_of: what it would have to
    preempt for a slot."""

    sequence: Sequence
    context: int
    instead_of: Sequence | None = None


def _shortest_first(candidate: _Candidate) -> tuple[int, int]:
    return candidate.sequence.request.priority, len(candidate.sequence.tokens) - candidate.context


def _has_got_on(sequence: Sequence) -> bool:
    """Whether a sequence has generated enough since it last made way, or began, to be computed again."""
    return sequence.output_len - (sequence.gave_way_len or 0) >= _PROGRESS * len(sequence.tokens)


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
        self.running: list[Sequence] = []  # in the order in which they began
        self.preemptions = 0
        self.queries_tokens = 0
        self.hits_tokens = 0
        self._prefix_awaited = False  # by some of those that were looked at last
        self._clock = clock
        self._steps = 0
        self._looked_at = -_LOOK_EVERY
        self._computing: dict[bytes, Sequence] = {}  # key of a block -> who is computing it

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; schedule() says whose turn it is."""
        self.waiting.append(sequence)
        self._looked_at = -_LOOK_EVERY

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
        self._steps += 1
        for sequence in list(self.running):
            if sequence.pending == 1 and sequence in self.running and self._grow(sequence, 1):
                step.decode.append(sequence)
        # Growing a later sequence may have preempted an earlier entry of the list.
        step.decode = [s for s in step.decode if s in self.running]
        self._prefill(step, self._candidates())
        return step

    def follow(self, step: Step, max_model_len: int) -> Step | None:
        """The step after one whose tokens are still on the device: a row of every sequence that got one and does not end
        with it, and prompts' rows beside them. None where it takes the tokens, or what the step computes, to tell who is
        next, where a sequence would have to make way, and where nobody waits for a token."""
        running = set(self.running)
        rows = [*step.decode, *(chunk.sequence for chunk in step.prefill)]
        told = [s for s in rows if s in running and not s.pending]
        # One row that is left is a stream's: of a prompt that is nearly done, or of a token that was drawn again.
        if any(s.pending == 1 for s in self.running) or any(s.needs_its_tokens for s in told):
            return None
        decode = [s for s in told if not s.is_full(max_model_len, ahead=1)]
        if self.waiting and len(decode) < len(told):
            return None
        candidates = self._candidates()
        if any(candidate.instead_of for candidate in candidates):
            self._looked_at = -_LOOK_EVERY  # schedule() is to find it again
            return None
        # Who waits for a prefix can start when it is there. Scores are read at once, so launching them would wait.
        if (step.prefill and self._prefix_awaited) or any(c.sequence.scored is not None for c in candidates):
            return None
        if not decode or not all(self._grow(s, 1, preempt=False) for s in decode):
            return None
        self._steps += 1
        step = Step(decode)
        self._prefill(step, candidates)
        return step

    def commit(self, sequence: Sequence, stop: int) -> None:
        """Make what is computed of a running sequence known to the prefix cache: its tokens up to `stop`, beyond which a step
        may be under way."""
        assert stop <= len(sequence.tokens), "a block is known by its tokens"
        full = stop // self.block_size
        if not self.prefix_cache or full == sequence.committed:
            return
        for index in range(sequence.committed, full):
            key = sequence.block_key(index, self.block_size)
            self.pool.register(sequence.blocks[index], key)
            self._release_claim(key, sequence)
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

    def _candidates(self) -> list[_Candidate]:
        """The prompts that could get rows: those that have begun, and newcomers."""
        begun = [_Candidate(s, s.computed) for s in self.running if s.pending > 1]
        self._prefix_awaited = False
        return begun + self._newcomers() if self.waiting else begun

    def _prefill(self, step: Step, candidates: list[_Candidate]) -> None:
        """Fill the rest of the step with prompt rows."""
        if not candidates:
            return
        # One, the longest, is not counted among what is to come: a limit that it raised for itself would stand for all of
        # its time.
        lengths = [len(c.sequence.tokens) for c in candidates]
        budget = self.pacer.budget(
            len(step.decode),
            len(candidates) - 1,
            sum(s.computed for s in step.decode),
            sum(lengths) - max(lengths),
        )
        step.growth = budget.growth
        oldest = candidates[0]
        if len(candidates) > 1:
            budget.hold(len(oldest.sequence.tokens) - oldest.context, oldest.context, _OLDEST_SHARE)
        stalled = False
        for candidate in sorted(candidates, key=_shortest_first):
            if candidate is oldest:
                budget.let_go()
            if candidate.sequence in self.running:
                stalled |= not self._continue(step, candidate.sequence, budget)
            # A prompt that waits for blocks must not lose them to a newcomer.
            elif candidate.sequence in self.waiting and not stalled:
                self._begin(step, candidate, budget)

    def _newcomers(self) -> list[_Candidate]:
        """The waiting sequences that could start now: in turn as many as there are slots, which one that does not fit
        stops; if that is none, one that another makes way for."""
        found: list[_Candidate] = []
        slots, room = self.limit - len(self.running), self.pool.free
        for sequence in self._in_turn() if slots > 0 else ():
            if len(found) >= slots:
                break
            shared = self._shareable(sequence)
            if self._in_progress(sequence, shared):
                self._prefix_awaited = True
                continue
            room -= self._needed(sequence, shared)
            if room < 0:
                break
            found.append(_Candidate(sequence, len(shared) * self.block_size))
        return found or self._newcomer_instead()

    def _in_turn(self) -> list[Sequence]:
        """The queue, the most urgent first and, of those, what belongs to requests that hold the fewest slots: many choices
        of one request do not keep others waiting. Among equals what was preempted goes first."""
        places = Counter(sequence.group for sequence in self.running)
        turns: list[tuple[tuple[int, int, bool, int], Sequence]] = []
        for sequence in self.waiting:
            new = sequence.scheduled_s is None
            turns.append(((sequence.request.priority, places[sequence.group], new, len(turns)), sequence))
            places[sequence.group] += 1
        turns.sort(key=lambda entry: entry[0])
        return [sequence for _, sequence in turns]

    def _newcomer_instead(self) -> list[_Candidate]:
        """The first in turn that one of the running sequences makes way for."""
        if not (self.waiting and self.running) or self._steps - self._looked_at < _LOOK_EVERY:
            return []
        self._looked_at = self._steps
        offers = {urgency: self._offers(urgency) for urgency in {s.request.priority for s in self.waiting}}
        for sequence in self._in_turn():
            mine = offers[sequence.request.priority]
            victim = next((running for running, makes_way in mine if makes_way(sequence, running)), None)
            if victim is None:
                continue
            shared = self._shareable(sequence)
            if not self._in_progress(sequence, shared) and self._fits(sequence, shared, victim):
                return [_Candidate(sequence, len(shared) * self.block_size, victim)]
        return []

    def _offers(self, urgency: int) -> list[tuple[Sequence, Callable[[Sequence, Sequence], bool]]]:
        """Who would make way for one of this urgency, and on which condition: the least urgent, one of the request that
        holds the most slots, the one that has the most to go. Of equals the youngest, which loses least."""
        held = Counter(sequence.group for sequence in self.running)

        def less_urgent(newcomer: Sequence, running: Sequence) -> bool:
            return newcomer.request.priority < running.request.priority

        def holds_more(newcomer: Sequence, running: Sequence) -> bool:
            return held[newcomer.group] + 2 <= held[running.group]

        def hardly_delayed(newcomer: Sequence, running: Sequence) -> bool:
            length = len(newcomer.tokens) + newcomer.left
            return newcomer.scheduled_s is None and length <= _SHORT * running.left

        young = [s for s in reversed(self.running) if s.request.priority >= urgency]
        again = [s for s in young if s.gave_way_len is None or _has_got_on(s)]
        served = [s for s in young if _has_got_on(s)] if self._may_wait_for_short_ones() else []
        ranked: tuple[tuple[list[Sequence], Callable[[Sequence], int], Any], ...] = (
            (young, lambda s: s.request.priority, less_urgent),
            (again, lambda s: held[s.group], holds_more),
            (served, lambda s: s.left, hardly_delayed),
        )
        return [(max(some, key=rank), makes_way) for some, rank, makes_way in ranked if some]

    def _may_wait_for_short_ones(self) -> bool:
        """Half of the slots stay with those that have them, however many short requests come."""
        gone = sum(sequence.gave_way_len is not None for sequence in self.waiting)
        return gone < max(1, self.limit // 2)

    def _fits(self, newcomer: Sequence, shared: list[int], victim: Sequence | None) -> bool:
        """Whether there are blocks for a newcomer, those included that its victim alone uses."""
        gained = 0 if victim is None else self.pool.sole(set(victim.blocks).difference(shared))
        return self._needed(newcomer, shared) <= self.pool.free + gained

    def _needed(self, sequence: Sequence, shared: list[int]) -> int:
        """Free blocks that a sequence's whole present length and its next token, if it makes any, take, behind the shared
        ones."""
        whole = self._blocks_for(len(sequence.tokens) + min(1, sequence.request.sampling.max_tokens))
        return whole - len(shared) + self.pool.unused(shared)

    def _shareable(self, sequence: Sequence) -> list[int]:
        """Cached blocks that a sequence can start behind; its last token always has to be computed."""
        if not self.prefix_cache or sequence.scored is not None:
            return []
        full = (len(sequence.tokens) - 1) // self.block_size
        return self.pool.find(sequence.block_key(i, self.block_size) for i in range(full))

    def _in_progress(self, sequence: Sequence, shared: list[int]) -> bool:
        """Whether the block after the shared ones is being computed for another sequence."""
        if not self.prefix_cache or sequence.scored is not None:
            return False
        if (len(sequence.tokens) - 1) // self.block_size <= len(shared):
            return False
        return sequence.block_key(len(shared), self.block_size) in self._computing

    def _continue(self, step: Step, sequence: Sequence, budget: Budget) -> bool:
        """The next rows of a prompt that has begun. False when there were no blocks for them."""
        count = budget.take(sequence.pending, sequence.computed, self.block_size)
        if not count:
            return True
        if not self._grow(sequence, count, preempt=not step):
            budget.give_back()
            return False
        self._claim(sequence, sequence.computed + count)
        step.prefill.append(Chunk(sequence, count))
        return True

    def _begin(self, step: Step, candidate: _Candidate, budget: Budget) -> None:
        """Start a sequence if its whole present length fits: a prompt that is sure to be preempted is not begun."""
        sequence, victim = candidate.sequence, candidate.instead_of
        # What ran before it in this step may have preempted its victim, or the sequence itself for another one's slot.
        if (len(self.running) >= self.limit) if victim is None else (victim not in self.running):
            return
        # Looked up again: what ran before it in this step may have taken blocks, or begun the same prompt.
        shared = self._shareable(sequence)
        if not self._fits(sequence, shared, victim) or self._in_progress(sequence, shared):
            return
        context = len(shared) * self.block_size
        count = budget.take(len(sequence.tokens) - context, context, self.block_size)
        if not count:
            return
        if victim is not None:
            step.drop(victim)
            victim.gave_way_len = victim.output_len
            self.preempt(victim)
            self._looked_at = -_LOOK_EVERY
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
        self._claim(sequence, context + count)
        step.prefill.append(Chunk(sequence, count))

    def _first_seen(self, sequence: Sequence) -> None:
        if sequence.scheduled_s is None:
            sequence.scheduled_s = self._clock()
            sequence.cached = sequence.computed
            if self.prefix_cache and sequence.scored is None:
                self.queries_tokens += sequence.prompt_len
                self.hits_tokens += sequence.computed

    def _claim(self, sequence: Sequence, stop: int) -> None:
        """Say which blocks a sequence, about to be computed up to `stop`, computes: with the next one, since only the block
        after what it shares is ever looked for by another."""
        if self.prefix_cache:
            full = len(sequence.tokens) // self.block_size
            for index in range(sequence.committed, min(stop // self.block_size + 1, full)):
                self._computing.setdefault(sequence.block_key(index, self.block_size), sequence)

    def _release_claim(self, key: bytes, sequence: Sequence) -> None:
        if self._computing.get(key) is sequence:
            del self._computing[key]

    def _grow(self, sequence: Sequence, rows: int, preempt: bool = True) -> bool:
        """Blocks for `rows` more; preempts the youngest of the least urgent sequences if it must. False: not this step (or
        preempted)."""
        needed = self._blocks_for(sequence.computed + rows) - len(sequence.blocks)
        while needed > 0 and not self.pool.extend(sequence.blocks, needed):
            if not preempt:
                return False
            victim = max(reversed(self.running), key=lambda running: running.request.priority)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _free(self, sequence: Sequence) -> None:
        if self.prefix_cache and sequence.blocks:
            for key in sequence.known_keys[sequence.committed :]:
                self._release_claim(key, sequence)
        self.pool.release(sequence.blocks, sequence.reserved)
        sequence.blocks, sequence.reserved = [], None

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
