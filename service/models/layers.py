"""The linear layers of a decoder beside the int4 one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nybble.kernels.fused.selfcheck import rescore_problem
from nybble.kernels.linear import W4A16Linear
from nybble.kernels.linear.int8 import Int8Linear


class DenseLinear:
    """A 16-bit linear layer: modules a checkpoint left unquantised."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = weight.to(device, dtype)
        self.bias = None if bias is None else bias.to(device, dtype)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


class SideBySide:
    """Parts of a fused layer whose formats differ, run one by one: y = cat(part(x))."""

    def __init__(self, parts: Sequence[W4A16Linear | DenseLinear]) -> None:
        self.parts = tuple(parts)

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


class RescoredHead:
    """An output head read in int4, with the best candidates' logits from its 16-bit rows.

    The int4 product over the whole vocabulary, a quarter of the bytes, finds the RESCORED best tokens; their rows are
    then multiplied exactly. What is sampled comes almost always from those; the others' int4 logits only share in the
    sum. weight [V, C] is the tied embedding, resident anyway, or the untied head itself.
    """

    # On the demo: perplexity +0.1 % over the 16-bit head with 32, +3.1 % with the int4 logits alone.
    RESCORED = 32
    # On a CPU this many rows are faster from the 16-bit rows alone (8.7 against 14.2 ms for 8; V = 49152, K = 576, one
    # thread of an EPYC).
    EXACT_ROWS_ON_CPU = 8

    def __init__(self, screen: W4A16Linear, weight: torch.Tensor) -> None:
        self.screen = screen
        self.weight = weight
        on_cpu = weight.device.type == "cpu"
        self._exact_rows = self.EXACT_ROWS_ON_CPU if on_cpu else None
        self.count = min(self.RESCORED, weight.shape[0])
        # Whether the kernels of kernels/fused/rescore.py do it: torch's topk of a whole vocabulary sorts it on a GPU.
        self.fused = not on_cpu and rescore_problem(weight.device, weight.dtype) is None

    @property
    def nbytes(self) -> int:
        return self.screen.nbytes + self.weight.nbytes

    def is_exact(self, rows: int) -> bool:
        """Whether so many rows are computed from the 16-bit weight alone."""
        return self._exact_rows is not None and rows >= self._exact_rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_exact(x.shape[0]):
            return torch.nn.functional.linear(x, self.weight)
        logits = self.screen(x)
        if self.fused:
            from nybble.kernels.fused.rescore import largest, rescore

            rescore(logits, largest(logits, self.count), self.weight, x)
            return logits
        best = logits.topk(self.count, dim=-1, sorted=False).indices
        exact = torch.bmm(self.weight[best], x.unsqueeze(-1)).squeeze(-1)
        return logits.scatter_(1, best, exact)


Linear = W4A16Linear | DenseLinear | SideBySide | Int8Linear
Head = W4A16Linear | DenseLinear | RescoredHead | Int8Linear
