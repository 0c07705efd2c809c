"""The int8 head's kernels against their float32 reference (Triton in its interpreter when there is no GPU)."""

import pytest
import torch

from nybble.kernels.linear.int8 import Int8Linear, Int8Weight, can_run, int8_reference, quantize_rows
from nybble.kernels.testing import assert_close

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
FP16, BF16 = torch.float16, torch.bfloat16


def weight(n, k, dtype, seed=0):
    """Rows whose largest weights differ a thousandfold."""
    gen = torch.Generator().manual_seed(seed)
    size = torch.exp2(torch.randint(-8, 3, (n, 1), generator=gen).float())
    return quantize_rows((torch.randn(n, k, generator=gen) * size).to(dtype), dtype)


def rows(m, k, dtype, seed=1):
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def triton_gemm(x, w):
    module = pytest.importorskip("nybble.kernels.linear.triton_int8", reason="triton is not installed")
    return module.int8_gemm(x.to(DEVICE), w.q.to(DEVICE), w.scales.to(DEVICE)).cpu()


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("m", [1, 2, 16, 17, 40, 70, 130])
@pytest.mark.parametrize(("n", "k"), [(1, 8), (65, 256), (100, 72), (64, 576)])
def test_triton_is_the_reference(m, n, k, dtype):
    x, w = rows(m, k, dtype), weight(n, k, dtype)
    assert_close(triton_gemm(x, w), int8_reference(x, w))


def test_triton_reads_a_part_of_wider_rows():
    wide, w = rows(3, 96, FP16), weight(33, 64, FP16)
    x = wide[:, 16:80]
    assert_close(triton_gemm(x, w), int8_reference(x, w))


@pytest.mark.parametrize(("m", "n"), [(0, 8), (3, 0)])
def test_nothing_gives_nothing(m, n):
    w = Int8Weight(torch.zeros(n, 32, dtype=torch.int8), torch.zeros(n, dtype=BF16))
    assert triton_gemm(torch.zeros(m, 32, dtype=BF16), w).shape == (m, n)


def test_triton_refuses_what_it_does_not_read():
    module = pytest.importorskip("nybble.kernels.linear.triton_int8", reason="triton is not installed")
    x, w = rows(2, 64, BF16), weight(8, 64, BF16)
    for bad, message in (
        ((x.float(), w.q, w.scales), "x: given float32"),
        ((x, w.q.short(), w.scales), "q: given int16"),
        ((x, w.q[:, :32], w.scales), "q: given int8"),
        ((x, w.q.t().contiguous().t(), w.scales), "accepted contiguous int8"),
        ((x, w.q, w.scales.half()), "scales: given float16"),
        ((x, w.q, w.scales[:4]), "scales: given"),
    ):
        with pytest.raises(ValueError, match=message):
            module.check_arguments(*bad)


@pytest.mark.parametrize("m", [1, 3, 8, 33])
@pytest.mark.parametrize(("n", "k"), [(1, 32), (17, 64), (100, 576), (257, 96)])
def test_on_a_cpu_it_is_the_reference(m, n, k):
    x, w = rows(m, k, BF16), weight(n, k, BF16)
    layer = Int8Linear(w, BF16, CPU)
    assert_close(layer(x), int8_reference(x, w))
    assert layer.nbytes == n * k + 2 * n
    assert layer(x[:0]).shape == (0, n)


@pytest.mark.parametrize(
    ("dtype", "k", "reason"),
    [(torch.float32, 64, "activations float32"), (FP16, 64, "bfloat16"), (BF16, 72, "K=72")],
    ids=["fp32", "fp16", "k"],
)
def test_a_cpu_refuses_by_name_what_it_cannot_do_exactly(dtype, k, reason):
    assert reason in can_run(CPU, dtype, k)[1]
    w = Int8Weight(torch.zeros(8, k, dtype=torch.int8), torch.zeros(8, dtype=dtype))
    with pytest.raises(ValueError, match=f"int8 linear layer: .*{reason}"):
        Int8Linear(w, dtype, CPU)


def test_a_gpu_takes_any_k():
    assert can_run(torch.device("cuda", 0), FP16, 72) == (True, "Triton")


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_rounding_errs_by_half_a_step_of_the_row(dtype):
    gen = torch.Generator().manual_seed(0)
    original = (torch.randn(50, 300, generator=gen) * torch.rand(50, 1, generator=gen)).to(dtype)
    original[7] = 0
    w = quantize_rows(original, dtype)
    back = w.q.float() * w.scales.float().unsqueeze(1)
    step = original.float().abs().amax(dim=1, keepdim=True) / 127
    # The scale itself is rounded to the activation type: up to 1/256 of it in bfloat16, at the largest weight.
    assert bool(((back - original.float()).abs() <= step * (0.5 + 127 / 256) + 1e-9).all())
    assert float((back - original.float()).abs().mean() / step.mean()) < 0.4
    assert bool((back[7] == 0).all())


def test_what_cannot_be_rounded_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        quantize_rows(torch.tensor([[1.0, float("inf")]]), FP16)
    with pytest.raises(ValueError, match="weight: given"):
        quantize_rows(torch.zeros(3), FP16)
