"""Where Nybble keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/nybble, or ~/.cache/nybble."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nybble"


def kernel_cache_folder() -> Path:
    """Where compiled kernels are kept unless told otherwise."""
    return cache_folder() / "kernels"
