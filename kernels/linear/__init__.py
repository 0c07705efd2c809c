"""The W4A16 linear layer: y[..., N] = x[..., K] @ dequantised(w)[N, K]^T + bias.

weight (logical) --select()--> kernel --prepare()--> state, the one resident copy
x [..., K] --route(M)--> path --apply(state, x, bias, path)--> y [..., N]
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

import torch

from nybble.kernels.linear.backends import Broken, Selection, select
from nybble.kernels.linear.config import LinearConfig, LinearKernel, SavedWeight
from nybble.kernels.linear.dense import dense_bytes, dense_copy
from nybble.kernels.linear.recorder import RECORDER
from nybble.kernels.linear.reference import dequantize, linear_reference
from nybble.kernels.linear.route import PATHS, Decision, RouteRange, decide, route, route_table
from nybble.kernels.packing import W4A16Weight
from nybble.kernels.parts import Parts
from nybble.kernels.target import Target, detect

__all__ = [
    "PATHS",
    "RECORDER",
    "Broken",
    "Decision",
    "LinearConfig",
    "LinearKernel",
    "Parts",
    "RouteRange",
    "SavedWeight",
    "Selection",
    "W4A16Linear",
    "decide",
    "dense_bytes",
    "dense_copy",
    "dequantize",
    "linear_reference",
    "route",
    "route_table",
    "select",
]

T = TypeVar("T")


class W4A16Linear:
    """One int4 linear layer on one device.

    weight  the logical weight, or the kernel's state as it was saved; not kept: the kernel's prepared state is the only
            resident copy
    bias    [N] or None; kept in the activation type
    dtype   activation type
    kernel  None: the first of the target's table that fits
    dense   also keep the exactly dequantised weight, for the "dense" path: four times the int4 weight's bytes, so only
            where the memory plan allows it. Derived data: part of no checkpoint

    label   what kind of layer this is ("qkv"), for the recorder
    broken  paths that failed their self-check here (see kernels/selfcheck.py), never taken

    Raises ValueError when no kernel can implement the layer, with every kernel's reason.
    """

    def __init__(
        self,
        weight: W4A16Weight | SavedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        target: Target | None = None,
        kernel: LinearKernel | None = None,
        dense: bool = False,
        broken: Broken = frozenset(),
        label: str = "",
    ) -> None:
        self.config = weight.config if isinstance(weight, SavedWeight) else LinearConfig.of(weight, dtype)
        self.device = device
        self.target = detect(device) if target is None else target
        if kernel is None:
            self.selection = select(self.config, self.target, broken)
        else:
            self.selection = Selection(kernel, "asked for", {})
        self.kernel = self.selection.kernel
        if isinstance(weight, SavedWeight):
            self.state = self._restored(weight)
        else:
            self.state = self.kernel.prepare(weight, self.config, device)
        if bias is not None and tuple(bias.shape) != (self.config.n,):
            raise ValueError(f"bias: given {list(bias.shape)}, accepted [{self.config.n}]")
        self.bias = None if bias is None else bias.to(device, dtype)
        self.available = tuple(p for p in self.kernel.paths if (self.kernel.name, p) not in broken)
        self.dense: torch.Tensor | None = None
        self.dense_build_seconds = 0.0
        if dense and isinstance(weight, W4A16Weight) and (self.kernel.name, "dense") not in broken:
            started = perf_counter()
            self.dense = dense_copy(weight, dtype, device, self.target)
            self.dense_build_seconds = perf_counter() - started
            self.available = (*self.available, "dense")
        self.label = label
        self._path_of_m: dict[int, str] = {}

    def _restored(self, weight: SavedWeight) -> object:
        if weight.layout != self.saved_layout():
            raise ValueError(
                f"saved weight: given layout {weight.layout}, accepted {self.saved_layout()} (kernel {self.kernel.name})"
            )
        return self.kernel.restore(weight.tensors, self.config, self.device)

    def saved_layout(self) -> str | None:
        """See LinearKernel.saved_layout."""
        return self.kernel.saved_layout(self.config, self.target)

    def saved(self) -> dict[str, torch.Tensor]:
        """See LinearKernel.save."""
        return self.kernel.save(self.state)

    @property
    def nbytes(self) -> int:
        """Resident bytes, those of a dense copy left out: the memory plan counts them apart."""
        return self.kernel.nbytes(self.state) + (0 if self.bias is None else self.bias.nbytes)

    def path_for(self, m: int) -> str:
        path = self._path_of_m.get(m)
        if path is None:
            path = self._path_of_m[m] = route(m, self.config, self.target, self.available)
        return path

    def routes(self) -> tuple[RouteRange, ...]:
        """Path, reason and tile for every M."""

        def describe(m: int, path: str) -> str | None:
            return self.kernel.describe(self.config, self.target, m, path)

        return route_table(self.config, self.target, self.available, describe)

    def run(self, x: torch.Tensor, path: str) -> torch.Tensor:
        """x [M, K], M >= 1, through one named path, neither routed nor counted."""
        if path == "dense" and self.dense is not None:
            return torch.nn.functional.linear(x, self.dense, self.bias)
        return self.kernel.apply(self.state, x, self.bias, path)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2:
            return self(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.config.n)
        if x.shape[0] == 0:
            return x.new_empty((0, self.config.n))
        return self._call(x, self.run)

    def parts(self, x: torch.Tensor) -> Parts:
        """x [M, K], M >= 1 -> y before its last addition, for a kernel that makes it while it reads."""
        return self._call(x, self._run_parts)

    def expect_gate(self, activation: str) -> None:
        """`gated` will be called with this activation: lets the kernel compile ahead."""
        self.kernel.expect_gate(self.state, self.config, self.device, activation)

    def gated(self, x: torch.Tensor, activation: str) -> torch.Tensor | Parts:
        """x [M, K], M >= 1, through a layer whose rows alternate gate and up: activation(gate) * up [M, N/2] where the
        path does both at once, else its parts. activation: a key of kernels/activation.py's GATED."""
        return self._call(x, lambda x, path: self._run_gated(x, path, activation))

    def _run_parts(self, x: torch.Tensor, path: str) -> Parts:
        if path == "dense" and self.dense is not None:
            return Parts.of(self.run(x, path))
        return self.kernel.apply_parts(self.state, x, self.bias, path)

    def _run_gated(self, x: torch.Tensor, path: str, activation: str) -> torch.Tensor | Parts:
        y = None if path == "dense" else self.kernel.apply_gated(self.state, x, self.bias, path, activation)
        return self._run_parts(x, path) if y is None else y

    def _call(self, x: torch.Tensor, run: Callable[[torch.Tensor, str], T]) -> T:
        """run(x, path) on the path for x's rows, counted and, in a sampled step, timed."""
        m, k = x.shape
        if k != self.config.k or x.dtype is not self.config.dtype:
            raise ValueError(
                f"x: given {x.dtype} {list(x.shape)}, accepted {self.config.dtype} [M, {self.config.k}]"
            )
        path = self.path_for(m)
        RECORDER.calls[path, RECORDER.phase] += 1
        if not RECORDER.sampling:
            return run(x, path)
        mark = RECORDER.start(x.device)
        y = run(x, path)
        RECORDER.stop(mark, path, self.label, m)
        return y
