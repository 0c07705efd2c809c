"""What running streams notice of a long prompt: their gaps before and while it is prefilled, and a short prompt behind it.

python benchmarks/long_prompt.py [--shape qwen3-8b] [--streams 4] [--context 1024] [--prompt 16384] [--device auto]
"""

from __future__ import annotations

import argparse
import statistics
import time

from nybble.service.bench_engine import EngineBench, engine_of, random_request
from nybble.service.bench_serve import quantile
from nybble.service.engine.engine import Engine

SHORT = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=16384)
    parser.add_argument("--prefill-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    bench = EngineBench(
        shape=a.shape,
        batches=(a.streams + 2,),
        contexts=(a.prompt + SHORT, a.context + 20000),
        tokens=64,
        device=a.device,
        prefill_tokens=a.prefill_tokens,
    )
    with engine_of(bench) as engine:
        print(f"{a.streams} streams behind {a.context} tokens, a prompt of {a.prompt}; {engine.info.target}")
        if engine.runner.times is not None:
            for rows, time_ in engine.runner.times.mixed.items():
                behind = time_.per_position * a.prompt * 1e3
                print(
                    f"  a pass of {rows:3} rows {time_.seconds * 1e3:6.2f} ms, {behind:.2f} more behind {a.prompt} positions"
                )
        streams = {f"stream {i}" for i in range(a.streams)}
        for i, name in enumerate(sorted(streams)):
            engine.add(random_request(engine, name, a.context, 20000, seed=i, salt=name))
        begun: set[str] = set()
        while begun < streams:
            begun |= {out.request_id for out in engine.step()}
        for i in range(a.rounds):
            one_round(engine, streams, a.prompt, i)


def one_round(engine: Engine, streams: set[str], prompt: int, i: int) -> None:
    usual, _ = gaps(engine, streams, lambda steps, _: steps >= 96)
    long, short = f"long {i}", f"short {i}"
    engine.add(random_request(engine, long, prompt, 1, seed=100 + i, salt=long))
    for _ in range(3):
        engine.step()
    engine.add(random_request(engine, short, SHORT, 1, seed=200 + i, salt=short))
    started = time.perf_counter()
    beside, seen = gaps(engine, streams, lambda _, seen: long in seen)
    took = time.perf_counter() - started
    middle = statistics.median(usual)
    print(
        f"usual gap {middle * 1e3:.2f} ms (p99 {quantile(usual, 0.99) * 1e3:.2f}); beside the prompt median "
        f"{statistics.median(beside) * 1e3:.2f}, p99 {quantile(beside, 0.99) * 1e3:.2f}, worst {max(beside) * 1e3:.2f} = "
        f"{max(beside) / middle:.2f}x; prompt {prompt / took:.0f} tokens/s in {seen[long]} steps, "
        f"the short one's first token in step {seen[short]}",
        flush=True,
    )


def gaps(engine: Engine, streams: set[str], done) -> tuple[list[float], dict[str, int]]:
    """Seconds between two tokens of any stream until done(steps, who was heard of); who -> the step that told."""
    last: dict[str, float] = {}
    found, seen, steps = [], {}, 0
    while not done(steps, seen):
        outputs = engine.step()
        now = time.perf_counter()
        steps += 1
        for out in outputs:
            seen.setdefault(out.request_id, steps)
            if out.request_id in streams and out.tokens:
                if out.request_id in last:
                    found.append(now - last[out.request_id])
                last[out.request_id] = now
    return found, seen


if __name__ == "__main__":
    main()
