"""glibc's allocator while a model is loaded.

Left alone it raises its mmap threshold to the size of what was freed, up to 32 MiB; tensors then come from the heaps of
the threads that read them, and what is freed there stays resident: 2.3 GiB beside 4 GiB of weights, measured. With a
fixed threshold every large tensor is a mapping of its own and goes back when it is freed (0.2 GiB).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
LOADING_BYTES = 1 << 20
KEPT_BYTES = (
    16 << 20
)  # of smaller blocks, per thread: else each that is freed goes back, to be zeroed for the next one
# Where glibc's own adjustment ends up in a process that frees large blocks; it cannot be turned on again.
SERVING_BYTES = 32 << 20


@contextmanager
def large_blocks_go_back() -> Iterator[None]:
    """Inside, blocks of a MiB and more return to the system when they are freed; elsewhere than on glibc, nothing."""
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    mallopt(M_MMAP_THRESHOLD, LOADING_BYTES)
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, SERVING_BYTES)
        mallopt(M_TRIM_THRESHOLD, 2 * SERVING_BYTES)


def _mallopt() -> Callable[[int, int], int] | None:
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.gnu_get_libc_version  # noqa: B018  there in glibc alone
        found: Callable[[int, int], int] = libc.mallopt
        return found
    except (OSError, AttributeError):
        return None
