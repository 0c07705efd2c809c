"""Tiny transformers models and the same model as int4 weights, for comparison.

`twin(...)` builds a transformers model with random weights, rounds each linear layer to int4 in place, and returns the
int4 weights as a source that Nybble's decoder can load: both compute the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nybble.kernels.linear import dequantize
from nybble.kernels.packing import W4A16Weight, pack_rows

GROUP = 32

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# name -> (model_type, config fields beyond COMMON)
TWINS: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama-tied-bias": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "mistral": ("mistral", {"head_dim": 32}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-yarn": (
        "qwen3",
        {
            "head_dim": 32,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 9}),
    "phi3-partial-longrope": (
        "phi3",
        {
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + i / 8 for i in range(6)],
                "long_factor": [2.0 + i for i in range(6)],
            },
        },
    ),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 9,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "granite": (
        "granite",
        {
            "tie_word_embeddings": True,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.22,
            "logits_scaling": 0.5,
        },
    ),
}


@dataclass
class Source:
    """A WeightSource over dictionaries."""

    weights: dict[str, W4A16Weight | torch.Tensor] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def linear(self, module: str, n: int, k: int) -> W4A16Weight | torch.Tensor:
        weight = self.weights[module]
        shape = (weight.n, weight.k) if isinstance(weight, W4A16Weight) else tuple(weight.shape)
        assert shape == (n, k), (module, shape, n, k)
        return weight

    def expect(self, wanted) -> None:
        pass

    def has_saved(self, layer: str) -> bool:
        return False

    def has(self, module: str) -> bool:
        return module in self.weights

    def bias(self, module: str) -> torch.Tensor | None:
        return self.tensors.get(f"{module}.bias")


def round_to_int4(weight: torch.Tensor, symmetric: bool, group: int = GROUP) -> W4A16Weight:
    """Plain rounding, [N, K] float -> int4."""
    n, k = weight.shape
    w = weight.detach().float().view(n, k // group, group)
    if symmetric:
        scales = w.abs().amax(-1).clamp_min(1e-6) / 7
        zeros = None
        z = 8.0
    else:
        low, high = w.amin(-1).clamp_max(0), w.amax(-1).clamp_min(0)
        scales = (high - low).clamp_min(1e-6) / 15
        zeros = (-low / scales).round().clamp(0, 15).to(torch.uint8)
        z = zeros.float().unsqueeze(-1)
    q = (w / scales.unsqueeze(-1) + z).round().clamp(0, 15).to(torch.uint8).view(n, k)
    return W4A16Weight(pack_rows(q), scales, zeros, None, group, n, k)


def twin(name: str, symmetric: bool = True, keep: tuple[str, ...] = (), seed: int = 0):
    """(transformers model, Source, raw config.json content). `keep`: linear names left in 16 bits."""
    model_type, extra = TWINS[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**COMMON, **extra})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    source = Source()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # norms and biases that do something
            source.tensors[parameter_name] = parameter.detach()
        for module_name, module in model.named_modules():
            if not isinstance(module, torch.nn.Linear):
                continue
            if module_name == "lm_head" or module_name.endswith(keep or ("-",)):
                source.weights[module_name] = module.weight.detach()
                continue
            weight = round_to_int4(module.weight, symmetric)
            module.weight.copy_(dequantize(weight))
            source.weights[module_name] = weight
    raw = config.to_dict() | {"architectures": [type(model).__name__]}
    return model, source, raw
