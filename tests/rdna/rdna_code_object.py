"""Code objects as the emulator loads them: relocated for an address."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from nybble.kernels import code_object
from nybble.kernels.code_object import Kernel

__all__ = ["CodeObject", "Kernel"]

_RELOCATIONS = 4  # section type


@dataclass(frozen=True)
class _Relocation:
    offset: int
    kind: int
    symbol: int
    addend: int


class CodeObject(code_object.CodeObject):
    """A linked code object that can be given a load address."""

    def __init__(self, blob: bytes) -> None:
        super().__init__(blob)
        self._blob = blob
        self._relocations: list[_Relocation] = []
        for section in self.sections:
            if section[1] == _RELOCATIONS:
                self._read_relocations(section, self.sections[section[6]])

    def load(self, base: int) -> bytearray:
        """The image relocated for a load address."""
        image = bytearray(self.image)
        for r in self._relocations:
            absolute, relative = base + r.symbol + r.addend, r.symbol + r.addend - r.offset
            value, size = {
                13: (base + r.addend, 8),  # RELATIVE64
                3: (absolute, 8),  # ABS64
                5: (relative, 8),  # REL64
                4: (relative, 4),  # REL32
                6: (absolute, 4),  # ABS32
                10: (relative, 4),  # REL32_LO
                11: (relative >> 32, 4),  # REL32_HI
            }[r.kind]
            image[r.offset : r.offset + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        return image

    def _read_relocations(self, section: tuple[int, ...], symbols: tuple[int, ...]) -> None:
        for i in range(section[5] // 24):
            offset, info, addend = struct.unpack_from("<QQq", self._blob, section[4] + 24 * i)
            (value,) = (
                struct.unpack_from("<Q", self._blob, symbols[4] + 24 * (info >> 32) + 8)
                if info >> 32
                else (0,)
            )
            self._relocations.append(_Relocation(offset, info & 0xFFFFFFFF, value, addend))
