"""The csrc kernel on a GPU against the float32 reference: every type, group size and way through it, at its edges."""

import itertools

import pytest
import torch
from weights import make_weight

from nybble.kernels.linear import skinny
from nybble.kernels.linear.reference import linear_reference
from nybble.kernels.skinny_layout import pack
from nybble.kernels.target import detect
from nybble.kernels.testing import assert_close

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
FORMATS = pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
GROUPS = pytest.mark.parametrize("g", [32, 64, 128])


def packed_weight(n, k, g, symmetric, scale_dtype=None):
    weight = make_weight(n, k, g, symmetric, seed=n + k)
    return weight, pack(weight, arch=detect(GPU).arch, device=GPU, scale_dtype=scale_dtype)


def activations(m, k, dtype):
    gen = torch.Generator().manual_seed(m * k)
    return (torch.randn(m, k, generator=gen) * torch.linspace(0.5, 2, k)).to(GPU, dtype)


def run(x, w, bias=None, **more):
    return skinny.skinny_gemm(x, w.words, w.scales, w.zeros, bias, w.group_size, **more)


def poison(m, n, dtype):
    """The memory that the next result of this size will get is full of NaN."""
    del_me = torch.full((m, n), float("nan"), dtype=dtype, device=GPU)
    torch.cuda.synchronize()
    del del_me


@DTYPES
@FORMATS
@GROUPS
@pytest.mark.parametrize("n, k", [(24, 576), (1440, 2560), (8, 9728), (72, 17408), (40, 20992), (16, 256)])
def test_matches_the_reference_for_every_m(n, k, g, symmetric, dtype):
    if k % g:
        k += g - k % g
    weight, w = packed_weight(n, k, g, symmetric)
    bias = torch.linspace(-2, 2, n).to(GPU, dtype)
    for m in (*range(1, 17), *(m for m in (17, 24, 32, 33, 48, 64) if m <= skinny.max_m(detect(GPU)))):
        x = activations(m, k, dtype)
        reference = linear_reference(x.cpu(), weight, bias.cpu())
        poison(m, n, dtype)
        y = run(x, w, bias)
        assert_close(y, reference, name=f"M={m}")
        again = run(x, w, bias)
        assert torch.equal(y, again), f"M={m}: other bits the second time"


@DTYPES
@pytest.mark.parametrize("n", [1, 3, 7, 9, 17, 100, 4097])
def test_any_n_when_symmetric(n, dtype):
    weight, w = packed_weight(n, 1024, 64, True)
    for m in (1, 5, 16):
        x = activations(m, 1024, dtype)
        assert_close(run(x, w), linear_reference(x.cpu(), weight))


@DTYPES
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_scales_of_every_type(scale_dtype, dtype):
    weight, w = packed_weight(72, 448, 64, False, scale_dtype)
    rounded = type(weight)(weight.q, w.scales.cpu(), weight.zeros, None, 64, 72, 448)
    for m in (1, 7, 16):
        x = activations(m, 448, dtype)
        assert_close(run(x, w), linear_reference(x.cpu(), rounded))


@DTYPES
@FORMATS
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
def test_padded_rows_change_no_bit(m, symmetric, dtype):
    n, k, g = 200, 1152, 64
    _, w = packed_weight(n, k, g, symmetric)
    x = activations(m, k, dtype)
    plain = run(x, w)

    def padded(t, more, fill):
        wide = torch.full((t.shape[0], t.shape[1] + more), fill, dtype=t.dtype, device=GPU)
        wide[:, : t.shape[1]] = t
        return wide[:, : t.shape[1]]

    zeros = None if w.zeros is None else padded(w.zeros, 3, -1)
    y = skinny.skinny_gemm(
        padded(x, 8, float("nan")),
        padded(w.words, 4, -1),
        padded(w.scales, 1, float("nan")),
        zeros,
        None,
        g,
    )
    assert torch.equal(y, plain)
    # rows that 16-byte loads cannot start at
    assert torch.equal(run(padded(x, 1, float("nan")), w), plain)


@DTYPES
@pytest.mark.parametrize("m", [1, 3, 16])
def test_scales_of_0_and_a_row_of_large_values(m, dtype):
    weight, w = packed_weight(64, 512, 32, True)
    w.scales[:, ::3] = 0
    scales = w.scales.cpu()
    x = activations(m, 512, dtype) * 300
    reference = linear_reference(x.cpu(), type(weight)(weight.q, scales, None, None, 32, 64, 512))
    assert_close(run(x, w), reference)


@pytest.mark.parametrize("n", [8, 4096], ids=["K split", "whole"])
def test_captured_and_replayed(n):
    weight, w = packed_weight(n, 4096, 128, False)
    x = activations(4, 4096, torch.bfloat16)
    eager = run(x, w, dependent=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(x, w, dependent=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            first = run(x, w, dependent=True)
            second = run(x * 2, w, dependent=True)
    for _ in range(3):
        first.fill_(float("nan"))
        second.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(first, eager)
        assert_close(second, linear_reference(2 * x.cpu(), weight))


def test_dependent_launches_wait_for_their_inputs():
    """A chain in which each call reads what the one before wrote, again and again: the same bits as one by one."""
    _, w = packed_weight(1024, 1024, 128, True)
    scale = 0.02
    for m in (1, 16):
        start = activations(m, 1024, torch.bfloat16)
        apart, chained = start, start
        for _ in range(40):
            apart = run(apart, w) * scale
            torch.cuda.synchronize()
        for _ in range(40):
            chained = run(chained, w, dependent=True) * scale
        assert torch.equal(apart, chained)


def test_engines_and_plans_of_other_chips():
    """The lanes-along-K engine too, which RDNA takes for one and two rows, is correct here."""
    weight, w = packed_weight(56, 1120, 32, False)
    for dtype, m in itertools.product((torch.float16, torch.bfloat16), (1, 2)):
        x = activations(m, 1120, dtype)
        reference = linear_reference(x.cpu(), weight)
        for splits in (1, 2):
            for plan in (
                skinny.Plan("DotRows", m, rows=16, waves=4, step=32, splits=splits),
                skinny.Plan("MmaTile", 8, rows=48, waves=4, step=8, stages=2, splits=splits),
                skinny.Plan("MmaTile", m, rows=16, waves=2, step=4, stages=4, splits=splits),
            ):
                y = skinny.bind(plan, x, w.words, w.scales, w.zeros, None, 32)(x)
                assert_close(y, reference, name=str(plan))


@DTYPES
@pytest.mark.parametrize("g, symmetric", [(32, False), (32, True), (128, True), (128, False)])
def test_nine_to_sixteen_rows_that_waves_share(g, symmetric, dtype):
    """The plans of large layers, on a small one whose last block is not full and whose last step is past K."""
    weight, w = packed_weight(200, 2048 + g, g, symmetric)
    blocks = itertools.product((64, 96, 128), ((8, 4), (8, 2), (16, 2)))
    for m, (rows, (step, stages)) in itertools.product((9, 16), blocks):
        plan = skinny.Plan("BlockTile", 16, rows, waves=4, step=step, stages=stages, teams=2)
        x = activations(m, 2048 + g, dtype)
        y = skinny.bind(plan, x, w.words, w.scales, w.zeros, None, g)(x)
        assert_close(y, linear_reference(x.cpu(), weight), name=f"M={m}, {plan}, {stages} stages")


def test_a_layer_large_enough_for_them():
    n = 64 * torch.cuda.get_device_properties(GPU).multi_processor_count
    weight, w = packed_weight(n, 1024, 32, False)
    x = activations(11, 1024, torch.bfloat16)
    assert_close(run(x, w), linear_reference(x.cpu(), weight))


def test_empty():
    _, w = packed_weight(24, 128, 64, True)
    x = torch.empty(0, 128, dtype=torch.float16, device=GPU)
    assert run(x, w).shape == (0, 24)


def test_refused_launches_say_what_and_where():
    _, w = packed_weight(24, 128, 64, True)
    x = activations(1, 128, torch.float16)
    plan = skinny.Plan("MmaTile", 1, rows=16, waves=16, step=4, stages=100)
    with pytest.raises(RuntimeError, match=r"NYBBLE_STAGES=100.*sm_\d+"):
        skinny.bind(plan, x, w.words, w.scales, w.zeros, None, 64)(x)
