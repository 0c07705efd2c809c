"""What the GEMM scripts share beside nybble.kernels.bench."""

from __future__ import annotations

import subprocess

import torch

from nybble.kernels.bench.problem import QWEN3_8B, random_weight, random_x
from nybble.kernels.bench.timing import Timing, time_cold

__all__ = ["DTYPES", "QWEN3_8B", "Timing", "commit", "random_weight", "random_x", "time_cold"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def commit() -> str:
    """The commit measured, or 'unknown' outside a checkout."""
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return run.stdout.strip() or "unknown"
