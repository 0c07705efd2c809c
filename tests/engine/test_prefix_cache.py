"""The prefix cache, on a stand-in for the model whose cache is a dictionary: every token an answer depends on is read
back from the slots of its sequence's blocks, so a block that is lost, shared wrongly or overwritten changes the answer."""

import random

import pytest

from nybble.service.engine.kv_blocks import BlockPool
from nybble.service.engine.pacing import Pacer
from nybble.service.engine.protocol import Request, SamplingParams
from nybble.service.engine.scheduler import Scheduler
from nybble.service.engine.sequence import Sequence

BLOCK = 4
VOCAB = 50


class Machine:
    """Runs requests through a scheduler; `slots` is the KV cache."""

    def __init__(self, blocks=400, max_running=8, prefill=24, busy=9, prefix_cache=True):
        self.pool = BlockPool(blocks)
        self.scheduler = Scheduler(self.pool, BLOCK, max_running, Pacer(prefill, busy), prefix_cache)
        self.slots = {}
        self.computed_rows = 0
        self.answers = {}
        self.cached = {}
        self.running = {}

    def add(self, name, prompt, max_tokens=12, **fields):
        sequence = Sequence(Request(name, tuple(prompt), SamplingParams(max_tokens), 0.0, **fields), ())
        self.running[name] = sequence
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        step = self.scheduler.schedule()
        # (sequence, first row, rows, whether its last row gives a token), as they were scheduled
        work = [(s, s.computed, 1, True) for s in step.decode]
        work += [(c.sequence, c.sequence.computed, c.count, c.completes) for c in step.prefill]
        for sequence, first, rows, completes in work:
            self.compute(sequence, first, rows)
            self.scheduler.commit(sequence, sequence.computed)
            if completes:
                self.advance(sequence)
        self.check()
        return work

    def compute(self, sequence, first, rows):
        self.computed_rows += rows
        for position in range(first, first + rows):
            block = sequence.blocks[position // BLOCK]
            assert self.pool._users[block] == 1, "a block of two users is written"
            assert block not in self.pool._key_of, "a registered block is written"
            self.slots[block, position % BLOCK] = (position, sequence.tokens[position])
        sequence.computed = first + rows

    def advance(self, sequence):
        seen = [self.slots[sequence.blocks[p // BLOCK], p % BLOCK] for p in range(len(sequence.tokens))]
        assert seen == list(enumerate(sequence.tokens)), f"{sequence.id} reads what it did not write"
        sequence.append(hash(tuple(seen)) % VOCAB)
        self.cached[sequence.id] = sequence.cached
        if sequence.finish_reason(10_000):
            self.end(sequence)

    def end(self, sequence):
        self.answers[sequence.id] = sequence.tokens[sequence.prompt_len :]
        self.scheduler.remove(sequence)
        del self.running[sequence.id]

    def check(self):
        """Every block is empty, kept, or in use by as many sequences as hold it."""
        pool = self.pool
        holders = [0] * pool.count
        for sequence in self.scheduler.running:
            assert len(set(sequence.blocks)) == len(sequence.blocks)
            for block in sequence.blocks:
                holders[block] += 1
        assert holders == pool._users
        assert pool.free == holders.count(0)
        assert {b for b in range(pool.count) if pool._state[b] == 0} == {
            b for b, n in enumerate(holders) if n
        }
        assert {pool._block_of[k]: k for k in pool._block_of} == pool._key_of
        assert set(pool._unused) == {b for b in pool._key_of if not holders[b]}
        assert not any(s.blocks for s in self.scheduler.waiting)

    def run(self):
        idle = 0
        while self.running:
            idle = 0 if self.step() else idle + 1
            assert idle < 5, "nothing is scheduled though requests wait"
        return self.answers


def prompts_with_common_beginnings(rng, count):
    roots = [[rng.randrange(VOCAB) for _ in range(rng.randint(3, 40))] for _ in range(3)]
    return [
        rng.choice(roots)[: rng.randint(1, 40)] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 9))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_answers_are_the_same_with_and_without_the_cache_under_pressure_and_preemption(seed):
    rng = random.Random(seed)
    prompts = prompts_with_common_beginnings(rng, 40)
    lengths = [rng.randint(1, 25) for _ in prompts]
    salts = [rng.choice([None, None, "a", "b"]) for _ in prompts]
    aborted = {i for i in range(len(prompts)) if rng.random() < 0.1}

    def answers(**fields):
        machine, order = Machine(**fields), random.Random(seed + 1)
        for i, prompt in enumerate(prompts):
            machine.add(str(i), prompt, lengths[i], cache_salt=salts[i])
            for _ in range(order.choice([0, 0, 1, 4])):
                machine.step()
            for j in aborted:
                if str(j) in machine.running and order.random() < 0.3:
                    machine.end(machine.running[str(j)])
        machine.run()
        assert machine.pool.free == machine.pool.count
        return {k: v for k, v in machine.answers.items() if int(k) not in aborted}, machine

    plain, without = answers(prefix_cache=False)
    roomy, cached = answers()
    tight, small = answers(blocks=22)
    assert plain == roomy == tight
    assert without.pool.cached == 0 and cached.scheduler.hits_tokens > 0
    assert cached.computed_rows < without.computed_rows
    assert small.scheduler.preemptions > 0 and small.scheduler.hits_tokens > 0


def test_a_prefix_outlives_its_request_and_its_answer_is_part_of_it():
    machine = Machine()
    prompt = list(range(10))
    machine.add("turn 1", prompt, 7)
    answer = machine.run()["turn 1"]
    rows = machine.computed_rows
    # 10 prompt tokens and 7 of the answer, whose last one was never computed: 16, so 4 full blocks.
    machine.add("turn 2", [*prompt, *answer, 1, 2, 3], 1)
    machine.run()
    assert machine.cached == {"turn 1": 0, "turn 2": 16}
    assert machine.computed_rows - rows == 4
    assert (machine.scheduler.queries_tokens, machine.scheduler.hits_tokens) == (30, 16)


@pytest.mark.parametrize("length", [7, 8, 9])
def test_the_last_prompt_token_is_always_computed(length):
    machine = Machine()
    for name in ("first", "second"):
        machine.add(name, range(length), 1)
        machine.run()
    assert machine.cached["second"] == (length - 1) // BLOCK * BLOCK


def test_sixteen_that_come_together_compute_a_common_prefix_once():
    machine = Machine(max_running=16, prefill=64, busy=64)
    common = list(range(41))
    for i in range(16):
        machine.add(str(i), [*common, i, i + 1, i + 2], 3)
    machine.run()
    together = machine.answers
    # 41 tokens are 10 full blocks; each computes the rest of its own prompt and 2 tokens of its answer.
    assert machine.computed_rows == 40 + 16 * (4 + 2)
    assert [machine.cached[str(i)] for i in range(16)] == [0] + [40] * 15
    for i in range(16):
        alone = Machine(prefix_cache=False)
        alone.add(str(i), [*common, i, i + 1, i + 2], 3)
        assert alone.run()[str(i)] == together[str(i)]


def test_who_waits_for_a_prefix_goes_on_when_its_maker_is_gone():
    machine = Machine(prefill=8)
    first = machine.add("first", range(40))
    machine.add("second", range(40), 2)
    machine.step()
    assert [s.id for s in machine.scheduler.waiting] == ["second"]
    machine.end(first)
    machine.run()
    assert machine.cached["second"] == 8


@pytest.mark.parametrize("rows", [3, 4, 7])
def test_who_waits_for_a_prefix_waits_until_its_maker_is_behind_it(rows):
    """Steps that end inside a block, and keys that are computed as far as they are needed."""
    machine = Machine(prefill=rows)
    first = machine.add("first", range(40), 1)
    machine.step()
    second = machine.add("second", [*range(38), 7], 1)  # the shorter one, whose turn comes first
    while first.computed < 36:
        machine.step()
        assert second.computed == 0 and len(second.known_keys) <= first.computed // BLOCK + 1
        assert len(first.known_keys) <= (first.computed + rows) // BLOCK + 2
    machine.run()
    assert machine.cached["second"] == 36 and machine.computed_rows == 40 + 3


def test_one_that_has_nothing_in_common_does_not_wait_behind_one_that_does():
    machine = Machine()
    machine.add("a", range(40))
    machine.add("same", range(40))
    machine.add("other", range(100, 103), 1)
    machine.step()
    assert [s.id for s in machine.scheduler.waiting] == ["same"]
    assert "other" in machine.answers


def test_requests_of_different_salts_share_nothing():
    machine = Machine()
    for i, salt in enumerate([None, "a", "b", "a", ""]):
        machine.add(str(i), range(30), 1, cache_salt=salt)
        machine.run()
    assert [machine.cached[str(i)] for i in range(5)] == [0, 0, 0, 28, 0]


def test_a_scored_prompt_takes_nothing_from_the_cache():
    machine = Machine()
    machine.add("first", range(30), 1)
    machine.run()
    sampling = SamplingParams(1, prompt_logprobs=0)
    sequence = Sequence(Request("scored", tuple(range(30)), sampling, 0.0), ())
    machine.running["scored"] = sequence
    machine.scheduler.add(sequence)
    machine.run()
    assert sequence.cached == 0 and machine.scheduler.queries_tokens == 30


def test_a_preempted_sequence_starts_behind_what_is_left_of_it():
    machine = Machine()
    sequence = machine.add("a", range(30), 20)
    while sequence.output_len < 8:
        machine.step()
    rows, before = machine.computed_rows, sequence.computed
    machine.scheduler.preempt(sequence)
    machine.step()
    assert machine.computed_rows - rows == before + 1 - before // BLOCK * BLOCK
    assert sequence.cached == 0, "the request itself found nothing when it came"


def test_the_least_recently_used_goes_first_and_of_one_request_its_end():
    pool = BlockPool(6)
    keys = [bytes([i]) for i in range(9)]
    old, _ = pool.start(3, 3)
    new, _ = pool.start(3, 3)
    for block, key in zip(old + new, keys, strict=False):
        pool.register(block, key)
    pool.release(old)
    pool.release(new)
    assert pool.free == 6 and pool.cached == 6
    # Used once more, the older one becomes the newer.
    again = pool.find(keys[:3])
    assert again == old
    pool.share(again)
    pool.release(again)
    assert pool.find(keys[:3]) == old
    taken = []
    expected = [new[2], new[1], new[0], old[2], old[1], old[0]]
    for block in expected:
        (got,), _ = pool.start(1, 1)
        taken.append(got)
        assert got == block
    assert pool.find(keys) == [] and pool.cached == 0 and pool.free == 0


def test_empty_blocks_are_taken_before_cached_ones():
    pool = BlockPool(4)
    first, _ = pool.start(2, 2)
    for block, key in zip(first, (b"a", b"b"), strict=True):
        pool.register(block, key)
    pool.release(first)
    second, _ = pool.start(2, 2)
    assert set(second).isdisjoint(first) and pool.find([b"a", b"b"]) == first


def test_two_blocks_of_one_content_are_one_key_and_both_come_back():
    pool = BlockPool(4)
    (one,), _ = pool.start(1, 1)
    (two,), _ = pool.start(1, 1)
    pool.register(one, b"k")
    pool.register(two, b"k")
    pool.release([one])
    pool.release([two])
    assert pool.find([b"k"]) == [one] and pool.free == 4 and pool.cached == 1


def test_forgotten_blocks_are_found_no_more_but_stay_with_who_uses_them():
    pool = BlockPool(4)
    blocks, _ = pool.start(2, 2)
    for block, key in zip(blocks, (b"a", b"b"), strict=True):
        pool.register(block, key)
    pool.share(blocks[:1])
    pool.forget(blocks)
    assert pool.find([b"a"]) == []
    pool.release(blocks)
    assert pool.free == 3
    pool.release(blocks[:1])
    assert pool.free == 4 and pool.cached == 0
    pool.start(4, 4)


def test_keys_tell_apart_tokens_places_and_salts():
    def keys(tokens, salt=None):
        request = Request("r", tuple(tokens), SamplingParams(1), 0.0, cache_salt=salt)
        sequence = Sequence(request, ())
        return [sequence.block_key(i, BLOCK) for i in range(len(tokens) // BLOCK)]

    a = keys([1, 2, 3, 4, 1, 2, 3, 4])
    assert a[0] != a[1], "the same tokens at another place"
    assert keys([1, 2, 3, 4, 9, 9, 9, 9])[0] == a[0]
    assert keys([1, 2, 3, 5, 1, 2, 3, 4])[1] != a[1]
    assert len({keys([1, 2, 3, 4], salt)[0] for salt in (None, "", "a", "\ud800")}) == 4
