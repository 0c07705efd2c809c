"""Fill a folder with compiled programs on a machine without the GPU: for container images, and for tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from nybble.kernels.code_object import CodeObject, Resources
from nybble.kernels.native.build import entry_name, offline_key
from nybble.kernels.native.cache import CodeCache, write_entry
from nybble.kernels.native.compilers import Clang, Compiler, Nvrtc
from nybble.kernels.native.program import Program, Sources, csrc
from nybble.kernels.target import Target, usable_cores

OFFLINE_COMPILERS: dict[str, Callable[[], Compiler]] = {"rocm": Clang, "cuda": Nvrtc}


@dataclass(frozen=True, slots=True)
class Warmed:
    """One program: its code's bytes, and the seconds it took (0 where a valid entry was there already).

    resources: None for CUDA's cubins, which this package does not read.
    """

    program: Program
    nbytes: int
    seconds: float
    resources: Resources | None


# Shared memory that a block may ask for (CUDA programming guide, compute capabilities); 99 KiB elsewhere.
_SHARED_BYTES = {"sm_80": 166912, "sm_87": 166912, "sm_90": 232448, "sm_100": 232448, "sm_103": 232448}


def offline_target(arch: str) -> Target:
    """The Target of a chip that is not here: its name is known, its number of compute units is not (0).

    Raises ValueError for what is neither an AMD nor an NVIDIA architecture.
    """
    if re.fullmatch(r"gfx[0-9a-f]{3,5}", arch):
        rdna = arch.startswith(("gfx10", "gfx11", "gfx12"))
        return Target("rocm", arch, arch, 0, 65536, wave=32 if rdna else 64)
    if re.fullmatch(r"sm_\d{2,3}", arch):
        return Target("cuda", arch, arch, 0, _SHARED_BYTES.get(arch, 101376))
    raise ValueError(f"arch: given {arch!r}, accepted an AMD chip (gfx1151) or an NVIDIA one (sm_90)")


def compile_offline(program: Program, arch: str, sources: Sources | None = None) -> bytes:
    """The program's code by the compiler for that chip that needs no GPU: clang, or nvrtc.

    Raises FileNotFoundError and LibraryNotFound where there is none, CompileError.
    """
    target = offline_target(arch)
    return OFFLINE_COMPILERS[target.kind]().compile(program, sources or csrc(), arch)


def warm(
    programs: Iterable[Program],
    arch: str,
    folder: Path,
    *,
    sources: Sources | None = None,
    compiler: Compiler | None = None,
    workers: int | None = None,
) -> Iterator[Warmed]:
    """Compile programs into a folder that `set_cache_folders` takes, in threads; yields each, in order, when it is there.

    Raises FileNotFoundError and LibraryNotFound before the first where there is no compiler, CompileError, OSError when the
    folder cannot be written.
    """
    target, sources = offline_target(arch), sources or csrc()
    compiler = compiler or OFFLINE_COMPILERS[target.kind]()
    cache = CodeCache(folder)

    def one(program: Program) -> Warmed:
        key, name = offline_key(program, sources, target), entry_name(program, arch)
        began, code = perf_counter(), cache.find(name, key)
        if code is not None:
            return Warmed(program, len(code), 0.0, _resources(program, target, code))
        code = compiler.compile(program, sources, arch)
        seconds = perf_counter() - began
        write_entry(cache.path(name, key), key, code)
        return Warmed(program, len(code), seconds, _resources(program, target, code))

    return _in_threads(one, list(dict.fromkeys(programs)), workers or usable_cores())


def family_programs(
    target: Target, dtypes: Sequence[torch.dtype], group_sizes: Sequence[int], symmetric: Sequence[bool]
) -> tuple[Program, ...]:
    """All programs that models of these activation types, group sizes and kinds of zero points call for.

    Raises ValueError for a chip that csrc's kernels are not for.
    """
    from nybble.kernels.linear import skinny  # which stands on this package

    found = [
        program
        for dtype in dtypes
        for group_size in group_sizes
        for kind in symmetric
        # The gate of nearly every model; another one is compiled where it is first met.
        for program in skinny.programs_for(target, dtype, group_size, kind, gates=(None, "silu"))
    ]
    return tuple(dict.fromkeys(found))


def _in_threads(one: Callable[[Program], Warmed], programs: list[Program], workers: int) -> Iterator[Warmed]:
    """As Executor.map, but the first error ends it: what has not begun is left."""
    with ThreadPoolExecutor(max(1, min(workers, len(programs)))) as pool:
        futures = [pool.submit(one, program) for program in programs]
        try:
            for future in futures:
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _resources(program: Program, target: Target, code: bytes) -> Resources | None:
    return CodeObject(code).resources(program.entry) if target.kind == "rocm" else None
