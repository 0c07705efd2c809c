"""Guarded memory for emulated kernels: an access past a buffer is a fault, not a wrong number."""

from __future__ import annotations

import ctypes

_PAGE = 4096
_READ_WRITE = 3
_PRIVATE_ANONYMOUS, _NORESERVE = 0x22, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Region:
    """Anonymous memory between two inaccessible pages; the data ends at the second, to `align` bytes.

    `poison` fills it at first; None leaves it untouched, `reserve=False` maps it lazily.
    """

    def __init__(self, nbytes: int, align: int = 16, poison: int | None = 0xFF, reserve: bool = True) -> None:
        self.nbytes = max(nbytes, 1)
        body = -(-self.nbytes // align) * align
        pages = -(-body // _PAGE) * _PAGE
        self._total = pages + 2 * _PAGE
        flags = _PRIVATE_ANONYMOUS | (0 if reserve else _NORESERVE)
        self._map = _libc.mmap(None, self._total, 0, flags, -1, 0)
        if not self._map or self._map == 2**64 - 1:
            raise MemoryError(f"cannot map {self._total} bytes")
        _libc.mprotect(self._map + _PAGE, pages, _READ_WRITE)
        self.address = self._map + _PAGE + pages - body
        if poison is not None:
            ctypes.memset(self._map + _PAGE, poison, pages)

    def write(self, data: bytes) -> None:
        ctypes.memmove(self.address, data, len(data))

    def read(self, nbytes: int) -> bytes:
        return ctypes.string_at(self.address, nbytes)

    def __del__(self) -> None:
        if getattr(self, "_map", None):
            _libc.munmap(self._map, self._total)
            self._map = None
