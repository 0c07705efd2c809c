"""Captured decode: what is trusted, what falls back and why; the device replaced by objects that fail on demand."""

import pytest
import torch

from nybble.kernels.linear import RECORDER
from nybble.service.engine.graphs import StepGraphs
from nybble.service.engine.protocol import GRAPH_FALLBACKS


class Graph:
    """Replays by calling the forward again; `fault` changes what it computes."""

    def __init__(self, forward, fault=None):
        self._forward, self._fault = forward, fault
        self.output = forward().clone()
        self.replays = 0

    def replay(self):
        self.replays += 1
        calls = dict(RECORDER.calls)
        result = self._forward().clone()
        RECORDER.calls.clear()  # a device's replay runs no Python
        RECORDER.calls.update(calls)
        if self._fault is not None:
            result = self._fault(result)
        if result is not None:
            self.output.copy_(result)


class Model:
    """logits = inputs @ weight, the inputs in a static buffer."""

    def __init__(self, rows=2):
        self.inputs = torch.zeros(rows, 8)
        self.weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))

    def fill(self, problem):
        gen = torch.Generator().manual_seed(problem)
        self.inputs.copy_(torch.randn(self.inputs.shape, generator=gen))

    def forward(self):
        RECORDER.calls["skinny", "decode"] += 5
        return self.inputs @ self.weight


@pytest.fixture(autouse=True)
def counts():
    RECORDER.reset()
    yield
    RECORDER.reset()


def prepared(capture, buckets=(2,)):
    graphs, models = StepGraphs("decode", capture), {b: Model(b) for b in buckets}
    for bucket, model in models.items():
        graphs.prepare(bucket, model.forward, model.fill)
    return graphs, models


def test_a_replay_computes_the_present_inputs():
    graphs, models = prepared(Graph, (1, 4))
    assert graphs.buckets == (1, 4) and not graphs.fallbacks
    for seed in (5, 6):
        models[4].fill(seed)
        torch.testing.assert_close(graphs.run(4), models[4].inputs @ models[4].weight)


def test_replayed_gemm_calls_are_counted():
    graphs, _ = prepared(Graph)
    RECORDER.reset()
    graphs.run(2)
    graphs.run(2)
    assert RECORDER.calls == {("skinny", "decode"): 10}


def failing(error):
    def capture(forward):
        raise error

    return capture


def broken(fault):
    return lambda forward: Graph(forward, fault)


def frozen(forward):
    """Captured a copy of the inputs: replays the first problem for ever."""
    first = forward().clone()
    return Graph(lambda: first)


FAULTS = {
    "capture-raises": (
        failing(RuntimeError("operation not permitted when stream is capturing")),
        "capture_failed",
    ),
    "driver-error": (failing(OSError("driver")), "capture_failed"),
    "no-memory": (failing(torch.OutOfMemoryError("CUDA out of memory")), "out_of_memory"),
    "other-numbers": (broken(lambda y: y * 1.1), "mismatch"),
    "one-wrong-row": (broken(lambda y: torch.cat((y[:1], y[1:].flip(-1)))), "mismatch"),
    "not-a-number": (broken(lambda y: y * float("nan")), "mismatch"),
    "writes-nothing": (broken(lambda y: None), "mismatch"),
    "stale-inputs": (frozen, "mismatch"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_its_bucket_alone(name, caplog):
    capture, reason = FAULTS[name]
    calls = []

    def second_time(forward):
        calls.append(1)
        return capture(forward) if len(calls) == 2 else Graph(forward)

    graphs, _ = prepared(second_time, (8, 4, 2))
    assert graphs.buckets == (2, 8)
    assert graphs.run(4) is None
    assert graphs.fallbacks == {reason: 1} and reason in GRAPH_FALLBACKS
    (record,) = caplog.records
    assert "decode of 4 rows runs without a graph" in record.message and reason in record.message


def test_memory_that_runs_out_while_replaying_is_a_fallback():
    def fault(y):
        raise torch.OutOfMemoryError("CUDA out of memory")

    graphs, _ = prepared(broken(fault))
    assert graphs.run(2) is None and graphs.fallbacks == {"out_of_memory": 1}


def test_an_eager_step_that_fails_is_no_fallback():
    def forward():
        raise RuntimeError("no kernel image")

    with pytest.raises(RuntimeError, match="no kernel image"):
        StepGraphs("decode", Graph).prepare(1, forward, lambda problem: None)
