"""The command line: usage, exit codes, one line per error."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nybble.service import cli
from nybble.service.checkpoints.quantize import staging
from nybble.service.settings import ENVIRONMENT_ONLY, Settings, flag_name


def nybble(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    others = {name: value for name, value in os.environ.items() if not name.startswith("NYBBLE_")}
    return subprocess.run(
        [sys.executable, "-P", "-m", "nybble.service", *arguments],
        capture_output=True,
        text=True,
        env=others | {"COLUMNS": "200", "NO_COLOR": "1"} | environment,
        check=False,
        timeout=60,
    )


def test_version() -> None:
    done = nybble("--version")
    assert done.returncode == 0
    assert re.fullmatch(r"nybble \d+\.\d+\.\d+\S*\n", done.stdout)


def test_help_shows_every_knob() -> None:
    done = nybble("serve", "--help")
    assert done.returncode == 0
    for name in Settings.model_fields:
        assert (flag_name(name) in done.stdout) is (name not in ENVIRONMENT_ONLY)


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (("serve", "x", "--no-such-flag"), {}, "No such option"),
        (("serve", "x", "--port", "http"), {}, "nybble: --port='http' is not accepted"),
        (("serve", "x"), {"NYBBLE_DTYPE": "int3"}, "nybble: NYBBLE_DTYPE='int3' is not accepted"),
        (("serve",), {}, "nybble: NYBBLE_MODEL is not set"),
        (("dance",), {}, "No such command"),
        (("quantize", "only-one"), {}, "Missing argument"),
    ],
    ids=["flag", "flag value", "variable", "no model", "command", "argument"],
)
def test_wrong_usage_is_exit_code_2(
    arguments: tuple[str, ...], environment: dict[str, str], says: str
) -> None:
    done = nybble(*arguments, **environment)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["/no/such/folder", "a/" + "b" * 5000], ids=["missing", "too long"])
def test_a_model_that_does_not_exist_is_exit_code_1(name: str) -> None:
    done = nybble("serve", name)
    assert done.returncode == 1
    assert done.stderr.startswith("nybble: ") and len(done.stderr.splitlines()) == 1
    assert name[:50] in done.stderr


def test_a_misspelt_variable_is_told_at_the_start() -> None:
    done = nybble("serve", "/no/such/folder", "--port", "0", NYBBLE_API_KEY="12345678")
    assert "WARNING" in done.stderr and "NYBBLE_API_KEYS meant?" in done.stderr
    assert "12345678" not in done.stderr


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert cli.find_model(str(tmp_path)) == str(tmp_path)


def test_sigterm_leaves_nothing_half_made(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        cli.tidy_on_sigterm()
        with pytest.raises(SystemExit) as caught, staging(tmp_path / "out"):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.code == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_a_folder_of_one_gguf_is_looked_into(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    asked = []

    def run(command, **kwargs):
        asked.append(command[-2:])
        return subprocess.CompletedProcess(command, 0, "/made/folder\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert cli.find_model(str(tmp_path)) == "/made/folder" and asked == [["resolve", str(tmp_path)]]
