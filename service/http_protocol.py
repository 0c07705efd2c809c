"""uvicorn's HTTP, with a limit on what a client may send before anybody has seen it: request line, headers, trailers."""

from __future__ import annotations

import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nybble.service.api.errors import error_object

HEAD_LIMIT_BYTES = 64 * 2**10
# How long what a refused client still sends is read and dropped, so that it can read the answer.
LINGER_S = 1.0


class LimitedProtocol(HttpToolsProtocol):
    """Answers 431 to a longer head and ends the connection."""

    _refused = False
    _progress = False
    _held_bytes = 0  # what the parser took and has handed to nobody
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._progress = False
        super().data_received(data)
        self._held_bytes = 0 if self._progress else self._held_bytes + len(data)
        if self._held_bytes > HEAD_LIMIT_BYTES:
            self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + len(b": \r\n"))

    def on_headers_complete(self) -> None:
        self._progress = True
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._progress = True
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._progress = True
        if not self._refused:
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """The request is answered as any other."""

    def _count(self, nbytes: int) -> None:
        self._head_bytes += nbytes
        if self._head_bytes > HEAD_LIMIT_BYTES:
            self._refuse()

    def _refuse(self) -> None:
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            # Another answer is under way on this connection.
            self.transport.close()
            return
        message = f"the request line and headers are larger than {HEAD_LIMIT_BYTES} bytes, the most that this server reads"
        error: dict[str, Any] = error_object(message, "invalid_request_error", None, "headers_too_large")
        body = json.dumps(error).encode()
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)
