"""GPTQ files, as AutoGPTQ, GPTQModel, optimum and auto-round write them.

Per linear layer, with P = 32 / bits values in a word: qweight int32 [K/P, N] (K packed, low bits first), scales
[groups, N], qzeros int32 [groups, N/P], g_idx [K]. The original format ("gptq", v1) stores z - 1, "gptq_v2" stores z.
Format: https://github.com/ModelCloud/GPTQModel
"""

from __future__ import annotations

from typing import Any

import torch

from nybble.kernels.packing import PER_WORD, W4A16Weight, unpack_rows
from nybble.service.checkpoints.base import (
    FLOATS,
    Checkpoint,
    Format,
    Scheme,
    act_order,
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

V1, V2 = "gptq", "gptq_v2"
ONE_PER_FIELD = {4: 0x11111111, 8: 0x01010101}
BITS = (4, 8)

# To tell v1 from v2. Read rightly, the mean of q - z within a group scatters around 0 by less than a step (a group of 32
# normal weights: 0.65 steps), and over many groups it is 0 to a few hundredths; read as the other version it is one
# step off. The versions are exchanged only where the weights look like that and are clearly better the other way.
SAMPLED_LAYERS = 4
SAMPLED_ROWS = 64
LEAST_GROUPS = 16
MOST_SCATTER_STEPS = 2.0
NEAR_STEPS = 0.35
CLEARLY_STEPS = 0.5


class Gptq(Format):
    packed = "qweight"

    def __init__(self, quantization: dict[str, Any], where: str) -> None:
        self._where = where
        version = quantization.get("checkpoint_format") or quantization.get("format") or V1
        self._borrows = _written_by_gptqmodel(quantization)
        for field, given, accepted in (
            ("bits", quantization.get("bits"), BITS),
            ("checkpoint_format", version, (V1, V2)),
            ("pack_dtype", quantization.get("pack_dtype") or "int32", ("int32", "torch.int32")),
            ("is_marlin_format", bool(quantization.get("is_marlin_format")), (False,)),
        ):
            if given not in accepted:
                raise refused(where, field, given, " or ".join(map(str, accepted)))
        self._version: str = version
        self._version_is_certain = False
        scheme = Scheme(
            bits=whole(quantization, "bits", where),
            group_size=whole(quantization, "group_size", where),
            symmetric=flag(quantization, "sym", where, True),
            act_order=flag(quantization, "desc_act", where, False),
        )
        self._schemes = Overrides(scheme, quantization, where)

    def read(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> W4A16Weight | torch.Tensor:
        scheme = self._schemes.of(module, BITS)
        per_word = scheme.per_word
        g = group_size_of(checkpoint, module, k, scheme)
        if k % per_word:
            raise CheckpointError(
                f"{checkpoint.folder}: module {module}: K={k}, accepted a multiple of {per_word} (values in a word)"
            )
        words = checkpoint.checked(f"{module}.qweight", (k // per_word, n), (torch.int32,))
        name = f"{module}.scales"
        scales = finite(checkpoint, name, checkpoint.checked(name, (groups_of(k, g), n), FLOATS))
        zeros = self._zeros(checkpoint, f"{module}.qzeros", scheme, n, groups_of(k, g))
        g_idx = self._order(checkpoint, f"{module}.g_idx", scheme, k, g)
        q, scales = words.t().contiguous(), scales.t().contiguous()
        if is_w4a16(scheme, k, g):
            return W4A16Weight(q=q, scales=scales, zeros=zeros, g_idx=g_idx, group_size=g, n=n, k=k)
        codes = fields_of(q, scheme.bits)
        middle = 1 << (scheme.bits - 1)
        return dequantised(checkpoint, module, codes, scales, middle if zeros is None else zeros, g_idx, g)

    def _zeros(
        self, checkpoint: Checkpoint, name: str, scheme: Scheme, n: int, groups: int
    ) -> torch.Tensor | None:
        """uint8 [N, groups]; None for a symmetric file, whatever its qzeros hold."""
        if scheme.symmetric:
            if checkpoint.has_tensor(name):
                self._check_ignored(checkpoint, name)
            return None
        if n % scheme.per_word:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {name}: N={n}, accepted a multiple of {scheme.per_word}"
            )
        words = checkpoint.checked(name, (groups, n // scheme.per_word), (torch.int32,))
        self._settle_version(checkpoint)
        return self._unpacked(words, scheme.bits, self._version).t().contiguous()

    def _check_ignored(self, checkpoint: Checkpoint, name: str) -> None:
        """Zero points of a file that says it has none are ignored; where they say something else, that is said."""
        words = checkpoint.tensor(name)
        if words.numel() and bool((words != words.flatten()[0]).any()):
            checkpoint.say(
                f"the metadata says sym=true, but the stored zero points differ from one another ({name} first): they "
                "are ignored, as the format says; should the text be wrong, the file is an asymmetric one",
                "sym",
            )

    def _unpacked(self, words: torch.Tensor, bits: int, version: str) -> torch.Tensor:
        """int32 [groups, N/P] -> uint8 [groups, N]."""
        if version == V1 and self._borrows:
            # Written as one 32-bit subtraction, so that z = 0 borrows from its neighbour; adding back the same way
            # is the only exact inverse.
            words = words + ONE_PER_FIELD[bits]
        zeros = fields_of(words, bits)
        if version == V1 and not self._borrows:
            zeros = (zeros + 1) & ((1 << bits) - 1)
        return zeros

    def _settle_version(self, checkpoint: Checkpoint) -> None:
        """Decide between v1 and v2 from the weights (see SAMPLED_LAYERS), once per folder."""
        if self._version_is_certain:
            return
        self._version_is_certain = True
        means = self._group_means(checkpoint)
        if means is None:
            return
        other = V2 if self._version == V1 else V1
        here, there = (float(means[version].mean()) for version in (self._version, other))
        scatter = float(means[other].std())
        if (
            abs(there) < NEAR_STEPS
            and abs(here) - abs(there) > CLEARLY_STEPS
            and scatter < MOST_SCATTER_STEPS
        ):
            checkpoint.say(
                f"the metadata says {self._version}, but the zero points are stored as in {other} (read so, weights are "
                f"{there:+.2f} steps from 0 on average, else {here:+.2f}): read as {other}"
            )
            self._version = other

    def _group_means(self, checkpoint: Checkpoint) -> dict[str, torch.Tensor] | None:
        """Version -> the mean of q - z of many groups; None when there are too few to look at."""
        modules = [
            module
            for module in (
                name.removesuffix(".qzeros") for name in checkpoint.names() if name.endswith(".qzeros")
            )
            if self._schemes.of(module, BITS).bits == 4 and not self._schemes.of(module, BITS).symmetric
        ]
        found: dict[str, list[torch.Tensor]] = {V1: [], V2: []}
        step = max(1, len(modules) // SAMPLED_LAYERS)
        for module in modules[::step][:SAMPLED_LAYERS]:
            stored = checkpoint.first_rows(f"{module}.qzeros", 1 << 30)
            words = checkpoint.first_rows(f"{module}.qweight", SAMPLED_ROWS)
            if stored.dim() != 2 or words.dim() != 2 or {stored.dtype, words.dtype} != {torch.int32}:
                continue
            codes = fields_of(words.t().contiguous(), 4).float()
            n, k = codes.shape
            groups = self._groups(checkpoint, module, k)
            if stored.shape[1] * PER_WORD != n or int(groups.max()) >= stored.shape[0]:
                continue
            seen = torch.unique(groups)
            sums = torch.zeros(n, stored.shape[0]).index_add_(1, groups, codes)[:, seen]
            counts = torch.bincount(groups, minlength=stored.shape[0])[seen]
            for version, means in found.items():
                zeros = self._unpacked(stored, 4, version).t()[:, seen]
                means.append((sums / counts - zeros.float()).flatten())
        count = sum(means.numel() for means in found[V1])
        return (
            {version: torch.cat(means) for version, means in found.items()} if count >= LEAST_GROUPS else None
        )

    def _groups(self, checkpoint: Checkpoint, module: str, k: int) -> torch.Tensor:
        """int64 [k]: the group of each of the first k columns."""
        name = f"{module}.g_idx"
        if checkpoint.has_tensor(name):
            g_idx = checkpoint.first_rows(name, k).long()
            if g_idx.shape == (k,) and bool((g_idx >= 0).all()):
                return g_idx
        size = self._schemes.of(module, BITS).group_size
        return torch.zeros(k, dtype=torch.int64) if size <= 0 else torch.arange(k) // size

    def _order(
        self, checkpoint: Checkpoint, name: str, scheme: Scheme, k: int, group_size: int
    ) -> torch.Tensor | None:
        if checkpoint.has_tensor(name):
            return act_order(checkpoint, name, k, group_size)
        if scheme.act_order and group_size != k:
            raise CheckpointError(f"{checkpoint.folder}: no tensor {name}, which desc_act=true needs")
        return None


def fields_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [R, W] -> uint8 [R, W * 32 / bits], low bits first."""
    if bits == 4:
        return unpack_rows(words)
    return words.contiguous().view(torch.uint8)


def _written_by_gptqmodel(quantization: dict[str, Any]) -> bool:
    meta = quantization.get("meta")
    writers = meta.get("quantizer") if isinstance(meta, dict) else None
    return any(str(w).startswith("gptqmodel") for w in (writers if isinstance(writers, list) else [writers]))
