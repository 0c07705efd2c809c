"""Every GEMM path against the reference on a small problem, once at start.

A path that is wrong on this machine (a driver, a compiler, a torch build) must be known before it answers anybody. It
is left out of the choice, not served.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nybble.kernels.linear import Broken, LinearConfig, LinearKernel, W4A16Linear, linear_reference
from nybble.kernels.linear.backends import BACKENDS
from nybble.kernels.linear.route import limits_for
from nybble.kernels.packing import W4A16Weight, pack_rows
from nybble.kernels.target import Target

log = logging.getLogger(__name__)

# Relative to the reference's norm; a wrong group, zero point or nibble order gives errors near 1.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_N, _K, _G = 64, 256, 32
# The skinny path begins its ring again, and cuts K into parts whose sums are added up, where K is long enough.
_LONG_K = 2048
# Rows of x. The skinny path takes other code for one row, for a few, for a whole tile, and for more where the chip has it.
_ROWS = {"skinny": (1, 3, 16, 17, 33)}
_FEW = (3,)


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """passed: path -> whether every kernel that serves it here computed the reference's numbers. broken: the
    (kernel, path) pairs that did not, with why."""

    passed: dict[str, bool]
    broken: dict[tuple[str, str], str]

    @property
    def left_out(self) -> Broken:
        return frozenset(self.broken)


def small_problem(symmetric: bool, seed: int = 0, k: int = _K) -> W4A16Weight:
    """[N=64, K=256 or k], G=32, with scales that differ 1000-fold between groups, so that no swapped group hides."""
    gen = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (_N, k), generator=gen)
    scales = 10.0 ** -(torch.rand(_N, k // _G, generator=gen) * 3 + 1)
    zeros = None if symmetric else torch.randint(0, 16, scales.shape, generator=gen).to(torch.uint8)
    return W4A16Weight(pack_rows(q), scales.to(torch.float16), zeros, None, _G, _N, k)


def check_paths(device: torch.device, dtype: torch.dtype, target: Target) -> SelfCheck:
    """Run every path of every kernel in the target's table that takes `dtype`, symmetric and not, with a bias."""
    passed: dict[str, bool] = {}
    broken: dict[tuple[str, str], str] = {}
    for symmetric in (True, False):
        small, long = small_problem(symmetric), small_problem(symmetric, k=_LONG_K)
        for kernel in BACKENDS.get(target.kind, ()):
            if not kernel.can_implement(LinearConfig.of(small, dtype), target)[0]:
                continue
            for path in (*kernel.paths, "dense"):
                weight = long if path == "skinny" else small
                problem = _problem(kernel, path, weight, dtype, device, target)
                passed[path] = passed.get(path, True) and problem is None
                if problem is not None:
                    broken.setdefault((kernel.name, path), problem)
                    log.error(
                        "self-check on %s %s: %s, path %s: %s",
                        target.name,
                        target.arch,
                        kernel.name,
                        path,
                        problem,
                    )
    return SelfCheck(passed, broken)


def _problem(
    kernel: LinearKernel,
    path: str,
    weight: W4A16Weight,
    dtype: torch.dtype,
    device: torch.device,
    target: Target,
) -> str | None:
    """What is wrong with one path, or None."""
    gen = torch.Generator().manual_seed(1)
    bias = torch.randn(_N, generator=gen).to(dtype)
    tolerance = _TOLERANCE[dtype] + (0.0 if path == "dense" else kernel.added_error)
    try:
        layer = W4A16Linear(weight, bias, dtype, device, target, kernel, dense=path == "dense")
        most = limits_for(target).skinny_max_m if path == "skinny" else max(_FEW)
        for m in (m for m in _ROWS.get(path, _FEW) if m <= most):
            x = torch.randn(m, weight.k, generator=gen).to(dtype)
            expected = linear_reference(x, weight, bias)
            for name, y, wanted in _ways(layer, path, x.to(device), expected):
                error = float((y.to("cpu", torch.float32) - wanted).norm() / wanted.norm())
                if not error <= tolerance:  # NaN is wrong too
                    return f"relative error {error:.3g}{name} at M={m}, accepted {tolerance:g}"
    except Exception as failure:  # a path that cannot run is left out like one that is wrong
        return f"{type(failure).__name__}: {failure}"
    return None


def _ways(
    layer: W4A16Linear, path: str, x: torch.Tensor, expected: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(what it is, result, reference) of every way in which the path is called on a device of this kind."""
    yield "", layer.run(x, path), expected
    if path == "dense" or layer.target.kind == "cpu":
        return
    parts = layer.kernel.apply_parts(layer.state, x, layer.bias, path)
    yield " in parts", parts.total(x.dtype), expected
    # Whatever the rows are, as if they alternated gate and up.
    gated = layer.kernel.apply_gated(layer.state, x, layer.bias, path, "silu")
    if gated is not None:
        gate, up = expected[:, 0::2], expected[:, 1::2]
        yield " with its gate", gated, torch.nn.functional.silu(gate) * up
