"""A GGUF file as a 16-bit Hugging Face model: config, tensors under their Hugging Face names, tokenizer.

A table says which keys and tensors are understood; anything else is refused by name, because a key that is dropped
(a rope scaling, a pre-tokenizer) makes a model that runs and is wrong.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize

from nybble.kernels.packing import W4A16Weight, pack_rows
from nybble.service.checkpoints.gguf_tokenizer import CONTROL, tokenizer_of
from nybble.service.errors import CheckpointError, well_formed
from nybble.service.json_files import write_json

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
GEMMA_TENSORS = LAYER_TENSORS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PHI3_TENSORS = {
    name: LAYER_TENSORS[name] for name in ("attn_norm", "attn_output", "ffn_norm", "ffn_down")
} | {
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}
LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Rotary factors are tensors without a layer: Llama 3's divide the frequencies, Phi-3 has some for short and for long
# contexts.
FACTORS, SHORT_FACTORS, LONG_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)

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
OPTIONAL_KEYS = {"attention.head_count_kv", "attention.key_length", "rope.freq_base"}
# Keys that say again what other keys or the tensors already say; checked where they could disagree.
REPEATED_KEYS = {"vocab_size", "rope.dimension_count", "attention.value_length"}
# Keys about the rotation, read by _rope.
ROPE_KEYS = {
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.attn_factor", "rope.scaling.finetuned"),
}
GEMMA_KEYS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
GRANITE_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """What general.architecture means.

    interleaved     q and k rows are stored as rotary pairs
    keys            config keys beyond CONFIG_KEYS
    norm_offset     the file's norm weights are Hugging Face's plus this
    fixed           config.json fields that no key holds
    wide_layers     the layer count at which queries are scaled by hidden_size / heads, not by the size of a head (the
                    27B models), as no key says it
    """

    hf_class: str
    model_type: str
    interleaved: bool = False
    tensors: Mapping[str, str] = field(default_factory=lambda: LAYER_TENSORS)
    keys: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    fixed: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    wide_layers: int = 0


GEMMA_FIXED = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
ARCHITECTURES = {
    "llama": GgufArchitecture("LlamaForCausalLM", "llama", interleaved=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3"),
    "phi3": GgufArchitecture(
        "Phi3ForCausalLM", "phi3", tensors=PHI3_TENSORS, keys={"attention.sliding_window": "sliding_window"}
    ),
    "gemma2": GgufArchitecture(
        "Gemma2ForCausalLM", "gemma2", tensors=GEMMA_TENSORS, keys=GEMMA_KEYS, norm_offset=1.0, fixed=GEMMA_FIXED,
        wide_layers=46,
    ),
    "gemma3": GgufArchitecture(
        "Gemma3ForCausalLM", "gemma3_text", tensors=GEMMA_TENSORS, keys=GEMMA_KEYS, norm_offset=1.0,
        fixed=GEMMA_FIXED, wide_layers=62,
    ),
    "granite": GgufArchitecture("GraniteForCausalLM", "granite", interleaved=True, keys=GRANITE_KEYS),
}  # fmt: skip


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _all_are(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(kind(item) for item in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


# The ends of keys -> what their values have to be; the first that fits counts. The last row is for all other keys below
# "<architecture>.".
Kind = tuple[Callable[[object], bool], str]
TEXT: Kind = (_is_text, "a text")
KINDS: tuple[tuple[tuple[str, ...], Kind], ...] = (
    ((".model", ".pre", ".chat_template", ".architecture", "rope.scaling.type"), TEXT),
    ((".tokens",), (lambda value: bool(value) and _all_are(_is_text)(value), "a list of texts")),
    ((".merges",), (_all_are(_is_text), "a list of texts")),
    ((".token_type", ".scores"), (_all_are(_is_number), "a list of numbers")),
    (
        (".add_bos_token", ".add_eos_token", ".add_space_prefix", ".remove_extra_whitespaces"),
        (lambda value: isinstance(value, bool), "true or false"),
    ),
    (
        ("_count", "_count_kv", "_length", "split.count", "vocab_size", "sliding_window"),
        (_is_count, "a positive whole number"),
    ),
)
NUMBER: Kind = (_is_number, "a number")
TOKEN_ID = re.compile(r"tokenizer\.ggml\.\w+_token_id")

# Tokens that end an answer in chat models, wherever a file does not say so itself.
END_OF_TURN = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"}
Q4_0_BYTES, Q4_0_GROUP = 18, 32
OTHER_WAY = "quantise from the model's 16-bit Hugging Face folder instead"


class _Reader(GGUFReader):  # type: ignore[misc]
    """gguf's reader, which past the end of a file reads nothing, for as many values as the file claims to have."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        found = super()._get(offset, dtype, count, override_order)
        if len(found) != int(count):
            raise ValueError(f"it ends within the {int(count)} values at byte {int(offset)}")
        return found


class GgufSource:
    """One open GGUF file. Raises CheckpointError for a damaged file or anything in it that is not understood."""

    dtype = torch.bfloat16
    keeps_float32 = True

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = _Reader(path)
        # The library refuses nothing on purpose: what it stumbles over tells.
        except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            raise CheckpointError(
                f"{path}: not a complete GGUF file ({error}); fetch the file again"
            ) from error
        self._fields = self._reader.fields
        self._arch = ""
        self._refuse_overlaps()
        with well_formed(str(path)):
            if self._get("split.count", 1) > 1:
                raise self._refused(
                    "split.count", self._get("split.count"), "one file (merge the parts first)"
                )
            arch = str(self._get("general.architecture"))
            if arch not in ARCHITECTURES:
                raise self._refused("general.architecture", arch, ", ".join(ARCHITECTURES))
            self._arch, self._rules = arch, ARCHITECTURES[arch]
            factors = (FACTORS, SHORT_FACTORS, LONG_FACTORS)
            self._factors = {t.name: t for t in self._reader.tensors if t.name in factors}
            self._tensors = {self._hf_name(t.name): t for t in self._reader.tensors if t.name not in factors}
            self.config = self._config()

    def _refuse_overlaps(self) -> None:
        """Two tensors in the same bytes: one of the offsets is damaged."""
        end = 0
        for t in sorted(self._reader.tensors, key=lambda t: (int(t.data_offset), int(t.n_bytes))):
            if int(t.data_offset) < end:
                raise CheckpointError(
                    f"{self.path}: tensor {t.name} begins at byte {int(t.data_offset)}, within the tensor before it; "
                    "fetch the file again"
                )
            end = int(t.data_offset) + int(t.n_bytes)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor as stored."""
        return int(self._tensors[name].n_bytes)

    def type_name(self, name: str) -> str:
        """The GGUF type of a tensor: "Q4_0", "F16", ..."""
        return str(self._tensors[name].tensor_type.name)

    def exact(self, name: str) -> W4A16Weight | None:
        """A Q4_0 matrix as it is: w = d * (q - 8) in groups of 32, d float16. None for any other type."""
        stored = self._tensors[name]
        if stored.tensor_type != GGMLQuantizationType.Q4_0 or len(self.shape(name)) != 2:
            return None
        n, k = self.shape(name)
        with well_formed(f"{self.path}: tensor {stored.name}"):
            blocks = np.asarray(stored.data, dtype=np.uint8).reshape(n, k // Q4_0_GROUP, Q4_0_BYTES)
            scales = torch.from_numpy(np.array(blocks[..., :2])).view(torch.float16).view(n, -1)
            nibbles = torch.from_numpy(np.array(blocks[..., 2:]))
            codes = torch.cat((nibbles & 0xF, nibbles >> 4), dim=-1).view(n, k)
            if not bool(torch.isfinite(scales).all()):
                raise CheckpointError(
                    f"{self.path}: tensor {stored.name} holds scales that are not finite; fetch the file again"
                )
            codes, scales = self._rows_in_order(name, codes), self._rows_in_order(name, scales)
        return W4A16Weight(pack_rows(codes), scales.contiguous(), None, None, Q4_0_GROUP, n, k)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in Hugging Face's row order: of the file's own type when that is a plain one, else dequantised to
        float32."""
        stored = self._tensors[name]
        try:
            # np.array: a copy that owns its memory, as the reader's arrays map the file read-only.
            if stored.tensor_type == GGMLQuantizationType.F16:
                value = torch.from_numpy(np.array(stored.data, dtype=np.float16))
            else:
                value = torch.from_numpy(
                    np.array(dequantize(stored.data, stored.tensor_type), dtype=np.float32)
                )
                if stored.tensor_type == GGMLQuantizationType.BF16:
                    value = value.to(torch.bfloat16)
            value = self._rows_in_order(name, value.view(self.shape(name)))
        # gguf raises NotImplementedError for the types that it can name but not read.
        except (NotImplementedError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.path}: tensor {stored.name} of type {stored.tensor_type.name} cannot be read ({error}); {OTHER_WAY}"
            ) from error
        offset = self._rules.norm_offset if name.endswith("norm.weight") else 0.0
        return value.float() - offset if offset else value

    def write_files(self, folder: Path) -> None:
        """tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja."""
        with well_formed(f"{self.path}: tokenizer"):
            self._write_files(folder)

    def _write_files(self, folder: Path) -> None:
        tokenizer_of(self._get, self._refused).save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", self._tokenizer_config())
        ids = {key: self.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_json(folder / "generation_config.json", {k: v for k, v in ids.items() if v is not None})
        template = self._get("tokenizer.chat_template", None)
        if template is not None:
            (folder / "chat_template.jinja").write_text(str(template), encoding="utf-8")

    def _get(self, key: str, *default: Any) -> Any:
        field = self._fields.get(key)
        if field is not None:
            with well_formed(f"{self.path}: {key}"):
                value = field.contents()
            return self._checked(key, value)
        if default:
            return default[0]
        raise CheckpointError(f"{self.path}: no key {key}; {OTHER_WAY}")

    def _checked(self, key: str, value: Any) -> Any:
        """Raises CheckpointError for a value of another kind than its key has."""
        kind = next((kind for ends, kind in KINDS if key.endswith(ends)), None)
        if TOKEN_ID.fullmatch(key):
            count = len(self._get("tokenizer.ggml.tokens", []))
            fits: Callable[[object], bool] = lambda v: isinstance(v, int) and 0 <= v < count  # noqa: E731
            kind = (fits, f"one of the {count} tokens, by number")
        elif kind is None and key.startswith(f"{self._arch}."):
            kind = NUMBER
        if kind is not None and not kind[0](value):
            raise self._refused(key, value, kind[1])
        return value

    def _refused(self, key: str, given: object, accepted: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key}: given {given!r:.100}, accepted {accepted}; {OTHER_WAY}")

    def _hf_name(self, name: str) -> str:
        stem, _, leaf = name.rpartition(".")
        if stem in TOP_TENSORS and leaf == "weight":
            return f"{TOP_TENSORS[stem]}.{leaf}"
        match = LAYER_NAME.fullmatch(name)
        if match is None or match[2] not in self._rules.tensors:
            raise CheckpointError(
                f"{self.path}: tensor {name} is not part of a plain {self._arch} model; {OTHER_WAY}"
            )
        return f"model.layers.{match[1]}.{self._rules.tensors[match[2]]}.{match[3]}"

    def _rows_in_order(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """llama GGUFs store the rows of q and k as rotary pairs (0, d/2, 1, d/2 + 1, ...); Hugging Face as halves."""
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if not self._rules.interleaved or heads is None:
            return value
        pairs = value.view(self.config[heads], -1, 2, *value.shape[1:])
        return pairs.transpose(1, 2).reshape(value.shape)

    def _config(self) -> dict[str, Any]:
        keys = {**CONFIG_KEYS, **self._rules.keys}
        given = {}
        for key in self._fields:
            short = key.removeprefix(self._arch + ".")
            if short == key:
                continue
            if short in keys:
                given[keys[short]] = self._get(key)
            elif short not in REPEATED_KEYS | ROPE_KEYS:
                raise self._refused(key, self._get(key), "a model without it")
        for key, name in CONFIG_KEYS.items():
            if name not in given and key not in OPTIONAL_KEYS:
                raise CheckpointError(f"{self.path}: no key {self._arch}.{key}; {OTHER_WAY}")
        heads = given["num_attention_heads"]
        head_dim = given.setdefault("head_dim", given["hidden_size"] // heads)
        given.setdefault("num_key_value_heads", heads)
        value_length = self._get(f"{self._arch}.attention.value_length", head_dim)
        if value_length != head_dim:
            key = f"{self._arch}.attention.value_length"
            raise self._refused(key, value_length, f"{head_dim}, the size of a head")
        # GGUF keeps numbers as float32: 1e-5 arrives as 9.99999974e-06. The shortest decimal is what was meant.
        given = {
            name: _shortest(value) if isinstance(value, float) else value for name, value in given.items()
        }
        theta = given.pop("rope_theta", 10000.0)
        if self._rules.wide_layers:
            wide = given["num_hidden_layers"] == self._rules.wide_layers
            given["query_pre_attn_scalar"] = given["hidden_size"] // heads if wide else head_dim
        return {
            "architectures": [self._rules.hf_class],
            "model_type": self._rules.model_type,
            **self._rules.fixed,
            **given,
            **self._rope(theta, head_dim, given["max_position_embeddings"]),
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            **({"attention_bias": True} if self._has_a_bias_to_say() else {}),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "bos_token_id": self._get("tokenizer.ggml.bos_token_id", None),
            "eos_token_id": self._ends(),
            "pad_token_id": self._get("tokenizer.ggml.padding_token_id", None),
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }

    def _has_a_bias_to_say(self) -> bool:
        """Qwen2 has biases always, and no field for them."""
        return self._arch != "qwen2" and "model.layers.0.self_attn.q_proj.bias" in self._tensors

    def _rope(self, theta: float, head_dim: int, context: int) -> dict[str, Any]:
        """rope_parameters as transformers 5 reads them, and rope_theta for transformers 4."""
        fields: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
        kind = str(self._get(f"{self._arch}.rope.scaling.type", "none"))
        factor = _shortest(float(self._get(f"{self._arch}.rope.scaling.factor", 1.0)))
        original = self._get(f"{self._arch}.rope.scaling.original_context_length", context)
        if self._factors:
            fields |= self._rope_factors(head_dim, original, context)
        elif kind in ("linear", "yarn") and factor != 1.0:
            fields |= {"rope_type": kind, "factor": factor}
            if kind == "yarn":
                fields["original_max_position_embeddings"] = original
        elif kind not in ("none", "linear", "yarn"):
            raise self._refused(f"{self._arch}.rope.scaling.type", kind, "none, linear or yarn")
        rotary = self._get(f"{self._arch}.rope.dimension_count", head_dim)
        if rotary != head_dim:
            if self._arch != "phi3":
                key = f"{self._arch}.rope.dimension_count"
                raise self._refused(key, rotary, f"{head_dim}, the size of a head")
            fields["partial_rotary_factor"] = rotary / head_dim
        if self._arch == "gemma3":
            local = {"rope_type": "default", "rope_theta": 10000.0}
            return {"rope_parameters": {"full_attention": fields, "sliding_attention": local}}
        return {"rope_parameters": fields, "rope_theta": theta}

    def _rope_factors(self, head_dim: int, original: int, context: int) -> dict[str, Any]:
        """Factors by which single frequencies are divided: the same at every length, or by length (longrope)."""
        lists = {
            name: torch.from_numpy(np.array(t.data, dtype=np.float32)).flatten().tolist()
            for name, t in self._factors.items()
        }
        if FACTORS in lists:
            same = {"short_factor": lists[FACTORS], "long_factor": lists[FACTORS]}
            return {
                "rope_type": "longrope",
                "attention_factor": 1.0,
                "original_max_position_embeddings": context,
                **same,
            }
        scale = self._get(f"{self._arch}.rope.scaling.attn_factor", None)
        return {
            "rope_type": "longrope",
            "original_max_position_embeddings": original,
            "short_factor": lists[SHORT_FACTORS],
            "long_factor": lists[LONG_FACTORS],
            **({} if scale is None else {"attention_factor": _shortest(float(scale))}),
        }

    def _ends(self) -> int | list[int]:
        """End of sequence, and end of turn where the file names one or has a token that can be nothing else."""
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        ids = [int(i) for i in (self._get(key, None) for key in keys) if i is not None]
        if not ids:
            raise CheckpointError(f"{self.path}: no key {keys[0]}; {OTHER_WAY}")
        types = self._get("tokenizer.ggml.token_type", [])
        tokens = self._get("tokenizer.ggml.tokens", [])
        ids += [
            i
            for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if kind == CONTROL and token in END_OF_TURN
        ]
        ids = list(dict.fromkeys(ids))
        return ids[0] if len(ids) == 1 else ids

    def _tokenizer_config(self) -> dict[str, Any]:
        tokens = self._get("tokenizer.ggml.tokens")
        config: dict[str, Any] = {
            # The class that takes tokenizer.json as it is; a model's own would rebuild it by its own rules.
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
