"""A GGUF file as a 16-bit Hugging Face model: config, tensors under their Hugging Face names, tokenizer.

A table says which keys and tensors are understood; anything else is refused by name, because a key that is dropped
(a rope scaling, a pre-tokenizer) makes a model that runs and is wrong.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from nybble.service.errors import CheckpointError, well_formed
from nybble.service.json_files import write_json

# GGUF architecture -> (Hugging Face class, model_type, q and k rows are interleaved for rotary pairs)
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama", True),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", False),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", False),
}

TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

# Keys below "<architecture>." -> config.json
CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
# Keys that say again what other keys or the tensors already say; checked where they could disagree.
REPEATED_KEYS = {"vocab_size", "rope.dimension_count", "attention.value_length"}

# Pre-tokenizer name -> (normalizer, splits before the byte-level step, whether that step splits by GPT-2's pattern).
# smollm and gpt-2 as their own tokenizer.json; qwen2 as in Qwen's tokenizer.json and transformers' Qwen2Tokenizer.
QWEN2_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS: dict[str, tuple[Any, list[Any], bool]] = {
    "smollm": (None, [pre_tokenizers.Digits(individual_digits=True)], True),
    "gpt-2": (None, [], True),
    "qwen2": (normalizers.NFC(), [pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated")], False),
}

CONTROL, USER_DEFINED = 3, 4  # token types of tokenizer.ggml.token_type
OTHER_WAY = "quantise from the model's 16-bit Hugging Face folder instead"


class GgufSource:
    """One open GGUF file. Raises CheckpointError for a damaged file or anything in it that is not understood."""

    dtype = torch.bfloat16

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{path}: not a complete GGUF file ({error}); fetch the file again"
            ) from error
        self._fields = self._reader.fields
        with well_formed(str(path)):
            self._arch = str(self._get("general.architecture"))
            if self._arch not in ARCHITECTURES:
                raise self._refused("general.architecture", self._arch, ", ".join(ARCHITECTURES))
            self._tensors = {self._hf_name(t.name): t for t in self._reader.tensors}
            self.config = self._config()

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor as stored."""
        return int(self._tensors[name].n_bytes)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor, dequantised to float32, in Hugging Face's row order."""
        stored = self._tensors[name]
        try:
            # np.array: a copy that owns its memory, as the reader's arrays map the file read-only.
            value = torch.from_numpy(np.array(dequantize(stored.data, stored.tensor_type), dtype=np.float32))
            return self._rows_in_order(name, value.view(self.shape(name)))
        # gguf raises NotImplementedError for the types that it can name but not read.
        except (NotImplementedError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.path}: tensor {stored.name} of type {stored.tensor_type.name} cannot be read ({error}); {OTHER_WAY}"
            ) from error

    def write_files(self, folder: Path) -> None:
        """tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja."""
        with well_formed(f"{self.path}: tokenizer"):
            self._write_files(folder)

    def _write_files(self, folder: Path) -> None:
        self._tokenizer().save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", self._tokenizer_config())
        ids = {key: self.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_json(folder / "generation_config.json", {k: v for k, v in ids.items() if v is not None})
        template = self._get("tokenizer.chat_template", None)
        if template is not None:
            (folder / "chat_template.jinja").write_text(str(template), encoding="utf-8")

    def _get(self, key: str, *default: Any) -> Any:
        field = self._fields.get(key)
        if field is not None:
            return field.contents()
        if default:
            return default[0]
        raise CheckpointError(f"{self.path}: no key {key}; {OTHER_WAY}")

    def _refused(self, key: str, given: object, accepted: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key}: given {given!r}, accepted {accepted}; {OTHER_WAY}")

    def _hf_name(self, name: str) -> str:
        stem, _, leaf = name.rpartition(".")
        if stem in TOP_TENSORS and leaf == "weight":
            return f"{TOP_TENSORS[stem]}.{leaf}"
        match = LAYER_NAME.fullmatch(name)
        if match is None or match[2] not in LAYER_TENSORS:
            raise CheckpointError(
                f"{self.path}: tensor {name} is not part of a plain {self._arch} model; {OTHER_WAY}"
            )
        return f"model.layers.{match[1]}.{LAYER_TENSORS[match[2]]}.{match[3]}"

    def _rows_in_order(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """llama GGUFs store the rows of q and k as rotary pairs (0, d/2, 1, d/2 + 1, ...); Hugging Face as halves."""
        interleaved = ARCHITECTURES[self._arch][2]
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if not interleaved or heads is None:
            return value
        pairs = value.view(self.config[heads], -1, 2, *value.shape[1:])
        return pairs.transpose(1, 2).reshape(value.shape)

    def _config(self) -> dict[str, Any]:
        architecture, model_type, _ = ARCHITECTURES[self._arch]
        given = {}
        for key in self._fields:
            if not key.startswith(self._arch + "."):
                continue
            short = key.removeprefix(self._arch + ".")
            if short in CONFIG_KEYS:
                given[CONFIG_KEYS[short]] = self._get(key)
            elif short not in REPEATED_KEYS:
                raise self._refused(key, self._get(key), "a model without it")
        for key, field in CONFIG_KEYS.items():
            if field not in given and field not in ("head_dim", "num_key_value_heads", "rope_theta"):
                raise CheckpointError(f"{self.path}: no key {self._arch}.{key}; {OTHER_WAY}")
        heads = given["num_attention_heads"]
        head_dim = given.setdefault("head_dim", given["hidden_size"] // heads)
        given.setdefault("num_key_value_heads", heads)
        for key in ("rope.dimension_count", "attention.value_length"):
            value = self._get(f"{self._arch}.{key}", head_dim)
            if value != head_dim:
                raise self._refused(f"{self._arch}.{key}", value, f"{head_dim}, the size of a head")
        # GGUF keeps these as float32: 1e-5 arrives as 9.99999974e-06. The shortest decimal is what was meant.
        theta = _shortest(given.pop("rope_theta", 10000.0))
        given["rms_norm_eps"] = _shortest(given["rms_norm_eps"])
        return {
            "architectures": [architecture],
            "model_type": model_type,
            **given,
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            "hidden_act": "silu",
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},  # transformers 5
            "rope_theta": theta,  # transformers 4
            "bos_token_id": self._get("tokenizer.ggml.bos_token_id", None),
            "eos_token_id": self._ends(),
            "pad_token_id": self._get("tokenizer.ggml.padding_token_id", None),
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }

    def _ends(self) -> int | list[int]:
        """End of sequence, and end of turn where the file names one."""
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        ids = list(dict.fromkeys(int(i) for i in (self._get(key, None) for key in keys) if i is not None))
        if not ids:
            raise CheckpointError(f"{self.path}: no key {keys[0]}; {OTHER_WAY}")
        return ids[0] if len(ids) == 1 else ids

    def _tokenizer(self) -> Tokenizer:
        kind, pre = self._get("tokenizer.ggml.model"), self._get("tokenizer.ggml.pre", None)
        if kind != "gpt2":
            raise self._refused("tokenizer.ggml.model", kind, "gpt2 (byte-level BPE)")
        if pre not in PRE_TOKENIZERS:
            raise self._refused("tokenizer.ggml.pre", pre, ", ".join(PRE_TOKENIZERS))
        normalizer, splits, gpt2_pattern = PRE_TOKENIZERS[pre]
        tokens = self._get("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ", 1)) for merge in self._get("tokenizer.ggml.merges")]
        try:
            tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
        except Exception as error:  # tokenizers has no narrower one
            raise CheckpointError(f"{self.path}: tokenizer.ggml.merges: {error}; {OTHER_WAY}") from error
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2_pattern)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        for token, kind in zip(tokens, self._get("tokenizer.ggml.token_type"), strict=True):
            if kind in (CONTROL, USER_DEFINED):
                special = kind == CONTROL
                tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
        bos = self._get("tokenizer.ggml.bos_token_id", None)
        if self._get("tokenizer.ggml.add_bos_token", False) and bos is not None:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
            )
        return tokenizer

    def _tokenizer_config(self) -> dict[str, Any]:
        tokens = self._get("tokenizer.ggml.tokens")
        config: dict[str, Any] = {
            # The class that takes tokenizer.json as it is; GPT2Tokenizer would rebuild it without its own splits.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        }
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token_id = self._get(f"tokenizer.ggml.{key}_token_id", None)
            if token_id is not None:
                config[f"{name}_token"] = tokens[token_id]
        return config


def _shortest(value: float) -> float:
    """The decimal with the fewest digits that is the same float32."""
    return float(str(np.float32(value)))
