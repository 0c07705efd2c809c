"""In front of the replicas: tries a request again on another one as long as none of its answer has been sent.

Ray gives a request to one replica; when that dies, its proxy answers 500. Generating text changes nothing, so trying again
costs no more than the work. This file knows nothing of Ray: `ask` and `replicas` are given.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, urlencode

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from nybble.service.api import sse
from nybble.service.api.errors import error_of, respond_to
from nybble.service.api.middleware import BodyLimit, BodyReads
from nybble.service.errors import InvalidRequest, NybbleError, Unavailable
from nybble.service.settings import Settings
from nybble_ray.messages import Call, Part

# Another replica may have room, or an engine.
RETRIED = (429, 503)
TRIES = 3
REPLICA = "replica"
# Enough to tell conversations apart and to hold a system prompt; Ray's router keeps it.
PROMPT_CHARS = 8192
# What of ASGI's scope can be pickled and means something elsewhere.
_SCOPE = ("type", "asgi", "http_version", "method", "scheme", "headers", "client", "server")

Ask = Callable[[Call], AsyncGenerator[Part, None]]
Replicas = Callable[[], Mapping[str, str]]


def build_gateway(
    settings: Settings, ask: Ask, replicas: Replicas, lost: tuple[type[Exception], ...]
) -> Starlette:
    """ask: sends a call to some replica. replicas: the node of each replica by its name. lost: what ask raises when the
    replica goes away."""
    forward = Forward(ask, replicas, lost)
    reads = BodyReads(settings.body_timeout_s)
    limit = Middleware(
        BodyLimit, limit_bytes=settings.body_limit_bytes, reads=reads, on_reject=lambda reason: None
    )

    async def targets(request: Request) -> Response:
        """Prometheus's http_sd: each replica is a target, asked through this gateway."""
        here, path = request.headers.get("host", ""), request.url.path.removesuffix("/targets")
        return JSONResponse([_target(here, path, name, node) for name, node in sorted(replicas().items())])

    routes = [Route("/metrics/targets", targets), Mount("/", app=forward)]
    return Starlette(routes=routes, middleware=[limit])


def _target(here: str, path: str, replica: str, node: str) -> dict[str, Any]:
    labels = {"__metrics_path__": path, "__param_replica": replica, "instance": replica, "node": node}
    return {"targets": [here], "labels": labels}


class Forward:
    """An ASGI application that lets a replica answer."""

    def __init__(self, ask: Ask, replicas: Replicas, lost: tuple[type[Exception], ...]) -> None:
        self._ask = ask
        self._replicas = replicas
        self._lost = lost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            call = await _read_call(scope, receive)
            self._check(call)
        except NybbleError as error:
            await respond_to(error)(scope, receive, send)
            return
        answering = asyncio.ensure_future(self._answer(call, scope, receive, send))
        leaving = asyncio.ensure_future(sse.disconnected(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            await sse.cancel(answering, leaving)

    def _check(self, call: Call) -> None:
        """Raises for a call that no replica can get."""
        names = self._replicas()
        if call.only and call.only not in names:
            raise InvalidRequest(
                f"there is no replica {call.only[:100]!r}; GET /metrics/targets lists them", param=REPLICA
            )
        if call.scope["path"] == "/metrics" and not call.only:
            raise InvalidRequest(
                "metrics are those of one replica: /metrics?replica=NAME; GET /metrics/targets lists them for Prometheus",
                param=REPLICA,
            )
        if not names:
            raise Unavailable("no replica is ready", code="loading")

    async def _answer(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        lost = Unavailable("the replica that worked on this request ended unexpectedly", code="engine_down")
        for left in reversed(range(1 if call.only else TRIES)):
            begun = False
            try:
                async with contextlib.aclosing(self._ask(call)) as parts:
                    async for part in parts:
                        if not begun and left and part.status in RETRIED:
                            call = replace(call, avoid=call.avoid | {part.replica})
                            break
                        if call.only and part.replica != call.only:
                            break  # it went away a moment ago
                        begun = True
                        for message in part.messages:
                            await send(message)
                    else:
                        return
            except self._lost:
                if begun:
                    await _end(send, lost)
                    return
        await respond_to(lost)(scope, receive, send)


async def _end(send: Send, error: NybbleError) -> None:
    """Of a stream whose status line has gone out: an error is its last event, and no [DONE] follows."""
    await send({"type": "http.response.body", "body": sse.event(error_of(error)), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _read_call(scope: Scope, receive: Receive) -> Call:
    body, more = b"", True
    while more:  # once, after BodyLimit
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    (only,) = query.pop(REPLICA, [""])[:1]
    passed: dict[str, Any] = {name: scope[name] for name in _SCOPE if name in scope}
    passed["query_string"] = urlencode(query, doseq=True).encode()
    # The service knows nothing of where it is mounted (route_prefix).
    passed["path"] = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/")) or "/"
    passed["root_path"] = ""
    return Call(passed, body, prompt_of(body), only=only)


def prompt_of(body: bytes) -> str:
    """The text that a prefix cache would know the request by; empty where there is none. Salts are part of it."""
    try:
        fields = json.loads(body)
        prompt = fields.get("prompt") or fields.get("messages")
        salt = fields.get("cache_salt")
    except (ValueError, AttributeError, RecursionError):
        return ""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        prompt = "\n".join(_message_text(message) for message in prompt)
    text = prompt if isinstance(prompt, str) else json.dumps(prompt) if prompt else ""
    return f"{salt or ''}\0{text}"[:PROMPT_CHARS] if text else ""


def _message_text(message: Any) -> str:
    if not isinstance(message, dict):
        return ""
    content = message.get("content")
    return f"{message.get('role')}: {content if isinstance(content, str) else json.dumps(content)}"
