"""The Triton rows of the kernel table as layers, in the interpreter: chosen, prepared, routed, checked, compiled."""

import pytest
import torch
from weights import make_weight

from nybble.kernels.linear import LinearConfig, W4A16Linear, linear_reference, select
from nybble.kernels.linear.hybrid import Hybrid, TritonKN
from nybble.kernels.selfcheck import check_paths
from nybble.kernels.target import Target

pytest.importorskip("triton", reason="needs triton")

CPU = torch.device("cpu")
STRIX = Target("rocm", "gfx1151", "", 40, 65536)
RADEON = Target("rocm", "gfx1201", "", 64, 65536)
MI300 = Target("rocm", "gfx942", "", 304, 65536, wave=64)
HOPPER = Target("cuda", "sm_90", "", 132, 232448)
# The csrc kernel has no interpreter: it is checked as machine code (tests/rdna) and on GPUs.
NO_GPU = frozenset({("hybrid", "skinny")})
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("m", [1, 3, 17])
@pytest.mark.parametrize("target", [STRIX, MI300], ids=["hybrid", "kn"])
def test_a_layer_computes_the_reference(target, m, symmetric, dtype):
    weight = make_weight(40, 128, 64, symmetric)
    bias = torch.linspace(-1, 1, 40)
    layer = W4A16Linear(weight, bias, dtype, CPU, target, broken=NO_GPU)
    x = torch.randn(m, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = linear_reference(x, weight, bias.to(dtype))
    y = layer(x)
    assert y.dtype is dtype
    assert float((y.float() - expected).norm() / expected.norm()) < TOLERANCE[dtype]
    assert layer.nbytes <= weight.nbytes + bias.nbytes, "one copy of the weight, zero points packed"


@pytest.mark.parametrize(
    ("change", "target", "kernel", "reason"),
    [
        ({}, STRIX, "hybrid", None),
        ({}, RADEON, "hybrid", None),
        ({}, HOPPER, "hybrid", None),
        ({}, MI300, "triton_kn", "rocm gfx942"),
        ({}, Target("cuda", "sm_75", "", 40, 65536), "general", "sm_80"),
        (
            {"k": 96000, "group_size": 32},
            Target("cuda", "sm_86", "", 84, 101376),
            "triton_kn",
            "shared memory",
        ),
        ({"group_size": 256}, STRIX, "triton_kn", "group_size 256: accepted 32, 64, 128"),
        ({"group_size": 512}, STRIX, "triton_kn", "group_size 512"),
        ({"group_size": 16}, STRIX, "general", "group_size 16"),
        ({"k": 520, "group_size": 520}, STRIX, "triton_kn", "group_size 520"),
        ({"act_order": True}, STRIX, "general", "act-order"),
        ({"dtype": torch.float32}, STRIX, "general", "float32"),
        ({"n": 12, "symmetric": True}, STRIX, "hybrid", None),
        ({"n": 12, "symmetric": False}, STRIX, "general", "N=12 with zero points: accepted multiples of 8"),
    ],
    ids=str,
)
def test_choice_and_reasons(change, target, kernel, reason):
    fields = {"k": 512, "n": 64, "dtype": torch.bfloat16, "group_size": 64, "symmetric": False} | change
    selection = select(LinearConfig(**fields), target)
    assert selection.kernel.name == kernel
    if reason is not None:
        assert reason in selection.declined["hybrid"]


def test_without_triton_the_general_path_serves(monkeypatch):
    monkeypatch.setattr("nybble.kernels.linear.hybrid.has_triton", lambda: False)
    selection = select(LinearConfig(512, 64, torch.bfloat16, 64, True), STRIX)
    assert selection.kernel.name == "general"
    assert "triton is not installed" in selection.declined["triton_kn"]


@pytest.mark.parametrize("target", [STRIX, RADEON, HOPPER], ids=lambda t: t.arch)
def test_tiles_are_named_for_every_m(target):
    layer = W4A16Linear(make_weight(64, 512, 128, True), None, torch.float16, CPU, target)
    ranges = layer.routes()
    assert ranges[0].first == 1 and ranges[-1].last is None
    assert all(a.last + 1 == b.first for a, b in zip(ranges, ranges[1:], strict=False))
    skinny = [r for r in ranges if r.path == "skinny"]
    assert skinny[0].first == 1 and skinny[-1].last == (64 if target is HOPPER else 16)
    assert all("x" in r.tile and "waves" in r.tile for r in skinny)
    others = ranges[len(skinny) :]
    assert all(r.path == "triton" and "x" in r.tile and "warps" in r.tile for r in others)
    assert len(skinny) > 1 and len(others) > 1, "one tile for every M"


@pytest.mark.parametrize("kernel", [Hybrid, TritonKN], ids=lambda k: k.name)
def test_the_selfcheck_covers_it_and_catches_swapped_groups(kernel, monkeypatch):
    check = check_paths(CPU, torch.float16, STRIX)
    assert check.passed == {"skinny": False, "triton": True, "general": True, "dense": True}
    assert "accepted a GPU" in check.broken["hybrid", "skinny"]
    right = kernel.prepare

    def swapped(self, weight, config, device):
        state = right(self, weight, config, device)
        groups = state.scales if kernel is Hybrid else state.scales.t()
        groups[:, [0, 1]] = groups[:, [1, 0]].clone()
        return state

    monkeypatch.setattr(kernel, "prepare", swapped)
    check = check_paths(CPU, torch.float16, STRIX)
    assert check.passed["triton"] is False
    assert set(check.broken) == {(kernel.name, "triton"), *NO_GPU}


def test_a_layer_compiles_into_one_graph():
    layer = W4A16Linear(
        make_weight(64, 128, 32, False), torch.ones(64), torch.float16, CPU, STRIX, broken=NO_GPU
    )
    x = torch.randn(4, 128).half()
    compiled = torch.compile(layer.run, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, "triton"), layer(x))
