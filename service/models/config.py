"""A model's config.json as the decoder needs it; what is not understood is refused by field name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nybble.kernels.rope import INV_FREQ, RopeConfig
from nybble.service.errors import ConfigError, well_formed
from nybble.service.json_files import read_json

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A pre-norm decoder with grouped-query attention, RoPE and a gated MLP.

    windows         per layer, how many positions a token sees (itself included), None for all
    window_rope     the rotation of layers that have a window, where it is another than `rope`
    activation      of the gate: "silu" or "gelu_tanh"
    norm_offset     added to every RMSNorm weight (Gemma stores w - 1)
    post_norms      each half of a block also normalises its output, before it is added (Gemma 2, 3)
    packed          the checkpoint holds qkv_proj and gate_up_proj as one matrix each (Phi-3)
    *_scale         factors: of the embeddings, the attention scores, each half's output, the logits
    *_softcap       x becomes cap * tanh(x / cap), for attention scores and for logits
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
    window_rope: RopeConfig | None
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    activation: str
    norm_offset: float
    post_norms: bool
    packed: bool
    embedding_scale: float
    attention_scale: float
    residual_scale: float
    logit_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    dtype: str | None
    eos_token_ids: tuple[int, ...]

    @property
    def default_positions(self) -> int:
        """The context served unless another is asked for: where long contexts need other rotations than short ones
        (longrope), that of the short ones, which is what the model is best at."""
        short = self.rope.original_max_positions if self.rope.kind == "longrope" else self.max_positions
        return min(short, self.max_positions)


def _attention_bias(c: Raw) -> bool:
    return _flag(c, "attention_bias")


def _mlp_bias(c: Raw) -> bool:
    return _flag(c, "mlp_bias")


def _always(value: bool) -> Callable[[Raw], bool]:
    return lambda c: value


def _window_everywhere(c: Raw, layers: int) -> tuple[int | None, ...]:
    return (_window(c),) * layers


def _window_from_layer(c: Raw, layers: int) -> tuple[int | None, ...]:
    """Qwen: sliding windows only when use_sliding_window, then as layer_types say, or from max_window_layers on."""
    window = _window(c)
    if not _flag(c, "use_sliding_window") or window is None:
        return (None,) * layers
    first = c.get("max_window_layers")
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise ConfigError(
            f"config.json: max_window_layers is {_short(first)}: accepted a whole number >= 0 (the first layer with a window)"
        )
    types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return _windows_by_type(c, window, types)


def _window_alternating(every: int) -> Callable[[Raw, int], tuple[int | None, ...]]:
    """Gemma: every `every`-th layer sees everything, unless layer_types or a pattern field say otherwise."""

    def windows(c: Raw, layers: int) -> tuple[int | None, ...]:
        window = _window(c)
        if window is None:
            return (None,) * layers
        pattern = c.get("sliding_window_pattern") or c.get("_sliding_window_pattern") or every
        if not isinstance(pattern, int) or pattern < 1:
            raise ConfigError(
                f"config.json: sliding_window_pattern is {pattern!r}: accepted a whole number >= 1"
            )
        types = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
        return _windows_by_type(c, window, types)

    return windows


def _windows_by_type(c: Raw, window: int, default: list[str]) -> tuple[int | None, ...]:
    """default: what layers are where layer_types does not say, one entry per layer."""
    types = c.get("layer_types")
    if types is None:
        types = default
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or not all(isinstance(t, str) for t in types):
        raise ConfigError(
            f"config.json: layer_types is {_short(types)}: accepted a list of {len(default)} of {sorted(known)}"
        )
    bad = sorted(set(types) - set(known))
    if bad or len(types) != len(default):
        raise ConfigError(
            f"config.json: layer_types has {len(types)} entries {bad or ''}: accepted {len(default)} of {sorted(known)}"
        )
    return tuple(known[t] for t in types)


def _window(c: Raw) -> int | None:
    """None also where the window is as wide as the longest context."""
    if c.get("sliding_window") is None:
        return None
    window = _positive(c, "sliding_window")
    return window if window < _positive(c, "max_position_embeddings") else None


@dataclass(frozen=True, slots=True)
class Architecture:
    """What one `architectures` entry means: functions of the raw config, fields it may carry beyond the common ones
    (extra), and what a field that config.json leaves out stands for (defaults, as in transformers' own class)."""

    qkv_bias: Callable[[Raw], bool] = _attention_bias
    o_bias: Callable[[Raw], bool] = _attention_bias
    mlp_bias: Callable[[Raw], bool] = _always(False)
    qk_norm: bool = False
    windows: Callable[[Raw, int], tuple[int | None, ...]] = lambda c, layers: (None,) * layers
    activation: str = "silu"
    norm_offset: float = 0.0
    post_norms: bool = False
    packed: bool = False
    embedding_scale: Callable[[Raw], float] = lambda c: 1.0
    attention_scale: Callable[[Raw, int], float] = lambda c, head_dim: float(head_dim) ** -0.5
    residual_scale: Callable[[Raw], float] = lambda c: 1.0
    logit_scale: Callable[[Raw], float] = lambda c: 1.0
    partial_rotary: bool = False
    extra: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _sqrt_hidden(c: Raw) -> float:
    return math.sqrt(_positive(c, "hidden_size"))


def _query_scalar(c: Raw, head_dim: int) -> float:
    return float(_positive(c, "query_pre_attn_scalar") ** -0.5)


_QWEN_FIELDS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
_QWEN_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}
_GEMMA_FIELDS = frozenset(
    {
        *("attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "hidden_activation"),
        *(
            "layer_types",
            "query_pre_attn_scalar",
            "sliding_window",
            "sliding_window_pattern",
            "cache_implementation",
        ),
    }
)
_GEMMA_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        mlp_bias=_mlp_bias, extra=frozenset({"attention_bias", "mlp_bias", "pretraining_tp"})
    ),
    "MistralForCausalLM": Architecture(
        windows=_window_everywhere,
        extra=frozenset({"sliding_window", "attention_bias"}),
        defaults={"sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": Architecture(
        qkv_bias=_always(True),
        o_bias=_always(False),
        windows=_window_from_layer,
        extra=_QWEN_FIELDS,
        defaults=_QWEN_DEFAULTS,
    ),
    "Qwen3ForCausalLM": Architecture(
        qk_norm=True,
        windows=_window_from_layer,
        extra=_QWEN_FIELDS | {"attention_bias"},
        defaults=_QWEN_DEFAULTS,
    ),
    "Phi3ForCausalLM": Architecture(
        qkv_bias=_always(False),
        o_bias=_always(False),
        windows=_window_everywhere,
        packed=True,
        partial_rotary=True,
        extra=frozenset({"sliding_window", "original_max_position_embeddings", "partial_rotary_factor"}),
        defaults={"rms_norm_eps": 1e-5},
    ),
    "Gemma2ForCausalLM": Architecture(
        windows=_window_alternating(2),
        activation="gelu_tanh",
        norm_offset=1.0,
        post_norms=True,
        embedding_scale=_sqrt_hidden,
        attention_scale=_query_scalar,
        extra=_GEMMA_FIELDS,
        defaults=_GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma3ForCausalLM": Architecture(
        qk_norm=True,
        windows=_window_alternating(6),
        activation="gelu_tanh",
        norm_offset=1.0,
        post_norms=True,
        embedding_scale=_sqrt_hidden,
        attention_scale=_query_scalar,
        extra=_GEMMA_FIELDS | {"rope_local_base_freq"},
        defaults=_GEMMA_DEFAULTS | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
    ),
    "GraniteForCausalLM": Architecture(
        mlp_bias=_mlp_bias,
        embedding_scale=lambda c: _number(c, "embedding_multiplier", 1.0),
        attention_scale=lambda c, head_dim: _number(c, "attention_multiplier", 1.0),
        residual_scale=lambda c: _number(c, "residual_multiplier", 1.0),
        logit_scale=lambda c: 1 / _number(c, "logits_scaling", 1.0),
        extra=frozenset(
            {
                *("attention_bias", "mlp_bias", "embedding_multiplier", "attention_multiplier"),
                *("residual_multiplier", "logits_scaling"),
            }
        ),
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

    Raises ConfigError naming the field, the value given and what is accepted, CheckpointError for a file that is not
    readable or whose values are of another kind than they should be.
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
    raw = {**arch.defaults, **raw}

    hidden, heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
    kv_heads = _positive(raw, "num_key_value_heads", heads)
    layers = _positive(raw, "num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise ConfigError(
            f"config.json: num_hidden_layers is {_short(layers)}: accepted a positive whole number up to {_MOST_LAYERS}"
        )
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
    _check_activation(raw, arch)
    if raw.get("pretraining_tp", 1) not in (1, None):
        raise ConfigError(f"config.json: pretraining_tp is {raw['pretraining_tp']}: accepted 1")
    max_positions = _positive(raw, "max_position_embeddings")
    rope, window_rope = _ropes(raw, arch, head_dim, max_positions)
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
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6, most=_MOST_EPS),
        rope=rope,
        window_rope=window_rope,
        tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
        qkv_bias=arch.qkv_bias(raw),
        o_bias=arch.o_bias(raw),
        mlp_bias=arch.mlp_bias(raw),
        qk_norm=arch.qk_norm,
        windows=arch.windows(raw, layers),
        activation=arch.activation,
        norm_offset=arch.norm_offset,
        post_norms=arch.post_norms,
        packed=arch.packed,
        embedding_scale=arch.embedding_scale(raw),
        attention_scale=arch.attention_scale(raw, head_dim),
        residual_scale=arch.residual_scale(raw),
        logit_scale=arch.logit_scale(raw),
        attention_softcap=_optional_number(raw, "attn_logit_softcapping"),
        logit_softcap=_optional_number(raw, "final_logit_softcapping"),
        dtype=raw.get("dtype") or raw.get("torch_dtype"),
        eos_token_ids=_eos_ids(raw, folder),
    )


# No model's is above a few 1e-5; a larger one would drown what is normalised.
_MOST_EPS = 1e-2
# Far beyond any model: a larger number is damage, and is known before anything is made per layer.
_MOST_LAYERS = 10_000
# The spellings of each activation in config.json.
_ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}


def _check_activation(raw: Raw, arch: Architecture) -> None:
    # Gemma's hidden_act is a leftover that transformers does not read; hidden_activation counts.
    name = "hidden_activation" if "hidden_activation" in arch.extra else "hidden_act"
    given, accepted = raw.get(name), _ACTIVATIONS[arch.activation]
    if given not in (None, *accepted):
        raise ConfigError(f"config.json: {name} is {given!r}: accepted {' or '.join(map(repr, accepted))}")


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


def _flag(fields: Mapping[str, Any], field: str, where: str = "") -> bool:
    value = fields.get(field)
    if value not in (None, True, False):
        raise ConfigError(f"config.json: {where}{field} is {_short(value)}: accepted true or false")
    return bool(value)


def _optional_number(fields: Mapping[str, Any], field: str) -> float | None:
    return None if fields.get(field) is None else _number(fields, field, None)


# What float32 can hold with room for a product: beyond it a number is damage.
_LEAST, _MOST = 1e-30, 1e30


def _number(
    fields: Mapping[str, Any],
    field: str,
    default: float | None,
    where: str = "",
    most: float = math.inf,
    above: float = 0.0,
) -> float:
    """A positive finite number, at most `most` and larger than `above`. Raises ConfigError naming the field."""
    value = fields.get(field)
    if value is None:
        value = default
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not _LEAST <= value <= min(most, _MOST)
        or value <= above
    ):
        limit = (f" above {above:g}" if above else "") + (f" up to {most:g}" if most < math.inf else "")
        raise ConfigError(f"config.json: {where}{field} is {value!r:.100}: accepted a positive number{limit}")
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
    "longrope": frozenset(
        {"factor", "original_max_position_embeddings", "short_factor", "long_factor", "attention_factor"}
    ),
}
_BY_TYPE = frozenset({"full_attention", "sliding_attention"})


def _ropes(
    raw: Raw, arch: Architecture, head_dim: int, max_positions: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotation of all layers, and that of layers with a window where it is another one.

    Read from rope_parameters (transformers 5, where Gemma 3 has one entry per layer type) or from rope_theta,
    rope_local_base_freq and rope_scaling (4.x); both styles may stand side by side where they do not disagree.
    """
    where, given = _given_ropes(raw)
    by_type = set(given) & _BY_TYPE
    local_theta = raw.get("rope_local_base_freq")
    if not by_type:
        rope = _rope(raw, arch, dict(given), where, raw.get("rope_theta"), head_dim, max_positions)
        if local_theta is None:
            return rope, None
        return rope, _rope(raw, arch, {}, where, local_theta, head_dim, max_positions)
    if set(given) - _BY_TYPE or local_theta is None:
        raise ConfigError(
            f"config.json: {where} has the fields {sorted(given)}: not understood for this model"
        )
    full, window = (
        _rope(raw, arch, dict(given.get(kind) or {}), f"{where}.{kind}", theta, head_dim, max_positions)
        for kind, theta in (("full_attention", raw.get("rope_theta")), ("sliding_attention", local_theta))
    )
    return full, window


def _given_ropes(raw: Raw) -> tuple[str, dict[str, Any]]:
    """What rope_parameters and rope_scaling say together, and where most of it stands."""
    found: dict[str, dict[str, Any]] = {}
    for name in ("rope_parameters", "rope_scaling"):
        given = raw.get(name) or {}
        if not isinstance(given, dict):
            raise ConfigError(f"config.json: {name} is {_short(given)}: accepted an object")
        if given:
            found[name] = _one_spelling(given, name)
    if len(found) < 2:
        return next(iter(found.items()), ("rope_scaling", {}))
    newer, older = found["rope_parameters"], found["rope_scaling"]
    if set(newer) & _BY_TYPE and not set(older) & _BY_TYPE:
        older = {
            "full_attention": older
        }  # before there were entries per type, it was of layers without a window
    return "rope_parameters", _merged(newer, older, "")


def _one_spelling(given: Raw, where: str) -> dict[str, Any]:
    """With rope_type for `type`, and without fields that say nothing."""
    fields = {k: v for k, v in given.items() if v is not None}
    old = fields.pop("type", None)
    if old is not None and fields.setdefault("rope_type", old) != old:
        raise ConfigError(
            f"config.json: {where}.rope_type is {_short(fields['rope_type'])} and {where}.type is {_short(old)}: accepted "
            "one of them, or the same twice; remove the wrong one"
        )
    for kind in set(fields) & _BY_TYPE:
        if not isinstance(fields[kind], dict):
            raise ConfigError(f"config.json: {where}.{kind} is {_short(fields[kind])}: accepted an object")
        fields[kind] = _one_spelling(fields[kind], f"{where}.{kind}")
    return fields


def _merged(newer: Raw, older: Raw, below: str) -> dict[str, Any]:
    """All fields of both. Raises ConfigError naming one on which they disagree."""
    merged = {**older, **newer}
    for name in set(newer) & set(older):
        if name in _BY_TYPE:
            merged[name] = _merged(newer[name], older[name], f"{name}.")
        elif newer[name] != older[name]:
            field = f"{below}{name}"
            raise ConfigError(
                f"config.json: rope_parameters.{field} is {_short(newer[name])} and rope_scaling's {name} is "
                f"{_short(older[name])}: accepted the same in both; remove the wrong one"
            )
    return merged


def _rope(
    raw: Raw,
    arch: Architecture,
    fields: dict[str, Any],
    where: str,
    default_theta: Any,
    head_dim: int,
    max_positions: int,
) -> RopeConfig:
    theta = _number({"rope_theta": fields.pop("rope_theta", default_theta)}, "rope_theta", 10000.0, above=1.0)
    kind = str(fields.pop("rope_type", "default"))
    if arch.packed and kind in ("su", "yarn"):
        kind = "longrope"  # what Phi-3's first releases called it
    if kind not in INV_FREQ:
        raise ConfigError(f"config.json: {where}.rope_type is {kind!r}: accepted {sorted(INV_FREQ)}")
    rotary_dim = _rotary_dim(
        fields.pop("partial_rotary_factor", raw.get("partial_rotary_factor")), arch, head_dim
    )
    unknown = sorted(k for k, v in fields.items() if k not in _ROPE_FIELDS[kind] and v is not None)
    if unknown and kind != "default":
        raise ConfigError(f"config.json: {where} of type {kind}: field not understood: {', '.join(unknown)}")
    base = RopeConfig(kind, theta, head_dim, rotary_dim=rotary_dim)
    if kind == "default":
        return base

    def number(field: str, default: float | None = None) -> float:
        return _number(fields, field, default, f"{where}.")

    name = "original_max_position_embeddings"
    beside = raw.get(name)
    own = beside if fields.get(name) is None else fields[name]
    original = _original_positions(
        max_positions if own is None else own, name if own is beside else f"{where}.{name}"
    )
    if kind == "longrope":
        return _longrope(replace(base, original_max_positions=original), fields, where, max_positions)
    base = replace(base, factor=number("factor"))
    if kind == "linear":
        return base
    base = replace(base, original_max_positions=original)
    if kind == "llama3":
        low = number("low_freq_factor")
        high = _number(fields, "high_freq_factor", None, f"{where}.", above=low)
        return replace(base, low_freq_factor=low, high_freq_factor=high)
    return replace(
        base,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=_flag({"truncate": True} | fields, "truncate", f"{where}."),
        attention_factor=_yarn_attention_factor(fields, base.factor, f"{where}."),
    )


def _original_positions(value: Any, field: str) -> int:
    number = _number({field: value}, field, None, above=1.0)
    if number != int(number):
        raise ConfigError(f"config.json: {field} is {_short(value)}: accepted a whole number above 1")
    return int(number)


def _rotary_dim(partial: Any, arch: Architecture, head_dim: int) -> int:
    if partial in (None, 1, 1.0):
        return head_dim
    if not arch.partial_rotary:
        raise ConfigError(f"config.json: partial_rotary_factor is {partial}: accepted 1")
    dims = int(head_dim * _number({"partial_rotary_factor": partial}, "partial_rotary_factor", None))
    if not 0 < dims <= head_dim or dims % 2:
        raise ConfigError(
            f"config.json: partial_rotary_factor {partial} of head_dim {head_dim} rotates {dims} dimensions: "
            f"accepted an even number up to {head_dim}"
        )
    return dims


def _longrope(base: RopeConfig, fields: dict[str, Any], where: str, max_positions: int) -> RopeConfig:
    """Each frequency divided by a factor of its own; other factors within the original context than beyond it.

    Source: LongRoPE (arXiv 2402.13753) and Phi-3's model card for the attention factor.
    """
    lists = []
    for name in ("short_factor", "long_factor"):
        given = fields.get(name)
        if not isinstance(given, list) or len(given) != base.rotary_dim // 2:
            raise ConfigError(
                f"config.json: {where}.{name} is {_short(given)}: accepted a list of {base.rotary_dim // 2} numbers"
            )
        lists.append(tuple(_number({name: v}, name, None, f"{where}.") for v in given))
    original = base.original_max_positions
    factor = _number(fields, "factor", max_positions / original, f"{where}.")
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return replace(
        base,
        short_factors=lists[0],
        long_factors=lists[1],
        attention_factor=_number(fields, "attention_factor", scale, f"{where}."),
    )


def _yarn_attention_factor(fields: Mapping[str, Any], factor: float, where: str) -> float:
    """The scale of cos and sin: stated, or 0.1 ln(factor) + 1, or the ratio of the two mscale variants of it."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if fields.get("attention_factor") is not None:
        return _number(fields, "attention_factor", None, where)
    # 0 stands for one left out.
    given = {k: fields[k] for k in ("mscale", "mscale_all_dim") if fields.get(k) is not None}
    weights = [_number(given, k, None, where) for k, v in given.items() if v != 0 or isinstance(v, bool)]
    return mscale(weights[0]) / mscale(weights[1]) if len(weights) == 2 else mscale(1.0)


def _eos_ids(raw: Mapping[str, Any], folder: Path | None) -> tuple[int, ...]:
    """Union of config.json's, generation_config.json's and the tokenizer's end-of-sequence ids, sorted."""
    found = {*_ids_of(raw, "config.json")}
    if folder is not None:
        name = "generation_config.json"
        found |= {*_ids_of(read_json(folder / name, missing_is_empty=True), name)}
        own = _tokenizer_eos(folder)
        found |= set() if own is None else {own}
    return tuple(sorted(found))


def _ids_of(raw: Mapping[str, Any], file: str) -> list[int]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise ConfigError(
            f"{file}: eos_token_id is {_short(value)}: accepted a whole number, or a list of them; correct it, since "
            "without it no answer would end"
        )
    return ids


def _tokenizer_eos(folder: Path) -> int | None:
    """The id of tokenizer_config.json's eos_token, looked up in tokenizer.json."""
    token = read_json(folder / "tokenizer_config.json", missing_is_empty=True).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    with well_formed("tokenizer.json"):
        return _token_id(read_json(folder / "tokenizer.json", missing_is_empty=True), text)


def _token_id(tokenizer: dict[str, Any], text: str) -> int | None:
    for added in tokenizer.get("added_tokens") or []:
        if added.get("content") == text:
            return int(added["id"])
    vocab = (tokenizer.get("model") or {}).get("vocab")
    found = vocab.get(text) if isinstance(vocab, dict) else None
    return found if isinstance(found, int) else None
