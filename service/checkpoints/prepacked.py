"""Weights as a kernel keeps them, saved beside a folder's own: loading then only reads.

    FOLDER/prepacked/cpu_int4-64-bfloat16.safetensors    one file per layout; "model.layers.0.qkv.packed", ...

Its metadata names the layout, and a fingerprint of config.json and of the weights it was made from: their headers and
samples of their contents. A file of another layout, made from other weights, or damaged, is left alone. In a folder of its own because other tools take
every safetensors file beside config.json for weights. Written for CPUs: a GPU repacks on the device.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from dataclasses import fields as fields_of
from pathlib import Path

import torch
from safetensors.torch import save_file

from nybble.kernels.attention.sdpa import SdpaAttention
from nybble.kernels.linear import Broken, LinearConfig, SavedWeight, W4A16Linear, select
from nybble.kernels.target import Target
from nybble.kernels.threads import single_steps
from nybble.service.checkpoints.safetensors_file import ReadAhead, SafetensorsFile
from nybble.service.errors import CheckpointError, well_formed

log = logging.getLogger(__name__)

FOLDER = "prepacked"
DTYPE = torch.bfloat16
KINDS: dict[str, type] = {"int": int, "bool": bool}


class Prepacked:
    """One open file of saved layers."""

    def __init__(self, file: SafetensorsFile, layout: str, drop_cache: bool) -> None:
        self.layout = layout
        self._file = file
        self._drop_cache = drop_cache
        self._ahead: ReadAhead | None = None
        with well_formed(str(file.path)):
            self._configs = {
                name: LinearConfig(**{**fields, "dtype": DTYPE})
                for name, fields in json.loads(file.metadata["configs"]).items()
            }
        for name, config in self._configs.items():
            _check_kinds(config, f"{file.path}: {name}")
        self._leaves: dict[str, list[str]] = {}
        for name in file.entries:
            self._leaves.setdefault(name.rpartition(".")[0], []).append(name)

    def __contains__(self, layer: str) -> bool:
        return layer in self._configs

    def expect(self, layers: Sequence[str], window_bytes: int) -> None:
        """The layers that will be asked for next, in order: they are read ahead."""
        names = [name for layer in layers for name in self._leaves.get(layer, ())]
        self._ahead = ReadAhead(names, lambda name: self._file.entries[name].nbytes, self._read, window_bytes)

    def weight(self, layer: str) -> SavedWeight:
        tensors = {}
        for name in self._leaves.get(layer, ()):
            ahead = self._ahead.take(name) if self._ahead is not None else None
            tensors[name.rpartition(".")[2]] = self._read(name) if ahead is None else ahead
        return SavedWeight(self._configs[layer], self.layout, tensors)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._file.close()

    def _read(self, name: str) -> torch.Tensor:
        return self._file.read(self._file.entries[name], name, drop=self._drop_cache)


def _check_kinds(config: LinearConfig, where: str) -> None:
    """Raises CheckpointError for a field whose value is of another kind than LinearConfig says."""
    for field in fields_of(config):
        value, kind = getattr(config, field.name), str(field.type)
        accepted = KINDS.get(kind)
        if accepted is not None and type(value) is not accepted:
            raise CheckpointError(
                f"{where}: {field.name}: given {value!r:.80}, accepted {kind}; quantise again to renew this file"
            )


def prepacked_layout(target: Target, dtype: torch.dtype, broken: Broken = frozenset()) -> str | None:
    """The layout in which this device's first choice of kernel keeps a plain int4 layer, if that may be saved."""
    config = LinearConfig(k=256, n=256, dtype=dtype, group_size=32, symmetric=True)
    return select(config, target, broken).kernel.saved_layout(config, target)


def open_prepacked(
    folder: Path, layout: str | None, fingerprint: Callable[[], str], drop_cache: bool = False
) -> Prepacked | None:
    """The saved layers of a layout, None when there are none, when they were made from other weights, or when the file
    is damaged: both are said in the log."""
    path = folder / FOLDER / f"{layout}.safetensors"
    if layout is None or not path.is_file():
        return None
    try:
        file = SafetensorsFile(path)
    except CheckpointError as error:
        log.warning("%s; the saved layers are not used", error)
        return None
    try:
        if not _belongs(file, layout, fingerprint):
            log.warning(
                "%s: made from other weights than those beside it; not used. Quantise again to renew it", path
            )
            file.close()
            return None
        saved = Prepacked(file, layout, drop_cache)
    except CheckpointError as error:
        log.warning("%s; the saved layers are not used", error)
        file.close()
        return None
    except BaseException:
        file.close()
        raise
    log.info("%s: loading weights as they were prepacked", path)
    return saved


def _belongs(file: SafetensorsFile, layout: str, fingerprint: Callable[[], str]) -> bool:
    # is_file: a link that leads nowhere may lie beside the weights.
    weights = [p for p in file.path.parent.parent.glob("*.safetensors") if p.is_file()]
    newest = max((p.stat().st_mtime for p in weights), default=0.0)
    return (
        file.metadata.get("layout") == layout
        and file.path.stat().st_mtime >= newest
        and file.metadata.get("fingerprint") == fingerprint()
    )


def prepack(folder: Path, on_bytes: Callable[[int, int], None] | None = None) -> Path | None:
    """Load a quantised folder for this machine's CPU and save its layers as they are then.

    None, said in the log, where the CPU's kernels have no layout that may be saved. Raises CheckpointError.
    """
    from nybble.service.checkpoints import open_checkpoint
    from nybble.service.models import load, read_config

    device = torch.device("cpu")
    tensors: dict[str, torch.Tensor] = {}
    configs: dict[str, dict[str, object]] = {}
    layouts: set[str] = set()
    with single_steps(), open_checkpoint(folder, on_bytes) as checkpoint:
        config = read_config(checkpoint.config, folder)
        model = load(config, checkpoint, SdpaAttention(), DTYPE, device, 1)
        fingerprint = checkpoint.fingerprint
    for kind, layers in model.linears.items():
        for i, layer in enumerate(layers):
            layout = layer.saved_layout() if isinstance(layer, W4A16Linear) and kind != "lm_head" else None
            if layout is None or not isinstance(layer, W4A16Linear):
                continue
            name = f"model.layers.{i}.{kind}"
            layouts.add(layout)
            tensors |= {f"{name}.{part}": value for part, value in layer.saved().items()}
            configs[name] = asdict(replace(layer.config, dtype=DTYPE)) | {"dtype": str(DTYPE)}
    if not layouts:
        log.info("%s: no layer has a layout on this CPU that may be saved", folder)
        return None
    if len(layouts) > 1:
        raise CheckpointError(
            f"{folder}: layers in several layouts ({', '.join(sorted(layouts))}) cannot be saved together"
        )
    layout = layouts.pop()
    path = folder / FOLDER / f"{layout}.safetensors"
    path.parent.mkdir(exist_ok=True)
    metadata = {"format": "pt", "layout": layout, "fingerprint": fingerprint, "configs": json.dumps(configs)}
    save_file(tensors, path, metadata=metadata)
    return path
