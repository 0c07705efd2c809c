"""Run RDNA3, RDNA3.5 and RDNA4 code objects on the CPU: instruction semantics from tinygrad's emulator, loading,
scheduling, guarded memory and several corrected instructions from here.

`run_kernel(code_object, name, grid, block, args)` runs real machine code instruction by instruction over numpy arrays.
Needs RDNA_TINYGRAD (a checkout of tinygrad/tinygrad with test/mockgpu) and clang-22 and llvm-mc-22 on PATH. Wait counts
and hazards are not modelled; WMMA sums are exact, so no last-bit equality with hardware. Inline constants of
v_fma_mix_* as fp32 operands are misread by tinygrad's emulator: keep such constants in registers.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rdna_code_object import CodeObject, Kernel
from rdna_instructions import Fault, InstructionTable
from rdna_memory import Region

WORK = Path(tempfile.gettempdir()) / "nybble-rdna-emulator"
_DRIVER = Path(__file__).with_name("rdna_driver.c")
_DONE, _AT_BARRIER, _NEW_INSTRUCTION, _BUDGET_USED, _MEMORY_FAULT = range(5)  # what run_wave returns
_MAX_STEPS = 200_000_000
_WAVE = 32
Vec3 = tuple[int, int, int]


@dataclass
class Result:
    """What a launch left behind.

    outputs       arrays after the run, in the order of the arguments (None for scalars)
    executed      mnemonic -> wave instructions executed
    unreplicated  RDNA3 WMMA operand words that differ between lanes l and l + 16: must be 0
    """

    outputs: list[Any]
    executed: dict[str, int] = field(default_factory=dict)
    unreplicated: int = 0


@dataclass(frozen=True)
class Schedule:
    """How waves take turns, to shake out missing barriers and unwritten registers.

    wave_order   "fwd", "rev" or "rand"
    quantum      switch wave every so many instructions; 0 runs each to its barrier
    vgpr_poison  byte that fills registers at the start, None for zero
    """

    wave_order: str = "fwd"
    quantum: int = 0
    vgpr_poison: int | None = None
    seed: int = 0


def run_kernel(
    code_object: bytes,
    name: str,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[Any],
    *,
    lds_bytes: int,
    **schedule: Any,
) -> Result:
    """Run a kernel over a grid of workgroups.

    args: numpy arrays (copied in, and out into Result.outputs), integers, floats, numpy scalars, None (null pointer).
    lds_bytes: all LDS of a workgroup. `schedule`: fields of Schedule. Raises Fault on an access outside the arguments or
    an instruction this cannot run.
    """
    return _Run(code_object, name, _vec3(grid), _vec3(block), args, lds_bytes).all(Schedule(**schedule))


def _vec3(size: Sequence[int]) -> Vec3:
    x, y, z = (*size, 1, 1, 1)[:3]
    return x, y, z


@functools.cache
def _tinygrad() -> Any:
    """tinygrad's emulator module; puts clang 22 under its plain name on PATH, where tinygrad looks for it."""
    checkout, compiler = os.environ.get("RDNA_TINYGRAD", ""), shutil.which("clang-22")
    if not checkout or compiler is None:
        raise RuntimeError("the RDNA emulator needs RDNA_TINYGRAD and clang-22 on PATH")
    tools = WORK / "bin"
    tools.mkdir(parents=True, exist_ok=True)
    if not (tools / "clang").exists():
        (tools / "clang").symlink_to(compiler)
    os.environ["PATH"] = f"{tools}:{os.environ.get('PATH', '')}"
    os.environ.setdefault("DEV", "CPU")
    os.environ.setdefault("CACHEDB", str(WORK / "tinygrad.db"))
    sys.path.insert(0, checkout)
    from test.mockgpu.amd import emu

    plain = emu._iattr

    def attribute(instruction: Any, name: str, default: int = 0) -> int:
        # RDNA4 says in the lowest bit of its temporal hint what RDNA3 says in glc: that an atomic returns the old value.
        if name == "glc" and hasattr(instruction, "th"):
            return int(plain(instruction, "th", default)) & 1
        return int(plain(instruction, name, default))

    emu._iattr = attribute
    return emu


@functools.cache
def _driver() -> ctypes.CDLL:
    _tinygrad()
    library = WORK / f"driver_{hashlib.sha256(_DRIVER.read_bytes()).hexdigest()[:12]}.so"
    if not library.exists():
        partial = f"{library}.{os.getpid()}"
        subprocess.run(
            ["clang", "-O2", "-mf16c", "-shared", "-fPIC", str(_DRIVER), "-o", partial], check=True
        )
        os.replace(partial, library)
    loaded = ctypes.CDLL(str(library))
    pointer, u64 = ctypes.c_void_p, ctypes.c_uint64
    loaded.run_wave.argtypes = [pointer, u64, u64, pointer, pointer, u64, pointer, pointer, ctypes.c_int]
    loaded.run_wave.restype = ctypes.c_int
    loaded.get_unrep.restype = u64
    return loaded


@dataclass
class _Wave:
    state: Any
    buffers: Any
    scratch: Region | None
    status: str = "run"


class _Run:
    """One launch: the loaded code, the argument block, and the waves of one workgroup at a time."""

    def __init__(
        self, code_object: bytes, name: str, grid: Vec3, block: Vec3, args: Sequence[Any], lds_bytes: int
    ) -> None:
        self.code = CodeObject(code_object)
        self.kernel: Kernel = self.code.kernel(name)
        if not self.kernel.wave32:
            raise Fault("wave64 kernel: RDNA code runs here as wave32 only")
        self.grid, self.block, self.lds_bytes = grid, block, lds_bytes
        self.emulator, self.driver = _tinygrad(), _driver()
        self.rdna4 = self.code.mach.startswith("gfx12")
        self.loaded = Region(self.code.size + 256, align=4096, poison=0)
        self.loaded.write(bytes(self.code.load(self.loaded.address)))
        self.pointers: list[tuple[Region, np.ndarray] | None] = []
        self.arguments = Region(max(self.kernel.kernarg, 8) + 64, poison=0)
        self.arguments.write(self._argument_block(args))
        self.user_sgprs = self._user_sgprs()
        # Four lazily mapped GiB: the emulator computes addresses of inactive lanes too, and they must stay harmless.
        self.lds = Region(1 << 32, poison=None, reserve=False, align=4096)
        vgprs = self.kernel.meta.get(".vgpr_count", 256)
        self.table = InstructionTable(self.code, self.loaded.address, vgprs, self.emulator)
        self.states: list[Any] = []
        self.steps = 0

    def all(self, schedule: Schedule) -> Result:
        """Run every workgroup."""
        chance = random.Random(schedule.seed)
        gx, gy, gz = self.grid
        for z, y, x in itertools.product(range(gz), range(gy), range(gx)):
            self._workgroup((x, y, z), schedule, chance)
        outputs = [
            None
            if pointer is None
            else np.frombuffer(pointer[0].read(pointer[1].nbytes), dtype=pointer[1].dtype)
            .reshape(pointer[1].shape)
            .copy()
            for pointer in self.pointers
        ]
        return Result(outputs, self.table.executed(), self.driver.get_unrep())

    def _workgroup(self, index: Vec3, schedule: Schedule, chance: random.Random) -> None:
        ctypes.memset(self.lds.address, 0xFF, -(-max(self.lds_bytes, 1) // 4096) * 4096)
        threads = self.block[0] * self.block[1] * self.block[2]
        waves = [self._wave(i, threads, index, schedule) for i in range(-(-threads // _WAVE))]
        while any(wave.status != "done" for wave in waves):
            ready = [wave for wave in waves if wave.status == "run"]
            if not ready:  # everyone alive has reached the barrier
                for wave in waves:
                    wave.status = "run" if wave.status == "barrier" else wave.status
                continue
            if schedule.wave_order == "rev":
                ready.reverse()
            elif schedule.wave_order == "rand":
                chance.shuffle(ready)
            for wave in ready:
                self._advance(wave, schedule.quantum or _MAX_STEPS, index)

    def _advance(self, wave: _Wave, budget: int, index: Vec3) -> None:
        """Run a wave until it ends, waits at a barrier or has used its budget."""
        steps, fault = ctypes.c_uint64(), ctypes.c_uint64()
        flush_denormals = int((self.kernel.rsrc1 >> 16) & 3 == 0)
        while True:
            outcome = self.driver.run_wave(
                ctypes.addressof(self.table.entries),
                self.loaded.address,
                self.code.size,
                wave.state.sgpr_buf._buf.va_addr,
                ctypes.addressof(wave.buffers),
                budget,
                ctypes.byref(steps),
                ctypes.byref(fault),
                flush_denormals,
            )
            self.steps += steps.value
            budget -= steps.value
            if outcome != _NEW_INSTRUCTION:
                break
            self.table.add(wave.state.pc)
        if outcome == _DONE:
            wave.status = "done"
        elif outcome == _AT_BARRIER:
            wave.status = "barrier"
        elif outcome == _MEMORY_FAULT:
            raise Fault(self._describe(fault.value, wave.state.pc, index))
        elif outcome != _BUDGET_USED:
            raise Fault(
                f"pc {wave.state.pc:#x} left the code at {self.loaded.address:#x}+{self.code.size:#x}"
            )
        elif self.steps > _MAX_STEPS:
            raise Fault(f"still running after {_MAX_STEPS} instructions")

    def _describe(self, address: int, pc: int, index: Vec3) -> str:
        where = f"code+{pc - self.loaded.address:#x} ({self.table.disassemble(pc)}), workgroup {index}"
        near = [(abs(address - p[0].address), i, p[0]) for i, p in enumerate(self.pointers) if p is not None]
        if not near:
            return f"memory fault at {address:#x} by {where}"
        _, i, region = min(near, key=lambda candidate: candidate[0])
        return f"memory fault by {where}: offset {address - region.address} of argument {i}, {region.nbytes} bytes long"

    def _argument_block(self, args: Sequence[Any]) -> bytes:
        """The kernel argument segment (code object version 5). Trailing pointers that are not given are null."""
        block = bytearray(max(self.kernel.kernarg, 8))
        wanted = self.kernel.meta.get(".args", [])
        explicit = [a for a in wanted if not a[".value_kind"].startswith("hidden_")]
        if len(args) > len(explicit):
            raise ValueError(f"{len(args)} arguments given, {len(explicit)} accepted by {self.kernel.name}")
        for i, spec in enumerate(explicit):
            offset, size = spec[".offset"], spec[".size"]
            value = args[i] if i < len(args) else None
            self.pointers.append(None)
            if isinstance(value, np.ndarray) and value.ndim:
                region = Region(value.nbytes)
                region.write(np.ascontiguousarray(value).tobytes())
                self.pointers[-1] = (region, value)
                block[offset : offset + 8] = struct.pack("<Q", region.address)
            elif value is not None:
                block[offset : offset + size] = _scalar_bytes(value, size)
        for spec in wanted:
            if spec[".value_kind"].startswith("hidden_"):
                offset, size = spec[".offset"], spec[".size"]
                block[offset : offset + size] = self._hidden(spec[".value_kind"]).to_bytes(size, "little")
        return bytes(block)

    def _hidden(self, kind: str) -> int:
        found = re.match(r"hidden_(block_count|group_size)_([xyz])$", kind)
        if found:
            return (self.grid if found[1] == "block_count" else self.block)["xyz".index(found[2])]
        if kind == "hidden_grid_dims":
            return max((i + 1 for i in range(3) if self.grid[i] > 1 or self.block[i] > 1), default=1)
        return 0  # remainders of whole workgroups, offsets, and the pointers of services that are not here

    def _user_sgprs(self) -> list[int]:
        """Initial scalar registers, in the order the kernel descriptor asks for them."""
        kernel, registers = self.kernel, []
        self.packet = Region(64, poison=0)
        sizes = [n * lanes for n, lanes in zip(self.grid, self.block, strict=True)]
        self.packet.write(
            struct.pack("<HHHHHHIIIII", 0, 3, *self.block, 0, *sizes, kernel.private, self.lds_bytes)
        )
        if kernel.props & 1:
            registers += [0, 0, 0, 0]
        for bit, address in ((2, self.packet.address), (4, 0), (8, self.arguments.address), (16, 0), (32, 0)):
            if kernel.props & bit:
                registers += [address & 0xFFFFFFFF, address >> 32]
        if kernel.props & 64:
            registers.append(kernel.private)
        if kernel.preload:
            raise Fault("kernel arguments preloaded into SGPRs: not handled")
        reserved = (kernel.rsrc2 >> 1) & 31
        if len(registers) > reserved:
            raise Fault(f"{len(registers)} user SGPRs, the descriptor reserves {reserved}")
        return registers

    def _wave(self, number: int, threads: int, index: Vec3, schedule: Schedule) -> _Wave:
        """Wave `number` of a workgroup at its first instruction."""
        if number >= len(self.states):
            self.states.append(self.emulator.WaveState(_WAVE, _WAVE))
        state = self.states[number]
        scratch_bytes = (self.kernel.private + 15) & ~15
        self._reset(state, number, threads, index, scratch_bytes)
        if schedule.vgpr_poison is not None:  # v0 holds the lane's place in the workgroup
            ctypes.memset(state.vgpr_buf._buf.va_addr + 128, schedule.vgpr_poison, 255 * 128)
        scratch = Region(scratch_bytes * _WAVE + 64) if scratch_bytes else None
        vgprs = state.vgpr_buf._buf.va_addr
        scratch_at = scratch.address if scratch else 0
        buffers = (ctypes.c_uint64 * 6)(
            state.sgpr_buf._buf.va_addr, vgprs, 0, self.lds.address, scratch_at, vgprs
        )
        return _Wave(state, buffers, scratch)

    def _reset(self, state: Any, number: int, threads: int, index: Vec3, scratch_bytes: int) -> None:
        emulator = self.emulator
        first = number * _WAVE
        lanes = min(_WAVE, threads - first)
        ctypes.memset(state.vgpr_buf._buf.va_addr, 0, 256 * _WAVE * 4)
        ctypes.memset(state.sgpr_buf._buf.va_addr, 0, 128 * 4)
        sgprs, vgprs = state._sgpr_mv, state._vgpr_mv
        state.pc = self.loaded.address + self.kernel.entry
        for i, value in enumerate(self.user_sgprs):
            sgprs[i] = value
        if self.rdna4:  # workgroup and wave numbers come in trap temporaries
            sgprs[emulator.ttmp[7].offset] = (index[1] & 0xFFFF) | (index[2] & 0xFFFF) << 16
            sgprs[emulator.ttmp[9].offset] = index[0]
            sgprs[emulator.ttmp[8].offset] = number << 25
        else:  # and after the user SGPRs before that
            at = (self.kernel.rsrc2 >> 1) & 31
            for bit, value in zip((7, 8, 9), index, strict=True):
                if self.kernel.rsrc2 >> bit & 1:
                    sgprs[at] = value
                    at += 1
        sgprs[emulator.EXEC_LO.offset] = (1 << lanes) - 1
        sgprs[emulator.SCC.offset] = 0
        sgprs[emulator.SCRATCH_STRIDE_IDX] = scratch_bytes
        width, height, _ = self.block
        for lane in range(lanes):
            t = first + lane
            vgprs[lane] = (t // (width * height)) << 20 | ((t // width) % height) << 10 | (t % width)


def _scalar_bytes(value: Any, size: int) -> bytes:
    if isinstance(value, np.generic):
        return value.tobytes().ljust(size, b"\0")[:size]
    if isinstance(value, float):
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], value)
    return (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
