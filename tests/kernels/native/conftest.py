"""A small csrc of the tests' own, and compilers: one that only pretends, the real ones where they are."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from pretend_compiler import PretendCompiler

from nybble.kernels.native.compilers import Clang, Compiler, Hiprtc, Nvrtc
from nybble.kernels.native.libraries import LibraryNotFound
from nybble.kernels.native.program import Program, Sources

CSRC = Path(__file__).parents[2] / "data/csrc"


@pytest.fixture
def sources() -> Sources:
    return Sources.read(CSRC)


@pytest.fixture
def program() -> Program:
    return Program("swap.cpp", "swap", ("NYBBLE_STEP=2",))


@pytest.fixture
def pretend() -> PretendCompiler:
    return PretendCompiler()


def _or_skip(make: type[Nvrtc] | type[Hiprtc]) -> Compiler:
    try:
        return make()
    except LibraryNotFound:
        pytest.skip(f"needs the library {make.name}: it is not installed")


@pytest.fixture(scope="session")
def nvrtc() -> Compiler:
    return _or_skip(Nvrtc)


@pytest.fixture(scope="session")
def hiprtc() -> Compiler:
    return _or_skip(Hiprtc)


@pytest.fixture(scope="session")
def clang() -> Clang:
    if not (shutil.which("clang++-22") and shutil.which("ld.lld-22")):
        pytest.skip("needs clang-22 and lld-22: not installed")
    return Clang("clang++-22")


@pytest.fixture(scope="session")
def fake_driver_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fake_driver.c as a shared library: the drivers' functions as far as they are used, told to a log."""
    library = tmp_path_factory.mktemp("driver") / "libfake.so"
    command = next(filter(None, map(shutil.which, ("cc", "gcc", "clang-22"))), None)
    if command is None:
        pytest.skip("needs a C compiler: none of cc, gcc and clang-22 is installed")
    linker = ["-fuse-ld=lld"] if "clang" in command else []
    source = Path(__file__).with_name("fake_driver.c")
    subprocess.run(
        [command, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-nostdlib", *linker, "-o", library, source],
        check=True,
    )
    return library
