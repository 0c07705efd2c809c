"""`nybble warm`: what it prints and leaves behind, and its errors."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from nybble.kernels.linear import skinny
from nybble.kernels.native import offline
from nybble.kernels.native.compilers import Clang
from nybble.kernels.native.libraries import LibraryNotFound
from nybble.kernels.native.program import Program, Sources
from nybble.service import cli
from nybble.service.errors import NybbleError
from nybble.service.folders import kernel_cache_folder

CSRC = Path(__file__).parents[1] / "data/csrc"

needs_clang = pytest.mark.skipif(
    not (shutil.which("clang++-22") and shutil.which("ld.lld-22")),
    reason="needs clang-22 and lld-22: not installed",
)


@pytest.fixture(autouse=True)
def small_csrc(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The tests' own csrc and family of programs; which were asked for."""
    asked: list[tuple[Any, ...]] = []

    def programs_for(
        target: Any, dtype: Any, group_size: int, symmetric: bool, gates: Any
    ) -> tuple[Program, ...]:
        asked.append((target.arch, str(dtype), group_size, symmetric))
        return (Program("swap.cpp", "swap", (f"NYBBLE_STEP={group_size}",)),)

    monkeypatch.setattr(skinny, "programs_for", programs_for)
    monkeypatch.setattr(offline, "csrc", lambda: Sources.read(CSRC))
    return asked


def warm(*arguments: str) -> None:
    cli.app(["warm", *arguments], standalone_mode=False)


@needs_clang
def test_a_line_for_each_program_and_a_total(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small_csrc: list[tuple[Any, ...]]
) -> None:
    arguments = ("--arch", "gfx1151", "--dtype", "float16", "--symmetric", "--output", str(tmp_path / "out"))
    warm(*arguments)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"gfx1151: 3 programs into {tmp_path / 'out'}"
    assert lines[1].split() == ["VGPRs", "SGPRs", "LDS", "scratch", "spills", "bytes", "s", "program"]
    row = re.compile(r" +(\d+) +\d+ +256 +0 +0\+0 +(\d+) +\d+\.\d\d  swap \(NYBBLE_STEP=(32|64|128)\)")
    rows = [row.fullmatch(line) for line in lines[2:5]]
    assert all(rows)
    total = sum(int(match[2]) for match in rows if match)
    assert re.fullmatch(rf"gfx1151: 3 compiled, 0 were there, {total} bytes, \d+\.\d s", lines[5])
    assert len(list((tmp_path / "out").iterdir())) == 3
    assert small_csrc == [("gfx1151", "torch.float16", g, True) for g in (32, 64, 128)]
    warm(*arguments)
    assert "0 compiled, 3 were there" in capsys.readouterr().out


@needs_clang
def test_several_chips_one_group_size(tmp_path: Path, small_csrc: list[tuple[Any, ...]]) -> None:
    warm("--arch", "gfx1100", "--arch", "gfx1201", "--group-size", "64", "--output", str(tmp_path))
    names = sorted(path.name.rsplit("-", 1)[0] for path in tmp_path.iterdir())
    assert names == ["swap-gfx1100", "swap-gfx1201"]
    assert len(small_csrc) == 8 and {asked[2] for asked in small_csrc} == {64}


def test_a_chip_that_does_not_exist_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(cli.UsageError, match="^--arch: given 'strix', accepted an AMD chip"):
        warm("--arch", "strix", "--output", str(tmp_path))
    assert not any(tmp_path.iterdir())


def test_no_compiler_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_nvrtc() -> None:
        raise LibraryNotFound("nvrtc was not found; tried: x")

    compilers = {"rocm": lambda: Clang(which=lambda name: None), "cuda": no_nvrtc}
    monkeypatch.setattr(offline, "OFFLINE_COMPILERS", compilers)
    with pytest.raises(NybbleError, match="apt-get install clang-22 lld-22"):
        warm("--arch", "gfx1151", "--output", str(tmp_path))
    with pytest.raises(NybbleError, match="nvrtc was not found"):
        warm("--arch", "sm_90", "--output", str(tmp_path))


@needs_clang
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NybbleError, match="Not a directory"):
        warm("--arch", "gfx1151", "--output", str(tmp_path / "file/out"))


def test_the_users_cache_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_cache_folder() == tmp_path / "nybble/kernels"
