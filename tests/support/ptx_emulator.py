"""Runs PTX, the code that NVIDIA's compiler makes of CUDA before the last step to a chip, on this CPU: csrc without a GPU.

    kernel = Kernel(ptx)
    memory = Memory()
    x = memory.put(array)                        # -> an address
    kernel.launch(grid, threads, [x, ..., 7], memory, shared_bytes)
    memory.get(y, shape, dtype)

A register holds one numpy array, a number for each of a wave's 32 lanes; lanes that branched apart wait for the one that
is furthest behind. As many instructions as nvrtc makes of csrc are known, by the meaning that the PTX ISA gives them
(https://docs.nvidia.com/cuda/parallel-thread-execution).

What a chip lets pass is an error here: reading what nothing wrote, in registers and in memory; addresses outside of the
buffers, or not aligned; writing to what was passed as read-only; an asynchronous copy that is read before it was waited
for; the same of a warpgroup's multiplications, and changing what they read meanwhile; two waves that touch the same bytes of
shared memory with no barrier between, one of them writing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

LANES = 32
ALL = np.ones(LANES, bool)
LANE = np.arange(LANES)
GUARD_BYTES = 256
SHARED_AT = 1 << 40  # where shared memory begins, far from any buffer

_TYPES: dict[str, Any] = {
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{"f32": np.dtype("f4"), "f16": np.dtype("u2"), "bf16": np.dtype("u2"), "pred": np.dtype(bool)},
}
_REGISTERS = {"%p": "pred", "%rs": "u16", "%r": "u32", "%rd": "u64", "%f": "f32"}


class Fault(Exception):
    """The program did something that it must not do, or uses an instruction that is not known here."""


# ------------------------------------------------------------------------------------------------------------ memory


class Memory:
    """Global memory: buffers with room between them that nobody may touch."""

    def __init__(self) -> None:
        self.bytes = np.zeros(GUARD_BYTES, np.uint8)
        self.readable = np.zeros(GUARD_BYTES, bool)
        self.writable = np.zeros(GUARD_BYTES, bool)

    def put(self, array: np.ndarray, *, writable: bool = False) -> int:
        """A copy of `array`; its address, a multiple of 256. The last word of 4 bytes can be read whole, as everywhere."""
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        return self._add(np.pad(data, (0, -len(data) % 4)), True, writable)

    def room(self, nbytes: int) -> int:
        """Memory to write to, that holds nothing yet."""
        return self._add(np.full(nbytes, 0xA5, np.uint8), False, True)

    def _add(self, data: np.ndarray, readable: bool, writable: bool) -> int:
        at, pad = len(self.bytes), -len(data) % GUARD_BYTES + GUARD_BYTES
        self.bytes = np.concatenate([self.bytes, data, np.zeros(pad, np.uint8)])
        nothing = np.zeros(pad, bool)
        self.readable = np.concatenate([self.readable, np.full(len(data), readable), nothing])
        self.writable = np.concatenate([self.writable, np.full(len(data), writable), nothing])
        return at

    def get(self, address: int, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Raises Fault where nothing was written."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if not self.readable[address : address + nbytes].all():
            raise Fault(
                f"{(~self.readable[address : address + nbytes]).sum()} bytes of the result were never written"
            )
        return self.bytes[address : address + nbytes].view(dtype).reshape(shape).copy()

    def load(self, wave: Wave, at: np.ndarray) -> np.ndarray:
        self._check(at, self.readable, "reads")
        return self.bytes[at]

    def store(self, wave: Wave, at: np.ndarray, data: np.ndarray) -> None:
        self._check(at, self.writable, "writes")
        self.bytes[at] = data
        self.readable[at] = True

    @staticmethod
    def _check(at: np.ndarray, allowed: np.ndarray, does: str) -> None:
        if at.size and (at.min() < 0 or at.max() >= len(allowed) or not allowed[at].all()):
            raise Fault(f"{does} global memory that it may not, or that nothing was written to")


class Shared:
    """Shared memory of one block. epoch: of barriers."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.full(nbytes, 0xA5, np.uint8)
        self.ready = np.zeros(nbytes, bool)
        self.shown = np.zeros(nbytes, bool)  # to the instructions of warpgroups
        self.epoch = 0
        # of a byte: the epoch of its last access, and which wave's that was; -1 of more than one
        self.wrote, self.writer = np.full(nbytes, -1), np.full(nbytes, -1)
        self.read, self.reader = np.full(nbytes, -1), np.full(nbytes, -1)

    def load(self, wave: Wave, at: np.ndarray) -> np.ndarray:
        at = self._inside(at)
        if not self.ready[at].all():
            raise Fault(
                "reads shared memory that nothing was written to, or before the copy to it was waited for"
            )
        if ((self.wrote[at] == self.epoch) & (self.writer[at] != wave.index)).any():
            raise Fault("reads shared memory that another wave wrote, with no barrier between")
        others = (self.read[at] == self.epoch) & (self.reader[at] != wave.index)
        self.reader[at] = np.where(others, -1, wave.index)
        self.read[at] = self.epoch
        return self.bytes[at]

    def store(self, wave: Wave, at: np.ndarray, data: np.ndarray) -> None:
        at = self.claim(wave, at)
        self.bytes[at] = data
        self.ready[at] = True

    def claim(self, wave: Wave, at: np.ndarray) -> np.ndarray:
        """Bytes that a copy will write some time: until `store` nobody may read them."""
        at = self._inside(at)
        for when, who in ((self.wrote, self.writer), (self.read, self.reader)):
            if ((when[at] == self.epoch) & (who[at] != wave.index)).any():
                raise Fault("writes shared memory that another wave used, with no barrier between")
        self.wrote[at], self.writer[at] = self.epoch, wave.index
        self.ready[at] = self.shown[at] = False
        return at

    def _inside(self, at: np.ndarray) -> np.ndarray:
        at = at - SHARED_AT
        if at.size and (at.min() < 0 or at.max() >= len(self.bytes)):
            raise Fault(f"uses shared memory outside of the {len(self.bytes)} bytes of the launch")
        return at


# ------------------------------------------------------------------------------------------------------------ a wave


@dataclass
class Multiplication:
    """What one reads as long as it runs."""

    registers: dict[str, np.ndarray]
    at: np.ndarray  # in shared memory
    data: np.ndarray
    sums: list[str]


@dataclass
class Wave:
    index: int
    block: tuple[int, int]
    grid: tuple[int, int]
    threads: int
    parameters: Sequence[int]
    memory: Memory
    shared: Shared
    registers: dict[str, np.ndarray] = field(default_factory=dict)
    pc: np.ndarray = field(default_factory=lambda: np.zeros(LANES, np.int64))
    mask: np.ndarray = field(default_factory=lambda: ALL)
    # Asynchronous copies: of groups closed, and of the one that is open; each a list of (to, bytes).
    closed: list[list[tuple[np.ndarray, np.ndarray]]] = field(default_factory=list)
    open: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    arrived: list[np.ndarray] = field(
        default_factory=list
    )  # bytes that copies brought, until they are shown to warpgroups
    # Multiplications of a warpgroup, likewise; the sums of those that were not waited for, and how many were begun by then.
    multiplied: list[list[Multiplication]] = field(default_factory=list)
    multiplying: list[Multiplication] = field(default_factory=list)
    sums: dict[str, np.ndarray] = field(default_factory=dict)
    settled: dict[str, np.ndarray] = field(default_factory=dict)  # registers, at the last fence for them
    executed: int = 0

    def special(self, name: str) -> np.ndarray:
        values = {
            "%tid.x": self.index * LANES + LANE,
            "%ntid.x": self.threads,
            "%ctaid.x": self.block[0],
            "%ctaid.y": self.block[1],
            "%nctaid.x": self.grid[0],
            "%nctaid.y": self.grid[1],
            "%laneid": LANE,
        }
        if name not in values:
            raise Fault(f"unknown special register {name}")
        return np.broadcast_to(np.asarray(values[name], np.uint32), LANES)

    def write(self, name: str, value: np.ndarray) -> None:
        dtype = _type_of(name)
        value = np.broadcast_to(np.asarray(value), LANES)
        if value.dtype != dtype:
            value = value.view(dtype) if value.dtype.itemsize == dtype.itemsize else value.astype(dtype)
        if not self.mask.all():
            old = self.registers.get(name)
            if old is None:
                old = np.full(LANES, 0xA5, np.uint8).repeat(dtype.itemsize).view(dtype)
            value = np.where(self.mask, value, old)
        self.registers[name] = value


@cache
def _type_of(register: str) -> Any:
    return _TYPES[_REGISTERS[re.match(r"%[a-z]+", register)[0]]]  # type: ignore[index]


Getter = Callable[[Wave], np.ndarray]
Step = Callable[[Wave], Any]


class Kernel:
    """The one entry of a PTX text."""

    def __init__(self, ptx: str) -> None:
        body = ptx[ptx.index(".entry") :]
        self.parameters = re.findall(r"\.param \.(\w+) (\w+)", body[: body.index("{")])
        self.labels: dict[str, int] = {}
        self.steps: list[Step] = []
        self.texts: list[str] = []
        for line in body[body.index("{") :].splitlines():
            text = " ".join(line.split("//")[0].rstrip("; \t").split())
            if text.endswith(":"):
                self.labels[text[:-1]] = len(self.steps)
            elif text and text[0] not in ".{}":
                self.texts.append(text)
                self.steps.append(self._step(text))

    def launch(
        self,
        grid: tuple[int, int],
        threads: int,
        arguments: Sequence[int],
        memory: Memory,
        shared_bytes: int,
        order: str = "forward",
    ) -> int:
        """order of blocks and, between barriers, of waves: forward, reversed or random. Returns instructions of waves.

        Raises Fault, with the instruction.
        """
        rng = random.Random(0)
        executed = 0
        blocks = [(x, y) for y in range(grid[1]) for x in range(grid[0])]
        for block in _ordered(blocks, order, rng):
            shared = Shared(shared_bytes)
            waves = [
                Wave(i, block, grid, threads, arguments, memory, shared) for i in range(-(-threads // LANES))
            ]
            running = {wave.index: self._run(wave) for wave in waves}
            while running:
                for index in _ordered(list(running), order, rng):
                    if next(running[index], "ended") == "ended":
                        del running[index]
                shared.epoch += 1
            executed += sum(wave.executed for wave in waves)
        return executed

    def _run(self, wave: Wave) -> Iterator[str]:
        """Up to the next barrier, again and again."""
        steps, end = self.steps, len(self.steps)
        while True:
            at = int(wave.pc.min())
            if at >= end:
                return
            wave.mask = ALL if (wave.pc == at).all() else wave.pc == at
            wave.executed += 1
            try:
                stopped = steps[at](wave)
            except Fault as fault:
                raise Fault(f"block {wave.block}, wave {wave.index}: `{self.texts[at]}` {fault}") from None
            if stopped is None:
                wave.pc = np.where(wave.mask, at + 1, wave.pc)
            elif stopped == "barrier":
                if not wave.mask.all():
                    raise Fault(f"wave {wave.index}: a barrier that some lanes do not reach")
                wave.pc = wave.pc + 1
                yield "barrier"

    # --- reading the text ---

    def _step(self, text: str) -> Step:
        guard = re.match(r"@(!?)(%p\d+)\s+(.*)", text)
        if guard:
            text = guard[3]
        opcode, _, rest = text.partition(" ")
        parts = opcode.split(".")
        operands = _operands(rest)
        if parts[0] == "bra":
            return self._branch(operands[0], guard[2] if guard else None, bool(guard and guard[1]))
        if guard:
            raise Fault(f"a guard on {text}: only branches have one here")
        if parts[0] == "ld" and parts[1] == "param":
            place = [name for _, name in self.parameters].index(operands[1].strip("[]"))
            dtype = _TYPES[parts[2]]
            return lambda wave: wave.write(
                operands[0], np.full(LANES, wave.parameters[place] & _most(dtype), dtype)
            )
        if parts[0] == "ret":
            return self._branch(None, None, False)
        maker = _MAKERS.get(parts[0])
        if maker is None:
            raise Fault(f"unknown instruction {text}")
        return maker(parts, operands)

    def _branch(self, label: str | None, predicate: str | None, negated: bool) -> Step:
        def step(wave: Wave) -> str:
            goes = wave.mask if predicate is None else wave.mask & (_read(predicate, "pred")(wave) ^ negated)
            at = wave.pc[wave.mask][0]
            there = len(self.steps) if label is None else self.labels[label]
            wave.pc = np.where(goes, there, np.where(wave.mask, at + 1, wave.pc))
            return "branched"

        return step


def _ordered(items: list[Any], order: str, rng: random.Random) -> list[Any]:
    if order == "random":
        return rng.sample(items, len(items))
    return items[::-1] if order == "reversed" else items


def _most(dtype: np.dtype) -> int:
    return (1 << 8 * dtype.itemsize) - 1


def _operands(text: str) -> list[str]:
    """Split at commas outside of braces."""
    return [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", text) if part.strip()]


def _vector(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{}").split(",")]


def _read(operand: str, kind: str) -> Getter:
    """The operand's bits as a type."""
    dtype = _TYPES[kind]
    if operand == "shared":
        return lambda wave: np.full(LANES, SHARED_AT, np.uint64).astype(dtype)
    if not operand.startswith("%"):
        number = operand.removesuffix("U")
        if number.startswith(("0f", "0F")):
            constant = np.array([int(number[2:], 16)], np.uint32).view(dtype)
        else:
            constant = np.array([int(number, 0) & _most(dtype)], f"u{dtype.itemsize}").view(dtype)
        constant = np.broadcast_to(constant, LANES)
        return lambda wave: constant
    if "." in operand or operand == "%laneid":
        return lambda wave: wave.special(operand).astype(dtype)

    def get(wave: Wave) -> np.ndarray:
        try:
            value = wave.registers[operand]
        except KeyError:
            raise Fault(f"reads {operand}, which nothing was written to") from None
        if value.dtype == dtype:
            return value
        return value.view(dtype) if value.dtype.itemsize == dtype.itemsize else value.astype(dtype)

    return get


def _address(operand: str) -> Getter:
    base, _, offset = operand.strip("[]").replace("+-", "-").replace("-", "+-").partition("+")
    get, more = _read(base, "u64"), int(offset or 0)
    # Shared memory is addressed by 32 bits too: the window's beginning is put back.
    if re.fullmatch(r"%r\d+", base):
        return lambda wave: get(wave).astype(np.int64) + more + SHARED_AT
    return lambda wave: get(wave).astype(np.int64) + more


# ------------------------------------------------------------------------------------------------------ instructions


def wide_f16(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float16).astype(np.float32)


def wide_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow_f16(value: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return value.astype(np.float16).view(np.uint16)


def narrow_bf16(value: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even."""
    value = value.astype(np.float32)
    bits = value.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FC0), rounded)


_WIDE = {"f16": wide_f16, "bf16": wide_bf16}
_NARROW = {"f16": narrow_f16, "bf16": narrow_bf16}


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _truncated_division(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if (b == 0).any():
        raise Fault("divides by 0")
    if a.dtype.kind == "u":
        return a // b
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "min": np.minimum,
    "max": np.maximum,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}
_ONE: dict[str, Callable[[Any], Any]] = {
    "mov": lambda a: a,
    "neg": lambda a: -a,
    "not": lambda a: ~a,
    "cvta": lambda a: a,
}
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal},
    **{"gt": np.greater, "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater},
}


def _plain(function: Callable[..., Any], kinds: Sequence[str], operands: Sequence[str]) -> Step:
    """operands[0] = function(the others), each read as its kind."""
    sources = [_read(operand, kind) for operand, kind in zip(operands[1:], kinds, strict=True)]

    def step(wave: Wave) -> None:
        with np.errstate(all="ignore"):
            wave.write(operands[0], function(*(get(wave) for get in sources)))

    return step


def _arithmetic(parts: list[str], operands: list[str]) -> Step:
    kind = parts[-1]
    if kind in ("f16x2", "bf16x2"):
        return _of_pairs(parts[0], kind.removesuffix("x2"), operands)
    return _plain(_TWO[parts[0]], [kind] * 2, operands)


def _of_pairs(name: str, half: str, operands: list[str]) -> Step:
    """Two 16-bit numbers in a register."""
    wide, narrow = _WIDE[half], _NARROW[half]

    def of_pairs(*words: np.ndarray) -> np.ndarray:
        halves = [wide(word.view(np.uint16)) for word in (np.ascontiguousarray(w) for w in words)]
        if name == "fma":
            exact = halves[0].astype(np.float64) * halves[1] + halves[2]
            return narrow(exact if half == "f16" else exact.astype(np.float32)).view(np.uint32)
        return narrow(_TWO[name](*halves)).view(np.uint32)

    return _plain(of_pairs, ["u32"] * (len(operands) - 1), operands)


def _unary(parts: list[str], operands: list[str]) -> Step:
    if operands[1].startswith("{"):  # two halves into one
        low, high = (_read(name, "u16") for name in _vector(operands[1]))
        return lambda wave: wave.write(
            operands[0], low(wave).astype(np.uint32) | high(wave).astype(np.uint32) << 16
        )
    if operands[0].startswith("{"):
        names, get = _vector(operands[0]), _read(operands[1], "u32")

        def apart(wave: Wave) -> None:
            for i, name in enumerate(names):
                wave.write(name, (get(wave) >> np.uint32(16 * i)).astype(np.uint16))

        return apart
    return _plain(_ONE[parts[0]], [parts[-1]], operands)


def _multiply(parts: list[str], operands: list[str]) -> Step:
    how, kind = parts[1], parts[-1]
    if kind == "f32":
        return _plain(lambda a, b: a * b, ["f32"] * 2, operands)
    wide = np.dtype(f"{_TYPES[kind].kind}8")
    bits = 8 * _TYPES[kind].itemsize

    def multiply(a: np.ndarray, b: np.ndarray, *c: np.ndarray) -> np.ndarray:
        product = a.astype(wide) * b.astype(wide)
        if how == "hi":
            product = product >> wide.type(bits)
        value = product if how == "wide" else product.astype(_TYPES[kind])
        return value + c[0] if c else value

    return _plain(multiply, [kind] * (len(operands) - 1), operands)


def _fma(parts: list[str], operands: list[str]) -> Step:
    if parts[-1] == "f32":
        return _plain(_fused, ["f32"] * 3, operands)
    return _of_pairs("fma", parts[-1].removesuffix("x2"), operands)


def _divide(parts: list[str], operands: list[str]) -> Step:
    divide = (lambda a, b: a / b) if parts[-1] == "f32" else _truncated_division
    return _plain(divide, [parts[-1]] * 2, operands)


def _shift(parts: list[str], operands: list[str]) -> Step:
    kind = parts[-1]
    dtype = _TYPES[kind]
    most = 8 * dtype.itemsize

    def shift(a: np.ndarray, by: np.ndarray) -> np.ndarray:
        by = np.minimum(by, most)
        if kind[0] == "s" and parts[0] == "shr":
            return a >> np.minimum(by, most - 1).astype(dtype)
        moved = a << by.astype(dtype) if parts[0] == "shl" else a >> by.astype(dtype)
        return np.where(by < most, moved, dtype.type(0))

    return _plain(shift, [kind, "u32"], operands)


def _funnel(parts: list[str], operands: list[str]) -> Step:
    def funnel(low: np.ndarray, high: np.ndarray, by: np.ndarray) -> np.ndarray:
        both = high.astype(np.uint64) << np.uint64(32) | low
        by = (by & 31).astype(np.uint64)
        return (both << by >> np.uint64(32) if parts[1] == "l" else both >> by).astype(np.uint32)

    return _plain(funnel, ["u32"] * 3, operands)


def _permute(parts: list[str], operands: list[str]) -> Step:
    def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
        both = b.astype(np.uint64) << np.uint64(32) | a
        word = np.zeros(LANES, np.uint64)
        for i in range(4):
            nibble = (selector >> np.uint32(4 * i) & 15).astype(np.uint64)
            byte = both >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
            byte = np.where(nibble >= 8, (byte >> np.uint64(7)) * np.uint64(0xFF), byte)
            word |= byte << np.uint64(8 * i)
        return word.astype(np.uint32)

    return _plain(permute, ["u32"] * 3, operands)


def _insert_bits(parts: list[str], operands: list[str]) -> Step:
    def insert(a: np.ndarray, b: np.ndarray, at: np.ndarray, length: np.ndarray) -> np.ndarray:
        at, length = (n.astype(np.uint64) for n in (at & 255, length & 255))
        ones = ((np.uint64(1) << length) - np.uint64(1)) << at
        return ((b & ~ones) | (a.astype(np.uint64) << at & ones)).astype(np.uint32)

    return _plain(insert, ["u32"] * 4, operands)


def _logic3(parts: list[str], operands: list[str]) -> Step:
    table = int(operands.pop(), 0)

    def logic(*abc: np.ndarray) -> np.ndarray:
        result = np.zeros(LANES, np.uint32)
        for row in range(8):
            if table >> row & 1:
                terms = [word if row >> (2 - i) & 1 else ~word for i, word in enumerate(abc)]
                result |= terms[0] & terms[1] & terms[2]
        return result

    return _plain(logic, ["u32"] * 3, operands)


def _convert(parts: list[str], operands: list[str]) -> Step:
    to, source = parts[-2:]
    if source in _WIDE:
        return _plain(_WIDE[source], [source], operands)
    if to in _NARROW:
        return _plain(_NARROW[to], [source], operands)
    if "f32" in (to, source) and to != "f32":
        return _plain(lambda a: np.trunc(a).astype(_TYPES[to]), [source], operands)
    return _plain(lambda a: a.astype(_TYPES[to]), [source], operands)


def _compare(parts: list[str], operands: list[str]) -> Step:
    return _plain(_COMPARE[parts[1]], [parts[-1]] * 2, operands)


def _select(parts: list[str], operands: list[str]) -> Step:
    return _plain(lambda a, b, p: np.where(p, a, b), [parts[-1]] * 2 + ["pred"], operands)


def _bytes_at(wave: Wave, address: np.ndarray, width: int, nbytes: int) -> np.ndarray:
    """The bytes' addresses [active lanes, nbytes]."""
    address = address[wave.mask]
    if (address % width).any():
        raise Fault(f"has an address that is no multiple of {width}")
    return address[:, None] + np.arange(nbytes)


def _space(parts: list[str]) -> Callable[[Wave], Memory | Shared]:
    return (lambda wave: wave.shared) if "shared" in parts else (lambda wave: wave.memory)


def _load(parts: list[str], operands: list[str]) -> Step:
    names, address, dtype = _vector(operands[0]), _address(operands[1]), _TYPES[parts[-1]]
    space, nbytes = _space(parts), len(names) * dtype.itemsize

    def step(wave: Wave) -> None:
        data = np.zeros((LANES, nbytes), np.uint8)
        data[wave.mask] = space(wave).load(wave, _bytes_at(wave, address(wave), nbytes, nbytes))
        for name, column in zip(names, data.view(dtype).T, strict=True):
            wave.write(name, np.ascontiguousarray(column))

    return step


def _store(parts: list[str], operands: list[str]) -> Step:
    address, dtype = _address(operands[0]), _TYPES[parts[-1]]
    sources = [_read(name, parts[-1]) for name in _vector(operands[1])]
    space, nbytes = _space(parts), len(sources) * dtype.itemsize

    def step(wave: Wave) -> None:
        data = np.stack([get(wave) for get in sources], axis=1).view(np.uint8)[wave.mask]
        space(wave).store(wave, _bytes_at(wave, address(wave), nbytes, nbytes), data)

    return step


def _atomic(parts: list[str], operands: list[str]) -> Step:
    if parts[1:] != ["global", "add", "u32"]:
        raise Fault(f"unknown instruction {'.'.join(parts)}")
    address, more = _address(operands[1]), _read(operands[2], "u32")

    def step(wave: Wave) -> None:
        old = np.zeros(LANES, np.uint32)
        for lane in np.flatnonzero(wave.mask):
            at = address(wave)[lane] + np.arange(4)
            before = wave.memory.load(wave, at).view(np.uint32)
            old[lane] = before[0]
            wave.memory.store(wave, at, (before + more(wave)[lane]).view(np.uint8))
        wave.write(operands[0], old)

    return step


def _copy(parts: list[str], operands: list[str]) -> Step:
    if parts[2] == "commit_group":

        def commit(wave: Wave) -> None:
            wave.closed.append(wave.open)
            wave.open = []

        return commit
    if parts[2] == "wait_group":
        youngest = int(operands[0])

        def wait(wave: Wave) -> None:
            while len(wave.closed) > youngest:
                for to, data in wave.closed.pop(0):
                    wave.shared.bytes[to], wave.shared.ready[to] = data, True
                    wave.arrived.append(to)

        return wait
    to, source, nbytes = _address(operands[0]), _address(operands[1]), int(operands[2])
    copied = _read(operands[3], "u32") if len(operands) > 3 else None

    def step(wave: Wave) -> None:
        there = wave.shared.claim(wave, _bytes_at(wave, to(wave), nbytes, nbytes))
        here = _bytes_at(wave, source(wave), nbytes, nbytes)
        taken = np.arange(nbytes) < (nbytes if copied is None else copied(wave)[wave.mask][:, None])
        taken = np.broadcast_to(taken, here.shape)
        data = np.zeros(here.shape, np.uint8)
        # A copy of words may take a neighbour's bytes along, of which nothing is used.
        data[taken] = wave.memory.load(wave, here[taken])
        wave.open.append((there, data))

    return step


def _load_matrices(parts: list[str], operands: list[str]) -> Step:
    names, row = _vector(operands[0]), _address(operands[1])

    def step(wave: Wave) -> None:
        rows = wave.shared.load(wave, _bytes_at(wave, row(wave), 16, 16)).view(np.uint32)
        for i, name in enumerate(names):
            wave.write(name, rows[8 * i + LANE // 4, LANE % 4])

    return step


def _matrix(parts: list[str], operands: list[str]) -> Step:
    """C [16, 8] += A [16, K] B [K, 8]. Lane (g, t) = (lane / 4, lane % 4) holds rows g, g + 8 of A, column g of B."""
    k = int(re.fullmatch(r"m16n8k(\d+)", parts[3])[1])  # type: ignore[index]
    kind = parts[-3]
    a_names, b_names, c_names, d_names = (_vector(operands[i]) for i in (1, 2, 3, 0))
    g, t = LANE // 4, LANE % 4

    def values(wave: Wave, names: list[str]) -> list[tuple[int, np.ndarray]]:
        """(offset of k from the lane's first, numbers) of each register."""
        found = []
        for i, name in enumerate(names):
            word = _read(name, "u32")(wave)
            if kind == "tf32":
                # The chip looks at 10 bits of mantissa.
                found.append((i, (word & np.uint32(0xFFFFE000)).view(np.float32)))
            else:
                halves = _WIDE[kind](np.ascontiguousarray(word).view(np.uint16)).reshape(LANES, 2)
                found += [(2 * i, halves[:, 0]), (2 * i + 1, halves[:, 1])]
        return found

    @np.errstate(all="ignore")
    def step(wave: Wave) -> None:
        if not wave.mask.all():
            raise Fault("is executed by a part of the wave")
        a, b = np.zeros((16, k)), np.zeros((k, 8))
        per = 1 if kind == "tf32" else 2  # numbers of a register
        for index, number in values(wave, a_names):
            register, half = divmod(index, per)
            a[g + 8 * (register % 2), per * t + half + 4 * per * (register // 2)] = number
        for index, number in values(wave, b_names):
            register, half = divmod(index, per)
            b[per * t + half + 4 * per * register, g] = number
        product = a @ b
        for i, (name, out) in enumerate(zip(c_names, d_names, strict=True)):
            part = product[g + 8 * (i // 2), 2 * t + i % 2] + _read(name, "f32")(wave)
            wave.write(out, part.astype(np.float32))

    return step


def _of_warpgroup(parts: list[str], operands: list[str]) -> Step:
    """wgmma: one wave's 16 rows of it, at once; but the sums are there only when they were waited for."""
    if parts[1] == "fence":

        def settle(wave: Wave) -> None:
            wave.settled = dict(wave.registers)

        return settle
    if parts[1] == "commit_group":

        def commit(wave: Wave) -> None:
            wave.multiplied.append(wave.multiplying)
            wave.multiplying = []

        return commit
    if parts[1] == "wait_group":
        youngest = int(operands[0])
        return lambda wave: _finish_multiplications(wave, youngest)
    n = int(re.fullmatch(r"m64n(\d+)k16", parts[4])[1])  # type: ignore[index]
    kind = parts[-1]
    c_names, a_names = _vector(operands[0]), _vector(operands[1])
    describe, more = _read(operands[2], "u64"), _read(operands[3], "pred")
    if operands[4:] != ["1", "1", "0"]:
        raise Fault(f"unknown instruction {parts} {operands}")
    g, t = LANE // 4, LANE % 4

    def halves(data: np.ndarray) -> np.ndarray:
        return _WIDE[kind](np.ascontiguousarray(data).view(np.uint16))

    def step(wave: Wave) -> None:
        if not wave.mask.all():
            raise Fault("is executed by a part of the wave")
        descriptor = int(describe(wave)[0])
        if descriptor >> 62 != 1:
            raise Fault("has x in an order that is not known here")
        first, eight_rows = (descriptor & 0x3FFF) * 16, (descriptor >> 32 & 0x3FFF) * 16
        row, byte = np.arange(n)[:, None], np.arange(32)
        at = first + row // 8 * eight_rows + row % 8 * 128 + byte
        at ^= (at // 128 % 8) * 16
        data = wave.shared.load(wave, at + SHARED_AT)
        if not wave.shared.shown[at].all():
            raise Fault("reads shared memory that was not shown to warpgroups")
        words = [_read(name, "u32")(wave) for name in a_names]
        begun = [*a_names, *(name for name in c_names if more(wave)[0] and name not in wave.sums)]
        if any(wave.settled.get(name) is not wave.registers[name] for name in begun):
            raise Fault("reads a register that was written with no wgmma.fence between")
        a = np.zeros((16, 16))
        for i, word in enumerate(words):
            pair = halves(word).reshape(LANES, 2)
            for half in range(2):
                a[g + 8 * (i % 2), 2 * t + half + 8 * (i // 2)] = pair[:, half]
        product = a @ halves(data).reshape(n, 16).T.astype(float)
        for i, name in enumerate(c_names):
            part = product[g + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * t + i % 2]
            if more(wave)[0]:
                part = part + (wave.sums[name] if name in wave.sums else _read(name, "f32")(wave))
            wave.sums[name] = part.astype(np.float32)
            wave.registers.pop(name, None)
        registers = dict(zip(a_names, words, strict=True))
        wave.multiplying.append(Multiplication(registers, at, data.copy(), c_names))

    return step


def _finish_multiplications(wave: Wave, youngest: int) -> None:
    while len(wave.multiplied) > youngest:
        running = [one for group in wave.multiplied[1:] for one in group] + wave.multiplying
        for done in wave.multiplied.pop(0):
            if any(wave.registers.get(name) is not value for name, value in done.registers.items()):
                raise Fault("waits for a multiplication of which a register was changed meanwhile")
            if not (wave.shared.ready[done.at].all() and (wave.shared.bytes[done.at] == done.data).all()):
                raise Fault("waits for a multiplication of which shared memory was changed meanwhile")
            for name in {*done.sums}.difference(*(one.sums for one in running)) & wave.sums.keys():
                wave.write(name, wave.sums.pop(name))


def _shuffle(parts: list[str], operands: list[str]) -> Step:
    name = operands[0].split("|")[0]
    value, other = _read(operands[1], "u32"), _read(operands[2], "u32")

    def step(wave: Wave) -> None:
        which = {"idx": other(wave), "bfly": LANE ^ other(wave)}[parts[2]].astype(np.int64)
        wave.write(name, value(wave)[which % LANES])

    return step


def _barrier(parts: list[str], operands: list[str]) -> Step:
    return (lambda wave: None) if parts[1] == "warp" else (lambda wave: "barrier")


def _fence(parts: list[str], operands: list[str]) -> Step:
    """Of all fences one does something here: of copies, for warpgroups."""
    if parts[1:3] != ["proxy", "async"]:
        return _nothing(parts, operands)

    def show(wave: Wave) -> None:
        for at in wave.arrived:
            wave.shared.shown[at] = wave.shared.ready[at]
        wave.arrived = []

    return show


def _nothing(parts: list[str], operands: list[str]) -> Step:
    """Hints and dependent launches: here everything is done in order."""
    return lambda wave: None


def _constant_0(parts: list[str], operands: list[str]) -> Step:
    return lambda wave: wave.write(operands[0], np.zeros(LANES, np.uint64))


_MAKERS: dict[str, Callable[[list[str], list[str]], Step]] = {
    **dict.fromkeys(_TWO, _arithmetic),
    **dict.fromkeys(_ONE, _unary),
    **{"mul": _multiply, "mad": _multiply, "fma": _fma, "div": _divide, "shl": _shift, "shr": _shift},
    **{"shf": _funnel, "prmt": _permute, "bfi": _insert_bits, "lop3": _logic3, "cvt": _convert},
    **{"setp": _compare, "selp": _select, "ld": _load, "st": _store, "atom": _atomic},
    **{"cp": _copy, "ldmatrix": _load_matrices, "mma": _matrix, "shfl": _shuffle, "bar": _barrier},
    "ex2": lambda parts, operands: _plain(np.exp2, ["f32"], operands),
    "wgmma": _of_warpgroup,
    **{"membar": _nothing, "fence": _fence, "griddepcontrol": _nothing, "createpolicy": _constant_0},
}
