"""The gateway of deploy/ray over replicas made here: what is tried again, and where, and what the client gets. No Ray."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nybble.service.settings import Settings

sys.path.insert(0, str(Path(os.environ.get("NYBBLE_DEPLOY") or Path(__file__).parents[2] / "deploy") / "ray"))

from nybble_ray.gateway import PROMPT_CHARS, TRIES, build_gateway, prompt_of
from nybble_ray.messages import Call, Part


class Gone(Exception):
    """A replica went away."""


def answer(replica: str, status: int, *pieces: str, **headers: str) -> list[Part]:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    start = {"type": "http.response.start", "status": status, "headers": raw}
    bodies = [
        {"type": "http.response.body", "body": piece.encode(), "more_body": i < len(pieces) - 1}
        for i, piece in enumerate(pieces)
    ]
    return [Part(replica, [start, bodies[0]]), *(Part(replica, [body]) for body in bodies[1:])]


class Replicas:
    """Each call takes the next of what is to happen: parts, and what is raised after them."""

    def __init__(self, *happens: list[Part | Exception]) -> None:
        self.names = {"a": "node1", "b": "node2"}
        self.calls: list[Call] = []
        self.closed = 0
        self._happens = list(happens)

    async def ask(self, call: Call) -> AsyncGenerator[Part, None]:
        self.calls.append(call)
        try:
            for one in self._happens.pop(0):
                if isinstance(one, Exception):
                    raise one
                yield one
        finally:
            self.closed += 1

    def client(self, **settings: Any) -> httpx.AsyncClient:
        app = build_gateway(Settings(model="tiny", **settings), self.ask, lambda: self.names, (Gone,))
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


async def post(replicas: Replicas, **fields: Any) -> httpx.Response:
    async with replicas.client() as http:
        return await http.post("/v1/completions", json={"prompt": "hello", **fields})


OK = answer("b", 200, "whole")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("first", "avoided"),
    [
        ([Gone()], set()),
        (answer("a", 503, "loading", retry_after="5"), {"a"}),
        (answer("a", 429, "full"), {"a"}),
    ],
    ids=["died", "503", "429"],
)
async def test_what_has_not_begun_is_tried_again_elsewhere(first: Any, avoided: set[str]) -> None:
    replicas = Replicas(first, OK)
    got = await post(replicas)
    assert (got.status_code, got.text) == (200, "whole")
    first_call, second_call = replicas.calls
    assert second_call.avoid == avoided
    assert second_call.body == first_call.body == b'{"prompt":"hello"}'
    assert replicas.closed == 2


@pytest.mark.anyio
@pytest.mark.parametrize("status", [200, 400, 401, 404, 408, 413, 500])
async def test_another_answer_is_the_answer(status: int) -> None:
    replicas = Replicas(answer("a", status, "text"), OK)
    assert (await post(replicas)).status_code == status
    assert len(replicas.calls) == 1


@pytest.mark.anyio
async def test_a_stream_that_has_begun_ends_with_an_error_and_is_not_begun_again() -> None:
    replicas = Replicas([answer("a", 200, "data: 1\n\n", "data: 2\n\n", "more")[0], Gone()], OK)
    got = await post(replicas, stream=True)
    first, last = got.text.removesuffix("\n\n").split("\n\n")
    assert first == "data: 1"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_down"
    assert len(replicas.calls) == 1


@pytest.mark.anyio
async def test_the_last_try_is_the_answer() -> None:
    dead = Replicas(*[[Gone()]] * TRIES)
    got = await post(dead)
    assert (got.status_code, got.json()["error"]["code"]) == (503, "engine_down")
    assert len(dead.calls) == TRIES
    full = Replicas(*[answer("a", 429, "full", retry_after="7")] * TRIES)
    got = await post(full)
    assert (got.status_code, got.text, got.headers["retry-after"]) == (429, "full", "7")
    assert len(full.calls) == TRIES


@pytest.mark.anyio
async def test_without_a_replica_it_says_so() -> None:
    replicas = Replicas()
    replicas.names = {}
    got = await post(replicas)
    assert (got.status_code, got.json()["error"]["code"], got.headers["retry-after"]) == (503, "loading", "5")


@pytest.mark.anyio
async def test_metrics_are_those_of_one_replica() -> None:
    replicas = Replicas(answer("b", 200, "metrics of b"))
    async with replicas.client() as http:
        targets = (await http.get("/metrics/targets")).json()
        assert [one["labels"]["instance"] for one in targets] == ["a", "b"]
        labels = targets[1]["labels"]
        assert (targets[1]["targets"], labels["node"]) == (["gateway"], "node2")
        got = await http.get(
            f"http://gateway{labels['__metrics_path__']}", params={"replica": labels["__param_replica"]}
        )
        assert got.text == "metrics of b"
        (call,) = replicas.calls
        assert (call.only, call.scope["path"], call.scope["query_string"]) == ("b", "/metrics", b"")
        for path in ("/metrics", "/metrics?replica=c", "/v1/kernels?replica=c"):
            refused = await http.get(path)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "replica")


@pytest.mark.anyio
@pytest.mark.parametrize("happens", [[Gone()], answer("a", 200, "of another")], ids=["died", "another"])
async def test_another_replica_does_not_answer_for_the_one_that_was_named(happens: Any) -> None:
    replicas = Replicas(happens, OK)
    async with replicas.client() as http:
        got = await http.get("/metrics?replica=b")
    assert (got.status_code, got.json()["error"]["code"]) == (503, "engine_down")
    assert len(replicas.calls) == 1


@pytest.mark.anyio
async def test_a_body_that_is_too_large_goes_nowhere() -> None:
    replicas = Replicas(OK)
    async with replicas.client(body_limit_bytes=1024) as http:
        got = await http.post("/v1/completions", content=b"x" * 1025)
    assert (got.status_code, got.json()["error"]["code"]) == (413, "body_too_large")
    assert not replicas.calls


@pytest.mark.anyio
async def test_a_client_that_leaves_ends_the_call() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def ask(call: Call) -> AsyncGenerator[Part, None]:
        try:
            yield answer("a", 200, "data: 1\n\n", "more")[0]
            begun.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    app = build_gateway(Settings(model="tiny"), ask, lambda: {"a": "n"}, (Gone,))
    incoming = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> Any:
        if incoming:
            return incoming.pop()
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    async with asyncio.timeout(20):
        await app(scope, receive, send)
    assert ended.is_set()


@pytest.mark.anyio
async def test_the_service_does_not_see_where_it_is_mounted() -> None:
    replicas = Replicas(OK)
    app = build_gateway(Settings(model="tiny"), replicas.ask, lambda: replicas.names, (Gone,))
    transport = httpx.ASGITransport(app, root_path="/chat")
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        assert (await http.get("/chat/v1/models?x=1&y=a%20b")).text == "whole"
    scope = replicas.calls[0].scope
    assert (scope["path"], scope["root_path"], scope["query_string"]) == ("/v1/models", "", b"x=1&y=a+b")


def prompt(**fields: Any) -> str:
    return prompt_of(json.dumps(fields).encode())


def test_prompts_that_begin_alike_have_the_same_beginning() -> None:
    system = {"role": "system", "content": "Be brief."}
    first = prompt(messages=[system, {"role": "user", "content": "Hello"}])
    second = prompt(messages=[system, {"role": "user", "content": [{"type": "text", "text": "Bye"}]}])
    assert os.path.commonprefix([first, second]).endswith("Be brief.\nuser: ")
    assert prompt(prompt="abc").endswith("abc")
    assert os.path.commonprefix([prompt(prompt=[1, 2, 3]), prompt(prompt=[1, 2, 4])]).endswith("[1, 2, ")
    assert len(prompt(prompt="x" * 10**6)) == PROMPT_CHARS


def test_salts_keep_prompts_apart() -> None:
    assert prompt(prompt="abc", cache_salt="s") != prompt(prompt="abc")
    assert (
        os.path.commonprefix([prompt(prompt="abc", cache_salt="s"), prompt(prompt="abc", cache_salt="t")])
        == ""
    )


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"{}", b'{"prompt": 3.5}', b'{"messages": [1]}', b"[" * 10**5, b'{"prompt": ""}'],
)
def test_any_body_has_a_prompt(body: bytes) -> None:
    assert isinstance(prompt_of(body), str)
