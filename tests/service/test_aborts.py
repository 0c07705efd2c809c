"""A thousand clients that go away, 64 at a time, at every stage of a request; the server is then as it was."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest
from http_fixtures import ServerProcess, run_server
from load import Reader, post

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

CHECKPOINT = Path(__file__).parents[1] / "data" / "llama-ct-g32"
FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--lm-head", "keep", "--threads", "1"),
    *(
        "--max-model-len",
        "512",
        "--kv-cache-bytes",
        "8000000",
        "--max-running",
        "8",
        "--prefill-tokens",
        "64",
    ),
)
ABORTS, CONCURRENT = 1000, 64
BODY = {"prompt": [5] * 200, "max_tokens": 300, "ignore_eos": True}


async def leave_at(server: ServerProcess, stage: int, random_s: float) -> None:
    """0: at once, in the queue mostly. 1: a little later, in prefill or before the answer. 2: after the first tokens.
    3: the same, of several choices, some of which wait. 4: while a whole answer is being made."""
    stream = stage in (2, 3)
    reader = Reader(pieces=2) if stream else Reader(leave_after_s=0.0 if stage == 0 else random_s)
    body = BODY | {"stream": stream or stage == 0, "n": 3 if stage == 3 else 1}
    answer = await post(server.url, "/v1/completions", body, reader)
    assert answer is None, "a client that left has no answer"


async def settled(server: ServerProcess) -> dict[str, float]:
    deadline_s = time.monotonic() + 10
    while True:
        metrics = await asyncio.to_thread(server.metrics)
        ended = sum(value for name, value in metrics.items() if name.startswith("nybble_requests_total{"))
        started, running = metrics["nybble_requests_started_total"], metrics["nybble_requests_running"]
        waiting = metrics["nybble_requests_waiting"]
        assert started == ended + running + waiting
        if running == waiting == 0:
            return metrics
        assert time.monotonic() < deadline_s, "what nobody reads goes on"
        await asyncio.sleep(0.02)


async def steps_of_one_request(server: ServerProcess, token: int) -> float:
    """What stands for the time to the first token, and to the rest: the engine steps that a request takes alone."""
    before = (await settled(server))["nybble_engine_steps_total"]
    body = {"prompt": [token] * 150, "max_tokens": 5, "ignore_eos": True}
    answer = await post(server.url, "/v1/completions", body)
    assert answer is not None and answer.status == 200
    return (await settled(server))["nybble_engine_steps_total"] - before


async def test_a_thousand_aborts_leave_nothing_behind(tmp_path: Path) -> None:
    with run_server(CHECKPOINT, tmp_path / "log", *FLAGS, real=True) as server:
        server.wait_listening()
        server.wait_ready()
        alone = await steps_of_one_request(server, 7)
        chance = random.Random(2)
        free = asyncio.Semaphore(CONCURRENT)

        async def one(number: int) -> None:
            async with free:
                await leave_at(server, number % 5, chance.uniform(0.001, 0.2))

        async with asyncio.TaskGroup() as clients:
            for number in range(ABORTS):
                clients.create_task(one(number))
        metrics = await settled(server)
        assert metrics["nybble_kv_cache_usage_ratio"] == 0
        assert metrics['nybble_requests_total{finish_reason="abort"}'] >= ABORTS / 2
        assert metrics['nybble_requests_total{finish_reason="error"}'] == 0
        assert await steps_of_one_request(server, 8) == alone
        assert "Traceback" not in server.log.read_text()
