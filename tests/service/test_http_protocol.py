"""nybble.service.http_protocol: what clients send that is no request, or one among others, and what becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from nybble.service import http_protocol
from nybble.service.api.sse import disconnected
from nybble.service.http_protocol import LimitedProtocol

pytestmark = pytest.mark.anyio


@dataclass
class App:
    """Answers /whole and /stream when `go` is set, in the latter case after a first piece; notes what it has seen."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    begun: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            self.left.append(path)
            return
        self.begun.append(path)
        head = {"type": "http.response.start", "status": 200}
        if path == "/stream":
            await send(head)
            await send({"type": "http.response.body", "body": b"first,", "more_body": True})
        going, leaving = asyncio.ensure_future(self.go.wait()), asyncio.ensure_future(disconnected(receive))
        await asyncio.wait((going, leaving), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            self.left.append(path)
        elif path == "/stream":
            await send({"type": "http.response.body", "body": b"last", "more_body": False})
        else:
            await send({**head, "headers": [(b"content-length", b"5")]})
            await send({"type": "http.response.body", "body": b"whole"})
        going.cancel()
        leaving.cancel()


PIECE = bytes(1 << 20)


@dataclass
class Endless:
    """/for-ever streams pieces until the client has gone; else `pieces` in one answer, with its length."""

    pieces: int = 32
    sent: int = 0
    left: bool = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        leaving = asyncio.ensure_future(disconnected(receive))
        if scope["path"] == "/for-ever":
            await send({"type": "http.response.start", "status": 200})
            while not leaving.done():
                await send({"type": "http.response.body", "body": PIECE, "more_body": True})
                self.sent += 1
                await asyncio.sleep(0)
            self.left = True
        else:
            length = b"%d" % (self.pieces * len(PIECE))
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
            )
            await send({"type": "http.response.body", "body": PIECE * self.pieces})
        leaving.cancel()


@dataclass
class Client:
    incoming: asyncio.StreamReader
    outgoing: asyncio.StreamWriter
    state: ServerState

    def send(self, data: bytes) -> None:
        self.outgoing.write(data)

    async def rest(self) -> bytes:
        return await asyncio.wait_for(self.incoming.read(), 30)


@contextlib.asynccontextmanager
async def connected(app: Any) -> AsyncIterator[Client]:
    config = uvicorn.Config(app, http=LimitedProtocol, lifespan="off", log_config=None)
    config.load()
    loop, state = asyncio.get_running_loop(), ServerState()

    def protocol() -> LimitedProtocol:
        return LimitedProtocol(config=config, server_state=state, app_state={})

    async with await loop.create_server(protocol, "127.0.0.1", 0) as server:
        client = Client(*await asyncio.open_connection(*server.sockets[0].getsockname()), state)
        try:
            yield client
        finally:
            client.outgoing.transport.abort()
            await until(lambda: not state.connections)


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def request(path: str, version: str = "1.1", body: bytes = b"") -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def error_of(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and b"connection: close" in head
    return int(head.split()[1]), error["code"]


GARBAGE = {
    "bytes": b"\x00\x01\x02\r\n\r\n",
    "TLS": bytes.fromhex("16030100a5010000a10303") + bytes(160),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "unknown method": b"BREW /whole HTTP/1.1\r\nHost: x\r\n\r\n",
    "two lengths": b"POST /whole HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "length and chunks": b"POST /whole HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    "negative length": b"POST /whole HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    "no chunk": b"POST /whole HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "space in a name": b"GET /whole HTTP/1.1\r\nBad Name: x\r\n\r\n",
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
async def test_what_is_no_http_is_answered_by_an_error_object(data: bytes) -> None:
    app = App()
    async with connected(app) as client:
        client.send(data)
        assert error_of(await client.rest()) == (400, "invalid_http")
    assert app.begun == []


async def test_a_request_that_turns_out_to_be_none_is_answered_once(caplog: pytest.LogCaptureFixture) -> None:
    async def eager(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async with connected(eager) as client:
        client.send(b"POST /whole HTTP/1.1\r\nTransfer-Encoding: identity\r\n\r\nhello")
        assert error_of(await client.rest()) == (400, "invalid_http")
    assert "Exception" not in caplog.text


@pytest.mark.parametrize("path", ["/whole", "/stream"])
@pytest.mark.parametrize(
    "bad", [GARBAGE["bytes"], b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000], ids=["garbage", "huge"]
)
async def test_an_answer_under_way_is_finished_untouched(path: str, bad: bytes) -> None:
    app = App()
    async with connected(app) as client:
        client.send(request(path))
        await until(lambda: app.begun == [path])
        client.send(bad + request("/whole"))
        await asyncio.sleep(0.05)
        app.go.set()
        answer = await client.rest()
    assert answer.count(b"HTTP/1.1") == 1 and b"error" not in answer
    assert answer.endswith(b"whole" if path == "/whole" else b"6\r\nfirst,\r\n4\r\nlast\r\n0\r\n\r\n")
    assert app.begun == [path]


async def test_a_body_that_turns_into_garbage_is_a_bad_request() -> None:
    app = App()
    async with connected(app) as client:
        client.send(b"POST /whole HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await asyncio.sleep(0.05)
        client.send(b"zz\r\n")
        assert error_of(await client.rest()) == (400, "invalid_http")
    await until(lambda: app.left == ["/whole"])


async def test_pipelined_requests_are_answered_in_order() -> None:
    app = App()
    async with connected(app) as client:
        client.send(request("/stream") + request("/whole", body=b"abc") + request("/stream", "1.0"))
        app.go.set()
        answer = await client.rest()
    assert app.begun == ["/stream", "/whole", "/stream"]
    assert answer.count(b"HTTP/1.1 200") == 3 and answer.endswith(b"\r\n\r\nfirst,last")


async def test_of_pipelined_requests_the_one_under_way_hears_that_its_client_has_gone() -> None:
    app = App()
    async with connected(app) as client:
        client.send(request("/stream") + request("/whole") + request("/whole"))
        await until(lambda: app.begun == ["/stream"])
        client.outgoing.transport.abort()
        await until(lambda: app.left == ["/stream"])
        app.go.set()
        await asyncio.sleep(0.05)
    assert app.begun == ["/stream"], "the others were never begun"


@pytest.mark.parametrize("path", ["/whole", "/stream"])
async def test_an_old_client_gets_no_chunks_but_the_end_of_the_connection(path: str) -> None:
    app = App()
    app.go.set()
    async with connected(app) as client:
        client.send(request(path, "1.0"))
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    assert body == (b"whole" if path == "/whole" else b"first,last")
    assert b"connection: close" in head and b"transfer-encoding" not in head


@pytest.mark.parametrize(
    "begun", [b"", b"POST /whole HT", request("/whole") + b"POST /who"], ids=["silent", "begun", "next"]
)
async def test_a_head_that_does_not_come_ends_the_connection(begun: bytes, monkeypatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    app = App()
    app.go.set()
    async with connected(app) as client:
        client.send(begun)
        answer = await client.rest()
        if begun.startswith(b"POST /whole HTTP"):
            assert answer.startswith(b"HTTP/1.1 200")
            answer = answer[answer.index(b"whole") + len(b"whole") :]
        if begun:
            assert error_of(answer) == (408, "headers_timeout")
        else:
            assert answer == b""


async def test_a_head_in_time_may_have_a_body_and_an_answer_that_take_longer(monkeypatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    app = App()
    async with connected(app) as client:
        client.send(b"POST /whole HTTP/1.1\r\nContent-Length: 2\r\n\r\na")
        await asyncio.sleep(0.5)
        client.send(b"b")
        await asyncio.sleep(0.5)
        app.go.set()
        assert (await asyncio.wait_for(client.incoming.readuntil(b"whole"), 30)).startswith(b"HTTP/1.1 200")


async def test_a_client_that_never_reads_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "READ_TIMEOUT_S", 0.2)
    app = Endless()
    async with connected(app) as client:
        client.send(request("/for-ever"))
        await until(lambda: app.left)
    assert app.sent


@pytest.mark.parametrize("keep", [b"", b"Connection: close\r\n"], ids=["keep-alive", "close"])
async def test_an_answer_that_nobody_reads_does_not_keep_its_connection(
    keep: bytes, monkeypatch: Any
) -> None:
    monkeypatch.setattr(http_protocol, "READ_TIMEOUT_S", 0.2)
    async with connected(Endless()) as client:
        client.send(request("/whole").replace(b"Host: x\r\n", b"Host: x\r\n" + keep))
        await until(lambda: client.state.total_requests)
        await until(lambda: not client.state.connections)


async def test_a_client_that_reads_slowly_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In ten times as long as it may read nothing."""
    monkeypatch.setattr(http_protocol, "READ_TIMEOUT_S", 0.3)
    async with connected(Endless(pieces=30)) as client:
        client.send(request("/whole"))
        got = b""
        while len(got) < 30 * len(PIECE):
            got += await client.incoming.readexactly(min(1 << 20, 30 * len(PIECE) - len(got)))
            await asyncio.sleep(0.1)
    assert got.startswith(b"HTTP/1.1 200 OK")
