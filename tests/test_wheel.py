"""What a wheel holds, and that it works where nothing but the wheel and its dependencies is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
DATA_SUFFIXES = {"csrc": {".hip", ".cu", ".cpp", ".h"}, "kernels/tiles": {".json"}}
LEFT_BEHIND = (".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")

IMPORT_ALL = """
import importlib, sys
for name in sys.argv[2:]:
    module = importlib.import_module(name)
    assert module.__file__.startswith(sys.argv[1]), f"{name} comes from {module.__file__}"
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # From a copy: setuptools leaves build/ and *.egg-info beside what it builds.
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(source),
    ]
    subprocess.run(pip, check=True, stdin=subprocess.DEVNULL)
    (built,) = folder.glob("nybble-*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A venv with the wheel in it, which borrows this environment's other packages (torch is large)."""
    venv = tmp_path_factory.mktemp("venv") / "v"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin/python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        str(wheel),
    ]
    subprocess.run(pip, check=True, stdin=subprocess.DEVNULL)
    # Files named *.pth in a folder that a .pth names are not read: the editable install's import hook stays out.
    borrowed = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path])
    folders = [p for p in borrowed if Path(p).name in ("site-packages", "dist-packages")]
    site_packages = next((venv / "lib").glob("python3*/site-packages"))
    (site_packages / "borrowed.pth").write_text("\n".join(folders) + "\n")
    return python


def modules(wheel: Path) -> list[str]:
    names = [n for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".py")]
    return sorted(n.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for n in names)


def test_holds_every_source_and_data_file_and_nothing_else(wheel: Path) -> None:
    expected = {p for top in ("kernels", "service", "csrc") for p in (ROOT / top).rglob("*.py")}
    for folder, suffixes in DATA_SUFFIXES.items():
        expected |= {p for p in (ROOT / folder).rglob("*") if p.suffix in suffixes}
    held = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert held == {"nybble/" + p.relative_to(ROOT).as_posix() for p in expected}


def test_metadata_names_the_licence_and_every_dependency(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    with zipfile.ZipFile(wheel) as z:
        (name,) = [n for n in z.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = z.read(name).decode()
        assert any(n.endswith("/licenses/LICENSE") for n in z.namelist())
    assert "License-Expression: Apache-2.0" in metadata
    required = [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line
    ]
    assert len(required) == len(project["dependencies"])


def test_every_module_imports_from_the_wheel(wheel: Path, python: Path, tmp_path: Path) -> None:
    names = [n for n in modules(wheel) if not n.endswith("__main__")]
    assert "nybble.kernels.packing" in names and "nybble.service.engine.protocol" in names
    command = [str(python), "-c", IMPORT_ALL, str(python.parent.parent), *names]
    done = subprocess.run(command, cwd=tmp_path, env=_clean(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_data_files_are_found_by_importlib_resources(python: Path, tmp_path: Path) -> None:
    code = (
        "from importlib.resources import files\n"
        "for package in ('nybble.csrc', 'nybble.kernels.tiles'):\n"
        "    print(*sorted(f.name for f in files(package).iterdir() if f.name.endswith(('.h', '.hip', '.json'))))\n"
    )
    done = subprocess.run(
        [str(python), "-c", code], cwd=tmp_path, env=_clean(), capture_output=True, text=True, check=True
    )
    csrc, tiles = (line.split() for line in done.stdout.split("\n")[:2])
    assert csrc == sorted(p.name for p in (ROOT / "csrc").iterdir() if p.suffix in (".h", ".cpp"))
    assert tiles == sorted(p.name for p in (ROOT / "kernels/tiles").iterdir() if p.suffix == ".json")


def test_console_script_says_its_version(python: Path, tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    command = [str(python.parent / "nybble"), "--version"]
    done = subprocess.run(command, cwd=tmp_path, env=_clean(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert project["version"] in done.stdout


def _clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
