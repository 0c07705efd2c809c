"""The linear layer on the CPU: every path against the float32 reference, choice, and refusals."""

import pytest
import torch
from weights import make_weight

from nybble.kernels.linear import (
    RECORDER,
    LinearConfig,
    W4A16Linear,
    decide,
    linear_reference,
    route_table,
    select,
)
from nybble.kernels.linear.cpu import CpuExact, CpuInt4
from nybble.kernels.linear.general import General
from nybble.kernels.packing import unpack_rows
from nybble.kernels.selfcheck import check_paths
from nybble.kernels.target import Target, cpu_target

CPU = torch.device("cpu")
# Relative error by activation type: bf16 rounds the output (2^-9) and, asymmetric, the zero term.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def relative_error(y, expected):
    return float((y.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("m", [1, 2, 5, 17])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("n", "k", "g"),
    [(16, 32, 32), (576, 576, 64), (1440, 1536, 128), (8, 96, 32), (24, 576, 576), (48, 40, 8)],
)
@pytest.mark.parametrize("kernel", [None, CpuExact(), General()], ids=["chosen", "exact", "general"])
def test_every_cpu_path_computes_the_reference(kernel, n, k, g, dtype, symmetric, m):
    weight = make_weight(n, k, g, symmetric)
    bias = torch.linspace(-1, 1, n)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(3)).to(dtype)
    layer = W4A16Linear(weight, bias, dtype, CPU, kernel=kernel)
    y = layer.run(x, layer.kernel.paths[0])
    assert y.dtype is dtype and tuple(y.shape) == (m, n)
    assert relative_error(y, linear_reference(x, weight, bias.to(dtype))) < TOLERANCE[dtype]


@pytest.mark.parametrize("kernel", [None, General()], ids=["chosen", "general"])
def test_act_order_follows_g_idx(kernel):
    weight = make_weight(32, 128, 32, symmetric=False, act_order=True)
    x = torch.randn(3, 128)
    y = W4A16Linear(weight, None, torch.float32, CPU, kernel=kernel)(x) if kernel is None else None
    if y is None:
        y = W4A16Linear(weight, None, torch.float32, CPU, kernel=kernel).run(x, "general")
    assert relative_error(y, linear_reference(x, weight)) < 1e-5


def test_a_large_weight_packed_in_chunks_is_the_same():
    # More rows than one chunk of the packer at this K, and a ragged last block.
    weight = make_weight(2064, 4096, 128, symmetric=False)
    x = torch.randn(2, 4096).bfloat16()
    layer = W4A16Linear(weight, None, torch.bfloat16, CPU)
    assert layer.kernel.name == "cpu_int4"
    assert relative_error(layer(x), linear_reference(x, weight)) < TOLERANCE[torch.bfloat16]


def test_leading_shapes_are_kept_and_empty_input_gives_empty_output():
    layer = W4A16Linear(make_weight(32, 64, 32, True), None, torch.float32, CPU)
    assert layer(torch.zeros(2, 3, 64)).shape == (2, 3, 32)
    assert layer(torch.zeros(64)).shape == (32,)
    assert layer(torch.zeros(0, 64)).shape == (0, 32)


@pytest.mark.parametrize(
    "x", [torch.zeros(2, 63), torch.zeros(2, 64, dtype=torch.float16)], ids=["k", "dtype"]
)
def test_wrong_activations_are_refused_before_anything_runs(x):
    layer = W4A16Linear(make_weight(32, 64, 32, True), None, torch.float32, CPU)
    with pytest.raises(ValueError, match=r"accepted torch.float32 \[M, 64\]"):
        layer(x)


def test_wrong_bias_is_refused():
    with pytest.raises(ValueError, match=r"bias: given \[31\], accepted \[32\]"):
        W4A16Linear(make_weight(32, 64, 32, True), torch.zeros(31), torch.float32, CPU)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float16}, "bfloat16"),
        ({"group_size": 8}, "group_size 8"),
        ({"n": 24}, "N=24"),
        ({"act_order": True}, "act-order"),
    ],
    ids=["dtype", "group", "n", "act-order"],
)
def test_the_int4_kernel_declines_with_a_reason(change, reason):
    fields = {"k": 64, "n": 32, "dtype": torch.bfloat16, "group_size": 32, "symmetric": True} | change
    selection = select(LinearConfig(**fields), cpu_target())
    assert selection.kernel.name == "cpu_exact"
    assert reason in selection.declined["cpu_int4"]


def test_nothing_fits_lists_every_reason():
    config = LinearConfig(64, 32, torch.bfloat16, 32, True)
    with pytest.raises(ValueError, match="no linear kernel for .*N=32, K=64.* on tpu v9"):
        select(config, Target("tpu", "v9", "x", 1, 0))


STRIX = Target("rocm", "gfx1151", "", 40, 65536)
RADEON = Target("rocm", "gfx1100", "", 96, 65536)
HOPPER = Target("cuda", "sm_90", "", 132, 232448)
HYBRID = ("skinny", "triton")


@pytest.mark.parametrize(
    ("m", "k", "target", "available", "path"),
    [
        (1, 4096, STRIX, HYBRID, "skinny"),
        (16, 20992, STRIX, HYBRID, "skinny"),
        (16, 20992, RADEON, HYBRID, "skinny"),
        (17, 576, RADEON, HYBRID, "triton"),
        (17, 576, STRIX, HYBRID, "triton"),
        (64, 576, HOPPER, HYBRID, "skinny"),
        (65, 576, HOPPER, HYBRID, "triton"),
        (256, 576, STRIX, (*HYBRID, "dense"), "dense"),
        (255, 576, STRIX, (*HYBRID, "dense"), "triton"),
        (2, 576, STRIX, ("triton",), "triton"),
        (2, 576, STRIX, ("general",), "general"),
        (64, 576, cpu_target(), ("cpu",), "cpu"),
        (0, 576, cpu_target(), ("cpu",), "cpu"),
    ],
    ids=str,
)
def test_routes(m, k, target, available, path):
    assert decide(m, LinearConfig(k, 64, torch.float16, 32, True), target, available).path == path


def test_no_path_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="accepted at least one of"):
        decide(1, LinearConfig(64, 64, torch.float16, 32, True), STRIX, ())


def test_the_route_table_covers_every_m_once():
    def describe(m, path):
        return None if path == "dense" else ("small" if m <= 100 else "large")

    config = LinearConfig(4096, 64, torch.float16, 32, True)
    table = route_table(config, RADEON, (*HYBRID, "dense"), describe)
    assert [(r.first, r.last, r.path, r.tile) for r in table] == [
        (1, 16, "skinny", "small"),
        (17, 100, "triton", "small"),
        (101, 255, "triton", "large"),
        (256, None, "dense", None),
    ]


def test_calls_are_counted_and_sampled_calls_timed():
    layer = W4A16Linear(make_weight(32, 64, 32, True), None, torch.float32, CPU, label="qkv")
    RECORDER.reset()
    RECORDER.phase, RECORDER.sampling = "prefill", True
    layer(torch.zeros(2, 64))
    RECORDER.sampling = False
    layer(torch.zeros(2, 64))
    assert RECORDER.calls["cpu", "prefill"] == 2
    (samples,) = RECORDER.take_samples().values()
    assert len(samples) == 1 and samples[0] > 0
    assert RECORDER.take_samples() == {}
    assert RECORDER.take_latest() == {("qkv", "cpu"): (samples[0], 2)}


def test_selfcheck_passes_here_and_catches_a_wrong_kernel(monkeypatch):
    assert check_paths(CPU, torch.bfloat16, cpu_target()).passed == {"cpu": True, "dense": True}
    right = CpuInt4.prepare

    def wrong_groups(self, weight, config, device):
        state = right(self, weight, config, device)
        state.scales_and_zeros[[0, 1]] = state.scales_and_zeros[[1, 0]]
        return state

    monkeypatch.setattr(CpuInt4, "prepare", wrong_groups)
    check = check_paths(CPU, torch.bfloat16, cpu_target())
    assert check.passed == {"cpu": False, "dense": True}
    assert "relative error" in check.broken["cpu_int4", "cpu"]
    # It is left out of the choice, and the next kernel of the table serves.
    layer = W4A16Linear(make_weight(32, 64, 32, True), None, torch.bfloat16, CPU, broken=check.left_out)
    assert layer.kernel.name == "cpu_exact"
    assert layer.selection.declined["cpu_int4"] == "failed its self-check on this machine"


def test_a_path_that_raises_in_its_selfcheck_is_left_out(monkeypatch):
    def fails(self, weight, config, device):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(CpuInt4, "prepare", fails)
    check = check_paths(CPU, torch.bfloat16, cpu_target())
    assert check.broken["cpu_int4", "cpu"] == "RuntimeError: no such instruction"
    assert ("cpu_exact", "cpu") not in check.broken


def test_the_routed_and_counted_call_compiles_into_one_graph():
    layer = W4A16Linear(make_weight(64, 128, 32, False), torch.ones(64), torch.float32, CPU)
    compiled = torch.compile(lambda x: layer(x) * 2, backend="eager", fullgraph=True)
    for m in (4, 9):
        x = torch.randn(m, 128)
        torch.testing.assert_close(compiled(x), layer(x) * 2)


@pytest.mark.parametrize("n", [16, 48, 64, 80, 128, 720], ids=lambda n: f"N-{n}")
@pytest.mark.parametrize("k", [32, 64, 1088], ids=lambda k: f"K-{k}")
@pytest.mark.parametrize("blocks", ["fast", "torch's"])
def test_the_cpu_layout_is_torchs_own(n, k, blocks, monkeypatch):
    """Whole blocks and ragged ends, by our packing and by torch's alone."""
    from nybble.kernels.linear import cpu

    if blocks != "fast":
        monkeypatch.setattr(cpu, "block_rows", lambda: 0)
    q = make_weight(n, k, 32, symmetric=True).q
    expected = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack_rows(q).to(torch.int32), 1)
    assert torch.equal(cpu.pack_for_cpu(q), expected)
