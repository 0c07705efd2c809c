"""Time of one call with its data out of cache, and the rate at which the machine copies memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, fastest and slowest of the replays."""

    median_us: float
    low_us: float
    high_us: float


def time_cold(calls: Sequence[Call], *, rounds: int = 4, replays: int = 9) -> Timing:
    """Time one call with its weights out of cache: `calls` do the same work on different copies of the weight.

    A graph replays them in turn, `rounds` times; the copies together should exceed the last-level cache a few times.
    """
    make: Any = torch.cuda.Stream  # untyped in torch
    stream = make()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for call in calls:
                    call()
        graph.replay()
        torch.cuda.synchronize()
        times = []
        for _ in range(replays):
            start, end = _event(), _event()
            start.record(stream)
            graph.replay()
            end.record(stream)
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1000 / (rounds * len(calls)))
    return Timing(statistics.median(times), min(times), max(times))


def time_cold_on_host(calls: Sequence[Call], *, least_s: float = 0.2, least_rounds: int = 3) -> Timing:
    """The same on a CPU, by its clock: rounds over all calls until `least_s` seconds have gone by."""
    for call in calls:
        call()
    times: list[float] = []
    began = perf_counter()
    while len(times) < least_rounds or perf_counter() - began < least_s:
        start = perf_counter()
        for call in calls:
            call()
        times.append((perf_counter() - start) * 1e6 / len(calls))
    return Timing(statistics.median(times), min(times), max(times))


def copy_rate(device: torch.device, nbytes: int = 1 << 28, *, least_s: float = 1.0) -> float:
    """Bytes per second, read and written ones together, of a copy of `nbytes` within the device's memory.

    On a CPU it is repeated for least_s.
    """
    source = torch.ones(nbytes, dtype=torch.int8, device=device)
    target = torch.empty_like(source)

    def copy() -> object:
        return target.copy_(source)

    timing = time_cold_on_host([copy], least_s=least_s) if device.type == "cpu" else time_cold([copy])
    return 2 * nbytes / (timing.low_us * 1e-6)


def _event() -> Any:
    make: Any = torch.cuda.Event  # untyped in torch
    return make(enable_timing=True)
