"""Limits: the size of a body, requests in flight, an engine that is not there."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
from fake_engine import ERROR_AFTER_3, SLOW
from http_fixtures import local_app, parse_metrics

from nybble.service.api.middleware import LINGER_S
from nybble.service.client import EngineState
from nybble.service.text import TextCodec

pytestmark = pytest.mark.anyio


def post_scope() -> dict:
    """A POST to /v1/completions as a server hands it to an application."""
    return {
        **{"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions"},
        **{"query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1"},
        **{"headers": [(b"content-type", b"application/json")], "client": None, "server": None},
    }


async def metrics(http: httpx.AsyncClient) -> dict[str, float]:
    return parse_metrics((await http.get("/metrics")).text)


def test_a_body_of_10_mb_is_too_large(http: httpx.Client) -> None:
    response = http.post("/v1/completions", content=b"x" * 10_000_000)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_a_body_in_chunks_is_measured_too(http: httpx.Client) -> None:
    def chunks():
        for _ in range(100):
            yield b"x" * 100_000

    response = http.post("/v1/completions", content=chunks())
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


async def test_a_refused_body_is_read_on_for_as_long_as_it_comes(codec: TextCodec) -> None:
    """Closing on a client that still sends would reset the connection, and take the answer with it."""
    left = 7
    pause_s = LINGER_S[1] / 4

    async def receive() -> dict:
        nonlocal left
        if left < 7:
            await asyncio.sleep(pause_s)
        left -= 1
        return {"type": "http.request", "body": b"x" * 2000, "more_body": left > 0}

    sent: list[tuple[int, dict]] = []

    async def send(message: dict) -> None:
        sent.append((left, message))

    async with local_app(codec, body_limit_bytes=1024) as local:
        await local.app(post_scope(), receive, send)
    assert sent[0][1]["status"] == 413 and sent[1][1]["body"] and sent[1][1]["more_body"]
    assert [at for at, _ in sent] == [6, 6, 0] and not sent[2][1]["more_body"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_on_regardless_still_gets_the_answer(server_url: str, chunked: bool) -> None:
    """And with it the end of the connection, though it never stops sending."""
    host, port = server_url.removeprefix("http://").split(":")
    framing = "Transfer-Encoding: chunked" if chunked else "Content-Length: 30000000"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{framing}\r\n\r\n"
    piece = b"f4240\r\n" + b"x" * 1_000_000 + b"\r\n" if chunked else b"x" * 1_000_000
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(head.encode())
        for _ in range(30):
            connection.sendall(piece)
        if chunked:
            connection.sendall(b"0\r\n\r\n")
        received = b""
        while data := connection.recv(4096):
            received += data
    assert received.startswith(b"HTTP/1.1 413 ") and b'"body_too_large"' in received


async def test_the_limit_is_exact(codec: TextCodec) -> None:
    body = b'{"prompt": "Hello"' + b" " * (1024 - 19) + b"}"
    assert len(body) == 1024

    async def chunks(data: bytes) -> AsyncIterator[bytes]:
        yield data[:500]
        yield data[500:]

    async with local_app(codec, body_limit_bytes=1024) as local:
        for data, status in ((body, 200), (body + b" ", 413)):
            for content in (data, chunks(data)):
                headers = {"Content-Type": "application/json"}
                response = await local.http.post("/v1/completions", content=content, headers=headers)
                assert response.status_code == status
        assert (await metrics(local.http))['nybble_rejected_total{reason="body_too_large"}'] == 2


async def test_beyond_the_queue_the_answer_is_429(codec: TextCodec) -> None:
    async with local_app(codec, max_queue=3) as local:
        slow = {"prompt": [SLOW, 100], "max_tokens": 4, "n": 2}
        running = asyncio.create_task(local.http.post("/v1/completions", json=slow))
        while local.client.in_flight < 2:
            await asyncio.sleep(0.001)
        refused = await local.http.post("/v1/completions", json={"prompt": "x", "n": 2})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert (await local.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        assert (await running).status_code == 200
        assert (await local.http.post("/v1/completions", json={"prompt": "x", "n": 2})).status_code == 200
        values = await metrics(local.http)
        assert values['nybble_rejected_total{reason="queue_full"}'] == 1
        # From the start, so that a rate sees the first one.
        assert values['nybble_rejected_total{reason="deadline"}'] == 0


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (EngineState.LOADING, "loading"),
        (EngineState.DOWN, "engine_down"),
        (EngineState.DRAINING, "draining"),
    ],
)
async def test_without_an_engine_generation_is_503(codec: TextCodec, state: EngineState, code: str) -> None:
    async with local_app(codec) as local:
        local.client.state = state
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/completions", {"prompt": "x", "stream": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            response = await local.http.post(path, json=body)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == code
            assert int(response.headers["retry-after"]) > 0
        assert (await local.http.get("/v1/kernels")).status_code == 503
        assert (await local.http.get("/livez")).status_code == 200
        for path in ("/readyz", "/health"):
            response = await local.http.get(path)
            assert response.status_code == 503
            assert response.json()["status"] == state


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_error_before_the_first_text_has_its_status(codec: TextCodec, stream: bool) -> None:
    async with local_app(codec) as local:
        # The stop string holds back all the text there is before the error.
        body = {"prompt": [ERROR_AFTER_3, *codec.encode("abc")], "stop": "abcd", "stream": stream}
        response = await local.http.post("/v1/completions", json=body)
        assert response.status_code == 500
        assert "logits are not finite" in response.json()["error"]["message"]
        assert response.json()["error"]["code"] == "generation_failed"


async def test_an_engine_error_in_a_stream_is_its_last_event(codec: TextCodec) -> None:
    async with local_app(codec) as local:
        body = {"prompt": [ERROR_AFTER_3, *codec.encode("abc")], "stream": True, "n": 2}
        response = await local.http.post("/v1/completions", json=body)
        assert response.status_code == 200
        events = [event for event in response.text.split("\n\n") if event]
        assert '"error"' in events[-1] and "logits are not finite" in events[-1]
        assert not any('"error"' in event for event in events[:-1])
        assert "[DONE]" not in response.text
        # The other choice does not go on for nobody.
        await asyncio.sleep(0.01)
        assert local.client.in_flight == 0 and not local.client.fake.sequences


async def test_an_unexpected_exception_is_an_error_object_too(codec: TextCodec, monkeypatch) -> None:
    async with local_app(codec) as local:
        monkeypatch.setattr(local.client, "submit", lambda requests: 1 / 0)
        response = await local.http.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "ZeroDivisionError" not in response.text
        assert (await metrics(local.http))[
            'nybble_http_requests_total{route="/v1/completions",status="500"}'
        ] == 1


async def test_an_unexpected_exception_in_a_stream_is_its_last_event(codec: TextCodec, monkeypatch) -> None:
    async with local_app(codec) as local:
        advance = local.client.fake.advance

        def advance_or_fail(sequence):
            output = advance(sequence)
            # As a fault of ours would: nobody has thought of it.
            return output if sequence.done < 4 else replace(output, tokens=(None,))

        monkeypatch.setattr(local.client.fake, "advance", advance_or_fail)
        response = await local.http.post(
            "/v1/completions", json={"prompt": "abc", "max_tokens": 50, "stream": True}
        )
        events = [event for event in response.text.split("\n\n") if event]
        assert response.status_code == 200 and len(events) > 1
        assert [('"internal_error"' in event) for event in events] == [False] * (len(events) - 1) + [True]
        assert "[DONE]" not in response.text and "Traceback" not in response.text
        await asyncio.sleep(0.01)
        assert local.client.in_flight == 0 and not local.client.fake.sequences


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("begun", [False, True], ids=["waiting", "generating"])
async def test_a_request_that_the_server_cancels_ends_once_and_is_aborted(
    codec: TextCodec, stream: bool, begun: bool
) -> None:
    """As uvicorn does when the time for the last answers is over."""
    async with local_app(codec) as local:
        body = json.dumps({"prompt": [SLOW, 100], "max_tokens": 200, "stream": stream}).encode()
        incoming = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[dict] = []
        if not begun:
            local.client.fake.advance = lambda sequence: None

        async def receive() -> dict:
            return incoming.pop() if incoming else await asyncio.Future()

        async def send(message: dict) -> None:
            sent.append(message)

        task = asyncio.create_task(local.app(post_scope(), receive, send))
        while not local.client.in_flight or (stream and begun and len(sent) < 3):
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
        starts = [message["status"] for message in sent if message["type"] == "http.response.start"]
        if stream and begun:
            # Cut off: whoever reads sees that the end is missing.
            assert starts == [200] and sent[-1]["more_body"]
        else:
            assert starts == [503] and not sent[-1].get("more_body")
            assert json.loads(sent[-1]["body"])["error"]["code"] == "draining"
        assert local.client.in_flight == 0 and not local.client.fake.sequences
        assert (await metrics(local.http))['nybble_requests_total{finish_reason="abort"}'] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_is_too_slow_for_its_limit_is_408(codec: TextCodec, stream: bool) -> None:
    async with local_app(codec) as local:
        # The stop string holds all text back, so that no byte of the answer has left.
        body = {"prompt": [SLOW, 100], "max_tokens": 200, "timeout_s": 0.12, "stream": stream, "n": 2}
        body["stop"] = codec.decode([100]) * 200
        response = await local.http.post("/v1/completions", json=body)
        assert response.status_code == 408
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("deadline_exceeded", "timeout_error")
        assert local.client.in_flight == 0 and not local.client.fake.sequences
        values = await metrics(local.http)
        assert values['nybble_rejected_total{reason="deadline"}'] == 1
        assert values['nybble_requests_total{finish_reason="abort"}'] == 2


async def test_in_a_stream_that_has_begun_the_limit_is_its_last_event(codec: TextCodec) -> None:
    async with local_app(codec, request_timeout_s=0.2) as local:
        # The server's limit is less than the request's own.
        body = {"prompt": [SLOW, 100], "max_tokens": 200, "timeout_s": 60, "stream": True}
        response = await local.http.post("/v1/completions", json=body)
        events = [event for event in response.text.split("\n\n") if event]
        assert response.status_code == 200 and len(events) > 1
        assert '"deadline_exceeded"' in events[-1] and "[DONE]" not in response.text
        assert local.client.in_flight == 0
        assert (await metrics(local.http))['nybble_rejected_total{reason="deadline"}'] == 1


async def test_a_request_within_its_limit_is_untouched(codec: TextCodec) -> None:
    async with local_app(codec, request_timeout_s=30) as local:
        response = await local.http.post(
            "/v1/completions", json={"prompt": "x", "timeout_s": 20, "stream": True}
        )
        assert response.text.endswith("data: [DONE]\n\n")


async def test_retry_after_is_the_time_until_there_is_room(codec: TextCodec) -> None:
    async with local_app(codec, max_queue=4) as local:
        client = local.client
        assert client.retry_after_s() == 1, "nothing has finished yet"
        now = time.monotonic()
        # Of late, one request every half second.
        client._finish_times.extend(now - 5 + i / 2 for i in range(10))
        assert [client.retry_after_s(places) for places in (1, 3, 7, 1000)] == [1, 2, 4, 60]
        slow = {"prompt": [SLOW, 100], "max_tokens": 4, "n": 4}
        running = asyncio.create_task(local.http.post("/v1/completions", json=slow))
        while client.in_flight < 4:
            await asyncio.sleep(0.001)
        refused = await local.http.post("/v1/completions", json={"prompt": "x", "n": 3})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
        assert (await running).status_code == 200


async def test_a_body_that_does_not_arrive_is_408(codec: TextCodec) -> None:
    async def half() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(1)
        yield b"}"

    async with local_app(codec, body_timeout_s=0.1) as local:
        response = await local.http.post("/v1/completions", content=half())
        assert (response.status_code, response.headers["connection"]) == (408, "close")
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("body_timeout", "timeout_error")
        assert "0.1 s" in error["message"]
        assert (await metrics(local.http))['nybble_rejected_total{reason="body_timeout"}'] == 1


def test_after_a_refused_body_the_connection_ends(http: httpx.Client) -> None:
    assert http.post("/v1/completions", content=b"x" * 10_000_000).headers["connection"] == "close"


@pytest.mark.parametrize("head", [b"X: " + b"x" * 3_000_000, b"X: x\r\n" * 20_000], ids=["one", "many"])
def test_headers_have_a_limit(server_url: str, head: bytes) -> None:
    host, port = server_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n" + head)
        received = b""
        while data := connection.recv(4096):
            received += data
    assert received.startswith(b"HTTP/1.1 431 ") and received.count(b"HTTP/1.1") == 1
    assert b'"headers_too_large"' in received


def test_headers_within_the_limit_are_read(http: httpx.Client) -> None:
    assert http.get("/livez", headers={"X": "x" * 60_000}).status_code == 200
