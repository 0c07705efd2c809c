"""Load code into a device and launch it: the driver APIs of CUDA and HIP through ctypes.

A launch is prepared once (grid, threads, shared memory, layout of the arguments) and then called with a stream and the
arguments' values. They are packed into one buffer that the driver copies from, which spares an array of pointers and, in
Python, all allocation.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from nybble.kernels.native import libraries
from nybble.kernels.native.build import Builder
from nybble.kernels.native.libraries import open_library
from nybble.kernels.native.program import Program
from nybble.kernels.target import Target, detect

MAX_THREADS = 1024
DEPENDENT_FROM_SM = 90  # programmatic dependent launch
# struct's native formats: aligned as a C compiler, and so a kernel's parameters, would.
LAYOUT_CODES = frozenset("PQqIiHhBbfd")
_NO_OPT_IN_BYTES = 48 * 1024
# Keys of the `extra` array; HIP and CUDA differ in the one that ends it.
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2
_SHARED_BYTES, _LOCAL_BYTES, _REGISTERS, _MAX_DYNAMIC_SHARED_BYTES = 1, 3, 4, 8


@dataclass(frozen=True, slots=True)
class Attributes:
    """What the driver says about a loaded kernel: of a lane, of a workgroup, of a lane."""

    registers: int
    shared_bytes: int
    local_bytes: int


class Driver(ABC):
    """One driver API. Functions return 0 or an error code; handles are addresses."""

    name: str
    prefix: str  # of every function
    extra_end: int
    # (function, grid x 3, threads x 3, shared bytes, stream, parameters, extra) -> status
    launch: Callable[..., int]
    # (launch configuration, function, parameters, extra) -> status; None where there is none
    launch_ex: Callable[..., int] | None = None

    def __init__(self, api: ctypes.CDLL) -> None:
        self._api = api

    def load(self, code: bytes, entry: str, index: int) -> int:
        """The function `entry` of code loaded into a device. Raises DriverError."""
        with self._on_device(index):
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self._call("ModuleLoadData", ctypes.byref(module), code)
            self._call("ModuleGetFunction", ctypes.byref(function), module, entry.encode(), what=entry)
        return function.value or 0

    def attribute(self, function: int, number: int) -> int:
        """A property of a loaded function. Raises DriverError."""
        value = ctypes.c_int()
        self._call("FuncGetAttribute", ctypes.byref(value), number, ctypes.c_void_p(function))
        return value.value

    @abstractmethod
    def _on_device(self, index: int) -> AbstractContextManager[None]:
        """Within it, what is loaded is loaded into this device."""

    @abstractmethod
    def allow_shared(self, function: int, nbytes: int) -> None:
        """Let a kernel use more than 48 KiB of dynamic shared memory. Raises DriverError."""

    @abstractmethod
    def error(self, status: int) -> str: ...

    def _call(self, name: str, *args: object, what: str = "") -> None:
        """A function of the API without its prefix: the two APIs share names and arguments. Raises DriverError."""
        name = f"{self.prefix}{name}"
        status = getattr(self._api, name)(*args)
        if status:
            raise DriverError(f"{name} {what}".rstrip() + f": {self.error(status)}")


class DriverError(RuntimeError):
    """The driver refused; the text has its own words."""


class CudaDriver(Driver):
    name, prefix = "CUDA", "cu"
    extra_end = 0

    def __init__(self, api: ctypes.CDLL | None = None) -> None:
        """api: the library; None finds it, or raises LibraryNotFound."""
        super().__init__(api or _open("CUDA's driver", "libcuda", libraries.cuda_places(), "cuLaunchKernel"))
        self.launch = _launcher(self._api.cuLaunchKernel)
        if hasattr(self._api, "cuLaunchKernelEx"):
            self.launch_ex = self._api.cuLaunchKernelEx
            self._api.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4

    def allow_shared(self, function: int, nbytes: int) -> None:
        self._call(
            "FuncSetAttribute",
            ctypes.c_void_p(function),
            _MAX_DYNAMIC_SHARED_BYTES,
            nbytes,
            what=f"{nbytes} bytes of dynamic shared memory",
        )

    def error(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._api.cuGetErrorString(status, ctypes.byref(text))
        return f"{(text.value or b'unknown error').decode()} (CUDA error {status})"

    @contextmanager
    def _on_device(self, index: int) -> Iterator[None]:
        """The device's primary context, the one that torch uses, current. It is kept for as long as the process lives."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("DeviceGet", ctypes.byref(device), index)
        self._call("DevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("CtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._api.cuCtxPopCurrent_v2(ctypes.byref(context))


class HipDriver(Driver):
    name, prefix = "HIP", "hip"
    extra_end = 3

    def __init__(self, api: ctypes.CDLL | None = None) -> None:
        """api: the library; None finds it, or raises LibraryNotFound."""
        super().__init__(
            api or _open("the HIP runtime", "libamdhip64", libraries.hip_places(), "hipModuleLaunchKernel")
        )
        self._api.hipGetErrorString.restype = ctypes.c_char_p
        self.launch = _launcher(self._api.hipModuleLaunchKernel)

    def allow_shared(self, function: int, nbytes: int) -> None:
        """Nothing to ask for: a workgroup may have all of a chip's LDS."""

    def error(self, status: int) -> str:
        text = self._api.hipGetErrorString(status) or b"unknown error"
        return f"{text.decode()} (HIP error {status})"

    @contextmanager
    def _on_device(self, index: int) -> Iterator[None]:
        before = ctypes.c_int()
        self._call("GetDevice", ctypes.byref(before))
        self._call("SetDevice", index)
        try:
            yield
        finally:
            self._api.hipSetDevice(before)


def _open(what: str, stem: str, places: Iterator[str], needs: str) -> ctypes.CDLL:
    return open_library(what, stem, places, needs).cdll


def _launcher(function: Any) -> Callable[..., int]:
    function.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    function.restype = ctypes.c_int
    launch: Callable[..., int] = function
    return launch


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id padded to 8 bytes and a value of 64."""

    _fields_ = [
        ("id", ctypes.c_uint),
        ("pad", ctypes.c_uint),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    ]


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    ]


_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_...


class Launch:
    """One kernel with its grid, threads and shared memory; called with a stream and the arguments' values.

    The buffer is this object's: it serves one thread at a time. The driver copies it before a call returns, so the next
    call may follow at once, and a graph that is being captured keeps the values of its own call.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        threads: tuple[int, int, int],
        shared_bytes: int,
        layout: str,
        dependent: bool,
    ) -> None:
        self.kernel, self.grid, self.threads, self.shared_bytes = kernel, grid, threads, shared_bytes
        packer = struct.Struct(f"@{layout}")
        self._pack = packer.pack_into
        self._buffer = ctypes.create_string_buffer(packer.size)
        self._size = ctypes.c_size_t(packer.size)
        self._extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER,
            ctypes.addressof(self._buffer),
            _BUFFER_SIZE,
            ctypes.addressof(self._size),
            kernel.driver.extra_end,
        )
        self._extra_address = ctypes.addressof(self._extra) if packer.size else None
        if dependent:
            self._set_up_dependent(kernel.driver.launch_ex)
        else:
            self._set_up(kernel.driver.launch)

    def __call__(self, stream: int, *args: int | float) -> None:
        """Launch on a stream, torch.cuda.current_stream().cuda_stream; a tensor's value is its data_ptr().

        Raises struct.error for arguments that the layout does not hold, DriverError naming program, shape and chip.
        """
        self._pack(self._buffer, 0, *args)
        status = self._start(stream)
        if status:
            raise DriverError(self._failure(status))

    def _set_up(self, launch: Callable[..., int]) -> None:
        # Ready-made objects: turning 8 Python integers into C's at each call took half a microsecond.
        shape = map(ctypes.c_uint, (*self.grid, *self.threads, self.shared_bytes))
        fixed = (ctypes.c_void_p(self.kernel.function), *shape)
        extra = self._extra_address
        self._start: Callable[[int], int] = lambda stream: launch(*fixed, stream, None, extra)

    def _set_up_dependent(self, launch_ex: Callable[..., int] | None) -> None:
        """The launch may begin before the one ahead of it has ended; the kernel waits where it must."""
        assert launch_ex is not None
        self._attribute = _LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        config = self._config = _LaunchConfig(
            self.grid, self.threads, self.shared_bytes, None, ctypes.pointer(self._attribute), 1
        )
        where, function = ctypes.c_void_p(ctypes.addressof(config)), ctypes.c_void_p(self.kernel.function)
        fixed = (where, function, None, self._extra_address)

        def start(stream: int) -> int:
            config.stream = stream
            return launch_ex(*fixed)

        self._start = start

    def _failure(self, status: int) -> str:
        kernel = self.kernel
        return (
            f"{kernel.program} did not launch: {kernel.driver.error(status)}; grid {self.grid}, threads {self.threads}, "
            f"{self.shared_bytes} bytes of dynamic shared memory, on {kernel.target.name} ({kernel.target.arch})"
        )


class Kernel:
    """A program loaded into one device."""

    def __init__(self, program: Program, target: Target, driver: Driver, function: int) -> None:
        self.program, self.target, self.driver, self.function = program, target, driver, function
        self._allowed_bytes = _NO_OPT_IN_BYTES

    def prepare(
        self,
        grid: Sequence[int] | int,
        threads: Sequence[int] | int,
        shared_bytes: int,
        layout: str,
        *,
        dependent: bool = False,
    ) -> Launch:
        """A launch with all but stream and arguments fixed.

        grid, threads  workgroups and threads of each; up to three numbers, x first
        shared_bytes   of dynamic shared memory
        layout         types of the arguments in struct's codes, aligned as in C: "PPPiq"
        dependent      CUDA, sm_90 and newer: programmatic dependent launch (the kernel must wait for its inputs itself)

        Raises ValueError for what is not accepted, DriverError when the chip has not as much shared memory.
        """
        grid, threads = _three(grid), _three(threads)
        self._check(grid, threads, shared_bytes, layout, dependent)
        if shared_bytes > self._allowed_bytes:
            try:
                self.driver.allow_shared(self.function, shared_bytes)
            except DriverError as error:
                raise DriverError(
                    f"{self.program} on {self.target.name} ({self.target.arch}): {error}"
                ) from None
            # Of the function, not of the launch: a smaller one must not take it back.
            self._allowed_bytes = shared_bytes
        return Launch(self, grid, threads, shared_bytes, layout, dependent)

    def attributes(self) -> Attributes:
        """Registers and memory as the driver counts them."""
        registers, shared, local = (
            self.driver.attribute(self.function, number)
            for number in (_REGISTERS, _SHARED_BYTES, _LOCAL_BYTES)
        )
        return Attributes(registers, shared, local)

    def _check(
        self,
        grid: tuple[int, int, int],
        threads: tuple[int, int, int],
        shared_bytes: int,
        layout: str,
        dependent: bool,
    ) -> None:
        given = f"{self.program}: given grid {grid}, threads {threads}, {shared_bytes} bytes of shared memory"
        count = threads[0] * threads[1] * threads[2]
        if min(*grid, *threads) < 1 or count > MAX_THREADS or shared_bytes < 0:
            raise ValueError(f"{given}; accepted numbers from 1, at most {MAX_THREADS} threads together")
        unknown = set(layout) - LAYOUT_CODES
        if unknown:
            raise ValueError(
                f"{self.program}: given layout {layout!r}, accepted the codes {''.join(sorted(LAYOUT_CODES))}"
            )
        if dependent and (self.target.sm < DEPENDENT_FROM_SM or self.driver.launch_ex is None):
            raise ValueError(
                f"{self.program}: given a dependent launch on {self.target.arch}, accepted on CUDA's sm_90 and newer"
            )


def _three(values: Sequence[int] | int) -> tuple[int, int, int]:
    numbers = (values,) if isinstance(values, int) else tuple(values)
    if not 1 <= len(numbers) <= 3:
        raise ValueError(f"grid and threads: given {numbers}, accepted one to three numbers")
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


DRIVERS: dict[str, Callable[[], Driver]] = {"rocm": HipDriver, "cuda": CudaDriver}


@cache
def driver_for(kind: str) -> Driver:
    """The driver API of a kind of device. Raises LibraryNotFound."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return DRIVERS[kind]()


class Loader:
    """Loads programs into devices, each once."""

    def __init__(self, builder: Builder, driver: Callable[[str], Driver] = driver_for) -> None:
        self._builder, self._driver = builder, driver
        self._lock = threading.Lock()
        self._kernels: dict[tuple[Program, int], Kernel] = {}

    def load(self, program: Program, device: torch.device, target: Target | None = None) -> Kernel:
        """The program on a GPU, compiled if need be. target: None asks the device.

        Not while a graph is being captured: loading is no part of one. Raises as Builder.compile, and DriverError.
        """
        index = torch.cuda.current_device() if device.index is None else device.index
        kernel = self._kernels.get((program, index))
        if kernel is not None:
            return kernel
        target = target or detect(device)
        code = self._builder.compile(program, target)
        driver = self._driver(target.kind)
        with self._lock:
            if (program, index) not in self._kernels:
                try:
                    function = driver.load(code, program.entry, index)
                except DriverError as error:
                    raise DriverError(
                        f"{program} did not load into {target.name} ({target.arch}): {error}"
                    ) from None
                self._kernels[program, index] = Kernel(program, target, driver, function)
            return self._kernels[program, index]
