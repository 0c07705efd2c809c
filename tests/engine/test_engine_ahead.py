"""Steps that are launched before the last one's tokens have arrived: no answer tells, and nothing is left behind."""

import random
import time

import engine_runs
import pytest
import torch
from engine_runs import request, run

from nybble.service.engine import sampler

STEADY = [
    request("greedy", range(3, 33), 25),
    request("seeded", range(40, 60), 12, temperature=1.0, seed=5),
    request("chat", range(70, 75), 30, temperature=0.7, top_p=0.95, seed=6),
    request("narrow", [9, 8, 7], 17, temperature=1.3, top_k=9, top_p=0.9, min_p=0.02, seed=7, logprobs=3),
    request("biased", [5, 6], 14, logit_bias=((123, 2.5),), logprobs=0),
    request("one", [11, 12], 1),
    request("two", [11, 12, 13], 2, temperature=1.0, seed=8),
    request("three", range(3, 36), 3),
]
PENALISED = [
    request("often", range(70, 75), 20, temperature=0.7, seed=6, frequency_penalty=0.3),
    request("again", range(20, 30), 9, repetition_penalty=1.3),
]


def make(**config):
    """Prompts in chunks of a fixed size: by time, the steps of a run would never be the same twice."""
    return engine_runs.make(**({"prefill_tokens_busy": 16} | config))


def answers(engine, requests, stagger=0, aborts=None):
    """Request id -> its tokens and why it ended; `aborts` says which ids leave before which step. What runs already runs on."""
    found = {r.request_id: [[], "abort"] for r in requests}
    others = set(engine._sequences)
    pending, step = list(requests), 0
    while pending or engine.has_work:
        while pending and step >= (len(requests) - len(pending)) * stagger:
            engine.add(pending.pop(0))
        for name in (aborts or {}).get(step, ()):
            engine.abort(name)
        for out in engine.step():
            if out.request_id in others:
                continue
            found[out.request_id][0] += [t.token_id for t in out.tokens]
            if out.finish_reason:
                found[out.request_id][1] = out.finish_reason
        step += 1
        assert step < 1000, "it goes on for ever"
    assert engine._launched is None, "a step that nobody waits for holds memory"
    nothing_left(engine)
    return found


def nothing_left(engine):
    stats, pool = engine.stats(), engine._scheduler.pool
    assert stats.running == stats.waiting == 0 and pool.free == pool.count and not any(pool._users)
    assert stats.started == sum(stats.finished.values())


def steps_ahead(engine):
    stats = engine.stats()
    assert stats.steps_ahead <= stats.steps
    return stats.steps_ahead


@pytest.fixture(scope="module")
def expected():
    """What each request is answered when it has the engine for itself, step by step."""
    engine = make(prefix_cache=False)
    return {r.request_id: answers(engine, [r])[r.request_id] for r in STEADY + PENALISED}


def events_of(engine):
    """What is launched and read from here on."""
    events, runner = [], engine.runner
    launch, collect = runner.launch, runner.collect

    def launching(step, after=None):
        events.append("launch" if after is None else "launch ahead")
        return launch(step, after)

    def collecting(flight):
        events.append("collect")
        return collect(flight)

    runner.launch, runner.collect = launching, collecting
    return events


def test_in_steady_decode_a_step_is_launched_before_the_last_ones_tokens_are_read():
    engine = make(ahead=True)
    events = events_of(engine)
    engine.add(request("a", range(3, 33), 4))
    for _ in range(3):
        engine.step()
    assert events == ["launch", *["launch ahead", "collect"] * 3], "the prompt's own step is the first"
    engine.step()
    assert events[7:] == ["collect"], "nothing comes after the last token"
    assert not engine.has_work and steps_ahead(engine) == 3


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_the_parts_of_a_prompt_beside_streams_are_launched_ahead_too(expected, rows):
    """Of two that come in one step the shorter one is done first; the end of each is followed by its first token's row."""
    engine = make(ahead=True, prefill_tokens_busy=rows)
    found = {}

    def step():
        for out in engine.step():
            found.setdefault(out.request_id, []).extend(t.token_id for t in out.tokens)

    engine.add(STEADY[2])
    step()
    step()
    events = events_of(engine)
    for r in (STEADY[0], STEADY[1]):
        engine.add(r)
    while engine.has_work:
        step()
    assert found == {r.request_id: expected[r.request_id][0] for r in STEADY[:3]}
    # What is left of one part, one row, is a step's row of its own; whatever ends frees a place.
    assert events.count("launch") <= 3 and events.count("launch ahead") > 50 // rows


def test_a_step_of_two_passes_is_not_followed(expected):
    """Where prompts and streams do not share one, tokens are in two places on the device."""
    engine = make(ahead=True)
    engine.runner.model.attention.mixes_rows = False
    requests = STEADY[:6]
    assert answers(engine, requests, stagger=2) == {r.request_id: expected[r.request_id] for r in requests}
    assert steps_ahead(engine) > 0


def with_a_stream():
    """An engine in the middle of its answer."""
    engine = make(ahead=True)
    engine.add(STEADY[2])
    engine.step()
    engine.step()
    return engine


def test_what_a_step_ahead_computes_of_a_prompt_is_known_only_when_it_is_there():
    """When its first part is read, the second one is under way: it may still fail."""
    engine = with_a_stream()
    long = request("long", range(3, 103), 5)
    engine.add(long)
    engine.step()
    collect, known = engine.runner.collect, []

    def collecting(flight):
        known.append(engine._scheduler.running[-1].committed)
        return collect(flight)

    engine.runner.collect = collecting
    for _ in range(4):
        engine.step()
    assert engine.info.block_size == 16 and known == [0, 1, 2, 3]


def test_who_begins_in_a_step_that_goes_on_from_a_failed_one_begins_again(expected):
    engine = with_a_stream()
    Failing(engine.runner, "collect", 1)
    found = answers(engine, [STEADY[4], STEADY[6], STEADY[5]])
    assert found == {r.request_id: expected[r.request_id] for r in (STEADY[4], STEADY[6], STEADY[5])}


@pytest.mark.parametrize("ahead", [True, False])
def test_a_step_is_said_to_take_as_long_as_its_streams_wait_for_it(ahead, monkeypatch):
    """With what choosing its rows takes: prompts beside streams are given what is left of that time."""
    engine = make(ahead=ahead)
    scheduler, told = engine._scheduler, []
    schedule, observe = scheduler.schedule, scheduler.pacer.observe
    monkeypatch.setattr(scheduler, "schedule", lambda: (time.sleep(0.02), schedule())[1])
    monkeypatch.setattr(scheduler.pacer, "observe", lambda s, *rest: (told.append(s), observe(s, *rest))[1])
    run(engine, *PENALISED)  # no step of which is launched before the last one's tokens are there
    assert min(told) >= 0.02


def test_without_a_device_of_its_own_a_step_waits_for_its_tokens():
    engine = make()
    events = events_of(engine)
    run(engine, *STEADY[:3])
    assert events == ["launch", "collect"] * (len(events) // 2) and steps_ahead(engine) == 0


@pytest.mark.parametrize("stagger", [0, 1, 4])
@pytest.mark.parametrize("requests", [STEADY, STEADY + PENALISED], ids=["steady", "penalised"])
def test_no_answer_tells(expected, requests, stagger):
    engine = make(ahead=True)
    assert answers(engine, requests, stagger) == {r.request_id: expected[r.request_id] for r in requests}
    assert steps_ahead(engine) > 0


def test_log_probabilities_are_the_same():
    def described(ahead):
        engine, tokens = make(ahead=ahead), {}
        for r in STEADY:
            engine.add(r)
        while engine.has_work:
            for out in engine.step():
                tokens.setdefault(out.request_id, []).extend(out.tokens)
        return tokens

    assert described(True) == described(False)


def test_a_penalised_answer_waits_for_its_tokens(expected):
    engine = make(ahead=True)
    assert answers(engine, PENALISED[:1])["often"] == expected["often"]
    assert steps_ahead(engine) == 0


@pytest.mark.parametrize("place", [1, 2, 3, 10])
def test_a_stop_token_ends_its_answer_and_what_came_behind_it_is_dropped(expected, place):
    """The others go on, in a step that was launched with a row of what had ended."""
    tokens = expected["greedy"][0]
    stop = tokens[place]
    engine = make(ahead=True)
    requests = [request("greedy", range(3, 33), 25, stop_token_ids=(stop,)), *STEADY[1:4]]
    found = answers(engine, requests)
    assert found.pop("greedy") == [tokens[: tokens.index(stop) + 1], "stop"]
    assert found == {r.request_id: expected[r.request_id] for r in STEADY[1:4]}
    assert steps_ahead(engine) > 10


def test_the_contexts_end_is_never_passed():
    def short(ahead):
        engine = make(ahead=ahead, max_model_len=48)
        found = answers(engine, [request("a", range(3, 43), 100), request("b", range(3, 20), 100)])
        return found, steps_ahead(engine)

    found, ahead = short(True)
    assert found == short(False)[0] and ahead > 20
    assert [len(tokens) for tokens, _ in found.values()] == [8, 31]


@pytest.mark.parametrize("step", range(1, 9))
def test_whoever_leaves_at_whichever_step_takes_nothing_along(expected, step):
    engine = make(ahead=True)
    found = answers(engine, STEADY[:4], aborts={step: ["seeded"]})
    tokens, reason = found.pop("seeded")
    assert reason == "abort" and tokens == expected["seeded"][0][: len(tokens)]
    assert found == {r.request_id: expected[r.request_id] for r in STEADY[:4] if r.request_id != "seeded"}
    assert answers(engine, STEADY[:1]) == {"greedy": expected["greedy"]}


def test_all_leave_while_their_step_and_the_next_are_under_way(expected):
    engine = make(ahead=True)
    for i in range(6):
        engine.add(request(f"gone {i}", range(3, 60), 50))
    for _ in range(3):
        engine.step()
    for i in range(6):
        engine.abort(f"gone {i}")
    assert not engine.has_work and engine._launched is None
    nothing_left(engine)
    assert answers(engine, STEADY[:3]) == {r.request_id: expected[r.request_id] for r in STEADY[:3]}


@pytest.mark.parametrize("steps", [1, 3])
def test_a_pause_after_all_have_left_is_no_step(steps):
    """What was under way when the last one left is not read when somebody comes: the pacer would take the pause for it."""
    engine = make(ahead=True)
    engine.add(request("gone", (9, 8, 7), 50))
    for _ in range(steps):
        engine.step()
    engine.abort("gone")
    events, observed = events_of(engine), []
    engine._scheduler.pacer.observe = lambda seconds, streams, prompts, *rest: observed.append(
        (streams, prompts)
    )
    engine.add(request("later", (9, 8), 2))
    engine.step()
    assert events[0] == "launch" and events.count("collect") == 1
    ((streams, prompts),) = observed
    assert streams == 0 and [p.count for p in prompts] == [2]


@pytest.mark.parametrize("steps", [1, 3])
def test_an_id_that_comes_again_while_its_forerunner_is_under_way_gets_its_own_tokens(expected, steps):
    engine = make(ahead=True)
    engine.add(request("greedy", (9, 8, 7), 50))
    for _ in range(steps):
        engine.step()
    engine.abort("greedy")
    assert answers(engine, STEADY[:1]) == {"greedy": expected["greedy"]}


def test_where_blocks_run_out_somebody_makes_way_as_ever(expected):
    info = make().info
    block_bytes = info.memory.pools["kv_cache"] // info.kv_blocks
    engine = make(ahead=True, kv_cache_bytes=5 * block_bytes, max_model_len=64)
    found = answers(engine, STEADY[:5])
    assert found == {r.request_id: expected[r.request_id] for r in STEADY[:5]}
    assert engine.stats().preemptions > 0 and steps_ahead(engine) > 5


def test_more_requests_than_slots_all_get_their_turn(expected):
    engine = make(ahead=True, max_running=2)
    assert answers(engine, STEADY) == {r.request_id: expected[r.request_id] for r in STEADY}
    assert steps_ahead(engine) > 5


def test_what_the_prefix_cache_keeps_of_an_answer_is_right(expected):
    """Blocks of generated tokens, filled while the steps ran ahead, are what the next question starts behind."""
    engine = make(ahead=True)
    first = answers(engine, STEADY[:4])
    longer = [
        request(f"{r.request_id} on", [*r.prompt, *first[r.request_id][0], 77], 6, temperature=0.9, seed=3)
        for r in STEADY[:4]
    ]
    asked = engine.stats().cached_prompt_tokens
    assert answers(engine, longer) == answers(make(prefix_cache=False), longer)
    block = engine.info.block_size
    # The last token of an answer was never computed.
    known = sum((len(r.prompt) - 2) // block * block for r in longer)
    assert engine.stats().cached_prompt_tokens - asked == known > 100


@pytest.mark.parametrize("candidates", [1, 3])
def test_a_token_that_is_drawn_again_is_what_its_answer_goes_on_from(monkeypatch, expected, candidates):
    """Whole rows are looked at where a few candidates do not tell: the next step had another token on the device."""
    monkeypatch.setattr(sampler, "_TOP_P_CANDIDATES", candidates)
    engine = make(ahead=True)
    redrawn = []
    collect = engine.runner.collect

    def collecting(flight):
        results = collect(flight)
        redrawn.extend(r.sequence.id for r in results if r.redrawn)
        return results

    engine.runner.collect = collecting
    requests = [*STEADY, request("flat", range(80, 90), 30, temperature=2.0, top_p=0.99, seed=1, logprobs=1)]
    found = answers(engine, requests)
    assert set(redrawn) == {"chat", "flat"} and len(redrawn) > 10 and steps_ahead(engine) > 5
    monkeypatch.undo()
    assert found == answers(make(), requests)


def test_logits_that_are_not_finite_end_one_answer_and_none_of_it_is_kept(expected):
    engine = make(ahead=True)
    forward = engine.runner.model.forward

    def poisoned(batch):
        logits = forward(batch)
        if len(batch.token_ids) == len(batch.spans):  # decode
            logits[batch.positions == 40] = float("nan")
        return logits

    engine.runner.model.forward = poisoned
    victim = request("victim", range(90, 122), 30)
    found = answers(engine, [victim, *STEADY[3:6]])
    tokens, reason = found.pop("victim")
    assert reason == "error" and len(tokens) == 9 and engine.stats().nonfinite == 1
    assert found == {r.request_id: expected[r.request_id] for r in STEADY[3:6]}
    cached = engine.stats().cached_prompt_tokens
    engine.runner.model.forward = forward
    assert answers(engine, [victim]) == answers(make(), [victim])
    assert engine.stats().cached_prompt_tokens == cached


class Failing:
    """Lets the `at`-th call of a runner's method fail as a device without memory does, before or after its work."""

    def __init__(self, runner, name, at, late=False):
        self.calls = 0
        call = getattr(runner, name)

        def calling(*arguments, **named):
            self.calls += 1
            if self.calls == at and not late:
                raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB.")
            result = call(*arguments, **named)
            if self.calls == at:
                raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB.")
            return result

        setattr(runner, name, calling)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("method", ["launch", "collect"])
@pytest.mark.parametrize("at", range(1, 13))
def test_memory_that_runs_out_changes_no_answer(expected, method, at, late):
    engine = make(ahead=True)
    failing = Failing(engine.runner, method, at, late)
    found = answers(engine, STEADY[:4], stagger=1)
    assert found == {r.request_id: expected[r.request_id] for r in STEADY[:4]}
    assert failing.calls > at and engine.stats().out_of_memory == 1


def test_without_memory_to_run_ahead_steps_wait_and_all_goes_on(expected):
    engine = make(ahead=True)
    launch, asked = engine.runner.launch, []

    def launching(step, after=None):
        if after is not None:
            asked.append(step)
            raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB.")
        return launch(step)

    engine.runner.launch = launching
    assert answers(engine, STEADY) == {r.request_id: expected[r.request_id] for r in STEADY}
    assert len(asked) == 1, "asked for again only much later"
    stats = engine.stats()
    assert stats.preemptions == 0 and stats.steps_ahead == 0 and stats.out_of_memory == 1


def test_any_other_error_ahead_is_not_hidden():
    engine = make(ahead=True)
    launch = engine.runner.launch

    def launching(step, after=None):
        if after is not None:
            raise RuntimeError("an illegal memory access was encountered")
        return launch(step)

    engine.runner.launch = launching
    engine.add(STEADY[0])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.step()


@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_and_goes(expected, seed):
    """Random arrivals, aborts, stop tokens and pool sizes: every answer is the one it has alone, as far as it goes."""
    rng = random.Random(seed)
    engine = make(
        ahead=True,
        prefill_tokens_busy=rng.choice([3, 16]),
        max_running=rng.choice([2, 4, 16]),
        kv_cache_bytes=rng.choice([1, 4]) << 20,
    )
    few = [STEADY[i] for i in rng.sample(range(len(STEADY)), 6)] + PENALISED[: seed % 2]
    aborts = {rng.randrange(1, 20): [rng.choice(few).request_id] for _ in range(3)}
    for name, (tokens, reason) in answers(engine, few, rng.choice([0, 1, 2]), aborts).items():
        wanted, end = expected[name]
        assert tokens == wanted[: len(tokens)] and (reason, len(tokens)) in (
            (end, len(wanted)),
            ("abort", len(tokens)),
        )
    assert engine.stats().steps_ahead > 0
