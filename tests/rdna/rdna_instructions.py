"""The instruction table of one code object: each instruction, at its first execution, gets a handler.

Most handlers are tinygrad's, compiled from its ISA semantics. Buffer accesses, WMMA, DPP, LDS swizzles and 16-bit LDS
loads, lane permutes (tinygrad's read no literals), relative moves and SGPR jumps are native code in rdna_driver.c.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rdna_code_object import CodeObject
from rdna_memory import Region

# Flags of a table entry, as rdna_driver.c reads them.
BARRIER, NATIVE, MUBUF, VBUFFER, DPP, DPP_WRITES_EXEC, WMMA, SWIZZLE = 1, 2, 4, 8, 16, 32, 64, 128
NATIVE_JUMP, NATIVE_MOVREL, NATIVE_LDS_D16, NATIVE_PERMLANE = 7, 8, 9, 10  # in the entry's n field

_BUFFER_OPS = (
    "LOAD_U8 LOAD_I8 LOAD_U16 LOAD_I16 LOAD_B32 LOAD_B64 LOAD_B96 LOAD_B128 STORE_B8 STORE_B16 STORE_B32 STORE_B64 "
    "STORE_B96 STORE_B128 LOAD_D16_U8 LOAD_D16_I8 LOAD_D16_B16 LOAD_D16_HI_U8 LOAD_D16_HI_I8 LOAD_D16_HI_B16 "
    "STORE_D16_HI_B8 STORE_D16_HI_B16"
).split()
_BUFFER_NAMES = dict(enumerate(_BUFFER_OPS, start=16)) | {
    51: "ATOMIC_SWAP_B32",
    53: "ATOMIC_ADD_U32",
    54: "ATOMIC_SUB_U32",
    56: "ATOMIC_MIN_I32",
    57: "ATOMIC_MIN_U32",
    58: "ATOMIC_MAX_I32",
    59: "ATOMIC_MAX_U32",
    60: "ATOMIC_AND_B32",
    61: "ATOMIC_OR_B32",
    62: "ATOMIC_XOR_B32",
    86: "ATOMIC_ADD_F32",
}
_BUFFER_CACHE_OPS = (0x2B, 0x2C)
_GLOBAL_CACHE_OPS = (0x2B, 0x2C, 0x4F)
_WMMA_NAMES = (
    "F32_16X16X16_F16 F32_16X16X16_BF16 F16_16X16X16_F16 BF16_16X16X16_BF16 I32_16X16X16_IU8 I32_16X16X16_IU4 "
    "F32_16X16X16_FP8_FP8 F32_16X16X16_FP8_BF8 F32_16X16X16_BF8_FP8 F32_16X16X16_BF8_BF8 I32_16X16X32_IU4"
).split()
_WMMA_INTEGER = (0x44, 0x45, 0x4A)
_LDS_D16_NAMES = ("U8_D16", "U8_D16_HI", "I8_D16", "I8_D16_HI", "U16_D16", "U16_D16_HI")
_JUMPS = {0x47: "S_GETPC_B64", 0x48: "S_SETPC_B64", 0x49: "S_SWAPPC_B64"}
_PERMLANES = {0x25B: "V_PERMLANE16_B32", 0x25C: "V_PERMLANEX16_B32"}
_MOVRELS = {0x42: "V_MOVRELD_B32", 0x43: "V_MOVRELS_B32"}
_DPP_KINDS = {0xFA: 0, 0xE9: 1, 0xEA: 2}  # src0 value -> DPP16, DPP8, DPP8 with fetch-inactive


class Fault(RuntimeError):
    """The kernel did what hardware would not survive, or what this emulator cannot run."""


class Entry(ctypes.Structure):
    """One instruction of the table, shared with rdna_driver.c."""

    _fields_ = (
        ("fn", ctypes.c_void_p),
        ("g", ctypes.c_uint8 * 6),
        ("n", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("count", ctypes.c_uint64),
        ("size", ctypes.c_uint32),
        ("w0", ctypes.c_uint32),
        ("w1", ctypes.c_uint32),
        ("w2", ctypes.c_uint32),
        ("alt", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class Native:
    """An instruction rdna_driver.c runs itself."""

    name: str
    size: int
    flags: int
    n: int = 0


@dataclass(frozen=True)
class Dpp:
    """A DPP instruction taken apart: `plain(v)` encodes it without DPP, reading VGPR v where src0 was."""

    plain: Callable[[int], tuple[int, int, int]]
    size: int
    control: int
    kind: int
    source: int
    is_vop3: bool


class InstructionTable:
    """Handlers and execution counts of one loaded code object."""

    def __init__(self, code: CodeObject, base: int, vgprs: int, emulator: Any) -> None:
        self._code, self._base, self._vgprs, self._emulator = code, base, vgprs, emulator
        self._rdna4 = code.mach.startswith("gfx12")
        slots = code.size // 4 + 64
        self.entries = (Entry * slots)()
        self._names: dict[int, str] = {}
        self._plain_copies = Region(32 * slots, poison=0)

    def executed(self) -> dict[str, int]:
        """Mnemonic -> wave instructions executed."""
        totals: dict[str, int] = {}
        for slot, name in self._names.items():
            totals[name] = totals.get(name, 0) + self.entries[slot].count
        return totals

    def add(self, pc: int) -> None:
        """Give the instruction at pc its handler. Raises Fault when there is none."""
        slot = (pc - self._base) // 4
        words = struct.unpack("<3I", ctypes.string_at(pc, 12))
        native = self._native(words, pc)
        if native is None:
            self._names[slot] = self._translate(self.entries[slot], words, pc)
            return
        entry = self.entries[slot]
        entry.fn, entry.size, entry.flags, entry.n = 1, native.size, native.flags, native.n
        entry.w0, entry.w1, entry.w2 = words
        self._names[slot] = native.name

    def disassemble(self, pc: int) -> str:
        data = ctypes.string_at(pc, 16)
        run = subprocess.run(
            ["llvm-mc-22", "-disassemble", "-triple=amdgcn-amd-amdhsa", f"-mcpu={self._code.mach}"],
            text=True,
            capture_output=True,
            input=" ".join(f"0x{byte:02x}" for byte in data),
        )
        lines = [line.strip() for line in run.stdout.splitlines()]
        return next((line for line in lines if line and not line.startswith(".")), "?")

    def _native(self, words: tuple[int, int, int], pc: int) -> Native | None:
        w0 = words[0]
        if self._rdna4:
            op = (w0 >> 14) & 255
            if w0 >> 26 == 0x31 and op in _BUFFER_NAMES:
                return Native("BUFFER_" + _BUFFER_NAMES[op], 12, VBUFFER)
            if w0 >> 24 == 0xEE and op in _GLOBAL_CACHE_OPS:
                return Native("GLOBAL_CACHE_OP", 12, NATIVE)
        elif w0 >> 26 == 0x38:
            op = (w0 >> 18) & 255
            if op in _BUFFER_CACHE_OPS:
                return Native("BUFFER_CACHE_OP", 8, NATIVE)
            if op in _BUFFER_NAMES:
                return Native("BUFFER_" + _BUFFER_NAMES[op], 8, MUBUF)
        if w0 >> 24 == 0xCC and 0x40 <= (w0 >> 16) & 127 < 0x60:
            return self._wmma(words, pc)
        if w0 >> 26 == 0x36:
            op = (w0 >> 18) & 255
            if op == 0x35:
                return Native("DS_SWIZZLE_B32", 8, SWIZZLE | NATIVE)
            if 0xA2 <= op < 0xA8:
                return Native("DS_LOAD_" + _LDS_D16_NAMES[op - 0xA2], 8, NATIVE, NATIVE_LDS_D16)
        if w0 >> 26 == 0x35 and (op := (w0 >> 16) & 1023) in _PERMLANES:
            literal = 255 in ((words[1] >> 9) & 511, (words[1] >> 18) & 511)
            return Native(_PERMLANES[op], 12 if literal else 8, NATIVE, NATIVE_PERMLANE)
        if w0 >> 25 == 0x3F and (op := (w0 >> 9) & 255) in _MOVRELS:
            return Native(_MOVRELS[op], 4, NATIVE, NATIVE_MOVREL)
        if w0 >> 23 == 0x17D and (op := (w0 >> 8) & 255) in _JUMPS:
            return Native(_JUMPS[op], 4, NATIVE, NATIVE_JUMP)
        return None

    def _wmma(self, words: tuple[int, int, int], pc: int) -> Native:
        w0, w1, _ = words
        op = (w0 >> 16) & 127
        integer = op in _WMMA_INTEGER
        negates_c = w1 >> 31
        modifiers = (w0 >> 8) & 7 or negates_c or (not integer and (w1 >> 29 or w0 >> 15 & 1))
        if op > (0x4A if self._rdna4 else 0x45) or modifiers:
            raise Fault(f"WMMA form not handled: {self.disassemble(pc)}")
        return Native("V_WMMA_" + _WMMA_NAMES[op - 0x40], 8, WMMA | NATIVE | (VBUFFER if self._rdna4 else 0))

    def _translate(self, entry: Entry, words: tuple[int, int, int], pc: int) -> str:
        """A handler of tinygrad's for the instruction, or for its plain form when it is a DPP one; its name."""
        dpp = take_dpp_apart(words)
        try:
            at, spare, source = (pc, 0, 0) if dpp is None else self._write_plain(dpp)
            program, runtime, instruction = self._decode(at, words)
        except Fault:
            raise
        except Exception as error:
            raise Fault(f"cannot run code+{pc - self._base:#x} ({self.disassemble(pc)}): {error}") from error
        buffers = list(program.arg.globals)
        entry.fn, entry.n = runtime.addr, len(buffers)
        for i in range(6):
            entry.g[i] = buffers[i] if i < len(buffers) else 0
        name = self._emulator._op_name(instruction)
        if dpp is None:
            entry.flags = BARRIER if name.startswith("S_BARRIER") and "SIGNAL" not in name else 0
            return name
        entry.alt, entry.size = at, dpp.size
        entry.w0, entry.w1, entry.w2 = dpp.control, dpp.kind, spare | source << 8
        entry.flags = DPP | (DPP_WRITES_EXEC if "CMPX" in name else 0)
        return name + "_DPP"

    def _decode(self, at: int, words: tuple[int, int, int]) -> tuple[Any, Any, Any]:
        generation = "rdna4" if self._rdna4 else "rdna3"
        try:
            (program, runtime), instruction = self._emulator._decode_at(at, generation)
        except Exception:
            # RDNA3.5 has RDNA4's scalar floating-point instructions, in the same encoding.
            if not self._code.mach.startswith("gfx115") or words[0] >> 30 != 2:
                raise
            (program, runtime), instruction = self._emulator._decode_at(at, "rdna4")
            if not type(instruction).__name__.startswith("SOP"):
                raise
        return program, runtime, instruction

    def _write_plain(self, dpp: Dpp) -> tuple[int, int, int]:
        """(address of the plain form, the spare VGPR it reads, the DPP source VGPR)."""
        if self._vgprs >= 256:
            raise Fault("DPP needs one free VGPR, the kernel uses all 256")
        spare, source = self._vgprs, dpp.source
        at = self._plain_copies.address + 32 * len(self._names)
        ctypes.memmove(at, struct.pack("<3I", *dpp.plain(spare)), 12)
        generation = "rdna4" if self._rdna4 else "rdna3"
        decoded = self._emulator.decode_inst(ctypes.string_at(at, 16), generation)
        if not dpp.is_vop3 and decoded.canonical_op_bits.get("s0") == 16:
            # In the short 16-bit encodings bit 7 of a VGPR number picks the high half.
            if spare > 127 or (dpp.control >> 20 & 15 and not dpp.kind):
                raise Fault("16-bit DPP with modifiers or a spare register above v127: not handled")
            ctypes.memmove(at, struct.pack("<3I", *dpp.plain(spare | (source & 128))), 12)
            source &= 127
        return at, spare, source


def take_dpp_apart(words: tuple[int, int, int]) -> Dpp | None:
    """The DPP parts of an instruction, or None when it is not one."""
    w0, w1, w2 = words
    if w0 >> 31 == 0:  # VOP1, VOP2, VOPC
        kind = _DPP_KINDS.get(w0 & 0x1FF)
        if kind is None:
            return None
        modifiers = 0 if kind else w1 >> 20 & 15
        if not modifiers:
            return Dpp(lambda v: ((w0 & ~0x1FF) | 0x100 | v, 0, 0), 8, w1, kind, w1 & 255, False)
        first, second = _as_vop3(w0, modifiers)
        return Dpp(lambda v: (first, second | 0x100 | v, 0), 8, w1, kind, w1 & 255, False)
    if w0 >> 26 in (0x35, 0x33):  # VOP3, VOP3P
        kind = _DPP_KINDS.get(w1 & 0x1FF)
        if kind is not None:
            return Dpp(lambda v: (w0, (w1 & ~0x1FF) | 0x100 | v, 0), 12, w2, kind, w2 & 255, True)
    return None


def _as_vop3(w0: int, modifiers: int) -> tuple[int, int]:
    """The VOP3 form of a short instruction with neg and abs modifiers, its src0 left 0."""
    top, field = w0 >> 25, (w0 >> 9) & 255
    destination, src1 = (w0 >> 17) & 255, 0x100 | field
    if top == 0x3F:  # VOP1
        op, src1 = 0x180 + field, 0
    elif top == 0x3E:  # VOPC writes VCC
        op, destination = (w0 >> 17) & 255, 106
    else:  # VOP2
        op = 0x100 + top
    absolute = (modifiers >> 1 & 1) | (modifiers >> 3 & 1) << 1
    negate = (modifiers & 1) | (modifiers >> 2 & 1) << 1
    return 0x35 << 26 | op << 16 | absolute << 8 | destination, src1 << 9 | negate << 29
