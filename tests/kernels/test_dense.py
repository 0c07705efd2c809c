import pytest
import torch
from weights import make_weight

from nybble.kernels.linear import W4A16Linear, dense_bytes, dense_copy, dequantize
from nybble.kernels.linear.dense import row_stride
from nybble.kernels.target import Target, cpu_target

CPU = torch.device("cpu")
STRIX = Target("rocm", "gfx1151", "", 40, 65536)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("target", [cpu_target(), STRIX], ids=["cpu", "gfx1151"])
def test_a_copy_is_the_reference_dequantisation_bit_for_bit(target, symmetric, dtype):
    weight = make_weight(1500, 4096, 128, symmetric)  # more rows than one chunk
    copy = dense_copy(weight, dtype, CPU, target)
    assert torch.equal(copy, dequantize(weight, dtype))
    assert copy.untyped_storage().nbytes() == dense_bytes(1500, 4096, dtype, target)


def test_rows_leave_the_cliff_on_gfx11_alone():
    assert row_stride(4096, torch.float16, STRIX) == 4096 + 64
    assert row_stride(4000, torch.float16, STRIX) == 4000
    assert row_stride(4096, torch.float16, cpu_target()) == 4096


def test_a_layer_with_a_copy_uses_it_at_large_m_and_computes_the_same():
    weight = make_weight(64, 128, 32, symmetric=False)
    bias = torch.linspace(-1, 1, 64)
    plain = W4A16Linear(weight, bias, torch.bfloat16, CPU)
    both = W4A16Linear(weight, bias, torch.bfloat16, CPU, dense=True)
    assert (both.path_for(1), both.path_for(512)) == ("cpu", "dense")
    x = torch.randn(512, 128).bfloat16()
    expected = torch.nn.functional.linear(x.float(), dequantize(weight), bias)
    assert (both(x).float() - expected).norm() / expected.norm() < 4e-3
    torch.testing.assert_close(both(x), plain(x), rtol=0.05, atol=0.05)
    assert both.nbytes == plain.nbytes, "the copy is another pool's"
