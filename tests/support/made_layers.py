"""Quantised layers packed nibble by nibble from the formats' definitions, and the settings that go with them."""

from typing import Any

import torch

N, K, G = 16, 64, 32
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
M = "model.layers.0.self_attn.q_proj"


def word(nibbles: list[int]) -> int:
    value = sum(int(v) << (4 * i) for i, v in enumerate(nibbles))
    return value - (1 << 32) if value >= 1 << 31 else value


def pack(values: torch.Tensor, columns: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[R, C] -> int32 [R, C/8]; nibble i of a word is column columns[i] of its eight."""
    rows, cols = values.shape
    words = [
        [word([values[r, c + j].item() for j in columns]) for c in range(0, cols, 8)] for r in range(rows)
    ]
    return torch.tensor(words, dtype=torch.int32)


def compressed(**weights: Any) -> dict[str, Any]:
    base = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": G,
        "dynamic": False,
    }
    group = {
        "targets": ["Linear"],
        "weights": base | weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def gptq(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": G, "sym": False, "desc_act": False, **fields}


def awq(**fields: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": G,
        "zero_point": True,
        "version": "gemm",
        **fields,
    }


def pack8(values: torch.Tensor) -> torch.Tensor:
    """[R, C] of 0..255 -> int32 [R, C/4], four consecutive columns per word, low byte first."""
    return values.to(torch.uint8).contiguous().view(torch.int32)


def value(q: torch.Tensor, z: torch.Tensor | int, s: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """(q - z) * s in float32, by the definition."""
    zeros = z.float()[:, group] if isinstance(z, torch.Tensor) else z
    return (q.float() - zeros) * s.float()[:, group]
