import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(quantization_config, tensors) -> a model folder that holds just these."""

    def write_folder(quantization: dict[str, Any] | None, tensors: dict[str, torch.Tensor]) -> Path:
        config = {"architectures": ["LlamaForCausalLM"]}
        if quantization is not None:
            config["quantization_config"] = quantization
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "model.safetensors")
        return tmp_path

    return write_folder
