"""The Intel XPU kernel against a CPU stand-in of its op, written from the op's published schema."""

import dataclasses

import pytest
import torch
from weights import make_weight

from nybble.kernels.linear import LinearConfig, W4A16Linear, linear_reference, select
from nybble.kernels.linear.xpu import XpuW4A8, quantize_rows, w4a8_reference
from nybble.kernels.packing import unpack_rows
from nybble.kernels.selfcheck import check_paths
from nybble.kernels.target import Target, detect

CPU = torch.device("cpu")
XPU = Target("xpu", "xpu_14020000", "stand-in", 160, 131072)
SCHEMA = (
    "int4_gemm_w4a8(Tensor A_, Tensor A_scale, Tensor A_zp, Tensor B, Tensor B_scale, Tensor B_zp, "
    "int group_size, Tensor? g_idx, Tensor? bias) -> Tensor"
)
# The op's result is float16, rounded once more for bf16 activations.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 4e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def stand_in(a, a_scale, a_zp, b, b_scale, b_zp, group_size, g_idx, bias):
    m, k = a.shape
    n = b.shape[1]
    assert a.dtype is torch.int8 and a.is_contiguous() and g_idx is None
    assert a_scale.shape == (m, 1) and a_scale.dtype in TOLERANCE
    assert a_zp.shape == (m, 1) and a_zp.dtype is torch.int32
    assert b.dtype is torch.int32 and b.shape == (k // 8, n) and b.t().is_contiguous()
    g = k if group_size == -1 else group_size
    assert b_scale.shape == (k // g, n) and b_scale.is_contiguous() and b_scale.dtype is a_scale.dtype
    assert b_zp.shape == (1,) and b_zp.dtype is torch.int8
    w = (unpack_rows(b.t()).float() - b_zp.float()) * b_scale.t().float().repeat_interleave(g, 1)
    x = (a.float() - a_zp) * a_scale.float()
    return torch.nn.functional.linear(x, w, None if bias is None else bias.float()).half()


@pytest.fixture
def op():
    library = torch.library.Library("_xpu_C", "FRAGMENT")
    library.define(SCHEMA)
    library.impl("int4_gemm_w4a8", stand_in, "CPU")
    yield
    library._destroy()
    if hasattr(torch.ops._xpu_C, "int4_gemm_w4a8"):  # the packet stays cached on the namespace
        delattr(torch.ops._xpu_C, "int4_gemm_w4a8")


def problem(n, k, g, dtype, m):
    weight = make_weight(n, k, g, True)
    weight = dataclasses.replace(weight, scales=weight.scales.to(dtype))
    # Rows that differ a thousandfold: one scale for all of them would round the small ones to nothing.
    size = 10.0 ** torch.linspace(-2, 1, m).unsqueeze(1)
    x = (torch.randn(m, k, generator=torch.Generator().manual_seed(3)) * size).to(dtype)
    return weight, x, torch.linspace(-1, 1, n).to(dtype)


def error(y, expected):
    return float(((y.float() - expected).norm(dim=1) / expected.norm(dim=1)).max())


def layer_of(weight, bias, dtype):
    return W4A16Linear(weight, bias, dtype, CPU, XPU, XpuW4A8())


@DTYPES
@pytest.mark.parametrize("m", [1, 2, 5, 17, 300])
@pytest.mark.parametrize(("n", "k", "g"), [(8, 32, 32), (24, 40, 40), (576, 576, 64), (1440, 1536, 128)])
def test_computes_the_w4a8_reference(op, n, k, g, m, dtype):
    weight, x, bias = problem(n, k, g, dtype, m)
    y = layer_of(weight, bias, dtype).run(x, "general")
    assert y.dtype is dtype and y.shape == (m, n)
    assert error(y, w4a8_reference(x, weight, bias)) < TOLERANCE[dtype]
    assert (
        error(layer_of(weight, None, dtype).run(x, "general"), w4a8_reference(x, weight)) < TOLERANCE[dtype]
    )


@DTYPES
def test_int8_activations_cost_about_a_percent(dtype):
    weight, x, _ = problem(64, 1024, 128, dtype, 16)
    assert 1e-3 < error(w4a8_reference(x, weight), linear_reference(x, weight)) < XpuW4A8.added_error


@DTYPES
def test_rows_are_rounded_to_the_nearest_of_255_steps(dtype):
    x = (torch.randn(7, 64) * 10.0 ** torch.arange(-3, 4).unsqueeze(1)).to(dtype)
    q, scale = quantize_rows(x)
    assert q.dtype is torch.int8 and scale.dtype is dtype and scale.shape == (7, 1)
    assert (q.int().abs().amax(1) >= 126).all()
    # Half a step, and what rounding the scale to 8 or 11 bits moves the largest value by.
    assert ((q.float() * scale.float() - x.float()).abs() <= 1.01 * scale.float()).all()
    inner = q.int().abs() < 120
    assert (
        (q.float() * scale.float() - x.float()).abs()[inner] <= (0.501 * scale.float()).expand_as(x)[inner]
    ).all()


def test_a_row_of_zeros_stays_zero():
    q, scale = quantize_rows(torch.zeros(2, 8, dtype=torch.float16))
    assert not q.any() and (scale > 0).all()


def faulty(state, fault):
    if fault == "zero point dropped":
        return dataclasses.replace(state, zero=torch.zeros_like(state.zero))
    if fault == "group scales swapped":
        return dataclasses.replace(state, scales=state.scales.roll(1, dims=0))
    return dataclasses.replace(state, packed=state.packed.roll(1, dims=0))


@pytest.mark.parametrize("fault", ["zero point dropped", "group scales swapped", "rows shifted"])
def test_a_planted_fault_is_far_beyond_the_tolerance(op, fault):
    weight, x, bias = problem(64, 256, 32, torch.float16, 3)
    layer = layer_of(weight, bias, torch.float16)
    layer.state = faulty(layer.state, fault)
    assert error(layer.run(x, "general"), w4a8_reference(x, weight, bias)) > 10 * TOLERANCE[torch.float16]


def test_a_scale_for_all_rows_is_caught(op, monkeypatch):
    def one_scale(x):
        scale = (x.abs().max() / 127).expand(x.shape[0], 1).contiguous()
        return (x / scale).round().to(torch.int8), scale

    monkeypatch.setattr("nybble.kernels.linear.xpu.quantize_rows", one_scale)
    weight, x, bias = problem(64, 256, 32, torch.float16, 3)
    y = layer_of(weight, bias, torch.float16).run(x, "general")
    monkeypatch.undo()
    assert error(y, w4a8_reference(x, weight, bias)) > 10 * TOLERANCE[torch.float16]


def test_the_self_check_allows_for_int8_and_still_catches_a_fault(op, monkeypatch):
    assert check_paths(CPU, torch.float16, XPU).passed["general"] is True
    right = XpuW4A8.prepare
    monkeypatch.setattr(
        XpuW4A8, "prepare", lambda self, w, c, d: faulty(right(self, w, c, d), "group scales swapped")
    )
    assert check_paths(CPU, torch.float16, XPU).passed["general"] is False


FIELDS = {"k": 256, "n": 64, "dtype": torch.float16, "group_size": 32, "symmetric": True}


def test_is_chosen_before_the_general_path(op):
    assert select(LinearConfig(**FIELDS), XPU).kernel.name == "xpu_w4a8"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"symmetric": False}, "zero points"),
        ({"dtype": torch.float32}, "torch.float32: accepted float16 and bfloat16"),
        ({"group_size": 16}, "group_size 16: accepted multiples of 32, or K"),
        ({"n": 20}, "K=256, N=20: accepted multiples of 8"),
        ({"act_order": True}, "act-order"),
    ],
    ids=["asym", "dtype", "group", "n", "act-order"],
)
def test_declines_with_a_reason(op, change, reason):
    selection = select(LinearConfig(**FIELDS | change), XPU)
    assert selection.kernel.name == "general"
    assert reason in selection.declined["xpu_w4a8"]


def test_declines_without_the_op_and_on_another_device():
    assert "no torch.ops._xpu_C.int4_gemm_w4a8" in select(LinearConfig(**FIELDS), XPU).declined["xpu_w4a8"]
    assert "device cpu" in XpuW4A8().can_implement(LinearConfig(**FIELDS), Target("cpu", "x", "", 1, 0))[1]


def test_an_xpu_is_a_target(monkeypatch):
    properties = type(
        "P", (), dict(architecture=0x14020000, name="B", max_compute_units=160, local_mem_size=131072)
    )
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    assert detect(torch.device("xpu", 0)) == Target("xpu", "xpu_14020000", "B", 160, 131072)
