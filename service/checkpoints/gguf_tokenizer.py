"""The tokenizer inside a GGUF file, as tokenizer.json.

Two kinds are understood: byte-level BPE ("gpt2"), whose pre-tokenizer the file names and a table here spells out, and
SentencePiece BPE ("llama"), whose merges follow from the scores of its pieces. Anything else is refused by name: a
dropped rule makes a model that runs and is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from nybble.service.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # of tokenizer.ggml.token_type
SPACE = "\u2581"

# How single words are told apart before the byte-level step, as in the tokenizer.json of the models that use them.
GPT4_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = GPT4_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED = (
    r"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{short}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{short}|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O_PATTERN = _CASED.format(upper=_UPPER, lower=_LOWER, short=_SHORT_FORMS, digits=r"\p{N}{1,3}")
TEKKEN_PATTERN = _CASED.format(upper=_UPPER, lower=_LOWER, short="", digits=r"\p{N}")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """pattern None: GPT-2's, which the byte-level step has built in. digits: each digit alone, before that.
    whole_words: a word that is a token is taken without merging."""

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False


# tokenizer.ggml.pre -> rules
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits=True),
    "refact": PreTokenizer(digits=True),
    "starcoder": PreTokenizer(digits=True),
    "qwen2": PreTokenizer(QWEN2_PATTERN, nfc=True),
    "llama-bpe": PreTokenizer(GPT4_PATTERN, whole_words=True),
    "llama3": PreTokenizer(GPT4_PATTERN, whole_words=True),
    "llama-v3": PreTokenizer(GPT4_PATTERN, whole_words=True),
    "dbrx": PreTokenizer(GPT4_PATTERN),
    "smaug-bpe": PreTokenizer(GPT4_PATTERN),
    "gpt-4o": PreTokenizer(GPT4O_PATTERN),
    "tekken": PreTokenizer(TEKKEN_PATTERN, whole_words=True),
}

Get = Callable[..., Any]  # (key, *default) -> value of a key of the file
Refuse = Callable[[str, object, str], CheckpointError]  # (key, given, accepted)


def tokenizer_of(get: Get, refuse: Refuse) -> Tokenizer:
    """Raises CheckpointError, made by `refuse`, for a tokenizer that is not understood."""
    kind = get("tokenizer.ggml.model")
    if kind not in KINDS:
        raise refuse(
            "tokenizer.ggml.model", kind, " or ".join(f"{name} ({what})" for name, (_, what) in KINDS.items())
        )
    tokens = get("tokenizer.ggml.tokens")
    types = get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise refuse("tokenizer.ggml.token_type", f"{len(types)} types", f"{len(tokens)}, one per token")
    tokenizer = KINDS[kind][0](get, refuse, tokens, types)
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=token_type == CONTROL, normalized=False)])
    _add_ends(tokenizer, get, tokens, adds_bos=kind == "llama")
    return tokenizer


def _byte_level(get: Get, refuse: Refuse, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    name = get("tokenizer.ggml.pre", None)
    if name not in PRE_TOKENIZERS:
        raise refuse("tokenizer.ggml.pre", name, ", ".join(PRE_TOKENIZERS))
    rules = PRE_TOKENIZERS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in get("tokenizer.ggml.merges")]
    try:
        model = models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=rules.whole_words)
        tokenizer = Tokenizer(model)
    except Exception as error:  # tokenizers has no narrower one
        raise refuse(
            "tokenizer.ggml.merges", str(error), "pairs of tokens whose concatenation is a token"
        ) from error
    steps: list[Any] = []
    if rules.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rules.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(rules.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules.pattern is None))
    if rules.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(get: Get, refuse: Refuse, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    for key in ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"):
        if get(key, None):
            raise refuse(key, "set", "a tokenizer that keeps the text as it is")
    scores = get("tokenizer.ggml.scores")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    whole = {
        token: float(score)
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind in (NORMAL, USER_DEFINED, UNUSED)
    }
    has_bytes = BYTE in types
    unknown = get("tokenizer.ggml.unknown_token_id", None)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            merges_of(whole, vocabulary),
            unk_token=tokens[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    prefix = bool(get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    back: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
    return tokenizer


def merges_of(scores: Mapping[str, float], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores highest; as a list of merges, best first.

    Of several ways to split one piece the earlier merge is that of the lower token ids.
    """
    found = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-score, vocabulary[piece], vocabulary[left], vocabulary[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _add_ends(tokenizer: Tokenizer, get: Get, tokens: Sequence[str], adds_bos: bool) -> None:
    """What is put before and after a text, as the file says; SentencePiece models begin with BOS unless it says no."""
    first, last = [], []
    bos, eos = (get(f"tokenizer.ggml.{name}_token_id", None) for name in ("bos", "eos"))
    if get("tokenizer.ggml.add_bos_token", adds_bos) and bos is not None:
        first = [tokens[bos]]
    if get("tokenizer.ggml.add_eos_token", False) and eos is not None:
        last = [tokens[eos]]
    if first or last:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *first, "$B", *last],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*first, *last}],
        )


KINDS: dict[str, tuple[Callable[[Get, Refuse, Sequence[str], Sequence[int]], Tokenizer], str]] = {
    "gpt2": (_byte_level, "byte-level BPE"),
    "llama": (_sentence_piece, "SentencePiece BPE"),
}
