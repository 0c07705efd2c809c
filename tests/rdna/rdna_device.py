"""A GPU that is not there: Triton launches compile for a chosen chip and, on RDNA, run as machine code in the emulator.

The launchers under test are the real ones, called with CPU tensors; only Triton's last step, handing a compiled kernel to
a driver, is replaced.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from rdna_code_object import CodeObject
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from nybble.kernels import launch as launchers
from nybble.kernels.linear.skinny import Plan
from nybble.kernels.native import compile_offline
from nybble.kernels.skinny_layout import SkinnyWeight
from nybble.kernels.target import Target

TARGETS = {
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
    "gfx1151": GPUTarget("hip", "gfx1151", 32),
    "gfx1201": GPUTarget("hip", "gfx1201", 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "sm_90": GPUTarget("cuda", 90, 32),
}
# The outputs of the kernels here; the emulator works on copies.
WRITTEN = ("y_ptr", "parts_ptr", "lse_ptr", "residual_ptr", "cache_ptr")
COMPUTE_UNITS = {"gfx1100": 96, "gfx1151": 40, "gfx1201": 64, "gfx942": 304, "sm_90": 132}


@dataclass
class Launch:
    """One kernel launch: what was compiled, and what running it executed (empty when it was only compiled).

    compiled: Triton's compiled kernel, or an AMD code object of csrc with its dynamic LDS in `lds_bytes`.
    """

    kernel: str
    compiled: Any
    lds_bytes: int = 0
    executed: dict[str, int] = field(default_factory=dict)
    unreplicated: int = 0


@dataclass(frozen=True)
class Resources:
    registers: int
    spills: int
    scratch_bytes: int
    lds_bytes: int
    code_sha256: str
    # CUDA: see _until_wait.
    until_wait: tuple[str, ...] = ()


class _Driver:
    """The little of Triton's driver interface that compiling a launch needs."""

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return list(TARGETS).index(self.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.arch]

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def pretend(arch: str, *, run: bool = False, **schedule: Any) -> Iterator[list[Launch]]:
    """Within it, Triton launches on CPU tensors target `arch`; the list collects them.

    run=True executes each launch in the emulator, writing its results into the tensors. `schedule` goes to
    `rdna_emulator.run_kernel`: wave_order, quantum, vgpr_poison ...
    """
    launches: list[Launch] = []
    compile_only = JITFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = compile_only(self, *args, grid=grid, warmup=True, **kwargs)
        entry = Launch(self.__name__, compiled)
        launches.append(entry)
        if run:
            _execute(entry, dict(zip(self.arg_names, args, strict=False)) | kwargs, grid, schedule)
        return compiled

    backend = TARGETS[arch].backend
    lds_bytes = 227 << 10 if backend == "cuda" else 65536
    target = Target("cuda" if backend == "cuda" else "rocm", arch, arch, COMPUTE_UNITS[arch], lds_bytes)
    with (
        mock.patch.object(JITFunction, "run", launch),
        mock.patch.object(driver, "_active", _Driver(arch)),
        mock.patch.object(launchers, "target_of", lambda device: target),
        mock.patch.object(launchers, "backend_of", lambda device: backend),
    ):
        yield launches


def _execute(entry: Launch, given: dict[str, Any], grid: tuple[int, ...], schedule: dict[str, Any]) -> None:
    from rdna_emulator import run_kernel

    compiled = entry.compiled
    names = [name for name, kind in compiled.src.signature.items() if kind != "constexpr"]
    args = [given[name] for name in names]
    passed = [bytes_of(value) if isinstance(value, torch.Tensor) else value for value in args]
    result = run_kernel(
        compiled.asm["hsaco"],
        compiled.metadata.name,
        grid,
        (32 * compiled.metadata.num_warps,),
        passed,
        lds_bytes=compiled.metadata.shared,
        **schedule,
    )
    for name, array, output in zip(names, passed, result.outputs, strict=False):
        if name in WRITTEN:
            array[:] = output
    entry.executed, entry.unreplicated = result.executed, result.unreplicated


def bytes_of(t: torch.Tensor) -> Any:
    """The bytes a kernel may touch through t, from its first element to its last, shared with t's storage."""
    last = (
        sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        if t.numel()
        else -1
    )
    size = t.element_size()
    start = t.storage_offset() * size
    whole = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
    return whole[start : start + (last + 1) * size].numpy()


def run_csrc(
    arch: str,
    plan: Plan,
    x: torch.Tensor,
    w: SkinnyWeight,
    bias: torch.Tensor | None,
    *,
    run: bool,
    schedule: dict[str, Any],
    gate: str | None = None,
) -> tuple[torch.Tensor, Launch]:
    """y (NaN where nothing was written) and the launch of csrc's kernel, with the arguments of its real launcher."""
    m, k = x.shape
    n = w.n
    zeros = w.zeros is not None
    program = plan.program(x.dtype, w.scales.dtype, w.group_size, zeros, gate)
    code = compile_offline(program, arch)
    lds_bytes = plan.shared_bytes(k, w.group_size, w.scales.element_size(), zeros)
    launch = Launch(program.entry, code, lds_bytes)
    y = torch.full((m, n if gate is None else n // 2), float("nan"), dtype=x.dtype)
    if not run:
        return y, launch
    from rdna_emulator import run_kernel

    partial = torch.full((plan.splits, m, n), float("nan")) if plan.splits > 1 else None
    counters = torch.zeros(plan.blocks(n), dtype=torch.int32) if plan.splits > 1 else None
    tensors = (x, w.words, w.scales, w.zeros, bias, y, partial, counters)
    strides = (0 if t is None else t.stride(0) * t.element_size() for t in (x, w.words, w.scales, w.zeros))
    passed = [None if t is None else bytes_of(t) for t in tensors]
    result = run_kernel(
        code,
        program.entry,
        (plan.blocks(n), plan.splits),
        (32 * plan.waves,),
        [*passed, m, n, k, *strides, plan.splits],
        lds_bytes=lds_bytes,
        **schedule,
    )
    passed[5][:] = result.outputs[5]
    if counters is not None:
        assert not result.outputs[7].any(), "counters are not back at 0"
    launch.executed, launch.unreplicated = result.executed, result.unreplicated
    return y, launch


def counts(executed: dict[str, int]) -> dict[str, int]:
    """Executed wave instructions by class."""
    classes = {"wmma": 0, "valu": 0, "lds": 0, "all": sum(executed.values())}
    for name, count in executed.items():
        if "WMMA" in name:
            classes["wmma"] += count
        elif name.startswith("V_"):
            classes["valu"] += count
        elif name.startswith("DS_"):
            classes["lds"] += count
    return classes


def resources(launch: Launch) -> Resources:
    """Registers, spills, scratch and LDS of a compiled launch, read from its code object."""
    compiled = launch.compiled
    if isinstance(compiled, bytes) or "hsaco" in compiled.asm:
        code = CodeObject(compiled if isinstance(compiled, bytes) else compiled.asm["hsaco"])
        name = launch.kernel if isinstance(compiled, bytes) else compiled.metadata.name
        meta = code.kernel(name).meta
        start, size = code.text
        return Resources(
            registers=meta[".vgpr_count"],
            spills=meta.get(".vgpr_spill_count", 0) + meta.get(".sgpr_spill_count", 0),
            scratch_bytes=meta[".private_segment_fixed_size"],
            lds_bytes=launch.lds_bytes if isinstance(compiled, bytes) else compiled.metadata.shared,
            code_sha256=hashlib.sha256(bytes(code.image[start : start + size])).hexdigest(),
        )
    return _cuda_resources(compiled)


def _cuda_resources(compiled: Any) -> Resources:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    cubin = compiled.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        out = subprocess.run([tool, "-res-usage", f.name], capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", out)}
    return Resources(
        registers=found["REG"],
        spills=0 if found["LOCAL"] == 0 and found["STACK"] == 0 else 1,
        scratch_bytes=found["STACK"] + found["LOCAL"],
        lds_bytes=compiled.metadata.shared,
        code_sha256=hashlib.sha256(cubin).hexdigest(),
        until_wait=_until_wait(compiled),
    )


def _until_wait(compiled: Any) -> tuple[str, ...]:
    """Memory that the code touches before it waits for the launch before it, "load cache_ptr" by the argument that an
    address was made from, "store ..."; "next" where the next launch may start; last "wait". () for code that never waits."""
    if "griddepcontrol.wait" not in compiled.asm["ptx"]:
        return ()
    arguments = [name for name, kind in compiled.src.signature.items() if kind != "constexpr"]
    made_from: dict[str, set[str]] = {}  # register -> arguments
    found = []
    for line in compiled.asm["ptx"].splitlines():
        code = line.split("//")[0].strip()
        if "griddepcontrol" in code:
            found.append("wait" if "wait" in code else "next")
            if found[-1] == "wait":
                break
            continue
        registers = re.findall(r"%\w+", code)
        sources = set().union(*(made_from.get(name, set()) for name in registers[1:]))
        sources |= {arguments[int(i)] for i in re.findall(r"_param_(\d+)\]", code) if int(i) < len(arguments)}
        if memory := re.search(r"\b(ld|st|atom|red)\.global|cp\.async\.c[ag]", code):
            # Of a copy the second: the first is where it goes in shared memory.
            address = re.findall(r"\[\s*(%\w+)", code)[-1]
            kind = "store" if memory[1] in ("st", "atom", "red") else "load"
            found += [f"{kind} {name}" for name in made_from.get(address, set()) if name.endswith("_ptr")]
        elif registers:
            made_from[registers[0]] = (
                made_from.get(registers[0], set()) | sources if code.startswith("@") else sources
            )
    return tuple(found)
