"""What a linear layer asks of a kernel, and what every kernel answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from nybble.kernels.packing import W4A16Weight
from nybble.kernels.parts import Parts
from nybble.kernels.target import Target


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """One W4A16 linear layer, y[M, N] = x[M, K] @ w[N, K]^T, described without its data.

    dtype is the activation type: float16, bfloat16 or (references, CPU) float32.
    """

    k: int
    n: int
    dtype: torch.dtype
    group_size: int
    symmetric: bool
    act_order: bool = False

    @classmethod
    def of(cls, weight: W4A16Weight, dtype: torch.dtype) -> LinearConfig:
        return cls(weight.k, weight.n, dtype, weight.group_size, weight.symmetric, weight.g_idx is not None)

    def __str__(self) -> str:
        kind = "uint4b8" if self.symmetric else "uint4"
        order = ", act-order" if self.act_order else ""
        return f"[N={self.n}, K={self.k}] {kind} G={self.group_size} {str(self.dtype).removeprefix('torch.')}{order}"


@dataclass(frozen=True, slots=True)
class SavedWeight:
    """A layer's prepared state, as `LinearKernel.save` gave it, and the layout's name."""

    config: LinearConfig
    layout: str
    tensors: Mapping[str, torch.Tensor]


class LinearKernel(ABC):
    """One way to run a W4A16 linear layer. Stateless: `prepare` makes the state that `apply` reads.

    `paths` names the routes (see route.py) this kernel can serve with the state it prepares. `added_error`: relative
    error it adds on purpose, by rounding activations to int8 say; the self-check allows that much more.
    """

    name: ClassVar[str]
    paths: ClassVar[tuple[str, ...]]
    added_error: float = 0.0

    @abstractmethod
    def can_implement(self, config: LinearConfig, target: Target) -> tuple[bool, str]:
        """(True, why it fits) or (False, why not: the value given and the values accepted)."""

    @abstractmethod
    def prepare(self, weight: W4A16Weight, config: LinearConfig, device: torch.device) -> Any:
        """The kernel's own layout on `device`. The logical weight may be dropped afterwards."""

    @abstractmethod
    def apply(self, state: Any, x: torch.Tensor, bias: torch.Tensor | None, path: str) -> torch.Tensor:
        """x [M, K] of config.dtype, M >= 1 -> [M, N] of the same dtype, bias [N] added."""

    def apply_parts(self, state: Any, x: torch.Tensor, bias: torch.Tensor | None, path: str) -> Parts:
        """As `apply`, without the last addition where the path has one (see kernels/parts.py)."""
        return Parts.of(self.apply(state, x, bias, path))

    def apply_gated(
        self, state: Any, x: torch.Tensor, bias: torch.Tensor | None, path: str, activation: str
    ) -> torch.Tensor | None:
        """[M, N/2] activation(gate) * up in the same launch, of a weight whose rows alternate gate and up; None where
        the path cannot, for this shape."""
        return None

    def expect_gate(self, state: Any, config: LinearConfig, device: torch.device, activation: str) -> None:  # noqa: B027
        """`apply_gated` will be called with this activation: whatever takes time to make ready may begin."""

    @abstractmethod
    def nbytes(self, state: Any) -> int:
        """Resident bytes of a prepared state."""

    def saved_layout(self, config: LinearConfig, target: Target) -> str | None:
        """A name for the layout of prepared states, fit for a file name, where a state may be saved and restored by
        another process: states of one name are interchangeable. None where they may not."""
        return None

    def save(self, state: Any) -> dict[str, torch.Tensor]:
        """The state's tensors by name, of a kernel that has a `saved_layout`."""
        raise ValueError(f"kernel {self.name} has no layout that may be saved")

    def restore(self, tensors: Mapping[str, torch.Tensor], config: LinearConfig, device: torch.device) -> Any:
        """The state of `save`'s tensors. Raises ValueError when they are not of the config's shapes."""
        raise ValueError(f"kernel {self.name} has no layout that may be saved")

    def describe(self, config: LinearConfig, target: Target, m: int, path: str) -> str | None:
        """The tile that `path` uses for M rows, in words, or None where there is none to choose."""
        return None
