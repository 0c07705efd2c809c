"""Every GEMM path against the reference on one small problem, once at start.

A path that is wrong on this machine (a driver, a compiler, a torch build) must be known before it answers anybody.
"""

from __future__ import annotations

import torch

from nybble.kernels.linear import W4A16Linear, linear_reference
from nybble.kernels.linear.backends import BACKENDS
from nybble.kernels.linear.config import LinearConfig
from nybble.kernels.packing import W4A16Weight, pack_rows
from nybble.kernels.target import Target

# Relative to the reference's norm; a wrong group, zero point or nibble order gives errors near 1.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_N, _K, _G, _M = 64, 256, 32, 3


def small_problem(symmetric: bool, seed: int = 0) -> W4A16Weight:
    """[N=64, K=256], G=32, with scales that differ 1000-fold between groups, so that no swapped group hides."""
    gen = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (_N, _K), generator=gen)
    scales = 10.0 ** -(torch.rand(_N, _K // _G, generator=gen) * 3 + 1)
    zeros = None if symmetric else torch.randint(0, 16, scales.shape, generator=gen).to(torch.uint8)
    return W4A16Weight(pack_rows(q), scales.to(torch.float16), zeros, None, _G, _N, _K)


def check_paths(device: torch.device, dtype: torch.dtype, target: Target) -> dict[str, bool]:
    """Path name -> whether all of this target's kernels that serve it computed the reference's numbers."""
    passed: dict[str, bool] = {}
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(_M, _K, generator=gen).to(dtype)
    for symmetric in (True, False):
        weight = small_problem(symmetric)
        bias = torch.randn(_N, generator=gen).to(dtype)
        expected = linear_reference(x, weight, bias)
        for kernel in BACKENDS.get(target.kind, ()):
            if not kernel.can_implement(LinearConfig.of(weight, dtype), target)[0]:
                continue
            layer = W4A16Linear(weight, bias, dtype, device, target, kernel)
            for path in kernel.paths:
                y = layer.run(x.to(device), path).to("cpu", torch.float32)
                error = float((y - expected).norm() / expected.norm())
                passed[path] = passed.get(path, True) and error <= _TOLERANCE[dtype] + kernel.added_error
    return passed
