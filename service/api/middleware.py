"""Around every request: the size of its body, one log line, one count."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nybble.service.api.errors import REJECTIONS, respond_to
from nybble.service.errors import BodyTooLarge

logger = logging.getLogger("nybble.access")

# Polled all the time, so their lines would hide the others.
QUIET_ROUTES = frozenset(("/metrics", "/livez", "/readyz", "/health"))
# nginx's status for a client that left before its answer; it is counted, never sent.
CLIENT_CLOSED = 499


class AccessLog:
    """Counts and logs responses by route, never by path, so that a scan of paths makes no new series."""

    def __init__(self, app: ASGIApp, *, count: Callable[[str, int], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        status = CLIENT_CLOSED

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            status = 500
            raise
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._count(route, status)
            level = logging.DEBUG if route in QUIET_ROUTES else logging.INFO
            elapsed_ms = (time.monotonic() - started_s) * 1000
            logger.log(level, "%s %s %d %.1f ms", scope["method"], route, status, elapsed_ms)


class BodyLimit:
    """Reads the body, whole and at most limit_bytes long, before anything parses it; a longer one is answered 413."""

    def __init__(self, app: ASGIApp, *, limit_bytes: int, on_reject: Callable[[str], None]) -> None:
        self._app = app
        self._limit_bytes = limit_bytes
        self._on_reject = on_reject

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except BodyTooLarge as error:
            self._on_reject(REJECTIONS[BodyTooLarge])
            await respond_to(error)(scope, receive, send)
            return
        if body is None:
            return
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
