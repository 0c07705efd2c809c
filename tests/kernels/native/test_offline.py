"""Filling a cache without a GPU, and that what was filled in is then found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pretend_compiler import PretendCompiler

from nybble.kernels.code_object import CodeObject
from nybble.kernels.linear import skinny
from nybble.kernels.native.build import Builder
from nybble.kernels.native.cache import CodeCache
from nybble.kernels.native.compilers import Clang, CompileError, Nvrtc
from nybble.kernels.native.libraries import LibraryNotFound
from nybble.kernels.native.offline import compile_offline, family_programs, offline_target, warm
from nybble.kernels.native.program import Program, Sources
from nybble.kernels.native.recorder import JitRecorder
from nybble.kernels.target import Target

STRIX = Target("rocm", "gfx1151", "Strix Halo", 40, 65536)
PROGRAMS = [Program("swap.cpp", "swap", (f"NYBBLE_STEP={step}",)) for step in range(3)]


def no_compiler() -> PretendCompiler:
    raise LibraryNotFound("no compiler here")


def test_what_clang_made_runs_where_no_compiler_is(tmp_path: Path, clang: Clang, sources: Sources) -> None:
    made = list(warm(PROGRAMS, "gfx1151", tmp_path, sources=sources, compiler=clang))
    assert [w.program for w in made] == PROGRAMS
    for w in made:
        assert w.seconds > 0 and w.resources is not None and w.resources.lds_bytes == 256
    # As in a container: the image's folder beside an own one that is empty, and another Target of the same chip.
    builder = Builder(
        lambda: sources, CodeCache(tmp_path / "own", (tmp_path,)), {"rocm": no_compiler}, JitRecorder()
    )
    for w in made:
        code = builder.compile(w.program, STRIX)
        assert len(code) == w.nbytes and CodeObject(code).mach == "gfx1151"
    assert builder.recorder.counts().cache_hits == {"swap": 3}
    with pytest.raises(LibraryNotFound):
        builder.compile(PROGRAMS[0], Target("rocm", "gfx1100", "", 96, 65536))


def test_what_is_there_is_not_compiled_again(tmp_path: Path, clang: Clang, sources: Sources) -> None:
    list(warm(PROGRAMS[:2], "gfx1151", tmp_path, sources=sources, compiler=clang))
    damaged = sorted(tmp_path.iterdir())[0]
    damaged.write_bytes(damaged.read_bytes()[:100])
    again = list(warm([*PROGRAMS, *PROGRAMS], "gfx1151", tmp_path, sources=sources, compiler=clang))
    assert sorted(w.seconds > 0 for w in again) == [False, True, True]
    assert len(list(tmp_path.iterdir())) == 3


def test_nvidia_chips_are_warmed_with_nvrtc(tmp_path: Path, nvrtc: Nvrtc, sources: Sources) -> None:
    (made,) = warm(PROGRAMS[:1], "sm_90", tmp_path, sources=sources, compiler=nvrtc)
    assert made.resources is None and made.nbytes > 1000


def test_an_error_ends_it(tmp_path: Path, sources: Sources) -> None:
    compiler = PretendCompiler()
    compiler.refuse = 1
    with pytest.raises(CompileError, match="not today"):
        list(warm(PROGRAMS, "sm_90", tmp_path, sources=sources, compiler=compiler, workers=1))
    assert len(compiler.calls) <= 2


def test_a_folder_that_cannot_be_written(tmp_path: Path, sources: Sources) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        list(warm(PROGRAMS, "sm_90", tmp_path / "file/x", sources=sources, compiler=PretendCompiler()))


def test_one_program_for_a_test(clang: Clang, sources: Sources) -> None:
    code = compile_offline(PROGRAMS[0], "gfx1201", sources)
    assert CodeObject(code).mach == "gfx1201"


@pytest.mark.parametrize(
    ("arch", "kind", "wave"),
    [("gfx1151", "rocm", 32), ("gfx1030", "rocm", 32), ("gfx942", "rocm", 64), ("gfx90a", "rocm", 64)]
    + [("sm_90", "cuda", 32), ("sm_120", "cuda", 32)],
)
def test_chips_that_are_not_here(arch: str, kind: str, wave: int) -> None:
    target = offline_target(arch)
    assert (target.kind, target.arch, target.wave) == (kind, arch, wave)


@pytest.mark.parametrize("arch", ["", "gfx", "sm_9", "strix", "gfx1151:xnack-", "gfx1151/.."])
def test_chips_that_do_not_exist(arch: str) -> None:
    with pytest.raises(ValueError, match="accepted an AMD chip"):
        offline_target(arch)


def test_programs_of_a_family_are_gathered_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def programs_for(
        target: Target, dtype: torch.dtype, group_size: int, symmetric: bool, gates: tuple[str | None, ...]
    ) -> tuple[Program, ...]:
        asked.append((target.arch, dtype, group_size, symmetric))
        return (Program("a.cpp", "a", (f"G={group_size}",)), Program("a.cpp", "reduce"))

    monkeypatch.setattr(skinny, "programs_for", programs_for)
    found = family_programs(STRIX, (torch.float16, torch.bfloat16), (32, 128), (True, False))
    assert len(asked) == len(set(asked)) == 8
    assert sorted(map(str, found)) == ["a (G=128)", "a (G=32)", "reduce"]


def test_a_chip_that_csrc_is_not_for() -> None:
    with pytest.raises(ValueError, match="gfx942"):
        family_programs(offline_target("gfx942"), (torch.float16,), (32,), (True,))
