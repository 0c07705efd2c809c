"""POST /v1/completions."""

from __future__ import annotations

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
    deadline_of,
    encode,
    finite_logprob,
    plan_choices,
    prompt_entries,
    sampling_params,
)
from nybble.service.api.schemas import CompletionRequest, Prompt
from nybble.service.api.sse import encode_string
from nybble.service.api.state import Service, service_of
from nybble.service.engine.protocol import EngineInfo, SamplingParams
from nybble.service.errors import InvalidRequest
from nybble.service.text import SHORT_TEXT_CHARS, TextCodec

DEFAULT_MAX_TOKENS = 16


async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue one or more prompts."""
    arrival_s: float = request.state.arrival_s
    service = service_of(request)
    generation = await _plan(service, body, arrival_s)
    form = CompletionForm(service.codec, echo=bool(body.echo))
    return await answers.respond(request, service, body, generation, form)


async def _plan(service: Service, body: CompletionRequest, arrival_s: float) -> Generation:
    service.check_model(body.model)
    check_stream_options(body)
    echo, n = bool(body.echo), body.n or 1
    made = _choices_made(body, n)
    if body.max_tokens == 0 and not echo:
        raise InvalidRequest(
            "max_tokens: 0 needs echo: true; otherwise ask for at least 1", param="max_tokens"
        )
    check_count(service, len(body.prompt), made, "n" if made == n else "best_of")
    info = service.client.require_info()
    # Many short texts take as long as a long one.
    inline = sum(len(given) for given in body.prompt if isinstance(given, str)) <= SHORT_TEXT_CHARS
    # One that is only scored may fill the context.
    room = 0 if body.max_tokens == 0 else 1
    prompts = []
    for given in body.prompt:
        prompt = await _prompt_tokens(service.codec, given, info, echo=echo, inline=inline, room=room)
        check_prompt(prompt.token_ids, info, "prompt", room=room)
        prompts.append((prompt, _sampling(body, info, len(prompt.token_ids), ranked=made > n)))
    choices = plan_choices(
        service,
        prompts,
        body,
        n=made,
        arrival_s=arrival_s,
        lists_stop_token=True,
        shows_logprobs=body.logprobs is not None,
        echo=echo,
    )
    deadline_s = deadline_of(service, body, arrival_s)
    return Generation(service.client, choices, deadline_s=deadline_s, kept=n if made > n else None)


def _choices_made(body: CompletionRequest, n: int) -> int:
    """How many answers to each prompt are computed. Raises InvalidRequest where best_of does not go with the rest."""
    made = n if body.best_of is None else body.best_of
    if made < n:
        raise InvalidRequest(
            f"best_of={made} is less than n={n}; it is what n are chosen from", param="best_of"
        )
    if made > n and body.stream:
        raise InvalidRequest(
            f"best_of={made} with n={n} cannot be streamed: which are best is known at the end",
            param="best_of",
        )
    return made


def _sampling(
    body: CompletionRequest, info: EngineInfo, prompt_tokens: int, *, ranked: bool
) -> SamplingParams:
    room = info.max_model_len - prompt_tokens
    wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompt_logprobs = body.logprobs if body.echo else None
    if wanted == 0 and prompt_logprobs is None:
        prompt_logprobs = 0  # the engine's way of generating nothing
    logprobs = 0 if ranked and body.logprobs is None else body.logprobs
    return sampling_params(
        body, info, max_tokens=min(wanted, room), logprobs=logprobs, prompt_logprobs=prompt_logprobs
    )


async def _prompt_tokens(
    codec: TextCodec, prompt: Prompt, info: EngineInfo, *, echo: bool, inline: bool, room: int
) -> PromptTokens:
    if isinstance(prompt, str):
        return PromptTokens(await encode(codec, prompt, info, inline=inline, room=room), prompt)
    check_prompt(prompt, info, "prompt", room=room)
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

    def before(self, choice: Choice) -> list[Entry]:
        return prompt_entries(self._codec, choice) if self._echo and choice.shows_logprobs else []

    def logprobs(self, entries: list[Entry]) -> dict[str, Any]:
        return {
            "text_offset": [entry.start for entry in entries],
            "token_logprobs": [finite_logprob(e.token.logprob) if e.known else None for e in entries],
            "tokens": [self._token_text(entry.token.token_id) for entry in entries],
            "top_logprobs": [self._top(entry) if entry.known else None for entry in entries],
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
