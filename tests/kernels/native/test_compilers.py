"""The compilers: what they are asked, what they say, and code made for real where they are installed."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from nybble.kernels.code_object import CodeObject
from nybble.kernels.native import libraries
from nybble.kernels.native.compilers import Clang, CompileError, Compiler, Hiprtc, Nvrtc
from nybble.kernels.native.libraries import LibraryNotFound, open_library
from nybble.kernels.native.program import Program, Sources

EM_CUDA, EM_AMDGPU = 190, 224


def machine(code: bytes) -> int:
    assert code.startswith(b"\x7fELF\x02")
    return int(struct.unpack_from("<H", code, 18)[0])


# --- nvrtc: a library, no GPU ---


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_nvrtc_makes_cubins(nvrtc: Nvrtc, program: Program, sources: Sources, arch: str) -> None:
    code = nvrtc.compile(program, sources, arch)
    assert machine(code) == EM_CUDA
    assert b"\0swap\0" in code or b".text.swap\0" in code
    other = nvrtc.compile(Program("swap.cpp", "swap", ("NYBBLE_STEP=3",)), sources, arch)
    assert other != code and len(other) == len(code)


def test_nvrtc_makes_ptx_for_a_chip_newer_than_itself(
    nvrtc: Nvrtc, program: Program, sources: Sources
) -> None:
    newest = max(nvrtc.architectures)
    code = nvrtc.compile(program, sources, "sm_999")
    assert f".target sm_{newest}".encode() in code and b".entry swap" in code


def test_nvrtc_accepts_no_other_chip(nvrtc: Nvrtc, program: Program, sources: Sources) -> None:
    with pytest.raises(ValueError, match="given arch 'gfx1151', accepted sm_NN"):
        nvrtc.compile(program, sources, "gfx1151")
    with pytest.raises(ValueError, match="given arch 'sm_20', accepted sm_"):
        nvrtc.compile(program, sources, "sm_20")


def test_nvrtc_says_its_version(nvrtc: Nvrtc) -> None:
    assert nvrtc.identity.startswith("nvrtc 1") and "." in nvrtc.identity


# --- hiprtc: a library, no GPU. gfx1030 because Debian 12's, of ROCm 5.2, knows nothing newer. ---


def test_hiprtc_makes_code_objects(hiprtc: Hiprtc, program: Program, sources: Sources) -> None:
    code = hiprtc.compile(program, sources, "gfx1030")
    assert machine(code) == EM_AMDGPU
    found = CodeObject(code)
    assert found.mach == "gfx1030" and found.resources("swap").lds_bytes == 256
    assert hiprtc.identity.startswith("hiprtc ") and " 0 bytes" not in hiprtc.identity


# --- clang: a program ---


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1151", "gfx1201"])
def test_clang_makes_code_objects(clang: Clang, program: Program, sources: Sources, arch: str) -> None:
    code = clang.compile(program, sources, arch)
    found = CodeObject(code)
    assert (machine(code), found.mach) == (EM_AMDGPU, arch)
    resources = found.resources("swap")
    assert 0 < resources.vgprs <= 8 and resources.lds_bytes == 256
    assert (resources.scratch_bytes, resources.vgpr_spills, resources.sgpr_spills) == (0, 0, 0)
    assert clang.compile(program, sources, arch) == code, "the same text makes the same bytes"


def test_a_name_that_is_not_in_a_code_object(clang: Clang, program: Program, sources: Sources) -> None:
    with pytest.raises(ValueError, match=r"given 'other', accepted one of \['swap'\]"):
        CodeObject(clang.compile(program, sources, "gfx1100")).resources("other")


def test_no_clang_says_what_to_install() -> None:
    with pytest.raises(FileNotFoundError, match="tried clang\\+\\+-22.*apt-get install clang-22 lld-22"):
        Clang(which=lambda name: None)


def test_a_clang_without_its_linker_says_so(tmp_path: Path, program: Program, sources: Sources) -> None:
    broken = tmp_path / "clang++"
    broken.write_text(
        "#!/bin/sh\necho \"clang++: error: unable to execute command: Executable 'lld' doesn't exist!\" >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    with pytest.raises(CompileError, match="apt-get install lld-22"):
        Clang(str(broken)).compile(program, sources, "gfx1100")


# --- all of them ---


@pytest.fixture(params=["nvrtc", "hiprtc", "clang"])
def real(request: pytest.FixtureRequest) -> tuple[Compiler, str]:
    arch = {"nvrtc": "sm_90", "hiprtc": "gfx1030", "clang": "gfx1030"}[request.param]
    return request.getfixturevalue(request.param), arch


def test_a_refusal_has_the_log_the_program_and_the_chip(real: tuple[Compiler, str], sources: Sources) -> None:
    compiler, arch = real
    with pytest.raises(CompileError) as caught:
        compiler.compile(Program("swap.cpp", "swap"), sources, arch)
    text = str(caught.value)
    assert "NYBBLE_STEP" in text and f"swap (swap.cpp) for {arch}" in text and compiler.identity in text


def test_a_file_that_is_not_there(real: tuple[Compiler, str], sources: Sources) -> None:
    with pytest.raises(
        ValueError, match=r"given source 'no.cpp', accepted one of \['platform.h', 'swap.cpp'\]"
    ):
        real[0].compile(Program("no.cpp", "swap"), sources, real[1])


@pytest.mark.parametrize("arch", ["sm_90", "gfx", "gfx1151:xnack-", "", "../gfx1151"])
def test_amd_compilers_accept_amd_chips_only(arch: str) -> None:
    compiler = Clang("sh")
    with pytest.raises(ValueError, match="accepted gfx and its number"):
        compiler.options(arch)


# --- finding libraries ---


def test_a_library_that_is_nowhere_names_every_place(tmp_path: Path) -> None:
    (tmp_path / "libbroken.so").write_bytes(b"not a library")
    places = iter(["libabsent.so.9", f"{tmp_path}/none/lib*.so", f"{tmp_path}/lib*.so", "libc.so.6"])
    with pytest.raises(LibraryNotFound) as caught:
        open_library("the thing", "libthing", places, "thing_create")
    text = str(caught.value)
    assert "the thing was not found" in text
    assert "libabsent.so.9 (not there)" in text and f"{tmp_path}/none/lib*.so (not there)" in text
    assert "libbroken.so (" in text and "libc.so.6 (has no thing_create)" in text


def test_the_library_that_is_loaded_wins() -> None:
    (libc,) = libraries.mapped("libc")
    found = open_library("libc", "libc", iter(["libabsent.so"]), "malloc")
    assert found.path == libc


@pytest.mark.parametrize(
    ("stem", "line", "found"),
    [
        ("libhiprtc", "/opt/rocm/lib/libhiprtc.so.7.1.70100", True),
        ("libhiprtc", "/opt/rocm/lib/libhiprtc-builtins.so.7", False),
        ("libamdhip64", "/a b/torch/lib/libamdhip64-0a1b2c3d.so", True),
        ("libnvrtc", "/x/libnvrtc-builtins.so.13.5", False),
    ],
    ids=["version", "another library", "hash and a space", "builtins"],
)
def test_loaded_libraries_are_known_by_their_names(
    stem: str, line: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 00000000 08:01 12345   {line}\n7f02-7f03 rw-p 00000000 00:00 0\n")
    monkeypatch.setattr("builtins.open", lambda *a, _open=open, **k: _open(maps))
    assert libraries.mapped(stem) == ([line] if found else [])


def test_nvrtc_of_torchs_cuda_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries.torch.version, "cuda", "12.8")
    monkeypatch.setattr(libraries, "_package_folders", lambda name: [f"{tmp_path}/{name}"])
    first, second, third, *_ = libraries.nvrtc_places()
    assert first == f"{tmp_path}/nvidia/*/lib/libnvrtc.so.12" and second == "libnvrtc.so.12"
    assert third == f"{tmp_path}/nvidia/*/lib/libnvrtc.so.*"


def test_rocm_packages_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType

    package = ModuleType("rocm_sdk")
    package.find_libraries = lambda name: [Path(f"/sdk/lib{name}.so.7")]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rocm_sdk", package)
    assert next(libraries.hip_places()) == "/sdk/libamdhip64.so.7"
    places = list(libraries.hiprtc_places())
    assert places.index("/sdk/libhiprtc.so.7") < places.index("libhiprtc.so")
    package.find_libraries = lambda name: 1 / 0  # type: ignore[attr-defined]
    assert next(libraries.hip_places()).endswith("torch/lib/libamdhip64*.so*")
