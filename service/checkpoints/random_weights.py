"""Models of random weights in a named shape, for benchmarks: nothing is downloaded, and nothing is on disk but config.json
and a tokenizer of bytes.

`random_folder` writes such a folder; `open_checkpoint` knows it by its quant_method, and makes each weight when it is asked
for. What they compute means nothing, but takes what the real model takes: kernels' times do not depend on the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nybble.kernels.packing import PER_WORD, W4A16Weight
from nybble.service.checkpoints.base import Checkpoint
from nybble.service.errors import CheckpointError, ConfigError

QUANT_METHOD = "nybble-random"
# Of the weights, as transformers initialises them: activations stay of one size.
_STD = 0.02
# Standard deviation of a value drawn from 0..15, less 8.
_INT4_STD = 4.64
# Numbers that are drawn; a larger tensor repeats them.
_DRAWN = 1 << 20

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": 151645,
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }


# Published sizes: each model's config.json on the hub.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3 | _sizes(1024, 3072, 28, 16, tie_word_embeddings=True),
    "qwen3-1.7b": _QWEN3 | _sizes(2048, 6144, 28, 16, tie_word_embeddings=True),
    "qwen3-4b": _QWEN3 | _sizes(2560, 9728, 36, 32, tie_word_embeddings=True),
    "qwen3-8b": _QWEN3 | _sizes(4096, 12288, 36, 32, tie_word_embeddings=False),
    "qwen3-14b": _QWEN3 | _sizes(5120, 17408, 40, 40, tie_word_embeddings=False),
    "qwen3-32b": _QWEN3 | _sizes(5120, 25600, 64, 64, tie_word_embeddings=False),
    "llama-3.1-8b": _LLAMA
    | _sizes(4096, 14336, 32, 32, num_key_value_heads=8, head_dim=128, vocab_size=128256)
    | {"max_position_embeddings": 131072, "rope_theta": 500000.0, "eos_token_id": 128009},
    "smollm2-135m": _LLAMA
    | _sizes(576, 1536, 30, 9, num_key_value_heads=3, head_dim=64, vocab_size=49152)
    | {"max_position_embeddings": 8192, "rope_theta": 100000.0, "eos_token_id": 2}
    | {"tie_word_embeddings": True},
    # A model for tests.
    "tiny": _LLAMA
    | _sizes(128, 256, 2, 4, num_key_value_heads=2, head_dim=32, vocab_size=512)
    | {"max_position_embeddings": 32768, "rope_theta": 100000.0, "eos_token_id": 2}
    | {"tie_word_embeddings": True},
}


def random_folder(folder: Path, shape: str, group_size: int = 128, max_positions: int = 0) -> Path:
    """Write a folder that serves as MODEL. max_positions: at least so many, whatever the model was made for.

    Raises ConfigError for a shape that is not in SHAPES or whose layers the group size does not divide.
    """
    if shape not in SHAPES:
        raise ConfigError(f"--shape is {shape!r}: accepted {', '.join(SHAPES)}")
    config = dict(SHAPES[shape])
    group_size = _fitting(group_size, config)
    config["max_position_embeddings"] = max(config["max_position_embeddings"], max_positions)
    config["torch_dtype"] = "bfloat16"
    config["quantization_config"] = {"quant_method": QUANT_METHOD, "group_size": group_size}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text(json.dumps(_byte_tokenizer(config["vocab_size"])))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _CHAT_TEMPLATE})
    )
    return folder


_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"


def _fitting(group_size: int, config: dict[str, Any]) -> int:
    """The group size, or the largest of its halves that divides every layer's K."""
    ks = (
        config["hidden_size"],
        config["intermediate_size"],
        config["num_attention_heads"] * config["head_dim"],
    )
    while group_size >= 32:
        if all(k % group_size == 0 for k in ks):
            return group_size
        group_size //= 2
    raise ConfigError(f"no group size from 32 on divides the layers' K: {', '.join(map(str, ks))}")


def _byte_tokenizer(vocab_size: int) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE without merges: ids 0..255 are the bytes, the rest are words nobody writes."""
    from nybble.service.text import byte_level_alphabet

    letters = sorted(byte_level_alphabet().items(), key=lambda item: item[1])
    vocab = {letter: byte for letter, byte in letters}
    # Whole words of the alphabet: each decodes to text, so that a stream of any tokens is one of words.
    vocab |= {f"w{i}\u0120": i for i in range(256, vocab_size)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


@dataclass(frozen=True, slots=True)
class _Layer:
    n: int
    k: int


class RandomCheckpoint(Checkpoint):
    """A Checkpoint whose tensors are made when they are asked for, one at a time."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        from nybble.service.models import read_config
        from nybble.service.models.load import block_modules

        quantization = config["quantization_config"]
        size = quantization.get("group_size")
        if set(quantization) != {"quant_method", "group_size"} or not isinstance(size, int) or size < 32:
            raise CheckpointError(
                f"{folder / 'config.json'}: quantization_config: given {quantization!r:.100}, accepted quant_method "
                f"{QUANT_METHOD!r} and a group_size from 32 on"
            )
        self.folder = folder
        self.config = config
        self._group_size = size
        self._model = read_config(config, folder)
        self._modules = set(block_modules(self._model))
        self._layers = {name: _Layer(n, k) for name, (n, k) in block_modules(self._model).items()}
        self._generator = torch.Generator().manual_seed(0)
        self._normal = (torch.randn(_DRAWN, generator=self._generator) * _STD).to(torch.bfloat16)
        self._words = torch.randint(
            -(1 << 31), (1 << 31) - 1, (_DRAWN,), generator=self._generator, dtype=torch.int32
        )

    @property
    def total_bytes(self) -> int:
        """What the same model would take in files."""
        m = self._model
        int4 = sum(x.n * x.k // 2 + x.n * x.k // self._group_size * 2 for x in self._layers.values())
        embeddings = 1 if m.tie_word_embeddings else 2
        return int4 + embeddings * m.vocab_size * m.hidden_size * 2

    def names(self) -> list[str]:
        return []

    def use_prepacked(self, layout: str | None) -> None:
        """Nothing is saved: what is random is made anew."""

    def has_saved(self, layer: str) -> bool:
        return False

    def has_tensor(self, name: str) -> bool:
        return name.endswith("norm.weight") or name == "model.embed_tokens.weight"

    def expect(self, wanted: Sequence[str]) -> None:
        """Nothing is read, so nothing is read ahead."""

    def tensor(self, name: str) -> torch.Tensor:
        m = self._model
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            return torch.ones(m.head_dim, dtype=torch.bfloat16)
        if name.endswith("norm.weight"):
            return torch.ones(m.hidden_size, dtype=torch.bfloat16)
        if name == "model.embed_tokens.weight":
            return _repeated(self._normal, m.vocab_size, m.hidden_size)
        raise CheckpointError(f"random weights: no tensor {name}")

    def linear(self, module: str, n: int, k: int) -> W4A16Weight | torch.Tensor:
        if module not in self._layers:
            return _repeated(self._normal, n, k)
        words = _repeated(self._words, n, k // PER_WORD)
        scales = torch.full((n, k // self._group_size), _STD / _INT4_STD, dtype=torch.bfloat16)
        return W4A16Weight(words, scales, None, None, self._group_size, n, k)

    def has(self, module: str) -> bool:
        return module in self._layers or (module == "lm_head" and not self._model.tie_word_embeddings)

    def quantized(self, module: str) -> bool:
        return module in self._layers

    def bias(self, module: str) -> torch.Tensor | None:
        return None

    def head_importance(self, k: int, final_norm: str = "model.norm.weight") -> torch.Tensor | None:
        return None

    def unread(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


def _repeated(drawn: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[rows, columns] of the drawn numbers, over and over: copying is many times faster than drawing."""
    count = rows * columns
    return drawn.repeat(-(-count // len(drawn)))[:count].view(rows, columns)
