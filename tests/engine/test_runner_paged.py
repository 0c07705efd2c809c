"""The engine on the paged cache with static inputs and captured decode, as on a GPU; Triton's interpreter runs the kernels
and a fake stands for the device's graphs."""

import json
import shutil

import pytest
import torch
from model_folders import DATA, prompts
from safetensors.torch import load_file, save_file

pytest.importorskip("triton", reason="triton is not installed")
if torch.cuda.is_available():  # where there is a GPU, test_graphs_gpu.py does all of this for real
    pytest.skip("runs where Triton's interpreter does, without a GPU", allow_module_level=True)

from nybble.kernels.attention import Choice  # noqa: E402
from nybble.kernels.attention.paged import PagedAttention  # noqa: E402
from nybble.service.engine import load, pacing, runner  # noqa: E402
from nybble.service.engine.protocol import EngineConfig, Request, SamplingParams  # noqa: E402

MODEL = DATA / "llama-ct-g32"


class Graph:
    """Replays by running the captured forward again."""

    captured = 0
    replays = 0

    def __init__(self, forward):
        type(self).captured += 1
        self._forward = forward
        self.output = forward().clone()

    def replay(self):
        type(self).replays += 1
        self.output.copy_(self._forward())


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    """Half of MODEL: for what a pass computes of whom, rather than for the reference's text."""
    folder = shutil.copytree(MODEL, tmp_path_factory.mktemp("models") / "one-layer")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    weights = load_file(MODEL / "model.safetensors")
    first = {name: t for name, t in weights.items() if not name.startswith("model.layers.1.")}
    save_file(first, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def make(monkeypatch):
    Graph.captured = Graph.replays = 0
    monkeypatch.setattr(load, "choose", lambda *args: Choice(PagedAttention(), {}))
    # The interpreter is slow: one pass of each kind is measured, and one of prompts beside streams prepared.
    monkeypatch.setattr(runner, "_MEASURED_S", 0.0)
    monkeypatch.setattr(runner, "LONGEST_STEP", 0.0)

    def build(capture=Graph, model=MODEL, **config):
        monkeypatch.setattr(load, "_capture", lambda device, attention: capture)
        defaults = {"dtype": "float16", "device": "cpu", "lm_head": "keep", "threads": 1, "max_running": 3}
        defaults |= {"kv_cache_bytes": 1 << 20, "prefill_tokens": 32, "prefill_tokens_busy": 16}
        return load.build_engine(EngineConfig(str(model), **(defaults | config)))

    return build


def run(engine, asked, *counts):
    """Greedy tokens per prompt, all running at once; counts: how many, for each or for all."""
    tokens = {str(i): [] for i in range(len(asked))}
    for i, p in enumerate(asked):
        sampling = SamplingParams(counts[i % len(counts)], temperature=0.0, ignore_eos=True)
        engine.add(Request(str(i), tuple(p["input_ids"]), sampling, 0.0))
    while engine.has_work:
        for out in engine.step():
            tokens[out.request_id] += [t.token_id for t in out.tokens]
    return list(tokens.values())


def test_captured_decode_gives_the_references_text(make):
    engine = make()
    captured, replays = Graph.captured, Graph.replays
    assert captured == 6, "batches of 1, 2 and 3, prompts of 16 and 32 rows, of 16 beside a stream"
    assert replays == captured + 3 + 1 + 2, (
        "each once against eager; once to be timed: steps, and the largest and prompts beside a stream with a context too"
    )
    times = engine.runner.times
    assert tuple(times.decode) == (1, 2, 3) and tuple(times.mixed) == (16,)
    assert min(*times.decode.values(), times.mixed[16].seconds) > 0 and times.per_position >= 0
    asked = prompts(MODEL)[:2]
    assert run(engine, asked, 6) == [p["greedy_ids"][:6] for p in asked]
    assert Graph.replays > replays
    stats = engine.stats()
    assert stats.graph_fallbacks == {}
    assert stats.gemm_calls["cpu", "decode"] % (4 * 2) == 0, "four GEMMs a layer, replayed or not"


@pytest.mark.slow
def test_a_refused_capture_changes_no_text(make):
    def refuse(forward):
        raise torch.OutOfMemoryError("no room for a graph")

    engine = make(refuse, prefill_tokens=16)
    asked = prompts(MODEL)[:2]
    assert run(engine, asked, 4) == [p["greedy_ids"][:4] for p in asked]
    assert engine.stats().graph_fallbacks == {"out_of_memory": 5}


@pytest.mark.slow
def test_a_prompt_that_is_not_captured_alone_runs_eagerly(make, one_layer):
    asked = [{**p, "input_ids": p["input_ids"][:20]} for p in prompts(MODEL)[:2]]
    eager = run(make(None, one_layer, prefix_cache=False), asked, 3)

    def fails_first(forward):
        captures.append(forward)
        if len(captures) == 1:  # the longest prompt's
            raise RuntimeError("operation not permitted when stream is capturing")
        return Graph(forward)

    captures = []
    engine = make(fails_first, one_layer, prefix_cache=False)
    assert run(engine, asked, 3) == eager
    assert engine.stats().graph_fallbacks == {"capture_failed": 1}
    graphs = engine.runner.graphs
    assert graphs["prefill"].buckets == (16,) and graphs["decode"].buckets == (1, 2, 3)


@pytest.mark.slow
def test_long_prompts_are_not_captured(make, one_layer, monkeypatch):
    monkeypatch.setattr(runner, "CAPTURED_PROMPT_ROWS", 16)
    engine = make(model=one_layer, prefix_cache=False, max_running=1)
    assert engine.runner.graphs["prefill"].buckets == (16,) and Graph.captured == 2
    replays = Graph.replays
    run(engine, [{"input_ids": prompts(MODEL)[0]["input_ids"][:20]}], 1)
    assert Graph.replays == replays and not engine.stats().graph_fallbacks


@pytest.mark.parametrize(
    "capture", [pytest.param(Graph, marks=pytest.mark.slow), None], ids=["captured", "eager"]
)
def test_prompts_and_streams_share_a_pass(make, one_layer, capture, monkeypatch):
    """And give what they give alone, whatever comes beside whom."""
    asked = [
        {**p, "input_ids": p["input_ids"][-n:]} for p, n in zip(prompts(MODEL)[:3], (8, 11, 1), strict=False)
    ]
    engine = make(capture, one_layer, prefix_cache=False, prefill_tokens=16)
    monkeypatch.setattr(pacing, "IDLE_CHUNK_S", None)
    alone = [run(engine, [p], 5)[0] for p in asked]
    passed, one_pass = [], engine.runner._pass

    def passing(kind, chunks, on_device=None, streams=0):
        passed.append((kind, streams, len(chunks) - streams))
        return one_pass(kind, chunks, on_device, streams)

    fixed, logits = [], engine.runner._logits

    def replayable(kind, batch):
        fixed.append(engine.runner._static.is_fixed(kind, batch))
        return logits(kind, batch)

    monkeypatch.setattr(engine.runner, "_pass", passing)
    monkeypatch.setattr(engine.runner, "_logits", replayable)
    got = {"0": [], "1": [], "2": []}
    sampling = SamplingParams(5, temperature=0.0, ignore_eos=True)
    for i, p in enumerate(asked):
        engine.add(Request(str(i), tuple(p["input_ids"]), sampling, 0.0))
        for out in engine.step():
            got[out.request_id] += [t.token_id for t in out.tokens]
    while engine.has_work:
        for out in engine.step():
            got[out.request_id] += [t.token_id for t in out.tokens]
    assert list(got.values()) == alone
    assert passed[:3] == [("prefill", 0, 1), ("mixed", 1, 1), ("mixed", 2, 1)]
    assert {kind for kind, _, _ in passed[3:]} == {"decode"}
    assert all(fixed), "even where each row is somebody's last"


def test_more_rows_than_a_pass_holds_take_two(make, one_layer, monkeypatch):
    engine = make(None, one_layer, prefix_cache=False, prefill_tokens=16)
    kinds, one_pass = [], engine.runner._pass
    monkeypatch.setattr(
        engine.runner,
        "_pass",
        lambda kind, *args, **more: kinds.append(kind) or one_pass(kind, *args, **more),
    )
    sampling = SamplingParams(3, temperature=0.0, ignore_eos=True)
    engine.add(Request("stream", (5, 6, 7), sampling, 0.0))
    engine.step()
    engine.add(Request("prompt", tuple(range(3, 19)), sampling, 0.0))
    engine.step()
    assert kinds == ["prefill", "decode", "prefill"]


def test_prompts_are_replayed_but_for_those_that_are_timed(make, one_layer):
    engine = make(model=one_layer, gemm_sample_every=1, prefix_cache=False, prefill_tokens=16, max_running=1)
    asked = [{"input_ids": prompts(MODEL)[0]["input_ids"][:8]}]
    engine.stats()
    before = Graph.replays
    run(engine, asked, 1)
    assert Graph.replays == before, "the first is timed"
    assert engine.stats().gemm_samples["cpu", "prefill"]
    run(engine, asked, 1)
    assert Graph.replays > before, "not again within seconds"


def test_the_smallest_cache_warms_up(make, one_layer):
    """One sequence's blocks, fewer than there may be sequences."""
    engine = make(None, one_layer, max_model_len=16, kv_cache_bytes=0, memory_fraction=0.9, max_running=2)
    (tokens,) = run(engine, [{"input_ids": [5, 6, 7]}], 3)
    assert len(tokens) == 3


def test_ids_that_the_host_does_not_know_reach_the_static_inputs(make, one_layer, monkeypatch):
    """As many rows as before, then fewer, in the buffers of another batch size: never the placeholders of the host."""
    monkeypatch.setattr(pacing, "IDLE_CHUNK_S", None)  # both runs in the same chunks, whatever they take
    engine = make(None, one_layer, prefix_cache=False, prefill_tokens=16)
    asked = [{**p, "input_ids": p["input_ids"][-8:]} for p in prompts(MODEL)[:3]]
    expected = run(engine, asked, 9, 4, 7)
    launch, sizes, beside = engine.runner.launch, [], []

    def launching(step, after=None):
        if after is not None:
            sizes.append(len(step.decode))
            beside.append(len(step.prefill))
        return launch(step, after)

    engine.runner.launch, engine.runner.runs_ahead = launching, True
    assert run(engine, asked, 9, 4, 7) == expected
    assert engine.stats().steps_ahead == len(sizes) and set(sizes) == {1, 2, 3} and any(beside)
