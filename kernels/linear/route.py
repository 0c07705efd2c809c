"""Which path one GEMM takes: a pure function over data.

    M rows of activations
      |-- few rows ----------------------> "skinny"   the csrc kernel, reads packed weights at memory speed
      |-- a dense copy exists, many rows -> "dense"   library GEMM on the dequantised copy
      |-- otherwise ---------------------> "triton"   fused dequantisation on the same packed weights
      `-- no GPU kernel fits ------------> "cpu" or "general"

The limits are data, per chip. The skinny kernel is made for one matrix tile of rows, 16, on CUDA for 64, and keeps no more
than a few steps of activations in LDS, so that K*M has no limit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from nybble.kernels.linear.config import LinearConfig
from nybble.kernels.target import Target

PATHS = ("skinny", "dense", "triton", "cpu", "general")


@dataclass(frozen=True, slots=True)
class RouteLimits:
    """skinny_max_m: most rows for the skinny kernel. dense_min_m: fewest rows at which a dense copy is faster than fused
    dequantisation."""

    skinny_max_m: int = 16
    dense_min_m: int = 256


# First prefix that matches the target's arch wins; the empty prefix is the default.
LIMITS: tuple[tuple[str, RouteLimits], ...] = (
    # Zen 4, 2 threads, bf16, N=3072 K=576: int4 177 us against dense 336 us at M=8, 342 against 413 at M=16,
    # 686 against 543 at M=32.
    ("x86_64", RouteLimits(dense_min_m=24)),
    # H200, gate_up and down of Qwen3-8B, bf16: fused 45 us against dense 51 at M=64, 68 against 53 at M=96.
    ("sm_90", RouteLimits(skinny_max_m=64, dense_min_m=96)),
    ("sm_", RouteLimits(skinny_max_m=64)),
    ("", RouteLimits()),
)


@dataclass(frozen=True, slots=True)
class Decision:
    path: str
    reason: str


def limits_for(target: Target) -> RouteLimits:
    return next(limits for prefix, limits in LIMITS if target.arch.startswith(prefix))


def decide(m: int, config: LinearConfig, target: Target, available: Collection[str]) -> Decision:
    """The path for M rows and why. `available`: the paths that exist for this layer and passed their self-check.

    Raises ValueError when nothing is available or m is negative.
    """
    if m < 0:
        raise ValueError(f"route: given M={m}, accepted M >= 0")
    limits = limits_for(target)
    if "skinny" in available and m <= limits.skinny_max_m:
        return Decision("skinny", f"M={m} <= {limits.skinny_max_m}: one read of the packed weights")
    if "dense" in available and m >= limits.dense_min_m:
        return Decision("dense", f"a dense copy exists and M={m} >= {limits.dense_min_m}")
    for path, reason in (
        ("triton", "fused dequantisation at this M"),
        ("cpu", "the CPU's own kernel, at any M"),
        ("general", "no faster path fits this layer"),
    ):
        if path in available:
            return Decision(path, reason)
    raise ValueError(
        f"route: given paths {sorted(available)} for M={m} and {config}, accepted at least one of {PATHS}"
    )


def route(m: int, config: LinearConfig, target: Target, available: Collection[str]) -> str:
    """The path alone; see `decide`."""
    return decide(m, config, target, available).path


@dataclass(frozen=True, slots=True)
class RouteRange:
    """first..last: the rows M (last None: and all above) that take `path`. tile: how its kernel cuts the problem up,
    or None for a path that has none of ours to cut."""

    first: int
    last: int | None
    path: str
    reason: str
    tile: str | None


def route_table(
    config: LinearConfig,
    target: Target,
    available: Collection[str],
    describe: Callable[[int, str], str | None] = lambda m, path: None,
    m_max: int = 8192,
) -> tuple[RouteRange, ...]:
    """All M from 1 on, as ranges that share a path and a tile: what GET /v1/kernels shows.

    describe(m, path) names the tile. Looks at every M up to 64 and every power of two, and finds each change between
    two of them by bisection.
    """

    def at(m: int) -> tuple[str, str | None]:
        path = decide(m, config, target, available).path
        return path, describe(m, path)

    probes = [*range(1, 65), *(2**e for e in range(7, m_max.bit_length()))]
    starts = [1]
    for low, high in zip(probes, probes[1:], strict=False):
        while at(low) != at(high):
            # The first M after `low` that differs from it lies in low+1..high.
            left, right = low, high
            while right - left > 1:
                middle = (left + right) // 2
                left, right = (middle, right) if at(middle) == at(low) else (left, middle)
            starts.append(right)
            low = right
    ranges = []
    for i, first in enumerate(starts):
        last = starts[i + 1] - 1 if i + 1 < len(starts) else None
        decision = decide(first, config, target, available)
        ranges.append(RouteRange(first, last, decision.path, decision.reason, describe(first, decision.path)))
    return tuple(ranges)
