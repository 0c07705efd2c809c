"""What completions and chat share: from a validated request to the engine, and from its tokens to text.

One HTTP request asks for one or more choices (n answers to each prompt); each is one request to the engine.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nybble.service.api.schemas import SamplingFields
from nybble.service.api.state import Service
from nybble.service.client import EngineClient
from nybble.service.engine.protocol import (
    LOGPROB_FLOOR,
    EngineInfo,
    Request,
    SamplingParams,
    StepOutput,
    Token,
)
from nybble.service.errors import GenerationFailed, InvalidRequest
from nybble.service.text import TextCodec, TextStream

# top_p 0 means the single best token; a sum of probabilities is never above this by less than one token.
LEAST_TOP_P = 1e-6


@dataclass(frozen=True)
class PromptTokens:
    """One prompt; text is what echo shows."""

    token_ids: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True)
class Entry:
    """A token in a logprobs object. start: characters of the answer before it."""

    token: Token
    start: int


@dataclass(frozen=True)
class Delta:
    """What one step adds to a choice."""

    choice: Choice
    text: str
    entries: list[Entry]
    token_ids: list[int]
    finish_reason: str | None


@dataclass
class Choice:
    """One answer under way."""

    index: int
    request: Request
    prompt: PromptTokens
    stream: TextStream
    # Whether a stop token, which has no text in the answer, has a place in its logprobs.
    lists_stop_token: bool
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    _entries: deque[Entry] = field(default_factory=deque)
    _token_ids: list[int] = field(default_factory=list)

    @property
    def wants_logprobs(self) -> bool:
        return self.request.sampling.logprobs is not None

    def feed(self, output: StepOutput) -> Delta | None:
        """Takes a step's tokens; returns what can be shown now, None if nothing can."""
        self.cached_tokens += output.cached_tokens
        text = ""
        for i, token in enumerate(output.tokens):
            self.completion_tokens += 1
            self._token_ids.append(token.token_id)
            is_stop_token = output.finish_reason == "stop" and i == len(output.tokens) - 1
            if token.logprob is not None and (self.lists_stop_token or not is_stop_token):
                self._entries.append(Entry(token, self.stream.decoded))
            if is_stop_token:
                break
            text += self.stream.feed(token.token_id)
            if self.stream.stopped:
                self.finish_reason = "stop"
                break
        if output.finish_reason is not None and self.finish_reason is None:
            text += self.stream.finish()
            self.finish_reason = "stop" if self.stream.stopped else output.finish_reason
        if not text and self.finish_reason is None:
            return None
        token_ids, self._token_ids = self._token_ids, []
        return Delta(self, text, self._shown_entries(), token_ids, self.finish_reason)

    def _shown_entries(self) -> list[Entry]:
        """The tokens of which some text has been shown; at an end without a stop string, all that are left."""
        entries, shown = self._entries, []
        everything = self.finish_reason is not None and not self.stream.stopped
        while entries and (everything or entries[0].start < self.stream.shown):
            shown.append(entries.popleft())
        return shown


class Generation:
    """The choices of one HTTP request."""

    def __init__(self, client: EngineClient, choices: Sequence[Choice]) -> None:
        self.choices = list(choices)
        self._client = client
        self._by_id = {choice.request.request_id: choice for choice in choices}

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """What becomes showable, in batches, until all choices have ended. Closing it early aborts them.

        Raises Unavailable, QueueFull or GenerationFailed.
        """
        async with self._client.submit([choice.request for choice in self.choices]) as stream:
            while outputs := await stream.next():
                batch = []
                for output in outputs:
                    choice = self._by_id[output.request_id]
                    if output.finish_reason == "error":
                        raise GenerationFailed(
                            f"the engine ended this request: {output.error or 'no reason given'}"
                        )
                    if choice.finish_reason is not None:
                        continue
                    delta = choice.feed(output)
                    if choice.finish_reason is not None and output.finish_reason is None:
                        stream.abort(output.request_id, "stop")
                    if delta is not None:
                        batch.append(delta)
                if batch:
                    yield batch

    def usage(self) -> dict[str, Any]:
        """Each prompt counts once, however many choices it has."""
        prompts = {id(choice.prompt): choice for choice in reversed(self.choices)}.values()
        prompt_tokens = sum(len(choice.prompt.token_ids) for choice in prompts)
        completion_tokens = sum(choice.completion_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in prompts)},
        }


async def encode(codec: TextCodec, text: str, info: EngineInfo, *, inline: bool) -> tuple[int, ...]:
    """Token ids of a prompt that is not a conversation, made in a thread unless inline.

    Raises InvalidRequest for one that is longer than the context can be.
    """
    check_length(codec.fewest_tokens(text), info, "prompt")
    return codec.encode(text) if inline else await asyncio.to_thread(codec.encode, text)


def check_prompt(token_ids: Sequence[int], info: EngineInfo, param: str) -> None:
    """Raises InvalidRequest unless these are tokens of the model and leave room for at least one more."""
    if not token_ids:
        raise InvalidRequest("the prompt has no tokens", param=param)
    check_length(len(token_ids), info, param)
    _check_token_ids(token_ids, info, param)


def check_length(tokens: int, info: EngineInfo, param: str) -> None:
    """tokens: how many the prompt has at least."""
    if tokens >= info.max_model_len:
        raise InvalidRequest(
            f"the prompt has {tokens} tokens or more; this model's context is {info.max_model_len} tokens, prompt and "
            "answer together; shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )


def _check_token_ids(token_ids: Sequence[int], info: EngineInfo, param: str) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < info.vocab_size:
            raise InvalidRequest(
                f"{token_id if abs(token_id) < 2**63 else 'a huge number'} is not a token id of this model; "
                f"they go from 0 to {info.vocab_size - 1}",
                param=param,
            )


def sampling_params(
    body: SamplingFields, info: EngineInfo, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """The engine's parameters; raises InvalidRequest for token ids that the model does not have."""
    stop_token_ids = tuple(body.stop_token_ids or ())
    _check_token_ids(stop_token_ids, info, "stop_token_ids")
    _check_token_ids([token_id for token_id, _ in body.logit_bias], info, "logit_bias")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_default(body.temperature, 1.0),
        top_k=max(0, body.top_k or 0),
        top_p=max(LEAST_TOP_P, _default(body.top_p, 1.0)),
        min_p=_default(body.min_p, 0.0),
        repetition_penalty=_default(body.repetition_penalty, 1.0),
        presence_penalty=_default(body.presence_penalty, 0.0),
        frequency_penalty=_default(body.frequency_penalty, 0.0),
        logit_bias=body.logit_bias,
        seed=body.seed,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
    )


def _default(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def check_count(service: Service, prompts: int, n: int | None) -> None:
    """Raises InvalidRequest for more choices than can ever be in progress."""
    n = n or 1
    if n * prompts > service.settings.max_queue:
        raise InvalidRequest(
            f"{prompts} prompts with n={n} are {n * prompts} requests; this server takes at most "
            f"{service.settings.max_queue} at once",
            param="n" if n > 1 else "prompt",
        )


def plan_choices(
    service: Service,
    prompts: Sequence[tuple[PromptTokens, SamplingParams]],
    body: SamplingFields,
    *,
    arrival_s: float,
    lists_stop_token: bool,
) -> list[Choice]:
    """n choices of each prompt, numbered prompt by prompt."""
    n = body.n or 1
    choices: list[Choice] = []
    for prompt, sampling in prompts:
        for i in range(n):
            request = Request(
                uuid.uuid4().hex,
                prompt.token_ids,
                _with_seed(sampling, i),
                arrival_s,
                cache_salt=body.cache_salt,
            )
            stream = TextStream(service.codec.detokenizer(), body.stop)
            choices.append(Choice(len(choices), request, prompt, stream, lists_stop_token))
    return choices


def _with_seed(sampling: SamplingParams, i: int) -> SamplingParams:
    if sampling.seed is None or i == 0:
        return sampling
    # Stays within 64 bits: the largest seed is followed by the smallest.
    seed = (sampling.seed + i + 2**63) % 2**64 - 2**63
    return replace(sampling, seed=seed)


def check_stream_options(body: SamplingFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")


def finite_logprob(value: float | None) -> float:
    """Also replaces NaN."""
    return value if value is not None and value > LOGPROB_FLOOR else LOGPROB_FLOOR
