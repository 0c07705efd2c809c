"""Around every request: its id, one log line, one count, the size of its body, what becomes of a fault of ours."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nybble.service.api.errors import REJECTIONS, internal_error, respond_to
from nybble.service.errors import BodyTimeout, BodyTooLarge, InvalidRequest, NybbleError, Unavailable
from nybble.service.logs import with_fields

logger = logging.getLogger("nybble.access")

# Polled all the time, so their lines would hide the others.
QUIET_ROUTES = frozenset(("/metrics", "/livez", "/readyz", "/health"))
# nginx's status for a client that left before its answer; it is counted, never sent.
CLIENT_CLOSED = 499
REQUEST_ID = "X-Request-Id"
# How much of a body is read after it has been refused.
LINGER_BYTES = 64 * 2**20
# And for how long: in all, and between one piece and the next. A body that is too large may come from a slow client; one
# that did not arrive in time has had its time.
LINGER_S = (30.0, 2.0)
SHORT_LINGER_S = (2.0, 0.3)
# How long a body may take that begins to arrive while the server drains.
DRAINING_BODY_S = 1.0
# What may stand in a log line and a header as it came.
_USABLE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestContext:
    """Gives each request an id, the client's own if it is usable, and says it in the answer and in its log line.

    Counts and logs responses by route, never by path, so that a scan of paths makes no new series. What the routes know
    of a request's work stands in scope["state"]["summary"], a function that makes fields of the line.
    """

    def __init__(self, app: ASGIApp, *, count: Callable[[str, int], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        status = CLIENT_CLOSED
        request_id = _request_id(scope)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except asyncio.CancelledError:
            # Only the server's end cancels a request. One that has begun to be answered is cut off.
            if status == CLIENT_CLOSED:
                await respond_to(_shutting_down())(scope, receive, send_and_note)
        except Exception:
            status = 500
            raise
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._count(route, status)
            level = logging.DEBUG if route in QUIET_ROUTES else logging.INFO
            if logger.isEnabledFor(level):
                summary: Callable[[], dict[str, Any]] | None = state.get("summary")
                fields = {
                    "request_id": request_id,
                    "method": scope["method"],
                    "route": route,
                    "status": status,
                    "duration_ms": round((time.monotonic() - started_s) * 1000, 1),
                    "error": state.get("error"),
                    **(summary() if summary is not None else {}),
                }
                logger.log(level, "request", extra=with_fields(fields))


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get(REQUEST_ID, "")
    return given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex


class Heads:
    """HEAD is answered as GET is, without a body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        as_get = {**scope, "method": "GET"}
        try:
            await self._app(as_get, receive, send_head)
        finally:
            if "route" in as_get:
                scope["route"] = as_get["route"]


class Faults:
    """An exception that nobody expected becomes a 500, logged once. It stands within the middleware that adds headers to
    answers, so that a browser may read this one too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            if begun or scope["type"] != "http":
                raise
            logger.exception("request %s: an internal error", scope["state"]["request_id"])
            await respond_to(internal_error())(scope, receive, send)


def _shutting_down() -> Unavailable:
    return Unavailable("the server is shutting down", code="draining")


class BodyReads:
    """The time that bodies have to arrive: timeout_s (0: no limit); once the server drains, none."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._draining = False
        self._under_way: set[asyncio.Timeout] = set()

    def drain(self) -> None:
        """Ends the reads under way: what has not arrived is not admitted, and does not delay the exit."""
        self._draining = True
        now = asyncio.get_running_loop().time()
        for limit in self._under_way:
            limit.reschedule(now)

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Around the reading of a body. Raises BodyTimeout, or Unavailable when the server drains."""
        timeout_s = DRAINING_BODY_S if self._draining else self._timeout_s or None
        try:
            async with asyncio.timeout(timeout_s) as limit:
                self._under_way.add(limit)
                try:
                    yield
                finally:
                    self._under_way.discard(limit)
        except TimeoutError:
            if self._draining:
                raise _shutting_down() from None
            raise BodyTimeout(
                f"the body had not arrived after {self._timeout_s:g} s, the longest that this server waits; "
                "send all of it, as long as Content-Length says, or a smaller one"
            ) from None


class BodyLimit:
    """Reads the body, whole, in time and at most limit_bytes long, before anything parses it; a longer one is answered
    413, a later one 408, one that is packed in a way that nobody here unpacks 400."""

    def __init__(
        self, app: ASGIApp, *, limit_bytes: int, reads: BodyReads, on_reject: Callable[[str], None]
    ) -> None:
        self._app = app
        self._limit_bytes = limit_bytes
        self._reads = reads
        self._on_reject = on_reject

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            _check_coding(scope)
            async with self._reads.limit():
                body = await self._read(scope, receive)
        except (BodyTooLarge, BodyTimeout, InvalidRequest, Unavailable) as error:
            self._on_reject(REJECTIONS[type(error)])
            scope.setdefault("state", {})["error"] = error.code
            # What is left of the body is no request.
            await refuse(error, scope, receive, send, close=True)
            return
        if body is None:
            return
        # From here on the time is ours, not the client's upload.
        scope.setdefault("state", {})["arrival_s"] = time.monotonic()
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None if the client left while sending it."""
        for name, value in scope["headers"]:
            if name == b"content-length" and (not value.isdigit() or int(value) > self._limit_bytes):
                raise self._too_large()
        pieces, nbytes, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message.get("body", b""))
            nbytes += len(pieces[-1])
            if nbytes > self._limit_bytes:
                raise self._too_large()
            more = message.get("more_body", False)
        return b"".join(pieces)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"the body is larger than {self._limit_bytes} bytes, the most that this server reads"
        )


def _check_coding(scope: Scope) -> None:
    """Raises InvalidRequest for a body that would have to be unpacked."""
    plain = {"content-encoding": "identity", "transfer-encoding": "chunked"}
    for name, accepted in plain.items():
        for value in Headers(scope=scope).getlist(name):
            if value.strip().lower() != accepted:
                shown = value.encode("ascii", "replace").decode()[:50]
                raise InvalidRequest(
                    f"{name} {shown!r} is not supported; send the body as it is, without this header",
                    param=name,
                )


async def refuse(
    error: NybbleError, scope: Scope, receive: Receive, send: Send, *, close: bool = False
) -> None:
    """Answers with the error, and reads on for a while before the answer ends: a connection that is closed on a client that
    is still sending is reset, and the answer lost. close: whether the connection must end."""
    linger_s, pause_s = SHORT_LINGER_S if isinstance(error, (BodyTimeout, Unavailable)) else LINGER_S

    async def send_and_linger(message: Message) -> None:
        if message["type"] != "http.response.body":
            if close:
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)
            return
        await send({**message, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(linger_s):
                await _discard(receive, pause_s)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    await respond_to(error)(scope, receive, send_and_linger)


async def _discard(receive: Receive, pause_s: float) -> None:
    left = LINGER_BYTES
    while left > 0:
        async with asyncio.timeout(pause_s):
            message = await receive()
        left -= len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
