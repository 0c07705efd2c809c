"""The Zen CPU kernel: every case on stand-ins of zentorch's ops and, where they run, on the ops themselves."""

import dataclasses
import importlib
import sys

import pytest
import torch
from weights import make_weight
from zen_ops import ZEN_OPS

from nybble.kernels.linear import LinearConfig, W4A16Linear, linear_reference, select, zen
from nybble.kernels.linear.xpu import w4a8_reference
from nybble.kernels.linear.zen import ZenInt4
from nybble.kernels.packing import pack_rows
from nybble.kernels.selfcheck import check_paths
from nybble.kernels.target import CpuTraits, Target, cpu_target, cpu_traits

CPU = torch.device("cpu")
BF16 = torch.bfloat16
ZEN4 = CpuTraits("AuthenticAMD", frozenset({"avx2", "avx512f"}))
# bf16 rounds the output (2^-9); a W4A8 sum may round one activation the other way than the reference.
TOLERANCE = 6e-3


def real_zentorch() -> str:
    return zen.why_no_zentorch() if cpu_traits().is_zen_avx512 else "another CPU"


@pytest.fixture(params=["stand-in", "zentorch"])
def ops(request, monkeypatch):
    """The kernel over stand-in ops, or over the real ones."""
    if request.param == "zentorch":
        if why := real_zentorch():
            pytest.skip(f"needs zentorch on an AMD CPU with AVX-512: {why}")
        return
    monkeypatch.setattr(torch.ops, "zentorch", ZEN_OPS)
    monkeypatch.setattr(zen, "why_no_zentorch", lambda: "")
    monkeypatch.setattr(zen, "cpu_traits", lambda: ZEN4)


def problem(n, k, g, symmetric, m, seed=0):
    weight = make_weight(n, k, g, symmetric, seed=seed)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed + 1)).to(BF16)
    return weight, x, torch.linspace(-1, 1, n).to(BF16)


def error(y, expected):
    assert y.dtype is BF16 and y.shape == expected.shape
    return float((y.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("m", [1, 3, 17, 64])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize(
    ("n", "k", "g"),
    [(1, 8, 8), (7, 64, 32), (24, 576, 576), (48, 40, 4), (33, 72, 24), (576, 576, 64), (1440, 1536, 128)],
)
def test_computes_the_reference(ops, n, k, g, symmetric, m):
    weight, x, bias = problem(n, k, g, symmetric, m)
    layer = W4A16Linear(weight, bias, BF16, CPU, kernel=ZenInt4())
    for _ in range(2):  # the library reorders the weight at the first call and reads that copy at the second
        assert error(layer.run(x, "cpu"), linear_reference(x, weight, bias)) < TOLERANCE
    no_bias = W4A16Linear(weight, None, BF16, CPU, kernel=ZenInt4()).run(x, "cpu")
    assert error(no_bias, linear_reference(x, weight)) < TOLERANCE


@pytest.mark.parametrize("m", [1, 3, 17, 64])
@pytest.mark.parametrize(("n", "k", "g"), [(7, 64, 32), (24, 576, 576), (64, 40, 4), (1440, 1536, 128)])
def test_int8_activations_compute_their_own_reference(ops, n, k, g, m):
    weight, x, bias = problem(n, k, g, True, m)
    kernel = ZenInt4(int8_activations=True)
    y = W4A16Linear(weight, bias, BF16, CPU, kernel=kernel).run(x, "cpu")
    assert error(y, w4a8_reference(x.float(), weight, bias)) < TOLERANCE
    assert error(y, linear_reference(x, weight, bias)) < kernel.added_error


def test_a_large_weight_is_packed_in_chunks(ops):
    weight, x, _ = problem(2064, 4096, 128, False, 2)
    state = ZenInt4().prepare(weight, LinearConfig.of(weight, BF16), CPU)
    # 4-bit codes, the library's copy of them, float32 scales, int8 zeros
    assert ZenInt4().nbytes(state) == 2 * (2064 * 4096 // 2) + (4 + 1) * 2064 * 32
    assert error(ZenInt4().apply(state, x, None, "cpu"), linear_reference(x, weight)) < TOLERANCE


def test_a_strided_input_is_read_right(ops):
    weight, _, _ = problem(32, 64, 32, False, 1)
    x = torch.randn(4, 128).to(BF16)[::2, :64]
    layer = W4A16Linear(weight, None, BF16, CPU, kernel=ZenInt4())
    assert error(layer.run(x, "cpu"), linear_reference(x, weight)) < TOLERANCE


def test_a_weight_never_takes_the_address_of_a_dropped_one(ops):
    """The library remembers a weight by its address: freed and reused, it would answer with the old values."""
    for seed in range(20):
        weight, x, _ = problem(64, 256, 32, True, 3, seed)
        layer = W4A16Linear(weight, None, BF16, CPU, kernel=ZenInt4())
        assert error(layer.run(x, "cpu"), linear_reference(x, weight)) < TOLERANCE
        del layer
    addresses = [t.data_ptr() for t in zen._KEPT]
    assert len(set(addresses)) == len(addresses) >= 20


def drop_zeros(weight):
    return dataclasses.replace(weight, zeros=torch.full_like(weight.zeros, 8))


def swap_groups(weight):
    return dataclasses.replace(weight, scales=weight.scales.roll(1, dims=1))


def reverse_nibbles(weight):
    values = weight.q.view(torch.uint8)
    return dataclasses.replace(weight, q=((values << 4) | (values >> 4)).view(torch.int32))


@pytest.mark.parametrize("fault", [drop_zeros, swap_groups, reverse_nibbles])
def test_a_planted_fault_is_far_beyond_the_tolerance(ops, fault, monkeypatch):
    weight, x, bias = problem(64, 256, 32, False, 3)
    right = ZenInt4.prepare
    monkeypatch.setattr(ZenInt4, "prepare", lambda self, w, c, d: right(self, fault(w), c, d))
    y = W4A16Linear(weight, bias, BF16, CPU, kernel=ZenInt4()).run(x, "cpu")
    assert error(y, linear_reference(x, weight, bias)) > 10 * TOLERANCE


def test_signed_codes_with_zero_points_are_caught(ops):
    """The op reads unsigned nibbles once it is given zeros: signed ones give wrong numbers without an error."""
    weight, x, _ = problem(64, 256, 32, False, 3)
    state = ZenInt4().prepare(weight, LinearConfig.of(weight, BF16), CPU)
    minus_8 = pack_rows(torch.full((64, 256), 8))
    wrong = dataclasses.replace(state, packed=(state.packed ^ minus_8), zeros=state.zeros - 8)
    zen._KEPT.append(wrong.packed)
    assert error(ZenInt4().apply(wrong, x, None, "cpu"), linear_reference(x, weight)) > 10 * TOLERANCE


def test_the_self_check_covers_it(ops, monkeypatch):
    monkeypatch.setattr("nybble.kernels.selfcheck.BACKENDS", {"cpu": (ZenInt4(), ZenInt4(True))})
    assert check_paths(CPU, BF16, cpu_target()).passed["cpu"] is True
    right = ZenInt4.prepare
    monkeypatch.setattr(ZenInt4, "prepare", lambda self, w, c, d: right(self, swap_groups(w), c, d))
    assert check_paths(CPU, BF16, cpu_target()).passed["cpu"] is False


FIELDS = {"k": 64, "n": 24, "dtype": BF16, "group_size": 32, "symmetric": True}


def test_stands_between_the_int4_gemm_and_the_exact_copy(ops):
    assert select(LinearConfig(**FIELDS | {"n": 32}), cpu_target()).kernel.name == "cpu_int4"
    assert select(LinearConfig(**FIELDS), cpu_target()).kernel.name == "zen_int4"
    assert select(LinearConfig(**FIELDS | {"dtype": torch.float32}), cpu_target()).kernel.name == "cpu_exact"


@pytest.mark.parametrize(
    ("change", "int8", "reason"),
    [
        ({"dtype": torch.float16}, False, "torch.float16: accepted bfloat16"),
        ({"group_size": 2}, False, "group_size 2: accepted multiples of 4"),
        ({"act_order": True}, False, "act-order"),
        ({"symmetric": False}, True, "zero points"),
    ],
    ids=["dtype", "group", "act-order", "asym int8"],
)
def test_declines_with_a_reason(ops, change, int8, reason):
    fits, why = ZenInt4(int8).can_implement(LinearConfig(**FIELDS | change), cpu_target())
    assert not fits and reason in why


def test_declines_another_device_and_another_cpu_before_importing(monkeypatch):
    def imported():
        raise AssertionError("zentorch was looked for")

    monkeypatch.setattr(zen, "why_no_zentorch", imported)
    config = LinearConfig(**FIELDS)
    assert "device cuda" in ZenInt4().can_implement(config, Target("cuda", "sm_90", "", 132, 0))[1]
    for traits, reason in (
        (CpuTraits("GenuineIntel", ZEN4.flags), "CPU vendor GenuineIntel: accepted AMD with AVX-512"),
        (CpuTraits("AuthenticAMD", frozenset({"avx2"})), "accepted AMD with AVX-512"),
        (CpuTraits("", frozenset()), "CPU vendor unknown"),
    ):
        monkeypatch.setattr(zen, "cpu_traits", lambda traits=traits: traits)
        fits, why = ZenInt4().can_implement(config, cpu_target())
        assert not fits and reason in why


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "not installed"),
        (
            "raise ImportError('compatible with PyTorch versions 2.9.x')",
            "compatible with PyTorch versions 2.9.x",
        ),
        ("raise OSError('libx.so: no such file')", "libx.so"),
        ("", "this zentorch has no zentorch_woq_repack_weight, zentorch_woq_linear"),
    ],
    ids=["absent", "wrong torch", "broken library", "no ops"],
)
def test_says_why_zentorch_cannot_be_used(source, reason, tmp_path, monkeypatch):
    if source is not None:
        (tmp_path / "zentorch.py").write_text(source)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if not holds_zentorch(p))])
    monkeypatch.delitem(sys.modules, "zentorch", raising=False)
    monkeypatch.setattr(torch.ops, "zentorch", object())
    importlib.invalidate_caches()
    assert reason in zen.why_no_zentorch.__wrapped__()
    sys.modules.pop("zentorch", None)


def holds_zentorch(folder):
    return importlib.machinery.PathFinder.find_spec("zentorch", [folder]) is not None


def test_cpuinfo_is_read(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu avx512f\n\nprocessor\t: 1\nvendor_id\t: x\n"
    )
    traits = cpu_traits(str(file))
    assert traits == CpuTraits("AuthenticAMD", frozenset({"fpu", "avx512f"})) and traits.is_zen_avx512
    assert cpu_traits(str(tmp_path / "none")) == CpuTraits("", frozenset())
