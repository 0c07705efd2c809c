"""From program to code: what makes another key, where code is looked for, and that each is compiled once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pretend_compiler import PretendCompiler

from nybble.kernels.native import build
from nybble.kernels.native.build import Builder, offline_key, runtime_key
from nybble.kernels.native.cache import CodeCache
from nybble.kernels.native.compilers import CompileError
from nybble.kernels.native.libraries import LibraryNotFound
from nybble.kernels.native.program import Program, Sources
from nybble.kernels.native.recorder import JitRecorder
from nybble.kernels.target import Target, cpu_target

STRIX = Target("rocm", "gfx1151", "Strix Halo", 40, 65536)
RADEON = Target("rocm", "gfx1201", "Radeon", 64, 65536)


def builder(
    sources: Sources, compiler: PretendCompiler, folder: Path | None = None, *shared: Path
) -> Builder:
    return Builder(
        lambda: sources, CodeCache(folder, shared), {"rocm": lambda: compiler}, recorder=JitRecorder()
    )


# --- keys ---


def changed(sources: Sources, **files: str) -> Sources:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        for name, text in (sources.files | files).items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Sources.read(Path(folder))


def test_every_input_makes_another_key(sources: Sources, program: Program, pretend: PretendCompiler) -> None:
    def key(
        program: Program = program, sources: Sources = sources, arch: str = "gfx1151", identity: str = ""
    ) -> str:
        compiler = PretendCompiler()
        compiler.identity = identity or pretend.identity
        return runtime_key(program, sources, arch, compiler)

    class OtherOptions(PretendCompiler):
        def options(self, arch: str) -> tuple[str, ...]:
            return (*super().options(arch), "-O1")

    variants = {
        "base": key(),
        "entry": key(Program("swap.cpp", "other", program.defines)),
        "source": key(Program("platform.h", "swap", program.defines)),
        "a define": key(Program("swap.cpp", "swap", ("NYBBLE_STEP=3",))),
        "one more": key(Program("swap.cpp", "swap", ("NYBBLE_STEP=2", "B"))),
        "none": key(Program("swap.cpp", "swap")),
        "joined": key(Program("swap.cpp", "swap", ("NYBBLE_STEP=2B",))),
        "chip": key(arch="gfx1100"),
        "compiler": key(identity="pretend 1.1"),
        "options": runtime_key(program, sources, "gfx1151", OtherOptions()),
        "a header": key(sources=changed(sources, **{"platform.h": sources.files["platform.h"] + "\n"})),
        "a new file": key(sources=changed(sources, **{"deeper/new.h": ""})),
    }
    assert len(set(variants.values())) == len(variants)
    assert key() == variants["base"] and len(key()) == 64


def test_the_offline_key_knows_no_compiler_but_all_else(sources: Sources, program: Program) -> None:
    other = Program("swap.cpp", "swap", ("NYBBLE_STEP=3",))
    keys = {
        offline_key(program, sources, STRIX),
        offline_key(program, sources, RADEON),
        offline_key(other, sources, STRIX),
        offline_key(program, changed(sources, **{"x.h": ""}), STRIX),
    }
    assert len(keys) == 4


def test_other_files_of_the_folder_do_not_count(sources: Sources) -> None:
    assert changed(sources, **{"__init__.py": "x", "README.md": "y"}).digest == sources.digest


# --- obtaining code ---


def test_compiled_once_then_found_on_disk(
    tmp_path: Path, sources: Sources, program: Program, pretend: PretendCompiler
) -> None:
    first = builder(sources, pretend, tmp_path)
    code = first.compile(program, STRIX)
    assert first.compile(program, STRIX) == code and len(pretend.calls) == 1
    second = builder(sources, pretend, tmp_path)
    assert second.compile(program, STRIX) == code and len(pretend.calls) == 1
    assert first.recorder.counts().compiles == {"swap": 1}
    assert first.recorder.counts().seconds > 0
    assert second.recorder.counts().compiles == {} and second.recorder.counts().cache_hits == {"swap": 1}
    assert second.compile(program, RADEON) != code


def test_a_corrupt_entry_is_compiled_again(
    tmp_path: Path, sources: Sources, program: Program, pretend: PretendCompiler
) -> None:
    code = builder(sources, pretend, tmp_path).compile(program, STRIX)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(entry.read_bytes()[:-3])
    assert builder(sources, pretend, tmp_path).compile(program, STRIX) == code
    assert len(pretend.calls) == 2
    assert builder(sources, pretend, tmp_path).compile(program, STRIX) == code and len(pretend.calls) == 2


def test_a_new_compiler_compiles_again(tmp_path: Path, sources: Sources, program: Program) -> None:
    old, new = PretendCompiler(), PretendCompiler()
    new.identity = "pretend 2.0"
    builder(sources, old, tmp_path).compile(program, STRIX)
    builder(sources, new, tmp_path).compile(program, STRIX)
    assert (len(old.calls), len(new.calls)) == (1, 1)
    assert len(list(tmp_path.iterdir())) == 2


def test_offline_entries_need_no_compiler(tmp_path: Path, sources: Sources, program: Program) -> None:
    key = offline_key(program, sources, STRIX)
    CodeCache(tmp_path).store(build.entry_name(program, "gfx1151"), key, b"made by clang")

    def none() -> PretendCompiler:
        raise LibraryNotFound("no compiler here")

    made = Builder(lambda: sources, CodeCache(None, (tmp_path,)), {"rocm": none}, JitRecorder())
    assert made.compile(program, STRIX) == b"made by clang"
    with pytest.raises(LibraryNotFound, match="no compiler here"):
        made.compile(program, RADEON)


def test_without_a_folder_a_program_is_still_compiled_once(
    sources: Sources, program: Program, pretend: PretendCompiler
) -> None:
    made = builder(sources, pretend)
    assert made.compile(program, STRIX) == made.compile(program, STRIX)
    assert len(pretend.calls) == 1


def test_a_device_without_csrc_kernels(sources: Sources, program: Program, pretend: PretendCompiler) -> None:
    with pytest.raises(ValueError, match="given device kind 'cpu', accepted rocm"):
        builder(sources, pretend).compile(program, cpu_target())


def test_a_failure_is_not_remembered(sources: Sources, program: Program, pretend: PretendCompiler) -> None:
    made = builder(sources, pretend)
    pretend.refuse = 1
    with pytest.raises(CompileError, match="not today"):
        made.compile(program, STRIX)
    assert made.compile(program, STRIX)


# --- many at once ---


def programs(count: int) -> list[Program]:
    return [Program("swap.cpp", "swap", (f"NYBBLE_STEP={i}",)) for i in range(count)]


def test_all_are_compiled_in_the_background(sources: Sources) -> None:
    slow = PretendCompiler(delay_s=0.05)
    made = builder(sources, slow)
    pending = made.compile_all([*programs(6), *programs(2)], STRIX, workers=3)
    assert not pending.done()
    codes = pending.result(timeout_s=30)
    assert pending.done() and list(codes) == programs(6) and len(slow.calls) == 6
    assert len(set(codes.values())) == 6
    assert made.compile_all(programs(6), STRIX).result(30) == codes and len(slow.calls) == 6


def test_nothing_to_compile(sources: Sources, pretend: PretendCompiler) -> None:
    pending = builder(sources, pretend).compile_all([], STRIX)
    assert pending.done() and pending.result() == {}


def test_threads_that_want_the_same_program_wait_for_one(sources: Sources, program: Program) -> None:
    slow = PretendCompiler(delay_s=0.1)
    made = builder(sources, slow)
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(made.compile(program, STRIX))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 8 and len(set(found)) == 1 and len(slow.calls) == 1
    assert made.recorder.counts().compiles == {"swap": 1}


def test_one_that_fails_fails_the_result(sources: Sources, pretend: PretendCompiler) -> None:
    pretend.refuse = 1
    pending = builder(sources, pretend).compile_all(programs(4), STRIX, workers=1)
    with pytest.raises(CompileError, match="not today"):
        pending.result(30)
    assert len(pretend.calls) == 4


def test_waiting_has_a_limit_and_the_rest_can_be_left(sources: Sources) -> None:
    slow = PretendCompiler(delay_s=0.2)
    pending = builder(sources, slow).compile_all(programs(5), STRIX, workers=1)
    with pytest.raises(TimeoutError, match="of 5 programs are not compiled after 0.01 s"):
        pending.result(timeout_s=0.01)
    pending.cancel()
    pending.futures[programs(1)[0]].result(30)
    assert len(slow.calls) <= 2
