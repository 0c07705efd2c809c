"""The engine on a real GPU: real checkpoints through the hybrid path."""

import pytest
import torch
from model_folders import folders, prompts

from nybble.kernels.attention import Span
from nybble.service.engine.load import build_engine
from nybble.service.engine.protocol import EngineConfig, Request, SamplingParams
from nybble.service.models import Batch

pytestmark = pytest.mark.gpu


def make(model, **config):
    return build_engine(EngineConfig(str(model), **({"device": "cuda", "kv_cache_bytes": 64 << 20} | config)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", folders(), ids=lambda p: p.name)
def test_logits_are_the_references(model, dtype):
    """With the reference's tokens fed back: the same choice at every step that is not closer than the tolerance."""
    tolerance = {"bfloat16": 0.12, "float16": 0.03}[dtype]
    engine = make(model, dtype=dtype)
    assert {k.kernel for k in engine.info.kernels if k.layer != "lm_head"} <= {"hybrid", "general"}
    for p in prompts(model):
        ids = p["input_ids"] + p["greedy_ids"]
        blocks = list(range(-(-len(ids) // 16)))
        device = torch.device("cuda", 0)
        batch = Batch(
            torch.tensor(ids, device=device),
            torch.arange(len(ids), device=device),
            [Span(len(ids), len(ids), blocks)],
        )
        with torch.inference_mode():
            logits = engine._runner.model.forward(batch).float().cpu()[len(p["input_ids"]) - 1 : -1]
        assert (logits[0, p["top20_ids"]] - torch.tensor(p["top20_logits"])).abs().max() < tolerance
        clear = [i for i, gap in enumerate(p["greedy_top1_top2_gap"]) if gap > tolerance]
        assert [int(logits[i].argmax()) for i in clear] == [p["greedy_ids"][i] for i in clear]


@pytest.mark.parametrize("dense", ["disabled", "enabled"])
def test_requests_batch_stream_and_finish(dense):
    model = folders()[0]
    engine = make(model, dtype="float16", dense_copies=dense, max_running=4)
    requests = [
        Request(str(i), tuple(p["input_ids"]), SamplingParams(24, temperature=0.0, ignore_eos=True), 0.0)
        for i, p in enumerate(prompts(model) * 2)
    ]
    tokens = {r.request_id: [] for r in requests}
    for r in requests:
        engine.add(r)
    while engine.has_work:
        for out in engine.step():
            tokens[out.request_id] += [t.token_id for t in out.tokens]
    assert all(len(t) == 24 for t in tokens.values())
    assert engine.stats().gemm_calls["skinny", "decode"] > 0
