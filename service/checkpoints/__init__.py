"""Checkpoints: where a model comes from, and readers that turn any hub format into logical W4A16 weights.

To add a format: one new file with a `Format`, one row in FORMATS.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nybble.service.checkpoints.auto_round import auto_round
from nybble.service.checkpoints.awq import Awq
from nybble.service.checkpoints.base import Checkpoint, Format, refused
from nybble.service.checkpoints.compressed_tensors import CompressedTensors
from nybble.service.checkpoints.files import PICKLES, TensorFiles
from nybble.service.checkpoints.gptq import Gptq
from nybble.service.errors import CheckpointError, well_formed
from nybble.service.folders import cache_folder
from nybble.service.json_files import read_json

log = logging.getLogger(__name__)

__all__ = ["FORMATS", "Checkpoint", "Format", "open_checkpoint", "resolve"]


def _gptq(quantization: dict[str, Any], where: str) -> Format:
    """GPTQModel writes AWQ's tensors too, and says so in the format alone."""
    form = str(quantization.get("checkpoint_format") or quantization.get("format") or "").lower()
    return Awq(quantization, where) if form in AWQ_FORMATS else Gptq(quantization, where)


AWQ_FORMATS = ("gemm", "gemv", "gemv_fast", "llm-awq")

# quant_method of config.json -> what makes the format that reads it
FORMATS: dict[str, Callable[[dict[str, Any], str], Format]] = {
    "compressed-tensors": CompressedTensors,
    "gptq": _gptq,
    "awq": Awq,
    "auto-round": auto_round,
    "intel/auto-round": auto_round,
}
# Where quantisers put their settings when not into config.json, and whose they are when the file does not say.
SETTINGS_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quantization_config.json": "",
}

# How the tensors of a quantised weight end.
PACKED = tuple(f".{leaf}" for leaf in (Gptq.packed, CompressedTensors.packed))

DEMO = "demo"
HUB_LIMIT = 96  # characters of a hub id
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
HUB_FILE = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/(?P<file>[\w./-]+\.gguf)")
GGUF_MAGIC = b"GGUF"
# Raised whenever the same file would give another folder.
GGUF_RECIPE = 1
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
# Nested folders (original/, onnx/, ...) and Mistral's second copy of the same weights.
HUB_NOT = ("*/*", "consolidated*")


def resolve(model: str, progress: bool = True) -> Path:
    """The local folder of a model: a folder, a GGUF file, `demo`, or a hub id ("org/name", optionally "@revision", or
    "org/name/file.gguf").

    The demo is made, a hub model fetched and a GGUF file converted on first use; HF_HUB_OFFLINE and HF_HOME are
    honoured. progress shows bars on stderr. Raises CheckpointError when it is none of these or cannot be fetched.
    """
    if model == DEMO:
        from nybble.service.checkpoints.demo import demo

        return demo(progress)
    try:
        path = Path(model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except PermissionError as error:
        raise _closed(path) from error
    except (OSError, ValueError, RuntimeError) as error:  # too long, or ~ of nobody
        raise CheckpointError(
            f"{model!r:.100}: no name that a folder could have ({error!s:.100}); accepted a folder, a GGUF file, a hub id such "
            f"as org/name, or `{DEMO}`"
        ) from error
    if is_folder:
        return _folder(path, progress)
    if is_file:
        return _converted(path, progress)
    repo, _, revision = model.partition("@")
    file = HUB_FILE.fullmatch(model)
    if file is not None and ".." not in model and len(file["repo"]) <= HUB_LIMIT:
        return _converted(_fetch_file(file["repo"], file["file"]), progress)
    if not HUB_ID.fullmatch(model) or ".." in model or len(repo) > HUB_LIMIT:
        raise CheckpointError(
            f"{model if len(model) <= 200 else model[:200] + '...'}: no such folder; accepted a folder, a GGUF file, a hub id such as org/name, or `{DEMO}`"
        )
    return _fetch(repo, revision or None)


def _closed(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: user {os.geteuid()}, as whom this runs, may not read it; it and the folders that it is in have to be open to "
        f"that user (chmod -R a+rX {path})"
    )


def _folder(path: Path, progress: bool) -> Path:
    try:
        if (path / "config.json").is_file():
            return path
    except PermissionError as error:
        raise _closed(path) from error
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _converted(ggufs[0], progress)
    if ggufs:
        shown = ", ".join(file.name for file in ggufs[:3])
        raise CheckpointError(f"{path}: {len(ggufs)} GGUF files ({shown} ...); give one of them")
    raise CheckpointError(
        f"{path}: no config.json in this folder; give a folder as Hugging Face models are laid out"
    )


def _converted(path: Path, progress: bool) -> Path:
    """The W4A16 folder of a GGUF file, made in the user's cache on first use and found there later."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except PermissionError as error:
        raise _closed(path) from error
    if magic != GGUF_MAGIC:
        raise CheckpointError(
            f"{path}: a file that is no GGUF file; accepted a GGUF file, or a folder as Hugging Face models are laid out"
        )
    from nybble.service.checkpoints.quantize import quantize

    stat = path.stat()
    told = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {GGUF_RECIPE}"
    folder = cache_folder() / "gguf" / f"{path.stem}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        log.info("%s: converting once into %s", path, folder)
        try:
            quantize(path, folder, progress=progress)
        except CheckpointError:
            if not folder.is_dir():
                raise
            # Another process finished first: its folder is the same.
    return folder


def open_checkpoint(
    folder: Path,
    on_bytes: Callable[[int, int], None] | None = None,
    drop_cache: bool = False,
    pin: bool = False,
) -> Checkpoint:
    """Open a folder's weights for reading. on_bytes(done, total) is called as bytes are read. drop_cache and pin: see
    TensorFiles.

    Raises CheckpointError when the folder is not quantised, is of a format not in FORMATS, or lacks a file.
    """
    config = read_json(folder / "config.json")
    if _is_random(config):
        from nybble.service.checkpoints.random_weights import RandomCheckpoint

        return RandomCheckpoint(folder, config)
    return Checkpoint(folder, config, _format_of(folder, config), on_bytes, drop_cache, pin)


def _is_random(config: dict[str, Any]) -> bool:
    """A folder that `nybble bench` made: see random_weights.py."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "nybble-random"


def _format_of(folder: Path, config: dict[str, Any]) -> Format:
    quantization, where = quantization_of(folder, config)
    if not quantization:
        packed = next((n for n in TensorFiles.names_in(folder) if n.endswith(PACKED)), None)
        if packed is not None:
            raise CheckpointError(
                f"{folder}: tensor {packed} is quantised, but nothing says how; fetch the file with the settings too "
                f"(quantization_config in config.json, or {', '.join(SETTINGS_FILES)})"
            )
        raise CheckpointError(
            f"{folder}: config.json has no quantization_config, so these are 16-bit weights; quantise them first: "
            f"nybble quantize {folder} DST"
        )
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{where}: given {quantization!r:.100}, accepted an object")
    method = quantization.get("quant_method")
    if method is None and "config_groups" in quantization:
        method = "compressed-tensors"  # its first releases did not say
    if not isinstance(method, str) or method not in FORMATS:
        raise refused(where, "quant_method", method, ", ".join(FORMATS))
    with well_formed(where):
        return FORMATS[method](quantization, where)


def quantization_of(folder: Path, config: dict[str, Any]) -> tuple[Any, str]:
    """The quantisation settings of a folder and where they stand; None when it has none."""
    for field in ("quantization_config", "compression_config"):
        if config.get(field):
            return config[field], f"{folder / 'config.json'}: {field}"
    for name, method in SETTINGS_FILES.items():
        if (folder / name).is_file():
            return {"quant_method": method or None} | read_json(folder / name), str(folder / name)
    return None, str(folder / "config.json")


def _fetch(repo: str, revision: str | None) -> Path:
    """The snapshot of a hub model in the Hugging Face cache, without files that could hold code.

    huggingface_hub shows its own progress bars, goes on with a download that was cut off, and honours HF_HUB_OFFLINE.
    """
    from huggingface_hub import snapshot_download

    with _hub_errors(repo):
        folder = Path(
            snapshot_download(
                repo, revision=revision, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_NOT)
            )
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{repo}: the repository holds no config.json ({folder}); if it holds GGUF files, give one of them: "
            f"{repo}/FILE.gguf"
        )
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{repo}: the repository holds no safetensors files; pickled weights ({', '.join(PICKLES)}) are never fetched"
        )
    return folder


def _fetch_file(repo: str, file: str) -> Path:
    """One file of a hub model in the Hugging Face cache."""
    from huggingface_hub import hf_hub_download

    with _hub_errors(f"{repo}/{file}"):
        return Path(hf_hub_download(repo, file))


@contextmanager
def _hub_errors(model: str) -> Iterator[None]:
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{model}: no such folder here, and the hub did not give it ({reason}); check the name, the network and "
            "HF_HUB_OFFLINE, set HF_TOKEN for a gated model, or give a folder"
        ) from error
