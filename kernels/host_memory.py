"""Large blocks of host memory: in huge pages where the system gives them, and used again while a model is loaded.

A page fault costs a microsecond and more: 4 GB in pages of 4 KiB are a million of them, as much time as the disk needs
to read those bytes. Linux hands out pages of 2 MiB to whoever asks (`madvise`, where it is not switched off). Each has
to be zeroed first, and in a virtual machine perhaps fetched from the host: memory that is used again needs neither.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from threading import Lock

import torch

HUGE_BYTES = 4 << 20  # from here on; less would lie in ordinary pages for the most part
IDLE_BYTES = 256 << 20  # at most, in blocks that wait for the next tensor of their size


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
            block = _new_block(nbytes)
            if block is None:
                return torch.empty(nbytes, dtype=torch.uint8)
            self._blocks.append(block)
            return torch.frombuffer(block, dtype=torch.uint8)

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
    if nbytes < HUGE_BYTES:
        return torch.empty(nbytes, dtype=torch.uint8)
    if _kept:
        return _kept[-1].take(nbytes)
    block = _new_block(nbytes)
    return (
        torch.empty(nbytes, dtype=torch.uint8)
        if block is None
        else torch.frombuffer(block, dtype=torch.uint8)
    )


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """`torch.empty` on the host."""
    return empty_bytes(prod(shape) * dtype.itemsize).view(dtype).view(tuple(shape))


def _new_block(nbytes: int) -> mmap.mmap | None:
    """None where the system has no such thing."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no room: torch says so in its own words
        return None
    with suppress(OSError):  # a kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return block
