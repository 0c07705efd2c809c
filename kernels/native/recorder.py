"""Counts of run-time compilations: what the jit_* metrics are made of. One recorder per process, any thread."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class JitCounts:
    """compiles and cache_hits: kernel -> how often; seconds: of all compilations together."""

    compiles: dict[str, int]
    cache_hits: dict[str, int]
    seconds: float


class JitRecorder:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiles: Counter[str] = Counter()
        self._hits: Counter[str] = Counter()
        self._seconds = 0.0

    def compiled(self, kernel: str, seconds: float) -> None:
        with self._lock:
            self._compiles[kernel] += 1
            self._seconds += seconds

    def cache_hit(self, kernel: str) -> None:
        with self._lock:
            self._hits[kernel] += 1

    def counts(self) -> JitCounts:
        with self._lock:
            return JitCounts(dict(self._compiles), dict(self._hits), self._seconds)

    def reset(self) -> None:
        with self._lock:
            self._compiles.clear()
            self._hits.clear()
            self._seconds = 0.0


JIT_RECORDER = JitRecorder()


def count_triton(recorder: JitRecorder = JIT_RECORDER) -> bool:
    """Count what Triton compiles and what it finds in its own cache, too; whether this Triton tells.

    A listener that somebody else has set is called as before. Calling this again changes nothing.
    """
    try:
        from triton import knobs

        present = knobs.compilation.listener
    except (ImportError, AttributeError):
        return False
    if isinstance(present, _TritonListener):
        return True
    knobs.compilation.listener = _TritonListener(recorder, present)
    return True


class _TritonListener:
    """Called by Triton (3.6 to 3.9) after each compilation, times in microseconds."""

    def __init__(self, recorder: JitRecorder, before: Any) -> None:
        self._recorder, self._before = recorder, before

    def __call__(
        self, *, src: Any, metadata: dict[str, Any], metadata_group: Any, times: Any, cache_hit: bool
    ) -> None:
        name = str(metadata.get("name") or getattr(src, "name", "triton"))
        if cache_hit:
            self._recorder.cache_hit(name)
        else:
            self._recorder.compiled(name, times.total / 1e6)
        if self._before is not None:
            self._before(
                src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit
            )
