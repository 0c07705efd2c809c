import json

import pytest

from nybble.service.errors import CheckpointError, ConfigError
from nybble.service.models import read_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures is \['GPT2LMHeadModel'\]: accepted one of"),
        ({"architectures": []}, "architectures is"),
        ({"architectures": None}, "architectures is None"),
        ({"attn_logit_softcapping": 50.0}, "field not understood: attn_logit_softcapping=50.0"),
        ({"embedding_multiplier": 12}, "field not understood: embedding_multiplier=12"),
        ({"sliding_window": 128}, "field not understood: sliding_window=128"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': accepted 'silu'"),
        ({"hidden_size": 63}, "no multiple of num_attention_heads"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000: .* up to 10000"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None"),
        ({"pretraining_tp": 2}, "pretraining_tp is 2"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling.rope_type is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "rope_scaling.factor is -1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor is None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "knee": 1}}, "field not understood: knee"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small': accepted a positive number"),
        ({"rms_norm_eps": 0.5}, "rms_norm_eps is 0.5: accepted a positive number up to 0.01"),
        ({"tie_word_embeddings": "no"}, 'tie_word_embeddings is "no": accepted true or false'),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": [1]}, r"rope_theta is \[1\]"),
        ({"rope_parameters": "default"}, 'rope_parameters is "default": accepted an object'),
    ],
    ids=lambda v: json.dumps(v) if isinstance(v, dict) else None,
)
def test_what_is_not_understood_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        read_config(LLAMA | change)


@pytest.mark.parametrize(
    "change",
    [
        {"attention_dropout": 0.1, "use_cache": True, "transformers_version": "4.40", "_name_or_path": "x"},
        {"some_future_switch": False, "another": None, "a_list": []},
        {"temperature": 0.6, "top_p": 0.9, "do_sample": True},
    ],
    ids=["bookkeeping", "neutral-values", "generation-defaults"],
)
def test_what_says_nothing_about_inference_is_let_through(change):
    assert read_config(LLAMA | change).layers == 2


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 100000.0},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}},
        {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 100000.0}},
    ],
    ids=["transformers4", "transformers5", "both-spellings"],
)
def test_theta_is_read_from_either_spelling(rope):
    assert read_config(LLAMA | rope).rope.theta == 100000.0


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": YARN},
        {"rope_parameters": YARN | {"rope_theta": 5e5}, "rope_scaling": {"type": "yarn", "factor": 4}},
        {"rope_parameters": YARN | {"rope_theta": None}, "rope_scaling": {"rope_theta": 5e5}},
        {"rope_parameters": {}, "rope_scaling": YARN | {"rope_theta": 5e5}},
    ],
    ids=["apart", "agreeing", "theta-in-the-other", "one"],
)
def test_both_spellings_are_taken_together(rope):
    made = read_config(LLAMA | rope).rope
    assert (made.kind, made.factor, made.theta) == ("yarn", 4.0, 5e5)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 2.0}},
            "rope_parameters.factor is 4.0 and rope_scaling's factor is 2.0",
        ),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN}, "rope_parameters.rope_type is"),
        ({"rope_scaling": YARN | {"type": "linear"}}, "rope_scaling.rope_type is .* and rope_scaling.type"),
        ({"rope_parameters": {"factor": 2}, "rope_scaling": "x"}, 'rope_scaling is "x"'),
    ],
    ids=["factor", "type", "type-twice", "kind"],
)
def test_spellings_that_disagree_are_refused(rope, message):
    with pytest.raises(ConfigError, match=message):
        read_config(LLAMA | rope)


NUMBERS = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = NUMBERS | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "value", [0, -1.0, float("nan"), float("inf"), 10**400, 1e-45, "2", True, [1]], ids=str
)
@pytest.mark.parametrize(
    ("base", "field"),
    [
        (NUMBERS, "factor"),
        (NUMBERS, "attention_factor"),
        (NUMBERS, "mscale"),
        (NUMBERS, "rope_theta"),
        (NUMBERS, "original_max_position_embeddings"),
        (LLAMA3, "high_freq_factor"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_number_of_the_rotation_has_to_be_one(base, field, value):
    if field == "mscale" and value == 0:
        return  # stands for one left out
    with pytest.raises(ConfigError, match=f"{field} is .*: accepted a positive number"):
        read_config(
            LLAMA
            | {"rope_scaling": (base | {"mscale_all_dim": 1.0} if base is NUMBERS else base) | {field: value}}
        )


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (NUMBERS | {"rope_theta": 1}, "rope_theta is 1: accepted a positive number above 1"),
        (NUMBERS | {"truncate": "no"}, 'rope_scaling.truncate is "no": accepted true or false'),
        (NUMBERS | {"original_max_position_embeddings": 64.5}, "is 64.5: accepted a whole number"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor is 1.0: accepted a positive number above 1"),
    ],
    ids=lambda v: json.dumps(v) if isinstance(v, dict) else None,
)
def test_numbers_of_the_rotation_that_do_not_fit_are_refused(rope, message):
    with pytest.raises(ConfigError, match=message):
        read_config(LLAMA | {"rope_scaling": rope})


def test_gemma3_takes_an_older_scaling_for_the_layers_without_window():
    both = {
        "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    config = read_config(GEMMA3 | both)
    assert (config.rope.kind, config.rope.factor, config.window_rope.kind) == ("linear", 8.0, "default")


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_windows_left_out_are_those_of_its_class(architecture):
    long = {"max_position_embeddings": 8192, "num_hidden_layers": 30, "use_sliding_window": True}
    qwen = LLAMA | long | {"architectures": [architecture]}
    assert read_config(qwen).windows == (None,) * 28 + (4096,) * 2
    assert read_config(qwen | {"max_window_layers": 0}).windows == (4096,) * 30
    assert read_config(qwen | {"sliding_window": None}).windows == (None,) * 30
    types = ["sliding_attention", "full_attention"]
    two = {"num_hidden_layers": 2, "max_window_layers": 28, "layer_types": types}
    assert read_config(qwen | two).windows == (4096, None)
    for wrong in (-1, "2", 1.5, True):
        with pytest.raises(ConfigError, match="max_window_layers is .*accepted a whole number >= 0"):
            read_config(qwen | {"max_window_layers": wrong})
    with pytest.raises(ConfigError, match="layer_types is 5: accepted a list of 30"):
        read_config(qwen | {"layer_types": 5})


def test_qwen_windows_follow_layer_types_or_max_window_layers():
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9}
    assert read_config(qwen).windows == (None, None)
    assert read_config(qwen | {"use_sliding_window": True, "max_window_layers": 1}).windows == (None, 9)
    types = ["sliding_attention", "full_attention"]
    assert read_config(qwen | {"use_sliding_window": True, "layer_types": types}).windows == (9, None)
    with pytest.raises(ConfigError, match="layer_types"):
        read_config(qwen | {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 2})
    with pytest.raises(ConfigError, match="layer_types has 1 entries"):
        read_config(qwen | {"use_sliding_window": True, "layer_types": types[:1]})


GEMMA3 = LLAMA | {"architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 32, "sliding_window": 9}
GEMMA3 = {k: v for k, v in GEMMA3.items() if k != "rope_theta"}


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None},
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6},
                "sliding_attention": {"rope_theta": 1e4},
            }
        },
        {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": None}},
    ],
    ids=["defaults", "transformers4", "transformers5", "transformers5-defaults"],
)
def test_gemma3_turns_windowed_layers_otherwise(rope):
    config = read_config(GEMMA3 | {"num_hidden_layers": 7} | rope)
    assert (config.rope.theta, config.window_rope.theta) == (1e6, 1e4)
    assert config.windows == (9, 9, 9, 9, 9, None, 9)
    assert config.tie_word_embeddings, "left out of config.json, it is what Gemma's class says"


def test_what_config_json_leaves_out_is_what_the_architecture_says():
    gemma2 = read_config(GEMMA3 | {"architectures": ["Gemma2ForCausalLM"]})
    assert (gemma2.attention_softcap, gemma2.logit_softcap) == (50.0, 30.0)
    assert gemma2.windows == (9, None) and gemma2.head_dim == 256
    explicit = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": None}
    plain = read_config(GEMMA3 | {"architectures": ["Gemma2ForCausalLM"]} | explicit)
    assert (plain.attention_softcap, plain.logit_softcap, plain.windows) == (None, None, (None, None))
    assert read_config(MISTRAL | {"max_position_embeddings": 8192}).windows == (4096, 4096)
    assert read_config(MISTRAL).windows == (None, None), "a window as wide as the context is none"


MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"]}
PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"]}
LONGROPE = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_scaling": LONGROPE | {"short_factor": [1.0]}},
            "short_factor is .*accepted a list of 8 numbers",
        ),
        ({"rope_scaling": LONGROPE | {"long_factor": [0.0] * 8}}, "long_factor is 0.0: accepted a positive"),
        ({"rope_scaling": LONGROPE | {"short_mscale": 1.2}}, "field not understood: short_mscale"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor 0.2 of head_dim 16 rotates 3 dimensions"),
        ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'"),
    ],
    ids=lambda v: json.dumps(v) if isinstance(v, dict) else None,
)
def test_what_phi3_does_not_mean_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        read_config(PHI3 | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_bidirectional_attention": True}, "field not understood: use_bidirectional_attention"),
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu': accepted 'gelu_pytorch_tanh'"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window_pattern": "x"}, "sliding_window_pattern is 'x'"),
        ({"rope_parameters": {"full_attention": {}, "other": {}}}, "rope_parameters has the fields"),
        ({"attn_logit_softcapping": -1}, "attn_logit_softcapping is -1"),
    ],
    ids=lambda v: json.dumps(v) if isinstance(v, dict) else None,
)
def test_what_gemma3_does_not_mean_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        read_config(GEMMA3 | change)


def test_longrope_serves_the_original_context_unless_asked():
    config = read_config(PHI3 | {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64})
    assert (config.max_positions, config.default_positions, config.rope.kind) == (512, 64, "longrope")


def test_stop_ids_are_the_union_of_all_three_files(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 9, "content": "<end>"}], "model": {}}')
    assert read_config(LLAMA | {"eos_token_id": 2}, tmp_path).eos_token_ids == (2, 7, 8, 9)


@pytest.mark.parametrize("content", ["[1]", "{", "\x00"], ids=["list", "broken", "binary"])
def test_an_unreadable_file_beside_the_config_is_named(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match="generation_config.json"):
        read_config(LLAMA, tmp_path)


@pytest.mark.parametrize(
    "tokenizer", [{"added_tokens": 5}, {"added_tokens": [1]}, {"model": 5}], ids=json.dumps
)
def test_a_value_of_another_kind_names_its_file(tmp_path, tokenizer):
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="tokenizer.json: a value is not of the kind it should be"):
        read_config(LLAMA, tmp_path)


def test_a_layer_count_beyond_all_bounds_is_refused():
    with pytest.raises(
        ConfigError, match="num_hidden_layers is 10+: accepted a positive whole number up to 10000"
    ):
        read_config(LLAMA | {"num_hidden_layers": 10**30})


@pytest.mark.parametrize("given", ["2", [2, "3"], 2.0, True, {"id": 2}], ids=str)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_of_sequence_of_another_kind_is_named(tmp_path, file, given):
    """Passed over, no answer would end."""
    config = LLAMA
    if file == "config.json":
        config = LLAMA | {"eos_token_id": given}
    else:
        (tmp_path / file).write_text(json.dumps({"eos_token_id": given}))
    with pytest.raises(ConfigError, match=f"{file}: eos_token_id is .*: accepted a whole number, or a list"):
        read_config(config, tmp_path)
