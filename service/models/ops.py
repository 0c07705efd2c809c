"""What a block does between its GEMMs, as a table: plain torch, or the fused Triton kernels of a GPU.

The decoder reads the same either way. `project` gives what a linear layer computes in the form the other ops of the same
table take: finished, or in parts that they add up as they read (kernels/parts.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from nybble.kernels.activation import GATED
from nybble.kernels.attention import AttentionBackend
from nybble.kernels.linear import Parts, W4A16Linear
from nybble.kernels.norm import RmsNorm
from nybble.kernels.rope import RopeAngles, RopeConfig, RopeTable, rotate
from nybble.service.models.config import DecoderConfig
from nybble.service.models.layers import Linear

# Weights of the norms of queries and keys, laid out by `head_norm`, and eps.
HeadNorm = tuple[torch.Tensor, float]


class Ops(ABC):
    """interleaves: a fused gate_up layer is to be loaded with its rows alternating gate and up."""

    interleaves: ClassVar[bool]

    @abstractmethod
    def __init__(self, config: DecoderConfig, attention: AttentionBackend) -> None: ...

    @abstractmethod
    def rope(
        self, config: RopeConfig, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> RopeTable | RopeAngles:
        """The rotation's table in the form that `turns` takes."""

    @abstractmethod
    def head_norm(self, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float) -> HeadNorm:
        """q_weight, k_weight [D] in the form that `to_cache` takes."""

    @abstractmethod
    def turns(self, ropes: Sequence[Any], positions: torch.Tensor) -> Sequence[Any]:
        """Per rope, what `to_cache` needs of it for one step's positions int [T]."""

    @abstractmethod
    def norm(self, x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        """norm(x), [T, C]."""

    @abstractmethod
    def project(self, layer: Linear, h: torch.Tensor) -> Any:
        """h [T, K] through a linear layer."""

    @abstractmethod
    def to_cache(self, index: int, qkv: Any, norm: HeadNorm | None, turn: Any, plan: Any) -> torch.Tensor:
        """A projected qkv: heads normed where the model does, rotated, keys and values of layer `index` cached; the
        queries [T, H, D]."""

    @abstractmethod
    def add(
        self, x: torch.Tensor, part: Any, part_norm: RmsNorm | None, norm: RmsNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A projected half of a block added to x [T, C], which may be changed, after its own norm if it has one:
        (x, norm(x))."""

    @abstractmethod
    def gate(self, layer: Linear, h: torch.Tensor, interleaved: bool) -> torch.Tensor:
        """h [T, C] through gate_up and the gated activation, [T, I]."""


class PlainOps(Ops):
    """torch alone: the CPU's, and any device's whose attention is not paged."""

    interleaves = False

    def __init__(self, config: DecoderConfig, attention: AttentionBackend) -> None:
        self.config = config
        self.attention = attention
        self._gated = GATED[config.activation]

    def rope(
        self, config: RopeConfig, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> RopeTable:
        return RopeTable(config, max_positions, dtype, device)

    def head_norm(self, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float) -> HeadNorm:
        c = self.config
        weights = (q_weight.expand(c.heads, -1), k_weight.expand(c.kv_heads, -1))
        return torch.cat(weights).unsqueeze(0), eps

    def turns(self, ropes: Sequence[Any], positions: torch.Tensor) -> Sequence[Any]:
        c = self.config
        return [rope.at(positions, c.heads + c.kv_heads, c.kv_heads) for rope in ropes]

    def norm(self, x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        return norm(x)

    def project(self, layer: Linear, h: torch.Tensor) -> torch.Tensor:
        return layer(h)

    def to_cache(
        self, index: int, qkv: torch.Tensor, norm: HeadNorm | None, turn: Any, plan: Any
    ) -> torch.Tensor:
        c = self.config
        rotary = c.heads + c.kv_heads
        qkv = qkv.view(qkv.shape[0], rotary + c.kv_heads, c.head_dim)
        if norm is not None:
            weight, eps = norm
            qk = torch.nn.functional.rms_norm(qkv.narrow(1, 0, rotary), (c.head_dim,), None, eps) * weight
            qkv = torch.cat((qk, qkv.narrow(1, rotary, c.kv_heads)), dim=1)
        qkv = rotate(qkv, *turn)
        self.attention.write(index, qkv.narrow(1, c.heads, 2 * c.kv_heads), plan)
        return qkv.narrow(1, 0, c.heads)

    def add(
        self, x: torch.Tensor, part: torch.Tensor, part_norm: RmsNorm | None, norm: RmsNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if part_norm is not None:
            part = part_norm(part)
        x = torch.add(x, part, alpha=self.config.residual_scale)
        return x, norm(x)

    def gate(self, layer: Linear, h: torch.Tensor, interleaved: bool) -> torch.Tensor:
        return self._gated(layer(h))


class FusedOps(Ops):
    """The Triton kernels of kernels/fused, with the paged cache of kernels/attention/paged.py."""

    interleaves = True

    def __init__(self, config: DecoderConfig, attention: AttentionBackend) -> None:
        from nybble.kernels.attention.paged import PagedAttention
        from nybble.kernels.fused import activation, kv_write, norm

        assert isinstance(attention, PagedAttention)
        self.config = config
        self.attention = attention
        self._add_norm = norm.add_rms_norm
        self._write = kv_write.norm_rope_write
        self._gated = activation.gated

    def rope(
        self, config: RopeConfig, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> RopeAngles:
        return RopeAngles(config, max_positions, device)

    def head_norm(self, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float) -> HeadNorm:
        return torch.stack((q_weight, k_weight)), eps

    def turns(self, ropes: Sequence[Any], positions: torch.Tensor) -> Sequence[Any]:
        positions = positions.to(torch.int32)
        return [(rope.packed, positions) for rope in ropes]

    def norm(self, x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        out: torch.Tensor = self._add_norm(x, None, None, norm.weight, norm.eps, None, 0.0, 1.0)
        return out

    def project(self, layer: Linear, h: torch.Tensor) -> Parts:
        return layer.parts(h) if isinstance(layer, W4A16Linear) else Parts.of(layer(h))

    def to_cache(self, index: int, qkv: Parts, norm: HeadNorm | None, turn: Any, plan: Any) -> torch.Tensor:
        angles, positions = turn
        weight, eps = norm or (None, 0.0)
        cache = self.attention.cache[index]
        q: torch.Tensor = self._write(qkv.values, qkv.bias, weight, angles, positions, plan.slots, cache, eps)
        return q

    def add(
        self, x: torch.Tensor, part: Parts, part_norm: RmsNorm | None, norm: RmsNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own, own_eps = (None, 0.0) if part_norm is None else (part_norm.weight, part_norm.eps)
        scale = self.config.residual_scale
        return x, self._add_norm(x, part.values, part.bias, norm.weight, norm.eps, own, own_eps, scale)

    def gate(self, layer: Linear, h: torch.Tensor, interleaved: bool) -> torch.Tensor:
        activation = self.config.activation
        if isinstance(layer, W4A16Linear) and interleaved:
            y = layer.gated(h, activation)
        else:
            y = self.project(layer, h)
        if isinstance(y, torch.Tensor):
            return y
        out: torch.Tensor = self._gated(y.values, y.bias, interleaved, h.dtype, activation)
        return out


# By the attention back end's name.
OPS: dict[str, type[Ops]] = {"sdpa": PlainOps, "triton": FusedOps}
