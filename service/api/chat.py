"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import Request
from starlette.responses import Response

from nybble.service.api import answers
from nybble.service.api.generation import (
    Choice,
    Delta,
    Entry,
    Generation,
    PromptTokens,
    check_count,
    check_length,
    check_prompt,
    check_stream_options,
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

# Variables that apply_chat_template sets itself.
RESERVED_VARIABLES = frozenset(
    (
        "messages",
        "conversation",
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
    arrival_s = time.monotonic()
    service = service_of(request)
    generation = await _plan(service, body, arrival_s)
    envelope = answers.Envelope(
        service, "chatcmpl-", "chat.completion", "chat.completion.chunk", check_stream_options(body)
    )
    if body.stream:
        return await answers.stream(request, envelope, generation, _Writer(envelope, body, service.codec))
    wholes = await answers.collect(request, generation)
    answer = envelope.fields(envelope.kind) | {
        "choices": [_choice(whole, body, service.codec) for whole in wholes],
        "usage": generation.usage(),
    }
    if body.return_token_ids:
        answer["prompt_token_ids"] = list(wholes[0].choice.prompt.token_ids)
    return answers.respond_json(answer)


async def _plan(service: Service, body: ChatCompletionRequest, arrival_s: float) -> Generation:
    service.check_model(body.model)
    check_stream_options(body)
    logprobs = _logprobs_count(body)
    limit = _max_tokens(body)
    variables = body.chat_template_kwargs or {}
    for name in variables:
        if name in RESERVED_VARIABLES:
            raise InvalidRequest(f"the variable {name!r} cannot be set", param="chat_template_kwargs")
    check_count(service, 1, body.n)
    info = service.client.require_info()
    messages = [_message(message) for message in body.messages]
    if sum(len(message["content"]) for message in messages) <= SHORT_TEXT_CHARS:
        token_ids = _encode_chat(service.codec, info, messages, variables)
    else:
        token_ids = await asyncio.to_thread(_encode_chat, service.codec, info, messages, variables)
    check_prompt(token_ids, info, "messages")
    room = info.max_model_len - len(token_ids)
    sampling = sampling_params(body, info, max_tokens=min(limit or room, room), logprobs=logprobs)
    prompt = PromptTokens(token_ids)
    choices = plan_choices(service, [(prompt, sampling)], body, arrival_s=arrival_s, lists_stop_token=False)
    return Generation(service.client, choices)


def _encode_chat(
    codec: TextCodec, info: EngineInfo, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> tuple[int, ...]:
    text = codec.render_chat(messages, **variables)
    check_length(codec.fewest_tokens(text), info, "messages")
    # The template writes the model's special tokens itself.
    return codec.encode(text, add_special_tokens=False)


def _message(message: ChatMessage) -> dict[str, Any]:
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


def _choice(whole: answers.Collected, body: ChatCompletionRequest, codec: TextCodec) -> dict[str, Any]:
    result: dict[str, Any] = {
        "index": whole.choice.index,
        "message": {"role": "assistant", "content": whole.text, "refusal": None, "annotations": []},
        "logprobs": _logprobs(whole.entries, codec) if body.logprobs else None,
        "finish_reason": whole.choice.finish_reason,
    }
    if body.return_token_ids:
        result["token_ids"] = whole.token_ids
    return result


def _logprobs(entries: list[Entry], codec: TextCodec) -> dict[str, Any]:
    """One entry per token of the text; the stop token has none."""
    return {"content": [_entry(entry, codec) for entry in entries], "refusal": None}


def _entry(entry: Entry, codec: TextCodec) -> dict[str, Any]:
    return _token(codec, entry.token.token_id, entry.token.logprob) | {
        "top_logprobs": [_token(codec, token_id, logprob) for token_id, logprob in entry.token.top]
    }


def _token(codec: TextCodec, token_id: int, logprob: float | None) -> dict[str, Any]:
    data = codec.token_bytes(token_id)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": finite_logprob(logprob),
        "bytes": list(data),
    }


class _Writer:
    def __init__(self, envelope: answers.Envelope, body: ChatCompletionRequest, codec: TextCodec) -> None:
        self._head = envelope.chunk_head()
        self._tail = envelope.chunk_tail()
        self._body = body
        self._codec = codec

    def start(self, choice: Choice) -> str:
        tail = self._tail
        if self._body.return_token_ids and choice.index == 0:
            tail = f'],"prompt_token_ids":{answers.compact(choice.prompt.token_ids)}{tail[1:]}'
        return (
            f'{self._head}{{"index":{choice.index},"delta":{{"role":"assistant","content":""}},'
            f'"logprobs":null,"finish_reason":null}}{tail}'
        )

    def chunk(self, delta: Delta) -> str:
        logprobs, extra = "null", ""
        if self._body.logprobs:
            logprobs = answers.compact(_logprobs(delta.entries, self._codec))
        if self._body.return_token_ids:
            extra = f',"token_ids":{answers.compact(delta.token_ids)}'
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        content = f'{{"content":{encode_string(delta.text)}}}' if delta.text else "{}"
        return (
            f'{self._head}{{"index":{delta.choice.index},"delta":{content},"logprobs":{logprobs},'
            f'"finish_reason":{reason}{extra}}}{self._tail}'
        )
