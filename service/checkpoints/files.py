"""The tensors of a model folder, by name, wherever its safetensors files keep them.

Only safetensors and JSON are read. Pickled weights (.bin, .pt, .pth) can run code when loaded and are never opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from nybble.service.checkpoints.safetensors_file import Entry, ReadAhead, SafetensorsFile
from nybble.service.errors import CheckpointError
from nybble.service.json_files import FETCH_AGAIN, read_json

SINGLE_FILE = "model.safetensors"
NAME_LIMIT_BYTES = 255
PICKLES = ("*.bin", "*.pt", "*.pth")
# How far the disk may be ahead of whoever repacks the tensors: a quarter of the memory that loading may take beyond
# the weights.
AHEAD_BYTES = 256 << 20


class TensorFiles:
    """Names, sizes and contents of all tensors of one folder.

    Every file is opened and every header checked at construction, so that a missing or truncated file is known before
    a single byte of weight is read. With an index, its weight_map is the truth: files and tensors that it does not name
    are not there. on_bytes(done, total) is called after each tensor that is read for the first time. drop_cache gives
    the page cache back as it goes, for a device that shares the host's memory; pin reads into page-locked memory.
    """

    def __init__(
        self,
        folder: Path,
        on_bytes: Callable[[int, int], None] | None = None,
        drop_cache: bool = False,
        pin: bool = False,
    ) -> None:
        self.folder = folder
        self._on_bytes = on_bytes
        self._drop_cache = drop_cache
        self._pin = pin
        self._open_files: dict[str, SafetensorsFile] = {}
        self._entries: dict[str, tuple[str, Entry]] = {}
        self._below: dict[str, list[str]] = {}
        self._read: set[str] = set()
        self._ahead: ReadAhead | None = None
        self._done = 0
        try:
            self._open_all()
        except BaseException:
            self.close()
            raise
        self.total_bytes = sum(entry.nbytes for _, entry in self._entries.values())

    @classmethod
    def names_in(cls, folder: Path) -> list[str]:
        """The names of all tensors of a folder."""
        files = cls(folder)
        files.close()
        return files.names()

    def names(self) -> list[str]:
        return sorted(self._entries)

    def names_of(self, module: str) -> list[str]:
        """The tensors of one module: those directly below its name."""
        if not self._below:
            for name in self._entries:
                self._below.setdefault(name.rpartition(".")[0], []).append(name)
        return self._below.get(module, [])

    @property
    def fingerprint(self) -> str:
        """Of all files' names, sizes, headers and samples of their contents."""
        parts = [f"{name} {file.sampled()}" for name, file in sorted(self._open_files.items())]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._entry(name).shape

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor, without reading it."""
        return self._entry(name).nbytes

    def expect(self, names: Iterable[str], window_bytes: int = AHEAD_BYTES) -> None:
        """Say which tensors will be asked for next, in order: they are read ahead, at most window_bytes of them."""
        if self._ahead is not None:
            self._ahead.close()
        wanted = [name for name in names if name in self._entries]
        self._ahead = ReadAhead(wanted, self.nbytes, self.peek, window_bytes)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, in memory that belongs to the caller."""
        value = self._ahead.take(name) if self._ahead is not None else None
        if value is None:
            value = self.peek(name)
        self.mark_read(name)
        return value

    def peek(self, name: str, rows: int | None = None) -> torch.Tensor:
        """`tensor`, or its first rows, without counting it as read."""
        entry = self._entry(name)
        file = self._open_files.get(self._entries[name][0])
        if file is None:
            raise CheckpointError(f"{self.folder}: already closed; open the checkpoint again to read {name}")
        return file.read(entry, name, rows, self._drop_cache, self._pin)

    def mark_read(self, name: str) -> None:
        """Count a tensor as read: `unread` no longer lists it."""
        if name in self._read:
            return
        self._read.add(name)
        self._done += self.nbytes(name)
        if self._on_bytes is not None:
            self._on_bytes(self._done, self.total_bytes)

    def unread(self) -> list[str]:
        return [name for name in self.names() if name not in self._read]

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        for file in self._open_files.values():
            file.close()
        self._open_files.clear()

    def _entry(self, name: str) -> Entry:
        found = self._entries.get(name)
        if found is None:
            raise CheckpointError(f"{self.folder}: no tensor {name} in its safetensors files")
        return found[1]

    def _open_all(self) -> None:
        for file, expected in _files_of(self.folder).items():
            opened = self._open_files[file] = SafetensorsFile(self.folder / file)
            present = opened.entries
            absent = sorted(expected - set(present)) if expected is not None else []
            if absent:
                raise CheckpointError(
                    f"{self.folder / file}: the index says it holds {absent[0]} ({len(absent)} such), but it does not; "
                    f"file and index come from different versions: {FETCH_AGAIN}"
                )
            for name in present if expected is None else expected:
                self._entries[name] = (file, present[name])


def _files_of(folder: Path) -> dict[str, set[str] | None]:
    """File name -> the tensor names the index promises in it, or None (everything in it) without an index."""
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        named = [path for path in indexes if path.name == f"{SINGLE_FILE}.index.json"]
        if not named:
            raise CheckpointError(
                f"{folder}: several indexes ({_list(indexes)}); keep the one that belongs to the weights"
            )
        indexes = named
    if indexes:
        files = _files_of_index(indexes[0])
        # A model that was sharded once and saved whole later keeps its old index, all of whose files are gone.
        if any((folder / file).exists() for file in files) or not (folder / SINGLE_FILE).exists():
            return files
    if (folder / SINGLE_FILE).exists():
        return {SINGLE_FILE: None}
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
        if not isinstance(file, str) or Path(file).name != file or not _is_file_name(file):
            raise CheckpointError(
                f"{index}: {name} is said to be in {file!r:.80}; accepted a file name in the same folder"
            )
        if not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: {name} is said to be in {file!r:.80}; accepted a .safetensors file (pickles are never opened)"
            )
        names = files.setdefault(file, set())
        assert names is not None
        names.add(name)
    return files


def _is_file_name(name: str) -> bool:
    """Whether a file system could hold it: no NUL, no half of a surrogate pair, not too long."""
    try:
        return "\0" not in name and len(name.encode()) <= NAME_LIMIT_BYTES
    except UnicodeEncodeError:
        return False


def _list(paths: list[Path], most: int = 3) -> str:
    shown = ", ".join(p.name for p in paths[:most])
    return shown + (f" and {len(paths) - most} more" if len(paths) > most else "")
