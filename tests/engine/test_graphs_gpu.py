"""Captured decode on a real GPU: the same text as eager, and a device that neither compiles nor allocates under load."""

import random

import pytest
import torch
from model_folders import folders, prompts

from nybble.kernels import native
from nybble.kernels.attention.paged import PagedAttention
from nybble.service.checkpoints.random_weights import random_folder
from nybble.service.engine import load, pacing, sampler
from nybble.service.engine.protocol import EngineConfig, Request, SamplingParams

pytestmark = pytest.mark.gpu


def build(model, **config):
    defaults = {"device": "cuda", "dtype": "float16", "kv_cache_bytes": 64 << 20, "max_running": 12}
    # Not by the clock: 16-bit results depend on which rows are computed together.
    defaults |= {"prefill_tokens": 128, "prefill_tokens_busy": 64}
    return load.build_engine(EngineConfig(str(model), **(defaults | config)))


def run(engine, requests):
    tokens = {r.request_id: [] for r in requests}
    for r in requests:
        engine.add(r)
    while engine.has_work:
        for out in engine.step():
            assert out.error is None, out.error
            tokens[out.request_id] += [t.token_id for t in out.tokens]
    return tokens


def requests(asked, count, copies=1):
    greedy = SamplingParams(count, temperature=0.0, ignore_eos=True)
    return [
        Request(f"{c}-{i}", tuple(p["input_ids"]), greedy, 0.0)
        for c in range(copies)
        for i, p in enumerate(asked)
    ]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("model", folders(), ids=lambda p: p.name)
def test_every_batch_size_is_captured_and_gives_eager_text(model, dtype, monkeypatch):
    asked = requests(prompts(model), 24)
    captured = build(model, dtype=dtype)
    assert (
        captured._runner.graphs["decode"].buckets == (1, 2, 4, 8, 12) and not captured.stats().graph_fallbacks
    )
    monkeypatch.setattr(load, "_capture", lambda device, attention: None)
    eager = build(model, dtype=dtype)
    assert run(captured, asked) == run(eager, asked)


@pytest.mark.parametrize("model", folders()[:1], ids=lambda p: p.name)
def test_the_text_is_the_references(model):
    """float16 against float32: up to the first choice that is closer than float16 can tell."""
    engine = build(model)
    asked = prompts(model)
    got = run(engine, requests(asked, 24))
    for i, p in enumerate(asked):
        close = [j for j, gap in enumerate(p["greedy_top1_top2_gap"][:24]) if gap < 0.03]
        sure = close[0] if close else 24
        assert got[f"0-{i}"][:sure] == p["greedy_ids"][:sure] and sure > 3


def test_nothing_compiles_or_allocates_after_the_start():
    """Random lengths, arrivals and batch sizes; the second round finds all memory that the first one left."""
    model = folders()[0]
    native.count_triton()
    engine = build(model, prefill_tokens_busy=48)
    vocab = engine.info.vocab_size

    def load_it(seed):
        rng = random.Random(seed)
        pending = [
            Request(
                f"{seed}-{i}",
                tuple(rng.randrange(3, vocab) for _ in range(rng.randrange(1, 150))),
                SamplingParams(rng.randrange(1, 30), temperature=0.0, ignore_eos=True),
                0.0,
            )
            for i in range(60)
        ]
        while pending or engine.has_work:
            for _ in range(rng.randrange(0, 3)):
                if pending:
                    engine.add(pending.pop())
            engine.step()

    compiled = native.JIT_RECORDER.counts()
    load_it(1)
    after_first = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    for seed in (2, 3):
        load_it(seed)
    torch.cuda.synchronize()
    assert native.JIT_RECORDER.counts() == compiled, "compiled under load"
    assert (torch.cuda.memory_reserved(), torch.cuda.memory_allocated()) == after_first


@pytest.mark.parametrize(("dtype", "close"), [("float16", 0.03), ("bfloat16", 0.12)])
@pytest.mark.parametrize("model", folders()[:2], ids=lambda p: p.name)
def test_a_prefix_hit_changes_no_choice_that_is_sure(model, dtype, close):
    """Sixteen requests at once that share a prefix. 16-bit results depend on how many rows are computed together, so a choice
    closer than the type can tell may go either way: up to there the answers are those without a cache."""
    rng = random.Random(5)
    vocab = 500
    shared = [rng.randrange(3, vocab) for _ in range(70)]
    greedy = SamplingParams(12, temperature=0.0, ignore_eos=True, logprobs=2)
    asked = [
        Request(str(i), (*shared, *(rng.randrange(3, vocab) for _ in range(1 + i))), greedy, 0.0)
        for i in range(16)
    ]

    def answers(engine):
        found = {r.request_id: [] for r in asked}
        for r in asked:
            engine.add(r)
        while engine.has_work:
            for out in engine.step():
                found[out.request_id] += out.tokens
        return found

    plain = answers(build(model, dtype=dtype, max_running=16, prefix_cache=False))
    engine = build(model, dtype=dtype, max_running=16)
    run(engine, [Request("first", tuple(shared), SamplingParams(1, temperature=0.0), 0.0)])
    cached = answers(engine)
    assert engine.stats().cached_prompt_tokens >= 16 * 64
    compared = 0
    for name, tokens in plain.items():
        for one, other in zip(tokens, cached[name], strict=True):
            if one.top[0][1] - one.top[1][1] < close:
                break
            assert one.token_id == other.token_id
            compared += 1
    assert compared > 8


def test_ten_thousand_requests_leave_memory_where_it_was():
    engine = build(folders()[0], max_running=64)
    vocab = engine.info.vocab_size

    def serve(seed, count):
        rng = random.Random(seed)
        waiting = [
            Request(
                f"{seed}-{i}",
                tuple(rng.randrange(3, vocab) for _ in range(rng.randrange(1, 12))),
                SamplingParams(rng.randrange(1, 5), temperature=rng.choice((0.0, 1.0)), ignore_eos=True),
                0.0,
            )
            for i in range(count)
        ]
        ended = 0
        while waiting or engine.has_work:
            for _ in range(min(64, len(waiting))):
                engine.add(waiting.pop())
            ended += sum(out.finish_reason == "length" for out in engine.step())
        assert ended == count
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before = serve(1, 500)
    assert serve(2, 10_000) == before


def test_loading_takes_at_most_a_gibibyte_beyond_the_weights(monkeypatch, tmp_path):
    """Eight billion random weights in groups of 128. The cache is made last, of the size that was planned."""
    peaks = []
    allocate = PagedAttention.allocate

    def recorded(self, shape, device):
        peaks.append(torch.cuda.max_memory_allocated())
        allocate(self, shape, device)

    monkeypatch.setattr(PagedAttention, "allocate", recorded)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    folder = random_folder(tmp_path / "8b", "qwen3-8b", 128, 256)
    engine = build(folder, dtype="bfloat16", max_running=1, kv_cache_bytes=1 << 30)
    weights = engine._runner.model.nbytes
    assert weights > 5 << 30 and peaks[0] - before <= weights + (1 << 30)
    assert engine._runner.model.attention.whole.nbytes == engine.info.memory.pools["kv_cache"]


def test_a_capture_that_fails_in_the_middle_leaves_a_working_engine(monkeypatch):
    """A real capture, broken by an operation that may not be captured, on one batch size."""
    model = folders()[0]
    expected = run(build(model), requests(prompts(model), 16))
    captures = []

    class Breaking(load.DeviceCapture):
        def __call__(self, forward):
            captures.append(1)
            if len(captures) != 4 + 2:  # behind prompts of 16, 32, 64 and 128 rows
                return super().__call__(forward)

            def waits():
                logits = forward()
                logits.sum().item()  # waits for the device: not permitted while capturing
                return logits

            return super().__call__(waits)

    monkeypatch.setattr(load, "_capture", lambda device, attention: Breaking(device))
    engine = build(model)
    assert engine.stats().graph_fallbacks == {"capture_failed": 1}
    assert engine._runner.graphs["decode"].buckets == (1, 2, 4, 12)
    assert run(engine, requests(prompts(model), 16)) == expected


def test_the_cache_is_as_large_as_planned():
    engine = build(folders()[0])
    attention = engine._runner.model.attention
    assert attention.name == "triton"
    assert attention.whole.nbytes == engine.info.memory.pools["kv_cache"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_running_ahead_of_the_tokens_changes_none(dtype, monkeypatch):
    """Lengths of 1 to 40, so that rows end in every step and batches shrink through all their sizes."""
    monkeypatch.setattr(pacing, "IDLE_CHUNK_S", None)
    model = folders()[0]
    rng = random.Random(3)
    wishes = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.2, "top_k": 40}]
    asked = []
    for i in range(24):
        sampling = SamplingParams(rng.randrange(1, 41), ignore_eos=True, seed=i, **wishes[i % len(wishes)])
        prompt = tuple(rng.randrange(3, 500) for _ in range(rng.randrange(1, 60)))
        asked.append(Request(f"{i}", prompt, sampling, 0.0))

    def answers(ahead):
        # What is chosen by the clock: steps that leave their graph to be timed, and how many prompt rows come together.
        engine = build(model, dtype=dtype, gemm_sample_every=0, prefill_tokens_busy=32, prefix_cache=False)
        assert engine.runner.runs_ahead
        engine.runner.runs_ahead = ahead
        return run(engine, asked), engine.stats().steps_ahead

    waiting, none = answers(False)
    running_ahead, many = answers(True)
    assert running_ahead == waiting and none == 0 and many > 10


def test_a_token_that_is_drawn_again_is_what_its_answer_goes_on_from(monkeypatch):
    model = folders()[0]
    sampling = SamplingParams(30, temperature=2.0, top_p=0.99, seed=1, ignore_eos=True)
    expected = run(build(model), [Request("flat", (5, 6, 7), sampling, 0.0)])
    monkeypatch.setattr(sampler, "_TOP_P_CANDIDATES", 2)
    engine = build(model)
    assert run(engine, [Request("flat", (5, 6, 7), sampling, 0.0)]) == expected
    assert engine.stats().steps_ahead > 3
