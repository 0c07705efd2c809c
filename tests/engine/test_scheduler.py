import itertools
import random

import pytest

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
        s.add(sequence(name, 3, priority=priority))
    order = []
    while s.schedule():
        order.append(s.running[0].id)
        s.remove(s.running[0])
    assert order == ["d", "a", "c", "f", "b", "e"]


def test_a_preempted_sequence_goes_before_its_equals_and_after_what_is_more_urgent():
    s = scheduler(blocks=4, max_running=2)
    s.add(sequence("first", 6))
    s.add(sequence("second", 6))
    while not s.preemptions:
        advance(s.schedule())
    assert [w.id for w in s.waiting] == ["second"]
    s.add(sequence("equal", 1))
    s.add(sequence("urgent", 1, priority=-5))
    assert [w.id for w in s._in_turn()] == ["urgent", "second", "equal"]


def test_a_prompt_that_is_only_scored_needs_no_block_for_an_answer():
    s = scheduler(blocks=2)
    s.add(sequence("full", 2 * BLOCK, max_tokens=0))
    assert [c.sequence.id for c in s.schedule().prefill] == ["full"]


def names(s):
    return sorted(q.id for q in s.running)


def test_while_others_wait_slots_go_to_who_holds_fewest():
    s = scheduler(max_running=5)
    for i in range(8):
        s.add(sequence(f"a{i}", 2, group="a"))
    for i in range(4):
        s.add(sequence(f"b{i}", 2, group="b"))
    s.add(sequence("c", 2))
    advance(s.schedule())
    assert names(s) == ["a0", "a1", "b0", "b1", "c"]
    s.remove(next(q for q in s.running if q.id == "c"))
    advance(s.schedule())
    assert names(s) == ["a0", "a1", "a2", "b0", "b1"]
    for q in [q for q in s.running if q.group == "b"]:
        s.remove(q)
    advance(s.schedule())
    assert names(s) == ["a0", "a1", "a2", "b2", "b3"]


def test_alone_a_request_may_hold_all_slots_and_its_youngest_choice_makes_way_for_a_newcomer():
    s = scheduler(max_running=4)
    for i in range(8):
        s.add(sequence(f"a{i}", 2, group="a"))
    advance(s.schedule())
    assert len(s.running) == 4
    s.add(sequence("short", 2))
    step = s.schedule()
    assert [c.sequence.id for c in step.prefill] == ["short"]
    assert [q.id for q in step.decode] == ["a0", "a1", "a2"]
    assert names(s) == ["a0", "a1", "a2", "short"] and s.waiting[0].id == "a3"


def test_choices_make_way_until_nobody_holds_two_slots_more_than_another():
    s = scheduler(max_running=6)
    for i in range(6):
        s.add(sequence(f"a{i}", 2, group="a"))
    advance(s.schedule())
    for name in "bc":
        for i in range(6):
            s.add(sequence(f"{name}{i}", 2, group=name))
    for _ in range(20):
        advance(s.schedule())
    assert names(s) == ["a0", "a1", "b0", "b1", "c0", "c1"]
    assert s.preemptions == 4
    for i in range(3):
        s.add(sequence(f"single{i}", 2))
    for _ in range(20):
        advance(s.schedule())
    assert names(s) == ["a0", "b0", "c0", "single0", "single1", "single2"]
    assert s.preemptions == 7


def test_a_choice_that_made_way_does_so_again_only_after_it_has_got_on():
    s = scheduler(max_running=2, blocks=1024, prefill=1024, busy=1024)
    for i in range(2):
        s.add(sequence(f"a{i}", 160, max_tokens=400, group="a"))
    advance(s.schedule())
    lengths = {"a0": [], "a1": []}
    for i in range(12):
        s.add(sequence(f"single{i}", 1))
        before = s.preemptions
        for _ in range(100):
            advance(s.schedule())
            if s.preemptions > before:
                break
        (victim,) = s.waiting
        lengths[victim.id].append(len(victim.tokens))
        s.remove(next(q for q in s.running if q.id == f"single{i}"))
        advance(s.schedule())
    assert lengths["a1"][0] == 161, "the first time at once"
    for some in lengths.values():
        assert len(some) > 2
        assert all(15 * after >= 16 * before for before, after in zip(some, some[1:], strict=False)), some


def test_a_short_request_gets_the_slot_of_one_that_has_long_to_go():
    s = scheduler(max_running=4, blocks=1024)
    for i in range(4):
        s.add(sequence(f"long{i}", 16, max_tokens=1000))
    for _ in range(8):
        advance(s.schedule())
    for i in range(8):
        s.add(sequence(f"short{i}", 4, max_tokens=4))
    s.add(sequence("medium", 4, max_tokens=400))
    done = []
    for _ in range(60):
        for name in advance(s.schedule()):
            q = next(q for q in s.running if q.id == name)
            if q.finish_reason(10_000):
                done.append(name)
                s.remove(q)
        assert sum(q.id.startswith("long") for q in s.running) >= 2, "half of the slots stay"
    assert sorted(done) == [f"short{i}" for i in range(8)]
    assert names(s) == [f"long{i}" for i in range(4)], "and those that made way come back before the others"


def test_the_more_urgent_gets_the_slot_of_the_least_urgent_that_runs():
    s = scheduler(max_running=3)
    for name, priority in (("a", 0), ("b", 7), ("c", 3)):
        s.add(sequence(name, 2, priority=priority))
    advance(s.schedule())
    s.add(sequence("equal", 2, priority=7))
    advance(s.schedule())
    assert names(s) == ["a", "b", "c"]
    s.add(sequence("urgent", 2, priority=-1))
    advance(s.schedule())
    assert names(s) == ["a", "c", "urgent"]
    for _ in range(40):
        advance(s.schedule())
    assert s.preemptions == 1


def test_memory_is_taken_from_the_least_urgent():
    s = scheduler(blocks=4)
    s.add(sequence("idle", 6, priority=1))
    s.add(sequence("urgent", 6))
    while not s.preemptions:
        advance(s.schedule())
    assert names(s) == ["urgent"]


def test_nobody_makes_way_for_what_would_not_fit():
    s = scheduler(blocks=8, max_running=2)
    for i in range(2):
        s.add(sequence(f"a{i}", 3 * BLOCK, group="a"))
    advance(s.schedule())
    s.add(sequence("wide", 7 * BLOCK))
    for _ in range(3):
        advance(s.schedule())
    assert names(s) == ["a0", "a1"] and not s.preemptions


def test_turns_go_by_priority_first():
    s = scheduler(max_running=3)
    for i in range(3):
        s.add(sequence(f"a{i}", 2, group="a", priority=-1))
    s.add(sequence("b", 2))
    advance(s.schedule())
    assert names(s) == ["a0", "a1", "a2"]


@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_is_accounted_for_and_ends(seed):
    """Random arrivals, choices, priorities, lengths and departures over too few slots and blocks."""
    rng = random.Random(seed)
    blocks = rng.randrange(12, 40)
    s = scheduler(
        blocks=blocks, max_running=rng.randrange(1, 7), prefill=rng.randrange(1, 20), busy=rng.randrange(0, 9)
    )
    longest = blocks * BLOCK - 1
    live: dict[str, Sequence] = {}
    ended = started = 0
    for turn in range(100_000):
        if turn < 400 and rng.random() < 0.3:
            name, priority = f"r{turn}", rng.choice((0, 0, 0, -1, 3))
            prompt_len = rng.randrange(1, longest // 2)
            max_tokens = rng.choice((1, 3, rng.randrange(1, longest - prompt_len)))
            for i in range(rng.choice((1, 1, 1, 2, 9))):
                q = sequence(
                    f"{name}.{i}", prompt_len, max_tokens, turn * 1000, group=name, priority=priority
                )
                live[q.id] = q
                s.add(q)
                started += 1
        if live and rng.random() < 0.05:
            gone = live.pop(rng.choice(sorted(live)))
            s.remove(gone)
            ended += 1
        step = s.schedule()
        assert len(s.running) <= s.limit and not set(s.running) & set(s.waiting)
        assert started == ended + len(s.running) + len(s.waiting)
        chosen = [*step.decode, *(c.sequence for c in step.prefill)]
        assert len(chosen) == len(set(chosen)) and set(chosen) <= set(s.running)
        assert bool(step) == bool(live), "where there is work, some of it is done"
        used = [block for q in s.running for block in set(q.blocks)]
        assert s.pool.free == blocks - len(set(used))
        before = {q: q.computed for q in chosen}
        advance(step)
        for q in chosen:
            assert len(q.blocks) * BLOCK >= q.computed > before[q]
            s.commit(q, q.computed)
        for q in [q for q in chosen if q.output_len and q.finish_reason(10_000)]:
            assert q.output_len == q.request.sampling.max_tokens
            s.remove(live.pop(q.id))
            ended += 1
        if turn >= 400 and not live:
            break
    assert not live and started == ended and s.pool.free == blocks
    assert not s._computing, "nobody waits for what nobody computes"
    assert s.preemptions > 0


# --- the step after one whose tokens are not there ---


def launch(step):
    """The runner's part of `advance` until the tokens are read; the rest of it comes with the call of what it returns."""
    rows = [(s, 1) for s in step.decode] + [(c.sequence, c.count) for c in step.prefill]
    done = step.decode + [c.sequence for c in step.prefill if c.completes]
    for s, count in rows:
        s.computed += count
    return lambda: [s.append(1) for s in done]


def steady(*sequences, **fields):
    """A scheduler, and the step that it has launched for sequences which are past their prompts."""
    s = scheduler(**fields)
    for q in sequences:
        s.add(q)
    while any(q.pending != 1 for q in sequences):
        advance(s.schedule())
    step = s.schedule()
    launch(step)
    return s, step


LIMIT = 1000  # positions


def test_what_follows_a_decode_step_is_the_same_rows():
    a, b = sequence("a", 3), sequence("b", 4)
    s, step = steady(a, b)
    following = s.follow(step, LIMIT)
    assert following.decode == step.decode and not following.prefill
    launch(following)
    assert [q.computed for q in step.decode] == [len(q.tokens) + 1 for q in step.decode]
    assert all(len(q.blocks) * BLOCK >= q.computed for q in step.decode)


def test_a_first_tokens_row_follows_its_prompt():
    s = scheduler()
    q = sequence("a", 3)
    s.add(q)
    step = s.schedule()
    launch(step)
    following = s.follow(step, LIMIT)
    assert following.decode == [q] and not following.prefill


def test_parts_of_a_prompt_follow_beside_streams():
    a, long = sequence("a", 3), sequence("long", 2 + 4 * 8)
    s, step = steady(a)
    s.running.append(long)
    found = []
    while long.pending:
        following = s.follow(step, LIMIT)
        assert following.decode == [a]
        found += [c.count for c in following.prefill]
        launch(following)
        a.append(1)  # the token of the step before
        assert len(a.blocks) * BLOCK >= a.computed and len(long.blocks) * BLOCK >= long.computed
        step = following
    assert found == [8, 8, 8, 8, 2] and s.follow(step, LIMIT).decode == [a, long]


def test_one_row_left_of_a_prompt_is_a_streams_row_and_not_passed_over():
    a, long = sequence("a", 3), sequence("long", 1 + 8)
    s, step = steady(a)
    s.running.append(long)
    step = s.follow(step, LIMIT)
    assert [c.count for c in step.prefill] == [8]
    told = launch(step)
    a.append(1)
    assert s.follow(step, LIMIT) is None
    told()
    assert s.schedule().decode == [a, long]


def test_prompts_without_streams_are_not_followed():
    """Nobody waits for the tokens of such a step."""
    s = scheduler()
    s.add(sequence("long", 30))
    step = s.schedule()
    launch(step)
    assert s.follow(step, LIMIT) is None


def test_who_waits_for_a_prefix_is_in_the_step_after_it_is_there():
    a, maker, waiter = sequence("a", 3), sequence("maker", 8, first=7), sequence("waiter", 9, first=7)
    s, _ = steady(a)
    a.append(1)
    for q in (maker, waiter):
        s.add(q)
    step = s.schedule()
    assert [c.sequence for c in step.prefill] == [maker] and waiter in s.waiting
    told = launch(step)
    assert s.follow(step, LIMIT) is None
    told()
    s.commit(maker, maker.computed)
    assert [c.sequence for c in s.schedule().prefill] == [waiter]


def test_a_prompt_that_is_scored_is_not_followed_by_its_next_part():
    """Its scores are read where it is launched, which would wait for the step before."""
    s, step = steady(sequence("a", 3))
    s.running.append(Sequence(Request("b", tuple(range(30)), SamplingParams(1, prompt_logprobs=0), 0.0), ()))
    assert s.follow(step, LIMIT) is None


def test_a_newcomer_that_finds_a_place_begins_in_the_step_that_follows():
    a, b = sequence("a", 3), sequence("b", 3)
    s, step = steady(a, max_running=2)
    s.add(b)
    step = s.follow(step, LIMIT)
    assert step.decode == [a] and [c.sequence for c in step.prefill] == [b] and names(s) == ["a", "b"]
    launch(step)
    urgent = sequence("urgent", 3, priority=-1)
    s.add(urgent)
    assert s.follow(step, LIMIT) is None, "somebody would have to make way"


@pytest.mark.parametrize(
    "fields", [{"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}]
)
def test_who_is_penalised_for_its_own_tokens_is_not_followed(fields):
    q = Sequence(Request("a", (1, 2, 3), SamplingParams(100, **fields), 0.0), ())
    s, step = steady(q, sequence("b", 4))
    assert s.follow(step, LIMIT) is None


def test_what_ends_with_the_step_or_has_left_is_left_out():
    full, long, gone, last = (
        sequence("full", 3, 3),
        sequence("long", 4),
        sequence("gone", 4),
        sequence("last", 9),
    )
    s, step = steady(full, long, gone, last)
    assert full.left == 1 and len(step.decode) == 4
    s.remove(gone)
    assert s.follow(step, len(last.tokens) + 1).decode == [long]
    s.remove(long)
    assert s.follow(step, len(last.tokens) + 1) is None, "nothing is left"


def test_who_waits_takes_the_slot_of_what_ends_at_once():
    s, step = steady(sequence("full", 3, 2), sequence("long", 4), max_running=2)
    s.add(sequence("waiting", 3))
    assert s.follow(step, LIMIT) is None


def test_who_waits_for_blocks_alone_keeps_nobody_from_running_ahead():
    s, step = steady(sequence("a", 3), sequence("b", 4), blocks=8)
    s.add(sequence("wide", 7 * BLOCK))
    assert s.follow(step, LIMIT).decode == step.decode
    s.add(sequence("narrow", 2))
    s.waiting.reverse()
    assert [c.sequence.id for c in s.follow(step, LIMIT).prefill] == ["narrow"]


def test_while_steps_run_ahead_who_waits_is_looked_at_as_often_as_ever():
    """A sequence that makes way does so within the steps that it takes without running ahead."""
    running = [sequence(f"long{i}", 4, max_tokens=1000) for i in range(2)]
    s, step = steady(*running, max_running=2, blocks=1024)
    s.add(sequence("medium", 4, max_tokens=400))
    assert s._newcomers() == []
    for q in running:
        q.tokens += [1] * 20  # far enough to make way
        q.computed += 20
    s.waiting[0] = sequence("short", 4, max_tokens=4)
    followed = 0
    while (following := s.follow(step, LIMIT)) is not None:
        read = [s.append for s in step.decode]
        launch(following)
        for append in read:
            append(1)
        step, followed = following, followed + 1
        assert followed < 20
    assert followed == 8
    for q in step.decode:
        q.append(1)
    assert [c.sequence.id for c in s.schedule().prefill] == ["short"]


def test_nobody_is_preempted_for_running_ahead():
    a, b = sequence("a", 3), sequence("b", 3)
    s, step = steady(a, b, blocks=2)
    assert s.follow(step, LIMIT) is None and not s.preemptions
    assert names(s) == ["a", "b"]


def test_nor_for_a_prompt_that_goes_ahead():
    a, long = sequence("a", 2), sequence("long", 30)
    s, step = steady(a, blocks=2)
    s.running.append(long)
    s.pool.extend(long.blocks, 1)
    long.computed = BLOCK
    following = s.follow(step, LIMIT)
    assert following.decode == [a] and not following.prefill and not s.preemptions
    assert names(s) == ["a", "long"]


def test_a_block_is_not_known_before_its_last_token_is():
    q = sequence("a", 2 * BLOCK - 2)
    s, step = steady(q)
    collected = q.computed
    launch(s.follow(step, LIMIT))
    assert q.computed == 2 * BLOCK and len(q.tokens) == 2 * BLOCK - 1
    with pytest.raises(AssertionError, match="known by its tokens"):
        s.commit(q, q.computed)
    s.commit(q, collected)
    assert q.committed == 1
    q.append(7)
    s.commit(q, q.computed)
    assert q.committed == 2
    assert s.pool.find(q.block_key(i, BLOCK) for i in range(2)) == q.blocks[:2]
