"""Triton kernels run in its interpreter where there is no GPU; the switch must be set before triton is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
