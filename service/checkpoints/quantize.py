"""`nybble quantize`: a 16-bit model (GGUF file or Hugging Face folder) to a compressed-tensors W4A16 folder.

Linear layers of the decoder become int4, those that are Q4_0 in a GGUF file bit for bit; embeddings, norms and the
head are not quantised. What calibration learnt
about the head is noted in nybble.json, for servers that quantise the head as they load it. Tensors pass one at a
time, so memory stays at one shard plus the largest tensor. The folder appears under its name only when complete.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from nybble.kernels.packing import PER_WORD, W4A16Weight, pack_rows
from nybble.service.checkpoints import PACKED, quantization_of
from nybble.service.checkpoints.base import BUFFERS, HEAD_IMPORTANCE, KV_SCALES, NOTES, PLAIN
from nybble.service.checkpoints.calibration import HEAD, importance, text_tokens
from nybble.service.checkpoints.files import TensorFiles
from nybble.service.checkpoints.gguf import GgufSource
from nybble.service.checkpoints.rounding import quantize_tensor
from nybble.service.errors import CheckpointError
from nybble.service.finite import all_finite
from nybble.service.json_files import FETCH_AGAIN, read_json, write_json
from nybble.service.models.config import read_config
from nybble.service.models.load import needed_tensors

__all__ = ["QuantizeOptions", "quantize", "quantize_tensor"]

log = logging.getLogger(__name__)

GROUP_SIZES = (32, 64, 128)
# GGUF's Q4_0 is W4A16 without zero points in groups of this size.
EXACT_TYPE, EXACT_GROUP = "Q4_0", 32
PLAIN_TYPES = ("16-bit", "F32", "F16", "BF16")
FLOAT32_BYTES = 32 << 20  # a larger tensor is rounded to 16 bits on disk: serving rounds it anyway
SHARD_BYTES = 2 * 10**9
SIDE_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
LAYER_WEIGHT = re.compile(r".*\.layers\.\d+\..*\.weight")
SIXTEEN_BIT = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """How to quantise.

    group_size 32, 64 or 128 weights share a scale. symmetric: no zero points. calibrate: weight rounding errors by
    activations measured on a short built-in text (one pass of the 16-bit model); False rounds by the weights alone.
    prepack: also save the layers as this machine's CPU keeps them (see prepacked.py).
    """

    group_size: int = 32
    symmetric: bool = False
    calibrate: bool = True
    prepack: bool = False

    def __post_init__(self) -> None:
        if self.group_size not in GROUP_SIZES:
            raise ValueError(
                f"group_size: given {self.group_size}, accepted {', '.join(map(str, GROUP_SIZES))}"
            )


class Source(Protocol):
    """A model to quantise: tensors under their Hugging Face names.

    dtype: what tensors that stay unquantised are written in; with keeps_float32, those that are not exact in it stay
    float32 where that costs little.
    """

    config: dict[str, Any]
    dtype: torch.dtype
    keeps_float32: bool

    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def nbytes(self, name: str) -> int: ...
    def tensor(self, name: str) -> torch.Tensor: ...
    def exact(self, name: str) -> W4A16Weight | None: ...
    def type_name(self, name: str) -> str: ...
    def write_files(self, folder: Path) -> None: ...


class FolderSource:
    """A Hugging Face folder of 16-bit (or float32) safetensors."""

    keeps_float32 = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = read_json(folder / "config.json")
        settings, where = quantization_of(folder, self.config)
        if settings and not isinstance(settings, dict):
            raise CheckpointError(
                f"{where}: given {settings!r:.100}, accepted none, or an object; remove it if these are 16-bit weights"
            )
        if settings:
            raise CheckpointError(
                f"{folder}: already quantised ({where}: {settings.get('quant_method')!s:.100}): serve it as it is; "
                "accepted a 16-bit folder or a GGUF file"
            )
        self._files = TensorFiles(folder)
        packed = next((name for name in self._files.names() if name.endswith(PACKED)), None)
        if packed is not None:
            raise CheckpointError(
                f"{folder}: already quantised (tensor {packed}), though nothing says how; accepted a 16-bit folder or a "
                "GGUF file"
            )
        declared = str(self.config.get("dtype") or self.config.get("torch_dtype") or "")
        self.dtype = SIXTEEN_BIT.get(declared.removeprefix("torch."), torch.bfloat16)

    def names(self) -> list[str]:
        return self._files.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files.shape(name)

    def nbytes(self, name: str) -> int:
        return self._files.nbytes(name)

    def tensor(self, name: str) -> torch.Tensor:
        value = self._files.tensor(name)
        if value.is_floating_point() and value.dtype not in PLAIN:
            accepted = ", ".join(str(d).removeprefix("torch.") for d in PLAIN)
            raise CheckpointError(
                f"{self._folder}: tensor {name}: given {str(value.dtype).removeprefix('torch.')}, accepted {accepted}; "
                "quantise the 16-bit weights of this model"
            )
        return value

    def exact(self, name: str) -> W4A16Weight | None:
        """None: nothing is quantised yet."""
        return None

    def type_name(self, name: str) -> str:
        return "16-bit"

    def write_files(self, folder: Path) -> None:
        """Tokenizer, generation config and chat template, byte for byte."""
        for path in sorted({path for pattern in SIDE_FILES for path in self._folder.glob(pattern)}):
            if path.name != "config.json" and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)


def quantize(src: Path, dst: Path, options: QuantizeOptions | None = None, progress: bool = True) -> None:
    """Quantise the model at src (a .gguf file or a 16-bit folder) into the new folder dst.

    dst may exist if empty. It is filled under a temporary name beside it and renamed at the end: an interrupted run
    leaves no dst, and of two runs at once one wins and the other raises. progress shows bars on stderr. Raises
    CheckpointError, naming the module or file and the remedy.
    """
    options = options or QuantizeOptions()
    try:
        dst = (
            Path(os.path.realpath(dst)) if dst.is_symlink() else dst
        )  # a link cannot be replaced by a folder
        refuse_filled(dst)
        source = open_source(src)
        plan = _plan(source, options, src)
        _refuse_unservable(source, src)
        _say(source, plan, src)
        with staging(dst) as folder:
            source.write_files(folder)
            wanted = options.calibrate and plan.rounded
            weights = _importance(source, plan.rounded, folder, progress) if wanted else {}
            if HEAD in weights:
                values = [float(f"{v:.4g}") for v in weights[HEAD].tolist()]
                write_json(folder / NOTES, {HEAD_IMPORTANCE: values})
            _write_tensors(source, plan, weights, options, folder, progress)
            _write_config(source, plan, options, folder)
            if options.prepack:
                from nybble.service.checkpoints.prepacked import prepack

                prepack(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{dst}: cannot be made from {src} ({error}); free some space or choose another place"
        ) from error


def open_source(src: Path) -> Source:
    """The model at a path. Raises CheckpointError when it is neither a GGUF file nor a 16-bit folder."""
    if src.is_dir():
        return FolderSource(src)
    if src.is_file():
        return GgufSource(src)
    raise CheckpointError(
        f"{src}: no such file or folder; accepted a .gguf file or a 16-bit Hugging Face folder"
    )


def refuse_filled(dst: Path) -> None:
    """Raises CheckpointError when dst is anything but absent or an empty folder that can be replaced."""
    if dst.is_symlink():
        raise CheckpointError(f"{dst}: a link that leads to itself; remove it or choose another name")
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise CheckpointError(
            f"{dst}: already exists and is not an empty folder; remove it or choose another name"
        )
    if os.path.ismount(dst):
        raise CheckpointError(
            f"{dst}: something is mounted there; give a new folder in it, such as {dst / 'model'}"
        )


@contextmanager
def staging(dst: Path) -> Iterator[Path]:
    """A temporary folder beside dst that becomes dst when the block ends well and vanishes when it does not."""
    dst.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{dst.name}.", suffix=".partial", dir=dst.parent))
    try:
        yield folder
        _share(folder)
        try:
            os.rename(folder, dst)  # replaces an empty folder, fails on a filled one
        except OSError as error:
            raise CheckpointError(
                f"{dst}: another run filled this folder in the meantime ({error})"
            ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _share(folder: Path) -> None:
    """Give folder and files the permissions of newly made ones: temporary folders and safetensors make theirs private."""
    mask = os.umask(0)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def _refuse_unservable(source: Source, src: Path) -> None:
    """Raises ConfigError or CheckpointError for a model that would be refused when served, before anything is written."""
    config = read_config(source.config, src if src.is_dir() else None)
    needed, there = needed_tensors(config), set(source.names())
    for name, shape in needed.items():
        if name not in there:
            raise CheckpointError(
                f"{src}: no tensor {name}, which {config.architecture} with this config.json needs; fetch the missing file"
            )
        if source.shape(name) != shape:
            raise CheckpointError(
                f"{src}: tensor {name}: given {list(source.shape(name))}, accepted {list(shape)} by config.json; the two do "
                "not belong together"
            )
    for name in sorted(there - set(needed)):
        module, _, leaf = name.rpartition(".")
        spare = name == f"{HEAD}.weight" or name.endswith(BUFFERS) or leaf in KV_SCALES
        if not spare and not (
            leaf == "bias" and f"{module}.weight" in needed and not source.tensor(name).any()
        ):
            raise CheckpointError(
                f"{src}: tensor {name}, which {config.architecture} with this config.json does not use; config.json and the "
                "weights do not belong together"
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """Linear modules by what becomes of them: rounded to int4, or taken over as the int4 they are."""

    rounded: list[str]
    exact: list[str]


def _plan(source: Source, options: QuantizeOptions, src: Path) -> Plan:
    """Raises CheckpointError for a module that the group size does not fit."""
    rounded: list[str] = []
    exact: list[str] = []
    group_size = options.group_size
    for name in source.names():
        module = name.removesuffix(".weight")
        shape = source.shape(name)
        q4_0 = group_size == EXACT_GROUP and len(shape) == 2 and source.type_name(name) == EXACT_TYPE
        if q4_0 and name == f"{HEAD}.weight":
            exact.append(module)
        if not LAYER_WEIGHT.fullmatch(name) or len(shape) != 2:
            continue
        if not shape[0] or not shape[1]:
            raise CheckpointError(
                f"{src}: module {module}: given a weight {list(shape)}, accepted at least one row and one column; "
                f"{FETCH_AGAIN}"
            )
        if shape[1] % group_size:
            fitting = [str(g) for g in GROUP_SIZES if shape[1] % g == 0]
            raise CheckpointError(
                f"{src}: module {module}: K={shape[1]} is no multiple of group_size {group_size}; "
                f"accepted for this module: {', '.join(fitting) or 'none'}"
            )
        (exact if q4_0 else rounded).append(module)
    if not rounded and not exact:
        raise CheckpointError(f"{src}: no linear layers found under model.layers.N; is this a decoder model?")
    return Plan(rounded, exact)


def _say(source: Source, plan: Plan, src: Path) -> None:
    """One line on what happens to weights that are quantised already."""
    rounded = Counter(source.type_name(f"{module}.weight") for module in plan.rounded)
    again = {kind: count for kind, count in rounded.items() if kind not in PLAIN_TYPES}
    plain = sum(rounded.values()) - sum(again.values())
    parts = []
    if plan.exact:
        parts.append(f"{len(plan.exact)} {EXACT_TYPE} layers taken over exactly")
    if again:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(again.items()))
        parts.append(f"{kinds} layers dequantised and rounded to int4 anew")
    if plain and parts:
        parts.append(f"{plain} 16-bit layers rounded to int4")
    if parts:
        log.info("%s: %s", src, "; ".join(parts))


def _importance(source: Source, modules: list[str], folder: Path, progress: bool) -> dict[str, torch.Tensor]:
    total = sum(source.nbytes(name) for name in source.names() if name != "lm_head.weight")
    with _bar("calibrate", total, progress) as bar:
        return importance(
            source.config,
            source.tensor,
            set(modules),
            text_tokens(folder),
            lambda name: bar.update(source.nbytes(name)),
        )


def _write_tensors(
    source: Source,
    plan: Plan,
    weights: dict[str, torch.Tensor],
    options: QuantizeOptions,
    folder: Path,
    progress: bool,
) -> None:
    shards = _Shards(folder)
    rounded, exact = set(plan.rounded), set(plan.exact)
    names = source.names()
    with _bar("quantise", sum(source.nbytes(name) for name in names), progress) as bar:
        for name in names:
            module = name.removesuffix(".weight")
            if name.endswith(".weight") and module in exact:
                weight = source.exact(name)
                assert weight is not None
                shards.add(pack_quantized(module, weight))
            elif name.endswith(".weight") and module in rounded:
                shards.add(_packed(module, source.tensor(name), weights.get(module), options, source.dtype))
            else:
                shards.add({name: _unquantised(source, name)})
            bar.update(source.nbytes(name))
    shards.finish()


def _unquantised(source: Source, name: str) -> torch.Tensor:
    value = source.tensor(name)
    if value.is_floating_point() and not all_finite(value):
        raise CheckpointError(f"tensor {name} holds values that are not finite (inf or nan); {FETCH_AGAIN}")
    if value.dtype not in (torch.float32, torch.float64):
        return value
    rounded = value.to(source.dtype)
    if not all_finite(rounded):
        raise CheckpointError(
            f'tensor {name} holds values beyond {source.dtype}; set "dtype": "bfloat16" in config.json'
        )
    keep = source.keeps_float32 and value.nbytes <= FLOAT32_BYTES and not torch.equal(rounded.float(), value)
    return value if keep else rounded


def _packed(
    module: str,
    value: torch.Tensor,
    weights: torch.Tensor | None,
    options: QuantizeOptions,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    try:
        weight = quantize_tensor(value, options.group_size, options.symmetric, weights, dtype)
    except ValueError as error:
        raise CheckpointError(f"module {module}: {error}") from error
    return pack_quantized(module, weight)


def pack_quantized(module: str, weight: W4A16Weight) -> dict[str, torch.Tensor]:
    """The tensors of one layer as compressed-tensors spells them (see compressed_tensors.py)."""
    tensors = {
        f"{module}.weight_packed": weight.q,
        f"{module}.weight_scale": weight.scales,
        f"{module}.weight_shape": torch.tensor([weight.n, weight.k]),
    }
    if weight.zeros is not None:
        padded = torch.nn.functional.pad(weight.zeros, (0, 0, 0, -weight.n % PER_WORD))
        tensors[f"{module}.weight_zero_point"] = pack_rows(padded.t().contiguous()).t().contiguous()
    return tensors


class _Shards:
    """safetensors files of at most SHARD_BYTES (one tensor more at worst), and their index when there are several."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self._written: list[list[str]] = []
        self._total = 0

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if self._pending and self._bytes + size > SHARD_BYTES:
            self._flush()
        self._pending |= {name: t.contiguous() for name, t in tensors.items()}
        self._bytes += size
        self._total += size

    def finish(self) -> None:
        self._flush()
        count = len(self._written)
        if count == 1:
            self._part(1).rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._written, start=1):
            file = f"model-{i:05}-of-{count:05}.safetensors"
            self._part(i).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        write_json(self._folder / "model.safetensors.index.json", index)

    def _part(self, i: int) -> Path:
        return self._folder / f"part-{i}"

    def _flush(self) -> None:
        self._written.append(sorted(self._pending))
        save_file(self._pending, self._part(len(self._written)), metadata={"format": "pt"})
        self._pending, self._bytes = {}, 0


def _write_config(source: Source, plan: Plan, options: QuantizeOptions, folder: Path) -> None:
    config = dict(source.config)
    dtype = str(source.dtype).removeprefix("torch.")
    config["dtype"] = dtype
    if "torch_dtype" in config:
        config["torch_dtype"] = dtype
    config["quantization_config"] = quantization_config(
        options, [] if HEAD in plan.exact else [HEAD], plan.exact, mixed=bool(plan.rounded)
    )
    write_json(folder / "config.json", config)


def quantization_config(
    options: QuantizeOptions, ignore: list[str], exact: Sequence[str] = (), mixed: bool = True
) -> dict[str, Any]:
    """What compressed-tensors, vLLM and transformers read in config.json. exact: modules taken over from Q4_0; mixed:
    there are others too."""
    groups = [_group(options.group_size, options.symmetric, ["Linear"])] if mixed else []
    if exact:
        groups.append(_group(EXACT_GROUP, True, list(exact) if mixed else ["Linear"]))
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _group(group_size: int, symmetric: bool, targets: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": group_size,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "mse",
        "observer_kwargs": {},
    }
    return {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}


def _bar(what: str, total: int, progress: bool) -> Any:
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1024, disable=not progress)
