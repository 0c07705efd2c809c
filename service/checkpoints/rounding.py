"""From a 16-bit weight to int4: round to nearest, with scale and zero point searched per group.

For a fixed (rounded) vector d = q - z the scale with the least squared error is s = sum(h w d) / sum(h d d), and the
error it leaves is sum(h w w) - sum(h w d)^2 / sum(h d d); h is the importance of each k. The search tries ranges
narrower than the group's own and neighbouring zero points, keeps the best, and refines it by alternating rounding and
that formula. Weighting by the mean square of the activations that meet each k minimises the error of the layer's
output (to first order), which the plain error of the weights does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nybble.kernels.packing import SYMMETRIC_ZERO, W4A16Weight, pack_rows
from nybble.kernels.threads import spread

LEVELS = 15  # steps between the lowest and the highest 4-bit value
RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of the group's own range
REFINEMENTS = 2
CHUNK_ELEMENTS = 1 << 17  # weights searched at a time: their float32 temporaries stay in a core's cache
SCALE_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def quantize_tensor(
    weight: torch.Tensor,
    group_size: int = 32,
    symmetric: bool = False,
    importance: torch.Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
    thorough: bool = True,
) -> W4A16Weight:
    """Quantise one weight [N, K] (floating type, CPU) to 4 bits with groups of group_size along K.

    importance [K]: weight of each k in the squared error, None for equal weights. scale_dtype: None takes the
    weight's own type. thorough: False tries no narrower ranges: a third of
    the time, and for the logits of a head 1 % more error. Raises ValueError for a shape or type that cannot be quantised, or values that are not finite.
    """
    n, k = _checked(weight, group_size)
    dtype = weight.dtype if scale_dtype is None else scale_dtype
    if dtype not in SCALE_TYPES:
        raise ValueError(f"scale type: given {dtype}, accepted float16, bfloat16 or float32")
    groups = k // group_size
    h = None if importance is None else _column_weights(importance, k)
    q = torch.empty(n, k // 8, dtype=torch.int32)
    scales = torch.empty(n, groups, dtype=dtype)
    zeros = torch.empty(n, groups, dtype=torch.uint8)
    rows = max(1, CHUNK_ELEMENTS // k)

    def search(start: int) -> None:
        part = slice(start, min(start + rows, n))
        count = part.stop - start
        # [G, groups of all rows]: sums over a group then run over the first dimension, which vectorises.
        w = weight[part].float().reshape(-1, group_size).t().contiguous()
        if not bool(torch.isfinite(w).all()):
            raise ValueError("the weight holds values that are not finite (inf or nan)")
        weights = None if h is None else _spread(h, group_size, count)
        s, z = _search(w, weights, symmetric, thorough)
        s = s.to(dtype)
        codes = _round(w, s.float(), z).to(torch.uint8)
        q[part] = pack_rows(codes.t().reshape(count, k))
        scales[part] = s.view(count, groups)
        zeros[part] = z.to(torch.uint8).view(count, groups)

    spread(search, range(0, n, rows))
    return W4A16Weight(
        q=q, scales=scales, zeros=None if symmetric else zeros, g_idx=None, group_size=group_size, n=n, k=k
    )


def _checked(weight: torch.Tensor, group_size: int) -> tuple[int, int]:
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(f"weight: given {weight.dtype} {list(weight.shape)}, accepted a floating [N, K]")
    n, k = weight.shape
    if group_size <= 0 or group_size % 8 or k % group_size or not k:
        raise ValueError(
            f"weight [N={n}, K={k}]: group_size {group_size} must be a multiple of 8 that divides K"
        )
    return n, k


def _column_weights(importance: torch.Tensor, k: int) -> torch.Tensor:
    """float32 [K] with mean 1 and no zeros: a column that was never active still breaks ties by its own error."""
    if tuple(importance.shape) != (k,):
        raise ValueError(f"importance: given {list(importance.shape)}, accepted [{k}]")
    h = importance.float()
    return (h / h.mean().clamp(min=1e-30)).clamp(min=1e-6)


def _spread(h: torch.Tensor, group_size: int, rows: int) -> torch.Tensor:
    """[K] -> [G, rows * K/G], the layout of the weights under search."""
    return h.view(-1, group_size).t().repeat(1, rows)


@dataclass(slots=True)
class _Best:
    """The best scale and zero point so far of every group, each [groups]. gain: the part of the error removed."""

    gain: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor

    def offer(self, w: torch.Tensor, h: torch.Tensor | None, scale: torch.Tensor, zero: torch.Tensor) -> None:
        """Round with (scale, zero), take the least-squares scale of the result, keep it where it is better."""
        d = _round(w, scale, zero).sub_(zero)
        hd = d if h is None else d * h
        hwd, hdd = (hd * w).sum(0), (hd * d).sum(0)
        gain = hwd * hwd / hdd.clamp(min=1e-30)
        better = (gain > self.gain) & (hwd > 0)
        self.gain = torch.where(better, gain, self.gain)
        self.scale = torch.where(better, hwd / hdd.clamp(min=1e-30), self.scale)
        self.zero = torch.where(better, zero, self.zero)


def _search(
    w: torch.Tensor, h: torch.Tensor | None, symmetric: bool, thorough: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """w [G, groups] -> scale and zero point, float32 [groups] each. A group of zeros gets scale 0."""
    low, high = w.amin(0).clamp(max=0), w.amax(0).clamp(min=0)
    if symmetric:
        base = torch.maximum(-low, high) * (2 / LEVELS)
        zero = torch.full_like(base, SYMMETRIC_ZERO)
    else:
        base = (high - low) / LEVELS
        zero = (-low / base.clamp(min=1e-30)).round().clamp_(0, LEVELS)
    # In units of the base, so that squares of tiny weights do not vanish.
    w = w / torch.where(base > 0, base, 1.0)
    one = torch.ones_like(base)
    best = _Best(gain=torch.zeros_like(base), scale=one, zero=zero)
    for fraction in RANGES if thorough else RANGES[:1]:
        best.offer(w, h, one * fraction, zero)
    if not symmetric:
        for step in (-1, 1):
            best.offer(w, h, best.scale, (best.zero + step).clamp_(0, LEVELS))
    for _ in range(REFINEMENTS if thorough else 0):
        best.offer(w, h, best.scale, best.zero)
    return best.scale * base, best.zero


def _round(w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """The 4-bit codes, as float32; a scale of 0 (also one too small for its type) codes every weight as 0."""
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return torch.addcmul(zero, w, inverse).round_().clamp_(0, LEVELS)
