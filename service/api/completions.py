"""POST /v1/completions."""

from __future__ import annotations

import time
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
    form = CompletionForm(service.codec, echo=bool(body.echo))
    return await answers.respond(request, service, body, generation, form)


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


class CompletionForm(answers.Form):
    """The legacy form: plain text, and logprobs as parallel lists with an entry per token, stop token included."""

    id_prefix = "cmpl-"
    kind = chunk_kind = "text_completion"
    prompt_ids_in_choice = True

    def __init__(self, codec: TextCodec, *, echo: bool) -> None:
        self._codec = codec
        self._echo = echo

    def whole(self, choice: Choice, text: str) -> dict[str, Any]:
        return {"text": choice.prompt.text + text if self._echo else text}

    def piece(self, text: str) -> str:
        return f'"text":{encode_string(text)}'

    def opening(self, choice: Choice) -> str | None:
        return self.piece(choice.prompt.text) if self._echo else None

    def logprobs(self, entries: list[Entry]) -> dict[str, Any]:
        return {
            "text_offset": [entry.start for entry in entries],
            "token_logprobs": [finite_logprob(entry.token.logprob) for entry in entries],
            "tokens": [self._token_text(entry.token.token_id) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
        }

    def _top(self, entry: Entry) -> dict[str, float]:
        """Best first, with the token itself. Tokens of equal text share a key, which the best one keeps."""
        result: dict[str, float] = {}
        for token_id, logprob in (*entry.token.top, (entry.token.token_id, entry.token.logprob)):
            result.setdefault(self._token_text(token_id), finite_logprob(logprob))
        return result

    def _token_text(self, token_id: int) -> str:
        """As OpenAI's legacy API names a token: bytes that are no text of their own are spelled out."""
        data = self._codec.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
