"""What HTTP costs: CPU of the API process per streamed token, and time it adds to the first byte.

    python benchmarks/api.py [--streams 64] [--step-ms 10] [--seconds 8] [--rounds 3] [--write]

The engine process is replaced by one that computes nothing: it emits one token per running request every step, all of
them in one message, as a batch would. Beside it, in turn, a bare ASGI application on uvicorn (same parser, same event
loop) that sends ready-made events of the same size at the same pace: what no server in Python could be below.

CPU is user and system time of the API process from /proc over a window in which all streams run. The stand-in answers a
new request with its first token at once, so what a client waits for its first event is what the rest adds. Reported is the best
round of each: on a shared machine noise only ever slows down. Writes benchmarks/results/api.md with --write.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MODEL = HERE.parent / "tests" / "data" / "llama-ct-g32"
RESULTS = HERE / "results" / "api.md"
MESSAGES = [{"role": "user", "content": "Say something long about the history of the city. " * 8}]
FIRST_TOKEN_ROUNDS = 40


# --- the engine that computes nothing ---


def engine_main(connection: Any, config: Any) -> None:
    """Takes the place of nybble.service.engine.process:main."""
    from nybble.service.engine.protocol import Abort, Add, EngineStats, Outputs, Shutdown, StepOutput, Token

    step_s = float(os.environ["STEP_MS"]) / 1e3
    connection.send(_engine_info(config))
    left: dict[str, int] = {}
    new: list[str] = []
    started = finished = 0
    next_step_s = time.monotonic()
    while True:
        while connection.poll(None if not left else 0 if new else max(0.0, next_step_s - time.monotonic())):
            message = connection.recv()
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Add):
                started += 1
                left[message.request.request_id] = message.request.sampling.max_tokens
                new.append(message.request.request_id)
            elif isinstance(message, Abort) and left.pop(message.request_id, None) is not None:
                finished += 1
        first = {name for name in new if name in left}
        ready, new = list(first), []
        now = time.monotonic()
        if now >= next_step_s:
            ready += [name for name in left if name not in first]
            next_step_s = max(next_step_s + step_s, now)
        outputs = []
        for name in ready:
            scheduled_s = now if name in first else None
            left[name] -= 1
            reason = None if left[name] else "length"
            if reason:
                del left[name]
                finished += 1
            outputs.append(
                StepOutput(name, (Token(300 + len(outputs) % 200),), reason, scheduled_s=scheduled_s)
            )
        stats = EngineStats(started=started, finished={"length": finished}, running=len(left))
        connection.send(Outputs(tuple(outputs), stats))


def _engine_info(config: Any) -> Any:
    from nybble.service.engine.protocol import EngineInfo, MemoryReport

    return EngineInfo(
        model=config.model,
        architecture="None",
        dtype="bfloat16",
        device="cpu",
        target="none",
        max_model_len=100_000,
        vocab_size=1024,
        eos_token_ids=(),
        kv_blocks=1,
        block_size=16,
        max_running=1024,
        load_seconds=0.0,
        memory=MemoryReport(0, {}),
        kernels=(),
    )


# --- the bare loop ---


async def bare_app(scope: Any, receive: Any, send: Any) -> None:
    """Ready-made events at the engine's pace."""
    if scope["type"] != "http":
        return
    step_s, size = float(os.environ["STEP_MS"]) / 1e3, int(os.environ["EVENT_BYTES"])
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    count = json.loads(body)["max_tokens"]
    piece = b"data: {" + b"x" * (size - 9) + b"\n\n"
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    due_s = time.monotonic()
    for _ in range(count):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        due_s += step_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


# --- servers ---


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


NYBBLE = """
import functools, sys
from nybble.service import cli, server
if __name__ == "__main__":
    server.run = functools.partial(server.run, engine_main="api:engine_main")
    cli.main()
"""
BARE = """
import uvicorn
uvicorn.run("api:bare_app", port=0, log_level="info", access_log=False, loop="uvloop", http="httptools", lifespan="off")
"""


@contextlib.contextmanager
def serve(kind: str, step_ms: float, event_bytes: int) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / f"{kind}_server.py"
        script.write_text(NYBBLE if kind == "nybble" else BARE)
        arguments = ["serve", str(MODEL), "--port", "0", "--max-queue", "1024"] if kind == "nybble" else []
        environment = os.environ | {
            "STEP_MS": str(step_ms),
            "EVENT_BYTES": str(event_bytes),
            "PYTHONPATH": str(HERE),
        }
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen([sys.executable, str(script), *arguments], stderr=out, env=environment)
        try:
            pattern = r"(?:listening|running) on http://[^:]+:(\d+)"
            while not (found := re.search(pattern, log.read_text())):
                if process.poll() is not None:
                    raise RuntimeError(log.read_text())
                time.sleep(0.05)
            server = Server(process, int(found[1]))
            asyncio.run(_wait_ready(server, kind))
            yield server
        finally:
            process.terminate()
            process.wait(10)


async def _wait_ready(server: Server, kind: str) -> None:
    while True:
        async with _request(server, "GET", "/readyz" if kind == "nybble" else None, 1) as (reader, _):
            if b" 200 " in await reader.readline():
                return
        await asyncio.sleep(0.05)


# --- the client ---


@contextlib.asynccontextmanager
async def _request(
    server: Server, method: str, path: str | None, tokens: int
) -> AsyncIterator[tuple[asyncio.StreamReader, float]]:
    """The reader of an answer, and when the request was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 20)
    body = json.dumps({"messages": MESSAGES, "max_tokens": tokens, "stream": True}).encode()
    if path is not None and method == "GET":
        body = b""
    head = f"{method if path else 'POST'} {path or '/v1/chat/completions'} HTTP/1.1\r\nHost: x\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    try:
        yield reader, time.perf_counter()
    finally:
        writer.transport.abort()


@dataclass
class Counter:
    events: int = 0
    nbytes: int = 0


async def _stream(server: Server, tokens: int, counter: Counter) -> None:
    async with _request(server, "POST", "/v1/chat/completions", tokens) as (reader, _):
        while data := await reader.read(1 << 16):
            counter.events += data.count(b"data: {")
            counter.nbytes += len(data)


async def _first_byte_ms(server: Server) -> float:
    async with _request(server, "POST", "/v1/chat/completions", 2) as (reader, sent_s):
        await reader.readuntil(b"data: {")
        return (time.perf_counter() - sent_s) * 1e3


@dataclass
class Result:
    """cpu_us: per event, microseconds. idle_ms, busy_ms: to the first event, medians, without and beside the streams."""

    cpu_us: list[float] = field(default_factory=list)
    idle_ms: list[float] = field(default_factory=list)
    busy_ms: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    event_bytes: int = 0


async def measure(server: Server, args: argparse.Namespace, result: Result) -> None:
    await _first_byte_ms(server)
    result.idle_ms.append(
        statistics.median([await _first_byte_ms(server) for _ in range(FIRST_TOKEN_ROUNDS)])
    )
    counter = Counter()
    tokens = round((args.seconds + 6) * 1000 / args.step_ms)
    streams = [asyncio.create_task(_stream(server, tokens, counter)) for _ in range(args.streams)]
    await asyncio.sleep(1.5)
    cpu, events, nbytes, began_s = server.cpu_seconds(), counter.events, counter.nbytes, time.perf_counter()
    await asyncio.sleep(args.seconds)
    cpu, events = server.cpu_seconds() - cpu, counter.events - events
    result.cpu_us.append(cpu / events * 1e6)
    result.tokens_per_s.append(events / (time.perf_counter() - began_s))
    result.event_bytes = round((counter.nbytes - nbytes) / events)
    result.busy_ms.append(
        statistics.median([await _first_byte_ms(server) for _ in range(FIRST_TOKEN_ROUNDS)])
    )
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    results = {"nybble": Result(), "bare": Result()}
    for _ in range(args.rounds):
        for kind, result in results.items():
            with serve(kind, args.step_ms, max(32, results["nybble"].event_bytes)) as server:
                asyncio.run(measure(server, args, result))
            print(kind, {name: value for name, value in vars(result).items()}, flush=True)
    text = report(results, args)
    print(text)
    if args.write:
        RESULTS.write_text(text)


def report(results: dict[str, Result], args: argparse.Namespace) -> str:
    command = f"python benchmarks/api.py --streams {args.streams} --step-ms {args.step_ms:g} "
    command += f"--seconds {args.seconds:g} --rounds {args.rounds}"
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("uvicorn", "httptools", "uvloop", "fastapi", "nybble")
    )
    lines = [
        "# What HTTP costs",
        "",
        f"{args.streams} streamed chats, one token each every {args.step_ms:g} ms, events of "
        f"{results['nybble'].event_bytes} bytes; {os.cpu_count()} cores shared with the client and the engine's stand-in, "
        f"{platform.system()}, Python {platform.python_version()}; {packages}; {datetime.date.today()}.",
        f"Command: `{command}`",
        "",
        "| | CPU per streamed token, best round | all rounds | tokens/s | first event after, alone | beside the streams |",
        "|---|---|---|---|---|---|",
    ]
    names = {"nybble": "nybble's API process", "bare": "bare uvicorn, ready-made events"}
    for kind, result in results.items():
        rounds = ", ".join(f"{value:.1f}" for value in result.cpu_us)
        lines.append(
            f"| {names[kind]} | {min(result.cpu_us):.1f} us | {rounds} | {max(result.tokens_per_s):.0f} | "
            f"{min(result.idle_ms):.1f} ms | {min(result.busy_ms):.1f} ms |"
        )
    lines += [
        "",
        "The prompt is a chat of about 100 tokens through the template.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
