"""The rules of the source tree that no other tool checks: packaging by mapping, and which way imports run."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
TOP = ("kernels", "service", "csrc")
SOURCES = sorted(path for top in TOP for path in (ROOT / top).rglob("*.py"))
TORCH_FREE = ("scheduler", "kv_blocks", "sequence", "protocol")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_modules(path: Path) -> list[str]:
    """Absolute names of all that a file imports, at any depth of it."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ["nybble", *path.relative_to(ROOT).parent.parts] if node.level else []
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_every_subpackage_is_listed() -> None:
    """A folder that is missing from the list works in an editable install and is absent from the wheel."""
    folders = {path.parent for path in SOURCES} | {ROOT / top for top in TOP}
    on_disk = {"nybble." + relative(folder).replace("/", ".") for folder in folders}
    assert on_disk == set(SETUPTOOLS["packages"])


def test_each_top_folder_is_mapped_and_linked_for_type_checkers() -> None:
    assert SETUPTOOLS["package-dir"] == {f"nybble.{top}": top for top in TOP}
    for top in TOP:
        assert (ROOT / ".typing/nybble" / top).resolve() == ROOT / top


def test_kernels_is_a_namespace_folder() -> None:
    """With __init__.py, and the root on sys.path, it would hide the package `kernels` that transformers looks for."""
    assert not (ROOT / "kernels/__init__.py").exists()


def test_csrc_is_a_package() -> None:
    """importlib.resources cannot read a namespace folder of an editable install."""
    assert (ROOT / "csrc/__init__.py").exists()


def test_subpackages_have_an_init_file() -> None:
    missing = [relative(p.parent) for p in SOURCES if not (p.parent / "__init__.py").exists()]
    assert set(missing) <= {"kernels"}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_run_downward(path: Path) -> None:
    top = path.relative_to(ROOT).parts[0]
    names = imported_modules(path)
    bare = [n for n in names if any(is_within(n, t) for t in TOP)]
    assert not bare, f"{relative(path)} imports {bare}; write nybble.{bare[0]}"
    if top != "service":
        upward = [n for n in names if is_within(n, "nybble.service")]
        assert not upward, f"{relative(path)} imports {upward}: kernels and csrc know nothing of the service"


@pytest.mark.parametrize(
    "source, found",
    [
        ("import service.cli", "service.cli"),
        ("from kernels import packing", "kernels.packing"),
        ("from nybble import service", "nybble.service"),
        ("def f():\n    from ...service import errors", "nybble.service.errors"),
        ("from . import tiles", "nybble.kernels.linear.tiles"),
    ],
)
def test_imported_modules_sees(source: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "kernels/linear/never_written.py"
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: source)
    assert found in imported_modules(path)


def torch_free_modules() -> list[str]:
    return [name for name in TORCH_FREE if (ROOT / f"service/engine/{name}.py").exists()]


def test_protocol_is_among_the_torch_free_modules() -> None:
    assert "protocol" in torch_free_modules()


@pytest.mark.parametrize("name", torch_free_modules())
def test_never_imports_torch(name: str) -> None:
    code = f"import sys, nybble.service.engine.{name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd="/", check=False).returncode == 0


# Collects every test as where only the extra `test` is installed: what `dev` alone brings is hidden.
COLLECT = """
import re, sys
from importlib import metadata
import pytest

dev = [r for r in metadata.requires("nybble") if re.search(r"extra == .dev.", r)]
names = {re.match(r"[A-Za-z0-9._-]+", r)[0].lower().replace("_", "-") for r in dev}
hidden = {
    module
    for module, packages in metadata.packages_distributions().items()
    if {package.lower().replace("_", "-") for package in packages} <= names
}

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider"]))
"""


@pytest.mark.slow
def test_every_test_can_be_collected_without_the_tools_of_development() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
