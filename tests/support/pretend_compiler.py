"""A stand-in for a compiler, for what surrounds compiling."""

from __future__ import annotations

import threading
import time

from nybble.kernels.native.compilers import Compiler
from nybble.kernels.native.program import Program, Sources


class PretendCompiler(Compiler):
    """Its code tells what was asked for. `refuse`: how many calls fail."""

    name = "pretend"
    identity = "pretend 1.0"

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.calls: list[Program] = []
        self.refuse = 0
        self._lock = threading.Lock()

    def options(self, arch: str) -> tuple[str, ...]:
        return (f"--chip={arch}",)

    def compile(self, program: Program, sources: Sources, arch: str) -> bytes:
        with self._lock:
            self.calls.append(program)
            refused, self.refuse = self.refuse > 0, self.refuse - 1
        time.sleep(self.delay_s)
        if refused:
            raise self._failure(program, arch, "error: not today\n")
        return f"{sources.text(program)} {program} {arch}".encode()
