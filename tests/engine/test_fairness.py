"""Many choices, long answers and what comes meanwhile, on a real quantised checkpoint."""

import pytest
from engine_runs import make, request, run

from nybble.service.engine.protocol import Request, SamplingParams

PROMPT = [5, 17, 200, 31, 42]


def choices(count, max_tokens, group="wide", priority=0):
    return [
        Request(
            f"{group}{i}",
            (*PROMPT, i),
            SamplingParams(max_tokens, temperature=0.9, seed=100 + i, ignore_eos=True, presence_penalty=0.3),
            0.0,
            priority,
            group=group,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["prefix cache", "none"])
def test_answers_are_the_same_for_those_that_make_way(prefix_cache):
    wide, more = choices(6, 60), [request(f"single{i}", [7 + i, 8, 9], 6) for i in range(8)]
    expected = run(make(max_running=1, prefix_cache=prefix_cache), *wide, *more)
    engine = make(max_running=4, prefix_cache=prefix_cache)
    got = run(engine, *wide, *more, stagger=4)
    assert got == expected
    assert engine.stats().preemptions >= 4


def test_newcomers_are_answered_while_all_slots_are_held():
    """By the choices of one request, by long ones, by less urgent ones: each newcomer is there before any of them ends."""
    for held in (
        choices(4, 300),
        [request(f"long{i}", [*PROMPT, i], 400) for i in range(4)],
        [one for i in range(4) for one in choices(1, 300, f"idle{i}", priority=5)],
    ):
        engine = make(max_running=4)
        for one in held:
            engine.add(one)
        for _ in range(10):
            engine.step()
        assert engine.stats().running == 4
        ended = []
        for i in range(6):
            engine.add(request(f"new{i}", [9, 8, 7, i], 5))
        while len(ended) < 6:
            ended += [out.request_id for out in engine.step() if out.finish_reason]
        assert sorted(ended) == [f"new{i}" for i in range(6)]
        stats = engine.stats()
        assert (stats.started, stats.finished, stats.running + stats.waiting) == (10, {"length": 6}, 4)
        while engine.has_work:
            engine.step()
        assert engine.stats().finished == {"length": 10} and engine.stats().kv_usage_ratio == 0
