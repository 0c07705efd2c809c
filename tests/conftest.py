"""What every test shares."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import quick_interpreter
import torch

# Triton reads this once, when it is first imported, by whichever test comes first.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest_plugins = ["http_fixtures"]


def pytest_collection_finish() -> None:
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        quick_interpreter.patch_once_per_launch(interpreter)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is parametrised by a model folder under $NYBBLE_CHECKPOINTS, so that `-m checkpoints` finds it."""
    root = os.environ.get("NYBBLE_CHECKPOINTS")
    if not root:
        return
    for item in items:
        parameters = getattr(item, "callspec", None)
        values = parameters.params.values() if parameters else ()
        if any(isinstance(v, Path) and v.is_relative_to(root) for v in values):
            item.add_marker("checkpoints")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """One place and one wording for what the machine lacks (.ci/allowed_skips.txt)."""
    if item.get_closest_marker("gpu") and not _gpu_is_there():
        pytest.skip("needs a ROCm or CUDA GPU")
    if item.get_closest_marker("checkpoints") and not os.environ.get("NYBBLE_CHECKPOINTS"):
        pytest.skip("NYBBLE_CHECKPOINTS is not set: it names a folder of model folders")


def _gpu_is_there() -> bool:
    import torch

    return torch.cuda.is_available()
