"""A small HTTP client on asyncio's streams: many connections at little cost, read as slowly and left as early as wished."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The data of a stream, which must end with one [DONE] or one error."""
        pieces = self.body.decode().split("\n\n")
        assert pieces.pop() == "", "the last event is whole"
        data = [piece.removeprefix("data: ") for piece in pieces]
        if data[-1] == "[DONE]":
            data.pop()
        else:
            assert '"error"' in data[-1], data[-1]
        assert "[DONE]" not in data
        return [json.loads(piece) for piece in data]


@dataclass(frozen=True)
class Reader:
    """How an answer is read: pause_s before each piece, and at most this many pieces before leaving (None: all)."""

    pause_s: float = 0.0
    pieces: int | None = None
    leave_after_s: float | None = None
    receive_buffer: int = 0


async def post(url: str, path: str, body: Any, reader: Reader | None = None) -> Answer | None:
    """One request on a connection of its own; None if the reader left before the end. body: JSON, or bytes as they are."""
    reader = reader or Reader()
    parts = urlsplit(url)
    raw = socket.socket()
    raw.setblocking(False)
    if reader.receive_buffer:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, reader.receive_buffer)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(raw, (parts.hostname, parts.port))
    except BaseException:
        raw.close()
        raise
    incoming, outgoing = await asyncio.open_connection(sock=raw, limit=4096)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        outgoing.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        if reader.leave_after_s is not None:
            await asyncio.sleep(reader.leave_after_s)
            return None
        return await _read(incoming, reader)
    finally:
        outgoing.transport.abort() if reader.pieces or reader.leave_after_s else outgoing.close()


async def _read(incoming: asyncio.StreamReader, reader: Reader) -> Answer | None:
    received, count = bytearray(), 0
    while piece := await incoming.read(4096):
        received += piece
        count += 1
        if reader.pieces is not None and count >= reader.pieces:
            return None
        if reader.pause_s:
            await asyncio.sleep(reader.pause_s)
    head, _, rest = bytes(received).partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    chunked = headers.get("transfer-encoding") == "chunked"
    return Answer(int(status.split()[1]), headers, _unchunk(rest) if chunked else rest)


def _unchunk(data: bytes) -> bytes:
    pieces = []
    while True:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return b"".join(pieces)
        pieces.append(data[:length])
        data = data[length + 2 :]
