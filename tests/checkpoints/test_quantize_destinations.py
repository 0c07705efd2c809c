"""`nybble quantize` into places that cannot take it: words and an exit code, no traceback, nothing left behind."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nybble.service.checkpoints.quantize import QuantizeOptions, quantize
from nybble.service.errors import CheckpointError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and /proc of Linux")

# One process for all of them, as each would spend its time importing torch. FILE_BYTES stands for a full disk.
SCRIPT = """
import contextlib, io, json, resource, sys
from nybble.service import cli

source, answers = sys.argv[1], {}
for name, (destination, file_bytes) in json.loads(sys.argv[2]).items():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes or soft, hard))
    sys.argv = ["nybble", "quantize", source, destination, "--no-calibrate"]
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException as error:
            code = repr(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    answers[name] = [code, [l for l in err.getvalue().splitlines() if l.startswith("nybble: ")], err.getvalue()]
print(json.dumps(answers))
"""
FILE_BYTES = 100_000


@pytest.fixture(scope="module")
def cases(
    tmp_path_factory: pytest.TempPathFactory, folder_16_bit: Path
) -> dict[str, tuple[Path, int | None]]:
    base = tmp_path_factory.mktemp("destinations")
    for name in ("full", "inside", "linked", "filled"):
        (base / name).mkdir()
    (base / "file").touch()
    (base / "filled" / "mine").touch()
    (base / "linked" / "loop").symlink_to(base / "linked" / "loop")
    (base / "linked" / "out").symlink_to(base / "nowhere")
    return {
        "a name that is too long": (base / "full" / ("n" * 300), None),
        "a path that is too long": (base / "full" / "/".join(["d" * 200] * 30), None),
        "below a file": (base / "file" / "out", None),
        "where nothing can be made": (Path("/proc/nybble/out"), None),
        "a link that leads to itself": (base / "linked" / "loop", None),
        "a link to a place that is free": (base / "linked" / "out", None),
        "a folder that is not empty": (base / "filled", None),
        "the source itself": (folder_16_bit, None),
        "a disk that is full": (base / "full" / "out", FILE_BYTES),
        "below the source": (base / "inside" / "src" / "out", None),
    }


@pytest.fixture(scope="module")
def answers(
    cases: dict[str, tuple[Path, int | None]], folder_16_bit: Path
) -> dict[str, tuple[object, list[str], str]]:
    told = json.dumps({name: (str(path), limit) for name, (path, limit) in cases.items()})
    command = [sys.executable, "-c", SCRIPT, str(folder_16_bit), told]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    found: dict[str, tuple[object, list[str], str]] = json.loads(out.splitlines()[-1])
    return found


REFUSED = {
    "a name that is too long": "cannot be made from .*File name too long",
    "a path that is too long": "cannot be made from .*File name too long",
    "below a file": "cannot be made from .*File exists",
    "where nothing can be made": "cannot be made from ",
    "a link that leads to itself": "a link that leads to itself; remove it",
    "a folder that is not empty": "already exists and is not an empty folder",
    "the source itself": "already exists and is not an empty folder",
    "a disk that is full": "cannot be made from .*(too large|os error 27).*free some space",
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_says_so_and_leaves_nothing(name: str, answers: dict, cases: dict, folder_16_bit: Path) -> None:
    code, said, everything = answers[name]
    assert code == 1, everything
    assert len(said) == 1, everything
    assert re.search(REFUSED[name], said[0]), said
    assert "Traceback" not in everything
    destination = cases[name][0]
    if destination.parent.name == "full":
        assert list(destination.parent.iterdir()) == []
    assert not [p for p in folder_16_bit.parent.iterdir() if p.name.endswith(".partial")]


@pytest.mark.parametrize("name", ["below the source", "a link to a place that is free"])
def test_a_place_like_any_other(name: str, answers: dict, cases: dict) -> None:
    code, _, everything = answers[name]
    assert code == 0, everything
    assert (cases[name][0] / "model.safetensors").is_file()


def test_a_mounted_folder_is_named_before_any_work(
    folder_16_bit: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """It could not be replaced at the end."""
    monkeypatch.setattr("os.path.ismount", lambda path: True)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=f"something is mounted there.*such as {tmp_path}/out/model"):
        quantize(folder_16_bit, tmp_path / "out", QuantizeOptions(calibrate=False), progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
