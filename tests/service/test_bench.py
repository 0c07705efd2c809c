"""`nybble bench gemm`: the table, the JSON beside it, exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from nybble.kernels.bench.gemm import Contender
from nybble.service import bench, cli


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "QWEN3_8B", {"o": (64, 256), "down": (128, 384)})
    monkeypatch.setattr(bench, "copy_rate", lambda device: 10e9)
    monkeypatch.setattr(bench, "default_device", lambda: torch.device("cpu"))
    monkeypatch.setattr("nybble.kernels.bench.gemm._COPIES", range(2, 3))


def run(*arguments: str) -> object:
    """The exit code, None for 0."""
    threads = torch.get_num_threads()
    try:
        return cli.app(["bench", "gemm", *arguments], standalone_mode=False)
    finally:
        torch.set_num_threads(threads)


def test_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "table.json"
    assert not run("--layers", "o,down", "--rows", "1,3", "--paths", "exact,dense", "--output", str(output))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("bfloat16, group size 128, symmetric; weights out of cache")
    assert lines[1].startswith("copy rate 10.0 GB/s")
    assert lines[2].split() == [
        "layer",
        "M",
        "path",
        "us",
        "low",
        "high",
        "GB/s",
        "of",
        "copy",
        "rms",
        "error",
    ]
    row = re.compile(r"(o|down) +(1|3) (cpu_exact|dense 16-bit) +([\d.]+ +){4}\d+% +[\d.e-]+")
    rows = [row.fullmatch(line) for line in lines[3:11]]
    assert all(rows), lines
    assert [(m[1], m[3], m[2]) for m in rows if m] == [
        (layer, path, m)
        for layer in ("o", "down")
        for path in ("cpu_exact", "dense 16-bit")
        for m in ("1", "3")
    ]
    assert any(line.startswith("not run: tinygemm: device cpu") for line in lines[11:])
    table = json.loads(output.read_text())
    assert table["copy_bytes_per_s"] == 10_000_000_000 and len(table["rows"]) == 8
    first = table["rows"][0]
    assert (first["layer"], first["path"], first["m"]) == ("o", "cpu_exact", 1)
    assert first["of_copy_rate"] == pytest.approx(first["weight_bytes_per_s"] / 10e9, abs=1e-3)


def test_wrong_numbers_and_failures_end_with_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(weight: object) -> None:
        raise RuntimeError("out of order")

    wrong = Contender("wrong", lambda weight: (lambda x: x.new_zeros(len(x), 64), 1 << 20))
    monkeypatch.setattr(
        bench,
        "contenders",
        lambda config, target: ([wrong, Contender("bad", broken)], {}),  # type: ignore[arg-type]
    )
    assert run("--rows", "1") == 1
    out = capsys.readouterr().out
    assert re.search(r"wrong .*WRONG$", out, re.M) and "FAILED RuntimeError: out of order" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--layers", "o,x"), "--layers='o,x': given 'x', accepted o, down"),
        (("--rows", "1,0"), "--rows='1,0' is not accepted: it should be numbers from 1"),
        (("--rows", ""), "--rows=''"),
        (("--rows", "many"), "--rows='many'"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(cli.UsageError) as caught:
        run(*arguments)
    assert caught.value.message.startswith(says)
