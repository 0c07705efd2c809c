"""`nybble bench serve`: streams over HTTP against a server of its own, beside the same engine without HTTP.

The server is `nybble serve` in a process of its own; the streams are asked for by one asyncio client, over plain
HTTP/1.1, all at once. Gaps are those between two pieces of one stream as they arrive here.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nybble.service.bench_engine import EngineBench
from nybble.service.checkpoints.random_weights import random_folder
from nybble.service.errors import ConfigError

READY_TIMEOUT_S = 600.0
_STREAM_TIMEOUT_S = 600.0
_LISTENING = re.compile(rb"listening on (?:http://)?([\w.\-]+):(\d+)")


@dataclass(frozen=True)
class ServeRow:
    """`streams` at a time over HTTP. engine_tokens_per_s: the same batch without HTTP, where it was measured."""

    streams: int
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    engine_tokens_per_s: float

    @property
    def lost(self) -> float:
        """Part of the engine's tokens per second."""
        return 1 - self.tokens_per_s / self.engine_tokens_per_s


@dataclass(frozen=True)
class _Stream:
    asked_s: float
    arrivals_s: tuple[float, ...]
    tokens: int


def bench_serve(bench: EngineBench, output: Path | None) -> None:
    """Raises ConfigError when the server does not start, or answers with anything but a stream."""
    with tempfile.TemporaryDirectory(prefix="nybble-bench-") as name:
        folder = bench.model or str(random_folder(Path(name), bench.shape, bench.group_size, bench.longest))
        engine = _engine_rates(bench, folder, Path(name))
        if not bench.model:
            engine["about"] = engine["about"].replace(folder, f"random weights in the shape of {bench.shape}")
        print(f"{engine['about']}\n")
        print(f"{'streams':>8}{'tokens/s':>10}{'engine':>10}{'lost':>8}{'TTFT p50':>10}{'p99 ms':>9}", end="")
        print(f"{'gap p50':>10}{'p99 ms':>9}{'p99/p50':>9}")
        rows = []
        with _server(bench, folder, Path(name)) as (host, port):
            asyncio.run(_streams(host, port, bench, 1))  # the server's own first time
            for streams in bench.batches:
                found = asyncio.run(_streams(host, port, bench, streams))
                row = _row(streams, found, engine["tokens_per_s"][streams])
                rows.append(row)
                print(
                    f"{row.streams:8}{row.tokens_per_s:10.1f}{row.engine_tokens_per_s:10.1f}{row.lost:8.1%}"
                    f"{row.ttft_p50_ms:10.1f}{row.ttft_p99_ms:9.1f}{row.gap_p50_ms:10.2f}{row.gap_p99_ms:9.2f}"
                    f"{row.gap_p99_ms / row.gap_p50_ms:9.2f}",
                    flush=True,
                )
        if output is not None:
            about = {"about": engine["about"], "bench": asdict(bench)}
            output.write_text(json.dumps({**about, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")


def _engine_rates(bench: EngineBench, folder: str, place: Path) -> dict[str, Any]:
    """Tokens per second of the engine alone, by batch: in a process of its own, whose memory is free again before the server
    starts."""
    result = place / "engine.json"
    command = [sys.executable, "-P", "-m", "nybble.service", "bench", "decode", "--model", folder]
    command += ["--batches", ",".join(map(str, bench.batches)), "--contexts", str(_middle(bench))]
    command += ["--tokens", str(bench.tokens), "--output", str(result), *_engine_flags(bench)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(f"the engine alone could not be measured: {done.stderr.strip()[-500:]}")
    found = json.loads(result.read_text())
    return {
        "about": found["about"],
        "tokens_per_s": {row["batch"]: row["tokens_per_s"] for row in found["rows"]},
    }


def _middle(bench: EngineBench) -> int:
    """The context of the middle token of a stream."""
    return max(bench.contexts) + bench.tokens // 2


def _engine_flags(bench: EngineBench) -> list[str]:
    flags = {"device": bench.device, "dtype": bench.dtype, "lm-head": bench.lm_head, "threads": bench.threads}
    flags |= {"dense-copies": bench.dense_copies, "prefill-tokens": bench.prefill_tokens}
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


@contextmanager
def _server(bench: EngineBench, folder: str, place: Path) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-P", "-m", "nybble.service", "serve", folder, "--port", "0"]
    command += ["--max-running", str(max(bench.batches)), "--max-model-len", str(bench.longest)]
    command += ["--max-queue", str(2 * max(bench.batches)), "--prefix-cache", "false", *_engine_flags(bench)]
    log = place / "server.log"
    # What the environment says of another server (its keys, its log) is not this one's.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NYBBLE_")}
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)
    try:
        address = _wait_until_ready(process, log)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> tuple[str, int]:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        text = log.read_bytes()
        found = _LISTENING.search(text)
        if found is not None and b"engine ready" in text:
            return found[1].decode(), int(found[2])
        time.sleep(0.05)
    raise ConfigError(f"the server did not become ready: {log.read_text(errors='replace').strip()[-500:]}")


async def _streams(host: str, port: int, bench: EngineBench, count: int) -> list[_Stream]:
    async with asyncio.timeout(_STREAM_TIMEOUT_S):
        return await asyncio.gather(*(_stream(host, port, bench, i) for i in range(count)))


async def _stream(host: str, port: int, bench: EngineBench, number: int) -> _Stream:
    # Ids of bytes only: any model has them, and no two prompts begin alike.
    prompt = [(number * 7 + i * (number + 3)) % 256 for i in range(max(bench.contexts))]
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": bench.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, port)
    try:
        asked = time.perf_counter()
        writer.write(head.encode() + body)
        await writer.drain()
        arrivals, tokens = [], 0
        async for line in reader:
            # Lines of chunked encoding in between are not ours to mind: an event is one line, and is sent whole.
            if not line.startswith(b"data: {"):
                if line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
                    raise ConfigError(
                        f"the server answered {line.decode().strip()}: {(await reader.read())[-300:]!r}"
                    )
                continue
            if b'"choices":[]' in line:
                tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                break
            if b'"error"' in line:
                raise ConfigError(f"the server ended a stream: {line.decode().strip()[:300]}")
            arrivals.append(time.perf_counter())
    finally:
        writer.close()
    return _Stream(asked, tuple(arrivals), tokens)


def _row(streams: int, found: list[_Stream], engine_tokens_per_s: float) -> ServeRow:
    first = [s.arrivals_s[0] - s.asked_s for s in found]
    # From the moment that all streams run until the first one ends: the engine alone was measured on a full batch too.
    start, end = max(s.arrivals_s[0] for s in found), min(s.arrivals_s[-1] for s in found)
    if end <= start:
        # Streams so short that they never ran all together.
        start, end = min(s.arrivals_s[0] for s in found), max(s.arrivals_s[-1] for s in found)
    arrived = sum(sum(start < t <= end for t in s.arrivals_s) * s.tokens / len(s.arrivals_s) for s in found)
    gaps = [b - a for s in found for a, b in zip(s.arrivals_s, s.arrivals_s[1:], strict=False) if a >= start]
    return ServeRow(
        streams,
        tokens_per_s=arrived / max(end - start, 1e-9),
        ttft_p50_ms=quantile(first, 0.5) * 1e3,
        ttft_p99_ms=quantile(first, 0.99) * 1e3,
        gap_p50_ms=quantile(gaps, 0.5) * 1e3,
        gap_p99_ms=quantile(gaps, 0.99) * 1e3,
        engine_tokens_per_s=engine_tokens_per_s,
    )


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[int(q * (len(values) - 1))] if values else float("nan")
