"""Counts of compilations, ours and Triton's."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from nybble.kernels.native.recorder import JitRecorder, count_triton


def test_counts_by_kernel() -> None:
    recorder = JitRecorder()
    recorder.compiled("a", 0.5)
    recorder.compiled("a", 0.25)
    recorder.compiled("b", 1.0)
    recorder.cache_hit("a")
    counts = recorder.counts()
    assert counts.compiles == {"a": 2, "b": 1} and counts.cache_hits == {"a": 1} and counts.seconds == 1.75
    recorder.reset()
    assert counts.compiles == {"a": 2, "b": 1}, "counts once taken do not change"
    assert recorder.counts().compiles == {} and recorder.counts().seconds == 0


def test_threads_lose_no_count() -> None:
    recorder = JitRecorder()

    def count() -> None:
        for _ in range(2000):
            recorder.compiled("a", 1.0)
            recorder.cache_hit("a")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = recorder.counts()
    assert (counts.compiles["a"], counts.cache_hits["a"], counts.seconds) == (8000, 8000, 8000.0)


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
# Compiled for a chip that is not here, in a process of its own: the tests' own has Triton's interpreter.
COMPILE = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from nybble.kernels.native import JIT_RECORDER, count_triton
from kernel_in_a_file import double

heard = []
triton.knobs.compilation.listener = lambda **told: heard.append(told["cache_hit"])
assert count_triton() and count_triton()
source = triton.compiler.ASTSource(fn=double, signature={"x": "*fp32"}, constexprs={})
for _ in range(2):
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
counts = JIT_RECORDER.counts()
print(counts.compiles, counts.cache_hits, 0 < counts.seconds < 60, heard)
"""
KERNEL = """
import triton, triton.language as tl

@triton.jit
def double(x):
    tl.store(x, tl.load(x) * 2)
"""


@needs_triton
def test_triton_is_counted_and_its_other_listener_still_hears(tmp_path: Path) -> None:
    (tmp_path / "kernel_in_a_file.py").write_text(KERNEL)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{'double': 1} {'double': 1} True [False, True]"


def test_a_triton_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace()))
    assert not count_triton(JitRecorder())
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not count_triton(JitRecorder())
