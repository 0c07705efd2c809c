"""The engine in-process, on a real quantised checkpoint in float32."""

import math

import pytest
import torch
from engine_runs import MODEL, make, request, run
from model_folders import folders, prompts

from nybble.kernels.attention import Span
from nybble.kernels.linear import RECORDER
from nybble.service.errors import ConfigError
from nybble.service.models import Batch


@pytest.fixture(scope="module")
def engine():
    return make()


def reference(model=MODEL):
    return prompts(model)


@pytest.mark.parametrize("model", folders(), ids=lambda p: p.name)
def test_greedy_text_is_the_references(model):
    engine = make(model)
    prompts = reference(model)
    got = run(engine, *(request(str(i), p["input_ids"], 40) for i, p in enumerate(prompts)))
    assert [got[str(i)] for i in range(len(prompts))] == [p["greedy_ids"] for p in prompts]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", folders(), ids=lambda p: p.name)
def test_logits_are_the_references(model, dtype):
    """float32 to rounding. bfloat16, with the reference's tokens fed back: logits within 0.12, and the same choice at
    every step that is not closer than that."""
    # All-bf16 compute moves these files' logits by up to 0.053; two logits may move towards each other.
    tolerance = {"float32": 1e-4, "bfloat16": 0.12}[dtype]
    engine = make(model, dtype=dtype)
    decoder = engine._runner.model
    steps = 0
    for p in prompts(model):
        ids = p["input_ids"] + p["greedy_ids"]
        blocks = list(range(-(-len(ids) // 16)))
        batch = Batch(torch.tensor(ids), torch.arange(len(ids)), [Span(len(ids), len(ids), blocks)])
        with torch.inference_mode():
            logits = decoder.forward(batch).float()[len(p["input_ids"]) - 1 : -1]
        top = logits[0, p["top20_ids"]]
        assert (top - torch.tensor(p["top20_logits"])).abs().max() < tolerance
        clear = [i for i, gap in enumerate(p["greedy_top1_top2_gap"]) if gap > tolerance]
        assert [int(logits[i].argmax()) for i in clear] == [p["greedy_ids"][i] for i in clear]
        steps += len(clear)
    assert steps > 40, "too few clear steps to tell anything"


@pytest.mark.parametrize(
    "config",
    [
        {"prefill_tokens": 7, "prefill_tokens_busy": 3},
        {"block_size": 4, "prefill_tokens": 16, "prefill_tokens_busy": 1},
        {"max_running": 2},
    ],
    ids=["small-chunks", "tiny-blocks", "queueing"],
)
@pytest.mark.parametrize("stagger", [0, 3], ids=["together", "staggered"])
def test_batching_and_chunking_do_not_change_a_greedy_answer(config, stagger):
    engine = make(**config)
    prompts = reference() * 2
    got = run(engine, *(request(str(i), p["input_ids"], 40) for i, p in enumerate(prompts)), stagger=stagger)
    assert [got[str(i)] for i in range(len(prompts))] == [p["greedy_ids"] for p in prompts]


def test_an_int8_head_is_served_counted_and_shown():
    engine = make(dtype="bfloat16", lm_head="int8")
    plain = make(dtype="bfloat16")
    model, kept = engine._runner.model, plain._runner.model
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    difference = (model.head(x) - kept.head(x)).float().abs().max() / kept.head(x).float().abs().max()
    assert 0 < float(difference) < 0.02
    (head,) = [k for k in engine.info.kernels if k.layer == "lm_head"]
    assert (head.kernel, head.n, head.k, head.routes[0].path) == ("int8", 1024, 256, "int8")
    assert head.nbytes == 1024 * 256 + 2 * 1024
    prompt, greedy = reference()[0]["input_ids"], reference()[0]["greedy_ids"]
    assert run(engine, request("a", prompt, 8))["a"] == greedy[:8]
    assert engine.stats().gemm_calls["int8", "decode"] >= 7


@pytest.mark.parametrize("model", folders(), ids=lambda p: p.name)
def test_an_int8_head_replaces_its_16_bits_but_not_those_of_a_tied_embedding(model):
    engine, plain = make(model, dtype="bfloat16", lm_head="int8"), make(model, dtype="bfloat16")
    model, kept = engine._runner.model, plain._runner.model
    assert torch.equal(model.embedding, kept.embedding)
    replaced = 0 if model.config.tie_word_embeddings else 2 * 1024 * 256
    assert model.nbytes - kept.nbytes == model.head.nbytes - replaced


def test_dense_copies_change_no_answer_and_are_accounted_for():
    engine = make(dense_copies="enabled")
    prompt, greedy = reference()[2]["input_ids"], reference()[2]["greedy_ids"]
    assert run(engine, request("a", prompt, 40))["a"] == greedy
    assert engine.stats().gemm_calls["dense", "prefill"] > 0
    memory = engine.info.memory
    layer = 512 * 256 + 256 * 256 + 1024 * 256 + 256 * 512
    assert memory.dense_required_bytes == memory.pools["dense_copies"] == 2 * layer * 4
    assert (memory.dense_state, memory.dense_layers) == ("enabled", 8) and memory.dense_build_seconds > 0


def test_dense_copies_that_leave_no_room_are_refused_or_done_without(monkeypatch):
    import nybble.service.engine.load as loading

    # Room for the weights, the workspace and the KV cache, and half a copy.
    monkeypatch.setattr(loading, "read_host_available", lambda: (1 << 29) + 24_600_000)
    with pytest.raises(ConfigError, match="dense copies refused: they need 0.00 GiB"):
        make(dense_copies="enabled", memory_fraction=1.0, dtype="bfloat16")
    engine = make(dense_copies="auto", memory_fraction=1.0, dtype="bfloat16")
    assert engine.info.memory.dense_state == "refused"
    assert engine.info.memory.pools["dense_copies"] == 0


def test_a_kernel_that_fails_its_selfcheck_is_not_served(monkeypatch):
    from nybble.kernels.linear.cpu import CpuInt4

    def fails(self, *_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(CpuInt4, "prepare", fails)
    engine = make(dtype="bfloat16")
    assert engine.info.selfcheck["cpu"] is False
    assert {k.kernel for k in engine.info.kernels} == {"cpu_exact"}
    assert all("self-check" in k.declined["cpu_int4"] for k in engine.info.kernels)
    prompt, greedy = reference()[0]["input_ids"], reference()[0]["greedy_ids"]
    assert run(engine, request("a", prompt, 3))["a"] == greedy[:3]


def test_preemption_does_not_change_an_answer_greedy_or_seeded():
    prompts = [p["input_ids"] for p in reference()]
    wishes = [
        request("a", prompts[2], 40),
        request("b", prompts[1], 40, temperature=1.0, seed=5, frequency_penalty=0.5),
        request("c", prompts[0], 60, temperature=0.8, seed=6, top_p=0.9),
    ]
    large = make()
    expected = {w.request_id: run(large, w)[w.request_id] for w in wishes}
    # One block holds 4 tokens x 2 layers x 2 heads x 64 x 2 x 4 bytes; 34 blocks hold any one request, not all three.
    small = make(block_size=4, kv_cache_bytes=34 * 4 * 2 * 2 * 64 * 2 * 4, prefill_tokens_busy=8)
    assert run(small, *wishes) == expected
    assert small.stats().preemptions > 0


def test_stop_ids_end_an_answer_and_ignore_eos_lets_it_go_on():
    engine = make()
    prompt, greedy = reference()[2]["input_ids"], reference()[2]["greedy_ids"]
    stop = greedy[9]
    first = greedy.index(stop)
    assert run(engine, request("s", prompt, 40, stop_token_ids=(stop,)))["s"] == greedy[: first + 1]
    (eos, *_) = engine.info.eos_token_ids
    engine.info = _with_eos(engine.info, stop)
    assert run(engine, request("e", prompt, 40, ignore_eos=False))["e"] == greedy[: first + 1]
    assert run(engine, request("i", prompt, 40))["i"] == greedy
    assert eos == 2


def _with_eos(info, token):
    import dataclasses

    return dataclasses.replace(info, eos_token_ids=(token,))


def test_an_answer_ends_where_the_context_does():
    engine = make(max_model_len=16)
    assert engine.info.max_model_len == 16
    outputs = []
    engine.add(request("r", range(3, 13), 100))
    while engine.has_work:
        outputs += engine.step()
    assert outputs[-1].finish_reason == "length" and len(outputs) == 6


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("r", []), "the prompt is empty"),
        (request("r", [5] * 5000), "the prompt has 5000 tokens: accepted at most 2047"),
        (request("r", [5, 1024]), r"accepted 0..1023"),
        (request("r", [-1]), r"accepted 0..1023"),
        (request("r", [5], 0), "max_tokens is 0"),
        (request("r", [5], logit_bias=((2000, 1.0),)), r"accepted 0..1023"),
    ],
    ids=["empty", "long", "id-high", "id-low", "no-tokens", "bias-id"],
)
def test_what_can_never_run_ends_with_a_sentence_and_harms_nobody(engine, bad, message):
    import re

    prompt, greedy = reference()[0]["input_ids"], reference()[0]["greedy_ids"]
    engine.add(request("good", prompt, 10))
    engine.add(bad)
    tokens, error = [], None
    while engine.has_work:
        for out in engine.step():
            if out.request_id == "good":
                tokens += [t.token_id for t in out.tokens]
            else:
                error = out
    assert tokens == greedy[:10]
    assert error.finish_reason == "error" and re.search(message, error.error)


def test_the_same_id_twice_ends_the_second(engine):
    engine.add(request("twin", [5, 6], 4))
    engine.add(request("twin", [5, 6], 4))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert sorted(o.finish_reason for o in outputs if o.finish_reason) == ["error", "length"]


def test_aborts_free_everything_at_once(engine):
    before = engine.stats()
    for i in range(20):
        engine.add(request(f"r{i}", range(3, 60), 50))
    engine.step()
    engine.step()
    for i in range(20):
        engine.abort(f"r{i}", "stop" if i % 2 else "abort")
    engine.abort("never-there")
    after = engine.stats()
    assert not engine.has_work
    assert (after.running, after.waiting, after.kv_usage_ratio) == (0, 0, 0)
    assert after.finished["abort"] - before.finished.get("abort", 0) == 10
    assert after.finished["stop"] - before.finished.get("stop", 0) == 10


def test_started_is_finished_plus_running_plus_waiting_at_every_step():
    engine = make(max_running=3)
    for i in range(9):
        engine.add(request(f"r{i}", range(3, 10 + i), 3 + i))
    engine.add(request("bad", []))
    while engine.has_work:
        engine.step()
        s = engine.stats()
        assert s.started == sum(s.finished.values()) + s.running + s.waiting == 10
    assert s.generation_tokens == sum(3 + i for i in range(9))


def test_logits_that_are_not_finite_end_their_request_alone():
    engine = make(prefill_tokens_busy=64)
    head = engine._runner.model.head
    true_call = type(head).__call__

    class Broken(type(head)):
        def __call__(self, x):
            y = true_call(self, x)
            y[0, 7] = math.nan
            return y

    prompt, greedy = reference()[0]["input_ids"], reference()[0]["greedy_ids"]
    engine.add(request("victim", prompt, 5))
    engine.step()
    engine.add(request("other", prompt, 5))
    head.__class__ = Broken
    out = {o.request_id: o for o in engine.step()}  # the row of "victim", which decodes, comes first
    head.__class__ = Broken.__mro__[1]
    assert out["victim"].finish_reason == "error" and "not finite" in out["victim"].error
    assert [t.token_id for t in out["other"].tokens] == greedy[:1]
    assert engine.stats().nonfinite == 1 and engine.stats().finished == {"error": 1}
    engine.abort("other")
    assert run(engine, request("next", prompt, 10))["next"] == greedy[:10]


def test_gemm_calls_are_counted_by_path_and_phase_and_some_are_timed():
    engine = make(gemm_sample_every=2)
    RECORDER.reset()
    samples = 0
    engine.add(request("r", range(3, 13), 5))
    while engine.has_work:
        engine.step()
        for values in engine.stats().gemm_samples.values():
            assert all(v > 0 for v in values)
            samples += len(values)
    layers = 2 * 4  # the 16-bit head is no int4 GEMM
    assert engine.stats().gemm_calls == {("cpu", "prefill"): layers, ("cpu", "decode"): 4 * layers}
    assert samples == 3 * layers


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"dtype": "int8"}, "--dtype is 'int8'"),
        ({"device": "tpu"}, "--device is 'tpu'"),
        ({"lm_head": "int2"}, "--lm-head is 'int2'"),
        ({"lm_head": "int8"}, "--lm-head int8: activations float32"),
        ({"max_model_len": 4096}, "max_model_len is 4096: accepted at most 2048"),
        ({"kv_cache_bytes": 1}, "not enough memory"),
        ({"kv_cache_bytes": 1 << 50}, "not enough memory"),
        ({"max_model_len": 2048, "kv_cache_bytes": 1 << 20}, "one request of 2048 tokens needs"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_honoured_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        make(**config)


def test_the_engine_says_what_it_is(engine):
    info = engine.info
    assert (info.architecture, info.dtype, info.device) == ("LlamaForCausalLM", "float32", "cpu")
    assert info.selfcheck == {"cpu": True, "dense": True}
    assert info.memory.pools["kv_cache"] == 16 << 20
    assert {k.layer: k.count for k in info.kernels} == {"qkv": 2, "o": 2, "gate_up": 2, "down": 2}
    (route,) = info.kernels[0].routes
    assert (route.first_m, route.last_m, route.path, route.tile) == (1, None, "cpu", None)


def scores(engine, *requests):
    """The prompt's scored tokens per request id, and how often they were sent."""
    found = {r.request_id: [] for r in requests}
    for r in requests:
        engine.add(r)
    while engine.has_work:
        for out in engine.step():
            if out.prompt_logprobs:
                found[out.request_id].append(out.prompt_logprobs)
            assert out.finish_reason != "error", out.error
    assert all(len(sent) == 1 for sent in found.values()), "once, with the first output"
    return {name: sent[0] for name, sent in found.items()}


def flat(tokens):
    return [value for t in tokens for value in (t.logprob, *(p for _, p in t.top))]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"prefill_tokens": 5, "prefill_tokens_busy": 3},
        # Blocks of 4 tokens: each request takes 13 with its prompt and 16 in the end.
        {"block_size": 4, "kv_cache_bytes": 28 * 4 * 2 * 2 * 64 * 2 * 4, "prefill_tokens_busy": 3},
    ],
    ids=["one chunk", "many chunks", "preempted"],
)
def test_a_scored_prompt_has_the_logprobs_that_generating_it_had(engine, config):
    prompts = [p["input_ids"][:20] for p in reference()[:3]]
    wanted = {}
    for i, prompt in enumerate(prompts):
        engine.add(request(str(i), prompt, 30, logprobs=3))
        while engine.has_work:
            for out in engine.step():
                wanted.setdefault(str(i), []).extend(out.tokens)
    other = make(**config)
    requests = [
        request(str(i), [*p, *(t.token_id for t in wanted[str(i)])], 12, prompt_logprobs=3)
        for i, p in enumerate(prompts)
    ]
    found = scores(other, *requests)
    for i, prompt in enumerate(prompts):
        tokens, expected = found[str(i)], wanted[str(i)]
        assert [t.token_id for t in tokens] == list(requests[i].prompt[1:])
        tail = tokens[len(prompt) - 1 :]
        assert [t.token_id for t in tail] == [t.token_id for t in expected]
        assert [[i for i, _ in t.top] for t in tail] == [[i for i, _ in t.top] for t in expected]
        assert flat(tail) == pytest.approx(flat(expected), abs=2e-4)
    if "block_size" in config:
        assert other.stats().preemptions > 0


def test_a_prompt_that_is_preempted_while_it_is_scored_is_scored_once():
    prompts = [p["input_ids"] for p in reference()]
    first, second = list(prompts[0][:20]), (list(prompts[1]) * 4)[:50]
    wanted = scores(make(), request("b", second, 1, prompt_logprobs=1))["b"]
    # Blocks of 4 tokens: room for both prompts, not for what the first one generates meanwhile.
    small = make(block_size=4, kv_cache_bytes=19 * 4 * 2 * 2 * 64 * 2 * 4, prefill_tokens_busy=3)
    small.add(request("a", first, 40))
    small.step()
    small.add(request("b", second, 1, prompt_logprobs=1))
    found = []
    while small.has_work:
        found += [out.prompt_logprobs for out in small.step() if out.prompt_logprobs]
    assert small.stats().preemptions > 0
    assert [[t.token_id for t in tokens] for tokens in found] == [second[1:]]
    assert flat(found[0]) == pytest.approx(flat(wanted), abs=2e-4)


def test_a_prompt_can_be_scored_without_generating(engine):
    prompt = reference()[0]["input_ids"][:9]
    engine.add(request("a", prompt, 0, prompt_logprobs=0))
    (out,) = [o for _ in range(9) if engine.has_work for o in engine.step()]
    assert (out.finish_reason, out.tokens) == ("length", ())
    assert [t.token_id for t in out.prompt_logprobs] == list(prompt[1:]) and out.prompt_logprobs[0].top == ()
    engine.add(request("b", prompt, 0))
    assert "max_tokens is 0" in engine.step()[0].error
