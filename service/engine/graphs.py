"""Captured steps: one device graph per number of rows, checked against eager before it is trusted.

    prepare(bucket, forward, fill)   eager once (compiles what must be compiled), capture, replay on other inputs, compare
    run(bucket)                      replay; None where the bucket runs eagerly

A bucket that cannot be captured, does not fit, or replays something else than eager falls back to eager, alone, with a
reason. What captures is a parameter: CUDA and ROCm through torch, anything else in tests.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nybble.kernels.linear import RECORDER

log = logging.getLogger(__name__)

# Replay runs the same kernels on the same numbers; a library may pick another algorithm while capturing. Of the largest logit.
_TOLERANCE = 0.02

Forward = Callable[[], torch.Tensor]


class Captured(Protocol):
    """A captured forward: replay() computes it anew, from the same inputs' present values, into `output`."""

    @property
    def output(self) -> torch.Tensor: ...

    def replay(self) -> None: ...


Capture = Callable[[Forward], Captured]


class DeviceCapture:
    """Captures on a CUDA or ROCm device. Graphs share one memory pool, since they never run at the same time; after a
    capture that failed, the next ones share another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, forward: Forward) -> Captured:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        try:
            # Other threads may use the device meanwhile: a capture is spoilt by its own thread's calls alone.
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                output = forward()
        except BaseException:
            # torch leaves its capturing stream current, and the pool marked as being captured into.
            torch.cuda.set_stream(stream)
            self._pool = None
            raise
        self._pool = graph.pool()
        return _DeviceGraph(graph, output)


@dataclass(frozen=True, slots=True)
class _DeviceGraph:
    graph: torch.cuda.CUDAGraph
    output: torch.Tensor

    def replay(self) -> None:
        self.graph.replay()


class StepGraphs:
    """Of one kind of pass: "decode", "prefill" or "mixed". fallbacks: reason -> buckets that run eagerly because of it."""

    def __init__(self, phase: str, capture: Capture) -> None:
        self._phase = phase
        self._capture = capture
        self._graphs: dict[int, Captured] = {}
        self._calls: dict[int, Counter[tuple[str, str]]] = {}
        self.fallbacks: Counter[str] = Counter()

    @property
    def buckets(self) -> tuple[int, ...]:
        """Those that replay."""
        return tuple(sorted(self._graphs))

    def prepare(self, bucket: int, forward: Forward, fill: Callable[[int], None]) -> None:
        """Capture `forward` for `bucket`. fill(i) writes the i-th test problem into its inputs, i = 0, 1.

        Only an eager failure raises: without a working eager step there is nothing to serve.
        """
        fill(0)
        before = Counter(RECORDER.calls)
        forward()
        calls = Counter(RECORDER.calls) - before
        problem: tuple[str, str] | None
        try:
            captured = self._capture(forward)
            problem = _difference(captured, forward, fill)
        except torch.OutOfMemoryError as error:
            problem = "out_of_memory", str(error)
        except Exception as error:  # whatever the driver, or torch while capturing, makes of it
            problem = "capture_failed", f"{type(error).__name__}: {error}"
        if problem is None:
            self._graphs[bucket], self._calls[bucket] = captured, calls
            return
        reason, detail = problem
        self.fallbacks[reason] += 1
        log.warning("%s of %d rows runs without a graph (%s): %s", self._phase, bucket, reason, detail)

    def run(self, bucket: int) -> torch.Tensor | None:
        """Logits of the bucket's rows for the present inputs, valid until the next run; None: run eagerly."""
        captured = self._graphs.get(bucket)
        if captured is None:
            return None
        captured.replay()
        # A replayed call never passes the recorder.
        for key, count in self._calls[bucket].items():
            RECORDER.calls[key] += count
        return captured.output


def _difference(captured: Captured, forward: Forward, fill: Callable[[int], None]) -> tuple[str, str] | None:
    """What is wrong with a replay, on inputs that were not there when it was captured; None: nothing."""
    fill(1)
    expected = forward().to(torch.float32)
    captured.output.fill_(float("nan"))
    captured.replay()
    error = (captured.output.to(torch.float32) - expected).abs().max()
    relative = float(error / expected.abs().max().clamp_min(1e-6))
    if relative <= _TOLERANCE:  # false for NaN
        return None
    return (
        "mismatch",
        f"its logits differ from eager ones by {relative:.3g} of the largest, accepted {_TOLERANCE:g}",
    )
