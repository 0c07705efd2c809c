"""Large blocks of host memory that are used again while a model is loaded.

New memory is not free: each page is a fault of a microsecond or two and has to be zeroed, 4 GB of them a million times,
as much work as reading those bytes from a fast disk. Tensors that are read only to be repacked need not pay it.

Huge pages (MADV_HUGEPAGE) would save the faults, but in a virtual machine that gives free memory back to its host they
are just those that have to be fetched from there: measured, 2.2 s a GB against 0.5 s in pages of 4 KiB.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from threading import Lock

import torch

LARGE_BYTES = 1 << 20  # from here on; smaller tensors are left to torch
IDLE_BYTES = 256 << 20  # at most, in blocks that wait for the next tensor of their size
# Where a mapping can be shared, it is unless told otherwise, and would count as shared memory.
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class _Blocks:
    """Blocks that were handed out. In which of them a tensor still lies, their reference counts tell."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._blocks: list[mmap.mmap] = [mmap.mmap(-1, mmap.PAGESIZE)]
        self._unused = sys.getrefcount(self._blocks[0])

    def take(self, nbytes: int) -> torch.Tensor:
        with self._lock:
            idle = [i for i in range(len(self._blocks)) if sys.getrefcount(self._blocks[i]) == self._unused]
            fitting = next((i for i in idle if len(self._blocks[i]) == nbytes), None)
            if fitting is not None:
                self._blocks.append(self._blocks.pop(fitting))  # so that those in front have waited longest
                return torch.frombuffer(self._blocks[-1], dtype=torch.uint8)
            self._give_back(idle)
            try:
                self._blocks.append(mmap.mmap(-1, nbytes, **PRIVATE))
            except OSError:  # no room: torch says so in its own words
                return torch.empty(nbytes, dtype=torch.uint8)
            return torch.frombuffer(self._blocks[-1], dtype=torch.uint8)

    def _give_back(self, idle: list[int]) -> None:
        excess = sum(len(self._blocks[i]) for i in idle) - IDLE_BYTES
        gone = set()
        for i in idle:
            if excess > 0:
                excess -= len(self._blocks[i])
                gone.add(i)
        self._blocks = [block for i, block in enumerate(self._blocks) if i not in gone]


_kept: list[_Blocks] = []


@contextmanager
def kept_blocks() -> Iterator[None]:
    """Inside, `empty` hands out again what was freed, of the same size; up to IDLE_BYTES wait for that."""
    _kept.append(_Blocks())
    try:
        yield
    finally:
        _kept.pop()


def empty_bytes(nbytes: int) -> torch.Tensor:
    """Uninitialised uint8 [nbytes] on the host."""
    if nbytes < LARGE_BYTES:
        return torch.empty(nbytes, dtype=torch.uint8)
    return _kept[-1].take(nbytes) if _kept else torch.empty(nbytes, dtype=torch.uint8)


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """`torch.empty` on the host."""
    return empty_bytes(prod(shape) * dtype.itemsize).view(dtype).view(tuple(shape))
