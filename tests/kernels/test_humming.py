"""The Humming kernel: against a stand-in of its layer everywhere, against the package's own schema where it imports,
and, on a GPU beside the package, for real."""

import contextlib
import dataclasses
import importlib.machinery
import sys
from types import ModuleType

import pytest
import torch
from weights import make_weight

from nybble.kernels.linear import LinearConfig, W4A16Linear, humming, hybrid, linear_reference, select
from nybble.kernels.linear.humming import Humming, layer_tensors
from nybble.kernels.packing import unpack_rows
from nybble.kernels.target import Target, detect

CPU = torch.device("cpu")
HOPPER = Target("cuda", "sm_90", "stand-in", 132, 232448)
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 6e-3}


class StandInLayer(torch.nn.Module):
    """humming.layer.HummingLayer as far as the kernel uses it: same arguments, parameter names, shapes and types."""

    def __init__(self, shape_n, shape_k, weight_config, input_config=None, torch_dtype=None):
        super().__init__()
        assert weight_config["dtype"] == "uint4" and input_config is None
        groups = shape_k // weight_config["group_size"]
        shapes = {"weight": (shape_n, shape_k // 8), "weight_scale": (shape_n, groups)}
        if weight_config["has_zero_point"]:
            shapes["zero_point"] = (shape_n // 8, groups)
        for name, shape in shapes.items():
            dtype = torch_dtype if name == "weight_scale" else torch.int32
            setattr(self, name, torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))
        self.register_buffer("locks", torch.zeros(2048, dtype=torch.int32))
        self.transformed = False

    def load_from_tensors(self, tensors, prefix=""):
        for name, tensor in tensors.items():
            assert getattr(self, name).dtype is tensor.dtype
        self.load_state_dict(tensors, strict=False)

    def transform(self, allow_inplace=False):
        self.transformed = True

    def forward(self, inputs):
        assert self.transformed and inputs.is_contiguous()
        n, k = self.weight.shape[0], self.weight.shape[1] * 8
        zeros = torch.tensor(8.0)
        if hasattr(self, "zero_point"):
            zeros = (
                unpack_rows(self.zero_point.t())
                .t()
                .float()
                .repeat_interleave(k // self.zero_point.shape[1], 1)
            )
        scales = self.weight_scale.float().repeat_interleave(k // self.weight_scale.shape[1], 1)
        w = (unpack_rows(self.weight).float() - zeros) * scales
        assert w.shape == (n, k)
        return (inputs.float() @ w.t()).to(inputs.dtype)


@pytest.fixture
def package(monkeypatch):
    for name in ("humming", "humming.layer"):
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["humming.layer"].HummingLayer = StandInLayer
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    humming.why_no_humming.cache_clear()
    yield sys.modules["humming.layer"]
    humming.why_no_humming.cache_clear()


def problem(n, k, g, symmetric, dtype, m):
    weight = make_weight(n, k, g, symmetric)
    weight = dataclasses.replace(weight, scales=weight.scales.to(dtype))
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(3)).to(dtype)
    return weight, x, torch.linspace(-1, 1, n).to(dtype)


def error(y, expected):
    return float((y.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("m", [1, 17])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize(("n", "k", "g"), [(64, 32, 32), (576, 576, 64), (1536, 1408, 128)])
def test_computes_the_reference(package, n, k, g, symmetric, dtype, m):
    weight, x, bias = problem(n, k, g, symmetric, dtype, m)
    layer = W4A16Linear(weight, bias, dtype, CPU, HOPPER, Humming())
    y = layer.run(x, "general")
    assert y.dtype is dtype and error(y, linear_reference(x, weight, bias)) < TOLERANCE[dtype]
    zeros = 0 if symmetric else n * k // g // 2
    assert Humming().nbytes(layer.state) == n * k // 2 + n * k // g * 2 + zeros + 2048 * 4


@pytest.mark.parametrize(
    "fault", ["zero points dropped", "zero points of other rows", "group scales swapped"]
)
def test_a_planted_fault_is_far_beyond_the_tolerance(package, fault, monkeypatch):
    weight, x, bias = problem(64, 256, 32, False, torch.float16, 3)

    def faulty(weight, dtype):
        tensors = layer_tensors(weight, dtype)
        if fault == "zero points dropped":
            tensors["zero_point"] = torch.zeros_like(tensors["zero_point"])
        elif fault == "zero points of other rows":
            tensors["zero_point"] = tensors["zero_point"].roll(1, dims=0)
        else:
            tensors["weight_scale"] = tensors["weight_scale"].roll(1, dims=1)
        return tensors

    monkeypatch.setattr(humming, "layer_tensors", faulty)
    y = W4A16Linear(weight, bias, torch.float16, CPU, HOPPER, Humming()).run(x, "general")
    assert error(y, linear_reference(x, weight, bias)) > 10 * TOLERANCE[torch.float16]


def test_another_version_of_the_layer_is_refused_instead_of_left_uninitialised(package):
    class Renamed(StandInLayer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.zeros = self.zero_point
            del self.zero_point

    package.HummingLayer = Renamed
    weight, _, _ = problem(64, 256, 32, False, torch.float16, 1)
    with pytest.raises(ValueError, match="given .*'zero_point'.* accepts .*'zeros'"):
        Humming().prepare(weight, LinearConfig.of(weight, torch.float16), CPU)


FIELDS = {"k": 256, "n": 64, "dtype": torch.float16, "group_size": 32, "symmetric": True}


@pytest.fixture
def no_triton(monkeypatch):
    """The rows before this one need Triton."""
    monkeypatch.setattr(hybrid, "has_triton", lambda: False)


def test_is_chosen_where_its_package_imports(package, no_triton):
    assert select(LinearConfig(**FIELDS), HOPPER).kernel.name == "humming"


@pytest.mark.parametrize(
    ("change", "arch", "reason"),
    [
        ({"dtype": torch.float32}, "sm_90", "torch.float32: accepted float16 and bfloat16"),
        ({"dtype": torch.bfloat16}, "sm_75", "sm_75: torch.bfloat16 needs sm_80"),
        ({"group_size": 256}, "sm_90", "group_size 256: accepted (32, 64, 128)"),
        ({"n": 32}, "sm_90", "N=32, K=256: accepted N % 64 == 0"),
        ({"act_order": True}, "sm_90", "act-order"),
    ],
    ids=["dtype", "old GPU", "group", "n", "act-order"],
)
def test_declines_with_a_reason(package, no_triton, change, arch, reason):
    selection = select(LinearConfig(**FIELDS | change), dataclasses.replace(HOPPER, arch=arch))
    assert selection.kernel.name == "general"
    assert reason in selection.declined["humming"]


def test_declines_another_device():
    assert (
        "device rocm"
        in Humming().can_implement(LinearConfig(**FIELDS), Target("rocm", "gfx1100", "", 96, 0))[1]
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "humming-kernels is not installed"),
        ("raise ImportError('libcuda.so.1')", "humming does not import: libcuda.so.1"),
        ("", "humming does not import"),
    ],
    ids=["absent", "broken", "another humming"],
)
def test_says_why_the_package_cannot_be_used(source, reason, tmp_path, monkeypatch):
    if source is not None:
        (tmp_path / "humming.py").write_text(source)
    monkeypatch.setattr(sys, "path", [str(tmp_path)] if source is not None else [])
    for name in [m for m in sys.modules if m.split(".")[0] == "humming"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    assert reason in humming.why_no_humming.__wrapped__()
    sys.modules.pop("humming", None)


def needs_package():
    if why := humming.why_no_humming():
        pytest.skip(f"needs humming-kernels: {why}")


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_the_tensors_are_those_of_the_package(symmetric):
    needs_package()
    from humming.schema import BaseWeightSchema

    weight, _, _ = problem(128, 256, 64, symmetric, torch.float16, 1)
    config = {"quant_method": "humming", "dtype": "uint4", "group_size": 64, "has_zero_point": not symmetric}
    wanted = BaseWeightSchema.from_config(config).get_tensors_attrs(128, 256, torch.float16)
    given = layer_tensors(weight, torch.float16)
    assert {k: (tuple(t.shape), t.dtype) for k, t in given.items()} == {
        k: (tuple(a["shape"]), a["dtype"]) for k, a in wanted.items()
    }


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 17, 300])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize(("n", "k", "g"), [(64, 256, 32), (576, 576, 64), (24576, 4096, 128)])
def test_computes_the_reference_on_a_gpu(n, k, g, symmetric, dtype, m):
    needs_package()
    device = torch.device("cuda", 0)
    weight, x, bias = problem(n, k, g, symmetric, dtype, m)
    layer = W4A16Linear(weight, bias, dtype, device, detect(device), Humming())
    y = layer.run(x.to(device), "general").cpu()
    assert error(y, linear_reference(x, weight, bias)) < TOLERANCE[dtype]
