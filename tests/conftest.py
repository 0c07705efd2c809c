"""What every test shares."""

from __future__ import annotations

import os

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Markers that need something of the machine skip in one place, with one wording (.ci/allowed_skips.txt)."""
    if item.get_closest_marker("gpu") and not _gpu_is_there():
        pytest.skip("needs a ROCm or CUDA GPU")
    if item.get_closest_marker("checkpoints") and not os.environ.get("NYBBLE_CHECKPOINTS"):
        pytest.skip("NYBBLE_CHECKPOINTS is not set: it names a folder of model folders")


def _gpu_is_there() -> bool:
    import torch

    return torch.cuda.is_available()
