"""What timing GEMM calls costs: `--gemm-sample-every` times the calls of one step in so many.

    python benchmarks/sampling.py [--model demo] [--pairs 2000] [--rounds 40] [--threads 2] [--write]

One stream is decoded by an engine in this process. Two comparisons, each of the same steps with and without:

    every step  pairs of neighbouring steps, one of them timed, which one is drawn: the median of the pairs' ratios, less 1,
                divided by the default rate is what one timed step in so many adds
    as served   rounds of two times 64 steps, at the default rate and at none, which first is drawn: the ratio of the rounds

Both include the engine's statistics and their pickling after every step, which is where samples go on to the API process.
The first has the smaller error by far, since what is looked for is multiplied by the rate; intervals are of the median, at
95 %, by its order statistics. On a GPU calls are timed by events, which this does not measure. Writes
benchmarks/results/sampling.md with --write.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import pickle
import platform
import random
import statistics
import sys
from pathlib import Path
from time import perf_counter

from nybble.service.checkpoints import resolve
from nybble.service.engine.engine import Engine
from nybble.service.engine.load import build_engine
from nybble.service.engine.protocol import EngineConfig, Request, SamplingParams

RESULTS = Path(__file__).parent / "results" / "sampling.md"
DEFAULT_EVERY = EngineConfig("").gemm_sample_every
STEPS_PER_ROUND = 64
# Per stream: short enough that attention stays a small part of a step.
TOKENS = 384
WARM_UP_STEPS = 32


class Stream:
    """Endless decoding, one stream at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._number = 0

    def step(self, every: int) -> float:
        """Seconds of one decode step and its statistics."""
        engine = self._engine
        while not engine.has_work:
            self._number += 1
            sampling = SamplingParams(TOKENS, temperature=0.0, ignore_eos=True)
            prompt = tuple(1000 + (self._number * 31 + i) % 5000 for i in range(16))
            engine.gemm_sample_every = 0
            engine.add(Request(str(self._number), prompt, sampling, 0.0))
            for _ in range(2):
                engine.step()
        engine.gemm_sample_every = every
        started = perf_counter()
        engine.step()
        pickle.dumps(engine.stats())
        return perf_counter() - started


def median_and_interval(values: list[float]) -> tuple[float, float, float]:
    """The median and, by order statistics, the ends of its 95 % interval."""
    ordered = sorted(values)
    half = 0.98 * math.sqrt(len(ordered))
    low = max(0, math.floor(len(ordered) / 2 - half))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + half))
    return statistics.median(ordered), ordered[low], ordered[high]


def pair(stream: Stream, chance: random.Random) -> tuple[float, float]:
    """Seconds of a timed step and of its neighbour."""
    if chance.random() < 0.5:
        timed = stream.step(1)
        return timed, stream.step(0)
    plain = stream.step(0)
    return stream.step(1), plain


def round_ratio(stream: Stream, chance: random.Random) -> float:
    arms = [DEFAULT_EVERY, 0]
    chance.shuffle(arms)
    seconds = {every: sum(stream.step(every) for _ in range(STEPS_PER_ROUND)) for every in arms}
    return seconds[DEFAULT_EVERY] / seconds[0]


def percent(value: float) -> str:
    return f"{value * 100:.3f} %"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()

    engine = build_engine(EngineConfig(str(resolve(args.model)), device="cpu", threads=args.threads))
    stream, chance = Stream(engine), random.Random(1)
    for _ in range(WARM_UP_STEPS):
        stream.step(0)
    pairs = [pair(stream, chance) for _ in range(args.pairs)]
    step_ms = statistics.median(plain for _, plain in pairs) * 1e3
    added_us = statistics.median(timed - plain for timed, plain in pairs) * 1e6
    every_step = median_and_interval([timed / plain for timed, plain in pairs])
    as_served = median_and_interval([round_ratio(stream, chance) for _ in range(args.rounds)])
    calls = sum(report.count for report in engine.info.kernels)

    derived = [percent((value - 1) / DEFAULT_EVERY) for value in every_step]
    direct = [percent(value - 1) for value in as_served]
    text = f"""# What timing GEMM calls costs

{args.model}, one stream, {args.threads} threads, {engine.info.dtype}; a step takes {step_ms:.2f} ms and has {calls} timed calls; {os.cpu_count()} cores, shared with other work, {platform.system()}, Python {platform.python_version()}; {datetime.date.today()}.
Command: `python benchmarks/sampling.py {" ".join(arg for arg in sys.argv[1:] if arg != "--write")}`

| | added | 95 % interval |
|---|---|---|
| a timed step, to itself ({len(pairs)} pairs) | {percent(every_step[0] - 1)} ({added_us:.0f} us) | {percent(every_step[1] - 1)} to {percent(every_step[2] - 1)} |
| at the default rate, one step in {DEFAULT_EVERY}, by that | {derived[0]} | {derived[1]} to {derived[2]} |
| at the default rate, rounds side by side ({args.rounds}) | {direct[0]} | {direct[1]} to {direct[2]} |

The last line is the direct measurement, whose interval is the machine's noise; the one before follows from a difference that
is {DEFAULT_EVERY} times as large. The CPU path only: on a GPU, where calls are timed by device events, not measured. What the API
process does with the samples is not in it.
"""
    print(text)
    if args.write:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
