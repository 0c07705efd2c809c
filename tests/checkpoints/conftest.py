import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

Write = Callable[..., Path]
DATA = Path(__file__).parents[1] / "data"
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(quantization_config, tensors) -> a model folder that holds just these."""

    def write_folder(quantization: dict[str, Any] | None, tensors: dict[str, torch.Tensor]) -> Path:
        config = {"architectures": ["LlamaForCausalLM"]}
        if quantization is not None:
            config["quantization_config"] = quantization
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(
            {name: t.contiguous().clone() for name, t in tensors.items()}, tmp_path / "model.safetensors"
        )
        return tmp_path

    return write_folder


@pytest.fixture(scope="session")
def folder_16_bit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random bf16 Llama with the tokenizer files of the small real ones."""
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    config = LlamaConfig(**TINY, vocab_size=1024, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DATA / "llama-ct-g32" / name, folder)
    return folder


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory, folder_16_bit: Path) -> Path:
    """The model of folder_16_bit as a GGUF file: Q8_0 linear layers, llama's row order, SmolLM2's tokenizer."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, load_file(folder_16_bit / "model.safetensors"))
    return path


@pytest.fixture(scope="session")
def gguf_writer() -> Callable[..., None]:
    return write_gguf


def write_gguf(path: Path, tensors: dict[str, torch.Tensor], arch: str = "llama", **keys: Any) -> None:
    """keys: extra or replaced tokenizer/architecture values, "pre" and "<arch>.<key>" spelt with "__" for "."."""
    tokenizer = json.loads((DATA / "llama-ct-g32" / "tokenizer.json").read_text())
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(TINY["num_hidden_layers"])
    writer.add_context_length(256)
    writer.add_embedding_length(TINY["hidden_size"])
    writer.add_feed_forward_length(TINY["intermediate_size"])
    writer.add_head_count(TINY["num_attention_heads"])
    writer.add_head_count_kv(TINY["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model(keys.pop("tokenizer_model", "gpt2"))
    writer.add_tokenizer_pre(keys.pop("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(keys.pop("add_bos", False))
    writer.add_chat_template((DATA / "llama-ct-g32" / "chat_template.jinja").read_text())
    for key, value in keys.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_string)(key.replace("__", "."), value)
    for name, tensor in tensors.items():
        value = _gguf_rows(name, tensor.float()) if arch == "llama" else tensor.float()
        if value.ndim == 1:
            writer.add_tensor(_gguf_name(name), value.numpy())
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(_gguf_name(name), gguf.quantize(value.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, TINY["num_hidden_layers"])
    found = names.get_name(name, (".weight", ".bias"))
    return found if found is not None else name


def _gguf_rows(name: str, value: torch.Tensor) -> torch.Tensor:
    """Row r of a head goes to 2r, row r + d/2 to 2r + 1: halves become neighbouring pairs."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return value
    by_head = value.view(TINY[heads], -1, value.shape[1])
    half = by_head.shape[1] // 2
    moved = torch.empty_like(by_head)
    moved[:, 0::2], moved[:, 1::2] = by_head[:, :half], by_head[:, half:]
    return moved.view(value.shape)
