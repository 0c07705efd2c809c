"""The tensors of a model folder, by name, wherever its safetensors files keep them.

Only safetensors and JSON are read. Pickled weights (.bin, .pt, .pth) can run code when loaded and are never opened.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nybble.service.errors import CheckpointError
from nybble.service.json_files import FETCH_AGAIN, read_json

SINGLE_FILE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth")

# Bytes of one element, by the safetensors format's own type names.
ELEMENT_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


class TensorFiles:
    """Names, sizes and contents of all tensors of one folder.

    Every file is opened (memory-mapped) and every name checked at construction, so that a missing or truncated
    file is known before a single byte of weight is read. on_bytes(done, total) is called after each tensor that is
    read for the first time.
    """

    def __init__(self, folder: Path, on_bytes: Callable[[int, int], None] | None = None) -> None:
        self.folder = folder
        self._on_bytes = on_bytes
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}
        self._files: dict[str, str] = {}
        self._bytes: dict[str, int] = {}
        self._read: set[str] = set()
        self._done = 0
        try:
            self._open_all()
        except BaseException:
            self.close()
            raise
        self.total_bytes = sum(self._bytes.values())

    def names(self) -> list[str]:
        return sorted(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._handle_of(name).get_slice(name).get_shape())

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor, without reading it."""
        return self._bytes[name]

    def tensor(self, name: str) -> torch.Tensor:
        """A private copy of one tensor: nothing of the mapped file stays referenced."""
        value = self.peek(name)
        self.mark_read(name)
        return value

    def peek(self, name: str) -> torch.Tensor:
        """`tensor`, without counting it as read."""
        handle = self._handle_of(name)
        try:
            value: torch.Tensor = handle.get_tensor(name).clone()
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder / self._files[name]}: tensor {name} cannot be read ({error}); {FETCH_AGAIN}"
            ) from error
        return value

    def mark_read(self, name: str) -> None:
        """Count a tensor as read: `unread` no longer lists it."""
        if name in self._read:
            return
        self._read.add(name)
        self._done += self._bytes[name]
        if self._on_bytes is not None:
            self._on_bytes(self._done, self.total_bytes)

    def unread(self) -> list[str]:
        return [name for name in self.names() if name not in self._read]

    def close(self) -> None:
        self._handles.clear()
        self._stack.close()

    def _handle_of(self, name: str) -> Any:
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"{self.folder}: no tensor {name} in its safetensors files")
        if file not in self._handles:
            raise CheckpointError(f"{self.folder}: already closed; open the checkpoint again to read {name}")
        return self._handles[file]

    def _open_all(self) -> None:
        for file, expected in _files_of(self.folder).items():
            handle = self._open(file)
            present = set(handle.keys())
            absent = sorted(expected - present) if expected is not None else []
            if absent:
                raise CheckpointError(
                    f"{self.folder / file}: the index says it holds {absent[0]} ({len(absent)} such), but it does not; "
                    f"file and index come from different versions: {FETCH_AGAIN}"
                )
            for name in present if expected is None else expected:
                self._files[name] = file
                piece = handle.get_slice(name)
                self._bytes[name] = prod(piece.get_shape()) * ELEMENT_BYTES.get(piece.get_dtype(), 0)

    def _open(self, file: str) -> Any:
        path = self.folder / file
        try:
            handle = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        except (FileNotFoundError, IsADirectoryError):
            raise CheckpointError(
                f"{path}: this file is missing, but the folder's index names it; fetch the missing file"
            ) from None
        except (SafetensorError, OSError) as error:
            size = path.stat().st_size if path.is_file() else 0
            raise CheckpointError(
                f"{path}: {size} bytes that are not a complete safetensors file ({error}); {FETCH_AGAIN}"
            ) from error
        self._handles[file] = handle
        return handle


def _files_of(folder: Path) -> dict[str, set[str] | None]:
    """File name -> the tensor names the index promises in it, or None (everything in it) without an index."""
    if (folder / SINGLE_FILE).exists():
        return {SINGLE_FILE: None}
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        raise CheckpointError(
            f"{folder}: several indexes ({_list(indexes)}); keep the one that belongs to the weights"
        )
    if indexes:
        return _files_of_index(indexes[0])
    singles = sorted(folder.glob("*.safetensors"))
    if len(singles) == 1:
        return {singles[0].name: None}
    if singles:
        raise CheckpointError(
            f"{folder}: {len(singles)} safetensors files ({_list(singles)}) without model.safetensors.index.json; "
            "fetch the index too"
        )
    pickles = sorted(p for pattern in PICKLES for p in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder}: the weights are pickled ({_list(pickles)}), which is never opened because a pickle can run "
            "code; accepted: safetensors. Convert the model with its own tools (save_pretrained writes safetensors)"
        )
    raise CheckpointError(f"{folder}: no *.safetensors file in this folder")


def _files_of_index(index: Path) -> dict[str, set[str] | None]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map in this index; {FETCH_AGAIN}")
    files: dict[str, set[str] | None] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{index}: {name} is said to be in {file!r}; accepted a file name in the same folder"
            )
        names = files.setdefault(file, set())
        assert names is not None
        names.add(name)
    return files


def _list(paths: list[Path], most: int = 3) -> str:
    shown = ", ".join(p.name for p in paths[:most])
    return shown + (f" and {len(paths) - most} more" if len(paths) > most else "")
