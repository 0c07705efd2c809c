"""JSON files of model folders: the one reader and the one writer."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from nybble.service.errors import CheckpointError

# The largest there is are tokenizers, of some tens of MB.
LIMIT_BYTES = 512 << 20
FETCH_AGAIN = "fetch the file again or repeat the quantisation that wrote it"


def read_json(path: Path, missing_is_empty: bool = False) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError when it is unreadable or not an object, and when there is no
    such file, unless missing_is_empty."""
    try:
        value = json.loads(_text(path))
    except FileNotFoundError:
        if missing_is_empty:
            return {}
        raise CheckpointError(
            f"{path.parent}: no {path.name} in this folder; give a folder as Hugging Face models are laid out"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}); {FETCH_AGAIN}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: given a JSON {type(value).__name__}, accepted an object")
    return value


def _text(path: Path) -> str:
    """Raises OSError for what is no file, or no JSON file of a model by its size, before it is read."""
    # Without O_NONBLOCK a pipe in place of the file would be waited for.
    with open(
        path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
    ) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError("no file, but a pipe or a device")
        if found.st_size > LIMIT_BYTES:
            raise OSError(f"{found.st_size} bytes, accepted up to {LIMIT_BYTES}")
        return file.read().decode("utf-8")


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
