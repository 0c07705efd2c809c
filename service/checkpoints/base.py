"""What all checkpoint formats share: the open checkpoint, and the interface of a format."""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from nybble.kernels.linear import SavedWeight
from nybble.kernels.packing import PER_WORD, W4A16Weight
from nybble.service.checkpoints.files import AHEAD_BYTES, TensorFiles
from nybble.service.errors import CheckpointError
from nybble.service.finite import all_finite
from nybble.service.json_files import FETCH_AGAIN, read_json

if TYPE_CHECKING:
    from nybble.service.checkpoints.prepacked import Prepacked

log = logging.getLogger(__name__)

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
PLAIN = (*FLOATS, torch.float64)  # of weights that are not quantised
INTS = (torch.int32, torch.int64)
# Buffers that transformers once stored; they follow from config.json.
BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "self_attn.masked_bias")
CHUNK_ELEMENTS = 4 << 20  # dequantised at a time: 16 MiB of float32
# What `nybble quantize` learnt beside the weights. JSON, because other tools take every safetensors file for weights.
NOTES = "nybble.json"
MOST_IMPORTANCE = 1e30
HEAD_IMPORTANCE = "lm_head_importance"


# Scales of a quantised KV cache: this server keeps the cache in 16 bits.
KV_SCALES = frozenset(
    {
        *("k_scale", "v_scale", "q_scale", "kv_scale", "prob_output_scale"),
        *("k_zero_point", "v_zero_point", "q_zero_point", "output_scale", "output_zero_point"),
    }
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weight of one module is quantised. group_size -1: one group per row. act_order: g_idx must be there."""

    bits: int
    group_size: int
    symmetric: bool
    act_order: bool = False

    @property
    def per_word(self) -> int:
        """Values in one int32."""
        return 32 // self.bits


class Format(ABC):
    """How one family of tools spells a quantised linear layer.

    packed  the suffix of the tensor that holds the low-bit values; a module without it is not quantised
    """

    packed: ClassVar[str]

    @abstractmethod
    def __init__(self, quantization: dict[str, Any], where: str) -> None:
        """Check config.json's quantization_config. Raises CheckpointError naming the field that is not understood."""

    @abstractmethod
    def read(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> W4A16Weight | torch.Tensor:
        """The logical weight [N, K] of a quantised module, or float32 [N, K] where it is not 4-bit or its groups do not
        divide K. Raises CheckpointError."""


class Checkpoint:
    """One open model folder. Tensors are read one at a time and belong to the caller."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        format: Format,
        on_bytes: Callable[[int, int], None] | None = None,
        drop_cache: bool = False,
        pin: bool = False,
    ) -> None:
        self.folder = folder
        self.config = config
        self._format = format
        self._files = TensorFiles(folder, on_bytes, drop_cache, pin)
        self._modules: set[str] = set()
        self._said: set[str] = set()
        self._prepacked: Prepacked | None = None
        self._drop_cache = drop_cache
        scales = [name for name in self._files.names() if name.rpartition(".")[2] in KV_SCALES]
        if scales:
            self.say(
                f"{len(scales)} scales of a quantised KV cache ({scales[0]} ...) are not used: the cache is kept in 16 bits"
            )

    def say(self, message: str, key: str | None = None) -> None:
        """A warning about this folder, once per key (the message itself unless given)."""
        if (key or message) not in self._said:
            self._said.add(key or message)
            log.warning("%s: %s", self.folder, message)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors in the folder."""
        return self._files.total_bytes

    def names(self) -> list[str]:
        return self._files.names()

    def has_tensor(self, name: str) -> bool:
        return name in self._files

    def expect(self, wanted: Sequence[str]) -> None:
        """Say which modules, tensors and prepacked layers will be asked for next, in order: they are read ahead."""
        saved = [item for item in wanted if self.has_saved(item)]
        window_bytes = AHEAD_BYTES
        if self._prepacked is not None:
            window_bytes //= 2
            self._prepacked.expect(saved, window_bytes)
        rest = [item for item in wanted if not self.has_saved(item)]
        names = [n for item in rest for n in ([item] if item in self._files else self._files.names_of(item))]
        self._files.expect(dict.fromkeys(names), window_bytes)

    @property
    def fingerprint(self) -> str:
        """Of config.json and of the weights' headers and samples of their contents: another one means other weights."""
        told = json.dumps(self.config, sort_keys=True, default=str)
        return hashlib.sha256(f"{told} {self._files.fingerprint}".encode()).hexdigest()

    def use_prepacked(self, layout: str | None) -> None:
        """Take layers from the folder's saved prepacked form of this layout, if it has one that belongs to it."""
        from nybble.service.checkpoints.prepacked import open_prepacked

        self._prepacked = open_prepacked(self.folder, layout, lambda: self.fingerprint, self._drop_cache)

    def has_saved(self, layer: str) -> bool:
        """Whether `saved` has this layer of the decoder ("model.layers.0.qkv")."""
        return self._prepacked is not None and layer in self._prepacked

    def saved(self, layer: str, modules: Sequence[str]) -> SavedWeight:
        """A layer that `has_saved`, made of these modules, whose own weights then need not be read."""
        assert self._prepacked is not None
        for module in modules:
            self._modules.add(module)
            for name in self._files.names_of(module):
                if name != f"{module}.bias":
                    self._files.mark_read(name)
        return self._prepacked.weight(layer)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it. Raises CheckpointError when there is none of that name."""
        return self._files.shape(name)

    def first_rows(self, name: str, rows: int) -> torch.Tensor:
        """The first rows of a tensor, without counting it as read."""
        return self._files.peek(name, rows)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as stored. Raises CheckpointError when there is none of that name."""
        return self._files.tensor(name)

    def checked(self, name: str, shape: Sequence[int], dtypes: Sequence[torch.dtype]) -> torch.Tensor:
        """`tensor`, of exactly this shape and one of these types. Raises CheckpointError otherwise."""
        value = self.tensor(name)
        if tuple(value.shape) != tuple(shape) or value.dtype not in dtypes:
            wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise CheckpointError(
                f"{self.folder}: tensor {name}: given {str(value.dtype).removeprefix('torch.')} {list(value.shape)}, "
                f"accepted {wanted} {list(shape)}; the file does not fit config.json"
            )
        return value

    def linear(self, module: str, n: int, k: int) -> W4A16Weight | torch.Tensor:
        """The weight of a linear layer, y[..., N] = x[..., K] @ w[N, K]^T.

        Returns the logical int4 weight of a quantised module, or a floating [N, K] tensor of one that the quantiser left
        alone, or whose quantisation is not one that int4 kernels know (8 bits, say). Raises CheckpointError naming module and tensor when it is absent or of another shape.
        """
        self._modules.add(module)
        if self.quantized(module):
            return self._format.read(self, module, n, k)
        if self.has_tensor(f"{module}.weight"):
            return self.checked(f"{module}.weight", (n, k), PLAIN)
        raise CheckpointError(
            f"{self.folder}: module {module} has neither {module}.{self._format.packed} nor {module}.weight; "
            "the weights do not belong to this config.json"
        )

    def has(self, module: str) -> bool:
        """Whether `linear` finds a weight for this module."""
        return self.quantized(module) or self.has_tensor(f"{module}.weight")

    def quantized(self, module: str) -> bool:
        """Whether `linear` gives an int4 weight for this module."""
        return self.has_tensor(f"{module}.{self._format.packed}")

    def bias(self, module: str) -> torch.Tensor | None:
        """The bias [N] of a module, or None."""
        name = f"{module}.bias"
        return self.tensor(name) if self.has_tensor(name) else None

    def head_importance(self, k: int, final_norm: str = "model.norm.weight") -> torch.Tensor | None:
        """float32 [K]: how much each input column of the head matters, for `quantize_tensor`; None when unknown.

        As measured by `nybble quantize`; for folders of other tools the square of the final norm's weight, to which
        the mean square of the head's input is roughly proportional. Raises CheckpointError for damaged notes.
        """
        if (self.folder / NOTES).is_file():
            values = read_json(self.folder / NOTES).get(HEAD_IMPORTANCE)
            if values is not None:
                return self._noted(values, k)
        if final_norm not in self._files or self._files.shape(final_norm) != (k,):
            return None
        return self._files.peek(final_norm).float().square()

    def unread(self) -> list[str]:
        """Names nobody asked for, less those that cannot matter.

        Not listed: scales of a KV cache, buffers that old writers stored (inv_freq, attention masks), and a bias of a
        linear module that is zero throughout (some GPTQ writers add one to every layer).
        """
        return [name for name in self._files.unread() if not self._irrelevant(name)]

    def close(self) -> None:
        if self._prepacked is not None:
            self._prepacked.close()
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _noted(self, values: Any, k: int) -> torch.Tensor:
        numbers = isinstance(values, list) and all(
            isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v <= MOST_IMPORTANCE
            for v in values
        )
        if not numbers or len(values) != k:
            raise CheckpointError(
                f"{self.folder / NOTES}: {HEAD_IMPORTANCE}: accepted {k} numbers from 0 to {MOST_IMPORTANCE:g}; remove this file or quantise again"
            )
        return torch.tensor(values, dtype=torch.float32)

    def _irrelevant(self, name: str) -> bool:
        module, _, leaf = name.rpartition(".")
        if leaf in KV_SCALES or name.endswith(BUFFERS):
            return True
        return leaf == "bias" and module in self._modules and not self._files.peek(name).any()


def group_size_of(checkpoint: Checkpoint, module: str, k: int, scheme: Scheme) -> int:
    """The group size in elements; -1 (one group per row) becomes K. Raises CheckpointError when it is no size at all."""
    size = k if scheme.group_size == -1 else scheme.group_size
    if size <= 0:
        raise CheckpointError(
            f"{checkpoint.folder}: module {module}: group_size {scheme.group_size}; accepted a positive number, or -1 for "
            "one group per row"
        )
    return min(size, k)


def is_w4a16(scheme: Scheme, k: int, group_size: int) -> bool:
    """Whether a W4A16Weight can hold it."""
    return scheme.bits == 4 and k % group_size == 0 and k % PER_WORD == 0


def dequantised(
    checkpoint: Checkpoint,
    module: str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | int,
    g_idx: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    """float32 [N, K] of uint8 codes [N, K], scales and zeros [N, groups] and the group of each k, (q - z) * s.

    For what no W4A16Weight holds; said once.
    """
    n, k = codes.shape
    checkpoint.say(
        f"weights that no int4 kernel takes (8 bits, or groups that do not divide K), {module} first: served in 16 bits",
        "dequantised",
    )
    groups = torch.arange(k) // group_size if g_idx is None else g_idx.long()
    weight = torch.empty(n, k, dtype=torch.float32)
    step = max(1, CHUNK_ELEMENTS // k)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        shift = zeros[rows].float()[:, groups] if isinstance(zeros, torch.Tensor) else float(zeros)
        weight[rows] = (codes[rows].float() - shift) * scales[rows].float()[:, groups]
    return weight


def finite(checkpoint: Checkpoint, name: str, scales: torch.Tensor) -> torch.Tensor:
    """Scales as they are. Raises CheckpointError for one that is not finite: every row with it would be lost."""
    if not all_finite(scales):
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {name} holds values that are not finite (inf or nan); {FETCH_AGAIN}"
        )
    return scales


def act_order(checkpoint: Checkpoint, name: str, k: int, group_size: int) -> torch.Tensor | None:
    """int32 [K], the group of each k, from the tensor `name`; None when that is k // group_size (or never set, -1)."""
    g_idx = checkpoint.checked(name, (k,), INTS).to(torch.int64)
    if torch.equal(g_idx, torch.arange(k) // group_size) or bool((g_idx == -1).all()):
        return None
    low, high, groups = int(g_idx.min()), int(g_idx.max()), groups_of(k, group_size)
    if low < 0 or high >= groups:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {name}: given groups {low}..{high}, accepted 0..{groups - 1} "
            f"(K={k}, group_size {group_size}); {FETCH_AGAIN}"
        )
    return g_idx.to(torch.int32)  # narrowed only now: a wide value could come out as a group that exists


def groups_of(k: int, group_size: int) -> int:
    return -(-k // group_size)


def whole(quantization: Mapping[str, Any], field: str, where: str, default: int | None = None) -> int:
    """A whole number of a quantization_config, also one written as 8.0. Raises CheckpointError naming the field."""
    value = quantization.get(field)
    if value is None and default is not None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise refused(where, field, value, "a whole number")
    return value


def names(quantization: Mapping[str, Any], field: str, where: str) -> tuple[str, ...]:
    """A list of names or patterns of a quantization_config. Raises CheckpointError naming the field."""
    value = quantization.get(field)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise refused(where, field, value, "a list of names")
    return tuple(value)


def settings(quantization: Mapping[str, Any], field: str, where: str) -> dict[str, Any]:
    """An object of a quantization_config, {} where there is none. Raises CheckpointError naming the field."""
    value = quantization.get(field)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refused(where, field, value, "an object")
    return value


def flag(quantization: Mapping[str, Any], field: str, where: str, default: bool) -> bool:
    """A yes or no of a quantization_config. Raises CheckpointError naming the field for anything else."""
    value = quantization.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refused(where, field, value, "true or false")
    return value


def refused(where: str, field: str, given: object, accepted: str) -> CheckpointError:
    """The error for a field of quantization_config that is not understood."""
    return CheckpointError(
        f"{where}: {field}: given {given!r}, accepted {accepted}; take another quantisation of this model, or make one "
        "from its 16-bit weights with `nybble quantize`"
    )
