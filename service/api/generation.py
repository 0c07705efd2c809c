"""What completions and chat share: from a validated request to the engine, and from its tokens to text.

One HTTP request asks for one or more choices (n answers to each prompt); each is one request to the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nybble.service.api.schemas import SamplingFields
from nybble.service.api.state import Service
from nybble.service.client import EngineClient, OutputStream
from nybble.service.engine.protocol import (
    LOGPROB_FLOOR,
    EngineInfo,
    Request,
    SamplingParams,
    StepOutput,
    Token,
)
from nybble.service.errors import DeadlineExceeded, GenerationFailed, InvalidRequest
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
    """A token in a logprobs object. start: characters of the text before it. Nothing is known of the probability of a
    prompt's first token."""

    token: Token
    start: int
    known: bool = True


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
    """One answer under way. number: its place among the choices of its request, from 0.

    text_start: how many characters of the prompt are shown before the answer.
    """

    number: int
    request: Request
    prompt: PromptTokens
    stream: TextStream
    # Whether a stop token, which has no text in the answer, has a place in its logprobs.
    lists_stop_token: bool
    shows_logprobs: bool
    text_start: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    prompt_logprobs: tuple[Token, ...] = ()
    _logprob_sum: float = 0.0
    _entries: deque[Entry] = field(default_factory=deque)
    _token_ids: list[int] = field(default_factory=list)

    @property
    def logprob_per_token(self) -> float:
        """By which best_of ranks; needs the engine's logprobs."""
        return self._logprob_sum / max(1, self.completion_tokens)

    def feed(self, output: StepOutput) -> Delta | None:
        """Takes a step's tokens; returns what can be shown now, None if nothing can."""
        self.cached_tokens += output.cached_tokens
        if output.prompt_logprobs:
            self.prompt_logprobs = output.prompt_logprobs
        text = ""
        for i, token in enumerate(output.tokens):
            self.completion_tokens += 1
            self._token_ids.append(token.token_id)
            is_stop_token = output.finish_reason == "stop" and i == len(output.tokens) - 1
            if token.logprob is not None:
                self._logprob_sum += finite_logprob(token.logprob)
                if self.shows_logprobs and (self.lists_stop_token or not is_stop_token):
                    self._entries.append(Entry(token, self.text_start + self.stream.decoded))
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
        shown_end = self.text_start + self.stream.shown
        while entries and (everything or entries[0].start < shown_end):
            shown.append(entries.popleft())
        return shown


class Generation:
    """The choices of one HTTP request. deadline_s, of time.monotonic(), ends it; kept: how many of each prompt's choices
    the answer has, the best ones (None: all)."""

    def __init__(
        self,
        client: EngineClient,
        choices: Sequence[Choice],
        *,
        deadline_s: float | None = None,
        kept: int | None = None,
    ) -> None:
        self.choices = list(choices)
        self._client = client
        self._deadline_s = deadline_s
        self._kept = kept
        self._scheduled_s: float | None = None
        self._first_s: float | None = None
        self._by_id = {choice.request.request_id: choice for choice in choices}

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """What becomes showable, in batches, until all choices have ended. Closing it early aborts them.

        Raises Unavailable, QueueFull, DeadlineExceeded or GenerationFailed.
        """
        async with (
            self._client.submit([choice.request for choice in self.choices]) as stream,
            self._limit(stream),
        ):
            while outputs := await stream.next():
                batch = []
                for output in outputs:
                    choice = self._by_id[output.request_id]
                    if self._first_s is None:
                        self._note_first(output)
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

    def _note_first(self, output: StepOutput) -> None:
        if self._scheduled_s is None:
            self._scheduled_s = output.scheduled_s
        if output.tokens:
            self._first_s = time.monotonic()

    def summary(self) -> dict[str, Any]:
        """Counts and timings so far, for a log line; milliseconds from the arrival on, None for what has not come."""
        usage = self.usage()
        arrival_s = self.choices[0].request.arrival_s
        reasons = Counter(choice.finish_reason or "abort" for choice in self.choices)
        since = {"queue_ms": self._scheduled_s, "first_token_ms": self._first_s}
        return {
            "choices": len(self.choices),
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "finish_reason": next(iter(reasons)) if len(reasons) == 1 else dict(reasons),
            **{name: None if at is None else round((at - arrival_s) * 1e3, 1) for name, at in since.items()},
        }

    @contextlib.asynccontextmanager
    async def _limit(self, stream: OutputStream) -> AsyncIterator[None]:
        """Lets the stream end with DeadlineExceeded when it is time."""
        if self._deadline_s is None:
            yield
            return
        error = DeadlineExceeded(
            "the request took longer than its time limit; raise timeout_s or ask for less"
        )
        left_s = max(0.0, self._deadline_s - time.monotonic())
        timer = asyncio.get_running_loop().call_later(left_s, stream.give_up, error)
        try:
            yield
        finally:
            timer.cancel()

    def answers(self) -> list[Choice]:
        """The choices that the answer has, in its order; of those that best_of made, each prompt's best."""
        if self._kept is None:
            return self.choices
        groups: dict[int, list[Choice]] = {}
        for choice in self.choices:
            groups.setdefault(id(choice.prompt), []).append(choice)
        return [
            choice
            for group in groups.values()
            for choice in sorted(group, key=lambda one: -one.logprob_per_token)[: self._kept]
        ]

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
    body: SamplingFields,
    info: EngineInfo,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
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
        prompt_logprobs=prompt_logprobs,
    )


def _default(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def check_count(service: Service, prompts: int, n: int, param: str = "n") -> None:
    """Raises InvalidRequest for more choices than can ever be in progress; param is what says n."""
    if n * prompts > service.settings.max_queue:
        raise InvalidRequest(
            f"{prompts} prompts with {param}={n} are {n * prompts} requests; this server takes at most "
            f"{service.settings.max_queue} at once",
            param=param if n > 1 else "prompt",
        )


def deadline_of(service: Service, body: SamplingFields, arrival_s: float) -> float | None:
    """When to give up, of time.monotonic(): after the request's own limit or the server's, whichever is less."""
    limits = [
        limit for limit in (body.timeout_s, service.settings.request_timeout_s or None) if limit is not None
    ]
    return arrival_s + min(limits) if limits else None


def plan_choices(
    service: Service,
    prompts: Sequence[tuple[PromptTokens, SamplingParams]],
    body: SamplingFields,
    *,
    n: int,
    arrival_s: float,
    lists_stop_token: bool,
    shows_logprobs: bool,
    echo: bool = False,
) -> list[Choice]:
    """n choices of each prompt, numbered prompt by prompt."""
    choices: list[Choice] = []
    for prompt, sampling in prompts:
        for i in range(n):
            request = Request(
                uuid.uuid4().hex,
                prompt.token_ids,
                _with_seed(sampling, i),
                arrival_s,
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
            )
            stream = TextStream(service.codec.detokenizer(), body.stop)
            choice = Choice(len(choices), request, prompt, stream, lists_stop_token, shows_logprobs)
            choice.text_start = len(prompt.text) if echo else 0
            choices.append(choice)
    return choices


def prompt_entries(codec: TextCodec, choice: Choice) -> list[Entry]:
    """The prompt's tokens as logprobs entries. Offsets are of the text as it was given, which may lack the space that a
    tokenizer puts before a first word."""
    stream = codec.detokenizer()
    pieces = [stream.feed(token_id) for token_id in choice.prompt.token_ids]
    decoded, shown = sum(map(len, pieces)), len(choice.prompt.text)
    position = min(0, shown - decoded)
    entries = []
    first = Token(choice.prompt.token_ids[0])
    for token, piece in zip((first, *choice.prompt_logprobs), pieces, strict=True):
        entries.append(Entry(token, min(max(0, position), shown), known=token is not first))
        position += len(piece)
    return entries


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
