"""What goes wrong in a step: numbers that overflow, and memory that runs out."""

import dataclasses

import pytest
import torch
from engine_runs import make, request, run

from nybble.kernels.linear import W4A16Linear
from nybble.kernels.packing import W4A16Weight, pack_rows

POISON = 999  # a token whose embedding is a direction of its own
HIDDEN, DIRECTION, HUGE = 256, 5, 1e5


class Overflowing:
    """A layer, and beside it one of int4 weights that gives HUGE for rows in DIRECTION and 0 for all others."""

    def __init__(self, layer, config, dtype, device, length):
        self.layer = layer
        n, group = layer.config.n, 32
        q = torch.full((n, HIDDEN), 8, dtype=torch.uint8)
        q[:, DIRECTION] = 15
        scales = torch.full((n, HIDDEN // group), HUGE / 7 / length, dtype=torch.float32)
        weight = W4A16Weight(pack_rows(q), scales.to(dtype), None, None, group, n, HIDDEN)
        self.huge = W4A16Linear(weight, None, dtype, device)

    def __call__(self, x):
        return self.layer(x) + self.huge(x)


def overflow_in_the_first_block(engine):
    model = engine._runner.model
    model.embedding[:, DIRECTION] = 0
    model.embedding[POISON] = 0
    model.embedding[POISON, DIRECTION] = 1
    first = model.blocks[0]
    with torch.inference_mode():
        length = float(first.input_norm(model.embedding[POISON : POISON + 1])[0, DIRECTION])
    dtype = model.embedding.dtype
    layer = Overflowing(first.qkv, model.config, dtype, torch.device("cpu"), length)
    blocks = (dataclasses.replace(first, qkv=layer), *model.blocks[1:])
    rest = (model.norm, model.head, model.ropes, model.attention, model.ops)
    engine._runner.model = type(model)(model.config, model.embedding, blocks, *rest)
    return layer


@pytest.mark.parametrize(("dtype", "overflows"), [("float16", True), ("bfloat16", False)])
def test_outputs_of_1e5_end_their_request_in_float16_and_are_numbers_in_bfloat16(dtype, overflows):
    engine = make(dtype=dtype, prefill_tokens_busy=64)
    layer = overflow_in_the_first_block(engine)
    rows = torch.zeros(2, HIDDEN, dtype=layer.layer.config.dtype)
    rows[0, DIRECTION] = HUGE / float(layer.huge(torch.eye(HIDDEN, dtype=rows.dtype))[DIRECTION, 0])
    huge = layer.huge(rows)
    assert bool((huge[1] == 0).all())
    assert bool(torch.isinf(huge[0]).all()) == overflows
    assert overflows or float(huge[0, 0]) == pytest.approx(HUGE, rel=0.01)

    sound = {name: request(name, [3 + i, 17, 40 + i, 8], 12) for i, name in enumerate("abc")}
    expected = {name: run(engine, r)[name] for name, r in sound.items()}
    engine.add(sound["a"])
    engine.add(request("poisoned", [3, 17, POISON, 9], 12))
    engine.add(sound["b"])
    tokens = {name: [] for name in ("a", "b", "c", "poisoned")}
    ends = {}
    for step in range(60):
        if step == 3:
            engine.add(sound["c"])
        for out in engine.step():
            tokens[out.request_id] += [t.token_id for t in out.tokens]
            if out.finish_reason:
                ends[out.request_id] = out
    poisoned = ends.pop("poisoned")
    assert {name: tokens[name] for name in "abc"} == expected
    assert {o.finish_reason for o in ends.values()} == {"length"}
    assert engine.stats().nonfinite == int(overflows)
    if overflows:
        assert poisoned.finish_reason == "error" and "not finite" in poisoned.error
        assert tokens["poisoned"] == [], "a stream of made-up tokens"
    else:
        assert poisoned.finish_reason == "length" and len(tokens["poisoned"]) == 12


class Memory:
    """Makes a model's forward pass fail as a device without memory does, while `fails` says so of the batch."""

    def __init__(self, engine, fails, error=None):
        model = engine._runner.model
        self.failures = 0
        self.asked = 0
        sound = model.hidden

        def hidden(batch):
            self.asked += 1
            if fails(self, batch):
                self.failures += 1
                raise error or torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB.")
            return sound(batch)

        model.hidden = hidden


WISHES = [
    request("a", range(3, 33), 12),
    request("b", range(40, 60), 12, temperature=1.0, seed=5),
    request("c", range(70, 75), 20, temperature=0.7, seed=6, frequency_penalty=0.3),
    request("d", range(3, 33), 9),
]


@pytest.fixture(scope="module")
def expected():
    engine = make()
    return {w.request_id: run(engine, w)[w.request_id] for w in WISHES}


@pytest.mark.parametrize("mixes", [True, False], ids=["one pass", "two passes"])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 6, 11])
@pytest.mark.parametrize(
    "error",
    [None, RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")],
    ids=["gpu", "cpu"],
)
def test_one_step_without_memory_changes_no_answer(expected, at, error, mixes):
    """In two passes the streams' rows may be computed, and only the prompts' fail: both are done again."""
    engine = make(prefill_tokens_busy=16)
    engine._runner.model.attention.mixes_rows = mixes
    memory = Memory(engine, lambda m, _: m.asked == at, error)
    assert run(engine, *WISHES, stagger=2) == expected
    assert memory.failures == 1 and engine.stats().out_of_memory == 1
    assert engine.stats().finished == {"length": 4}


def test_too_many_together_run_fewer_at_a_time(expected):
    engine = make()
    memory = Memory(engine, lambda _, batch: len(batch.spans) > 2)
    assert run(engine, *WISHES) == expected
    stats = engine.stats()
    assert memory.failures == stats.out_of_memory > 0
    assert stats.preemptions >= memory.failures and stats.finished == {"length": 4}


def test_a_chunk_too_large_becomes_smaller(expected):
    engine = make()
    memory = Memory(engine, lambda _, batch: len(batch.token_ids) > 16)
    assert run(engine, WISHES[0]) == {"a": expected["a"]}
    assert memory.failures == 1


def test_a_request_that_no_memory_is_left_for_ends_and_the_next_one_runs(expected):
    engine = make()
    memory = Memory(engine, lambda m, batch: bool((batch.token_ids == 500).any()))
    engine.add(WISHES[0])
    engine.add(request("hopeless", [7, 500, 9], 5))
    ends = {}
    while engine.has_work:
        for out in engine.step():
            if out.finish_reason:
                ends[out.request_id] = out
    assert ends["a"].finish_reason == "length"
    assert ends["hopeless"].finish_reason == "error" and "out of memory" in ends["hopeless"].error
    assert engine.stats().kv_usage_ratio == 0 and memory.failures >= 2
    assert run(engine, WISHES[3]) == {"d": expected["d"]}


def test_any_other_error_is_not_hidden():
    engine = make()
    Memory(engine, lambda *_: True, RuntimeError("an illegal memory access was encountered"))
    engine.add(WISHES[0])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.step()
