"""POST /v1/completions."""

from __future__ import annotations

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
    check_prompt,
    check_stream_options,
    encode,
    finite_logprob,
    plan_choices,
    sampling_params,
)
from nybble.service.api.schemas import CompletionRequest, Prompt
from nybble.service.api.sse import encode_string
from nybble.service.api.state import Service, service_of
from nybble.service.engine.protocol import EngineInfo
from nybble.service.errors import InvalidRequest
from nybble.service.text import SHORT_TEXT_CHARS, TextCodec

DEFAULT_MAX_TOKENS = 16


async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue one or more prompts."""
    arrival_s = time.monotonic()
    service = service_of(request)
    generation = await _plan(service, body, arrival_s)
    envelope = answers.Envelope(
        service, "cmpl-", "text_completion", "text_completion", check_stream_options(body)
    )
    if body.stream:
        return await answers.stream(request, envelope, generation, _Writer(envelope, body, service.codec))
    choices = [_choice(whole, body, service.codec) for whole in await answers.collect(request, generation)]
    return answers.respond_json(
        envelope.fields(envelope.kind) | {"choices": choices, "usage": generation.usage()}
    )


async def _plan(service: Service, body: CompletionRequest, arrival_s: float) -> Generation:
    service.check_model(body.model)
    check_stream_options(body)
    if body.echo and body.logprobs is not None:
        raise InvalidRequest(
            "echo together with logprobs is not supported; leave one of them out",
            param="echo",
            code="unsupported_parameter",
        )
    check_count(service, len(body.prompt), body.n)
    info = service.client.require_info()
    # Many short texts take as long as a long one.
    inline = sum(len(given) for given in body.prompt if isinstance(given, str)) <= SHORT_TEXT_CHARS
    prompts = []
    for given in body.prompt:
        prompt = await _prompt_tokens(service.codec, given, info, echo=bool(body.echo), inline=inline)
        check_prompt(prompt.token_ids, info, "prompt")
        room = info.max_model_len - len(prompt.token_ids)
        max_tokens = min(body.max_tokens or DEFAULT_MAX_TOKENS, room)
        prompts.append((prompt, sampling_params(body, info, max_tokens=max_tokens, logprobs=body.logprobs)))
    choices = plan_choices(service, prompts, body, arrival_s=arrival_s, lists_stop_token=True)
    return Generation(service.client, choices)


async def _prompt_tokens(
    codec: TextCodec, prompt: Prompt, info: EngineInfo, *, echo: bool, inline: bool
) -> PromptTokens:
    if isinstance(prompt, str):
        return PromptTokens(await encode(codec, prompt, info, inline=inline), prompt)
    check_prompt(prompt, info, "prompt")
    return PromptTokens(prompt, codec.decode(prompt) if echo else "")


def _choice(whole: answers.Collected, body: CompletionRequest, codec: TextCodec) -> dict[str, Any]:
    choice = whole.choice
    echoed = choice.prompt.text if body.echo else ""
    result = {
        "index": choice.index,
        "text": echoed + whole.text,
        "logprobs": _logprobs(whole.entries, codec, len(echoed)) if body.logprobs is not None else None,
        "finish_reason": choice.finish_reason,
    }
    if body.return_token_ids:
        result |= {"token_ids": whole.token_ids, "prompt_token_ids": list(choice.prompt.token_ids)}
    return result


def _logprobs(entries: list[Entry], codec: TextCodec, offset: int = 0) -> dict[str, Any]:
    """The legacy logprobs object: parallel lists, one entry per token, the stop token included."""
    return {
        "text_offset": [offset + entry.start for entry in entries],
        "token_logprobs": [finite_logprob(entry.token.logprob) for entry in entries],
        "tokens": [token_text(codec.token_bytes(entry.token.token_id)) for entry in entries],
        "top_logprobs": [_top(entry, codec) for entry in entries],
    }


def _top(entry: Entry, codec: TextCodec) -> dict[str, float]:
    """Best first; the token itself is always there. Tokens of equal text share a key, which the best one keeps."""
    result: dict[str, float] = {}
    for token_id, logprob in (*entry.token.top, (entry.token.token_id, entry.token.logprob)):
        result.setdefault(token_text(codec.token_bytes(token_id)), finite_logprob(logprob))
    return result


def token_text(data: bytes) -> str:
    """A token as OpenAI's legacy API names it: bytes that are no text of their own are spelled out."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class _Writer:
    def __init__(self, envelope: answers.Envelope, body: CompletionRequest, codec: TextCodec) -> None:
        self._head = envelope.chunk_head()
        self._tail = envelope.chunk_tail()
        self._body = body
        self._codec = codec

    def start(self, choice: Choice) -> str:
        extra = ""
        if self._body.return_token_ids:
            extra = f',"token_ids":[],"prompt_token_ids":{answers.compact(choice.prompt.token_ids)}'
        echoed = choice.prompt.text if self._body.echo else ""
        return self._event(choice.index, echoed, "null", "null", extra) if echoed or extra else ""

    def chunk(self, delta: Delta) -> str:
        logprobs, extra = "null", ""
        if self._body.logprobs is not None:
            logprobs = answers.compact(_logprobs(delta.entries, self._codec))
        if self._body.return_token_ids:
            extra = f',"token_ids":{answers.compact(delta.token_ids)}'
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        return self._event(delta.choice.index, delta.text, logprobs, reason, extra)

    def _event(self, index: int, text: str, logprobs: str, reason: str, extra: str) -> str:
        return (
            f'{self._head}{{"index":{index},"text":{encode_string(text)},"logprobs":{logprobs},'
            f'"finish_reason":{reason}{extra}}}{self._tail}'
        )
