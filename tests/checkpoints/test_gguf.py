import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from gguf.gguf_reader import ReaderField
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, Qwen2Tokenizer

from nybble.service.checkpoints.gguf import GgufSource
from nybble.service.checkpoints.gguf_tokenizer import QWEN2_PATTERN
from nybble.service.errors import CheckpointError

DATA = Path(__file__).parents[1] / "data"
TEXTS = [
    "x  123",
    "2024-01-31, 10:59; 3.14159 and ٣٤ and ½",
    "It's they'll DON'T  \n\n\t indented   code_with_underscores()",
    "naïve café — “quotes” 你好 🙂 e\u0301",
    "<|im_start|>user\nHi<|im_end|>\n",
    " leading and trailing ",
    "",
]


def test_tensors_come_back_in_hugging_face_order(gguf_file: Path, folder_16_bit: Path) -> None:
    expected = load_file(folder_16_bit / "model.safetensors")
    source = GgufSource(gguf_file)
    assert sorted(source.names()) == sorted(expected)
    for name, value in expected.items():
        found = source.tensor(name)
        assert found.shape == value.shape == source.shape(name)
        assert (found - value.float()).abs().max() <= value.float().abs().max() / 127, name


def test_config_in_both_styles(gguf_file: Path, folder_16_bit: Path) -> None:
    config = GgufSource(gguf_file).config
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["rms_norm_eps"] == 1e-5
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert config["tie_word_embeddings"] is True and config["dtype"] == "bfloat16"
    parsed, original = AutoConfig.for_model(**config), AutoConfig.from_pretrained(folder_16_bit)
    assert parsed.rope_parameters["rope_theta"] == 100000.0
    for field in ("hidden_size", "intermediate_size", "num_key_value_heads", "head_dim", "vocab_size"):
        assert getattr(parsed, field) == getattr(original, field)


def test_tokenizer_encodes_as_the_original(gguf_file: Path, tmp_path: Path) -> None:
    GgufSource(gguf_file).write_files(tmp_path)
    original = Tokenizer.from_file(str(DATA / "llama-ct-g32" / "tokenizer.json"))
    made = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = original.encode(text).ids
        assert made.encode(text) == ids
        assert made.decode(ids) == original.decode(ids, skip_special_tokens=False)
    assert made.tokenize("x  123") == ["x", "ĠĠ", "1", "2", "3"]
    assert (made.bos_token_id, made.eos_token_id, made.pad_token_id, made.unk_token_id) == (1, 2, 2, 0)
    assert made.decode(original.encode("<|im_end|>a").ids, skip_special_tokens=True) == "a"
    chat = made.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 2


def test_bos_is_added_when_the_file_says_so(gguf_writer: Any, tmp_path: Path, folder_16_bit: Path) -> None:
    gguf_writer(tmp_path / "m.gguf", load_file(folder_16_bit / "model.safetensors"), add_bos=True)
    GgufSource(tmp_path / "m.gguf").write_files(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("a")[0] == 1 and tokenizer.encode("a", add_special_tokens=False)[0] != 1


def test_qwen2_pattern_is_the_one_transformers_uses(tmp_path: Path) -> None:
    own = json.loads(Qwen2Tokenizer(vocab={"a": 0}, merges=[]).backend_tokenizer.to_str())["pre_tokenizer"]
    assert own["pretokenizers"][0]["pattern"] == {"Regex": QWEN2_PATTERN}
    assert own["pretokenizers"][0]["behavior"] == "Isolated" and not own["pretokenizers"][0]["invert"]
    assert own["pretokenizers"][1]["use_regex"] is False


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pre": "deepseek-llm"}, "tokenizer.ggml.pre: given 'deepseek-llm', accepted gpt-2, smollm, "),
        ({"tokenizer_model": "t5"}, "tokenizer.ggml.model: given 't5', accepted gpt2 .* or llama"),
        ({"tokenizer_model": "llama"}, "no key tokenizer.ggml.scores"),
    ],
    ids=["pre-tokenizer", "kind", "no scores"],
)
def test_unknown_tokenizers_are_refused(
    gguf_writer: Any, tmp_path: Path, folder_16_bit: Path, keys: dict[str, Any], message: str
) -> None:
    gguf_writer(tmp_path / "m.gguf", load_file(folder_16_bit / "model.safetensors"), **keys)
    with pytest.raises(CheckpointError, match=message):
        GgufSource(tmp_path / "m.gguf").write_files(tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"arch": "mamba"}, "general.architecture: given 'mamba', accepted llama, qwen2, qwen3"),
        (
            {"llama__rope__scaling__type": "dynamic"},
            "llama.rope.scaling.type: given 'dynamic', accepted none, linear or yarn",
        ),
        ({"llama__expert_count": 8}, "llama.expert_count: given 8, accepted a model without it"),
        ({"split__count": 3}, "split.count: given 3, accepted one file"),
        ({"llama__rope__dimension_count": 16}, "llama.rope.dimension_count: given 16, accepted 32"),
    ],
    ids=["architecture", "rope scaling", "experts", "parts", "partial rotary"],
)
def test_what_is_not_understood_is_refused_by_name(
    gguf_writer: Any, tmp_path: Path, folder_16_bit: Path, keys: dict[str, Any], message: str
) -> None:
    gguf_writer(tmp_path / "m.gguf", load_file(folder_16_bit / "model.safetensors"), **keys)
    with pytest.raises(CheckpointError, match=message):
        GgufSource(tmp_path / "m.gguf")


def test_a_tensor_that_is_not_understood_is_refused_by_name(
    gguf_writer: Any, tmp_path: Path, folder_16_bit: Path
) -> None:
    tensors = load_file(folder_16_bit / "model.safetensors") | {"mm.0.weight": torch.ones(16)}
    gguf_writer(tmp_path / "m.gguf", tensors)
    with pytest.raises(CheckpointError, match="tensor mm.0.weight is not part of a plain llama model"):
        GgufSource(tmp_path / "m.gguf")


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -1], ids=["empty", "magic", "keys", "tokens", "last byte"])
def test_truncated_file(gguf_file: Path, tmp_path: Path, keep: int) -> None:
    (tmp_path / "cut.gguf").write_bytes(gguf_file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="cut.gguf: not a complete GGUF file"):
        GgufSource(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        (b"smollm", b"smoll\xff", "tokenizer.ggml.pre: a value is not of the kind"),
        (b"llama", b"llam\xff", "general.architecture: a value is not of the kind"),
    ],
    ids=["tokenizer", "architecture"],
)
def test_a_damaged_text(gguf_file: Path, tmp_path: Path, old: bytes, new: bytes, where: str) -> None:
    data = gguf_file.read_bytes()
    assert old in data
    (tmp_path / "bad.gguf").write_bytes(data.replace(old, new, 1))
    with pytest.raises(CheckpointError, match=f"bad.gguf: {where}"):
        GgufSource(tmp_path / "bad.gguf").write_files(tmp_path)


def test_heads_that_do_not_fit_the_tensors(gguf_writer: Any, tmp_path: Path, folder_16_bit: Path) -> None:
    tensors = load_file(folder_16_bit / "model.safetensors")
    gguf_writer(tmp_path / "m.gguf", tensors)
    source = GgufSource(tmp_path / "m.gguf")
    source.config["num_attention_heads"] = 1000
    with pytest.raises(CheckpointError, match=r"tensor blk.0.attn_q.weight .* cannot be read"):
        source.tensor("model.layers.0.self_attn.q_proj.weight")


GARBAGE = ["x", -1, 1.5, [[1]], None]
REFUSAL = re.compile(
    r": (general|llama|tokenizer)[\w.]+: given .*, accepted .+; .*16-bit Hugging Face folder"
)
WITHOUT_MEANING = ("GGUF.", "general.")  # here; what a model is called, and the like


def test_every_key_is_named_when_its_value_makes_no_sense(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all keys of a file: what is not understood is refused with the key and the value, or is understood."""
    contents = ReaderField.contents
    keys = [
        key
        for key in GGUFReader(gguf_file).fields
        if not key.startswith(WITHOUT_MEANING) or key == "general.architecture"
    ]
    assert len(keys) >= 20
    for key in keys:
        refused = 0
        for value in GARBAGE:
            monkeypatch.setattr(
                ReaderField,
                "contents",
                lambda field, *args, key=key, value=value: (
                    value if field.name == key else contents(field, *args)
                ),
            )
            try:
                GgufSource(gguf_file).write_files(tmp_path)
            except CheckpointError as error:
                # Or another key, which no longer fits this one: a token beyond the end of a shorter list.
                assert REFUSAL.search(error.message), (key, value, error.message)
                refused += f": {key}: given " in error.message
        assert refused >= 3, (key, refused)


def _text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def _file(*keys: bytes, tensors: tuple[bytes, ...] = (), data: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys + tensors) + data


def _key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


UINT32, TEXT_KIND, ARRAY = 4, 8, 9
LLAMA = _key("general.architecture", TEXT_KIND, _text("llama"))
PAD = bytes(1 << 14)


@pytest.mark.parametrize(
    "data",
    {
        "an endless list of numbers": _file(_key("x", ARRAY, struct.pack("<IQ", UINT32, 1 << 60))),
        "an endless list of texts": _file(_key("x", ARRAY, struct.pack("<IQ", TEXT_KIND, 1 << 60))),
        "an endless text": _file(_key("x", TEXT_KIND, struct.pack("<Q", (1 << 64) - 1))),
        "endless keys": b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 63),
        "endless tensors": b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 0),
        "lists in lists": _file(_key("x", ARRAY, struct.pack("<IQ", ARRAY, 1) * 5000)),
        "a list of nothing known": _file(_key("x", ARRAY, struct.pack("<IQ", 77, 3)) + PAD),
        "a kind that is not known": _file(_key("x", 99, b"1234")),
        "alignment 0": _file(LLAMA, _key("general.alignment", UINT32, struct.pack("<I", 0))),
        "alignment 3": _file(LLAMA, _key("general.alignment", UINT32, struct.pack("<I", 3))),
        "alignment in words": _file(LLAMA, _key("general.alignment", TEXT_KIND, _text("32"))),
        "a key that is no text": _file(_key(b"\xff\xfe", UINT32, b"0000")),
        "a key twice": _file(LLAMA, LLAMA),
        "another version": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        "a tensor beyond bounds": _file(LLAMA, tensors=(_tensor("a", (1 << 40, 1 << 40)),), data=PAD),
        "a tensor of too many dimensions": _file(LLAMA, tensors=(_text("a") + struct.pack("<I", 1 << 31),)),
        "a tensor of no known type": _file(LLAMA, tensors=(_tensor("a", (32, 32), kind=99),), data=PAD),
        "a tensor outside the file": _file(
            LLAMA, tensors=(_tensor("a", (32, 32), offset=1 << 50),), data=PAD
        ),
        "two tensors in one place": _file(
            LLAMA, tensors=(_tensor("a", (32, 32)), _tensor("b", (32, 32), offset=32)), data=PAD
        ),
        "a tensor twice": _file(LLAMA, tensors=(_tensor("a", (32, 32)), _tensor("a", (32, 32))), data=PAD),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_header_that_claims_what_is_not_there(data: tuple[str, bytes], tmp_path: Path) -> None:
    """Refused at once: nothing is allocated for what a file only claims to hold."""
    (tmp_path / "m.gguf").write_bytes(data[1])
    with pytest.raises(CheckpointError, match="m.gguf: .*fetch the file again"):
        GgufSource(tmp_path / "m.gguf")
