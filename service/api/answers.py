"""How choices become JSON, whole or streamed: what the two routes' answers have in common.

Streamed chunks are put together from prepared text, since one is made for every token.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from nybble.service.api import sse
from nybble.service.api.errors import REJECTIONS, error_of, internal_error
from nybble.service.api.generation import Choice, Delta, Entry, Generation
from nybble.service.api.schemas import SamplingFields
from nybble.service.api.state import Service
from nybble.service.errors import DeadlineExceeded, NybbleError

logger = logging.getLogger(__name__)


class Form(ABC):
    """How one route writes its answers. chunk_kind names the object of a streamed piece."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    # Whether prompt_token_ids stand in each choice or, where all choices share a prompt, beside them.
    prompt_ids_in_choice: ClassVar[bool]

    @abstractmethod
    def whole(self, choice: Choice, text: str) -> dict[str, Any]:
        """The fields of a choice that hold its text."""

    @abstractmethod
    def piece(self, text: str) -> str:
        """The same in a streamed chunk, as JSON without the braces around it."""

    @abstractmethod
    def opening(self, choice: Choice) -> str | None:
        """The piece before the first text of a choice, if there is one."""

    @abstractmethod
    def logprobs(self, entries: list[Entry]) -> dict[str, Any]:
        """The logprobs object of these tokens."""

    def before(self, choice: Choice) -> list[Entry]:
        """Entries of the logprobs object before those of the answer."""
        return []


async def respond(
    request: Request, service: Service, body: SamplingFields, generation: Generation, form: Form
) -> Response:
    """Runs a generation and answers with it, as body.stream says.

    Raises what Generation.deltas() raises, and ClientGone when the client leaves before the first byte.
    """
    answer = _Answer(service, body, generation, form)
    request.state.summary = partial(_summary, service, body, generation)
    if body.stream:
        return await _stream(request, answer)
    return await sse.unless_disconnected(request, _collect(answer))


def _summary(service: Service, body: SamplingFields, generation: Generation) -> dict[str, Any]:
    """What the request's log line says of its work."""
    fields = {"stream": bool(body.stream)} | generation.summary()
    if service.settings.log_prompts:
        prompts = {id(choice.prompt): choice.prompt.token_ids for choice in generation.choices}.values()
        fields["prompts"] = [service.codec.decode(ids, skip_special_tokens=False) for ids in prompts]
    return fields


@dataclass
class _Answer:
    service: Service
    body: SamplingFields
    generation: Generation
    form: Form
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = self.form.id_prefix + uuid.uuid4().hex

    @property
    def include_usage(self) -> bool:
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self.generation.choices[0].prompt.token_ids

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.service.model_name,
            "system_fingerprint": self.service.fingerprint,
        }


# --- whole ---


@dataclass
class _Collected:
    texts: list[str] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


async def _collect(answer: _Answer) -> Response:
    collected = [_Collected() for _ in answer.generation.choices]
    deltas = answer.generation.deltas()
    try:
        async for batch in deltas:
            for delta in batch:
                whole = collected[delta.choice.number]
                whole.texts.append(delta.text)
                whole.entries += delta.entries
                whole.token_ids += delta.token_ids
    finally:
        await deltas.aclose()
    chosen = enumerate(answer.generation.answers())
    result = answer.fields(answer.form.kind) | {
        "choices": [_choice(answer, index, choice, collected[choice.number]) for index, choice in chosen],
        "usage": answer.generation.usage(),
    }
    if answer.body.return_token_ids and not answer.form.prompt_ids_in_choice:
        result["prompt_token_ids"] = answer.prompt_token_ids
    return respond_json(result)


def _choice(answer: _Answer, index: int, choice: Choice, whole: _Collected) -> dict[str, Any]:
    form = answer.form
    entries = [*form.before(choice), *whole.entries] if choice.shows_logprobs else None
    result = {
        "index": index,
        **form.whole(choice, "".join(whole.texts)),
        "logprobs": None if entries is None else form.logprobs(entries),
        "finish_reason": choice.finish_reason,
    }
    if answer.body.return_token_ids:
        result["token_ids"] = whole.token_ids
        if answer.form.prompt_ids_in_choice:
            result["prompt_token_ids"] = choice.prompt.token_ids
    return result


# --- streamed ---


async def _stream(request: Request, answer: _Answer) -> Response:
    """An error before the first piece is raised, so that it gets a status of its own."""
    events = _events(answer)
    try:
        first = await sse.unless_disconnected(request, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return sse.EventStream(first, _after_first(request, answer.service, events))


async def _events(answer: _Answer) -> AsyncGenerator[bytes, None]:
    chunks = _Chunks(answer)
    begun: set[int] = set()
    deltas = answer.generation.deltas()
    try:
        async for batch in deltas:
            piece = ""
            for delta in batch:
                if delta.choice.number not in begun:
                    begun.add(delta.choice.number)
                    piece += chunks.opening(delta.choice)
                piece += chunks.chunk(delta)
            yield piece.encode()
        if answer.include_usage:
            usage = {"choices": [], "usage": answer.generation.usage()}
            yield sse.event(answer.fields(answer.form.chunk_kind) | usage)
        yield sse.DONE
    finally:
        await deltas.aclose()


async def _after_first(
    request: Request, service: Service, events: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    """The status line is out: from here an error is one event, and the end of the stream."""
    try:
        async for piece in events:
            yield piece
    except NybbleError as error:
        if isinstance(error, DeadlineExceeded):
            service.metrics.rejected(REJECTIONS[DeadlineExceeded])
        request.state.error = error.code
        yield sse.event(error_of(error))
    except Exception:
        logger.exception("request %s: an internal error", request.state.request_id)
        fault = internal_error()
        request.state.error = fault.code
        yield sse.event(error_of(fault))
    finally:
        await events.aclose()


class _Chunks:
    """Makes the events of one stream."""

    def __init__(self, answer: _Answer) -> None:
        self._form = answer.form
        self._return_token_ids = bool(answer.body.return_token_ids)
        self._head = "data: " + compact(answer.fields(answer.form.chunk_kind))[:-1] + ',"choices":['
        usage = ',"usage":null' if answer.include_usage else ""
        self._tail = f"]{usage}}}\n\n"
        self._first_tail = f'],"prompt_token_ids":{compact(answer.prompt_token_ids)}{usage}}}\n\n'

    def opening(self, choice: Choice) -> str:
        """The event before a choice's first text; empty if there is nothing to say."""
        piece = self._form.opening(choice)
        before = self._form.before(choice)
        logprobs = compact(self._form.logprobs(before)) if before else "null"
        if not self._return_token_ids:
            return "" if piece is None else self._event(choice.number, piece, logprobs)
        piece = piece or self._form.piece("")
        if self._form.prompt_ids_in_choice:
            piece += f',"prompt_token_ids":{compact(choice.prompt.token_ids)}'
            return self._event(choice.number, piece, logprobs)
        return self._event(choice.number, piece, tail=self._first_tail if choice.number == 0 else None)

    def chunk(self, delta: Delta) -> str:
        piece = self._form.piece(delta.text)
        if self._return_token_ids:
            piece += f',"token_ids":{compact(delta.token_ids)}'
        logprobs = compact(self._form.logprobs(delta.entries)) if delta.choice.shows_logprobs else "null"
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        return self._event(delta.choice.number, piece, logprobs, reason)

    def _event(
        self, index: int, piece: str, logprobs: str = "null", reason: str = "null", tail: str | None = None
    ) -> str:
        return (
            f'{self._head}{{"index":{index},{piece},"logprobs":{logprobs},"finish_reason":{reason}}}'
            f"{tail or self._tail}"
        )


def respond_json(body: dict[str, Any]) -> Response:
    return Response(compact(body).encode(), media_type="application/json")


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
