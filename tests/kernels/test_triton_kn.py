"""The [K, N/8] GEMM and its packing against the float32 reference (in Triton's interpreter when there is no GPU)."""

import pytest
import torch

from nybble.kernels.linear.reference import linear_reference
from nybble.kernels.packing import W4A16Weight, pack_rows
from nybble.kernels.testing import assert_close

triton_kn = pytest.importorskip("nybble.kernels.linear.triton_kn", reason="triton is not installed")
from nybble.kernels.tiles import Tile  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP16, BF16 = torch.float16, torch.bfloat16


def make_weight(n: int, k: int, g: int, symmetric: bool, dtype: torch.dtype, seed: int = 0) -> W4A16Weight:
    gen = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (n, k), generator=gen, dtype=torch.uint8)
    zeros = None if symmetric else torch.randint(0, 16, (n, k // g), generator=gen, dtype=torch.uint8)
    scales = (1 + torch.rand(n, k // g, generator=gen)) * torch.exp2(
        torch.randint(-11, -3, (n, k // g), generator=gen).float()
    )
    return W4A16Weight(pack_rows(q), scales.to(dtype), zeros, None, g, n, k)


def run(
    x: torch.Tensor, w: "triton_kn.KNWeight", bias: torch.Tensor | None = None, group_size: int | None = None
):
    bias = None if bias is None else bias.to(DEVICE)
    return triton_kn.kn_gemm(x.to(DEVICE), w.words, w.scales, w.zeros, bias, group_size or w.group_size).cpu()


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("k", "g"), [(256, 32), (192, 64), (256, 128), (512, 256), (576, 576), (200, 200)])
def test_every_format(k: int, g: int, dtype: torch.dtype, symmetric: bool):
    weight = make_weight(40, k, g, symmetric, dtype)
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(3, k, generator=gen).to(dtype)
    bias = torch.linspace(-3, 3, 40).to(dtype)
    y = run(x, triton_kn.pack_kn(weight, device=DEVICE), bias)
    assert_close(y, linear_reference(x, weight, bias))


@pytest.mark.parametrize("m", [1, 5, 17, 64])
@pytest.mark.parametrize("n", [8, 24, 72])
def test_ragged_shapes(m: int, n: int):
    weight = make_weight(n, 320, 64, False, FP16, seed=n)
    x = torch.randn(m, 352, generator=torch.Generator().manual_seed(m)).to(FP16)[:, :320]
    assert_close(run(x, triton_kn.pack_kn(weight, device=DEVICE)), linear_reference(x, weight))


def test_group_size_minus_one_is_one_group():
    weight = make_weight(16, 96, 96, True, FP16)
    x = torch.randn(2, 96, generator=torch.Generator().manual_seed(0)).to(FP16)
    packed = triton_kn.pack_kn(weight, device=DEVICE)
    assert torch.equal(run(x, packed, group_size=-1), run(x, packed))


def test_words_hold_consecutive_n():
    weight = make_weight(16, 32, 32, False, FP16)
    packed = triton_kn.pack_kn(weight)
    q = (weight.q.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 0xF
    q = q.view(16, 32)
    for n in range(16):
        assert ((packed.words[:, n // 8] >> (4 * (n % 8))) & 0xF).tolist() == q[n].tolist()


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize(("n", "k", "g"), [(8, 32, 32), (264, 192, 64), (600, 128, 128)])
def test_unpack_is_the_exact_inverse(n: int, k: int, g: int, symmetric: bool):
    weight = make_weight(n, k, g, symmetric, FP16)
    back = triton_kn.unpack_kn(triton_kn.pack_kn(weight))
    assert torch.equal(back.q, weight.q) and torch.equal(back.scales, weight.scales)
    if weight.zeros is not None and back.zeros is not None:
        assert torch.equal(back.zeros, weight.zeros)


def test_zero_points_are_oriented_by_format_then_shape():
    flat = torch.arange(6, dtype=torch.int32)
    assert torch.equal(triton_kn.orient_zeros(flat.view(2, 3), 2, 24), flat.view(2, 3))
    assert torch.equal(triton_kn.orient_zeros(flat.view(3, 2), 2, 24), flat.view(3, 2).t())
    square = torch.arange(4, dtype=torch.int32).view(2, 2)
    assert torch.equal(triton_kn.orient_zeros(square, 2, 16), square.t())
    assert torch.equal(triton_kn.orient_zeros(square, 2, 16, orientation="gn"), square)
    with pytest.raises(ValueError, match="or its transpose"):
        triton_kn.orient_zeros(flat.view(1, 6), 2, 24)
    with pytest.raises(ValueError, match="given torch.float16"):
        triton_kn.orient_zeros(square.to(FP16), 2, 16)


def test_refusals_say_what_is_accepted():
    with pytest.raises(ValueError, match="N=12, accepted a multiple of 8"):
        triton_kn.pack_kn(make_weight(12, 64, 64, True, FP16))
    with pytest.raises(ValueError, match="group_size: given 96 for K=192"):
        triton_kn.pack_kn(make_weight(16, 192, 96, True, FP16))
    w = triton_kn.pack_kn(make_weight(16, 128, 64, False, FP16), device=DEVICE)
    x = torch.zeros(2, 128, dtype=FP16, device=DEVICE)
    with pytest.raises(ValueError, match=r"words: given int32 \[2, 128\]"):
        triton_kn.kn_gemm(x, w.words.t(), w.scales, w.zeros, None, 64)
    with pytest.raises(ValueError, match="zeros: given float16"):
        triton_kn.kn_gemm(x, w.words, w.scales, w.zeros.to(FP16), None, 64)
    with pytest.raises(ValueError, match=r"scales: given float16 \[16, 2\]"):
        triton_kn.kn_gemm(x, w.words, w.scales.t(), w.zeros, None, 64)
    with pytest.raises(ValueError, match="block_k 64: given group_size 32"):
        packed = triton_kn.pack_kn(make_weight(16, 128, 32, True, FP16), device=DEVICE)
        triton_kn.launch(x, packed.words, packed.scales, None, None, 32, tile=Tile(16, 32, 64, 4))


def test_empty():
    w = triton_kn.pack_kn(make_weight(16, 64, 64, True, FP16), device=DEVICE)
    assert run(torch.zeros(0, 64, dtype=FP16), w).shape == (0, 16)
