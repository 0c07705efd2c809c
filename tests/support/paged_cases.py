"""Problems for the paged attention kernels: sequences scattered over a cache of NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nybble.kernels.attention.triton_paged import check_arguments, launch_attention, paged_attention_reference


@dataclass(frozen=True)
class Case:
    """spans: (q_len, kv_len) of each sequence; (1, 0) is one that is not there. splits None: the launcher's choice."""

    spans: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    splits: int | None = None
    streams: int = 0

    def __str__(self) -> str:
        parts = ["+".join(f"{q}of{k}" for q, k in self.spans[:4]) + ("..." if len(self.spans) > 4 else "")]
        parts.append(f"{self.heads}:{self.kv_heads}x{self.dim}")
        parts += [f"{name}={value}" for name, value in self._extras() if value]
        return "-".join(parts)

    def _extras(self) -> list[tuple[str, object]]:
        return [
            ("window", self.window),
            ("cap", self.softcap),
            ("splits", self.splits),
            ("streams", self.streams),
        ]


@dataclass(frozen=True)
class Problem:
    q: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    q_start: torch.Tensor
    kv_len: torch.Tensor

    def to(self, device: torch.device) -> Problem:
        return Problem(*(t.to(device) for t in self.arguments))

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.cache, self.table, self.q_start, self.kv_len


def problem_of(case: Case, dtype: torch.dtype, seed: int = 0) -> Problem:
    """On the CPU. What was never written is NaN; blocks are in no order; keys are large enough for a sharp softmax."""
    gen = torch.Generator().manual_seed(seed)
    size = case.block_size
    counts = [-(-kv_len // size) for _, kv_len in case.spans]
    order = torch.randperm(max(1, sum(counts)), generator=gen).tolist()
    shape = (len(order), 2, case.kv_heads, size, case.dim)
    cache = torch.full(shape, float("nan"), dtype=dtype)
    table = torch.zeros(len(counts), max(1, *counts), dtype=torch.int32)
    for b, (_, kv_len) in enumerate(case.spans):
        for i in range(counts[b]):
            block, filled = order.pop(), min(size, kv_len - i * size)
            table[b, i] = block
            values = torch.randn(2, case.kv_heads, filled, case.dim, generator=gen)
            cache[block, :, :, :filled] = values.to(dtype)
    q_start = torch.tensor([0, *(q for q, _ in case.spans)]).cumsum(0).to(torch.int32)
    kv_len = torch.tensor([length for _, length in case.spans], dtype=torch.int32)
    q = 2 * torch.randn(int(q_start[-1]), case.heads, case.dim, generator=gen)
    return Problem(q.to(dtype), cache, table, q_start, kv_len)


def run(case: Case, problem: Problem) -> torch.Tensor:
    max_q = max(q for q, _ in case.spans)
    check_arguments(*problem.arguments, max_q, case.window, case.softcap, case.streams)
    scale = case.dim**-0.5
    return launch_attention(
        *problem.arguments, max_q, case.window, scale, case.softcap, case.streams, splits=case.splits
    )


def reference(case: Case, problem: Problem) -> torch.Tensor:
    """float32, on the CPU; 0 for sequences that are not there."""
    return paged_attention_reference(
        *(t.cpu() for t in problem.arguments), case.window, case.dim**-0.5, case.softcap
    )
