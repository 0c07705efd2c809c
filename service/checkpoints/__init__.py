"""Checkpoints: where a model comes from, and readers that turn any hub format into logical W4A16 weights.

To add a format: one new file with a `Format`, one row in FORMATS.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nybble.service.checkpoints.awq import Awq
from nybble.service.checkpoints.base import Checkpoint, Format
from nybble.service.checkpoints.compressed_tensors import CompressedTensors
from nybble.service.checkpoints.files import PICKLES
from nybble.service.checkpoints.gptq import Gptq
from nybble.service.errors import CheckpointError, well_formed
from nybble.service.json_files import read_json

__all__ = ["FORMATS", "Checkpoint", "Format", "open_checkpoint", "resolve"]

# quant_method of config.json -> the format that reads it
FORMATS: dict[str, type[Format]] = {
    "compressed-tensors": CompressedTensors,
    "gptq": Gptq,
    "awq": Awq,
}

DEMO = "demo"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
# Nested folders (original/, onnx/, ...) and Mistral's second copy of the same weights.
HUB_NOT = ("*/*", "consolidated*")


def resolve(model: str, progress: bool = True) -> Path:
    """The local folder of a model: a folder, `demo`, or a hub id ("org/name", optionally "@revision").

    The demo is made, a hub model fetched on first use; HF_HUB_OFFLINE and HF_HOME are honoured. progress shows bars
    on stderr. Raises CheckpointError when it is none of the three or cannot be fetched.
    """
    if model == DEMO:
        from nybble.service.checkpoints.demo import demo

        return demo(progress)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(
                f"{path}: no config.json in this folder; give a folder as Hugging Face models are laid out"
            )
        return path
    if path.is_file():
        raise CheckpointError(
            f"{path}: a file; accepted a folder. Make one with `nybble quantize {path} DST`"
        )
    if not HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"{model}: no such folder; accepted a folder, a hub id such as org/name, or `{DEMO}`"
        )
    return _fetch(model)


def open_checkpoint(folder: Path, on_bytes: Callable[[int, int], None] | None = None) -> Checkpoint:
    """Open a folder's weights for reading. on_bytes(done, total) is called as bytes are read.

    Raises CheckpointError when the folder is not quantised, is of a format not in FORMATS, or lacks a file.
    """
    config = read_json(folder / "config.json")
    if _is_random(config):
        from nybble.service.checkpoints.random_weights import RandomCheckpoint

        return RandomCheckpoint(folder, config)
    return Checkpoint(folder, config, _format_of(folder, config), on_bytes)


def _is_random(config: dict[str, Any]) -> bool:
    """A folder that `nybble bench` made: see random_weights.py."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "nybble-random"


def _format_of(folder: Path, config: dict[str, Any]) -> Format:
    where = f"{folder / 'config.json'}: quantization_config"
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization and (folder / "quantize_config.json").is_file():
        # AutoGPTQ of 2023 wrote its settings beside config.json only.
        where = str(folder / "quantize_config.json")
        quantization = {"quant_method": "gptq", **read_json(folder / "quantize_config.json")}
    if not quantization:
        raise CheckpointError(
            f"{folder}: config.json has no quantization_config, so these are 16-bit weights; quantise them first: "
            f"nybble quantize {folder} DST"
        )
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{where}: given {quantization!r:.100}, accepted an object")
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        raise CheckpointError(f"{where}: quant_method: given {method!r}, accepted {', '.join(FORMATS)}")
    with well_formed(where):
        return FORMATS[method](quantization, where)


def _fetch(model: str) -> Path:
    """The snapshot of a hub model in the Hugging Face cache, without files that could hold code."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repo, _, revision = model.partition("@")
    try:
        folder = Path(
            snapshot_download(
                repo, revision=revision or None, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_NOT)
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{model}: no such folder here, and the hub did not give it ({reason}); check the name, the network and "
            "HF_HUB_OFFLINE, set HF_TOKEN for a gated model, or give a folder"
        ) from error
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{model}: the repository holds no config.json ({folder}); is it a GGUF or adapter repository?"
        )
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{model}: the repository holds no safetensors files; pickled weights ({', '.join(PICKLES)}) are never fetched"
        )
    return folder
