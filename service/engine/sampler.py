"""From logits to tokens.

Order: logit bias, repetition, presence and frequency penalties, temperature, top-k, top-p (of what top-k left), min-p,
then one uniform number per row picks from the cumulative distribution. A row's answer depends on its own logits and
its own number alone, never on its neighbours. Log-probabilities are those of the unchanged logits.

On a GPU nothing here waits for the device: what rows ask for goes there in one copy, tokens come back in one copy
(`Draft`), and the host reads them when it needs them. Where all rows are plainly greedy that is two launches and the copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import torch

from nybble.kernels.fused.selfcheck import best_problem
from nybble.service.engine.protocol import LOGPROB_FLOOR, SamplingParams, Token
from nybble.service.engine.sequence import Sequence

# Top-p looks at this many best candidates first; a flat distribution that needs more is sorted whole.
_TOP_P_CANDIDATES = 1024
# A lower temperature is greedy: scores divided by it may be no float32.
_LEAST_TEMPERATURE = 1e-5


class Draft:
    """Tokens of a pass, one a row; None where the row's logits are not finite.

    redrawn: rows whose token, once `tokens` has read it, is another than `token_ids` told.
    """

    def __init__(self, tokens: list[Token | None]) -> None:
        self._tokens = tokens
        self.redrawn: frozenset[int] = frozenset()

    def tokens(self) -> list[Token | None]:
        return self._tokens

    def token_ids(self, rows: Rows[int] | None = None) -> torch.Tensor:
        """int [R] on the device, of all rows or of these, without waiting for it; some index of the vocabulary where there is
        no token. That of a top-p row that has to be drawn again when it is read is not final."""
        ids = torch.tensor([0 if token is None else token.token_id for token in self._tokens])
        return ids if rows is None else ids[list(rows)]


class _DeviceDraft(Draft):
    """A draft that is still being computed: `packed`, the numbers that `read` makes tokens of, is on its way to the host. Its
    first numbers are the ids."""

    def __init__(
        self, ids: torch.Tensor, packed: torch.Tensor, read: Callable[[list[Any]], list[Token | None]]
    ) -> None:
        super().__init__([])
        self._ids = ids
        self._read = read
        self._arrived: Any = None
        if packed.device.type == "cpu":
            self._packed = packed
            return
        self._packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        self._packed.copy_(packed, non_blocking=True)
        make: Any = torch.cuda.Event  # untyped in torch
        self._arrived = make()
        self._arrived.record()

    def tokens(self) -> list[Token | None]:
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens = self._read(self._packed.tolist())
        told = enumerate(self._packed.flatten()[: len(tokens)].tolist())
        self.redrawn = frozenset(r for r, i in told if (token := tokens[r]) and token.token_id != i)
        return tokens

    def token_ids(self, rows: Rows[int] | None = None) -> torch.Tensor:
        if rows is None:
            return self._ids
        return self._ids.index_select(0, _upload(rows, torch.int64, self._ids.device))


def sample(logits: torch.Tensor, sequences: Rows[Sequence]) -> list[Token | None]:
    """`draw`, and wait for it."""
    return draw(logits, sequences).tokens()


def draw(logits: torch.Tensor, sequences: Rows[Sequence], ahead: int = 0) -> Draft:
    """logits [R, V], row r belongs to sequences[r] -> one Token a row; None where the row holds an infinity or a NaN.

    ahead: of so many rows, the first, the token is the one behind the next of its sequence. logits may be overwritten by
    what the device runs after this call.
    """
    params = [s.request.sampling for s in sequences]
    special = [r for r, p in enumerate(params) if _needs_work(p)]
    wanted = [r for r, p in enumerate(params) if p.logprobs is not None]
    if not special and not wanted:
        return _greedy(logits)
    uniform = [sequences[r].uniform(int(r < ahead)) for r in special]
    # Rows that may be drawn again are looked at again when they are read.
    scores = logits.to(torch.float32, copy=any(p.top_p < 1 for p in params))
    return _draw(scores, _best(logits), sequences, special, uniform, wanted, _TOP_P_CANDIDATES)


def _greedy(logits: torch.Tensor) -> Draft:
    """`draw` where every row takes its best and wants no log-probabilities."""

    def read(numbers: Rows[list[Any]]) -> list[Token | None]:
        return [Token(i) if ok else None for i, ok in zip(*numbers, strict=True)]

    if logits.device.type == "cpu":
        return Draft(read(_best_on_cpu(logits)))
    best = _best(logits)
    return _DeviceDraft(best[0], best, read)


def _draw(
    scores: torch.Tensor,
    best: torch.Tensor,
    sequences: Rows[Sequence],
    special: list[int],
    uniform: list[float],
    wanted: list[int],
    candidates: int,
) -> Draft:
    """best: `_best` of the scores. special: rows that are not plainly greedy, with their uniform numbers. wanted: rows
    with log-probabilities. candidates: how many a top-p row looks at; a row that needs more is drawn again, whole, when it
    is read."""
    params = [s.request.sampling for s in sequences]
    chosen, finite = best.to(torch.int64).unbind()
    settled = torch.ones_like(finite)
    if special:
        at = _upload(special, torch.int64, scores.device)
        rows = scores.index_select(0, at)  # a copy
        for i, r in enumerate(special):
            _penalise(rows[i], sequences[r])
        picked, enough = _pick(rows, [params[r] for r in special], uniform, candidates)
        chosen = chosen.index_copy(0, at, picked)
        settled = settled.index_copy(0, at, enough.to(torch.int64))
    columns = [chosen, finite, settled]
    alternatives = [params[r].logprobs or 0 for r in wanted]
    if wanted:
        at = _upload(wanted, torch.int64, scores.device)
        own, values, ids = _logprobs(scores.index_select(0, at), chosen.index_select(0, at), alternatives)
        columns += [own, values.flatten(), ids.flatten()]

    def read(numbers: list[float]) -> list[Token | None]:
        count = len(sequences)
        token_ids = [int(i) for i in numbers[:count]]
        tokens: list[Token | None] = [Token(i) for i in token_ids]
        if not all(numbers[2 * count : 3 * count]):
            whole = scores.shape[1]
            return _draw(scores, best, sequences, special, uniform, wanted, whole).tokens()
        if wanted:
            described = _tokens([token_ids[r] for r in wanted], alternatives, numbers[3 * count :])
            for r, token in zip(wanted, described, strict=True):
                tokens[r] = token
        return [token if ok else None for token, ok in zip(tokens, numbers[count : 2 * count], strict=True)]

    return _DeviceDraft(chosen, torch.cat([c.to(torch.float64) for c in columns]), read)


def _upload(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of numbers that the device gets without anybody waiting."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def score(logits: torch.Tensor, token_ids: list[int], alternatives: int) -> list[Token]:
    """logits [R, V] -> token_ids[r] with its log-probability in row r and the `alternatives` best of that row."""
    asked = [alternatives] * len(token_ids)
    own_ids = _upload(token_ids, torch.int64, logits.device)
    own, values, ids = _logprobs(logits.to(torch.float32), own_ids, asked)
    parts = (own, values.flatten(), ids.flatten())
    return _tokens(token_ids, asked, torch.cat([p.to(torch.float64) for p in parts]).tolist())


def _is_greedy(p: SamplingParams) -> bool:
    return p.temperature < _LEAST_TEMPERATURE


def _needs_work(p: SamplingParams) -> bool:
    return bool(
        not _is_greedy(p)
        or p.logit_bias
        or p.repetition_penalty != 1
        or p.presence_penalty != 0
        or p.frequency_penalty != 0
    )


def _best_on_cpu(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """Index of each row's largest logit (the first of equals), and whether all of the row's logits are finite.

    numpy, whose argmax is ten times torch's on a CPU (4 against 43 us at V = 49152). In numpy as in torch a NaN anywhere
    in a row is both its largest and its smallest.
    """
    array = logits.to(torch.float32).numpy()
    index = array.argmax(axis=-1).tolist()
    least = array.min(axis=-1).tolist()
    finite = [math.isfinite(array[r, i]) and math.isfinite(least[r]) for r, i in enumerate(index)]
    return index, finite


def warm(logits: torch.Tensor) -> None:
    """Have compiled what draws from such logits [R, V], before requests come."""
    _best(logits)


def _best(logits: torch.Tensor) -> torch.Tensor:
    """`_best_on_cpu` on any device, of any floating type: int32 [2, R], the indices and 1 where a row is finite."""
    if logits.device.type == "cpu":
        return torch.tensor(_best_on_cpu(logits), dtype=torch.int32)
    if best_problem(logits.device, logits.dtype) is None:
        from nybble.kernels.fused.argmax import launch_best

        return launch_best(logits)
    least, most = logits.aminmax(dim=-1)
    finite = torch.isfinite(least) & torch.isfinite(most)
    return torch.stack((logits.argmax(dim=-1), finite)).to(torch.int32)


def _penalise(row: torch.Tensor, sequence: Sequence) -> None:
    p, device = sequence.request.sampling, row.device
    if p.logit_bias:
        ids, values = zip(*p.logit_bias, strict=True)
        row[_upload(ids, torch.int64, device)] += _upload(values, torch.float32, device)
    if p.repetition_penalty != 1:
        seen = _upload(sorted(set(sequence.tokens)), torch.int64, device)
        value = row[seen]
        changed = torch.where(value > 0, value / p.repetition_penalty, value * p.repetition_penalty)
        # Out of float32's range it would be an infinity, and the difference of two of them a NaN.
        row[seen] = changed.nan_to_num()
    if sequence.generated:
        ids, counts = zip(*sequence.generated.items(), strict=True)
        count = _upload(counts, torch.float32, device)
        row[_upload(ids, torch.int64, device)] -= p.frequency_penalty * count + p.presence_penalty


@dataclass(frozen=True, slots=True)
class _Wishes:
    """What rows ask for, each float64 [R] on their device: temperature (1 where greedy), top_k (V where off), ..."""

    greedy: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    u: torch.Tensor

    def of(self, rows: torch.Tensor) -> _Wishes:
        columns = (self.greedy, self.temperature, self.top_k, self.top_p, self.min_p, self.u)
        return _Wishes(*(c.index_select(0, rows) for c in columns))


def _pick(
    scores: torch.Tensor, params: list[SamplingParams], uniform: list[float], candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One index per row of scores [R, V], which are changed: int64 [R]; and whether `candidates` were enough to tell."""
    device, vocab = scores.device, scores.shape[1]
    table = [
        (
            _is_greedy(p),
            1.0 if _is_greedy(p) else p.temperature,
            p.top_k if 0 < p.top_k < vocab else vocab,
            p.top_p,
            p.min_p,
            u,
        )
        for p, u in zip(params, uniform, strict=True)
    ]
    wishes = _Wishes(*_upload(table, torch.float64, device).unbind(1))
    # Shifting the best score to 0 first keeps any temperature, however small, inside float32.
    scores -= scores.amax(dim=-1, keepdim=True)
    probs = (scores / wishes.temperature.to(torch.float32).unsqueeze(1)).softmax(dim=-1)
    best = scores.argmax(dim=-1)
    out, settled = best, torch.ones(len(params), dtype=torch.bool, device=device)
    limited = [r for r, p in enumerate(params) if not _is_greedy(p) and (0 < p.top_k < vocab or p.top_p < 1)]
    free = [r for r, p in enumerate(params) if not _is_greedy(p) and r not in set(limited)]
    any_min_p = any(p.min_p for p in params)
    if free:
        at = _upload(free, torch.int64, device)
        theirs = wishes.of(at)
        kept = _apply_min_p(probs.index_select(0, at), theirs, any_min_p)
        out = out.index_copy(0, at, _invert(kept, theirs.u))
    if limited:
        at = _upload(limited, torch.int64, device)
        theirs = wishes.of(at)
        count = min(vocab, max([candidates, *(p.top_k for p in params if p.top_k < vocab)]))
        ids, kept, enough = _candidates(probs.index_select(0, at), theirs, count)
        kept = _apply_min_p(kept, theirs, any_min_p)
        out = out.index_copy(0, at, ids.gather(1, _invert(kept, theirs.u).unsqueeze(1)).squeeze(1))
        settled = settled.index_copy(0, at, enough)
    return torch.where(wishes.greedy > 0, best, out), settled


def _candidates(
    probs: torch.Tensor, wishes: _Wishes, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `count` best candidates of each row, in descending order, their probabilities with those cut by top-k and
    top-p set to 0, and whether a row's cut lies among them: (ids [R, C], probs [R, C], enough [R])."""
    vocab = probs.shape[1]
    top_k, top_p = wishes.top_k.unsqueeze(1), wishes.top_p.unsqueeze(1)
    values, ids = probs.topk(count, dim=-1)
    values = values.to(torch.float64)
    rank = torch.arange(count, device=probs.device)
    values = values.masked_fill(rank >= top_k, 0.0)
    # Top-p is a share of what top-k left; without top-k that is everything, seen here or not.
    total = torch.where(top_k < vocab, values.sum(dim=-1, keepdim=True), 1.0)
    before = values.cumsum(dim=-1) - values
    enough = (before[:, -1:] >= top_p * total) | (top_k <= count)
    # The best candidate always stays: its `before` is 0.
    kept = values.masked_fill((before >= top_p * total) & (rank > 0), 0.0)
    return ids, kept, enough.squeeze(1)


def _apply_min_p(probs: torch.Tensor, wishes: _Wishes, any_min_p: bool) -> torch.Tensor:
    """Drop candidates less likely than min_p times the best."""
    if not any_min_p:
        return probs
    least = wishes.min_p.to(probs.dtype).unsqueeze(1) * probs.amax(dim=-1, keepdim=True)
    return probs.masked_fill(probs < least, 0.0)


def _invert(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative probability exceeds u * total; float64, so that u < 1 never lands beyond."""
    cumulative = probs.to(torch.float64).cumsum(dim=-1)
    index = torch.searchsorted(cumulative, u.unsqueeze(1) * cumulative[:, -1:], right=True).squeeze(1)
    last = (probs > 0).to(torch.int64).cumsum(dim=-1).argmax(dim=-1)
    return torch.minimum(index, last)


def _logprobs(
    scores: torch.Tensor, own: torch.Tensor, alternatives: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """scores [R, V] float32, own int64 [R], one count of alternatives a row -> the log-probability [R] of `own`, and
    the best ones' [R, C] with their ids [R, C]."""
    logprobs = scores.log_softmax(dim=-1).nan_to_num_(nan=LOGPROB_FLOOR).clamp_min_(LOGPROB_FLOOR)
    values, ids = logprobs.topk(min(max([1, *alternatives]), logprobs.shape[1]), dim=-1)
    return logprobs.gather(1, own.unsqueeze(1)).squeeze(1), values, ids


def _tokens(token_ids: list[int], alternatives: list[int], numbers: list[float]) -> list[Token]:
    """Tokens from what `_logprobs` gave, flattened in its order."""
    rows = len(token_ids)
    width = (len(numbers) - rows) // (2 * rows)
    values, ids = numbers[rows : rows + rows * width], numbers[rows + rows * width :]
    tokens = []
    for r, (token_id, count) in enumerate(zip(token_ids, alternatives, strict=True)):
        part = slice(r * width, r * width + min(count, width))
        top = tuple(zip(map(int, ids[part]), values[part], strict=True))
        tokens.append(Token(token_id, numbers[r], top))
    return tokens
