"""The prefix cache under the real model: what is found there changes no greedy answer."""

import random

import pytest
from engine_runs import make, request, run

from nybble.service.engine.protocol import Request, SamplingParams


def shared_prompts(count, prefix=70, seed=0):
    rng = random.Random(seed)
    common = [rng.randrange(3, 1000) for _ in range(prefix)]
    return [[*common, *(rng.randrange(3, 1000) for _ in range(1 + i % 9))] for i in range(count)]


def with_salt(name, prompt, salt, max_tokens=4):
    sampling = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
    return Request(name, tuple(prompt), sampling, 0.0, cache_salt=salt)


@pytest.mark.parametrize("stagger", [0, 2], ids=["at once", "staggered"])
def test_sixteen_with_a_common_prefix_answer_as_each_does_alone_without_a_cache(stagger):
    prompts = shared_prompts(16)
    plain = make(prefix_cache=False)
    alone = {str(i): run(plain, request(str(i), p, 24))[str(i)] for i, p in enumerate(prompts)}
    assert plain.stats().cached_prompt_tokens == plain.stats().prefix_queries_tokens == 0
    engine = make()
    requests = [request(str(i), p, 24) for i, p in enumerate(prompts)]
    assert run(engine, *requests, stagger=stagger) == alone
    stats = engine.stats()
    assert stats.cached_prompt_tokens == 15 * 64
    assert stats.prefix_queries_tokens == stats.prompt_tokens == sum(map(len, prompts))
    # And once more, from what those left behind.
    assert run(engine, *requests) == alone
    assert engine.stats().cached_prompt_tokens >= 15 * 64 + 16 * 64


def test_a_conversation_goes_on_behind_the_last_answer():
    plain, engine = make(prefix_cache=False), make()
    history = shared_prompts(1)[0]
    for turn in range(4):
        asked = request(f"turn {turn}", history, 21)
        answers = [run(e, asked)[f"turn {turn}"] for e in (plain, engine)]
        assert answers[0] == answers[1]
        history = [*history, *answers[0], 5, 6, 7 + turn]
    assert engine.stats().cached_prompt_tokens > 0.7 * engine.stats().prompt_tokens * 3 / 4


@pytest.mark.parametrize("seed", range(3))
def test_preemption_and_eviction_change_no_answer(seed):
    prompts = shared_prompts(10, prefix=30, seed=seed)
    wishes = [
        request(str(i), p, 30, temperature=0.0 if i % 3 else 0.9, seed=i) for i, p in enumerate(prompts)
    ]
    plain = make(prefix_cache=False)
    expected = {w.request_id: run(plain, w)[w.request_id] for w in wishes}
    block_bytes = 4 * 2 * 2 * 64 * 2 * 4
    small = make(block_size=4, kv_cache_bytes=36 * block_bytes, max_model_len=120, prefill_tokens_busy=8)
    assert run(small, *wishes, stagger=2) == expected
    assert small.stats().preemptions > 0 and small.stats().cached_prompt_tokens > 0


def test_the_first_output_says_what_was_cached():
    engine = make()
    prompt = shared_prompts(1)[0]
    for name, cached in (("a", 0), ("b", 64)):
        engine.add(request(name, prompt, 3))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        assert [o.cached_tokens for o in outputs] == [cached, 0, 0]


def test_another_salt_finds_nothing():
    engine = make()
    prompt = shared_prompts(1)[0]
    answers = []
    for name, salt in (("1", "tenant a"), ("2", "tenant b"), ("3", None), ("4", "tenant a")):
        before = engine.stats().cached_prompt_tokens
        answers.append(run(engine, with_salt(name, prompt, salt))[name])
        assert engine.stats().cached_prompt_tokens - before == (64 if name == "4" else 0)
    assert answers.count(answers[0]) == 4


def test_what_a_request_with_broken_numbers_computed_is_found_by_nobody():
    engine = make()
    head = engine._runner.model.head
    sound = type(head).__call__

    class Broken(type(head)):
        def __call__(self, x):
            return sound(self, x) * float("nan")

    prompt = shared_prompts(1)[0]
    head.__class__ = Broken
    engine.add(request("broken", prompt, 3))
    (out,) = engine.step()
    head.__class__ = Broken.__mro__[1]
    assert out.finish_reason == "error"
    run(engine, request("sound", prompt, 3))
    assert engine.stats().cached_prompt_tokens == 0
