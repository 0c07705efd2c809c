"""Engines in-process on a real quantised checkpoint, and runs of requests through them."""

from __future__ import annotations

from model_folders import DATA

from nybble.service.engine.load import build_engine
from nybble.service.engine.protocol import EngineConfig, Request, SamplingParams

MODEL = DATA / "llama-ct-g32"


def make(model=MODEL, ahead=False, **config):
    """ahead: as on a device that works by itself (see Runner.runs_ahead)."""
    defaults = {
        "dtype": "float32",
        "device": "cpu",
        "lm_head": "keep",
        "kv_cache_bytes": 16 << 20,
        "threads": 1,
    }
    engine = build_engine(EngineConfig(str(model), **(defaults | config)))
    engine.runner.runs_ahead = ahead
    return engine


def request(name, prompt, max_tokens=20, **sampling):
    fields = {"temperature": 0.0, "ignore_eos": True} | sampling
    return Request(name, tuple(prompt), SamplingParams(max_tokens, **fields), 0.0)


def run(engine, *requests, stagger=0):
    """All token ids per request id; `stagger` steps pass between one add and the next."""
    tokens = {r.request_id: [] for r in requests}
    finished = {}
    pending = list(requests)
    idle = 0
    while pending or engine.has_work:
        if pending and idle <= 0:
            engine.add(pending.pop(0))
            idle = stagger
            if pending and not stagger:
                continue
        idle -= 1
        for out in engine.step():
            tokens[out.request_id] += [t.token_id for t in out.tokens]
            if out.finish_reason:
                finished[out.request_id] = out
    assert set(finished) == set(tokens)
    stats = engine.stats()
    assert stats.running == stats.waiting == 0 and stats.kv_usage_ratio == 0
    return tokens
