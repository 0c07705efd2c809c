"""Whole GGUF models: every architecture against transformers, every tokenizer kind against the one it was made from."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import AutoTokenizer
from twins import COMMON, TWINS, twin

from nybble.kernels.attention import CacheShape, Span
from nybble.kernels.attention.sdpa import SdpaAttention
from nybble.kernels.linear import dequantize
from nybble.kernels.packing import unpack_rows
from nybble.service.checkpoints import open_checkpoint
from nybble.service.checkpoints.calibration import TEXT
from nybble.service.checkpoints.gguf import ARCHITECTURES, GgufSource
from nybble.service.checkpoints.quantize import QuantizeOptions, quantize
from nybble.service.models import Batch, load, read_config

CPU = torch.device("cpu")
PLAIN = QuantizeOptions(calibrate=False)
# GGUF architecture -> twin, and what its converter does to the tensors
CASES = {
    "llama": "llama-tied-bias-free",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gemma2": "gemma2-every-second",
    "gemma3": "gemma3-every-sixth",
    "granite": "granite",
}
EXTRA_TWINS = {
    "llama-tied-bias-free": ("llama", {"tie_word_embeddings": True}),
    # The file format has no field for which layers have a window: every second, every sixth has none.
    "gemma2-every-second": TWINS["gemma2"],
    "gemma3-every-sixth": (
        "gemma3_text",
        TWINS["gemma3"][1] | {"layer_types": None, "num_hidden_layers": 7, "query_pre_attn_scalar": 32},
    ),
}
EXTRA_TWINS["gemma2-every-second"] = ("gemma2", TWINS["gemma2"][1] | {"query_pre_attn_scalar": 32})


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, row in EXTRA_TWINS.items():
        monkeypatch.setitem(TWINS, name, row)


def write(path: Path, arch: str, model: Any, kind: Type = Type.Q4_0, **keys: Any) -> None:
    """A transformers model as its converter writes it: names, row order, norm offsets, keys."""
    c = model.config
    rules = ARCHITECTURES[arch]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    for key, field in rules.keys.items():
        value = getattr(c, field)
        if value is not None:
            add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
            add(f"{arch}.{key}", value)
    for key, value in keys.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(key.replace("__", "."), value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = [chr(0x100 + i) for i in range(c.vocab_size)]
    tokens[-1] = tokens[3] + tokens[4]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * c.vocab_size)
    writer.add_token_merges([f"{tokens[3]} {tokens[4]}"])
    writer.add_eos_token_id(2)
    back = {hf: name for name, hf in rules.tensors.items()}
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, parameter in model.named_parameters():
        stem, _, leaf = name.rpartition(".")
        value = parameter.detach().float()
        if stem in top:
            target = top[stem]
        else:
            _, _, layer, rest = stem.split(".", 3)
            target = f"blk.{layer}.{back[rest]}"
        if name.endswith("norm.weight"):
            value = value + rules.norm_offset
        heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}.get(
            stem.rpartition(".")[2]
        )
        if rules.interleaved and heads:
            halves = value.view(heads, 2, -1, *value.shape[1:])
            value = halves.transpose(1, 2).reshape(value.shape)
        data = value.contiguous().numpy()
        if value.dim() == 2 and stem not in top:
            writer.add_tensor(f"{target}.{leaf}", gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{target}.{leaf}", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(folder: Path, ids: list[int]) -> torch.Tensor:
    with open_checkpoint(folder) as checkpoint:
        config = read_config(checkpoint.config, folder)
        attention = SdpaAttention()
        model = load(config, checkpoint, attention, torch.float32, CPU, config.default_positions)
        assert checkpoint.unread() == []
    attention.allocate(CacheShape(config.layers, 8, 16, config.kv_heads, config.head_dim, torch.float32), CPU)
    with torch.inference_mode():
        return model.forward(
            Batch(torch.tensor(ids), torch.arange(len(ids)), [Span(len(ids), len(ids), list(range(8)))])
        )


def dequantised(path: Path, model: Any) -> None:
    """Give the transformers model the values that the file holds."""
    source = GgufSource(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.tensor(name).float())


def test_every_architecture_is_covered() -> None:
    assert set(CASES) == set(ARCHITECTURES)


@pytest.mark.parametrize("arch", CASES)
def test_a_q4_0_model_is_served_exactly(twins: None, arch: str, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", "nybble")
    reference, _, _ = twin(CASES[arch])
    write(tmp_path / "m.gguf", arch, reference)
    quantize(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert "Q4_0 layers taken over exactly" in caplog.text and "anew" not in caplog.text
    dequantised(tmp_path / "m.gguf", reference)
    ids = torch.randint(3, 256, (43,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.3
    assert (logits(tmp_path / "out", ids) - expected).abs().max() < 2e-4


def test_llama3s_rotary_factors(twins: None, tmp_path: Path) -> None:
    """A tensor of factors in the file, a formula in config.json: the same rotation."""
    reference, _, _ = twin("llama3-rope")
    path = tmp_path / "m.gguf"
    write(path, "llama", reference)
    inv_freq = reference.model.rotary_emb.inv_freq
    plain = 500000.0 ** -(torch.arange(0, 16, 2).float() / 16)
    with_factors(path, tmp_path / "f.gguf", "rope_freqs.weight", (plain / inv_freq).numpy())
    quantize(tmp_path / "f.gguf", tmp_path / "out", PLAIN, progress=False)
    dequantised(path, reference)
    ids = list(range(3, 100))
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    assert (logits(tmp_path / "out", ids) - expected).abs().max() < 2e-4


def with_factors(path: Path, target: Path, name: str, values: np.ndarray) -> None:
    """The file with one more tensor."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_mixed_types_are_said_and_each_kept_as_it_can_be(twins: None, tmp_path: Path, caplog: Any) -> None:
    """Q4_0 layers stay bit for bit, Q8_0 ones are rounded anew, in one folder with two groups."""
    caplog.set_level("INFO", "nybble")
    reference, _, _ = twin("qwen3")
    write(tmp_path / "a.gguf", "qwen3", reference)
    write(tmp_path / "b.gguf", "qwen3", reference, Type.Q8_0)
    mixed = GgufSource(tmp_path / "a.gguf")
    other = GgufSource(tmp_path / "b.gguf")
    eight = [name for name in mixed.names() if name.endswith("down_proj.weight")]
    for name in eight:
        mixed._tensors[name] = other._tensors[name]
    from nybble.service.checkpoints import quantize as module

    original = module.open_source
    module.open_source = lambda src: mixed
    try:
        quantize(tmp_path / "a.gguf", tmp_path / "out", PLAIN, progress=False)
    finally:
        module.open_source = original
    assert (
        "18 Q4_0 layers taken over exactly; 3 Q8_0 layers dequantised and rounded to int4 anew" in caplog.text
    )
    with open_checkpoint(tmp_path / "out") as checkpoint:
        up = checkpoint.linear("model.layers.1.mlp.up_proj", 160, 64)
        down = checkpoint.linear("model.layers.1.mlp.down_proj", 64, 160)
    assert up.symmetric and torch.equal(dequantize(up), mixed.tensor("model.layers.1.mlp.up_proj.weight"))
    w = mixed.tensor(eight[1])
    assert not down.symmetric and (dequantize(down) - w).norm() < 0.2 * w.norm()


def block(kind: Type, count: int, rng: np.random.Generator) -> np.ndarray:
    """Random blocks of a type that gguf can read but not write; scales that are ordinary numbers."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    data = rng.integers(0, 256, (count, size), dtype=np.uint8)
    scale = np.float16(0.01).tobytes()
    places = {Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,)}
    for at in places[kind]:
        data[:, at : at + 2] = np.frombuffer(scale, dtype=np.uint8)
    return data


@pytest.mark.parametrize(
    "kind", [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K], ids=lambda k: k.name
)
def test_k_quants_go_through_their_values(kind: Type, gguf_file: Path, tmp_path: Path) -> None:
    source = GgufSource(gguf_file)
    name = "model.layers.0.mlp.down_proj.weight"
    data = block(kind, 128, np.random.default_rng(0))
    stored = source._tensors[name]
    values = gguf.dequantize(data, kind).reshape(128, 256)
    source._tensors[name] = stored._replace(data=data, tensor_type=kind)
    assert torch.equal(source.tensor(name), torch.from_numpy(values))
    assert source.exact(name) is None and source.type_name(name) == kind.name


@pytest.mark.parametrize(
    "kind", [Type.F32, Type.F16, Type.BF16, Type.Q4_1, Type.Q5_0, Type.Q5_1], ids=lambda k: k.name
)
def test_other_types_are_rounded(twins: None, kind: Type, tmp_path: Path) -> None:
    reference, _, _ = twin("qwen3")
    write(tmp_path / "m.gguf", "qwen3", reference, kind)
    quantize(tmp_path / "m.gguf", tmp_path / "out", PLAIN, progress=False)
    source = GgufSource(tmp_path / "m.gguf")
    w = source.tensor("model.layers.1.mlp.up_proj.weight").float()
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert (
            dequantize(checkpoint.linear("model.layers.1.mlp.up_proj", 160, 64)) - w
        ).norm() < 0.2 * w.norm()


def test_q4_0_by_its_definition(twins: None, tmp_path: Path) -> None:
    """w = d * (q - 8); byte i of a block holds element i (low nibble) and i + 16 (high)."""
    reference, _, _ = twin("qwen3")
    write(tmp_path / "m.gguf", "qwen3", reference)
    source = GgufSource(tmp_path / "m.gguf")
    name = "model.layers.2.self_attn.o_proj.weight"
    raw = np.asarray(source._tensors[name].data).reshape(64, 4, 18)
    weight = source.exact(name)
    codes = unpack_rows(weight.q).view(64, 4, 32)
    assert torch.equal(codes[3, 2, 5], torch.tensor(int(raw[3, 2, 2 + 5]) & 15, dtype=torch.uint8))
    assert torch.equal(codes[3, 2, 21], torch.tensor(int(raw[3, 2, 2 + 5]) >> 4, dtype=torch.uint8))
    assert weight.scales[3, 2].item() == np.frombuffer(raw[3, 2, :2].tobytes(), dtype=np.float16)[0]
    assert torch.equal(dequantize(weight), source.tensor(name))


def test_a_scale_that_is_not_finite_is_refused(twins: None, tmp_path: Path) -> None:
    reference, _, _ = twin("qwen3")
    write(tmp_path / "m.gguf", "qwen3", reference)
    source = GgufSource(tmp_path / "m.gguf")
    name = "model.layers.0.mlp.up_proj.weight"
    data = np.array(source._tensors[name].data)
    data[0, :2] = np.frombuffer(np.float16("inf").tobytes(), dtype=np.uint8)
    source._tensors[name] = source._tensors[name]._replace(data=data)
    with pytest.raises(Exception, match="tensor blk.0.ffn_up.weight holds scales that are not finite"):
        source.exact(name)


SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{i:02X}>" for i in range(256))


@pytest.fixture(scope="module")
def original() -> Tokenizer:
    """Trained here: pieces in the order of their merges, as SentencePiece's BPE numbers and scores them."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=[*SPECIAL, *BYTES],
        show_progress=False,
        max_token_length=12,
    )
    tokenizer.train_from_iterator(TEXT.split("\n"), trainer)
    return tokenizer


class TestSentencePiece:
    TEXTS = (
        "",
        "a",
        "The ferry left",
        "  two  spaces ",
        "x = 3.14;\n\n\tdone",
        "naïve 你好 🙂",
        "</s>after",
        "Ünï",
    )

    def _source(self, original: Tokenizer, path: Path, **keys: Any) -> GgufSource:
        pieces = sorted(original.get_vocab(), key=original.get_vocab().get)
        writer = gguf.GGUFWriter(path, "llama")
        for add, value in (
            (writer.add_block_count, 1), (writer.add_context_length, 64), (writer.add_embedding_length, 64),
            (writer.add_feed_forward_length, 64), (writer.add_head_count, 2), (writer.add_layer_norm_rms_eps, 1e-5),
        ):  # fmt: skip
            add(value)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores([0.0 if i < 259 else -float(i - 259) for i in range(len(pieces))])
        kinds = {"<unk>": 2, "<s>": 3, "</s>": 3} | dict.fromkeys(BYTES, 6)
        writer.add_token_types([kinds.get(piece, 1) for piece in pieces])
        for add, value in (
            (writer.add_unk_token_id, 0), (writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2),
        ):  # fmt: skip
            add(value)
        for key, value in keys.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        writer.add_tensor("token_embd.weight", np.zeros((len(pieces), 64), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return GgufSource(path)

    def test_it_splits_as_the_original(self, original: Tokenizer, tmp_path: Path) -> None:
        self._source(original, tmp_path / "m.gguf").write_files(tmp_path)
        made = AutoTokenizer.from_pretrained(tmp_path)
        for text in (*self.TEXTS, *TEXT.split("\n")):
            ids = original.encode(text, add_special_tokens=False).ids
            assert made.encode(text, add_special_tokens=False) == ids, text
            assert made.encode(text) == [1, *ids], "SentencePiece models begin with BOS"
            assert made.decode(ids) == original.decode(ids, skip_special_tokens=False)
        assert any(259 > i > 2 for i in made.encode("🙂", add_special_tokens=False)), "bytes stand in"

    def test_what_the_file_says_of_bos_and_of_the_space(self, original: Tokenizer, tmp_path: Path) -> None:
        source = self._source(
            original, tmp_path / "m.gguf", add_bos_token=False, add_eos_token=True, add_space_prefix=False
        )
        source.write_files(tmp_path)
        made = AutoTokenizer.from_pretrained(tmp_path)
        ids = made.encode("The ferry")
        assert ids[0] != 1 and ids[-1] == 2
        assert made.convert_ids_to_tokens(ids[0])[0] == "T" and made.decode(ids[:-1]) == "The ferry"

    def test_a_tokenizer_that_changes_the_text_is_refused(self, original: Tokenizer, tmp_path: Path) -> None:
        source = self._source(original, tmp_path / "m.gguf", remove_extra_whitespaces=True)
        with pytest.raises(
            Exception, match="remove_extra_whitespaces: given 'set', accepted a tokenizer that keeps"
        ):
            source.write_files(tmp_path)


def test_the_common_sizes_are_what_these_files_assume() -> None:
    assert COMMON["hidden_size"] % 32 == COMMON["intermediate_size"] % 32 == 0
