"""Users who ask again and again while what serves them breaks, and what became of each request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from fake_engine import SLOW

LIMIT_S = 60.0
# Tokens, one each 50 ms.
SHORT, LONG = 30, 200


def body(max_tokens: int, *, stream: bool = False, first: int = 100) -> dict[str, Any]:
    return {"prompt": [SLOW, first, first + 1], "max_tokens": max_tokens, "stream": stream}


@dataclass
class Outcome:
    """status 0: the connection ended before the answer was whole. events: lines of a stream."""

    stream: bool
    status: int
    text: str = ""
    events: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        if self.status != 200:
            return False
        return self.events[-1:] == ("data: [DONE]",) if self.stream else self.text != ""

    @property
    def told(self) -> bool:
        """Whether the reader of a stream that is not whole can know: by an error event or by the connection."""
        return bool(self.events) and (self.status == 0 or '"error"' in self.events[-1])


async def ask(http: httpx.AsyncClient, *, stream: bool) -> Outcome:
    events: list[str] = []
    asked = body(SHORT, stream=stream)
    try:
        if not stream:
            answer = await http.post("/v1/completions", json=asked)
            text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
            return Outcome(False, answer.status_code, text)
        async with http.stream("POST", "/v1/completions", json=asked) as answer:
            async for line in answer.aiter_lines():
                if line:
                    events.append(line)
            return Outcome(True, answer.status_code, events=tuple(events))
    except (httpx.RemoteProtocolError, httpx.ReadError):
        return Outcome(stream, 0, events=tuple(events))


@dataclass
class Load:
    """Users, who ask in turn for a whole answer and for a stream."""

    http: httpx.AsyncClient
    ended: list[Outcome] = field(default_factory=list)
    over: bool = False

    async def user(self) -> None:
        for stream in itertools.cycle((False, True)):
            if self.over:
                return
            self.ended.append(await ask(self.http, stream=stream))

    async def more(self, count: int) -> None:
        """Waits until so many more requests have ended."""
        before = len(self.ended)
        await until(lambda: len(self.ended) >= before + count)


@contextlib.asynccontextmanager
async def under_load(url: str, users: int = 12) -> AsyncIterator[Load]:
    """Ends once every request has."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, limits=limits) as http:
        load = Load(http)
        asking = [asyncio.create_task(load.user()) for _ in range(users)]
        yield load
        load.over = True
        await asyncio.gather(*asking)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def expected_text(url: str) -> str:
    """Of a prompt that has the same answer as the users', without delays."""
    asked = {"prompt": [100, 101], "max_tokens": SHORT}
    return httpx.post(f"{url}/v1/completions", json=asked, timeout=LIMIT_S).json()["choices"][0]["text"]


def check(outcomes: list[Outcome], text: str) -> None:
    """Whole answers are right, and only streams that had begun are lost, whose readers are told."""
    assert all(one.text == text for one in outcomes if one.whole and not one.stream)
    lost = [one for one in outcomes if not one.whole]
    assert all(one.stream and one.told for one in lost), lost


@contextlib.contextmanager
def streaming(url: str, count: int, max_tokens: int = LONG) -> Iterator[list[Iterator[str]]]:
    """Streams of which the first event has been read. An iterator that is dropped would close its stream."""
    with contextlib.ExitStack() as stack:
        reading = []
        for i in range(count):
            asked = body(max_tokens, stream=True, first=100 + i)
            stream = httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=LIMIT_S)
            lines = stack.enter_context(stream).iter_lines()
            assert next(lines).startswith("data: ")
            reading.append(lines)
        yield reading


def how_it_ended(events: Iterator[str]) -> str:
    """ "done", "error" (the last event is one), "broken" (the connection says so) or "silent"."""
    last = ""
    try:
        for line in events:
            last = line or last
    except (httpx.RemoteProtocolError, httpx.ReadError):
        return "broken"
    return "done" if last == "data: [DONE]" else "error" if '"error"' in last else "silent"
