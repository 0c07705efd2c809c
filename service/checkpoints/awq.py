"""AWQ files of version `gemm`, as AutoAWQ writes them.

Per linear layer: qweight int32 [K, N/8] (N packed; nibble i of a word is column 0, 2, 4, 6, 1, 3, 5, 7 of its eight),
qzeros int32 [K/G, N/8] in the same order, scales [K/G, N].
"""

from __future__ import annotations

from typing import Any

import torch

from nybble.kernels.packing import PER_WORD, SYMMETRIC_ZERO, W4A16Weight, pack_rows, unpack_rows
from nybble.service.checkpoints.base import FLOATS, Checkpoint, Format, group_size_of, refused
from nybble.service.errors import CheckpointError

# Columns repacked at a time: bounds the unpacked temporaries to a few times this many bytes per K.
CHUNK_N = 1024


class Awq(Format):
    packed = "qweight"

    def __init__(self, quantization: dict[str, Any], where: str) -> None:
        group_size = quantization.get("group_size", quantization.get("q_group_size"))
        self._zero_point = bool(quantization.get("zero_point", True))
        version = str(quantization.get("version") or quantization.get("format") or "gemm").lower()
        for field, given, fits, accepted in (
            ("bits", quantization.get("bits", quantization.get("w_bit")), (4,), "4"),
            ("version", version, ("gemm",), "gemm"),
        ):
            if given not in fits:
                raise refused(where, field, given, accepted)
        if not isinstance(group_size, int):
            raise refused(where, "group_size", group_size, "a whole number")
        self._group_size = group_size

    def read(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> W4A16Weight:
        g = group_size_of(checkpoint.folder, module, k, self._group_size)
        if n % PER_WORD:
            raise CheckpointError(
                f"{checkpoint.folder}: module {module}: N={n}, accepted a multiple of {PER_WORD}"
            )
        words = checkpoint.checked(f"{module}.qweight", (k, n // PER_WORD), (torch.int32,))
        scales = checkpoint.checked(f"{module}.scales", (k // g, n), FLOATS)
        zero_words = checkpoint.checked(f"{module}.qzeros", (k // g, n // PER_WORD), (torch.int32,))
        zeros = natural_rows(zero_words)
        symmetric = not self._zero_point and bool(torch.all(zeros == SYMMETRIC_ZERO))
        return W4A16Weight(
            q=repack(words),
            scales=scales.t().contiguous(),
            zeros=None if symmetric else zeros,
            g_idx=None,
            group_size=g,
            n=n,
            k=k,
        )


def natural_rows(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, N/8] in AWQ's order -> uint8 [N, R] in natural order."""
    rows, count = words.shape
    # Nibbles 0..3 are the even columns and 4..7 the odd ones, so natural order is a transposition of [2, 4].
    nibbles = unpack_rows(words).view(rows, count, 2, PER_WORD // 2)
    return nibbles.permute(1, 3, 2, 0).reshape(count * PER_WORD, rows)


def repack(words: torch.Tensor) -> torch.Tensor:
    """qweight int32 [K, N/8] in AWQ's order -> int32 [N, K/8] in natural order."""
    k, count = words.shape
    q = torch.empty(count * PER_WORD, k // PER_WORD, dtype=torch.int32)
    step = CHUNK_N // PER_WORD
    for start in range(0, count, step):
        part = pack_rows(natural_rows(words[:, start : start + step]))
        q[start * PER_WORD : start * PER_WORD + part.shape[0]] = part
    return q
