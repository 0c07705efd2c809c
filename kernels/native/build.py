"""From a Program to machine code: the cache on disk first, then the run-time compiler; each program once per process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from time import perf_counter

from nybble.kernels.native.cache import CodeCache
from nybble.kernels.native.compilers import (
    CLANG_OPTIONS,
    NVRTC_OPTIONS,
    Compiler,
    Hiprtc,
    Nvrtc,
)
from nybble.kernels.native.program import Program, Sources, csrc, digest_of
from nybble.kernels.native.recorder import JIT_RECORDER, JitRecorder
from nybble.kernels.target import Target, usable_cores

log = logging.getLogger(__name__)

RUNTIME_COMPILERS: dict[str, Callable[[], Compiler]] = {"rocm": Hiprtc, "cuda": Nvrtc}
# What `warm` compiles with: part of its entries' keys, so that other options make other entries.
OFFLINE_OPTIONS = {"rocm": CLANG_OPTIONS, "cuda": NVRTC_OPTIONS}


def runtime_key(program: Program, sources: Sources, arch: str, compiler: Compiler) -> str:
    """The key of code that this compiler makes: all that its bytes depend on."""
    return digest_of(
        ["runtime", *_program_parts(program, sources, arch), compiler.identity, *compiler.options(arch)]
    )


def offline_key(program: Program, sources: Sources, target: Target) -> str:
    """The key of code made ahead for a machine whose compiler is not known: the same text for the same chip."""
    return digest_of(
        ["offline", *_program_parts(program, sources, target.arch), *OFFLINE_OPTIONS[target.kind]]
    )


def entry_name(program: Program, arch: str) -> str:
    """The part of an entry's file name that people read."""
    return f"{program.entry}-{arch}"


def _program_parts(program: Program, sources: Sources, arch: str) -> list[str]:
    return [sources.digest, program.source, program.entry, str(len(program.defines)), *program.defines, arch]


@dataclass(frozen=True)
class Compilation:
    """Programs that are being compiled in the background."""

    futures: dict[Program, Future[bytes]]

    def done(self) -> bool:
        return all(future.done() for future in self.futures.values())

    def cancel(self) -> None:
        """Begin no more of them."""
        for future in self.futures.values():
            future.cancel()

    def result(self, timeout_s: float | None = None) -> dict[Program, bytes]:
        """Wait for all of them. Raises what the first that failed raised, and TimeoutError."""
        _, late = wait(self.futures.values(), timeout_s)
        if late:
            raise TimeoutError(
                f"{len(late)} of {len(self.futures)} programs are not compiled after {timeout_s} s"
            )
        return {program: future.result() for program, future in self.futures.items()}


@dataclass
class Builder:
    """Compiles programs and remembers them. Any thread may call; one program is compiled by one of them.

    sources    what programs are made of
    cache      where code is kept
    compilers  target kind -> how to get its run-time compiler, called when first needed
    """

    sources: Callable[[], Sources] = csrc
    cache: CodeCache = field(default_factory=CodeCache)
    compilers: dict[str, Callable[[], Compiler]] = field(default_factory=lambda: RUNTIME_COMPILERS)
    recorder: JitRecorder = field(default_factory=lambda: JIT_RECORDER)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _ready: dict[str, Compiler] = field(default_factory=dict, init=False)
    _codes: dict[tuple[Program, str], Future[bytes]] = field(default_factory=dict, init=False)

    def compile(self, program: Program, target: Target) -> bytes:
        """The program's code for the target.

        Raises ValueError for a target without csrc kernels, LibraryNotFound when it has to be compiled and there is no
        compiler, CompileError.
        """
        if target.kind not in self.compilers:
            raise ValueError(
                f"program {program}: given device kind {target.kind!r}, accepted {', '.join(self.compilers)}"
            )
        key = (program, target.arch)
        with self._lock:
            future = self._codes.get(key)
            mine = future is None
            if future is None:
                future = self._codes[key] = Future()
        if not mine:
            return future.result()
        try:
            code = self._obtain(program, target)
        except BaseException as error:
            with self._lock:
                del self._codes[key]  # the next call tries again
            future.set_exception(error)
            raise
        future.set_result(code)
        return code

    def compile_all(
        self, programs: Iterable[Program], target: Target, workers: int | None = None
    ) -> Compilation:
        """Compile in `workers` threads (None: as many as there are cores) and return at once."""
        distinct = list(dict.fromkeys(programs))
        if not distinct:
            return Compilation({})
        pool = ThreadPoolExecutor(
            min(workers or usable_cores(), len(distinct)), thread_name_prefix="nybble-compile"
        )
        futures = {program: pool.submit(self.compile, program, target) for program in distinct}
        pool.shutdown(wait=False)
        return Compilation(futures)

    def _obtain(self, program: Program, target: Target) -> bytes:
        sources, name = self.sources(), entry_name(program, target.arch)
        code = self.cache.find(name, offline_key(program, sources, target))
        if code is not None:
            self.recorder.cache_hit(program.entry)
            return code
        compiler = self._compiler(target.kind)
        key = runtime_key(program, sources, target.arch, compiler)
        code = self.cache.find(name, key)
        if code is not None:
            self.recorder.cache_hit(program.entry)
            return code
        began = perf_counter()
        code = compiler.compile(program, sources, target.arch)
        seconds = perf_counter() - began
        self.recorder.compiled(program.entry, seconds)
        log.info("%s compiled %s for %s in %.2f s", compiler.name, program, target.arch, seconds)
        self.cache.store(name, key, code)
        return code

    def _compiler(self, kind: str) -> Compiler:
        with self._lock:
            if kind not in self._ready:
                self._ready[kind] = self.compilers[kind]()
            return self._ready[kind]
