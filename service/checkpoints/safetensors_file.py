"""One safetensors file: its header, checked, and its tensors, read with pread.

A file is an 8-byte little-endian header length, that many bytes of JSON (name -> dtype, shape, data_offsets), then the
tensors' bytes without gaps. Nothing is mapped: memory that is read into belongs to the caller, and the page cache can
be given back behind it.
Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from nybble.kernels.host_memory import empty_bytes
from nybble.service.errors import CheckpointError
from nybble.service.json_files import FETCH_AGAIN

LENGTH_BYTES = 8
# Of all dimensions together, those that are 0 left out: torch's strides hold no more than 63 bits.
SIZE_LIMIT = 1 << 60
HEADER_LIMIT_BYTES = 100_000_000  # what the format's own library accepts
BLOCK_BYTES = 8 << 20  # one pread: enough that the disk is not waited for between two
THREADS = 2  # reading: one more than the disk needs, so that a small tensor does not stall a large one
# What `sampled` reads: evenly spaced blocks, the first and the last among them. A file that has no more is read whole.
SAMPLES = 512
SAMPLE_BYTES = 4096
PIN_LIMIT_BYTES = 128 << 20  # torch keeps pinned memory for reuse, so only tensors that come often are pinned

# The format's own type names. Others (sub-byte floats, complex numbers) are no part of any model here.
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies: bytes start..stop of the file. dtype None: a type not in DTYPES."""

    dtype: torch.dtype | None
    type_name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class SafetensorsFile:
    """An open file. metadata: what its writer noted; fingerprint: of its size and header. Raises CheckpointError when it is missing or no complete safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self.fingerprint = ""
        try:
            # Without O_NONBLOCK a pipe in place of the file would be waited for.
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise CheckpointError(
                f"{path}: this file is missing, but the folder's index names it; fetch the missing file"
            ) from None
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise CheckpointError(f"{path}: cannot be opened ({error}); {FETCH_AGAIN}") from error
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise CheckpointError(
                    f"{path}: given something else than a file, accepted a file; {FETCH_AGAIN}"
                )
            self.entries = self._read_header()
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(
        self, entry: Entry, name: str, rows: int | None = None, drop: bool = False, pin: bool = False
    ) -> torch.Tensor:
        """A tensor, or its first rows, in memory of its own.

        drop: tell the kernel that these bytes will not be needed again. pin: into page-locked memory, from which a GPU
        copies faster. Raises CheckpointError for a type that is not in DTYPES or bytes that cannot be read.
        """
        if entry.dtype is None:
            raise CheckpointError(
                f"{self.path}: tensor {name}: given type {entry.type_name}, accepted {', '.join(DTYPES)}"
            )
        shape, stop = entry.shape, entry.stop
        if rows is not None and shape and rows < shape[0]:
            stop = entry.start + rows * (entry.nbytes // shape[0])
            shape = (rows, *shape[1:])
        pinned = pin and stop - entry.start <= PIN_LIMIT_BYTES
        size = stop - entry.start
        data = torch.empty(size, dtype=torch.uint8, pin_memory=True) if pinned else empty_bytes(size)
        self._fill(data.numpy().data, entry.start, name)
        if drop:
            self._drop(entry.start, stop)
        return data.view(entry.dtype).view(shape)

    def sampled(self) -> str:
        """A hash of the size, of the header, and of SAMPLES blocks of the contents."""
        told = hashlib.sha256(self.fingerprint.encode())
        size = os.fstat(self._fd).st_size
        blocks = -(-size // SAMPLE_BYTES)
        count = min(blocks, SAMPLES)
        for i in range(count):
            block = i * (blocks - 1) // max(1, count - 1)
            try:
                told.update(os.pread(self._fd, SAMPLE_BYTES, block * SAMPLE_BYTES))
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read ({error}); {FETCH_AGAIN}") from error
        return told.hexdigest()

    def _fill(self, target: memoryview, offset: int, name: str) -> None:
        done = 0
        while done < len(target):
            part = target[done : done + BLOCK_BYTES]
            try:
                count = os.preadv(self._fd, [part], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: tensor {name} cannot be read ({error}); {FETCH_AGAIN}"
                ) from error
            if not count:
                raise CheckpointError(
                    f"{self.path}: tensor {name}: the file ends {len(target) - done} bytes early; {FETCH_AGAIN}"
                )
            done += count

    def _drop(self, start: int, stop: int) -> None:
        # Whole pages only, so that a neighbour's share of the first and last page stays.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, start, stop - start, os.POSIX_FADV_DONTNEED)

    def _read_header(self) -> dict[str, Entry]:
        size = os.fstat(self._fd).st_size
        length = int.from_bytes(os.pread(self._fd, LENGTH_BYTES, 0), "little")
        if size < LENGTH_BYTES or not 2 <= length <= min(HEADER_LIMIT_BYTES, size - LENGTH_BYTES):
            raise self._incomplete(size, f"a header of {length} bytes does not fit")
        try:
            text = os.pread(self._fd, length, LENGTH_BYTES).decode("utf-8")
            header = json.loads(text, object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as error:
            raise self._incomplete(size, f"its header is no JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._incomplete(size, "its header is no JSON object")
        metadata = header.get("__metadata__")
        self.metadata = metadata if isinstance(metadata, dict) else {}
        self.fingerprint = hashlib.sha256(f"{size} {text}".encode()).hexdigest()
        data = LENGTH_BYTES + length
        entries = {
            name: self._entry(size, data, name, fields)
            for name, fields in header.items()
            if name != "__metadata__"
        }
        self._check_cover(size, data, entries)
        return entries

    def _entry(self, size: int, data: int, name: str, fields: Any) -> Entry:
        try:
            type_name, shape = fields["dtype"], tuple(fields["shape"])
            start, stop = fields["data_offsets"]
        except (TypeError, KeyError, ValueError) as error:
            raise self._incomplete(size, f"its header describes {name} as {fields!r:.80}") from error
        numbers = (*shape, start, stop)
        if (
            not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
            or stop < start
            or prod(max(n, 1) for n in shape) > SIZE_LIMIT
            or stop > SIZE_LIMIT
        ):
            raise self._incomplete(size, f"its header describes {name} as {fields!r:.80}")
        dtype = DTYPES.get(type_name) if isinstance(type_name, str) else None
        if dtype is not None and prod(shape) * dtype.itemsize != stop - start:
            raise self._incomplete(
                size, f"{name}, {type_name} {list(shape)}, cannot be {stop - start} bytes long"
            )
        return Entry(dtype, str(type_name), shape, data + start, data + stop)

    def _check_cover(self, size: int, data: int, entries: dict[str, Entry]) -> None:
        """The tensors follow one another from the header to the end: one shifted offset would read a neighbour's bytes."""
        at = data
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
            if entry.start != at:
                raise self._incomplete(size, f"{name} begins at byte {entry.start}, not {at}")
            at = entry.stop
        if at != size:
            raise self._incomplete(size, f"its tensors end at byte {at}")

    def _incomplete(self, size: int, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {size} bytes that are not a complete safetensors file ({why}); {FETCH_AGAIN}"
        )


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r:.80} is there twice")
    return found


class ReadAhead:
    """Reads tensors in another thread, in the order in which they will be asked for, at most window_bytes ahead.

    The disk then works while the caller repacks. read(name) does the reading; whatever it raises is raised by take.
    """

    def __init__(
        self,
        names: list[str],
        nbytes: Callable[[str], int],
        read: Callable[[str], torch.Tensor],
        window_bytes: int,
    ) -> None:
        self._waiting = list(reversed(names))
        self._nbytes = nbytes
        self._read = read
        self._window_bytes = window_bytes
        self._ahead_bytes = 0
        self._pool = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="nybble-read")
        self._running: dict[str, Future[torch.Tensor]] = {}
        self._fill()

    def take(self, name: str) -> torch.Tensor | None:
        """A tensor that was asked for in the constructor, once; None for any other."""
        future = self._running.pop(name, None)
        if future is None:
            if name in self._waiting:  # asked for out of order: read by the caller
                self._waiting.remove(name)
            return None
        value = future.result()
        self._ahead_bytes -= self._nbytes(name)
        self._fill()
        return value

    def close(self) -> None:
        self._waiting.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._running.clear()

    def _fill(self) -> None:
        while self._waiting:
            size = self._nbytes(self._waiting[-1])
            if self._running and self._ahead_bytes + size > self._window_bytes:
                return
            name = self._waiting.pop()
            self._ahead_bytes += size
            self._running[name] = self._pool.submit(self._read, name)
