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


def test_stop_ids_are_the_union_of_all_three_files(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 9, "content": "<end>"}], "model": {}}')
    assert read_config(LLAMA | {"eos_token_id": 2}, tmp_path).eos_token_ids == (2, 7, 8, 9)


@pytest.mark.parametrize("content", ["[1]", "{", "\x00"], ids=["list", "broken", "binary"])
def test_an_unreadable_file_beside_the_config_is_named(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match="generation_config.json"):
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
    with pytest.raises(CheckpointError, match="config.json: a value is not of the kind it should be"):
        read_config(LLAMA | {"num_hidden_layers": 10**30})
