"""Decode speed of the demo on a CPU, in one run beside what a user would pick instead.

    python benchmarks/serving_cpu.py [--tokens 128] [--rounds 5] [--threads 2] [--write]

Batch-1 greedy decode of SmolLM2-135M-Instruct: transformers' generate on the 16-bit weights, llama.cpp's server (the
xllamacpp wheel) on the GGUF, and `nybble serve demo`, in turn, round after round, so that a disturbance hits all of
them; then 8 concurrent streams and the engine's own overhead per step. Both servers are asked over HTTP by the same
streaming client. Reported is the best round of each: on a shared machine noise only ever slows down.

Needs: pip install xllamacpp; the demo is made on first use. Writes benchmarks/results/serving-cpu.md with --write.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
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


class HttpServer:
    """A server in a process of its own, asked over HTTP with streaming: the same client for every server."""

    base: str
    process: subprocess.Popen[bytes]

    def stream(self, tokens: int, prompt: str = PROMPT) -> tuple[float, float, int]:
        """(time of the first token, time of the last, tokens between them), as they arrive."""
        body = {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = urllib.request.Request(
            f"{self.base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        first = last = 0.0
        with urllib.request.urlopen(request) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    if b'"choices":[]' in line:
                        assert json.loads(line[6:])["usage"]["completion_tokens"] == tokens
                        break
                    last = time.perf_counter()
                    first = first or last
        return first, last, tokens - 1

    def run(self, tokens: int) -> float:
        first, last, count = self.stream(tokens)
        return count / (last - first)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


class LlamaCpp(HttpServer):
    """llama.cpp's server on the GGUF itself, from the xllamacpp wheel."""

    name = "llama.cpp server (xllamacpp), GGUF Q4_1, over HTTP"
    code = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_parallel, params.n_ctx, params.n_gpu_layers, params.verbosity = int(sys.argv[3]), 2048 * int(sys.argv[3]), 0, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[2])
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""

    def __init__(self, threads: int, gguf: Path, parallel: int = 1) -> None:
        command = [sys.executable, "-c", self.code, str(gguf), str(threads), str(parallel)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        for raw in self.process.stdout:
            if raw.startswith(b"http://"):
                self.base = raw.decode().strip()
                return
        raise RuntimeError("llama.cpp's server did not start")


class Nybble(HttpServer):
    name = "nybble serve demo, over HTTP"

    def __init__(self, threads: int, gguf: Path) -> None:
        self.log = tempfile.TemporaryFile()
        command = [sys.executable, "-m", "nybble.service", "serve", "demo", "--port", "0"]
        started = time.perf_counter()
        self.process = subprocess.Popen([*command, "--threads", str(threads)], stderr=self.log)
        while not (found := re.search(rb"listening on (\S+)", self.read_log())):
            self.alive()
        self.base = found[1].decode()
        while True:
            self.alive()
            try:
                with urllib.request.urlopen(f"{self.base}/readyz", timeout=5):
                    break
            except OSError:
                time.sleep(0.05)
        self.ready_s = time.perf_counter() - started

    def read_log(self) -> bytes:
        self.log.seek(0)
        return self.log.read()

    def alive(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{self.read_log().decode()}")
        time.sleep(0.02)

    def concurrent(self, streams: int, tokens: int) -> float:
        """Tokens per second of all streams together, from the first token of any to the last of all."""
        prompts = [f"{PROMPT} number {i} and" for i in range(streams)]
        with concurrent.futures.ThreadPoolExecutor(streams) as pool:
            spans = list(pool.map(lambda prompt: self.stream(tokens, prompt), prompts))
        seconds = max(last for _, last, _ in spans) - min(first for first, _, _ in spans)
        return sum(count for _, _, count in spans) / seconds

    def overhead(self) -> tuple[float, float]:
        """(steps, seconds of engine overhead) so far."""
        with urllib.request.urlopen(f"{self.base}/metrics") as response:
            lines = response.read().decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return (
            float(values["nybble_engine_steps_total"]),
            float(values["nybble_engine_step_overhead_seconds_total"]),
        )


def transformers_rate(tokens: int, threads: int, gguf: Path) -> float:
    """In a process of its own, so that its threads do not spin beside the servers'."""
    code = (
        f"import serving_cpu as s; p = s.Transformers({threads}, s.Path({str(gguf)!r})); p.run(16); "
        f"print('RATE', p.run({tokens}))"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": str(threads)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    for line in out.stdout.splitlines():
        if line.startswith("RATE"):
            return float(line.split()[1])
    raise RuntimeError(f"transformers failed:\n{out.stderr[-2000:]}")


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
            rates["Transformers"].append(transformers_rate(args.tokens, args.threads, gguf))
            with contextlib.closing(LlamaCpp(args.threads, gguf)) as peer:
                peer.run(16)
                rates["LlamaCpp"].append(peer.run(args.tokens))
            with contextlib.closing(Nybble(args.threads, gguf)) as nybble:
                ready.append(nybble.ready_s)
                nybble.run(16)
                before = nybble.overhead()
                rates["Nybble"].append(nybble.run(args.tokens))
                after = nybble.overhead()
                overhead.append((after[1] - before[1]) / (after[0] - before[0]) * 1e3)
                eight.append(nybble.concurrent(8, args.tokens))
            last = ", ".join(f"{k} {v[-1]:.1f}" for k, v in rates.items())
            print(f"round {r + 1}: {last}, 8 streams {eight[-1]:.1f}")
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
