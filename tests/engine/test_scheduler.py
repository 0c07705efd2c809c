import itertools

from nybble.service.engine.kv_blocks import BlockPool
from nybble.service.engine.pacing import Pacer
from nybble.service.engine.protocol import Request, SamplingParams
from nybble.service.engine.scheduler import Scheduler
from nybble.service.engine.sequence import Sequence

BLOCK = 4
_numbers = itertools.count(1)


def scheduler(blocks=64, max_running=8, prefill=16, busy=8):
    return Scheduler(BlockPool(blocks), BLOCK, max_running, Pacer(prefill, busy))


def sequence(name, prompt_len, max_tokens=100, first=None, **fields):
    """Prompts of different names have nothing in common unless they begin with the same number."""
    first = 10_000 * next(_numbers) if first is None else first
    prompt = tuple(range(first, first + prompt_len))
    return Sequence(Request(name, prompt, SamplingParams(max_tokens), 0.0, **fields), ())


def advance(step):
    """What the runner does to the sequences of a step; returns the ids that got a token."""
    got = []
    for s in step.decode:
        s.computed += 1
        s.append(1)
        got.append(s.id)
    for chunk in step.prefill:
        completes = chunk.completes
        chunk.sequence.computed += chunk.count
        if completes:
            chunk.sequence.append(1)
            got.append(chunk.sequence.id)
    return got


def test_a_long_prompt_is_chunked_and_does_not_stop_decoding():
    s = scheduler()
    s.add(sequence("short", 3))
    assert advance(s.schedule()) == ["short"]
    s.add(sequence("long", 30))
    for rows in (8, 8, 8, 6):
        step = s.schedule()
        assert [d.id for d in step.decode] == ["short"]
        assert [c.count for c in step.prefill] == [rows]
        advance(step)
    assert sorted(d.id for d in s.schedule().decode) == ["long", "short"]


def test_without_decoders_chunks_are_large_and_shared():
    s = scheduler()
    s.add(sequence("a", 20))
    assert [(c.sequence.id, c.count) for c in s.schedule().prefill] == [("a", 16)]
    s = scheduler()
    s.add(sequence("a", 10))
    s.add(sequence("b", 9))
    assert [(c.sequence.id, c.count) for c in s.schedule().prefill] == [("b", 9), ("a", 7)]


def test_a_short_prompt_goes_before_a_long_one_that_gets_its_part_all_the_same():
    s = scheduler()
    s.add(sequence("long", 100))
    advance(s.schedule())
    for i in range(4):
        s.add(sequence(f"short{i}", 10))
    chunks = [(c.sequence.id, c.count) for c in s.schedule().prefill]
    assert chunks == [("short0", 10), ("short1", 2), ("long", 4)]


def test_at_most_max_running_run_at_once():
    s = scheduler(max_running=2)
    for name in "abc":
        s.add(sequence(name, 2))
    advance(s.schedule())
    assert len(s.running) == 2 and len(s.waiting) == 1
    s.remove(s.running[0])
    advance(s.schedule())
    assert [q.id for q in s.running] == ["b", "c"]


def test_a_prompt_is_not_begun_before_all_of_it_fits():
    s = scheduler(blocks=6)
    s.add(sequence("a", 12))
    advance(s.schedule())
    s.add(sequence("b", 14))  # needs 4 blocks, 3 are free
    advance(s.schedule())
    assert [q.id for q in s.waiting] == ["b"]


def test_when_blocks_run_out_the_youngest_is_preempted_and_recomputed():
    s = scheduler(blocks=4)
    a, b = sequence("a", 6), sequence("b", 6)
    s.add(a)
    s.add(b)
    while not s.preemptions:
        assert s.schedule() and advance(s.schedule()) is not None
        for q in (a, b):
            assert len(q.blocks) * BLOCK >= q.computed
        if len(a.tokens) > 40:
            raise AssertionError("never preempted")
    assert s.running[0] is a and list(s.waiting) == [b]
    assert b.computed == 0 and not b.blocks and b.output_len > 0
    s.remove(a)
    step = s.schedule()
    assert step.prefill[0].sequence is b
    assert step.prefill[0].count == len(b.tokens), "prompt and what was generated are recomputed"


def test_everything_is_free_after_the_last_sequence():
    s = scheduler()
    sequences = [sequence(n, 9) for n in "abc"]
    for q in sequences:
        s.add(q)
    for _ in range(5):
        advance(s.schedule())
    for q in sequences:
        s.remove(q)
    assert s.pool.free == s.pool.count and not s.schedule()


def test_a_waiting_sequence_can_be_removed():
    s = scheduler(max_running=1)
    a, b = sequence("a", 4), sequence("b", 4)
    s.add(a)
    s.add(b)
    advance(s.schedule())
    s.remove(b)
    assert not s.waiting and s.running == [a]


def test_many_sequences_in_a_small_pool_all_finish():
    s = scheduler(blocks=10, max_running=8)
    pending = {n: sequence(n, 5 + i, max_tokens=20) for i, n in enumerate("abcdef")}
    for q in pending.values():
        s.add(q)
    for _ in range(2000):
        step = s.schedule()
        if not step:
            break
        for name in advance(step):
            q = pending[name]
            if q.finish_reason(1000):
                assert q.output_len == 20
                s.remove(q)
                del pending[name]
    assert not pending
    assert s.preemptions > 0 and s.pool.free == 10


def test_the_least_priority_goes_first_and_equals_by_arrival():
    s = scheduler(max_running=1)
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -1), ("e", 5), ("f", 0)):
        request = Request(name, (1, 2, 3), SamplingParams(10), 0.0, priority)
        s.add(Sequence(request, ()))
    assert [w.id for w in s.waiting] == ["d", "a", "c", "f", "b", "e"]


def test_a_preempted_sequence_keeps_its_place_before_a_newcomer_of_less_priority():
    s = scheduler(blocks=4, max_running=2)
    s.add(sequence("first", 6))
    s.add(sequence("second", 6))
    while not s.preemptions:
        advance(s.schedule())
    assert [w.id for w in s.waiting] == ["second"]
    s.add(Sequence(Request("urgent", (1,), SamplingParams(10), 0.0, -5), ()))
    assert [w.id for w in s.waiting] == ["second", "urgent"]
