"""What all checkpoint formats share: the open checkpoint, and the interface of a format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import torch

from nybble.kernels.packing import PER_WORD, W4A16Weight
from nybble.service.checkpoints.files import TensorFiles
from nybble.service.errors import CheckpointError
from nybble.service.json_files import read_json

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTS = (torch.int32, torch.int64)
# What `nybble quantize` learnt beside the weights. JSON, because other tools take every safetensors file for weights.
NOTES = "nybble.json"
HEAD_IMPORTANCE = "lm_head_importance"


class Format(ABC):
    """How one family of tools spells a quantised linear layer.

    packed  the suffix of the tensor that holds the 4-bit values; a module without it is not quantised
    ignored suffixes of tensors this format may carry and nothing here needs
    """

    packed: ClassVar[str]
    ignored: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __init__(self, quantization: dict[str, Any], where: str) -> None:
        """Check config.json's quantization_config. Raises CheckpointError naming the field that is not understood."""

    @abstractmethod
    def read(self, checkpoint: Checkpoint, module: str, n: int, k: int) -> W4A16Weight:
        """The logical weight [N, K] of a quantised module. Raises CheckpointError."""


class Checkpoint:
    """One open model folder. Tensors are read one at a time and belong to the caller."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        format: Format,
        on_bytes: Callable[[int, int], None] | None = None,
    ) -> None:
        self.folder = folder
        self.config = config
        self._format = format
        self._files = TensorFiles(folder, on_bytes)
        self._modules: set[str] = set()

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors in the folder."""
        return self._files.total_bytes

    def names(self) -> list[str]:
        return self._files.names()

    def has_tensor(self, name: str) -> bool:
        return name in self._files

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

        Returns the logical int4 weight of a quantised module, or the plain floating [N, K] tensor of one that the
        quantiser left alone. Raises CheckpointError naming module and tensor when it is absent or of another shape.
        """
        self._modules.add(module)
        if self.quantized(module):
            return self._format.read(self, module, n, k)
        if self.has_tensor(f"{module}.weight"):
            return self.checked(f"{module}.weight", (n, k), FLOATS)
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

        Not listed: tensors the format declares irrelevant, and a bias of a linear module that is zero throughout
        (some GPTQ writers add one to every layer).
        """
        return [name for name in self._files.unread() if not self._irrelevant(name)]

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _noted(self, values: Any, k: int) -> torch.Tensor:
        numbers = isinstance(values, list) and all(isinstance(v, int | float) and v >= 0 for v in values)
        if not numbers or len(values) != k:
            raise CheckpointError(
                f"{self.folder / NOTES}: {HEAD_IMPORTANCE}: accepted {k} numbers >= 0; remove this file or quantise again"
            )
        return torch.tensor(values, dtype=torch.float32)

    def _irrelevant(self, name: str) -> bool:
        module, _, leaf = name.rpartition(".")
        if leaf in self._format.ignored:
            return True
        return leaf == "bias" and module in self._modules and not self._files.peek(name).any()


def group_size_of(folder: Path, module: str, k: int, group_size: int) -> int:
    """The group size in elements; -1 (one group per row) becomes K. Raises CheckpointError when K does not fit."""
    size = k if group_size == -1 else group_size
    if size <= 0 or k % size or k % PER_WORD:
        raise CheckpointError(
            f"{folder}: module {module}: K={k} with group_size {group_size}; accepted a K that is a multiple of "
            f"{PER_WORD} and of group_size (-1: one group)"
        )
    return size


def act_order(checkpoint: Checkpoint, name: str, k: int, group_size: int) -> torch.Tensor | None:
    """int32 [K], the group of each k, from the tensor `name`; None when that is k // group_size (or never set, -1)."""
    g_idx = checkpoint.checked(name, (k,), INTS).to(torch.int32)
    if torch.equal(g_idx, torch.arange(k, dtype=torch.int32) // group_size) or bool((g_idx == -1).all()):
        return None
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= k // group_size:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {name}: given groups {low}..{high}, accepted 0..{k // group_size - 1} "
            f"(K={k}, group_size {group_size})"
        )
    return g_idx


def refused(where: str, field: str, given: object, accepted: str) -> CheckpointError:
    """The error for a field of quantization_config that is not understood."""
    return CheckpointError(
        f"{where}: {field}: given {given!r}, accepted {accepted}; take another quantisation of this model, or make one "
        "from its 16-bit weights with `nybble quantize`"
    )
