"""How choices become JSON: what the two routes' answers have in common.

Streamed chunks are put together from prepared text, since they are made for every token.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from nybble.service.api import sse
from nybble.service.api.errors import error_of
from nybble.service.api.generation import Choice, Delta, Entry, Generation
from nybble.service.api.state import Service
from nybble.service.errors import NybbleError


@dataclass
class Envelope:
    """The fields around `choices`; chunk_kind names the object of a streamed piece."""

    service: Service
    id_prefix: str
    kind: str
    chunk_kind: str
    include_usage: bool
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = self.id_prefix + uuid.uuid4().hex

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.service.model_name,
            "system_fingerprint": self.service.fingerprint,
        }

    def chunk_head(self) -> str:
        return "data: " + compact(self.fields(self.chunk_kind))[:-1] + ',"choices":['

    def chunk_tail(self) -> str:
        return "]" + (',"usage":null' if self.include_usage else "") + "}\n\n"

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return sse.event(self.fields(self.chunk_kind) | {"choices": [], "usage": usage})


class ChunkWriter(Protocol):
    """One route's streamed pieces."""

    def start(self, choice: Choice) -> str:
        """Events before the first text of a choice; may be empty."""

    def chunk(self, delta: Delta) -> str: ...


async def stream(
    request: Request, envelope: Envelope, generation: Generation, writer: ChunkWriter
) -> Response:
    """An event stream; an error before its first piece is raised instead."""
    events = _events(envelope, generation, writer)
    try:
        first = await sse.unless_disconnected(request, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return sse.EventStream(first, _after_first(events))


async def _events(
    envelope: Envelope, generation: Generation, writer: ChunkWriter
) -> AsyncGenerator[bytes, None]:
    begun: set[int] = set()
    deltas = generation.deltas()
    try:
        async for batch in deltas:
            piece = ""
            for delta in batch:
                if delta.choice.index not in begun:
                    begun.add(delta.choice.index)
                    piece += writer.start(delta.choice)
                piece += writer.chunk(delta)
            yield piece.encode()
        if envelope.include_usage:
            yield envelope.usage_chunk(generation.usage())
        yield sse.DONE
    finally:
        await deltas.aclose()


async def _after_first(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The status line is out: from here an error is one event, and the end of the stream."""
    try:
        async for piece in events:
            yield piece
    except NybbleError as error:
        yield sse.event(error_of(error))
    finally:
        await events.aclose()


@dataclass
class Collected:
    """A whole choice."""

    choice: Choice
    text: str = ""
    entries: list[Entry] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


async def collect(request: Request, generation: Generation) -> list[Collected]:
    """All choices, whole. Raises ClientGone when the client leaves before; the choices are aborted then."""
    return await sse.unless_disconnected(request, _collect(generation))


async def _collect(generation: Generation) -> list[Collected]:
    collected = [Collected(choice) for choice in generation.choices]
    texts: list[list[str]] = [[] for _ in collected]
    deltas = generation.deltas()
    try:
        async for batch in deltas:
            for delta in batch:
                whole = collected[delta.choice.index]
                texts[delta.choice.index].append(delta.text)
                whole.entries += delta.entries
                whole.token_ids += delta.token_ids
    finally:
        await deltas.aclose()
    for whole, pieces in zip(collected, texts, strict=True):
        whole.text = "".join(pieces)
    return collected


def respond_json(body: dict[str, Any]) -> Response:
    return Response(compact(body).encode(), media_type="application/json")


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
