"""From logits to tokens.

Order: logit bias, repetition, presence and frequency penalties, temperature, top-k, top-p (of what top-k left), min-p,
then one uniform number per row picks from the cumulative distribution. A row's answer depends on its own logits and
its own number alone, never on its neighbours. Log-probabilities are those of the unchanged logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows

import torch

from nybble.service.engine.protocol import LOGPROB_FLOOR, SamplingParams, Token
from nybble.service.engine.sequence import Sequence

# Top-p looks at this many best candidates first; a flat distribution that needs more is sorted whole.
_TOP_P_CANDIDATES = 1024


def sample(logits: torch.Tensor, sequences: Rows[Sequence]) -> list[Token | None]:
    """logits [R, V], row r belongs to sequences[r] -> one Token a row; None where the row's logits are not finite."""
    scores = logits.to(torch.float32)
    params = [s.request.sampling for s in sequences]
    best, finite = _best(scores)
    chosen = list(best)
    special = [r for r, p in enumerate(params) if _needs_work(p)]
    if special:
        rows = scores[special]  # a copy
        for i, r in enumerate(special):
            _penalise(rows[i], sequences[r])
        picked = _pick(rows, [params[r] for r in special], [sequences[r].random.random() for r in special])
        for r, token in zip(special, picked, strict=True):
            chosen[r] = token
    wanted = [r for r, p in enumerate(params) if p.logprobs is not None]
    described = _describe(scores, wanted, chosen, params) if wanted else {}
    return [
        (described.get(r) or Token(token)) if ok else None
        for r, (token, ok) in enumerate(zip(chosen, finite, strict=True))
    ]


def score(logits: torch.Tensor, token_ids: list[int], alternatives: int) -> list[Token]:
    """logits [R, V] -> token_ids[r] with its log-probability in row r and the `alternatives` best of that row."""
    return _with_logprobs(logits.to(torch.float32), token_ids, [alternatives] * len(token_ids))


def _needs_work(p: SamplingParams) -> bool:
    return bool(
        p.temperature > 0
        or p.logit_bias
        or p.repetition_penalty != 1
        or p.presence_penalty != 0
        or p.frequency_penalty != 0
    )


def _best(scores: torch.Tensor) -> tuple[list[int], list[bool]]:
    """Index of each row's largest score (the first of equals), and whether that score is a finite number.

    A NaN anywhere in a row comes out as its largest, here and in numpy. numpy's argmax is ten times torch's on a CPU
    (4 against 43 us at V = 49152).
    """
    if scores.device.type == "cpu":
        array = scores.numpy()
        index = array.argmax(axis=-1).tolist()
        return index, [math.isfinite(array[r, i]) for r, i in enumerate(index)]
    values, indices = scores.max(dim=-1)
    packed = torch.stack((indices.to(torch.float64), values.to(torch.float64))).tolist()
    return [int(i) for i in packed[0]], [math.isfinite(v) for v in packed[1]]


def _penalise(row: torch.Tensor, sequence: Sequence) -> None:
    p = sequence.request.sampling
    if p.logit_bias:
        ids, values = zip(*p.logit_bias, strict=True)
        row[torch.tensor(ids, device=row.device)] += torch.tensor(values, device=row.device)
    if p.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(sequence.tokens)), device=row.device)
        value = row[seen]
        row[seen] = torch.where(value > 0, value / p.repetition_penalty, value * p.repetition_penalty)
    if sequence.generated:
        ids, counts = zip(*sequence.generated.items(), strict=True)
        count = torch.tensor(counts, dtype=torch.float32, device=row.device)
        row[torch.tensor(ids, device=row.device)] -= p.frequency_penalty * count + p.presence_penalty


def _pick(scores: torch.Tensor, params: list[SamplingParams], uniform: list[float]) -> list[int]:
    """One index per row of scores [R, V], which are changed."""
    device, vocab = scores.device, scores.shape[1]
    greedy = torch.tensor([p.temperature == 0 for p in params], device=device)
    temperature = torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float32, device=device)
    # Shifting the best score to 0 first keeps any temperature, however small, inside float32.
    scores -= scores.amax(dim=-1, keepdim=True)
    probs = (scores / temperature.unsqueeze(1)).softmax(dim=-1)
    best = scores.argmax(dim=-1)
    u = torch.tensor(uniform, dtype=torch.float64, device=device)

    limited = [r for r, p in enumerate(params) if p.temperature > 0 and (0 < p.top_k < vocab or p.top_p < 1)]
    free = [r for r, p in enumerate(params) if p.temperature > 0 and r not in set(limited)]
    out = best.clone()
    if free:
        kept = _apply_min_p(probs[free], [params[r] for r in free])
        out[free] = _invert(kept, u[free])
    if limited:
        ids, kept = _candidates(probs[limited], [params[r] for r in limited])
        kept = _apply_min_p(kept, [params[r] for r in limited])
        out[limited] = ids.gather(1, _invert(kept, u[limited]).unsqueeze(1)).squeeze(1)
    result: list[int] = torch.where(greedy, best, out).tolist()
    return result


def _candidates(probs: torch.Tensor, params: list[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """Best candidates of each row, in descending order, and their probabilities with those cut by top-k and top-p
    set to 0: (ids [R, C], probs [R, C])."""
    vocab = probs.shape[1]
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params], device=probs.device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=probs.device).unsqueeze(1)
    count = min(vocab, max([_TOP_P_CANDIDATES, *(p.top_k for p in params if p.top_k < vocab)]))
    while True:
        values, ids = probs.topk(count, dim=-1)
        values = values.to(torch.float64)
        rank = torch.arange(count, device=probs.device)
        values = values.masked_fill(rank >= top_k.unsqueeze(1), 0.0)
        # Top-p is a share of what top-k left; without top-k that is everything, seen here or not.
        total = torch.where(top_k.unsqueeze(1) < vocab, values.sum(dim=-1, keepdim=True), 1.0)
        before = values.cumsum(dim=-1) - values
        enough = (before[:, -1:] >= top_p * total) | (top_k.unsqueeze(1) <= count)
        if count == vocab or bool(enough.all()):
            # The best candidate always stays: its `before` is 0.
            return ids, values.masked_fill((before >= top_p * total) & (rank > 0), 0.0)
        count = vocab


def _apply_min_p(probs: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Drop candidates less likely than min_p times the best."""
    if all(p.min_p == 0 for p in params):
        return probs
    min_p = torch.tensor([p.min_p for p in params], dtype=probs.dtype, device=probs.device).unsqueeze(1)
    return probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0.0)


def _invert(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative probability exceeds u * total; float64, so that u < 1 never lands beyond."""
    cumulative = probs.to(torch.float64).cumsum(dim=-1)
    index = torch.searchsorted(cumulative, u.unsqueeze(1) * cumulative[:, -1:], right=True).squeeze(1)
    last = (probs > 0).to(torch.int64).cumsum(dim=-1).argmax(dim=-1)
    return torch.minimum(index, last)


def _describe(
    scores: torch.Tensor, wanted: list[int], chosen: list[int], params: list[SamplingParams]
) -> dict[int, Token]:
    """Tokens with log-probabilities for the rows that asked."""
    tokens = _with_logprobs(
        scores[wanted], [chosen[r] for r in wanted], [params[r].logprobs or 0 for r in wanted]
    )
    return dict(zip(wanted, tokens, strict=True))


def _with_logprobs(scores: torch.Tensor, token_ids: list[int], alternatives: list[int]) -> list[Token]:
    """scores [R, V] float32, one token and one count of alternatives a row."""
    logprobs = scores.log_softmax(dim=-1).nan_to_num_(nan=LOGPROB_FLOOR).clamp_min_(LOGPROB_FLOOR)
    values, ids = logprobs.topk(min(max([1, *alternatives]), logprobs.shape[1]), dim=-1)
    own = logprobs.gather(1, torch.tensor(token_ids, device=logprobs.device).unsqueeze(1)).squeeze(1)
    rows = zip(token_ids, own.tolist(), values.tolist(), ids.tolist(), alternatives, strict=True)
    return [
        Token(token_id, logprob, tuple(zip(best_ids, best, strict=True))[:count])
        for token_id, logprob, best, best_ids, count in rows
    ]
