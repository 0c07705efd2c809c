"""Between text and tokens: tokenise, chat template, incremental detokenise, stop strings.

Text is handled as the bytes of each token, so a token costs its own length and nothing grows with the answer.
The rules of the tokenizer's decoder are read once from tokenizer.json; a decoder step that is not understood is
refused by name.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from nybble.service.errors import CheckpointError, InvalidRequest

logger = logging.getLogger(__name__)

METASPACE = "\u2581"
# Longer texts are tokenised the way that lets other threads run meanwhile; it takes 40 microseconds more.
SHORT_TEXT_CHARS = 4096
# How many characters normalisation may make one of (NFC: three Hangul letters a syllable), with a margin.
NORMALISED_CHARS = 4


def byte_level_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE vocabularies (GPT-2's bytes_to_unicode), reversed.

    Bytes that print as themselves in Latin-1 stand for themselves; the other 68 are shifted to U+0100 and on.
    """
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in set(itself)]
    table = {chr(byte): byte for byte in itself}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(shifted)})
    return table


_ALPHABET = byte_level_alphabet()


def byte_level_piece(piece: str) -> bytes:
    """The bytes of a byte-level piece; a piece outside the alphabet (an added token) is plain text."""
    try:
        return bytes([_ALPHABET[char] for char in piece])
    except KeyError:
        return piece.encode()


def metaspace_piece(piece: str) -> bytes:
    """The bytes of a SentencePiece piece: U+2581 is a space, <0xHH> is a byte."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace(METASPACE, " ").encode()


def piece_decoder(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """Chooses how pieces become bytes from the `decoder` object of tokenizer.json.

    Raises CheckpointError for a decoder that is neither byte-level BPE nor SentencePiece style.
    """
    steps = _flatten(decoder)
    names = [step["type"] for step in steps]
    if "ByteLevel" in names and set(names) <= {"ByteLevel", "Fuse"}:
        return byte_level_piece
    unknown = [step for step in steps if not _is_metaspace_step(step)]
    if steps and not unknown:
        return metaspace_piece
    what = json.dumps(unknown or steps)[:200]
    raise CheckpointError(
        f"tokenizer.json: decoder {what} is not supported; supported are ByteLevel, Metaspace and the "
        "SentencePiece sequence of Replace, ByteFallback, Fuse and Strip"
    )


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flatten(inner)]


def _is_metaspace_step(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": METASPACE} and step["content"] == " ")
    return step["type"] in ("ByteFallback", "Fuse", "Strip", "Metaspace")


class Detokenizer:
    """Turns the tokens of one answer into text, as they come.

    The concatenation of all feed() results and finish() is what the model wrote after the prompt: the first token
    keeps its leading space. Bytes that end within a character are held until it is whole or cannot become one; then
    U+FFFD stands for each ill-formed part, as tokenizers' byte-level decoder does.
    """

    __slots__ = ("_decoder", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class StopChecker:
    """Holds text back while it may be the start of a stop string.

    The match that is complete first wins (of those, the one that starts first), so the result does not depend on
    how the text was cut into pieces. matched tells whether a stop string was found; it ends the text.
    """

    __slots__ = ("_held", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """Takes more text; returns what may be shown. After a match, nothing."""
        if self.matched or not text:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            self.matched = True
            self._held = ""
            return text[:match]
        cut = min(self._open_start(text, stop) for stop in self._stops)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """The held text, at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    @staticmethod
    def _open_start(text: str, stop: str) -> int:
        """Where the longest suffix of text that begins `stop` starts; len(text) if there is none."""
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while start >= 0:
            if stop.startswith(text[start:]):
                return start
            start = text.find(stop[0], start + 1)
        return len(text)


class TextStream:
    """One answer's text: tokens in, text that may be shown out.

    shown and decoded count characters: what feed() and finish() returned, and what the tokens stand for so far.
    """

    __slots__ = ("_checker", "_detokenizer", "decoded", "shown")

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._checker = StopChecker(stops)
        self.decoded = 0
        self.shown = 0

    @property
    def stopped(self) -> bool:
        """A stop string matched."""
        return self._checker.matched

    def feed(self, token_id: int) -> str:
        return self._show(self._detokenizer.feed(token_id))

    def finish(self) -> str:
        shown = self._show(self._detokenizer.finish())
        if not self._checker.matched:
            held = self._checker.finish()
            self.shown += len(held)
            shown += held
        return shown

    def _show(self, text: str) -> str:
        self.decoded += len(text)
        shown = self._checker.feed(text)
        self.shown += len(shown)
        return shown


# message.name, message['name'], message.get('name')
_NAME_READ = re.compile(r"""([\w\]]+)(?:\.name\b|\[\s*['"]name['"]\s*\]|\.get\(\s*['"]name['"])""")


class TextCodec:
    """A model folder's tokenizer and chat template. Safe to use from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: a transformers tokenizer backed by the tokenizers library."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise CheckpointError(
                f"{type(tokenizer).__name__} has no fast tokenizer; a tokenizer.json is needed"
            )
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer = tokenizer
        self._backend = backend
        state = backend.decoder.__getstate__() if backend.decoder is not None else b"null"
        self._piece_bytes = piece_decoder(json.loads(state))
        added = backend.get_added_tokens_decoder()
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._cache: dict[int, bytes] = {token_id: b"" for token_id in self._special}
        self._longest_piece_chars = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)

    @classmethod
    def load(cls, folder: Path | str) -> TextCodec:
        """Reads the tokenizer of a model folder. Raises CheckpointError when there is none that works."""
        from transformers import AutoTokenizer
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            if not Path(folder, "tokenizer.json").is_file():
                reason = "no tokenizer.json in this folder; give a folder as Hugging Face models are laid out"
            raise CheckpointError(f"{folder}: the tokenizer cannot be read: {reason[:300]}") from error
        return cls(tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def template_uses_names(self) -> bool:
        """Whether the chat template reads messages' names (those of tools and functions are others)."""
        return any(
            not owner.startswith(("tool", "function"))
            for owner in _NAME_READ.findall(str(self._tokenizer.chat_template or ""))
        )

    @property
    def vocab_size(self) -> int:
        """Tokens that have a text, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text; add_special_tokens puts what the model expects first (BOS), as for completions."""
        if len(text) <= SHORT_TEXT_CHARS:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least, without tokenising it."""
        return len(text) // (self._longest_piece_chars * NORMALISED_CHARS)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence, as the tokenizer itself makes it."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def pieces(self, token_ids: Iterable[int]) -> list[str]:
        """Each token as the vocabulary spells it; empty for one that only the model has."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def describe(self) -> dict[str, Any]:
        """Special tokens and the chat template, under the names of tokenizer_config.json; None where there is none."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {
            "tokenizer_class": type(self._tokenizer).__name__,
            "vocab_size": self.vocab_size,
            **{name: getattr(self._tokenizer, name, None) for name in names},
            "chat_template": self._tokenizer.chat_template,
        }

    def render_chat(self, messages: list[dict[str, Any]], /, **variables: Any) -> str:
        """The prompt text that the model's own template makes of a conversation, ready for the answer.

        Raises InvalidRequest without a template, or with the template's own message when it rejects the messages.
        """
        import jinja2

        if not self.has_chat_template:
            raise InvalidRequest(
                "this model has no chat template, so it does not chat; send the prompt to /v1/completions instead",
                param="messages",
                code="no_chat_template",
            )
        try:
            variables = {"add_generation_prompt": True} | variables
            text = str(self._tokenizer.apply_chat_template(messages, tokenize=False, **variables))
            text.encode()  # a lone surrogate in a variable is no text
        except jinja2.TemplateError as error:
            raise _template_error(str(error) or type(error).__name__) from error
        except (
            *(TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError),
        ) as error:
            # The template is the model author's program: what it trips over is something in the messages.
            raise _template_error(f"{type(error).__name__}: {error}") from error
        return text

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._token_bytes)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token for logprobs, where a special token shows its name."""
        special = self._special.get(token_id)
        return special.encode() if special is not None else self._token_bytes(token_id)

    def _token_bytes(self, token_id: int) -> bytes:
        found = self._cache.get(token_id)
        if found is None:
            # A model's vocabulary may be padded beyond the tokenizer's: such a token has no text.
            piece = self._backend.id_to_token(token_id)
            found = self._cache[token_id] = b"" if piece is None else self._piece_bytes(piece)
        return found


def _template_error(message: str) -> InvalidRequest:
    return InvalidRequest(
        f"the model's chat template does not accept these messages: {message[:200]}",
        param="messages",
        code="chat_template_error",
    )
