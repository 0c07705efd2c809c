""".ci/venv.py: which torch is chosen, and that nothing is installed twice."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BOUNDS = [(">=", "2.11"), ("<", "2.15")]


def load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"ci_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


venv_py = load(ROOT / ".ci/venv.py")


def fake_torch(
    folder: Path, version: str, hip: str | None = None, cuda: str | None = None, prelude: str = ""
) -> Path:
    """A package `torch` in `folder` with just the attributes that tell builds apart."""
    package = folder / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"{prelude}\nfrom . import version\n__version__ = {version!r}\n")
    (package / "version.py").write_text(f"hip = {hip!r}\ncuda = {cuda!r}\n")
    return package


@pytest.mark.parametrize(
    "version, expected",
    [
        ("2.11.0", True),
        ("2.13.0+rocm7.1", True),
        ("2.14.1", True),
        ("2.14.0a0+git0123abc", True),
        ("2.14.0.dev20260101+cu130", True),
        ("2.10.1+cu128", False),
        ("2.11.0a0+git0123abc", False),
        ("2.11.0rc1", False),
        ("2.15.0", False),
        ("3.0.0", False),
    ],
)
def test_in_range(version: str, expected: bool) -> None:
    assert venv_py.in_range(version, BOUNDS) is expected


def test_range_is_read_from_pyproject() -> None:
    bounds = venv_py.supported_range((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert [relation for relation, _ in bounds] == [">=", "<"]
    assert venv_py.in_range(venv_py.DEFAULT_TORCH_SPEC.removeprefix("torch=="), bounds)


def test_a_pyproject_without_bounds_is_refused() -> None:
    with pytest.raises(venv_py.SetupError, match="torch>=A,<B"):
        venv_py.supported_range('dependencies = ["torch", "torchvision>=0.2,<1"]')


@pytest.mark.parametrize(
    "build, kept",
    [
        (dict(version="2.13.0+rocm7.1", hip="7.1.0"), True),
        (dict(version="2.12.1+cu130", cuda="13.0"), True),
        (dict(version="2.13.0+cpu"), False),
        (dict(version="2.9.1+rocm6.4", hip="6.4.0"), False),
        (
            dict(version="2.13.0+cu130", cuda="13.0", prelude="raise OSError('libcudart.so.13: not found')"),
            False,
        ),
    ],
    ids=["rocm", "cuda", "cpu", "rocm too old", "cuda that does not import"],
)
def test_host_torch(
    build: dict[str, str],
    kept: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    package = fake_torch(tmp_path, **build)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = venv_py.usable_host_torch(sys.executable, BOUNDS)
    if kept:
        assert (found.version, found.folder) == (build["version"], str(package))
    else:
        assert found is None
    said = capfd.readouterr().err
    assert ("2.9.1+rocm6.4 is not used: supported is torch>=2.11,<2.15" in said) == build[
        "version"
    ].startswith("2.9")


def test_noise_on_import_does_not_hide_the_host_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch(tmp_path, "2.13.0+rocm7.1", hip="7.1.0", prelude="print('a banner')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert venv_py.probe_torch(sys.executable).kind == "ROCm"


def test_no_torch_at_all(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "v")], check=True)
    assert venv_py.probe_torch(str(tmp_path / "v/bin/python")) is None


def test_new_venv_sees_the_torch_of_a_host_that_is_a_venv_itself(tmp_path: Path) -> None:
    """--system-site-packages alone shows what lies beneath the outer venv, not what is in it."""
    outer = tmp_path / "outer venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(outer)], check=True)
    package = fake_torch(venv_py.site_packages(outer), "2.13.0+rocm7.1", hip="7.1.0")
    host = venv_py.usable_host_torch(str(outer / "bin/python"), BOUNDS)
    venv_py.create(tmp_path / "inner venv", str(outer / "bin/python"), host)
    assert venv_py.probe_torch(str(tmp_path / "inner venv/bin/python")).folder == str(package)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would have been run: creating a venv makes its python appear, installing makes torch importable."""
    ran: list[list[str]] = []

    def create(venv: Path, python: str, host: object) -> None:
        ran.append(["venv", "sees host" if host else "plain"])
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin/python").touch()

    torch = venv_py.Torch("2.13.0", None, None, "/x/torch")
    monkeypatch.setattr(venv_py, "create", create)
    monkeypatch.setattr(venv_py, "run", ran.append)
    monkeypatch.setattr(venv_py, "has_pip", lambda venv: (venv / "bin/python").exists())
    monkeypatch.setattr(venv_py, "probe_torch", lambda python: torch)
    monkeypatch.setattr(venv_py, "usable_host_torch", lambda python, bounds: None)
    monkeypatch.setattr(venv_py, "needs_triton", lambda python: True)
    return ran


def summary(commands: list[list[str]]) -> list[str]:
    """Each command by its last word, with the checkout's path taken out."""
    said = [c[1] if c[0] == "venv" else c[-1].replace(str(ROOT), "nybble") for c in commands]
    commands.clear()
    return said


def test_torch_comes_first_and_a_second_time_nothing_runs(tmp_path: Path, commands: list[list[str]]) -> None:
    ready: Callable[..., None] = venv_py.make_ready
    ready(tmp_path / "v", [], "", "")
    assert summary(commands) == ["plain", "torch==2.13.0", "nybble"]
    ready(tmp_path / "v", [], "", "")
    assert summary(commands) == []
    ready(tmp_path / "v", ["test"], "", "")
    assert summary(commands) == ["torch==2.13.0", "nybble[test,triton]"]
    ready(tmp_path / "v", [], "", "")
    assert summary(commands) == []


def test_the_project_cannot_change_torch(tmp_path: Path, commands: list[list[str]]) -> None:
    venv_py.make_ready(tmp_path / "v", [], "", "")
    held = commands[-1][commands[-1].index("--constraint") + 1]
    assert Path(held).read_text() == "torch==2.13.0\n"


def test_torch_spec_and_index_are_used_and_remembered(tmp_path: Path, commands: list[list[str]]) -> None:
    index = "https://example.org/rocm"
    venv_py.make_ready(tmp_path / "v", [], "torch==2.12.0 extra", index)
    assert commands[1][-4:] == ["torch==2.12.0", "extra", "--index-url", index]
    commands.clear()
    venv_py.make_ready(tmp_path / "v", [], "torch==2.12.0 extra", index)
    assert summary(commands) == []
    venv_py.make_ready(tmp_path / "v", [], "torch==2.14.0", "")
    assert summary(commands) == ["torch==2.14.0", "nybble"]


def test_a_host_torch_is_not_installed_over(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = venv_py.Torch("2.13.0+rocm7.1", "7.1.0", None, "/host/torch")
    monkeypatch.setattr(venv_py, "usable_host_torch", lambda python, bounds: host)
    venv_py.make_ready(tmp_path / "v", [], "", "")
    assert summary(commands) == ["sees host", "nybble"]
    venv_py.make_ready(tmp_path / "v", [], "torch==2.13.0", "")
    assert summary(commands) == ["plain", "torch==2.13.0", "nybble"]


def test_a_changed_pyproject_installs_again(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr(venv_py, "ROOT", root)
    (root / "pyproject.toml").write_text('"torch>=2.11,<2.15"')
    venv_py.make_ready(tmp_path / "v", [], "", "")
    commands.clear()
    (root / "pyproject.toml").write_text('"torch>=2.11,<2.15", "numpy"')
    venv_py.make_ready(tmp_path / "v", [], "", "")
    assert len(commands) == 2


def test_a_venv_made_by_hand_keeps_its_torch(tmp_path: Path, commands: list[list[str]]) -> None:
    (tmp_path / "v/bin").mkdir(parents=True)
    (tmp_path / "v/bin/python").touch()
    venv_py.make_ready(tmp_path / "v", [], "", "")
    assert summary(commands) == ["nybble"]


def test_a_failed_installation_is_tried_again(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str]) -> None:
        raise venv_py.SetupError("no network")

    with monkeypatch.context() as m:
        m.setattr(venv_py, "run", fail)
        with pytest.raises(venv_py.SetupError):
            venv_py.make_ready(tmp_path / "v", [], "", "")
    commands.clear()
    venv_py.make_ready(tmp_path / "v", [], "", "")
    assert summary(commands)[-1] == "nybble"


def test_a_torch_outside_the_range_is_refused(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(venv_py, "probe_torch", lambda python: venv_py.Torch("2.3.0", None, None, "/x"))
    with pytest.raises(venv_py.SetupError, match=r"torch 2\.3\.0; accepted: torch>=2\.11,<2\.15"):
        venv_py.make_ready(tmp_path / "v", [], "torch==2.3.0", "")
    assert not (tmp_path / "v/nybble.json").exists()


def test_a_python_without_ensurepip_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(venv_py.SetupError, match="install python3-venv"):
        venv_py.check_venv_module()
