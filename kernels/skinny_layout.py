"""The skinny weight layout: one int4 buffer that both RDNA readers, the GEMV and the Triton GEMM, share.

Eight consecutive k-values v0..v7 of a row make one int32 with v0, v2, v4, v6 in bits 0-15 and v1, v3, v5, v7 in
bits 16-31, four bits each, low first (the ExLlama order): a shift by 4p and an AND with 0x000F000F leave the pair
(v[2p], v[2p+1]) in two 16-bit lanes. The words are stored once, as int8 [N, K/2]; the GEMM reads the same storage as
int32 [N, K/8]. Rows may be padded: readers take the row stride from the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from nybble.kernels.packing import PER_WORD, SYMMETRIC_ZERO, W4A16Weight

GROUP_SIZES = (32, 64, 128)
K_MULTIPLE = 16

# gfx1151: packed rows whose byte stride is a multiple of 1024 alias in the vector caches. One cache line moves them off.
_CLIFF_STRIDE_BYTES = {"gfx1151": 1024}
_CLIFF_PAD_BYTES = 128
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class SkinnyWeight:
    """A W4A16 weight in the skinny layout.

    qweight  int8 [N, K/2], unit column stride, row stride a multiple of 4 bytes
    scales   [N, K/G] float16, bfloat16 or float32
    zeros    int32 [N/8, K/G], row n's zero point in word n // 8 at bits 4 * (n % 8), or None when symmetric (z = 8)
    calls    what a kernel has prepared for calls with this weight, by the kernel's own keys
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    n: int
    k: int
    calls: dict[tuple[object, ...], Callable[[torch.Tensor], torch.Tensor]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def words(self) -> torch.Tensor:
        """The same storage as int32 [N, K/8]."""
        return self.qweight.view(torch.int32)

    @property
    def nbytes(self) -> int:
        """Resident bytes, row padding included."""
        parts = (self.qweight, self.scales, self.zeros)
        return sum(t.untyped_storage().nbytes() for t in parts if t is not None)


def row_stride_bytes(k: int, arch: str) -> int:
    """Byte stride of a packed row of k values on `arch`: k / 2, moved off the chip's cache-alias stride if it has one."""
    stride = k // 2
    cliff = _CLIFF_STRIDE_BYTES.get(arch)
    return stride + _CLIFF_PAD_BYTES if cliff and stride % cliff == 0 else stride


def pack(
    weight: W4A16Weight,
    *,
    arch: str,
    device: torch.device | None = None,
    scale_dtype: torch.dtype | None = None,
) -> SkinnyWeight:
    """Lay a logical weight out for `arch` on `device` (default: where it is).

    Works in chunks of rows: beside the result it holds a few MiB. `scale_dtype` None keeps the checkpoint's scale type.
    Raises ValueError for K % 16, a group size outside 32/64/128, act-order, or zero points with N % 8.
    """
    _check(weight)
    device = weight.q.device if device is None else device
    n, k = weight.n, weight.k
    storage = torch.zeros(n, row_stride_bytes(k, arch), dtype=torch.int8, device=device)
    qweight = storage[:, : k // 2]
    words = qweight.view(torch.int32)
    rows = max(1, _CHUNK_BYTES // (k // 2))
    for start in range(0, n, rows):
        chunk = words[start : start + rows]
        chunk.copy_(weight.q[start : start + rows])
        _swap_bits(chunk, 4, 0x00F000F0)
        _swap_bits(chunk, 8, 0x0000FF00)
    scales = weight.scales.to(device=device, dtype=scale_dtype or weight.scales.dtype, copy=True).contiguous()
    zeros = None if weight.zeros is None else pack_zeros(weight.zeros.to(device))
    return SkinnyWeight(qweight, scales, zeros, weight.group_size, n, k)


def unpack(weight: SkinnyWeight) -> W4A16Weight:
    """The exact inverse of `pack`, on the weight's device (scales in the type they are stored in)."""
    q = weight.words.clone(memory_format=torch.contiguous_format)
    _swap_bits(q, 8, 0x0000FF00)
    _swap_bits(q, 4, 0x00F000F0)
    zeros = None if weight.zeros is None else unpack_zeros(weight.zeros)
    return W4A16Weight(q, weight.scales, zeros, None, weight.group_size, weight.n, weight.k)


def pack_zeros(zeros: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K/G] of 0..15 -> int32 [N/8, K/G], eight consecutive rows per word, low nibble first."""
    n, groups = zeros.shape
    if n % PER_WORD:
        raise ValueError(
            f"zero points: given N={n}, accepted a multiple of {PER_WORD} (eight rows share one word)"
        )
    by_word = zeros.view(n // PER_WORD, PER_WORD, groups)
    words = torch.zeros(n // PER_WORD, groups, dtype=torch.int32, device=zeros.device)
    for row in range(PER_WORD):
        words |= by_word[:, row].to(torch.int32) << (4 * row)
    return words


def unpack_zeros(words: torch.Tensor) -> torch.Tensor:
    """int32 [N/8, K/G] -> uint8 [N, K/G]; the exact inverse of `pack_zeros`."""
    rows = [((words >> (4 * row)) & 0xF).to(torch.uint8) for row in range(PER_WORD)]
    return torch.stack(rows, dim=1).reshape(words.shape[0] * PER_WORD, words.shape[1])


def dequantize_skinny(weight: SkinnyWeight, dtype: torch.dtype) -> torch.Tensor:
    """(q - z) * s as [N, K] of `dtype`: float32 product, rounded once. Readable, not fast: the tests' reference."""
    words = weight.words
    shifts = torch.tensor([(j // 2) * 4 + (j % 2) * 16 for j in range(PER_WORD)], device=words.device)
    q = ((words.unsqueeze(-1) >> shifts) & 0xF).view(
        weight.n, weight.k // weight.group_size, weight.group_size
    )
    zeros = SYMMETRIC_ZERO if weight.zeros is None else unpack_zeros(weight.zeros).unsqueeze(-1).float()
    return ((q.float() - zeros) * weight.scales.float().unsqueeze(-1)).view(weight.n, weight.k).to(dtype)


def _swap_bits(words: torch.Tensor, shift: int, mask: int) -> None:
    """In place, exchange the bits under `mask` with those `shift` above; its own inverse.

    On natural words, (4, 0x00F000F0) then (8, 0x0000FF00) separates even nibbles from odd ones.
    """
    moved = words >> shift
    moved.bitwise_xor_(words).bitwise_and_(mask)
    words.bitwise_xor_(moved)
    words.bitwise_xor_(moved.bitwise_left_shift_(shift))


def _check(weight: W4A16Weight) -> None:
    shape = f"[N={weight.n}, K={weight.k}], group_size {weight.group_size}"
    if weight.k % K_MULTIPLE:
        raise ValueError(f"skinny layout: given {shape}, accepted K a multiple of {K_MULTIPLE}")
    if weight.group_size not in GROUP_SIZES:
        raise ValueError(
            f"skinny layout: given {shape}, accepted group_size {', '.join(map(str, GROUP_SIZES))}"
        )
    if weight.g_idx is not None:
        raise ValueError(
            "skinny layout: given an act-order weight (g_idx), accepted groups of consecutive k only"
        )
    if weight.zeros is not None and weight.n % PER_WORD:
        raise ValueError(
            f"skinny layout: given {shape} with zero points, accepted N a multiple of {PER_WORD}"
        )
