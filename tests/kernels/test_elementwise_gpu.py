"""The fused kernels between GEMMs, gates inside them, and what reads logits, on a real GPU at the sizes of real models."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from weights import make_weight  # noqa: E402

from nybble.kernels.activation import GATED  # noqa: E402
from nybble.kernels.fused.activation import gated, gated_reference  # noqa: E402
from nybble.kernels.fused.argmax import best_rows, best_rows_reference  # noqa: E402
from nybble.kernels.fused.kv_write import norm_rope_write, norm_rope_write_reference  # noqa: E402
from nybble.kernels.fused.norm import add_rms_norm, add_rms_norm_reference  # noqa: E402
from nybble.kernels.fused.rescore import are_largest, largest, rescore, rescore_reference  # noqa: E402
from nybble.kernels.linear import Parts, W4A16Linear, linear_reference  # noqa: E402
from nybble.kernels.packing import interleave_halves, take_rows  # noqa: E402
from nybble.kernels.testing import TOLERANCE, assert_close, errors  # noqa: E402

pytestmark = pytest.mark.gpu

FP16, BF16 = torch.float16, torch.bfloat16
TYPES = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
ROWS = pytest.mark.parametrize("rows", [0, 1, 3, 64, 700])
SPLITS = pytest.mark.parametrize("splits", [1, 5, 8])


@pytest.fixture
def gpu():
    return torch.device("cuda", 0)


def parts(splits, rows, width, dtype, bias=False):
    gen = torch.Generator().manual_seed(width + splits)
    values = torch.randn(splits, rows, width, generator=gen)
    added = torch.randn(width, generator=gen).to(dtype) if bias else None
    return values.to(dtype) if splits == 1 else values, added


def put(device, *tensors):
    return tuple(None if t is None else t.to(device) for t in tensors)


@TYPES
@ROWS
@SPLITS
@pytest.mark.parametrize("width", [576, 4096, 5120])
def test_add_and_norm(width, splits, rows, dtype, gpu):
    x, bias = parts(splits, rows, width, dtype, bias=splits == 5)
    weight, own = torch.randn(2, width).to(dtype)
    residual = torch.randn(rows, width).to(dtype)
    for norm_x in (None, own):
        want, want_y = add_rms_norm_reference(residual, x, bias, weight, 1e-5, norm_x, 1e-6, 0.5)
        on = residual.to(gpu)
        y = add_rms_norm(on, *put(gpu, x, bias, weight), 1e-5, *put(gpu, norm_x), 1e-6, 0.5)
        assert_close(on, want.float(), dtype)
        assert_close(y, want_y, dtype)


@TYPES
@ROWS
@SPLITS
@pytest.mark.parametrize("width", [1536, 12288])
def test_gate(width, splits, rows, dtype, gpu):
    x, bias = parts(splits, rows, 2 * width, dtype, bias=splits == 8)
    for activation in GATED:
        for interleaved in (False, True):
            y = gated(*put(gpu, x, bias), interleaved, dtype, activation)
            assert_close(y, gated_reference(x, bias, interleaved, activation), dtype)


@TYPES
@ROWS
@SPLITS
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (8, 4, 256), (32, 32, 96)], ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["no-norm", "qk-norm"])
def test_norm_rotate_write(heads, norm, splits, rows, dtype, gpu):
    h, hkv, d = heads
    x, bias = parts(splits, rows, (h + 2 * hkv) * d, dtype, bias=splits == 5)
    weights = torch.randn(2, d).to(dtype) if norm else None
    gen = torch.Generator().manual_seed(rows)
    angles = torch.randn(2048, d, generator=gen)
    positions = torch.randint(0, 2048, (rows,), generator=gen).to(torch.int32)
    slots = torch.randperm(1024, generator=gen)[:rows].to(torch.int32)
    slots[5:8] = -1
    cache = torch.randn(64, 2, hkv, 16, d, generator=gen).to(dtype)
    args = (x, bias, weights, angles, positions, slots)
    want_q, want_cache = norm_rope_write_reference(*args, cache, 1e-6)
    on = cache.to(gpu)
    q = norm_rope_write(*put(gpu, *args), on, 1e-6)
    assert_close(q, want_q, dtype)
    assert_close(on, want_cache, dtype)


@TYPES
@pytest.mark.parametrize("m", [1, 2, 5, 8, 16, 17, 32, 64, 100, 600])
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize(("n", "k", "g", "symmetric"), [(3072, 576, 64, True), (8192, 2048, 128, False)])
def test_a_gate_up_layer(n, k, g, symmetric, activation, m, dtype, gpu):
    """Every path: the csrc kernel, the Triton kernel, and where K is split there, its parts and the gate's own launch."""
    weight = make_weight(n, k, g, symmetric)
    order = interleave_halves(n)
    bias = torch.linspace(-1, 1, n).to(dtype)
    layer = W4A16Linear(take_rows(weight, order), bias[order], dtype, gpu, dense=True)
    x = (torch.randn(m, k) / k**0.5).to(dtype)
    expected = linear_reference(x, weight, bias)
    want = gated_reference(expected.unsqueeze(0), None, False, activation)
    y = layer.gated(x.to(gpu), activation)
    if isinstance(y, Parts):
        y = gated(y.values, y.bias, True, dtype, activation)
    # The gate is fed what the GEMM's own tolerance allows: twice that.
    found, limit = errors(y.cpu(), want), TOLERANCE[dtype]
    assert found.worst <= 2 * limit.worst and found.rms <= 2 * limit.rms, (found, layer.path_for(m))
    total = layer.parts(x.to(gpu)).total(dtype).cpu()
    assert_close(total, expected[:, order], dtype)


def test_a_captured_gate_replays_what_it_computes(gpu):
    n, k = 3072, 576
    layer = W4A16Linear(make_weight(n, k, 64, False), None, BF16, gpu)
    for m in (1, 4, 16, 32):
        x = torch.randn(m, k, device=gpu).to(BF16)
        layer.gated(x, "silu")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer.gated(x, "silu")
        for _ in range(2):
            x.copy_(torch.randn(m, k, device=gpu))
            y.fill_(float("nan"))
            graph.replay()
            torch.testing.assert_close(y, layer.gated(x, "silu"))


@pytest.mark.parametrize("dtype", [FP16, BF16, torch.float32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(
    ("rows", "vocab"),
    [(1, 151936), (3, 49152), (64, 128256), (512, 32000), (2, 262144), (5, 50257)],
    ids=str,
)
def test_the_best_and_the_largest_of_a_vocabulary(rows, vocab, dtype, gpu):
    gen = torch.Generator().manual_seed(vocab)
    logits = (4 * torch.randn(rows, vocab, generator=gen)).to(dtype)
    logits[-1, vocab // 3] = float("nan")
    on = logits.to(gpu)
    y = best_rows(on).cpu()
    y[0] = torch.where(y[1] > 0, y[0], -1)
    assert torch.equal(y, best_rows_reference(logits))
    chosen = largest(on, 32)
    assert are_largest(logits, chosen.cpu())
    weight = torch.randn(vocab, 256, generator=gen).to(dtype)
    x = torch.randn(rows, 256, generator=gen).to(dtype) / 16
    rescore(on, chosen, *put(gpu, weight, x))
    want = rescore_reference(logits, chosen.cpu(), weight, x).nan_to_num()
    assert_close(on.nan_to_num(), want, BF16 if dtype is BF16 else FP16)
    assert on.isnan().sum() == 1


def test_captured_choices_are_those_of_the_logits_at_replay(gpu):
    logits = torch.randn(4, 151936, device=gpu).to(BF16)
    best_rows(logits), largest(logits, 32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, chosen = best_rows(logits), largest(logits, 32)
    for _ in range(2):
        logits.copy_(torch.randn(4, 151936, device=gpu))
        graph.replay()
        assert torch.equal(y.cpu(), best_rows_reference(logits.cpu()))
        assert are_largest(logits.cpu(), chosen.cpu())
