"""Rotary position embedding.

Dimension pairs (i, i + D/2) of each head turn by the angle position * inv_freq[i] ("half-split" pairing, as in
Hugging Face checkpoints). The variants differ in inv_freq alone; yarn also scales cos and sin.

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), Llama 3.1's model card for "llama3".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """kind: default, linear, llama3, yarn or longrope. The fields below `theta` are read by the kinds that name them.

    rotary_dim: how many of a head's dimensions turn, 0 for all. Where not all do, heads are laid out by `head_order`.
    """

    kind: str
    theta: float
    head_dim: int
    factor: float = 1.0
    rotary_dim: int = 0
    original_max_positions: int = 0  # llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole-number correction range
    attention_factor: float = 1.0  # yarn, longrope; as resolved by the config reader
    short_factors: tuple[float, ...] = ()  # longrope, [rotary_dim / 2]
    long_factors: tuple[float, ...] = ()  # longrope, for contexts beyond original_max_positions

    @property
    def dims(self) -> int:
        return self.rotary_dim or self.head_dim


def _default(c: RopeConfig) -> torch.Tensor:
    exponents = torch.arange(0, c.dims, 2, dtype=torch.int64).to(torch.float32) / c.dims
    return 1.0 / (c.theta**exponents)


def _linear(c: RopeConfig) -> torch.Tensor:
    return _default(c) / c.factor


def _llama3(c: RopeConfig) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, and those between blended linearly."""
    freq = _default(c)
    turns = c.original_max_positions * freq / (2 * math.pi)
    keep = ((turns - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor)).clamp(0.0, 1.0)
    return keep * freq + (1 - keep) * freq / c.factor


def _yarn(c: RopeConfig) -> torch.Tensor:
    """Dimensions that turn more than beta_fast times over the original context keep their frequency, those under
    beta_slow are stretched by `factor`, with a linear ramp over the dimension index between."""

    def dimension_of(turns: float) -> float:
        return c.dims * math.log(c.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(c.theta))

    low, high = dimension_of(c.beta_fast), dimension_of(c.beta_slow)
    if c.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, c.dims - 1)
    if low == high:
        high += 0.001
    index = torch.arange(c.dims // 2, dtype=torch.float32)
    stretch = ((index - low) / (high - low)).clamp(0.0, 1.0)
    freq = _default(c)
    return freq / c.factor * stretch + freq * (1 - stretch)


def _longrope(c: RopeConfig) -> torch.Tensor:
    return _default(c) / torch.tensor(c.short_factors)


INV_FREQ: dict[str, Callable[[RopeConfig], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def for_context(c: RopeConfig, positions: int) -> RopeConfig:
    """The rotation for a context of `positions`: beyond its original one longrope takes its long factors."""
    if c.kind != "longrope" or positions <= c.original_max_positions:
        return c
    return replace(c, short_factors=c.long_factors)


def head_order(c: RopeConfig) -> torch.Tensor | None:
    """int64 [D]: which dimension of a head stands where, so that rotary pairs lie half a head apart even when some
    dimensions do not turn; None when all turn and nothing moves. Scores do not change when queries and keys agree.
    """
    rotary, dim = c.dims, c.head_dim
    if rotary == dim:
        return None
    first, second, still = (
        torch.arange(rotary // 2),
        torch.arange(rotary // 2, rotary),
        torch.arange(rotary, dim),
    )
    half = (dim - rotary) // 2
    return torch.cat((first, still[:half], second, still[half:]))


def cos_sin(config: RopeConfig, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of a head's pairs for positions 0..max_positions-1, float32 [P, D/2] each."""
    config = for_context(config, max_positions)
    # A dimension that stays has frequency 0.
    still = torch.zeros((config.head_dim - config.dims) // 2)
    inv_freq = torch.cat((INV_FREQ[config.kind](config), still))
    angles = torch.arange(max_positions, dtype=torch.float32).unsqueeze(1) * inv_freq
    scale = torch.full_like(inv_freq, config.attention_factor)
    scale[config.dims // 2 :] = 1.0
    return angles.cos() * scale, angles.sin() * scale


class RopeAngles:
    """packed: float32 [P, D], a position's cosines, then its sines; read by kernels/fused/kv_write.py."""

    def __init__(self, config: RopeConfig, max_positions: int, device: torch.device) -> None:
        self.packed = torch.cat(cos_sin(config, max_positions), dim=-1).to(device)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes


class RopeTable:
    """cos and signed sin for positions 0..max_positions-1, [P, 1, D] in the activation type.

    The first half of the sin row is negated, so that rotation is x * cos + swap_halves(x) * sin.
    """

    def __init__(
        self, config: RopeConfig, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        cos, sin = cos_sin(config, max_positions)
        self.cos = torch.cat((cos, cos), dim=-1).unsqueeze(1).to(device, dtype)
        self.sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(device, dtype)

    @property
    def nbytes(self) -> int:
        return self.cos.nbytes + self.sin.nbytes

    def at(self, positions: torch.Tensor, rotated: int, plain: int) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [T] -> (cos, sin), each [T, rotated + plain, D]; one lookup serves every layer of a step.

        The first `rotated` heads turn, the last `plain` ones (values, beside queries and keys) stay as they are.
        """
        cos, sin = self.cos[positions], self.sin[positions]
        still = cos.new_ones(1).expand(len(positions), plain, cos.shape[-1])
        return (
            torch.cat((cos.expand(-1, rotated, -1), still), dim=1),
            torch.cat((sin.expand(-1, rotated, -1), still - 1), dim=1),
        )


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] rotated by `RopeTable.at`'s cos and sin."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rotate_reference(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """The same in float64, one rotation matrix per pair: x [T, H, D], positions [T], inv_freq [D/2]."""
    x = x.to(torch.float64)
    angle = (positions.to(torch.float64).unsqueeze(1) * inv_freq.to(torch.float64)).unsqueeze(1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)
