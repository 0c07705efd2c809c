"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from fastapi import Request
from starlette.responses import Response

from nybble.service.api import answers
from nybble.service.api.generation import (
    Choice,
    Entry,
    Generation,
    PromptTokens,
    check_count,
    check_length,
    check_prompt,
    check_stream_options,
    deadline_of,
    finite_logprob,
    plan_choices,
    sampling_params,
)
from nybble.service.api.schemas import ChatCompletionRequest, ChatMessage
from nybble.service.api.sse import encode_string
from nybble.service.api.state import Service, service_of
from nybble.service.engine.protocol import EngineInfo
from nybble.service.errors import InvalidRequest
from nybble.service.text import SHORT_TEXT_CHARS, TextCodec

MAX_VARIABLE_DEPTH = 32
# Variables that apply_chat_template sets itself.
RESERVED_VARIABLES = frozenset(
    (
        "self",
        "messages",
        "conversation",
        "conversations",
        "tools",
        "documents",
        "chat_template",
        "tokenize",
        "return_tensors",
        "return_dict",
    )
    + ("padding", "truncation", "max_length", "return_assistant_tokens_mask", "tokenizer_kwargs")
)


async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Answer a conversation."""
    arrival_s: float = request.state.arrival_s
    service = service_of(request)
    generation = await _plan(service, body, arrival_s)
    return await answers.respond(request, service, body, generation, ChatForm(service.codec))


async def _plan(service: Service, body: ChatCompletionRequest, arrival_s: float) -> Generation:
    service.check_model(body.model)
    check_stream_options(body)
    logprobs = _logprobs_count(body)
    limit = _max_tokens(body)
    variables = body.chat_template_kwargs or {}
    check_template_variables(variables)
    n = body.n or 1
    check_count(service, 1, n)
    info = service.client.require_info()
    check_names(service.codec, body.messages)
    messages = [template_message(message) for message in body.messages]
    if sum(len(message["content"]) for message in messages) <= SHORT_TEXT_CHARS:
        token_ids = _encode_chat(service.codec, info, messages, variables)
    else:
        token_ids = await asyncio.to_thread(_encode_chat, service.codec, info, messages, variables)
    check_prompt(token_ids, info, "messages")
    room = info.max_model_len - len(token_ids)
    sampling = sampling_params(body, info, max_tokens=min(limit or room, room), logprobs=logprobs)
    prompt = PromptTokens(token_ids)
    choices = plan_choices(
        service,
        [(prompt, sampling)],
        body,
        n=n,
        arrival_s=arrival_s,
        lists_stop_token=False,
        shows_logprobs=logprobs is not None,
    )
    return Generation(service.client, choices, deadline_s=deadline_of(service, body, arrival_s))


def _encode_chat(
    codec: TextCodec, info: EngineInfo, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> tuple[int, ...]:
    text = codec.render_chat(messages, **variables)
    check_length(codec.fewest_tokens(text), info, "messages")
    # The template writes the model's special tokens itself.
    return codec.encode(text, add_special_tokens=False)


def check_names(codec: TextCodec, messages: Iterable[ChatMessage]) -> None:
    """Raises InvalidRequest for a name that the model's template would leave out."""
    if codec.template_uses_names:
        return
    for i, message in enumerate(messages):
        if message.name is not None:
            raise InvalidRequest(
                "this model's chat template has no place for the name of a message's author; leave name out",
                param=f"messages[{i}].name",
                code="unsupported_parameter",
            )


def check_template_variables(variables: dict[str, Any]) -> None:
    """Raises InvalidRequest for a variable that the renderer sets itself, and for values nested too deep to render."""
    level: list[Any] = [variables]
    for _ in range(MAX_VARIABLE_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, (dict, list))
            for child in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            break
    else:
        raise InvalidRequest(
            f"is nested deeper than {MAX_VARIABLE_DEPTH} levels, the most that is accepted; nest it less",
            param="chat_template_kwargs",
        )
    for name in variables:
        if name in RESERVED_VARIABLES:
            raise InvalidRequest(f"the variable {name[:100]!r} cannot be set", param="chat_template_kwargs")


def template_message(message: ChatMessage) -> dict[str, Any]:
    """A message as templates expect one."""
    # Templates know the older name of the developer's role.
    role = "system" if message.role == "developer" else message.role
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": message.content} | named


def _logprobs_count(body: ChatCompletionRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    older, newer = body.max_tokens, body.max_completion_tokens
    if older is not None and newer is not None and older != newer:
        raise InvalidRequest(
            f"max_tokens={older} and max_completion_tokens={newer} name the same limit; send one of them",
            param="max_tokens",
        )
    return older if newer is None else newer


class ChatForm(answers.Form):
    """A message, streamed as deltas that begin with its role; logprobs with an entry per token of the text."""

    id_prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prompt_ids_in_choice = False

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def whole(self, choice: Choice, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None, "annotations": []}}

    def piece(self, text: str) -> str:
        return f'"delta":{{"content":{encode_string(text)}}}' if text else '"delta":{}'

    def opening(self, choice: Choice) -> str | None:
        return '"delta":{"role":"assistant","content":""}'

    def logprobs(self, entries: list[Entry]) -> dict[str, Any]:
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: Entry) -> dict[str, Any]:
        token = self._token(entry.token.token_id, entry.token.logprob)
        return token | {
            "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry.token.top]
        }

    def _token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        data = self._codec.token_bytes(token_id)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": finite_logprob(logprob),
            "bytes": list(data),
        }
