"""Dense copies: the exactly dequantised weight beside the packed one, for prefill through the library's GEMM.

A copy costs four times its int4 weight and pays where M is large. Whether there are copies is the memory plan's
decision (service/memory.py), for all layers or none.
"""

from __future__ import annotations

import torch

from nybble.kernels.linear.reference import dequantize
from nybble.kernels.packing import W4A16Weight
from nybble.kernels.target import Target

# gfx11's caches alias rows whose byte stride is a multiple of 2048; one 128-byte line moves a row off it.
_CLIFF_BYTES = 2048
_PAD_BYTES = 128
# Rows dequantised at once: bounds the float32 temporaries to 64 MiB at K = 4096.
_CHUNK_ELEMENTS = 4 << 20


def row_stride(k: int, dtype: torch.dtype, target: Target) -> int:
    """Elements from one row of a copy to the next: K, moved off the cache-alias stride on gfx11."""
    row_bytes = k * dtype.itemsize
    if target.kind == "rocm" and target.arch.startswith("gfx11") and row_bytes % _CLIFF_BYTES == 0:
        return k + _PAD_BYTES // dtype.itemsize
    return k


def dense_bytes(n: int, k: int, dtype: torch.dtype, target: Target) -> int:
    """Bytes of the copy of an [N, K] weight, row padding included."""
    return n * row_stride(k, dtype, target) * dtype.itemsize


def dense_copy(weight: W4A16Weight, dtype: torch.dtype, device: torch.device, target: Target) -> torch.Tensor:
    """[N, K] of `dtype` on `device`, bit-identical to `dequantize`, in rows that may be padded."""
    n, k = weight.n, weight.k
    storage = torch.zeros(n, row_stride(k, dtype, target), dtype=dtype, device=device)
    copy = storage[:, :k]
    rows = max(1, _CHUNK_ELEMENTS // k)
    for start in range(0, n, rows):
        copy[start : start + rows] = dequantize(_rows(weight, start, start + rows), dtype).to(device)
    return copy


def _rows(weight: W4A16Weight, start: int, stop: int) -> W4A16Weight:
    stop = min(stop, weight.n)
    zeros = None if weight.zeros is None else weight.zeros[start:stop]
    return W4A16Weight(
        weight.q[start:stop],
        weight.scales[start:stop],
        zeros,
        weight.g_idx,
        weight.group_size,
        stop - start,
        weight.k,
    )
