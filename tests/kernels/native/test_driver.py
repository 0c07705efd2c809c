"""Loading and launching, against a stand-in for libcuda and libamdhip64 with their signatures (fake_driver.c)."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import pytest
import torch
from pretend_compiler import PretendCompiler

from nybble.kernels.native.build import Builder
from nybble.kernels.native.driver import (
    Attributes,
    CudaDriver,
    Driver,
    DriverError,
    HipDriver,
    Kernel,
    Loader,
)
from nybble.kernels.native.program import Program, Sources
from nybble.kernels.target import Target

HOPPER = Target("cuda", "sm_90", "H100", 132, 232448)
AMPERE = Target("cuda", "sm_80", "A100", 108, 166912)
STRIX = Target("rocm", "gfx1151", "Strix Halo", 40, 65536)
TARGETS = {"cuda": HOPPER, "rocm": STRIX}
DEVICE = torch.device("cuda", 1)
STREAM = 0x7F00_0000_1000
# (1000 + first byte of the code) * 1000 + first letter of the entry, as fake_driver.c makes it
FUNCTION = (1000 + ord("/")) * 1000 + ord("s")


class Seen(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
        ("arguments", ctypes.c_ubyte * 256),
        ("argument_bytes", ctypes.c_size_t),
        *[(n, ctypes.c_int) for n in ("dependent", "loads", "depth", "current", "allowed_bytes")],
    ]

    @property
    def packed(self) -> bytes:
        return bytes(self.arguments[: self.argument_bytes])


class Fake:
    """The library, a driver on it, and what the library has seen."""

    def __init__(self, library: Path, kind: str) -> None:
        self.api = ctypes.CDLL(str(library))
        self.seen = Seen.in_dll(self.api, "seen")
        self.status = ctypes.c_int.in_dll(self.api, "fail_with")
        ctypes.memset(ctypes.byref(self.seen), 0, ctypes.sizeof(Seen))
        self.status.value = 0
        self.target = TARGETS[kind]
        self.driver: Driver = {"cuda": CudaDriver, "rocm": HipDriver}[kind](self.api)

    def kernel(self, target: Target | None = None) -> Kernel:
        program = Program("swap.cpp", "swap", ("NYBBLE_STEP=2",))
        return Kernel(program, target or self.target, self.driver, FUNCTION)


@pytest.fixture(params=["cuda", "rocm"])
def fake(fake_driver_library: Path, request: pytest.FixtureRequest) -> Fake:
    return Fake(fake_driver_library, request.param)


@pytest.fixture
def cuda(fake_driver_library: Path) -> Fake:
    return Fake(fake_driver_library, "cuda")


# --- launching ---


def test_a_launch_carries_shape_stream_and_arguments(fake: Fake) -> None:
    launch = fake.kernel().prepare((7, 2), 128, 4096, "PPifq")
    launch(STREAM, 0xDEAD_BEEF_0000, 0x1000, -5, 0.5, -(2**40))
    seen = fake.seen
    assert (list(seen.grid), list(seen.threads), seen.shared_bytes) == ([7, 2, 1], [128, 1, 1], 4096)
    assert (seen.function, seen.stream, seen.parameters) == (FUNCTION, STREAM, None)
    assert seen.packed == struct.pack("@PPifq", 0xDEAD_BEEF_0000, 0x1000, -5, 0.5, -(2**40))


def test_arguments_are_aligned_as_in_c(fake: Fake) -> None:
    class Arguments(ctypes.Structure):
        _fields_ = [
            *(("a", ctypes.c_int), ("b", ctypes.c_void_p), ("c", ctypes.c_short)),
            *(("d", ctypes.c_float), ("e", ctypes.c_double), ("f", ctypes.c_byte)),
        ]

    fake.kernel().prepare(1, 32, 0, "iPhfdb")(STREAM, -1, 2**47, -3, 4.0, 5.0, -6)
    values = Arguments.from_buffer_copy(fake.seen.packed.ljust(ctypes.sizeof(Arguments), b"\0"))
    assert [getattr(values, name) for name, _ in Arguments._fields_] == [-1, 2**47, -3, 4.0, 5.0, -6]


def test_every_launch_has_its_own_arguments_and_stream(fake: Fake) -> None:
    kernel = fake.kernel()
    one, two = kernel.prepare(1, 32, 0, "P"), kernel.prepare(2, 64, 0, "Pi")
    for stream in (STREAM, STREAM + 8, 0):
        one(stream, 11 + stream)
        assert fake.seen.packed == struct.pack("P", 11 + stream) and (fake.seen.stream or 0) == stream
        two(stream, 22, 33)
        assert fake.seen.packed == struct.pack("Pi", 22, 33) and list(fake.seen.grid) == [2, 1, 1]


def test_a_kernel_without_arguments(fake: Fake) -> None:
    fake.kernel().prepare(3, 32, 0, "")(STREAM)
    assert fake.seen.packed == b"" and fake.seen.grid[0] == 3


@pytest.mark.parametrize("arguments", [(), (1,), (1, 2, 3), (1.5, 2), (1, 2**40)], ids=str)
def test_arguments_that_do_not_fit_the_layout_launch_nothing(
    fake: Fake, arguments: tuple[float, ...]
) -> None:
    launch = fake.kernel().prepare(1, 32, 0, "Pi")
    with pytest.raises(struct.error):
        launch(STREAM, *arguments)
    assert fake.seen.function is None


def test_a_refused_launch_says_all(fake: Fake) -> None:
    launch = fake.kernel().prepare((4, 5, 6), (32, 2), 1024, "P")
    fake.status.value = 1
    with pytest.raises(DriverError) as caught:
        launch(STREAM, 8)
    name = fake.driver.name
    assert str(caught.value) == (
        f"swap (NYBBLE_STEP=2) did not launch: invalid argument ({name} error 1); grid (4, 5, 6), threads (32, 2, 1), "
        f"1024 bytes of dynamic shared memory, on {fake.target.name} ({fake.target.arch})"
    )
    assert isinstance(caught.value, RuntimeError)
    fake.status.value = 0
    launch(STREAM, 8)


@pytest.mark.parametrize(
    ("grid", "threads", "shared_bytes", "layout", "says"),
    [
        (0, 32, 0, "P", "accepted numbers from 1"),
        ((1, 1, 0), 32, 0, "P", "accepted numbers from 1"),
        (1, 0, 0, "P", "accepted numbers from 1"),
        (1, (1024, 2), 0, "P", "at most 1024 threads"),
        (1, 32, -1, "P", "-1 bytes"),
        ((1, 1, 1, 1), 32, 0, "P", "accepted one to three numbers"),
        ((), 32, 0, "P", "accepted one to three numbers"),
        (1, 32, 0, "<P", "given layout '<P', accepted the codes"),
        (1, 32, 0, "4s", "given layout '4s'"),
    ],
)
def test_what_cannot_be_launched_is_refused_before(
    fake: Fake, grid: int, threads: int, shared_bytes: int, layout: str, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        fake.kernel().prepare(grid, threads, shared_bytes, layout)


# --- shared memory ---


def test_cuda_is_asked_for_more_than_48_kib(cuda: Fake) -> None:
    kernel = cuda.kernel()
    kernel.prepare(1, 32, 49152, "P")
    assert cuda.seen.allowed_bytes == 0
    big = kernel.prepare(1, 32, 100_000, "P")
    assert cuda.seen.allowed_bytes == 100_000
    kernel.prepare(1, 32, 60_000, "P")
    assert cuda.seen.allowed_bytes == 100_000, "taken from the launch that was prepared before"
    big(STREAM, 1)
    assert cuda.seen.shared_bytes == 100_000


def test_more_shared_memory_than_the_chip_has(cuda: Fake) -> None:
    with pytest.raises(DriverError, match=r"swap \(NYBBLE_STEP=2\) on H100 \(sm_90\): .*300000 bytes"):
        cuda.kernel().prepare(1, 32, 300_000, "P")


def test_hip_needs_not_be_asked(fake_driver_library: Path) -> None:
    fake = Fake(fake_driver_library, "rocm")
    fake.kernel().prepare(1, 32, 65536, "P")(STREAM, 1)
    assert fake.seen.shared_bytes == 65536 and fake.seen.allowed_bytes == 0


# --- programmatic dependent launch ---


def test_a_dependent_launch(cuda: Fake) -> None:
    launch = cuda.kernel().prepare((3, 4), (64, 2), 2048, "Pi", dependent=True)
    for stream in (STREAM, STREAM + 8):
        launch(stream, 5, 6)
        seen = cuda.seen
        assert (seen.dependent, seen.stream, seen.function) == (1, stream, FUNCTION)
        assert (list(seen.grid), list(seen.threads), seen.shared_bytes) == ([3, 4, 1], [64, 2, 1], 2048)
        assert seen.packed == struct.pack("Pi", 5, 6)
    cuda.kernel().prepare(1, 32, 0, "P")(STREAM, 1)
    assert cuda.seen.dependent == 0


@pytest.mark.parametrize("target", [AMPERE, STRIX], ids=lambda target: target.arch)
def test_no_dependent_launch_elsewhere(fake_driver_library: Path, target: Target) -> None:
    fake = Fake(fake_driver_library, target.kind)
    with pytest.raises(ValueError, match=f"dependent launch on {target.arch}, accepted on CUDA's sm_90"):
        fake.kernel(target).prepare(1, 32, 0, "P", dependent=True)


# --- loading ---


def loader(fake: Fake, sources: Sources) -> tuple[Loader, PretendCompiler]:
    compiler = PretendCompiler()
    builder = Builder(lambda: sources, compilers={fake.target.kind: lambda: compiler})
    return Loader(builder, lambda kind: fake.driver), compiler


def test_a_program_is_loaded_once_per_device(fake: Fake, sources: Sources, program: Program) -> None:
    load, compiler = loader(fake, sources)
    kernel = load.load(program, DEVICE, fake.target)
    assert load.load(program, DEVICE, fake.target) is kernel
    assert (fake.seen.loads, len(compiler.calls)) == (1, 1)
    assert kernel.function == FUNCTION, "the code's first byte is its source's, '/'"
    other = load.load(Program("swap.cpp", "swap", ("NYBBLE_STEP=3",)), DEVICE, fake.target)
    assert other is not kernel and fake.seen.loads == 2
    # CUDA: the context is popped again. HIP: the device is the one from before.
    assert (fake.seen.depth, fake.seen.current) == (0, 0)


def test_the_driver_counts_registers_and_memory(fake: Fake) -> None:
    assert fake.kernel().attributes() == Attributes(registers=40, shared_bytes=10, local_bytes=30)


def test_a_name_that_is_not_in_the_code(fake: Fake, sources: Sources) -> None:
    load, _ = loader(fake, sources)
    with pytest.raises(
        DriverError, match=r"\?none did not load into .*: .*ModuleGetFunction \?none: bad image"
    ):
        load.load(Program("swap.cpp", "?none"), DEVICE, fake.target)
    assert (fake.seen.depth, fake.seen.current) == (0, 0)


def test_code_that_the_driver_refuses(fake: Fake, sources: Sources) -> None:
    bad = Sources(sources.files | {"bad.cpp": "!"}, "digest")
    load, _ = loader(fake, bad)
    with pytest.raises(DriverError, match=f"swap did not load into .*{fake.target.arch}.*: bad image"):
        load.load(Program("bad.cpp", "swap"), DEVICE, fake.target)


# --- on a GPU ---


@pytest.mark.gpu
def test_a_kernel_runs_and_is_captured(sources: Sources) -> None:
    from nybble.kernels.target import detect

    device = torch.device("cuda", 0)
    target = detect(device)
    load = Loader(Builder(lambda: sources))
    launches = []
    for step in (2, 3):
        kernel = load.load(Program("swap.cpp", "swap", (f"NYBBLE_STEP={step}",)), device)
        launches.append(kernel.prepare(1, 64, 0, "P", dependent=target.arch in ("sm_90", "sm_100")))
    values = torch.arange(64.0, device=device)
    for launch in launches:
        launch(torch.cuda.current_stream().cuda_stream, values.data_ptr())
    assert values.tolist() == [x + 5 for x in range(64)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches[0](torch.cuda.current_stream().cuda_stream, values.data_ptr())
    graph.replay()
    graph.replay()
    assert values.tolist() == [x + 9 for x in range(64)]
