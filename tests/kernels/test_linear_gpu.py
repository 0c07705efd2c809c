"""The linear layer on a real GPU: every path, choice, self-check, torch.compile and graph capture."""

import pytest
import torch
from weights import make_weight

from nybble.kernels.linear import RECORDER, W4A16Linear, linear_reference
from nybble.kernels.linear.backends import BACKENDS
from nybble.kernels.linear.skinny import max_m
from nybble.kernels.selfcheck import check_paths
from nybble.kernels.target import detect

pytestmark = pytest.mark.gpu

DTYPES = {torch.float16: 2e-3, torch.bfloat16: 8e-3}


@pytest.fixture
def gpu():
    return torch.device("cuda", 0)


def error(y, expected):
    return float((y.float().cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize(
    ("n", "k", "g"), [(576, 576, 64), (1440, 1536, 128), (8, 576, 32), (256, 512, 256), (64, 96, 96)]
)
def test_a_layer_computes_the_reference_at_every_m(gpu, n, k, g, symmetric, dtype):
    weight = make_weight(n, k, g, symmetric)
    bias = torch.linspace(-1, 1, n).to(dtype)
    layer = W4A16Linear(weight, bias, dtype, gpu, dense=True)
    for m in (1, 2, 5, 6, 17, 64, 300):
        x = torch.randn(m, k).to(dtype)
        expected = linear_reference(x, weight, bias)
        for path in {layer.path_for(m), *layer.available} - (
            {"skinny"} if m > max_m(layer.target) else set()
        ):
            assert error(layer.run(x.to(gpu), path), expected) < DTYPES[dtype], (m, path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_path_passes_its_selfcheck(gpu, dtype):
    check = check_paths(gpu, dtype, detect(gpu))
    assert not check.broken
    assert {"triton", "general", "dense"} <= set(check.passed)


def test_act_order_and_odd_shapes_take_the_general_path(gpu):
    weight = make_weight(12, 128, 32, symmetric=False, act_order=True)
    layer = W4A16Linear(weight, None, torch.float16, gpu)
    assert layer.kernel.name == "general"
    x = torch.randn(3, 128).half()
    assert error(layer(x.to(gpu)), linear_reference(x, weight)) < 2e-3


@pytest.mark.parametrize("m", [1, 16, 512])
def test_a_captured_layer_replays_what_it_computes(gpu, m):
    """m = 512 takes the dense copy."""
    layer = W4A16Linear(make_weight(256, 512, 128, False), torch.ones(256), torch.float16, gpu, dense=True)
    x = torch.randn(m, 512, device=gpu).half()
    layer(x)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    for _ in range(3):
        x.copy_(torch.randn(m, 512, device=gpu))
        y.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(y, layer(x))


def test_a_layer_compiles_into_one_graph(gpu):
    layer = W4A16Linear(make_weight(256, 512, 128, False), None, torch.float16, gpu)
    x = torch.randn(4, 512, device=gpu).half()
    compiled = torch.compile(layer.run, fullgraph=True)
    torch.testing.assert_close(compiled(x, "triton"), layer(x))


def test_sampled_calls_take_device_time_without_waiting(gpu):
    """The device is busy with something else when the calls are made: they return, and their times are their own."""
    layers = [
        W4A16Linear(make_weight(n, 4096, 128, True), None, torch.float16, gpu, label=str(n))
        for n in (64, 16384)
    ]
    inputs = [torch.randn(2048, 4096, device=gpu).half() for _ in layers]
    for layer, x in zip(layers, inputs, strict=True):
        layer(x)  # compiled
    torch.cuda.synchronize()
    RECORDER.reset()
    RECORDER.phase, RECORDER.sampling = "prefill", True
    torch.cuda._sleep(10**9)  # clock cycles: half a second
    for layer, x in zip(layers, inputs, strict=True):
        layer(x)
    RECORDER.sampling = False
    assert not torch.cuda.current_stream().query(), "a sampled call waited for the device"
    assert not RECORDER.take_samples()
    torch.cuda.synchronize()
    (samples,) = RECORDER.take_samples().values()
    latest = RECORDER.take_latest()
    assert len(samples) == 2 and all(1e-7 < s for s in samples)
    assert latest["16384", "triton"] == (samples[1], 2048)


def test_the_table_is_that_of_this_device(gpu):
    assert detect(gpu).kind in BACKENDS
