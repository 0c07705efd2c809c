"""One request inside the engine. No torch here: scheduling is bookkeeping."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import Counter

from nybble.service.engine.protocol import Request, Token


class Sequence:
    """A request's tokens and how far they are computed.

    tokens       prompt, then generated ids
    computed     leading tokens whose keys and values are in the cache
    blocks       KV block numbers, in order; enough for `computed` tokens and those of the current step
    reserved     a block range the pool keeps free for this sequence's growth as long as it can (start, stop)
    generated    how often each id was generated, kept only when a penalty needs it
    scored       prompt tokens from the second on with their log-probabilities, None unless asked for
    committed    leading blocks that are full and that the pool knows by their content (see KV blocks)
    gave_way_len output_len when it last made way for another one, None before
    cached       prompt tokens that needed no computing when the request first ran; None before
    """

    __slots__ = (
        "_keys",
        "_numbers",
        "blocks",
        "cached",
        "committed",
        "computed",
        "gave_way_len",
        "generated",
        "prompt_len",
        "random",
        "request",
        "reserved",
        "scheduled_s",
        "scored",
        "stop_ids",
        "tokens",
    )

    def __init__(self, request: Request, eos_token_ids: tuple[int, ...]) -> None:
        sampling = request.sampling
        self.request = request
        self.tokens = list(request.prompt)
        self.prompt_len = len(request.prompt)
        self.computed = 0
        self.committed = 0
        self.cached: int | None = None
        self.gave_way_len: int | None = None
        self.blocks: list[int] = []
        self._keys: list[bytes] = []
        self.reserved: tuple[int, int] | None = None
        self.scheduled_s: float | None = None
        self.stop_ids = frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else eos_token_ids))
        # One uniform number a token, drawn on the host: a seed gives the same answer alone, in a batch and after
        # preemption, on any device. Unseeded requests take their seed from the system.
        self.random = random.Random(sampling.seed)
        self._numbers: list[float] = []  # drawn for the next token, the one after it, ...
        counts = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        self.generated: Counter[int] | None = Counter() if counts else None
        self.scored: list[Token] | None = None if sampling.prompt_logprobs is None else []

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def group(self) -> str:
        return self.request.group or self.request.request_id

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def left(self) -> int:
        """Tokens that it may still generate."""
        return self.request.sampling.max_tokens - self.output_len

    @property
    def pending(self) -> int:
        """Tokens not yet computed; 1 while decoding, 0 while the next token is on its way from the device."""
        return len(self.tokens) - self.computed

    @property
    def needs_its_tokens(self) -> bool:
        """Whether choosing the next token takes all those before it, on the host."""
        return self.generated is not None or self.request.sampling.repetition_penalty != 1.0

    def unscored(self, stop: int) -> range:
        """Positions in computed..stop whose logits tell the probability of a prompt token that has no score yet. After
        a preemption the prompt is computed again, but what was scored stays."""
        if self.scored is None:
            return range(0)
        return range(max(self.computed, len(self.scored)), min(stop, self.prompt_len - 1))

    def block_key(self, index: int, block_size: int) -> bytes:
        """What the index-th full block of tokens is known by: a digest of all tokens up to the block's end, and of the
        request's cache salt. Two blocks of one key hold the keys and values of the same tokens at the same positions.

        Computed when it is first asked for, with those before it: about 1.5 us each, which running streams wait for.
        """
        keys = self._keys
        while len(keys) <= index:
            start = len(keys) * block_size
            before = keys[-1] if keys else _root(self.request.cache_salt)
            block = array("q", self.tokens[start : start + block_size])
            keys.append(hashlib.sha256(before + block.tobytes()).digest())
        return keys[index]

    @property
    def known_keys(self) -> list[bytes]:
        """The block keys that were asked for so far; not to be changed."""
        return self._keys

    def uniform(self, ahead: int = 0) -> float:
        """The uniform number of the token `ahead` places behind the next one; the same however often it is asked for, so
        that a step can be put back."""
        while len(self._numbers) <= ahead:
            self._numbers.append(self.random.random())
        return self._numbers[ahead]

    def append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        del self._numbers[:1]
        if self.generated is not None:
            self.generated[token_id] += 1

    def finish_reason(self, max_model_len: int) -> str | None:
        """After an append: why the sequence is done, or None."""
        if self.tokens[-1] in self.stop_ids:
            return "stop"
        return "length" if self.is_full(max_model_len) else None

    def is_full(self, max_model_len: int, ahead: int = 0) -> bool:
        """Whether nothing may follow its tokens and `ahead` more."""
        return self.left <= ahead or len(self.tokens) + ahead >= max_model_len


def _root(cache_salt: str | None) -> bytes:
    """What stands for "before the first token": requests of different salts never share a block."""
    return hashlib.sha256(
        b"" if cache_salt is None else b"salt:" + cache_salt.encode("utf-8", "surrogatepass")
    ).digest()
