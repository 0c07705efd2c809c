"""Makes .venv ready for one purpose: `python3 .ci/venv.py [EXTRA ...]`, EXTRA as in pyproject.toml (test, dev).

Returns at once when nothing changed since the last time, without a network. What was installed, and from which
request, stands in .venv/nybble.json.

torch is installed first, by itself, and held at that version while the rest is installed:

  TORCH_SPEC or TORCH_INDEX_URL set   that torch
  neither, and the host's Python      the host's: a venv that sees it, nothing is installed over it
  imports a ROCm or CUDA torch of the
  supported range
  otherwise                           DEFAULT_TORCH_SPEC from PyPI

The supported range is the one in pyproject.toml. Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_TORCH_SPEC = "torch==2.13.0"
OLDEST_PYTHON = (3, 11)

# Run by another interpreter. A torch that is there but does not import (a missing driver library) is no use.
PROBE = """
import json, sys
try:
    import torch
    v = torch.version
    found = dict(version=torch.__version__, hip=v.hip, cuda=v.cuda, folder=torch.__path__[0])
except Exception as e:
    found = dict(error=f"{type(e).__name__}: {e}")
json.dump(found, sys.stdout)
"""


class SetupError(Exception):
    """Something the person at the keyboard has to change; the message says what."""


@dataclasses.dataclass(frozen=True)
class Torch:
    """A torch that some interpreter imports. folder: of the package, e.g. /opt/x/site-packages/torch."""

    version: str
    hip: str | None
    cuda: str | None
    folder: str

    @property
    def kind(self) -> str:
        return "ROCm" if self.hip else "CUDA" if self.cuda else "CPU"


@dataclasses.dataclass(frozen=True)
class State:
    """What a finished installation was made from. request: "auto" or TORCH_SPEC and TORCH_INDEX_URL."""

    request: str
    from_host: bool
    project: str
    extras: tuple[str, ...]


def probe_torch(python: str) -> Torch | None:
    """The torch that `python` imports, or None."""
    # A folder called torch in the working directory is not the host's torch.
    done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, cwd="/", check=False)
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return None
    return None if "error" in found else Torch(**found)


def supported_range(pyproject: str) -> list[tuple[str, str]]:
    """The bounds of the torch requirement, e.g. [(">=", "2.11"), ("<", "2.15")].

    A regular expression rather than tomllib: an older Python must get as far as the message about its age.
    """
    line = re.search(r'"torch((?:[<>]=?[\d.]+,?)+)"', pyproject)
    if not line:
        raise SetupError('pyproject.toml: no requirement of the form "torch>=A,<B" in it')
    return re.findall(r"([<>]=?)([\d.]+)", line[1])


def say_range(bounds: Sequence[tuple[str, str]]) -> str:
    return "torch" + ",".join(relation + bound for relation, bound in bounds)


def in_range(version: str, bounds: Sequence[tuple[str, str]]) -> bool:
    """PEP 440 comparison as far as bounds by release go: 2.15.0a0 is neither >= 2.15 nor < 2.15."""
    number, rest = re.match(r"([\d.]*\d)(.*)", version).groups()  # type: ignore[union-attr]
    early = bool(re.match(r"[-._]?(a|b|rc|dev|alpha|beta|pre)", rest))
    release = _padded(number)

    def holds(relation: str, bound: tuple[int, ...]) -> bool:
        if relation == ">=":
            return release > bound or (release == bound and not early)
        if relation == ">":
            return release > bound
        if relation == "<=":
            return release <= bound
        return release < bound

    return all(holds(relation, _padded(bound)) for relation, bound in bounds)


def _padded(number: str) -> tuple[int, ...]:
    parts = [int(p) for p in number.split(".")]
    return tuple(parts + [0] * (4 - len(parts)))


def usable_host_torch(python: str, bounds: Sequence[tuple[str, str]]) -> Torch | None:
    """The host's torch when it is worth keeping: built for a GPU and supported. Says so when it is not."""
    torch = probe_torch(python)
    if torch is None or torch.kind == "CPU":
        return None
    if in_range(torch.version, bounds):
        return torch
    say(
        f"the host's {torch.kind} torch {torch.version} is not used: supported is {say_range(bounds)}; "
        "TORCH_SPEC and TORCH_INDEX_URL choose another (README, Installation)"
    )
    return None


def base_python(venv: Path) -> str:
    """The interpreter to build on: this one, or the one beneath it when .venv itself is activated."""
    if Path(sys.prefix).resolve() == venv.resolve():
        return str(getattr(sys, "_base_executable", sys.executable))
    return sys.executable


def create(venv: Path, python: str, host: Torch | None) -> None:
    """A new venv; with `host`, one that imports that very torch."""
    shutil.rmtree(venv, ignore_errors=True)
    run([python, "-m", "venv", *(["--system-site-packages"] if host else []), str(venv)])
    if host is None:
        return
    seen = probe_torch(venv_python(venv))
    if seen is None or seen.folder != host.folder:
        # The host's Python is a venv or conda environment of its own: "system" means what lies beneath that.
        site_packages(venv).joinpath("host_torch.pth").write_text(str(Path(host.folder).parent) + "\n")
        seen = probe_torch(venv_python(venv))
    if seen is None or seen.folder != host.folder:
        raise SetupError(
            f"{venv} cannot see the host's torch at {host.folder}; set TORCH_SPEC={DEFAULT_TORCH_SPEC} for one of its own"
        )


def venv_python(venv: Path) -> str:
    return str(venv / "bin/python")


def has_pip(venv: Path) -> bool:
    command = [venv_python(venv), "-c", "import pip"]
    return (
        Path(command[0]).exists()
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


def site_packages(venv: Path) -> Path:
    return next((venv / "lib").glob("python3*/site-packages"))


def install(venv: Path, kept: Torch | None, spec: str, index_url: str, extras: Sequence[str]) -> None:
    """torch first unless `kept` is there already, then the project, which may not change torch."""
    python = venv_python(venv)
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    if not sys.stdout.isatty():
        pip.append("--quiet")
    if kept is None:
        say(f"installing {spec}" + (f" from {index_url}" if index_url else ""))
        run([*pip, *shlex.split(spec), *(["--index-url", index_url] if index_url else [])])
    torch = probe_torch(python)
    if torch is None:
        raise SetupError(f"{python} does not import torch; see why with: {python} -c 'import torch'")
    held = venv / "held.txt"
    held.write_text(f"torch=={torch.version}\n")
    if "test" in extras and needs_triton(python):
        extras = [*extras, "triton"]
    say(
        f"{'keeping' if kept else 'has'} torch {torch.version} ({torch.kind}); installing nybble and what it needs"
    )
    wanted = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    run([*pip, "--constraint", str(held), "--editable", wanted])


def needs_triton(python: str) -> bool:
    """Whether PyPI's triton is to be added. ROCm's has another distribution name but the same files: never over it."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return False
    look = "import sys, importlib.util; sys.exit(importlib.util.find_spec('triton') is not None)"
    return subprocess.run([python, "-c", look], cwd="/", check=False).returncode == 0


def read_state(venv: Path) -> State | None:
    """None when there is no finished installation of ours that still runs."""
    try:
        raw = json.loads((venv / "nybble.json").read_text())
        state = State(raw["request"], raw["from_host"], raw["project"], tuple(raw["extras"]))
    except (OSError, ValueError, KeyError):
        return None
    return state if (venv / "bin/python").exists() else None


def make_ready(venv: Path, extras: Sequence[str], spec: str, index_url: str) -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    request = f"{spec} {index_url}".strip() or "auto"
    project = hashlib.sha256(pyproject.encode()).hexdigest()
    state = read_state(venv)
    if state and (state.request, state.project) == (request, project) and set(extras) <= set(state.extras):
        return

    python = base_python(venv)
    bounds = supported_range(pyproject)
    host = usable_host_torch(python, bounds) if request == "auto" else None
    there = probe_torch(venv_python(venv)) if has_pip(venv) else None
    kept = host
    if state:
        fits = state.from_host == bool(host)
        extras = sorted({*extras, *state.extras})
    else:
        # Made by hand, or left by an installation that was interrupted: a torch in it is somebody's choice.
        fits = has_pip(venv) and bool(there or not host)
        if there and request == "auto" and in_range(there.version, bounds):
            kept = there
    if not fits:
        check_venv_module()
        say(f"creating {venv}")
        create(venv, python, host)
    (venv / "nybble.json").unlink(missing_ok=True)
    install(venv, kept, spec or DEFAULT_TORCH_SPEC, index_url, extras)
    torch = probe_torch(venv_python(venv))
    if torch is None or not in_range(torch.version, bounds):
        found = f"torch {torch.version}" if torch else "no torch"
        raise SetupError(f"{venv} has {found}; accepted: {say_range(bounds)}. Change TORCH_SPEC")
    state = State(request, bool(host), project, tuple(extras))
    (venv / "nybble.json").write_text(json.dumps(dataclasses.asdict(state)))


def check_venv_module() -> None:
    if not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise SetupError(
            f"{sys.executable} cannot create virtual environments: on Debian and Ubuntu install python3-venv "
            f"(or python{version}-venv), or name another Python with make PYTHON=..."
        )


@contextlib.contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Two make commands at once (serve and test) take turns."""
    import fcntl

    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def run(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SetupError(f"this command failed (exit {done.returncode}): {shlex.join(command)}")


def say(text: str) -> None:
    print(f"nybble: {text}", file=sys.stderr, flush=True)


def main() -> int:
    if sys.version_info < OLDEST_PYTHON:
        say(
            f"{sys.executable} is Python {platform.python_version()}; 3.11 or newer is needed: make PYTHON=python3.12 ..."
        )
        return 1
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("extras", nargs="*", default="", choices=["", "test", "dev"], metavar="EXTRA")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    args = parser.parse_args()
    spec, index_url = os.environ.get("TORCH_SPEC", ""), os.environ.get("TORCH_INDEX_URL", "")
    try:
        with one_at_a_time(args.venv.with_name(args.venv.name + ".lock")):
            make_ready(args.venv, args.extras, spec, index_url)
    except SetupError as e:
        say(str(e))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
