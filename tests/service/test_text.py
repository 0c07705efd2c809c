"""nybble.service.text: exact text from tokens, whatever the cut."""

from __future__ import annotations

import random
import threading
import time

import pytest
import tiny_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nybble.service.errors import CheckpointError, InvalidRequest
from nybble.service.text import (
    SHORT_TEXT_CHARS,
    Detokenizer,
    StopChecker,
    TextCodec,
    TextStream,
    piece_decoder,
)

ALPHABET = [
    *"abc xyz\n\t.,!?0123456789",
    *"éßñøπЖ",
    *"你好世界日本語한국어",
    *[
        "🙂",
        "👨‍👩‍👧",
        "🇫🇷",
        "👍🏽",
        "e\u0301",
        "a\u0308\u0323",
        "\u200d",
        "\ufeff",
        "\ufffd",
        "<tool>",
        "  ",
        "<|im_end|>",
    ],
]


def random_texts(seed: int, count: int) -> list[str]:
    chooser = random.Random(seed)
    return ["".join(chooser.choices(ALPHABET, k=chooser.randrange(40))) for _ in range(count)]


def stream_text(codec: TextCodec, token_ids: list[int] | tuple[int, ...]) -> str:
    detokenizer = codec.detokenizer()
    return "".join([*(detokenizer.feed(token_id) for token_id in token_ids), detokenizer.finish()])


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec.load(tiny_tokenizer.write_folder(tmp_path_factory.mktemp("byte-level")))


@pytest.fixture(scope="module")
def sentencepiece_codec() -> TextCodec:
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.sentencepiece_style()))


class TestDetokenizer:
    def test_encoded_text_comes_back(self, codec: TextCodec) -> None:
        for text in random_texts(1, 300):
            ids = codec.encode(text)
            assert stream_text(codec, ids) == codec.decode(ids)
            assert stream_text(codec, ids) == text.replace("<|im_end|>", "")

    def test_any_token_sequence_decodes_as_tokenizers_does(self, codec: TextCodec) -> None:
        chooser = random.Random(2)
        for _ in range(500):
            ids = [chooser.randrange(codec.vocab_size) for _ in range(chooser.randrange(12))]
            assert stream_text(codec, ids) == codec.decode(ids), ids

    def test_random_bytes_decode_as_tokenizers_does(self, codec: TextCodec) -> None:
        of_byte = {codec.token_bytes(i): i for i in range(codec.vocab_size) if len(codec.token_bytes(i)) == 1}
        assert len(of_byte) == 256
        chooser = random.Random(3)
        for text in random_texts(3, 300):
            data = bytearray(text.encode())
            for _ in range(chooser.randrange(4)):
                if data:
                    data[chooser.randrange(len(data))] = chooser.randrange(256)
            ids = [of_byte[bytes([byte])] for byte in data]
            assert stream_text(codec, ids) == codec.decode(ids) == bytes(data).decode("utf-8", "replace")

    def test_a_split_character_is_held_until_whole(self, codec: TextCodec) -> None:
        of_byte = {codec.token_bytes(i): i for i in range(codec.vocab_size)}
        detokenizer = codec.detokenizer()
        shown = [detokenizer.feed(of_byte[bytes([byte])]) for byte in "x🙂y".encode()]
        assert shown == ["x", "", "", "", "🙂", "y"]

    def test_an_invalid_byte_is_released_at_once(self, codec: TextCodec) -> None:
        of_byte = {codec.token_bytes(i): i for i in range(codec.vocab_size)}
        detokenizer = codec.detokenizer()
        assert [detokenizer.feed(of_byte[data]) for data in (b"\xff", b"a", b"\xf0", b"a")] == [
            "\ufffd",
            "a",
            "",
            "\ufffda",
        ]

    def test_an_unfinished_character_is_released_at_the_end(self, codec: TextCodec) -> None:
        of_byte = {codec.token_bytes(i): i for i in range(codec.vocab_size)}
        detokenizer = codec.detokenizer()
        assert detokenizer.feed(of_byte[b"\xf0"]) == ""
        assert detokenizer.finish() == "\ufffd"

    def test_special_and_unknown_tokens_have_no_text(self, codec: TextCodec) -> None:
        end = codec.encode("<|im_end|>")[0]
        assert stream_text(codec, [end, codec.vocab_size + 7]) == ""
        assert codec.token_bytes(end) == b"<|im_end|>"

    def test_sentencepiece_text_continues_the_prompt(self, sentencepiece_codec: TextCodec) -> None:
        for text in ["the lo", "abc é你 the", "hello 🙂🙂 the", "x  y", " the"]:
            ids = sentencepiece_codec.encode(text)
            assert stream_text(sentencepiece_codec, ids) == " " + text
            assert sentencepiece_codec.decode(ids) == text

    def test_sentencepiece_cut_anywhere_continues_exactly(self, sentencepiece_codec: TextCodec) -> None:
        ids = sentencepiece_codec.encode("the lo 🙂 abc é你 the")
        whole = sentencepiece_codec.decode(ids)
        for cut in range(1, len(ids)):
            before = sentencepiece_codec.decode(ids[:cut])
            if "\ufffd" not in before:
                assert before + stream_text(sentencepiece_codec, ids[cut:]) == whole

    def test_an_unknown_decoder_is_refused_by_name(self) -> None:
        with pytest.raises(CheckpointError, match="WordPiece"):
            piece_decoder({"type": "WordPiece", "prefix": "##", "cleanup": True})
        with pytest.raises(CheckpointError, match="not supported"):
            piece_decoder(None)


def reference_cut(text: str, stops: list[str]) -> str:
    """Character by character: the text ends where a stop string is complete for the first time."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


class TestStopChecker:
    @pytest.mark.parametrize(
        ("pieces", "stops", "shown"),
        [
            pytest.param(["a", "b"], [], ["a", "b"], id="no stop strings"),
            pytest.param(["ab", "cd"], ["bc"], ["a", ""], id="split over two pieces"),
            pytest.param(["ab", "xd"], ["bc"], ["a", "bxd"], id="held text is released when the match fails"),
            pytest.param(["aa", "ab"], ["aab"], ["", "a"], id="the held text overlaps itself"),
            pytest.param(["x END", " y END"], ["END"], ["x ", ""], id="nothing after a match"),
            pytest.param(["abcd"], ["abcd", "bc"], ["a"], id="the first to be complete wins"),
            pytest.param(["abc"], ["bc", "abc"], [""], id="of two complete at once the longer wins"),
            pytest.param(["一二", "三四"], ["二三"], ["一", ""], id="beyond ASCII"),
        ],
    )
    def test_pieces(self, pieces: list[str], stops: list[str], shown: list[str]) -> None:
        checker = StopChecker(stops)
        assert [checker.feed(piece) for piece in pieces] == shown

    def test_held_text_is_released_at_the_end(self) -> None:
        checker = StopChecker(["stop"])
        assert checker.feed("a sto") == "a "
        assert checker.finish() == "sto"
        assert not checker.matched

    def test_any_cut_gives_the_same_text(self) -> None:
        chooser = random.Random(4)
        matched = 0
        for _ in range(3000):
            text = "".join(chooser.choices("abñ🙂", k=chooser.randrange(30)))
            stops = [
                "".join(chooser.choices("abñ🙂", k=chooser.randrange(1, 5)))
                for _ in range(chooser.randrange(4))
            ]
            checker, shown, rest = StopChecker(stops), "", text
            while rest and not checker.matched:
                size = chooser.randrange(1, 5)
                shown += checker.feed(rest[:size])
                rest = rest[size:]
                assert reference_cut(text, stops).startswith(shown), (text, stops)
            matched += checker.matched
            shown += checker.finish()
            assert shown == reference_cut(text, stops), (text, stops)
        assert 500 < matched < 2900

    def test_text_is_not_held_longer_than_needed(self) -> None:
        chooser = random.Random(5)
        for _ in range(1000):
            stop = "".join(chooser.choices("ab", k=chooser.randrange(1, 6)))
            checker, text, shown = StopChecker([stop]), "", ""
            while not checker.matched and len(text) < 20:
                char = chooser.choice("ab")
                text += char
                shown += checker.feed(char)
                held = text[len(shown) :]
                assert checker.matched or stop.startswith(held)


def test_text_stream_counts_what_it_shows(codec: TextCodec) -> None:
    stream = TextStream(codec.detokenizer(), ["fox"])
    shown = ""
    for token_id in codec.encode("The quick brown fox jumps"):
        shown += stream.feed(token_id)
    assert (shown, stream.stopped, stream.shown) == ("The quick brown ", True, 16)
    assert stream.finish() == ""


def test_text_stream_releases_everything_at_the_end() -> None:
    stream = TextStream(Detokenizer(lambda token_id: bytes([token_id])), ["ab\ufffdz"])
    assert stream.feed(ord("a")) == "" and stream.feed(0xF0) == ""
    assert stream.finish() == "a\ufffd"


class TestChat:
    def test_the_template_is_the_models_own(self, codec: TextCodec) -> None:
        text = codec.render_chat([{"role": "user", "content": "hi"}])
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

    def test_the_prompt_has_no_second_bos(self, codec: TextCodec) -> None:
        ids = codec.encode("<|im_start|>user", add_special_tokens=False)
        assert codec.token_bytes(ids[0]) == b"<|im_start|>"

    def test_the_templates_own_message_is_shown(self, codec: TextCodec) -> None:
        with pytest.raises(InvalidRequest, match="unknown role: robot") as caught:
            codec.render_chat([{"role": "robot", "content": "hi"}])
        assert (caught.value.status, caught.value.param) == (400, "messages")

    def test_a_value_the_template_trips_over_is_a_bad_request(self, codec: TextCodec) -> None:
        with pytest.raises(InvalidRequest, match="TypeError"):
            codec.render_chat([{"role": 5, "content": "hi"}])

    def test_no_variable_can_take_the_place_of_an_argument(self, codec: TextCodec) -> None:
        with pytest.raises(InvalidRequest, match="TypeError"):
            codec.render_chat([{"role": "user", "content": "hi"}], **{"self": 1})

    def test_without_a_template_chat_is_refused(self, sentencepiece_codec: TextCodec) -> None:
        with pytest.raises(InvalidRequest, match="/v1/completions"):
            sentencepiece_codec.render_chat([{"role": "user", "content": "hi"}])


def test_an_unreadable_tokenizer_is_one_clear_error(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text("{ not json")
    with pytest.raises(CheckpointError, match="tokenizer cannot be read"):
        TextCodec.load(tmp_path)


def test_encode_agrees_with_transformers(codec: TextCodec, tmp_path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer.write_folder(tmp_path))
    for text in random_texts(6, 50):
        assert list(codec.encode(text)) == tokenizer.encode(text)


def test_long_texts_are_tokenised_as_short_ones_are(codec: TextCodec) -> None:
    text = "Hello world 🎉 你好, the quick brown fox. " * 300
    pieces = codec.encode("Hello world 🎉 你好, the quick brown fox. ") * 300
    assert len(text) > SHORT_TEXT_CHARS
    assert codec.decode(codec.encode(text)) == text == codec.decode(pieces)
    assert list(codec.encode(text)) == codec._backend.encode(text).ids


def test_other_threads_run_while_a_long_text_is_tokenised(codec: TextCodec) -> None:
    working = threading.Thread(target=codec.encode, args=("Hello world, " * 60_000,))
    working.start()
    turns = 0
    while working.is_alive():
        time.sleep(0.001)
        turns += 1
    # With the interpreter lock held it would be one or two.
    assert turns > 5


def test_fewest_tokens_is_never_too_many(codec: TextCodec, sentencepiece_codec: TextCodec) -> None:
    for text in [*random_texts(7, 100), "  " * 500, "<|im_end|>" * 50, "\u1112\u1161\u11ab" * 100]:
        for one in (codec, sentencepiece_codec):
            assert one.fewest_tokens(text) <= len(one.encode(text))
    assert codec.fewest_tokens("x" * 10_000) > 100


def test_a_folder_without_a_tokenizer_is_said_so(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: no tokenizer.json in this folder"):
        TextCodec.load(tmp_path)
