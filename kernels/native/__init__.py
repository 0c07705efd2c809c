"""csrc's kernels at run time: compiled for the chip that is here, kept on disk, loaded once, launched cheaply.

    Program (file, entry, macros)
      -> build      in the cache on disk?  else hiprtc or nvrtc, from memory to memory
      -> driver     loaded into a device once
      -> Kernel.prepare(grid, threads, shared memory, layout) -> Launch(stream, arguments)

`nybble warm` fills a folder with the same entries offline.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from nybble.kernels.native.build import Builder, Compilation
from nybble.kernels.native.cache import CodeCache
from nybble.kernels.native.compilers import CompileError
from nybble.kernels.native.driver import DEPENDENT_FROM_SM, DriverError, Kernel, Launch, Loader
from nybble.kernels.native.libraries import LibraryNotFound
from nybble.kernels.native.offline import compile_offline, warm
from nybble.kernels.native.program import Program, Sources
from nybble.kernels.native.recorder import JIT_RECORDER, JitCounts, count_triton
from nybble.kernels.target import Target

__all__ = [
    "DEPENDENT_FROM_SM",
    "JIT_RECORDER",
    "Compilation",
    "CompileError",
    "DriverError",
    "JitCounts",
    "Kernel",
    "Launch",
    "LibraryNotFound",
    "Program",
    "Sources",
    "compile_all",
    "compile_offline",
    "compile_program",
    "count_triton",
    "load",
    "set_cache_folders",
    "warm",
]

_BUILDER = Builder()
_LOADER = Loader(_BUILDER)


def set_cache_folders(folder: Path | None, shared: Sequence[Path] = ()) -> None:
    """Where compiled programs are kept (None: nowhere, the start) and where others have left some, looked at first."""
    _BUILDER.cache = CodeCache(folder, tuple(shared))


def compile_program(program: Program, target: Target) -> bytes:
    """The program's code: from the cache, or compiled now. See Builder.compile for what it raises."""
    return _BUILDER.compile(program, target)


def compile_all(programs: Iterable[Program], target: Target, workers: int | None = None) -> Compilation:
    """Compile in the background; `Compilation.result()` waits."""
    return _BUILDER.compile_all(programs, target, workers)


def load(program: Program, device: torch.device) -> Kernel:
    """The program loaded into a GPU; the same object on every call. See Loader.load for what it raises."""
    return _LOADER.load(program, device)
