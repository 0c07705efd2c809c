"""AMD GPU code objects: ELF image, kernel descriptors and their MessagePack metadata.

The layouts are those of LLVM's AMDGPU usage guide (ELF code object, kernel descriptor, code object V3 metadata and later).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any


class MessagePack:
    """A MessagePack decoder, as far as code-object metadata uses the format."""

    _NUMBERS = {
        0xCA: "f",
        0xCB: "d",
        0xCC: "B",
        0xCD: "H",
        0xCE: "I",
        0xCF: "Q",
        0xD0: "b",
        0xD1: "h",
        0xD2: "i",
        0xD3: "q",
    }
    _SIZED = {
        0xC4: "B",
        0xC5: "H",
        0xC6: "I",
        0xD9: "B",
        0xDA: "H",
        0xDB: "I",
        0xDC: "H",
        0xDD: "I",
        0xDE: "H",
        0xDF: "I",
    }
    _CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def value(self) -> Any:
        """The next value. Raises ValueError for a type code-object metadata does not use."""
        code = self._take(1)[0]
        if code < 0x80:
            return code
        if code >= 0xE0:
            return code - 256
        if code in self._CONSTANTS:
            return self._CONSTANTS[code]
        if code in self._NUMBERS:
            return self._number(self._NUMBERS[code])
        if code < 0xC0:
            kind, count = (
                ("map", code & 15)
                if code < 0x90
                else ("list", code & 15)
                if code < 0xA0
                else ("str", code & 31)
            )
        elif code in self._SIZED:
            count = self._number(self._SIZED[code])
            kind = "bytes" if code <= 0xC6 else "str" if code <= 0xDB else "list" if code <= 0xDD else "map"
        else:
            raise ValueError(f"MessagePack type {code:#x}")
        if kind == "map":
            return {self.value(): self.value() for _ in range(count)}
        if kind == "list":
            return [self.value() for _ in range(count)]
        data = self._take(count)
        return data.decode() if kind == "str" else data

    def _number(self, form: str) -> Any:
        return struct.unpack(f">{form}", self._take(struct.calcsize(form)))[0]

    def _take(self, count: int) -> bytes:
        data = self._data[self._at : self._at + count]
        self._at += count
        return data


# The machine field of the ELF flags.
MACHINES = {
    0x36: "gfx1030",
    0x4C: "gfx942",
    0x41: "gfx1100",
    0x46: "gfx1101",
    0x47: "gfx1102",
    0x44: "gfx1103",
    0x43: "gfx1150",
    0x4A: "gfx1151",
    0x55: "gfx1152",
    0x58: "gfx1153",
    0x48: "gfx1200",
    0x4E: "gfx1201",
}
_LOAD, _NOTE = 1, 4  # program headers
_SYMBOL_TABLES = (2, 11)  # section headers
_METADATA_NOTE = 32


@dataclass(frozen=True)
class Kernel:
    """A kernel descriptor and its metadata. `entry` is an offset into the image; segment sizes in bytes."""

    name: str
    entry: int
    meta: dict[str, Any]
    group: int
    private: int
    kernarg: int
    rsrc1: int
    rsrc2: int
    props: int
    preload: int

    @property
    def wave32(self) -> bool:
        return bool(self.props & 0x400)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes: registers of a lane (VGPRs) and of a wave (SGPRs), LDS of a workgroup, scratch of a lane.

    vgpr_spills went to scratch, sgpr_spills to lanes of VGPRs; lds_bytes without dynamic shared memory.
    """

    vgprs: int
    sgprs: int
    lds_bytes: int
    scratch_bytes: int
    vgpr_spills: int
    sgpr_spills: int


class CodeObject:
    """A linked AMD GPU ELF: `image` holds its bytes by virtual address, relocations not yet applied."""

    def __init__(self, blob: bytes) -> None:
        if blob[:5] != b"\x7fELF\x02":
            raise ValueError("not a 64-bit ELF")
        header = struct.unpack_from("<HHIQQQIHHHHHH", blob, 16)
        phoff, shoff, flags, phsize, phcount, shsize, shcount, names = (
            header[i] for i in (4, 5, 6, 8, 9, 10, 11, 12)
        )
        self.mach = MACHINES.get(flags & 0xFF, f"mach_{flags & 0xFF:#x}")
        self._blob = blob
        programs = [struct.unpack_from("<IIQQQQQQ", blob, phoff + i * phsize) for i in range(phcount)]
        if not programs:
            raise ValueError("no program headers: link the object first (ld.lld -shared)")
        self.size = max(p[3] + p[6] for p in programs if p[0] == _LOAD)
        self.image = bytearray(self.size)
        self.meta: dict[str, Any] = {}
        for kind, _, offset, address, _, size, _, _ in programs:
            if kind == _LOAD:
                self.image[address : address + size] = blob[offset : offset + size]
            elif kind == _NOTE:
                self._read_note(blob[offset : offset + size])
        self.sections = sections = [
            struct.unpack_from("<IIQQQQIIQQ", blob, shoff + i * shsize) for i in range(shcount)
        ]
        self.symbols: dict[str, int] = {}
        for section in sections:
            if section[1] in _SYMBOL_TABLES:
                self._read_symbols(section, sections[section[6]])
        self.text = next(
            ((s[3], s[5]) for s in sections if self._string(sections[names][4] + s[0]) == ".text"),
            (0, self.size),
        )

    def kernel(self, name: str) -> Kernel:
        """The descriptor of a kernel by its name."""
        if f"{name}.kd" not in self.symbols:
            known = [s.removesuffix(".kd") for s in self.symbols if s.endswith(".kd")]
            raise ValueError(f"kernel: given {name!r}, accepted one of {known}")
        at = self.symbols[f"{name}.kd"]
        group, private, kernarg = struct.unpack_from("<III", self.image, at)
        (entry,) = struct.unpack_from("<q", self.image, at + 16)
        rsrc1, rsrc2, props, preload = struct.unpack_from("<IIHH", self.image, at + 48)
        kernels = self.meta.get("amdhsa.kernels", [])
        meta: dict[str, Any] = next((k for k in kernels if k[".symbol"] == f"{name}.kd"), {})
        return Kernel(name, at + entry, meta, group, private, kernarg, rsrc1, rsrc2, props, preload)

    def resources(self, name: str) -> Resources:
        """The compiler's account of a kernel. Raises ValueError for a name that is not in the object."""
        meta = self.kernel(name).meta
        return Resources(
            vgprs=meta[".vgpr_count"],
            sgprs=meta[".sgpr_count"],
            lds_bytes=meta[".group_segment_fixed_size"],
            scratch_bytes=meta[".private_segment_fixed_size"],
            vgpr_spills=meta.get(".vgpr_spill_count", 0),
            sgpr_spills=meta.get(".sgpr_spill_count", 0),
        )

    def _string(self, at: int) -> str:
        return self._blob[at : self._blob.index(b"\0", at)].decode()

    def _read_note(self, note: bytes) -> None:
        at = 0
        while at + 12 <= len(note):
            name_size, size, kind = struct.unpack_from("<III", note, at)
            name = note[at + 12 : at + 12 + name_size].rstrip(b"\0")
            at += 12 + (name_size + 3 & ~3)
            if name == b"AMDGPU" and kind == _METADATA_NOTE:
                self.meta = MessagePack(note[at : at + size]).value()
            at += size + 3 & ~3

    def _read_symbols(self, section: tuple[int, ...], strings: tuple[int, ...]) -> None:
        for i in range(section[5] // 24):
            name, _, _, defined_in, value, _ = struct.unpack_from("<IBBHQQ", self._blob, section[4] + 24 * i)
            if defined_in:
                self.symbols[self._string(strings[4] + name)] = value
