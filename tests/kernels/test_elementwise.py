import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nybble.kernels.activation import gelu_tanh_mul, gelu_tanh_mul_reference, silu_mul, silu_mul_reference
from nybble.kernels.norm import RmsNorm, rms_norm_reference
from nybble.kernels.rope import INV_FREQ, RopeConfig, RopeTable, rotate, rotate_reference
from nybble.service.models.config import ARCHITECTURES, _ropes


@pytest.mark.parametrize("shape", [(1, 576), (7, 32), (0, 64), (2, 3, 64)], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3], ids=["small", "unit", "large"])
def test_rms_norm(shape, dtype, tolerance, size):
    x = (torch.randn(shape) * size).to(dtype)
    w = torch.randn(shape[-1]).to(dtype)
    y = RmsNorm(w, 1e-5)(x)
    assert y.dtype is dtype and y.shape == x.shape
    torch.testing.assert_close(y.float(), rms_norm_reference(x, w, 1e-5), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize(
    ("gated", "reference"), [(silu_mul, silu_mul_reference), (gelu_tanh_mul, gelu_tanh_mul_reference)]
)
def test_gated_activation(rows, gated, reference):
    x = torch.randn(rows, 96)
    torch.testing.assert_close(gated(x), reference(x))


ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 256,
        "mscale": 0.9,
        "mscale_all_dim": 0.7,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 1024,
        "short_factor": [1 + i / 32 for i in range(32)],
        "long_factor": [2 + i for i in range(32)],
    },
}


def test_every_rope_kind_is_compared():
    assert {r["rope_type"] for r in ROPES.values()} == set(INV_FREQ)


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("style", ["transformers5", "transformers4"])
def test_inverse_frequencies_equal_transformers(name, style):
    """Our reader and formula against transformers' own, from either spelling of config.json."""
    fields = {"rope_theta": 100000.0, **ROPES[name]}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=fields
    )
    if style == "transformers5":
        raw = {"rope_parameters": fields}
    else:
        raw = {"rope_theta": 100000.0, "rope_scaling": {k: v for k, v in fields.items() if k != "rope_theta"}}
    ours, _ = _ropes(raw, ARCHITECTURES["LlamaForCausalLM"], 64, 4096)
    if ours.kind == "default":
        expected, scale = 1.0 / (100000.0 ** (torch.arange(0, 64, 2).float() / 64)), 1.0
    else:
        expected, scale = ROPE_INIT_FUNCTIONS[ours.kind](config, torch.device("cpu"))
    torch.testing.assert_close(INV_FREQ[ours.kind](ours), expected, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(scale)


def test_rotation_turns_each_pair_by_its_angle():
    config = RopeConfig("default", 10000.0, 64)
    positions = torch.tensor([0, 1, 77, 2047])
    x = torch.randn(4, 3, 64)
    cos, sin = RopeTable(config, 2048, torch.float32, torch.device("cpu")).at(positions, 2, 1)
    expected = rotate_reference(x, positions, INV_FREQ["default"](config))
    turned = rotate(x, cos, sin)
    torch.testing.assert_close(turned[:, :2].double(), expected[:, :2], rtol=1e-4, atol=2e-4)
    assert torch.equal(turned[:, 2:], x[:, 2:]), "a plain head must not change in any bit"
