"""Launches that overlap the end of the one before: CUDA's programmatic dependent launch, in Triton kernels.

A decode step is hundreds of kernels of a few microseconds, each of which otherwise waits for the last block of the one
before, is then brought onto the chip, and only then asks memory for anything. A dependent launch is on the chip already: it
lets the next one come (`let_next_start`), may read what no launch of the step writes (weights, and the step's own numbers,
which were copied before its first launch), and waits (`wait_for_last`) before it reads or writes anything else. As every
kernel of a step waits, one that goes on knows that all before it have ended and that their results are visible. A program
may return without waiting as long as another one of its launch waits: a launch has ended when its last program has.

Only where `options` says so; elsewhere, RDNA included, nothing of it is compiled.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from nybble.kernels import launch
from nybble.kernels.native import DEPENDENT_FROM_SM

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton without NVIDIA's part
    gdc_launch_dependents = gdc_wait = None


def options(device: torch.device) -> dict[str, Any]:
    """What a launch of a kernel with a constant DEPENDENT is given."""
    if gdc_wait is not None and launch.target_of(device).sm >= DEPENDENT_FROM_SM:
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}


@triton.jit
def let_next_start(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        gdc_wait()


@triton.jit
def let_next_start_and_wait(DEPENDENT: tl.constexpr):
    """Of a kernel that has nothing to read before."""
    let_next_start(DEPENDENT)
    wait_for_last(DEPENDENT)


@triton.jit
def fetch_into_l2(pointers):
    """Begin to bring the lines of these pointers into the cache that all see: harmless whatever is written there meanwhile."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
