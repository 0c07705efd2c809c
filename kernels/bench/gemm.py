"""The table of `nybble bench gemm`: every path of every kernel that takes a layer here, and every peer, on one problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from nybble.kernels.bench.peers import PEERS, Gemm, Peer
from nybble.kernels.bench.problem import random_weight, random_x
from nybble.kernels.bench.timing import Timing, time_cold, time_cold_on_host
from nybble.kernels.linear import LinearConfig, LinearKernel, W4A16Linear, dequantize
from nybble.kernels.linear.backends import BACKENDS
from nybble.kernels.linear.route import limits_for
from nybble.kernels.packing import W4A16Weight
from nybble.kernels.target import Target
from nybble.kernels.testing import errors

# Copies of a weight together exceed every last-level cache a few times (H200: 50 MB; a server CPU's slice: 32 MB).
COLD_BYTES = 300 << 20
_COPIES = range(2, 65)
# Relative RMS error beyond which a result is called wrong: a swapped group or nibble gives errors near 1.
WRONG = 0.05


@dataclass(frozen=True)
class Problem:
    """A layer's random weight, and the same in float32 [N, K]."""

    layer: str
    config: LinearConfig
    weight: W4A16Weight
    exact: torch.Tensor

    @classmethod
    def random(cls, layer: str, config: LinearConfig, device: torch.device) -> Problem:
        c = config
        weight = random_weight(c.n, c.k, c.group_size, c.symmetric, c.dtype, device)
        return cls(layer, config, weight, dequantize(weight))


@dataclass(frozen=True)
class Contender:
    """One way to run a layer.

    make    a copy of the layer, and the bytes of its weight, which one call reads
    most_m  most rows that it takes; None: any number
    """

    name: str
    make: Callable[[W4A16Weight], tuple[Gemm, int]]
    most_m: int | None = None


@dataclass(frozen=True)
class Row:
    """One line: microseconds, bytes of the weight per second, RMS error over the reference's RMS; or why there are none."""

    layer: str
    path: str
    m: int
    timing: Timing | None
    bytes_per_s: float = 0.0
    error: float = math.nan
    problem: str = ""

    @property
    def failed(self) -> bool:
        return self.timing is None or not self.error <= WRONG


def contenders(config: LinearConfig, target: Target) -> tuple[list[Contender], dict[str, str]]:
    """Those that can run a layer here, ours first, and why the others cannot: name -> reason."""
    found: list[Contender] = []
    declined: dict[str, str] = {}
    for kernel in BACKENDS.get(target.kind, ()):
        fits, reason = kernel.can_implement(config, target)
        if not fits:
            declined[kernel.name] = reason
            continue
        for path in kernel.paths:
            name = kernel.name if len(kernel.paths) == 1 else f"{kernel.name} {path}"
            most_m = limits_for(target).skinny_max_m if path == "skinny" else None
            found.append(Contender(name, partial(_ours, kernel, path, config, target), most_m))
    for name, peer in PEERS.items():
        why_not = peer.declined(config, target)
        if why_not is None:
            found.append(Contender(name, partial(_theirs, peer, config)))
        else:
            declined[name] = why_not
    return found, declined


def measure(
    problem: Problem, contender: Contender, ms: Sequence[int], cold_bytes: int = COLD_BYTES
) -> Iterator[Row]:
    """One contender at each M that it takes, in order. A failure is a row that says why; nothing is raised."""
    ms = [m for m in ms if contender.most_m is None or m <= contender.most_m]
    layer, device = problem.layer, problem.weight.q.device
    try:
        gemm, nbytes = contender.make(problem.weight)
        copies = min(max(math.ceil(cold_bytes / nbytes), _COPIES.start), _COPIES.stop - 1)
        gemms = [gemm, *(contender.make(problem.weight)[0] for _ in range(copies - 1))]
    except (
        Exception
    ) as error:  # somebody else's package, or a kernel that cannot be built here: the row says so
        yield from (Row(layer, contender.name, m, None, problem=_in_a_line(error)) for m in ms)
        return
    for m in ms:
        x = random_x(m, problem.config.k, problem.config.dtype, device)
        try:
            with torch.inference_mode():
                rms = errors(gemm(x), x.float() @ problem.exact.t()).rms
                timing = _time([partial(one, x) for one in gemms], device)
        except Exception as error:
            yield Row(layer, contender.name, m, None, problem=_in_a_line(error))
            continue
        yield Row(layer, contender.name, m, timing, nbytes / (timing.median_us * 1e-6), rms)


def _ours(
    kernel: LinearKernel, path: str, config: LinearConfig, target: Target, weight: W4A16Weight
) -> tuple[Gemm, int]:
    layer = W4A16Linear(weight, None, config.dtype, weight.q.device, target, kernel)
    return partial(layer.run, path=path), layer.nbytes


def _theirs(peer: Peer, config: LinearConfig, weight: W4A16Weight) -> tuple[Gemm, int]:
    bits = 16 if peer.dense else 4
    groups = 0 if peer.dense else config.n * (config.k // config.group_size)
    return peer.make(weight, config.dtype), config.n * config.k * bits // 8 + groups * 2


def _time(calls: list[Callable[[], object]], device: torch.device) -> Timing:
    """At least 24 launches in a graph."""
    if device.type == "cpu":
        return time_cold_on_host(calls)
    return time_cold(calls, rounds=max(1, math.ceil(24 / len(calls))))


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
