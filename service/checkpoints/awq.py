"""AWQ files of version `gemm`, as AutoAWQ, GPTQModel and auto-round write them.

Per linear layer: qweight int32 [K, N/8] (N packed; nibble i of a word is column 0, 2, 4, 6, 1, 3, 5, 7 of its eight),
qzeros int32 [K/G, N/8] in the same order, scales [K/G, N].
"""

from __future__ import annotations

from typing import Any

import torch

from nybble.kernels.packing import PER_WORD, SYMMETRIC_ZERO, W4A16Weight, pack_rows, unpack_rows
from nybble.service.checkpoints.base import (
    FLOATS,
    Checkpoint,
    Format,
    Scheme,
    dequantised,
    finite,
    flag,
    group_size_of,
    groups_of,
    is_w4a16,
    refused,
    whole,
)
from nybble.service.checkpoints.overrides import Overrides
from nybble.service.errors import CheckpointError

# Columns repacked at a time: bounds the unpacked temporaries to a few times this many bytes per K.
CHUNK_N = 1024


class Awq(Format):
    packed = "qweight"

    def __init__(self, quantization: dict[str, Any], where: str) -> None:
        version = str(quantization.get("version") or quantization.get("format") or "gemm").lower()
        bits = quantization.get("bits", quantization.get("w_bit"))
        for field, given, fits, accepted in (
            ("bits", bits, (4,), "4"),
            ("version", version, ("gemm",), "gemm"),
        ):
            if given not in fits:
                raise refused(where, field, given, accepted)
        size = "group_size" if "group_size" in quantization else "q_group_size"
        zero_point = flag(quantization, "zero_point", where, not flag(quantization, "sym", where, False))
        scheme = Scheme(4, whole(quantization, size, where), symmetric=not zero_point)
        self._schemes = Overrides(scheme, quantization, where)

    def read(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> W4A16Weight | torch.Tensor:
        scheme = self._schemes.of(module, (4,))
        g = group_size_of(checkpoint, module, k, scheme)
        if n % PER_WORD:
            raise CheckpointError(
                f"{checkpoint.folder}: module {module}: N={n}, accepted a multiple of {PER_WORD} (values in a word)"
            )
        groups = groups_of(k, g)
        words = checkpoint.checked(f"{module}.qweight", (k, n // PER_WORD), (torch.int32,))
        name = f"{module}.scales"
        scales = finite(checkpoint, name, checkpoint.checked(name, (groups, n), FLOATS)).t().contiguous()
        zeros = self._zeros(checkpoint, f"{module}.qzeros", scheme, n, groups)
        if is_w4a16(scheme, k, g):
            return W4A16Weight(
                q=repack(words), scales=scales, zeros=zeros, g_idx=None, group_size=g, n=n, k=k
            )
        codes = natural_rows(words)
        return dequantised(
            checkpoint, module, codes, scales, SYMMETRIC_ZERO if zeros is None else zeros, None, g
        )

    def _zeros(
        self, checkpoint: Checkpoint, name: str, scheme: Scheme, n: int, groups: int
    ) -> torch.Tensor | None:
        """uint8 [N, groups], None where all are 8. Stored zero points count whatever the flag says; only a file without
        zero points may lack the tensor."""
        if scheme.symmetric and not checkpoint.has_tensor(name):
            return None
        words = checkpoint.checked(name, (groups, n // PER_WORD), (torch.int32,))
        zeros = natural_rows(words)
        return None if scheme.symmetric and bool(torch.all(zeros == SYMMETRIC_ZERO)) else zeros


def natural_rows(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, N/8] in AWQ's order -> uint8 [N, R] in natural order."""
    rows, count = words.shape
    # Nibbles 0..3 are the even columns and 4..7 the odd ones, so natural order is a transposition of [2, 4].
    nibbles = unpack_rows(words).view(rows, count, 2, PER_WORD // 2)
    return nibbles.permute(1, 3, 2, 0).reshape(count * PER_WORD, rows)


def repack(words: torch.Tensor) -> torch.Tensor:
    """qweight int32 [K, N/8] in AWQ's order -> int32 [N, K/8] in natural order."""
    k, count = words.shape
    assert k % PER_WORD == 0
    q = torch.empty(count * PER_WORD, k // PER_WORD, dtype=torch.int32)
    step = CHUNK_N // PER_WORD
    for start in range(0, count, step):
        part = pack_rows(natural_rows(words[:, start : start + step]))
        q[start * PER_WORD : start * PER_WORD + part.shape[0]] = part
    return q
