"""GPTQ files, as AutoGPTQ and GPTQModel write them.

Per linear layer: qweight int32 [K/8, N] (K packed, low nibble first), scales [K/G, N], qzeros int32 [K/G, N/8],
g_idx [K]. The original format ("gptq", v1) stores z - 1, "gptq_v2" stores z.
"""

from __future__ import annotations

from typing import Any

import torch

from nybble.kernels.packing import PER_WORD, W4A16Weight, unpack_rows
from nybble.service.checkpoints.base import FLOATS, Checkpoint, Format, act_order, group_size_of, refused
from nybble.service.errors import CheckpointError

V1, V2 = "gptq", "gptq_v2"
ONE_PER_NIBBLE = 0x11111111


class Gptq(Format):
    packed = "qweight"

    def __init__(self, quantization: dict[str, Any], where: str) -> None:
        self._group_size = _number(quantization, "group_size", where)
        self._symmetric = bool(quantization.get("sym", True))
        self._act_order = bool(quantization.get("desc_act", False))
        self._version = quantization.get("checkpoint_format") or quantization.get("format") or V1
        self._borrows = _written_by_gptqmodel(quantization)
        for field, given, accepted in (
            ("bits", quantization.get("bits"), (4,)),
            ("checkpoint_format", self._version, (V1, V2)),
            ("pack_dtype", quantization.get("pack_dtype", "int32"), ("int32", "torch.int32")),
            ("is_marlin_format", bool(quantization.get("is_marlin_format")), (False,)),
        ):
            if given not in accepted:
                raise refused(where, field, given, " or ".join(map(str, accepted)))
        self._refuse_overrides(quantization, where)

    def read(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> W4A16Weight:
        g = group_size_of(checkpoint.folder, module, k, self._group_size)
        words = checkpoint.checked(f"{module}.qweight", (k // PER_WORD, n), (torch.int32,))
        scales = checkpoint.checked(f"{module}.scales", (k // g, n), FLOATS)
        zeros = self._zeros(checkpoint, f"{module}.qzeros", n, k // g)
        return W4A16Weight(
            q=words.t().contiguous(),
            scales=scales.t().contiguous(),
            zeros=zeros,
            g_idx=self._order(checkpoint, f"{module}.g_idx", k, g),
            group_size=g,
            n=n,
            k=k,
        )

    def _zeros(self, checkpoint: Checkpoint, name: str, n: int, groups: int) -> torch.Tensor | None:
        """uint8 [N, K/G]; None for a symmetric file, whatever its qzeros hold."""
        if self._symmetric:
            if checkpoint.has_tensor(name):
                checkpoint.tensor(name)
            return None
        if n % PER_WORD:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name}: N={n}, accepted a multiple of {PER_WORD}"
            )
        words = checkpoint.checked(name, (groups, n // PER_WORD), (torch.int32,))
        if self._version == V1 and self._borrows:
            # Written as one 32-bit subtraction, so that z = 0 borrows from its neighbour; adding back the same way
            # is the only exact inverse.
            words = words + ONE_PER_NIBBLE
        zeros = unpack_rows(words)
        if self._version == V1 and not self._borrows:
            zeros = (zeros + 1) & 0xF
        return zeros.t().contiguous()

    def _order(self, checkpoint: Checkpoint, name: str, k: int, group_size: int) -> torch.Tensor | None:
        if checkpoint.has_tensor(name):
            return act_order(checkpoint, name, k, group_size)
        if self._act_order and group_size != k:
            raise CheckpointError(f"{checkpoint.folder}: no tensor {name}, which desc_act=true needs")
        return None

    def _refuse_overrides(self, quantization: dict[str, Any], where: str) -> None:
        """`dynamic` maps module patterns to other settings. "-:" only leaves modules unquantised: their tensors say so."""
        same = {
            "bits": 4,
            "group_size": self._group_size,
            "sym": self._symmetric,
            "desc_act": self._act_order,
        }
        for pattern, override in (quantization.get("dynamic") or {}).items():
            if pattern.startswith("-:"):
                continue
            for field, value in (override or {}).items():
                if field in same and value != same[field]:
                    raise refused(
                        where,
                        f"dynamic[{pattern!r}].{field}",
                        value,
                        f"{same[field]}, as for all other modules",
                    )


def _written_by_gptqmodel(quantization: dict[str, Any]) -> bool:
    writers = (quantization.get("meta") or {}).get("quantizer") or ()
    return any(str(w).startswith("gptqmodel") for w in ([writers] if isinstance(writers, str) else writers))


def _number(quantization: dict[str, Any], field: str, where: str) -> int:
    value = quantization.get(field)
    if not isinstance(value, int) or isinstance(value, bool):
        raise refused(where, field, value, "a whole number")
    return value
