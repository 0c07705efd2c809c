"""The logical int4 weight, and packing of 4-bit values into int32 words.

Everything a checkpoint reader produces is a `W4A16Weight`: natural element order, no chip in sight. A kernel's
`prepare` turns it into that kernel's own layout.

The number format: w[n, k] = (q[n, k] - z[n, k // G]) * s[n, k // G] with q in 0..15, a scale s and a zero point z
(0..15) per group of G consecutive k. A symmetric weight has z = 8 everywhere and stores none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nybble.kernels.host_memory import empty

SYMMETRIC_ZERO = 8
PER_WORD = 8  # 4-bit values in one int32


@dataclass(frozen=True, slots=True)
class W4A16Weight:
    """One linear layer's int4 weight as the checkpoint means it.

    q       int32 [N, K/8]: eight consecutive k per word, k = 0 in the lowest nibble
    scales  [N, K/G] in the checkpoint's floating type
    zeros   uint8 [N, K/G], values 0..15, or None for a symmetric weight (z = 8)
    g_idx   int32 [K], the group of each k (act-order), or None when the group of k is k // G
    """

    q: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    g_idx: torch.Tensor | None
    group_size: int
    n: int
    k: int

    def __post_init__(self) -> None:
        n, k, g = self.n, self.k, self.group_size
        if k % PER_WORD or g <= 0 or k % g:
            raise ValueError(
                f"W4A16 weight [N={n}, K={k}] with group_size {g}: K must be a multiple of 8 and of group_size"
            )
        _expect("q", self.q, (n, k // PER_WORD), (torch.int32,))
        _expect("scales", self.scales, (n, k // g), (torch.float16, torch.bfloat16, torch.float32))
        if self.zeros is not None:
            _expect("zeros", self.zeros, (n, k // g), (torch.uint8,))
        if self.g_idx is not None:
            _expect("g_idx", self.g_idx, (k,), (torch.int32,))

    @property
    def symmetric(self) -> bool:
        return self.zeros is None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of this weight."""
        parts = (self.q, self.scales, self.zeros, self.g_idx)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)


def _expect(name: str, t: torch.Tensor, shape: tuple[int, ...], dtypes: Sequence[torch.dtype]) -> None:
    if tuple(t.shape) != shape or t.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        given = f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
        raise ValueError(f"{name}: given {given}, accepted {wanted} {list(shape)}")


def pack_rows(values: torch.Tensor) -> torch.Tensor:
    """[R, C] integers 0..15 -> int32 [R, C/8], eight consecutive columns per word, low nibble first.

    Raises ValueError when C % 8 != 0.
    """
    rows, cols = values.shape
    if cols % PER_WORD:
        raise ValueError(f"pack_rows: given {cols} columns, accepted a multiple of {PER_WORD}")
    nibbles = values.to(torch.uint8).view(rows, cols // 2, 2)
    # Two nibbles make a byte; four little-endian bytes make the word: no int32 temporary eight times the size.
    return (nibbles[..., 0] | (nibbles[..., 1] << 4)).contiguous().view(torch.int32)


def unpack_rows(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, W] -> uint8 [R, 8 W] of values 0..15; the exact inverse of `pack_rows`."""
    rows, count = words.shape
    # Flat first: one column may carry any stride, contiguous or not, which a view of another type refuses.
    data = words.reshape(-1).contiguous().view(torch.uint8).view(rows, count * (PER_WORD // 2))
    return torch.stack((data & 0xF, data >> 4), dim=-1).view(rows, count * PER_WORD)


def concat_rows(weights: Sequence[W4A16Weight]) -> W4A16Weight | None:
    """Stack weights along N into one (fused qkv, gate_up), or None when their formats differ.

    A symmetric part next to an asymmetric one gets explicit zero points of 8; parts must agree on K, group size,
    scale type and g_idx.
    """
    first = weights[0]
    for w in weights[1:]:
        same_order = (w.g_idx is None) == (first.g_idx is None) and (
            w.g_idx is None or first.g_idx is None or torch.equal(w.g_idx, first.g_idx)
        )
        if (w.k, w.group_size, w.scales.dtype) != (
            first.k,
            first.group_size,
            first.scales.dtype,
        ) or not same_order:
            return None
    zeros = None
    if any(w.zeros is not None for w in weights):
        zeros = torch.cat(
            [
                torch.full(w.scales.shape, SYMMETRIC_ZERO, dtype=torch.uint8) if w.zeros is None else w.zeros
                for w in weights
            ]
        )
    n = sum(w.n for w in weights)
    return W4A16Weight(
        q=torch.cat([w.q for w in weights], out=empty((n, first.k // PER_WORD), torch.int32)),
        scales=torch.cat([w.scales for w in weights]),
        zeros=zeros,
        g_idx=first.g_idx,
        group_size=first.group_size,
        n=n,
        k=first.k,
    )


def take_rows(weight: W4A16Weight, rows: torch.Tensor) -> W4A16Weight:
    """The weight of the given rows (int64 [N'], in that order)."""
    return replace(
        weight,
        q=weight.q[rows],
        scales=weight.scales[rows],
        zeros=None if weight.zeros is None else weight.zeros[rows],
        n=len(rows),
    )


def interleave_halves(n: int) -> torch.Tensor:
    """int64 [N]: rows 0, N/2, 1, N/2 + 1, ... of a fused gate_up, so that every gate stands beside its up. N even."""
    return torch.arange(n).view(2, -1).t().flatten()
