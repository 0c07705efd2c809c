"""Random weights in a named shape."""

import json

import pytest
import torch

from nybble.kernels.linear import dequantize
from nybble.kernels.packing import W4A16Weight
from nybble.service.checkpoints import open_checkpoint
from nybble.service.checkpoints.random_weights import SHAPES, random_folder
from nybble.service.errors import CheckpointError, ConfigError
from nybble.service.models import read_config
from nybble.service.text import TextCodec


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_a_model_that_is_understood(shape, tmp_path):
    folder = random_folder(tmp_path, shape, max_positions=20_000)
    with open_checkpoint(folder) as checkpoint:
        model = read_config(checkpoint.config, folder)
        assert model.max_positions >= 20_000
        assert checkpoint.quantized("model.layers.0.mlp.down_proj") and not checkpoint.quantized("lm_head")
        assert checkpoint.has("lm_head") == (not model.tie_word_embeddings)


def test_qwen3_8b_takes_what_the_published_one_does(tmp_path):
    with open_checkpoint(random_folder(tmp_path, "qwen3-8b")) as checkpoint:
        # 6.946e9 weights in the blocks at 4.125 bits, and two matrices of 151936 x 4096 at 16.
        assert checkpoint.total_bytes == pytest.approx(6.946e9 * 4.125 / 8 + 2 * 151936 * 4096 * 2, rel=0.001)


def test_weights_are_of_the_size_that_models_start_with(tmp_path):
    with open_checkpoint(random_folder(tmp_path, "tiny")) as checkpoint:
        int4 = checkpoint.linear("model.layers.0.mlp.down_proj", 128, 256)
        embedding = checkpoint.tensor("model.embed_tokens.weight")
    assert isinstance(int4, W4A16Weight) and int4.group_size == 128
    for w in (dequantize(int4), embedding.float()):
        assert 0.015 < float(w.std()) < 0.025 and bool(torch.isfinite(w).all())
    assert embedding.shape == (512, 128)


def test_a_group_size_that_does_not_fit_gives_way(tmp_path):
    folder = random_folder(tmp_path, "smollm2-135m", group_size=128)
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["group_size"] == 64


def test_every_token_has_text(tmp_path):
    codec = TextCodec.load(random_folder(tmp_path, "tiny"))
    assert codec.encode("héllo") == tuple("héllo".encode())
    assert codec.token_bytes(104) == b"h" and codec.token_bytes(511) == b"w511 "


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(ConfigError, match="--shape is 'gpt-5': accepted qwen3-0.6b"):
        random_folder(tmp_path, "gpt-5")
    with pytest.raises(ConfigError, match="no group size from 32 on"):
        random_folder(tmp_path, "tiny", group_size=48)
    folder = random_folder(tmp_path, "tiny")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["group_size"] = "many"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="a group_size from 32 on"):
        open_checkpoint(folder)
