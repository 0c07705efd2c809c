"""Counts of GEMM calls and, in sampled steps, their seconds: what the gemm_* metrics are made of.

One recorder per process, because the layers are called from one thread of the engine process. On a CPU a call's host
time is its time. On a GPU a pair of device events stands around the call; they are polled later and never waited for, so
sampling does not hold up the device.
"""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter
from typing import Any

import torch

# Sampled calls whose events have not been reached yet; older ones are dropped rather than piled up.
_MOST_PENDING = 4096


class GemmRecorder:
    """phase is set by the runner around each forward pass; sampling switches timing on for that pass."""

    def __init__(self) -> None:
        self.phase = "decode"
        self.sampling = False
        self.calls: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._samples: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        self._latest: dict[tuple[str, str], tuple[float, int]] = {}
        self._pending: list[tuple[Any, Any, tuple[str, str, str, int]]] = []

    def reset(self) -> None:
        self.calls.clear()
        self._samples.clear()
        self._latest.clear()
        self._pending.clear()

    def start(self, device: torch.device) -> Any:
        """Begin timing one call: the mark to hand to `stop`."""
        if device.type == "cpu":
            return perf_counter()
        return _recorded_event()

    def stop(self, mark: Any, path: str, label: str, m: int) -> None:
        """End timing a call of `path` by a layer of kind `label` with m rows."""
        what = (path, self.phase, label, m)
        if isinstance(mark, float):
            self._add(what, perf_counter() - mark)
            return
        self._pending.append((mark, _recorded_event(), what))
        del self._pending[:-_MOST_PENDING]

    def take_latest(self) -> dict[tuple[str, str], tuple[float, int]]:
        """(layer label, path) -> seconds and M of the latest sampled call, those new since the last call of this."""
        self._poll()
        taken, self._latest = self._latest, {}
        return taken

    def take_samples(self) -> dict[tuple[str, str], tuple[float, ...]]:
        """Samples since the last call, seconds per (path, phase)."""
        self._poll()
        taken = {key: tuple(values) for key, values in self._samples.items()}
        self._samples.clear()
        return taken

    def _poll(self) -> None:
        """Turn events that the device has passed into samples; they pass in the order they were recorded."""
        done = 0
        for start, end, what in self._pending:
            if not end.query():
                break
            self._add(what, start.elapsed_time(end) / 1e3)
            done += 1
        del self._pending[:done]

    def _add(self, what: tuple[str, str, str, int], seconds: float) -> None:
        path, phase, label, m = what
        self._samples[path, phase].append(seconds)
        self._latest[label, path] = (seconds, m)


def _recorded_event() -> Any:
    make: Any = torch.cuda.Event  # untyped in torch
    event = make(enable_timing=True)
    event.record()
    return event


RECORDER = GemmRecorder()
