"""uvicorn's HTTP, with limits on what a client may send before anybody has seen it, and answers of our own form to what is
no HTTP.

What uvicorn leaves open and this closes: a head may be of any size and take for ever; a client that does not read keeps its
connection, and its request a place in the queue, for ever; an answer to bytes that are no HTTP is plain text, written into
whatever answer is under way; of pipelined requests only the last hears that its client has gone; an HTTP/1.0 client gets
chunks, which it does not know.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from nybble.service.api.errors import error_object

HEAD_LIMIT_BYTES = 64 * 2**10
# From the connection, or a head's first byte, to its last one.
HEAD_TIMEOUT_S = 30.0
# How long what a refused client still sends is read and dropped, so that it can read the answer.
LINGER_S = 1.0
# How long a client may read nothing of what has to wait for it.
READ_TIMEOUT_S = 60.0


class LimitedProtocol(HttpToolsProtocol):
    """Answers 431 to a head that is too long, 408 to one that does not come, 400 to what is no HTTP, and ends the
    connection. An answer that is under way is finished first."""

    _refused = False
    _progress = False
    _held_bytes = 0  # what the parser took and has handed to nobody
    _head_bytes = 0
    _in_head = False
    _head_timer: asyncio.TimerHandle | None = None
    _answering: RequestResponseCycle | None = None
    _unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_late_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_head_timer()
        self._unset_unread_timer()
        self.pipeline.clear()
        self._give_up_answering()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unset_unread_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_unread()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._progress = False
        super().data_received(data)
        self._held_bytes = 0 if self._progress else self._held_bytes + len(data)
        if self._held_bytes > HEAD_LIMIT_BYTES:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self._in_head = True
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_late_head)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        super().on_header(name, value)
        self._count(len(name) + len(value) + len(b": \r\n"))

    def on_headers_complete(self) -> None:
        self._progress = True
        self._in_head = False
        self._unset_head_timer()
        if not self._refused:
            super().on_headers_complete()
            if self.scope["http_version"] == "1.0":
                _send_without_chunks(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._progress = True
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._progress = True
        if not self._refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(
            HTTPStatus.BAD_REQUEST,
            "invalid_http",
            "this is not the HTTP/1.1 or 1.0 that this server reads; check the request line, headers and framing",
        )

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _unsupported_upgrade_warning(self) -> None:
        """The request is answered as any other."""

    def _unset_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_unread(self) -> None:
        """From now on nothing more is written, while the client does not read or asks for nothing else: the rest has to
        become less."""
        self._unset_unread_timer()
        unread = self.transport.get_write_buffer_size()
        if unread:
            self._unread_timer = self.loop.call_later(READ_TIMEOUT_S, self._on_unread, unread)

    def _on_unread(self, before: int) -> None:
        self._unread_timer = None
        if self.transport.get_write_buffer_size() < before:
            self._watch_unread()
        elif self.flow.write_paused or self._answering is None or self._answering.response_complete:
            self.transport.abort()

    def _unset_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _on_late_head(self) -> None:
        self._head_timer = None
        if not self._in_head:
            # A connection that was never used.
            self.transport.close()
            return
        message = (
            f"the headers had not arrived after {HEAD_TIMEOUT_S:g} s, the longest that this server waits"
        )
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, "headers_timeout", message)

    def _count(self, nbytes: int) -> None:
        self._head_bytes += nbytes
        if self._head_bytes > HEAD_LIMIT_BYTES:
            self._refuse_head()

    def _refuse_head(self) -> None:
        message = f"the request line and headers are larger than {HEAD_LIMIT_BYTES} bytes, the most that this server reads"
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", message)

    def _give_up_answering(self) -> None:
        """Who is at work on an answer hears that nobody reads it; what it still sends goes nowhere."""
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def _busy(self) -> bool:
        """Whether an answer is under way or due, other than to the request that is still arriving."""
        cycle = self._answering
        if cycle is None or cycle.response_complete:
            return False
        return cycle.response_started or cycle is not self.cycle or not cycle.more_body

    def _refuse(self, status: HTTPStatus, code: str, message: str) -> None:
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self.pipeline.clear()
        if self._busy():
            assert self._answering is not None
            self._answering.keep_alive = False
            return
        self._give_up_answering()
        body = json.dumps(error_object(message, "invalid_request_error", None, code)).encode()
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (status, status.phrase.encode(), len(body), body)
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """An answer without a length ends with its connection, which HTTP/1.0 keeps for one request only."""
    send = cycle.send
    cycle.chunked_encoding = False

    async def send_plainly(message: Any) -> None:
        if message["type"] == "http.response.body":
            # What uvicorn takes off and wants to be 0 at the end.
            more = message.get("more_body", False)
            cycle.expected_content_length = len(message.get("body", b"")) + (1 if more else 0)
        await send(message)

    cycle.send = send_plainly  # type: ignore[method-assign]
