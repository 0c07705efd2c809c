"""Requests of every kind to a server on this machine, in waves: few at a time, more than run together, more than the
queue takes."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

# What the server is started with, so that the waves reach its limits: --max-running and --max-queue.
MAX_RUNNING, MAX_QUEUE = 6, 16
SERVER_FLAGS = ("--max-running", str(MAX_RUNNING), "--max-queue", str(MAX_QUEUE), "--gemm-sample-every", "4")
# Parts of a wave, and how many clients ask at the same time.
WAVE = ((0.25, 2), (0.35, MAX_RUNNING), (0.25, MAX_QUEUE + 8), (0.15, 1))

# Of many prompts the beginning is the same, as with a system prompt.
SHARED = (
    "You are a careful assistant. Answer in plain words, in one or two sentences, and say so when you do not know. "
    "Do not repeat the question. "
)
SUBJECTS = ("a river", "the moon", "bread", "a bicycle", "rain", "an old clock", "chess", "a lighthouse")


@dataclass
class Traffic:
    """statuses counts the answers by HTTP status; 0 stands for a client that left."""

    url: str
    random: random.Random = field(default_factory=lambda: random.Random(0))
    statuses: Counter[int] = field(default_factory=Counter)

    async def run(self, wave_s: float, stop: Callable[[], bool]) -> None:
        """One wave after another, of wave_s each, until stop() says so."""
        started_s = time.monotonic()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as http:

            async def client(number: int) -> None:
                while not stop():
                    if number < _clients((time.monotonic() - started_s) / wave_s % 1.0):
                        await self._ask(http)
                    else:
                        await asyncio.sleep(0.1)

            async with asyncio.TaskGroup() as group:
                for number in range(max(clients for _, clients in WAVE)):
                    group.create_task(client(number))

    async def _ask(self, http: httpx.AsyncClient) -> None:
        body = self._body()
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if body["stream"] and self.random.random() < 0.05:
                await anext(answer.aiter_bytes(), b"")
                self.statuses[0] += 1
                return
            await answer.aread()
        self.statuses[answer.status_code] += 1
        if answer.status_code == 429:
            # Sooner than Retry-After may ask for: that is what fills a queue.
            await asyncio.sleep(1.5)

    def _body(self) -> dict[str, Any]:
        choose = self.random.random
        beginning = SHARED if choose() < 0.6 else f"Note {self.random.randrange(10**6)}: "
        prompt = f"{beginning}Tell me about {self.random.choice(SUBJECTS)}, please. " * self.random.choice(
            (1, 1, 2)
        )
        body = {"prompt": prompt, "max_tokens": self.random.choice((8, 24, 48)), "stream": choose() < 0.7}
        return body | {"temperature": 9} if choose() < 0.03 else body


def _clients(at: float) -> int:
    """at: the part of the wave that is over, 0 to 1."""
    for part, clients in WAVE:
        if at < part:
            return clients
        at -= part
    return WAVE[-1][1]
