"""Problems and cold-cache timing shared by the GEMM scripts."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nybble.kernels.packing import W4A16Weight

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

# name -> (N, K) of the layers timed
QWEN3_8B = {"gate_up": (24576, 4096), "down": (4096, 12288), "qkv": (6144, 4096), "o": (4096, 4096)}


def random_weight(
    n: int, k: int, g: int, symmetric: bool, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> W4A16Weight:
    """Random int4 weight made on the device. Scales of neighbouring groups differ by up to 2^8."""
    gen = torch.Generator(device).manual_seed(seed)
    q = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), generator=gen, device=device, dtype=torch.int64).to(
        torch.int32
    )
    exponent = torch.randint(-13, -5, (n, k // g), generator=gen, device=device).float()
    scales = (1 + torch.rand(n, k // g, generator=gen, device=device)) * torch.exp2(exponent)
    zeros = None
    if not symmetric:
        zeros = torch.randint(0, 16, (n, k // g), generator=gen, device=device, dtype=torch.uint8)
    return W4A16Weight(q, scales.to(dtype), zeros, None, g, n, k)


def random_x(m: int, k: int, dtype: torch.dtype, device: torch.device, seed: int = 1) -> torch.Tensor:
    gen = torch.Generator(device).manual_seed(seed)
    x = torch.randn(m, k, generator=gen, device=device) * torch.linspace(0.5, 2.0, k, device=device)
    return x.to(dtype)


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, fastest and slowest of the replays."""

    median_us: float
    low_us: float
    high_us: float


def time_cold(calls: list[Callable[[], object]], *, rounds: int = 4, replays: int = 9) -> Timing:
    """Time one call with its weights out of cache: `calls` do the same work on different copies of the weight.

    A graph replays them in turn, `rounds` times; the copies together should exceed the last-level cache a few times.
    """
    stream = torch.cuda.Stream()
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
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            end.record(stream)
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1000 / (rounds * len(calls)))
    return Timing(statistics.median(times), min(times), max(times))


def commit() -> str:
    """The commit measured, or 'unknown' outside a checkout."""
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return run.stdout.strip() or "unknown"
