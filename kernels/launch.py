"""What Triton launchers share: which backend compiles for a device, and checks that say what was given and accepted."""

from __future__ import annotations

import functools

import torch

from nybble.kernels.target import Target, detect

# What 16-bit kernels take: activations, weights and caches.
HALF_TYPES = (torch.float16, torch.bfloat16)
INT_TYPES = (torch.int32,)
FLOAT_TYPES = (torch.float32,)


@functools.cache
def target_of(device: torch.device) -> Target:
    return detect(device)


def backend_of(device: torch.device) -> str:
    """ "cuda", "hip", or on a CPU "interpreter": no inline assembly there, and its dot multiplies the bit patterns of
    bf16."""
    if device.type == "cpu":
        return "interpreter"
    return "hip" if torch.version.hip else "cuda"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def given(t: torch.Tensor) -> str:
    """ "float16 [3, 64]" """
    return f"{dtype_name(t.dtype)} {list(t.shape)}"


def check(
    name: str,
    t: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | str, ...],
    device: torch.device,
    row_stride: bool = False,
) -> None:
    """Raise ValueError unless t has one of the types, the shape, the device and contiguous elements.

    shape: sizes, or names of sizes that may be anything. row_stride: the first dimension may have any stride.
    """
    wanted = " or ".join(map(dtype_name, dtypes)) + " [" + ", ".join(map(str, shape)) + "]"
    sizes = len(t.shape) == len(shape) and all(
        isinstance(w, str) or s == w for s, w in zip(t.shape, shape, strict=True)
    )
    if t.dtype not in dtypes or not sizes:
        raise ValueError(f"{name}: given {given(t)}, accepted {wanted}")
    if t.device != device:
        raise ValueError(f"{name}: given {t.device}, accepted {device}, where the other arguments are")
    if not t.numel():
        return
    inner = t[0] if row_stride and t.ndim else t
    if not inner.is_contiguous():
        raise ValueError(
            f"{name}: given strides {list(t.stride())} for {list(t.shape)}, accepted contiguous {wanted}"
            + (" with any stride of the first dimension" if row_stride else "")
        )
    # A view can promise more than its storage holds (as_strided, resized storages): it would be read past its end.
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    end = (t.storage_offset() + last + 1) * t.element_size()
    if end > t.untyped_storage().nbytes():
        raise ValueError(
            f"{name}: given a view that ends at byte {end} of a storage of {t.untyped_storage().nbytes()} bytes, "
            "accepted one inside its storage"
        )


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()
