"""A model's config.json as the decoder needs it; what is not understood is refused by field name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nybble.kernels.rope import INV_FREQ, RopeConfig
from nybble.service.errors import ConfigError, well_formed


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A pre-norm decoder with grouped-query attention, RoPE and a gated MLP.

    windows: per layer, how many positions a token sees (itself included), None for all.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    dtype: str | None
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Architecture:
    """What one `architectures` entry means: flags are functions of the raw config, extra the fields it may carry
    beyond the common ones."""

    qkv_bias: Callable[[Mapping[str, Any]], bool]
    o_bias: Callable[[Mapping[str, Any]], bool]
    qk_norm: bool = False
    windows: Callable[[Mapping[str, Any], int], tuple[int | None, ...]] = lambda c, layers: (None,) * layers
    extra: frozenset[str] = frozenset()


def _attention_bias(c: Mapping[str, Any]) -> bool:
    return bool(c.get("attention_bias", False))


def _always(value: bool) -> Callable[[Mapping[str, Any]], bool]:
    return lambda c: value


def _window_everywhere(c: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    return (c.get("sliding_window"),) * layers


def _window_from_layer(c: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Qwen: sliding windows only when use_sliding_window, then as layer_types say, or from max_window_layers on."""
    if not c.get("use_sliding_window") or c.get("sliding_window") is None:
        return (None,) * layers
    window = int(c["sliding_window"])
    types = c.get("layer_types")
    if types is None:
        first = int(c.get("max_window_layers", layers))
        return tuple(window if i >= first else None for i in range(layers))
    known = {"full_attention": None, "sliding_attention": window}
    bad = sorted(set(types) - set(known))
    if bad or len(types) != layers:
        raise ConfigError(
            f"config.json: layer_types has {len(types)} entries {bad or ''}: accepted {layers} of {sorted(known)}"
        )
    return tuple(known[t] for t in types)


_QWEN_FIELDS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        qkv_bias=_attention_bias,
        o_bias=_attention_bias,
        extra=frozenset({"attention_bias", "mlp_bias", "pretraining_tp"}),
    ),
    "MistralForCausalLM": Architecture(
        qkv_bias=_attention_bias,
        o_bias=_attention_bias,
        windows=_window_everywhere,
        extra=frozenset({"sliding_window", "attention_bias"}),
    ),
    "Qwen2ForCausalLM": Architecture(
        qkv_bias=_always(True), o_bias=_always(False), windows=_window_from_layer, extra=_QWEN_FIELDS
    ),
    "Qwen3ForCausalLM": Architecture(
        qkv_bias=_attention_bias,
        o_bias=_attention_bias,
        qk_norm=True,
        windows=_window_from_layer,
        extra=_QWEN_FIELDS | {"attention_bias"},
    ),
}

_UNDERSTOOD = frozenset(
    """architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act rms_norm_eps max_position_embeddings tie_word_embeddings rope_theta
    rope_scaling rope_parameters torch_dtype dtype quantization_config eos_token_id""".split()
)

# Fields that say nothing about inference of a text decoder: training, bookkeeping, generation defaults.
_HARMLESS = frozenset(
    """attention_dropout auto_map bos_token_id chunk_size_feed_forward classifier_dropout decoder_start_token_id
    embd_pdrop finetuning_task hidden_dropout id2label initializer_range is_decoder is_encoder_decoder is_llama_config
    label2id output_attentions output_hidden_states pad_token_id prefix problem_type resid_pdrop
    return_dict sep_token_id task_specific_params tokenizer_class torchscript transformers_version unk_token_id
    use_bfloat16 use_cache unsloth_fixed unsloth_version rope_interleaved use_return_dict""".split()
)
_GENERATION = frozenset(
    """bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences remove_invalid_values repetition_penalty
    suppress_tokens temperature top_k top_p typical_p output_scores return_dict_in_generate""".split()
)


def read_config(raw: Mapping[str, Any], folder: Path | None = None) -> DecoderConfig:
    """config.json's content -> DecoderConfig. `folder` adds the end-of-sequence ids of the files beside it.

    Raises ConfigError naming the field, the value given and what is accepted, CheckpointError for a file whose
    values are of another kind than they should be.
    """
    with well_formed("config.json"):
        return _read_config(raw, folder)


def _read_config(raw: Mapping[str, Any], folder: Path | None) -> DecoderConfig:
    names = raw.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    arch = ARCHITECTURES.get(str(name))
    if arch is None:
        raise ConfigError(
            f"config.json: architectures is {raw.get('architectures')}: accepted one of {sorted(ARCHITECTURES)}"
        )
    _refuse_unknown(raw, _UNDERSTOOD | _HARMLESS | _GENERATION | arch.extra, str(name))

    hidden, heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
    kv_heads = _positive(raw, "num_key_value_heads", heads)
    layers = _positive(raw, "num_hidden_layers")
    if raw.get("head_dim") is None and hidden % heads:
        raise ConfigError(
            f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}: add head_dim"
        )
    head_dim = _positive(raw, "head_dim", hidden // heads)
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim {head_dim}: accepted an even number")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act is {activation!r}: accepted 'silu'")
    if raw.get("pretraining_tp", 1) not in (1, None):
        raise ConfigError(f"config.json: pretraining_tp is {raw['pretraining_tp']}: accepted 1")
    max_positions = _positive(raw, "max_position_embeddings")
    return DecoderConfig(
        architecture=str(name),
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=_rope(raw, head_dim, max_positions),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=arch.qkv_bias(raw),
        o_bias=arch.o_bias(raw),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=arch.qk_norm,
        windows=arch.windows(raw, layers),
        dtype=raw.get("dtype") or raw.get("torch_dtype"),
        eos_token_ids=_eos_ids(raw, folder),
    )


def _refuse_unknown(raw: Mapping[str, Any], accepted: frozenset[str], architecture: str) -> None:
    def neutral(value: Any) -> bool:
        return value is None or value is False or value == [] or value == {}

    unknown = sorted(
        k for k, v in raw.items() if k not in accepted and not k.startswith("_") and not neutral(v)
    )
    if unknown:
        given = ", ".join(f"{k}={_short(raw[k])}" for k in unknown)
        raise ConfigError(
            f"config.json of {architecture}: field not understood: {given}. The model may compute something else "
            "than this server would; remove the field if it is mere bookkeeping"
        )


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _positive(raw: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = raw.get(field)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"config.json: {field} is {value!r}: accepted a positive whole number")
    return value


def _number(fields: Mapping[str, Any], field: str, default: float | None, where: str = "") -> float:
    value = fields.get(field)
    if value is None:
        value = default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(f"config.json: {where}{field} is {value!r}: accepted a positive number")
    return float(value)


_ROPE_FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "truncate",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
        }
    ),
}


def _rope(raw: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeConfig:
    """RoPE from rope_parameters (transformers 5) or rope_theta and rope_scaling (4.x); both may stand side by side."""
    where = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    given = raw.get(where) or {}
    if not isinstance(given, dict):
        raise ConfigError(f"config.json: {where} is {_short(given)}: accepted an object")
    fields = dict(given)
    theta = _number(
        {"rope_theta": fields.pop("rope_theta", None) or raw.get("rope_theta")}, "rope_theta", 10000.0
    )
    kind = str(fields.pop("rope_type", None) or fields.get("type") or "default")
    fields.pop("type", None)
    if kind not in INV_FREQ:
        raise ConfigError(f"config.json: {where}.rope_type is {kind!r}: accepted {sorted(INV_FREQ)}")
    partial = fields.pop("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ConfigError(f"config.json: partial_rotary_factor is {partial}: accepted 1")
    unknown = sorted(k for k, v in fields.items() if k not in _ROPE_FIELDS[kind] and v is not None)
    if unknown and kind != "default":
        raise ConfigError(f"config.json: {where} of type {kind}: field not understood: {', '.join(unknown)}")
    if kind == "default":
        return RopeConfig("default", theta, head_dim)

    def number(field: str, default: float | None = None) -> float:
        return _number(fields, field, default, f"{where}.")

    factor = number("factor")
    if kind == "linear":
        return RopeConfig("linear", theta, head_dim, factor=factor)
    if kind == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            head_dim,
            factor=factor,
            original_max_positions=int(number("original_max_position_embeddings", max_positions)),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
        )
    return RopeConfig(
        "yarn",
        theta,
        head_dim,
        factor=factor,
        original_max_positions=int(number("original_max_position_embeddings", max_positions)),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=fields.get("truncate") is not False,
        attention_factor=_yarn_attention_factor(fields, factor),
    )


def _yarn_attention_factor(fields: Mapping[str, Any], factor: float) -> float:
    """The scale of cos and sin: stated, or 0.1 ln(factor) + 1, or the ratio of the two mscale variants of it."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if fields.get("attention_factor") is not None:
        return float(fields["attention_factor"])
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return mscale(float(fields["mscale"])) / mscale(float(fields["mscale_all_dim"]))
    return mscale(1.0)


def _eos_ids(raw: Mapping[str, Any], folder: Path | None) -> tuple[int, ...]:
    """Union of config.json's, generation_config.json's and the tokenizer's end-of-sequence ids, sorted."""
    found: set[int] = set()
    sources: list[Any] = [raw.get("eos_token_id")]
    if folder is not None:
        sources.append(_read_json(folder / "generation_config.json").get("eos_token_id"))
        sources.append(_tokenizer_eos(folder))
    for value in sources:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and not isinstance(item, bool):
                found.add(item)
    return tuple(sorted(found))


def _tokenizer_eos(folder: Path) -> int | None:
    """The id of tokenizer_config.json's eos_token, looked up in tokenizer.json."""
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    with well_formed("tokenizer.json"):
        return _token_id(_read_json(folder / "tokenizer.json"), text)


def _token_id(tokenizer: dict[str, Any], text: str) -> int | None:
    for added in tokenizer.get("added_tokens") or []:
        if added.get("content") == text:
            return int(added["id"])
    vocab = (tokenizer.get("model") or {}).get("vocab")
    found = vocab.get(text) if isinstance(vocab, dict) else None
    return found if isinstance(found, int) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path.name}: not readable as JSON ({error}): download the file again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path.name}: given a {type(content).__name__}, accepted a JSON object")
    return content
