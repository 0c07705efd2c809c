"""Decode speed of the demo on a CPU, in one run beside what a user would pick instead.

    python benchmarks/serving_cpu.py [--tokens 128] [--rounds 5] [--threads 2] [--write]

Batch-1 greedy decode of SmolLM2-135M-Instruct: transformers' generate on the 16-bit weights, llama.cpp (the xllamacpp
wheel) on the GGUF, and a real `nybble serve demo` process over HTTP, in turn, round after round, so that a disturbance
hits all of them; then 8 concurrent streams and the engine's own overhead per step. Reported is the best round of each:
on a shared machine noise only ever slows down.

Needs: pip install xllamacpp; the demo is made on first use. Writes benchmarks/results/serving-cpu.md with --write.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from nybble.service.checkpoints.demo import source_gguf

PROMPT = "The history of the city begins with"
RESULTS = Path(__file__).parent / "results" / "serving-cpu.md"


class Transformers:
    """generate() on the 16-bit weights the demo was made from, in bf16."""

    name = "transformers generate, 16-bit weights (bf16)"

    def __init__(self, threads: int, gguf: Path) -> None:
        import torch
        from quality import build
        from transformers import AutoTokenizer

        from nybble.service.checkpoints.demo import demo
        from nybble.service.checkpoints.gguf import GgufSource

        torch.set_num_threads(threads)
        self.torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(demo())
        self.model = build(GgufSource(gguf)).to(torch.bfloat16).eval()

    def run(self, tokens: int) -> float:
        ids = self.tokenizer(PROMPT, return_tensors="pt").input_ids

        def generate(count: int) -> float:
            started = time.perf_counter()
            with self.torch.inference_mode():
                out = self.model.generate(
                    ids,
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            assert out.shape[1] == ids.shape[1] + count
            return time.perf_counter() - started

        # Prefill and set-up cancel: the rate is that of the tokens after the first.
        return (tokens - 1) / (generate(tokens) - generate(1))

    def close(self) -> None:
        pass


class LlamaCpp:
    """llama.cpp's server class in this process, on the GGUF itself."""

    name = "llama.cpp (xllamacpp), GGUF Q4_1"

    def __init__(self, threads: int, gguf: Path) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(gguf)
        params.n_parallel, params.n_ctx, params.n_gpu_layers = 1, 2048, 0
        params.cpuparams.n_threads = threads
        params.verbosity = 0
        self.server = xllamacpp.Server(params)

    def run(self, tokens: int) -> float:
        body = {
            "prompt": PROMPT,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        answer = self.server.handle_completions(body)
        answer = json.loads(answer) if isinstance(answer, str) else answer
        assert answer["usage"]["completion_tokens"] == tokens
        return float(answer["timings"]["predicted_per_second"])  # its own figure, decode alone

    def close(self) -> None:
        del self.server


class Nybble:
    """`nybble serve demo` in its own processes, asked over HTTP with streaming."""

    name = "nybble serve demo (over HTTP)"

    def __init__(self, threads: int) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        self.log = tempfile.TemporaryFile()
        command = [
            sys.executable,
            "-m",
            "nybble.service",
            "serve",
            "demo",
            "--port",
            str(port),
            "--threads",
            str(threads),
        ]
        started = time.perf_counter()
        self.process = subprocess.Popen(command, stderr=self.log)
        while True:
            if self.process.poll() is not None:
                self.log.seek(0)
                raise RuntimeError(f"the server ended:\n{self.log.read().decode()}")
            try:
                with urllib.request.urlopen(f"{self.base}/readyz", timeout=5):
                    break
            except OSError:
                time.sleep(0.05)
        self.ready_s = time.perf_counter() - started

    def stream(self, tokens: int, prompt: str = PROMPT) -> tuple[float, float]:
        """(time of the first token, time of the last), as they arrive."""
        body = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        request = urllib.request.Request(
            f"{self.base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        first = last = 0.0
        with urllib.request.urlopen(request) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    last = time.perf_counter()
                    first = first or last
        return first, last

    def run(self, tokens: int) -> float:
        first, last = self.stream(tokens)
        return (tokens - 1) / (last - first)

    def concurrent(self, streams: int, tokens: int) -> float:
        """Tokens per second of all streams together, from the first token of the last to start to the first end."""
        prompts = [f"{PROMPT} number {i} and" for i in range(streams)]
        with concurrent.futures.ThreadPoolExecutor(streams) as pool:
            started = time.perf_counter()
            spans = list(pool.map(lambda p: self.stream(tokens, p), prompts))
        assert all(first > started for first, _ in spans)
        begin, end = min(f for f, _ in spans), max(e for _, e in spans)
        return streams * (tokens - 1) / (end - begin)

    def overhead_ms(self) -> tuple[float, float]:
        """(steps, seconds of engine overhead) so far."""
        with urllib.request.urlopen(f"{self.base}/metrics") as response:
            lines = response.read().decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return (
            float(values["nybble_engine_steps_total"]),
            float(values["nybble_engine_step_overhead_seconds_total"]),
        )

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@contextmanager
def opened(kind, threads):
    peer = kind(threads)
    try:
        yield peer
    finally:
        peer.close()


def one(kind: str, tokens: int, threads: int, gguf: Path) -> float:
    """One measurement of a peer in a process of its own, so that no peer's threads spin beside another's."""
    code = (
        f"import serving_cpu as s; p = s.{kind}({threads}, s.Path({str(gguf)!r})); p.run(16); "
        f"print('RATE', p.run({tokens})); p.close()"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": str(threads)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    for line in out.stdout.splitlines():
        if line.startswith("RATE"):
            return float(line.split()[1])
    raise RuntimeError(f"{kind} failed:\n{out.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rates: dict[str, list[float]] = {"Transformers": [], "LlamaCpp": [], "Nybble": []}
    eight: list[float] = []
    overhead: list[float] = []
    ready: list[float] = []
    with source_gguf() as gguf:
        for r in range(args.rounds):
            for kind in ("Transformers", "LlamaCpp"):
                rates[kind].append(one(kind, args.tokens, args.threads, gguf))
            with opened(Nybble, args.threads) as nybble:
                ready.append(nybble.ready_s)
                nybble.run(16)
                before = nybble.overhead_ms()
                rates["Nybble"].append(nybble.run(args.tokens))
                after = nybble.overhead_ms()
                overhead.append((after[1] - before[1]) / (after[0] - before[0]) * 1e3)
                eight.append(nybble.concurrent(8, args.tokens))
            print(
                f"round {r + 1}: "
                + ", ".join(f"{k} {v[-1]:.1f}" for k, v in rates.items())
                + f", 8 streams {eight[-1]:.1f}"
            )
    report = table(rates, eight, overhead, ready, args)
    print(report)
    if args.write:
        RESULTS.write_text(report)


def table(rates, eight, overhead, ready, args) -> str:
    best = {k: max(v) for k, v in rates.items()}
    ours = best["Nybble"]
    rows = [
        (Transformers.name, best["Transformers"], rates["Transformers"]),
        (LlamaCpp.name, best["LlamaCpp"], rates["LlamaCpp"]),
        (Nybble.name, ours, rates["Nybble"]),
        ("nybble, 8 concurrent streams, all together", max(eight), eight),
    ]
    versions = ", ".join(
        f"{p} {importlib.metadata.version(p)}" for p in ("torch", "transformers", "xllamacpp", "nybble")
    )
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    lines = [
        "# Decode of the demo on a CPU",
        "",
        f"SmolLM2-135M-Instruct, greedy, {args.tokens} tokens, {args.threads} threads; {cpu_name()}; {versions}; commit {commit}; "
        f"{datetime.date.today()}.",
        f"Command: `python benchmarks/serving_cpu.py --tokens {args.tokens} --rounds {args.rounds} --threads {args.threads}`",
        "",
        "| | tokens/s, best round | all rounds | nybble's ratio |",
        "|---|---|---|---|",
    ]
    for name, value, all_rounds in rows[:3]:
        lines.append(
            f"| {name} | {value:.1f} | {', '.join(f'{x:.1f}' for x in all_rounds)} | {ours / value:.2f} |"
        )
    name, value, all_rounds = rows[3]
    lines.append(
        f"| {name} | {value:.1f} | {', '.join(f'{x:.1f}' for x in all_rounds)} | {value / ours:.2f} x one stream |"
    )
    lines += [
        "",
        f"Engine overhead per step at batch 1 (all but the model's forward): {min(overhead):.3f} ms.",
        f"`nybble serve demo` ready after {min(ready):.1f} to {max(ready):.1f} s (demo already made).",
        "",
    ]
    return "\n".join(lines)


def cpu_name() -> str:
    from nybble.kernels.target import cpu_target

    return f"{cpu_target().name}, {os.cpu_count()} cores, {platform.system()}"


if __name__ == "__main__":
    main()
