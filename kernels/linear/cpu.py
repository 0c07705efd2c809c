"""W4A16 on the CPU.

`CpuInt4` runs torch's own int4 GEMM: w = (q - 8) * s + zero, so an asymmetric weight passes zero = (8 - z) * s, which
bf16 rounds once more (0.16 % of a scale step: as much as the output's own rounding). `CpuExact` keeps the exactly
dequantised weight in the activation type: for every shape and type the int4 GEMM refuses or is slow in (measured on
Zen 4: fp16 and fp32 activations cost 30 times the bf16 form).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from nybble.kernels.host_memory import empty
from nybble.kernels.linear.config import LinearConfig, LinearKernel
from nybble.kernels.linear.reference import dequantize
from nybble.kernels.packing import PER_WORD, SYMMETRIC_ZERO, W4A16Weight, unpack_rows
from nybble.kernels.target import Target
from nybble.kernels.threads import spread

_GROUPS = (32, 64, 128, 256)
_N_MULTIPLE = 16
# Weights converted at once by torch's packer: bounds its int32 temporary to 16 MiB, in whole blocks of any layout.
_CHUNK_ELEMENTS = 4 << 20
_CONVERTED_ROWS = 64
# `_blocks` turns this much of each row at a time, which stays in a core's cache, in rows that lie a cache line further
# apart: at a power of two they would all fall into the same few lines of it, and a transposition takes twice as long.
_SLICE_BYTES, _OFF_STRIDE_BYTES = 2048, 64
_WORD_BYTES = 8
_NIBBLE, _LOW_NIBBLES = np.uint64(4), np.uint64(0x0F0F0F0F0F0F0F0F)


@cache
def _int4_mm() -> Callable[..., torch.Tensor]:
    """The one overload, looked up once: resolving the packet at each call costs a microsecond of twenty."""
    op: Callable[..., torch.Tensor] = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    return op


@dataclass(frozen=True, slots=True)
class CpuInt4State:
    """packed: torch's own block layout. scales_and_zeros [K/G, N, 2]."""

    packed: torch.Tensor
    scales_and_zeros: torch.Tensor
    group_size: int


class CpuInt4(LinearKernel):
    name = "cpu_int4"
    paths = ("cpu",)

    def can_implement(self, config: LinearConfig, target: Target) -> tuple[bool, str]:
        if target.kind != "cpu":
            return False, f"device {target.kind}: runs on a CPU"
        if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
            return False, f"torch {torch.__version__} has no _weight_int4pack_mm_for_cpu"
        if config.dtype is not torch.bfloat16:
            return False, f"activations {config.dtype}: fast in bfloat16 alone"
        if config.group_size not in _GROUPS:
            return False, f"group_size {config.group_size}: accepted {_GROUPS}"
        if config.n % _N_MULTIPLE:
            return False, f"N={config.n}: accepted multiples of {_N_MULTIPLE}"
        if config.act_order:
            return False, "act-order: the groups of K must be consecutive"
        return True, "torch's int4 CPU GEMM"

    def prepare(self, weight: W4A16Weight, config: LinearConfig, device: torch.device) -> CpuInt4State:
        groups = weight.k // weight.group_size
        scales_and_zeros = torch.zeros(groups, weight.n, 2, dtype=config.dtype)
        scales_and_zeros[..., 0] = weight.scales.t()
        if weight.zeros is not None:
            shift = (SYMMETRIC_ZERO - weight.zeros.to(torch.float32)) * weight.scales.to(torch.float32)
            scales_and_zeros[..., 1] = shift.t()
        return CpuInt4State(pack_for_cpu(weight.q), scales_and_zeros, weight.group_size)

    def apply(
        self, state: CpuInt4State, x: torch.Tensor, bias: torch.Tensor | None, path: str
    ) -> torch.Tensor:
        y: torch.Tensor = _int4_mm()(x.contiguous(), state.packed, state.group_size, state.scales_and_zeros)
        return y if bias is None else y.add_(bias)

    def nbytes(self, state: CpuInt4State) -> int:
        return state.packed.nbytes + state.scales_and_zeros.nbytes

    def saved_layout(self, config: LinearConfig, target: Target) -> str | None:
        dtype = str(config.dtype).removeprefix("torch.")
        return f"{self.name}-{block_rows()}-{dtype}" if block_rows() else None

    def save(self, state: CpuInt4State) -> dict[str, torch.Tensor]:
        return {"packed": state.packed, "scales_and_zeros": state.scales_and_zeros}

    def restore(
        self, tensors: Mapping[str, torch.Tensor], config: LinearConfig, device: torch.device
    ) -> CpuInt4State:
        shapes = {
            "packed": ((config.n, config.k // 2), torch.uint8),
            "scales_and_zeros": ((config.k // config.group_size, config.n, 2), config.dtype),
        }
        for name, (shape, dtype) in shapes.items():
            t = tensors.get(name)
            if t is None or tuple(t.shape) != shape or t.dtype is not dtype:
                given = None if t is None else f"{t.dtype} {list(t.shape)}"
                raise ValueError(f"saved {name}: given {given}, accepted {dtype} {list(shape)}")
        return CpuInt4State(tensors["packed"], tensors["scales_and_zeros"], config.group_size)


def pack_for_cpu(q: torch.Tensor) -> torch.Tensor:
    """int32 [N, K/8], natural order -> uint8 [N, K/2] in the layout of torch's int4 CPU GEMM.

    That layout is made of independent blocks of rows. torch's own packer wants one int32 per weight and takes 230 ms of
    a core for [14336, 4096]; where its blocks are as `_blocks` makes them, that takes 30 ms.
    """
    n, k = q.shape[0], q.shape[1] * PER_WORD
    packed = empty((n, k // 2), torch.uint8)
    rows = block_rows()
    whole = n // rows * rows if rows else 0
    if whole:
        _blocks(q[:whole], rows, packed[:whole])
    step = max(_CONVERTED_ROWS, _CHUNK_ELEMENTS // k // _CONVERTED_ROWS * _CONVERTED_ROWS)
    for start in range(whole, n, step):
        packed[start : start + step] = _converted(q[start : start + step])
    return packed


def _converted(q: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        unpack_rows(q).to(torch.int32), 1
    )
    return packed


def _blocks(q: torch.Tensor, rows: int, packed: torch.Tensor) -> None:
    """Per block of `rows` rows and per k: byte j holds row j in its low nibble and row j + rows / 2 in its high one.

    Two steps, a slice of a block at a time: exchange the high nibbles of row j with the low ones of row j + rows / 2,
    sixteen nibbles in a word; then transpose bytes. K a multiple of 16.
    """
    half, words = rows // 2, q.shape[1] // 2
    source = q.contiguous().numpy().view(np.uint64).reshape(-1, 2, half, words)
    target = packed.view(-1, words * _WORD_BYTES, rows)

    def pack(index: int) -> None:
        upper, lower = source[index]
        buffer = torch.empty(rows, _SLICE_BYTES + _OFF_STRIDE_BYTES, dtype=torch.uint8)
        turned = buffer.numpy().view(np.uint64)
        exchanged = np.empty((half, _SLICE_BYTES // _WORD_BYTES), dtype=np.uint64)
        for start in range(0, words, _SLICE_BYTES // _WORD_BYTES):
            a, b = (part[:, start : start + _SLICE_BYTES // _WORD_BYTES] for part in (upper, lower))
            width = a.shape[1]
            t, even, odd = exchanged[:, :width], turned[:half, :width], turned[half:, :width]
            np.right_shift(a, _NIBBLE, out=t)
            t ^= b
            t &= _LOW_NIBBLES
            np.bitwise_xor(b, t, out=odd)
            np.left_shift(t, _NIBBLE, out=t)
            np.bitwise_xor(a, t, out=even)
            first, count = start * _WORD_BYTES, width * _WORD_BYTES
            target[index, first : first + count].copy_(buffer[:, :count].t())

    spread(pack, range(source.shape[0]))


@cache
def block_rows() -> int:
    """Rows of a block in this torch build's layout, where it is one that `_blocks` makes; 0 where it is not.

    Found by comparison with torch's own packer: the layout is that of the CPU's vector width, and nobody promises it.
    """
    q = torch.randint(-(2**31), 2**31 - 1, (128, 8), dtype=torch.int64).to(torch.int32)
    expected = _converted(q)
    for rows in (64, 32, 16):
        packed = torch.empty_like(expected)
        _blocks(q, rows, packed)
        if torch.equal(packed, expected):
            return rows
    return 0


class CpuExact(LinearKernel):
    name = "cpu_exact"
    paths = ("cpu",)

    def can_implement(self, config: LinearConfig, target: Target) -> tuple[bool, str]:
        if target.kind != "cpu":
            return False, f"device {target.kind}: runs on a CPU"
        return True, f"exactly dequantised once into {str(config.dtype).removeprefix('torch.')}"

    def prepare(self, weight: W4A16Weight, config: LinearConfig, device: torch.device) -> torch.Tensor:
        return dequantize(weight, config.dtype)

    def apply(
        self, state: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, path: str
    ) -> torch.Tensor:
        return torch.nn.functional.linear(x, state, bias)

    def nbytes(self, state: torch.Tensor) -> int:
        return state.nbytes
