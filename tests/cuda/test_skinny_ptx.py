"""csrc's decode kernel as nvrtc compiles it for CUDA, executed on this CPU, against the float32 reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from ptx_emulator import Fault, Kernel, Memory
from weights import make_weight

from nybble.kernels.linear import skinny
from nybble.kernels.linear.reference import linear_reference
from nybble.kernels.native.compilers import Nvrtc
from nybble.kernels.native.libraries import LibraryNotFound
from nybble.kernels.native.program import csrc
from nybble.kernels.skinny_layout import SkinnyWeight, pack
from nybble.kernels.testing import assert_close

ARCH = "sm_90"
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
FORMATS = pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
GROUPS = pytest.mark.parametrize("g", [32, 64, 128])


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    try:
        return Nvrtc()
    except LibraryNotFound:
        pytest.skip("needs the library nvrtc: it is not installed")


def plan(m: int, rows: int = 16, waves: int = 2, splits: int = 1) -> skinny.Plan:
    return skinny.Plan("MmaTile", m, rows, waves, step=4, stages=3, splits=splits)


def bits(t: torch.Tensor) -> np.ndarray:
    return t.contiguous().view(torch.uint8).numpy()


def run(
    nvrtc: Nvrtc,
    plan: skinny.Plan,
    x: torch.Tensor,
    w: SkinnyWeight,
    bias: torch.Tensor | None = None,
    gate: str | None = None,
    order: str = "random",
    source=None,
) -> torch.Tensor:
    """y, from memory where nothing but the operands may be touched."""
    m, k = x.shape
    n = w.words.shape[0]
    zeros = w.zeros is not None
    program = plan.program(x.dtype, w.scales.dtype, w.group_size, zeros, gate)
    kernel = Kernel(nvrtc.ptx(program, source or csrc(), ARCH))
    memory = Memory()
    columns = n if gate is None else n // 2
    operands = [0 if t is None else memory.put(bits(t)) for t in (x, w.words, w.scales, w.zeros, bias)]
    y = memory.room(m * columns * 2)
    partial = memory.room(plan.splits * m * n * 4)
    counters = memory.put(np.zeros(plan.blocks(n), np.uint32), writable=True)
    strides = [0 if t is None else t.stride(0) * t.element_size() for t in (x, w.words, w.scales, w.zeros)]
    kernel.launch(
        (plan.blocks(n), plan.splits),
        plan.waves * 32,
        [*operands, y, partial, counters, m, n, k, *strides, plan.splits],
        memory,
        plan.shared_bytes(k, w.group_size, w.scales.element_size(), zeros),
        order,
    )
    assert not memory.get(counters, [plan.blocks(n)], np.uint32).any(), "counters are 0 between calls"
    return torch.from_numpy(memory.get(y, (m, columns), np.int16)).view(x.dtype)


def problem(m: int, n: int, k: int, g: int, symmetric: bool, dtype: torch.dtype):
    weight = make_weight(n, k, g, symmetric, seed=n + k)
    gen = torch.Generator().manual_seed(m * k)
    x = (torch.randn(m, k, generator=gen) * torch.linspace(0.5, 2, k)).to(dtype)
    return weight, pack(weight, arch=ARCH, device=torch.device("cpu"), scale_dtype=dtype), x


@DTYPES
@FORMATS
@GROUPS
@pytest.mark.parametrize("m", [1, 4, 8, 16])
def test_matches_the_reference(m, g, symmetric, dtype, nvrtc):
    weight, w, x = problem(m, 40, 640, g, symmetric, dtype)
    bias = torch.linspace(-2, 2, 40).to(dtype)
    rounded = replace(weight, scales=w.scales[:40])
    assert_close(run(nvrtc, plan(m), x, w, bias), linear_reference(x, rounded, bias))
