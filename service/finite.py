"""Whether numbers are numbers."""

from __future__ import annotations

import math

import torch


def all_finite(values: torch.Tensor) -> bool:
    """Whether no value is inf or nan. Their sum tells, without a second tensor of that size and in a fifth of the time
    that looking at each takes; it may also be too large by itself."""
    return math.isfinite(float(values.sum(dtype=torch.float32))) or bool(torch.isfinite(values).all())
