"""The compilers: hiprtc and nvrtc in this process, as the installed torch carries them, and clang offline.

    hiprtc   gfx*   ROCm's, a library     code object
    nvrtc    sm_*   CUDA's, a library     cubin; PTX for a chip newer than the library
    clang    gfx*   a program, no ROCm    code object; for images and tests, on machines without a GPU

All three see the same text: the program's file, the rest of csrc as files it may include, and the macros. None needs a
header of HIP or CUDA, nor a device library.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

from nybble.kernels.native import libraries
from nybble.kernels.native.libraries import Library, open_library
from nybble.kernels.native.program import Program, Sources

STANDARD = "-std=c++17"
# Without the id that clang makes of a file's path, the same text makes the same bytes.
# Code objects of version 5 load on every ROCm from 5.7 on; clang's own default moves with its releases.
CLANG_OPTIONS = (
    *("-x", "hip", "--offload-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib"),
    *("-O3", STANDARD, "-mcode-object-version=5", "-fuse-cuid=none"),
)
HIPRTC_OPTIONS = ("-O3", STANDARD)
NVRTC_OPTIONS = (STANDARD,)

_AMD_ARCH = re.compile(r"gfx[0-9a-f]{3,5}")
_CUDA_ARCH = re.compile(r"sm_(\d{2,3})")
_LOG_CHARS = 4000


class CompileError(RuntimeError):
    """A compiler refused a program; the text has its log."""


class Compiler(ABC):
    """Makes machine code of a program for one chip."""

    name: str

    @property
    @abstractmethod
    def identity(self) -> str:
        """Name and version: another one may make other code of the same text."""

    @abstractmethod
    def options(self, arch: str) -> tuple[str, ...]:
        """What it is told beside the macros. Raises ValueError for a chip that it is not for."""

    @abstractmethod
    def compile(self, program: Program, sources: Sources, arch: str) -> bytes:
        """Code that the driver loads. Raises CompileError, and ValueError for a chip or a file that is not accepted."""

    def _failure(self, program: Program, arch: str, log: str) -> CompileError:
        return CompileError(
            f"{self.identity} did not compile {program} ({program.source}) for {arch}:\n{log.strip()[:_LOG_CHARS]}"
        )


class _Refusal(Exception):
    """A run-time compiler's log of why."""


class _RuntimeCompiler:
    """The part that hiprtc and nvrtc share: one interface under two prefixes, in which 0 is success.

    https://docs.nvidia.com/cuda/nvrtc, https://rocm.docs.amd.com/projects/HIP (how-to: HIP RTC)
    """

    def __init__(self, library: Library, prefix: str) -> None:
        self.library, self._prefix = library, prefix

    def __call__(self, function: str, *args: object) -> None:
        status = getattr(self.library.cdll, self._prefix + function)(*args)
        if status:
            describe = getattr(self.library.cdll, self._prefix + "GetErrorString")
            describe.restype = ctypes.c_char_p
            raise RuntimeError(f"{self._prefix}{function}: {(describe(status) or b'unknown error').decode()}")

    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self("Version", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def build(self, text: str, name: str, headers: dict[str, str], options: Sequence[str], get: str) -> bytes:
        """Compile one text and take what Get<get> gives. Raises _Refusal."""
        program = ctypes.c_void_p()
        included = ctypes.c_int(len(headers)), _strings(headers.values()), _strings(headers)
        self("CreateProgram", ctypes.byref(program), text.encode(), name.encode(), *included)
        try:
            try:
                self("CompileProgram", program, ctypes.c_int(len(options)), _strings(options))
            except RuntimeError as error:
                compiler_log = self._take(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
                raise _Refusal(compiler_log or str(error)) from None
            return self._take(program, get)
        finally:
            self("DestroyProgram", ctypes.byref(program))

    def _take(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self(f"Get{what}", program, buffer)
        return buffer.raw


def _strings(values: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [value.encode() for value in values]
    return (ctypes.c_char_p * len(encoded))(*encoded)


class Nvrtc(Compiler):
    """NVIDIA's run-time compiler; it needs no GPU."""

    name = "nvrtc"

    def __init__(self, library: Library | None = None) -> None:
        """library: None finds it. Raises LibraryNotFound."""
        self._rtc = _RuntimeCompiler(
            library
            or open_library(
                "the run-time compiler nvrtc", "libnvrtc", libraries.nvrtc_places(), "nvrtcCreateProgram"
            ),
            "nvrtc",
        )

    @cached_property
    def identity(self) -> str:
        return f"nvrtc {self._rtc.version()}"

    @cached_property
    def architectures(self) -> tuple[int, ...]:
        """What it makes cubins for: 80, 90, ..."""
        count = ctypes.c_int()
        self._rtc("GetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._rtc("GetSupportedArchs", found)
        return tuple(sorted(found))

    def options(self, arch: str) -> tuple[str, ...]:
        return (f"--gpu-architecture={self._architecture(arch)}", *NVRTC_OPTIONS)

    def compile(self, program: Program, sources: Sources, arch: str) -> bytes:
        what = "CUBIN" if self._architecture(arch).startswith("sm_") else "PTX"
        return self._build(program, sources, arch, what)

    def ptx(self, program: Program, sources: Sources, arch: str) -> str:
        """The text that comes before machine code. Raises as `compile`."""
        return self._build(program, sources, arch, "PTX").rstrip(b"\0").decode()

    def _build(self, program: Program, sources: Sources, arch: str, what: str) -> bytes:
        options = [*self.options(arch), *_macros(program)]
        options += [f"--include-path={folder}" for folder in libraries.cuda_includes()]
        text, headers = sources.text(program), sources.headers(program)
        try:
            return self._rtc.build(text, program.source, headers, options, what)
        except _Refusal as refusal:
            raise self._failure(program, arch, str(refusal)) from None

    def _architecture(self, arch: str) -> str:
        """sm_NN, or for a chip newer than the library compute_NN, whose PTX the driver finishes."""
        match = _CUDA_ARCH.fullmatch(arch)
        if match is None:
            raise ValueError(f"nvrtc: given arch {arch!r}, accepted sm_NN")
        number = int(match.group(1))
        if number in self.architectures:
            return arch + "a" if number == 90 else arch  # with what no other chip has: csrc/warpgroup.h
        older = [known for known in self.architectures if known < number]
        if not older:
            known = ", ".join(f"sm_{known}" for known in self.architectures)
            raise ValueError(f"{self.identity}: given arch {arch!r}, accepted {known}")
        return f"compute_{older[-1]}"


class Hiprtc(Compiler):
    """AMD's run-time compiler; compiling needs no GPU."""

    name = "hiprtc"

    def __init__(self, library: Library | None = None) -> None:
        """library: None finds it. Raises LibraryNotFound."""
        self._rtc = _RuntimeCompiler(
            library
            or open_library(
                "the run-time compiler hiprtc", "libhiprtc", libraries.hiprtc_places(), "hiprtcCreateProgram"
            ),
            "hiprtc",
        )

    @cached_property
    def identity(self) -> str:
        # hiprtcVersion has stood still over several releases; the file's full name and size have not.
        path = os.path.realpath(self._rtc.library.path)
        size = os.path.getsize(path) if os.path.isfile(path) else 0
        return f"hiprtc {self._rtc.version()} ({os.path.basename(path)}, {size} bytes)"

    def options(self, arch: str) -> tuple[str, ...]:
        return (f"--offload-arch={_amd_arch(arch, self.name)}", *HIPRTC_OPTIONS)

    def compile(self, program: Program, sources: Sources, arch: str) -> bytes:
        text, headers = sources.text(program), sources.headers(program)
        options = [*self.options(arch), *_macros(program)]
        try:
            return self._rtc.build(text, program.source, headers, options, "Code")
        except _Refusal as refusal:
            raise self._failure(program, arch, str(refusal)) from None


CLANG_NAMES = (
    *("clang++-22", "clang++-23", "clang++-21", "clang++-20", "clang++-19"),
    *("amdclang++", "/opt/rocm/llvm/bin/clang++", "clang++"),
)


class Clang(Compiler):
    """A clang of at least version 19 with its linker; no ROCm, no GPU."""

    name = "clang"

    def __init__(self, command: str | None = None, which: Callable[[str], str | None] = shutil.which) -> None:
        """command: None takes the first of CLANG_NAMES that is there. Raises FileNotFoundError saying what to install."""
        found = next(filter(None, map(which, [command] if command else CLANG_NAMES)), None)
        if found is None:
            raise FileNotFoundError(
                f"clang was not found; tried {command or ', '.join(CLANG_NAMES)}. Install clang and its linker: "
                "`apt-get install clang-22 lld-22` (Debian, Ubuntu), or ROCm's rocm-llvm"
            )
        self.command = found

    @cached_property
    def identity(self) -> str:
        done = subprocess.run([self.command, "--version"], capture_output=True, text=True, check=False)
        return (done.stdout.splitlines() or [self.command])[0]

    def options(self, arch: str) -> tuple[str, ...]:
        return (f"--offload-arch={_amd_arch(arch, self.name)}", *CLANG_OPTIONS)

    def compile(self, program: Program, sources: Sources, arch: str) -> bytes:
        sources.text(program)
        with tempfile.TemporaryDirectory(prefix="nybble-clang-") as folder:
            for name, text in sources.files.items():
                path = Path(folder, "csrc", name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            command = [self.command, *self.options(arch), *_macros(program), "-Icsrc", "-o", "code"]
            done = subprocess.run(
                [*command, f"csrc/{program.source}"],
                cwd=folder,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
            if done.returncode != 0:
                raise self._failure(program, arch, done.stderr + _linker_hint(done.stderr))
            return Path(folder, "code").read_bytes()


def _linker_hint(errors: str) -> str:
    if "doesn't exist" not in errors and "invalid linker" not in errors:
        return ""
    return "\nclang's linker may be missing: `apt-get install lld-22`, of the same version as clang"


def _macros(program: Program) -> list[str]:
    return [f"-D{define}" for define in program.defines]


def _amd_arch(arch: str, compiler: str) -> str:
    if not _AMD_ARCH.fullmatch(arch):
        raise ValueError(f"{compiler}: given arch {arch!r}, accepted gfx and its number, as gfx1151")
    return arch
