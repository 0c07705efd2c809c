"""JSON files of model folders: the one reader and the one writer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nybble.service.errors import CheckpointError

FETCH_AGAIN = "fetch the file again or repeat the quantisation that wrote it"


def read_json(path: Path, missing_is_empty: bool = False) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError when it is unreadable or not an object, and when there is no
    such file, unless missing_is_empty."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
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


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
