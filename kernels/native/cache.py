"""Compiled programs on disk. An entry that is damaged, cut short or not what its name says is found out and removed.

An entry is a header and the code:

    magic 8 bytes | key 32 bytes | length of the code, 8 bytes | SHA-256 of the code, 32 bytes | code

It appears by a rename within its folder, so that a reader sees all of it or none, whoever else is writing or dies.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)

MAGIC = b"NYBBLE\x00\x01"
_HEADER = struct.Struct("<8s32sQ32s")
_PARTIAL = ".partial"
# A partial file older than this belongs to nobody any more.
_STALE_S = 24 * 3600


def pack_entry(key: str, code: bytes) -> bytes:
    """The bytes of an entry. key: 64 hexadecimal digits."""
    return _HEADER.pack(MAGIC, bytes.fromhex(key), len(code), hashlib.sha256(code).digest()) + code


def unpack_entry(key: str, entry: bytes) -> bytes:
    """The code of an entry. Raises ValueError saying what is wrong with it."""
    if len(entry) < _HEADER.size:
        raise ValueError(f"{len(entry)} bytes, a header alone has {_HEADER.size}")
    magic, found, length, sha = _HEADER.unpack_from(entry)
    code = entry[_HEADER.size :]
    if magic != MAGIC:
        raise ValueError("not an entry of this cache")
    if found.hex() != key:
        raise ValueError("the entry of another program")
    if len(code) != length:
        raise ValueError(f"{len(code)} bytes of code, {length} were written")
    if hashlib.sha256(code).digest() != sha:
        raise ValueError("its bytes have changed")
    return code


@dataclass
class CodeCache:
    """Finds entries in every folder, in order, and stores into `folder`, the last of them.

    folder  None keeps nothing. One that cannot be written to costs one warning, and programs are compiled each time.
    shared  folders that others filled, as those of a container image; only read
    """

    folder: Path | None = None
    shared: tuple[Path, ...] = ()
    _warned: bool = field(default=False, init=False)
    _swept: bool = field(default=False, init=False)

    def find(self, name: str, key: str) -> bytes | None:
        """The code stored under a key, or None."""
        for folder in (*self.shared, *filter(None, [self.folder])):
            code = self._read(folder / _file_name(name, key), key)
            if code is not None:
                return code
        return None

    def store(self, name: str, key: str, code: bytes) -> Path | None:
        """Keep code under a key; where, or None when it could not be kept."""
        if self.folder is None:
            return None
        path = self.path(name, key)
        try:
            write_entry(path, key, code)
            self._sweep(self.folder)
        except OSError as error:
            if not self._warned:
                log.warning("compiled kernels are not kept: %s", error)
            self._warned = True
            return None
        return path

    def path(self, name: str, key: str) -> Path:
        """Where an entry is stored."""
        assert self.folder is not None
        return self.folder / _file_name(name, key)

    def _read(self, path: Path, key: str) -> bytes | None:
        try:
            entry = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s cannot be read: %s", path, error)
            return None
        try:
            return unpack_entry(key, entry)
        except ValueError as error:
            log.warning("%s is of no use and will be made again: %s", path, error)
            with suppress(OSError):
                path.unlink()
            return None

    def _sweep(self, folder: Path) -> None:
        """Once: remove what killed processes left half-written."""
        if self._swept:
            return
        self._swept = True
        for left in folder.glob(f"*{_PARTIAL}"):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _STALE_S:
                    left.unlink()


def write_entry(path: Path, key: str, code: bytes) -> None:
    """Write an entry and make it appear whole. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=_PARTIAL)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(pack_entry(key, code))
        # mkstemp makes files for their owner alone; a folder filled at image build is read by another user.
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


def _file_name(name: str, key: str) -> str:
    return f"{name}-{key[:32]}.bin"
