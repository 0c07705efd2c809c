"""compressed-tensors `pack-quantized`, as llm-compressor and `nybble quantize` write it.

Per linear layer, with P = 32 / bits values in a word and B = 2^(bits - 1): weight_packed int32 [N, K/P] (K packed, low
bits first, value = signed + B), weight_scale [N, groups], weight_shape [2]; asymmetric: weight_zero_point, signed + B
packed along N into int32 [N/P, groups], or in older files the signed value itself as int8 [N, groups]; act-order:
weight_g_idx [K]. Rows whose K is no multiple of P are padded to whole words.
Format: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import regex
import torch

from nybble.kernels.packing import W4A16Weight
from nybble.service.checkpoints.base import (
    FLOATS,
    INTS,
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
    names,
    refused,
    settings,
    whole,
)
from nybble.service.checkpoints.gptq import fields_of
from nybble.service.checkpoints.patterns import compiled, matches
from nybble.service.errors import CheckpointError
from nybble.service.json_files import FETCH_AGAIN

PACK_QUANTIZED = "pack-quantized"
REGEX = "re:"
CLASS = "Linear"
BITS = (4, 8)
# With these, the groups of K are shuffled and weight_g_idx says how; "weight" and "static" keep them in order.
SHUFFLED = ("group", "dynamic", True)
IN_ORDER = ("weight", "static", False, None)


@dataclass(frozen=True, slots=True)
class Group:
    """One entry of config_groups: which modules, and how their weights are quantised."""

    targets: tuple[str, ...]
    scheme: Scheme


class CompressedTensors(Format):
    packed = "weight_packed"

    def __init__(self, quantization: dict[str, Any], where: str) -> None:
        self._where = where
        self._ignore = names(quantization, "ignore", where)
        sparsity = settings(quantization, "sparsity_config", where).get("format")
        if sparsity not in (None, "dense"):
            raise refused(where, "sparsity_config.format", sparsity, "dense weights")
        if settings(quantization, "transform_config", where).get("config_groups"):
            raise refused(where, "transform_config", "rotations at run time", "no transforms")
        groups = settings(quantization, "config_groups", where)
        if not groups:
            raise refused(where, "config_groups", groups, "at least one group of weights")
        default_format = quantization.get("format")
        self._groups = [
            _group(
                settings(groups, name, f"{where}: config_groups"),
                f"{where}: config_groups.{name}",
                default_format,
            )
            for name in groups
        ]
        self._patterns: dict[str, regex.Pattern[str]] = {}
        for pattern in (*self._ignore, *(target for group in self._groups for target in group.targets)):
            if pattern.startswith(REGEX):
                self._patterns[pattern] = compiled(pattern.removeprefix(REGEX), where)

    def read(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> W4A16Weight | torch.Tensor:
        scheme = self._scheme_of(module)
        g = group_size_of(checkpoint, module, k, scheme)
        _check_shape(checkpoint, module, n, k)
        words = -(-k // scheme.per_word)
        q = checkpoint.checked(f"{module}.weight_packed", (n, words), (torch.int32,))
        scale_name, order_name = f"{module}.weight_scale", f"{module}.weight_g_idx"
        scales = finite(checkpoint, scale_name, checkpoint.checked(scale_name, (n, groups_of(k, g)), FLOATS))
        zeros = _zeros(checkpoint, f"{module}.weight_zero_point", scheme, n, groups_of(k, g))
        if scheme.act_order and g != k and not checkpoint.has_tensor(order_name):
            raise CheckpointError(
                f"{checkpoint.folder}: no tensor {order_name}, which this module's actorder needs"
            )
        order = act_order(checkpoint, order_name, k, g) if checkpoint.has_tensor(order_name) else None
        if is_w4a16(scheme, k, g):
            return W4A16Weight(q=q, scales=scales, zeros=zeros, g_idx=order, group_size=g, n=n, k=k)
        codes = fields_of(q, scheme.bits)[:, :k]
        middle = 1 << (scheme.bits - 1)
        return dequantised(checkpoint, module, codes, scales, middle if zeros is None else zeros, order, g)

    def _scheme_of(self, module: str) -> Scheme:
        if any(self._covers(pattern, module) for pattern in self._ignore):
            raise CheckpointError(
                f"{self._where}: module {module} is listed in `ignore`, but its tensors are quantised; "
                "weights and config.json do not belong together"
            )
        # An exact name beats a pattern, a pattern a part of the name, that the class; within one kind the first wins.
        for fits in (_is_name, self._is_match, _is_part, _is_class):
            for group in self._groups:
                if any(fits(target, module) for target in group.targets):
                    return group.scheme
        raise CheckpointError(
            f"{self._where}: module {module} is quantised, but no target of config_groups "
            f"({', '.join(t for group in self._groups for t in group.targets)}) covers it"
        )

    def _is_match(self, target: str, module: str) -> bool:
        return target in self._patterns and matches(self._patterns[target], module, self._where)

    def _covers(self, pattern: str, module: str) -> bool:
        """An `ignore` entry: a name, a part of one, or `re:` and a pattern; decided per module as the file names it."""
        return any(fits(pattern, module) for fits in (_is_name, self._is_match, _is_part))


def _is_name(target: str, module: str) -> bool:
    return target == module


def _is_part(target: str, module: str) -> bool:
    """The name of a parent module, or the last parts of the name."""
    return module.startswith(target + ".") or module.endswith("." + target)


def _is_class(target: str, module: str) -> bool:
    return target == CLASS


def _group(group: dict[str, Any], where: str, default_format: str | None) -> Group:
    weights = settings(group, "weights", where)
    format = group.get("format") or default_format
    if format != PACK_QUANTIZED:
        raise refused(where, "format", format, PACK_QUANTIZED)
    for field in ("input_activations", "output_activations"):
        if group.get(field):
            raise refused(where, field, "quantised activations", "null (16-bit activations)")
    group_size, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy is None:
        # Left out, it follows from the group size, as in the library that wrote it.
        strategy = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    for field, given, accepted in (
        ("num_bits", weights.get("num_bits"), BITS),
        ("type", weights.get("type", "int"), ("int",)),
        ("strategy", strategy, ("group", "channel")),
        ("dynamic", weights.get("dynamic"), (False, None)),
        ("actorder", weights.get("actorder"), (*SHUFFLED, *IN_ORDER)),
    ):
        if given not in accepted:
            raise refused(where, f"weights.{field}", given, " or ".join(map(str, accepted)))
    if strategy == "channel" or group_size is None:
        group_size = -1
    scheme = Scheme(
        bits=whole(weights, "num_bits", f"{where}: weights"),
        group_size=whole({"group_size": group_size}, "group_size", f"{where}: weights"),
        symmetric=flag(weights, "symmetric", f"{where}: weights", True),
        act_order=weights.get("actorder") in SHUFFLED,
    )
    return Group(names(group, "targets", where), scheme)


def _check_shape(checkpoint: Checkpoint, module: str, n: int, k: int) -> None:
    name = f"{module}.weight_shape"
    if not checkpoint.has_tensor(name):
        return
    shape = checkpoint.checked(name, (2,), INTS).tolist()
    if shape != [n, k]:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {name}: given {shape}, accepted {[n, k]}; the file does not fit config.json"
        )


def _zeros(checkpoint: Checkpoint, name: str, scheme: Scheme, n: int, groups: int) -> torch.Tensor | None:
    """uint8 [N, groups] from either spelling; None for a symmetric weight."""
    if scheme.symmetric:
        if checkpoint.has_tensor(name):
            checkpoint.tensor(name)  # older writers store a useless 0 for symmetric weights
        return None
    if not checkpoint.has_tensor(name):
        raise CheckpointError(f"{checkpoint.folder}: no tensor {name}, which an asymmetric weight needs")
    packed = (-(-n // scheme.per_word), groups)
    value = checkpoint.tensor(name)
    if value.dtype == torch.int32 and tuple(value.shape) == packed:
        return fields_of(value.t().contiguous(), scheme.bits)[:, :n].t().contiguous()
    if tuple(value.shape) != (n, groups) or value.dtype not in (torch.int8, *INTS):
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {name}: given {str(value.dtype).removeprefix('torch.')} {list(value.shape)}, "
            f"accepted int32 {list(packed)} (packed) or int8 {[n, groups]} (signed)"
        )
    middle = 1 << (scheme.bits - 1)
    # Before anything is narrowed: a wide value could come out as one that is accepted.
    if value.numel() and (int(value.min()) < -middle or int(value.max()) >= middle):
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {name}: given {int(value.min())}..{int(value.max())}, accepted "
            f"{-middle}..{middle - 1}; {FETCH_AGAIN}"
        )
    return (value.to(torch.int16) + middle).to(torch.uint8)
