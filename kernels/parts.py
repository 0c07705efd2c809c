"""A GEMM's result before its last addition.

A GEMM that splits K leaves S partial products. The kernel that reads the result next can add them, and the bias, as it
loads: that saves a launch after each GEMM of a decode step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Parts:
    """y [M, N] = sum of values over its first dimension + bias.

    values  [1, M, N] of the activation type, or fp32 [S, M, N]
    bias    [N] of the activation type that values do not hold yet, or None
    """

    values: torch.Tensor
    bias: torch.Tensor | None = None

    @classmethod
    def of(cls, y: torch.Tensor) -> Parts:
        """A finished y [M, N]."""
        return cls(y.unsqueeze(0))

    def total(self, dtype: torch.dtype) -> torch.Tensor:
        """y [M, N] of `dtype`."""
        if self.values.shape[0] == 1 and self.bias is None:
            return self.values[0].to(dtype)
        return parts_reference(self.values, self.bias).to(dtype)


def parts_reference(values: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """float32 [M, N]."""
    y = values.to(torch.float32).sum(dim=0)
    return y if bias is None else y + bias.to(torch.float32)
