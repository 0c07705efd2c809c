"""compressed-tensors `pack-quantized`, as llm-compressor and `nybble quantize` write it.

Per linear layer: weight_packed int32 [N, K/8] (K packed, low nibble first, value = signed + 8), weight_scale
[N, K/G], weight_shape [2]; asymmetric: weight_zero_point, signed + 8 packed along N into int32 [N/8, K/G], or in
older files the signed value itself as int8 [N, K/G]; act-order: weight_g_idx [K].
Format: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from nybble.kernels.packing import PER_WORD, SYMMETRIC_ZERO, W4A16Weight, unpack_rows
from nybble.service.checkpoints.base import (
    FLOATS,
    INTS,
    Checkpoint,
    Format,
    act_order,
    group_size_of,
    refused,
)
from nybble.service.errors import CheckpointError

PACK_QUANTIZED = "pack-quantized"
REGEX = "re:"


@dataclass(frozen=True, slots=True)
class Scheme:
    """One entry of config_groups: which modules, and how their weights are quantised. group_size -1: per channel."""

    targets: tuple[str, ...]
    group_size: int
    symmetric: bool


class CompressedTensors(Format):
    packed = "weight_packed"
    # Scales of a quantised KV cache and of quantised activations: this server keeps both in 16 bits.
    ignored = ("k_scale", "v_scale", "q_scale", "kv_scale")

    def __init__(self, quantization: dict[str, Any], where: str) -> None:
        self._where = where
        self._ignore = tuple(str(name) for name in quantization.get("ignore") or ())
        sparsity = (quantization.get("sparsity_config") or {}).get("format")
        if sparsity not in (None, "dense"):
            raise refused(where, "sparsity_config.format", sparsity, "dense weights")
        if (quantization.get("transform_config") or {}).get("config_groups"):
            raise refused(where, "transform_config", "rotations at run time", "no transforms")
        groups = quantization.get("config_groups") or {}
        if not groups:
            raise refused(where, "config_groups", groups, "at least one group of weights")
        default_format = quantization.get("format")
        self._schemes = [
            _scheme(group, f"{where}: config_groups.{name}", default_format) for name, group in groups.items()
        ]
        for pattern in (*self._ignore, *(target for scheme in self._schemes for target in scheme.targets)):
            if pattern.startswith(REGEX):
                _check_pattern(pattern, where)

    def read(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> W4A16Weight:
        scheme = self._scheme_of(module)
        g = group_size_of(checkpoint.folder, module, k, scheme.group_size)
        _check_shape(checkpoint, module, n, k)
        q = checkpoint.checked(f"{module}.weight_packed", (n, k // PER_WORD), (torch.int32,))
        scales = checkpoint.checked(f"{module}.weight_scale", (n, k // g), FLOATS)
        zero_name, order_name = f"{module}.weight_zero_point", f"{module}.weight_g_idx"
        zeros = None
        if not scheme.symmetric:
            zeros = _zeros(checkpoint, zero_name, n, k // g)
        elif checkpoint.has_tensor(zero_name):
            checkpoint.tensor(zero_name)  # older writers store a useless 0 for symmetric weights
        order = act_order(checkpoint, order_name, k, g) if checkpoint.has_tensor(order_name) else None
        return W4A16Weight(q=q, scales=scales, zeros=zeros, g_idx=order, group_size=g, n=n, k=k)

    def _scheme_of(self, module: str) -> Scheme:
        if any(_covers(pattern, module) for pattern in self._ignore):
            raise CheckpointError(
                f"{self._where}: module {module} is listed in `ignore`, but its tensors are quantised; "
                "weights and config.json do not belong together"
            )
        # An exact name beats a pattern, a pattern beats the class name; within one kind the first group wins.
        for fits in (_is_name, _is_match, _is_class):
            for scheme in self._schemes:
                if any(fits(target, module) for target in scheme.targets):
                    return scheme
        raise CheckpointError(
            f"{self._where}: module {module} is quantised, but no target of config_groups "
            f"({', '.join(t for s in self._schemes for t in s.targets)}) covers it"
        )


def _is_name(target: str, module: str) -> bool:
    return target == module


def _is_match(target: str, module: str) -> bool:
    return target.startswith(REGEX) and re.match(target.removeprefix(REGEX), module) is not None


def _check_pattern(pattern: str, where: str) -> None:
    try:
        re.compile(pattern.removeprefix(REGEX))
    except re.error as error:
        raise CheckpointError(
            f"{where}: given the pattern {pattern!r}, accepted a regular expression ({error})"
        ) from error


def _is_class(target: str, module: str) -> bool:
    return target == "Linear"


def _covers(pattern: str, module: str) -> bool:
    """An `ignore` entry is a name, the name of a parent module, or `re:` and a pattern."""
    return _is_match(pattern, module) or module == pattern or module.startswith(pattern + ".")


def _scheme(group: dict[str, Any], where: str, default_format: str | None) -> Scheme:
    weights = group.get("weights") or {}
    format = group.get("format") or default_format
    if format != PACK_QUANTIZED:
        raise refused(where, "format", format, PACK_QUANTIZED)
    for field in ("input_activations", "output_activations"):
        if group.get(field):
            raise refused(where, field, "quantised activations", "null (16-bit activations)")
    for field, accepted in (
        ("num_bits", (4,)),
        ("type", ("int",)),
        ("strategy", ("group", "channel")),
        ("dynamic", (False, None)),
    ):
        if weights.get(field) not in accepted:
            raise refused(where, f"weights.{field}", weights.get(field), " or ".join(map(str, accepted)))
    group_size = weights.get("group_size")
    if weights["strategy"] == "channel" or group_size is None:
        group_size = -1
    targets = tuple(str(target) for target in group.get("targets") or ())
    return Scheme(targets, int(group_size), bool(weights.get("symmetric", True)))


def _check_shape(checkpoint: Checkpoint, module: str, n: int, k: int) -> None:
    name = f"{module}.weight_shape"
    if not checkpoint.has_tensor(name):
        return
    shape = checkpoint.checked(name, (2,), INTS).tolist()
    if shape != [n, k]:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {name}: given {shape}, accepted {[n, k]}; the file does not fit config.json"
        )


def _zeros(checkpoint: Checkpoint, name: str, n: int, groups: int) -> torch.Tensor:
    """uint8 [N, K/G] from either spelling."""
    if not checkpoint.has_tensor(name):
        raise CheckpointError(f"{checkpoint.folder}: no tensor {name}, which an asymmetric weight needs")
    if checkpoint.tensor(name).dtype == torch.int8:
        signed = checkpoint.checked(name, (n, groups), (torch.int8,)).to(torch.int16) + SYMMETRIC_ZERO
        if bool(((signed < 0) | (signed > 15)).any()):
            raise CheckpointError(f"{checkpoint.folder}: tensor {name}: given values outside -8..7")
        return signed.to(torch.uint8)
    words = checkpoint.checked(name, (-(-n // PER_WORD), groups), (torch.int32,))
    return unpack_rows(words.t())[:, :n].t().contiguous()
