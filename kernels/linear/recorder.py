"""Counts of GEMM calls and, in sampled steps, their seconds: what the gemm_* metrics are made of.

One recorder per process, because the layers are called from one thread of the engine process. On a CPU a call's host
time is its time; on a GPU host time means nothing, so only counts are taken there.
"""

from __future__ import annotations

from collections import defaultdict


class GemmRecorder:
    """phase is set by the runner around each forward pass; sampling switches timing on for that pass."""

    def __init__(self) -> None:
        self.phase = "decode"
        self.sampling = False
        self.calls: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._samples: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        self._latest: dict[tuple[str, str], tuple[float, int]] = {}

    def reset(self) -> None:
        self.calls.clear()
        self._samples.clear()
        self._latest.clear()

    def sample(self, path: str, seconds: float, label: str = "", m: int = 0) -> None:
        self._samples[path, self.phase].append(seconds)
        self._latest[label, path] = (seconds, m)

    def take_latest(self) -> dict[tuple[str, str], tuple[float, int]]:
        """(layer label, path) -> seconds and M of the latest sampled call, those sampled since the last call of this."""
        taken, self._latest = self._latest, {}
        return taken

    def take_samples(self) -> dict[tuple[str, str], tuple[float, ...]]:
        """Samples since the last call, seconds per (path, phase)."""
        if not self._samples:
            return {}
        taken = {key: tuple(values) for key, values in self._samples.items()}
        self._samples.clear()
        return taken


RECORDER = GemmRecorder()
