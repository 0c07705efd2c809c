import pytest
import torch

from nybble.kernels.linear.reference import dequantize
from nybble.kernels.packing import unpack_rows
from nybble.service.checkpoints.rounding import quantize_tensor

SHAPES = [(1, 32, 32), (7, 64, 32), (16, 128, 128), (3, 192, 64), (576, 1536, 32)]


def _plain(w: torch.Tensor, group_size: int, symmetric: bool) -> torch.Tensor:
    """Round to nearest over each group's whole range, nothing searched."""
    x = w.view(w.shape[0], -1, group_size)
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    if symmetric:
        s = torch.maximum(-low, high) / 7.5
        z = torch.full_like(s, 8)
    else:
        s = (high - low) / 15
        z = (-low / s).round()
    return (((x / s + z).round().clamp(0, 15) - z) * s).view(w.shape)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize(("n", "k", "g"), SHAPES, ids=str)
def test_never_worse_than_plain_rounding(n: int, k: int, g: int, symmetric: bool) -> None:
    torch.manual_seed(n + k)
    w = torch.randn(n, k) * torch.rand(n, 1) + 0.1
    weight = quantize_tensor(w, g, symmetric)
    assert weight.symmetric == symmetric and weight.group_size == g
    found, plain = (
        (v - w).square().view(n, -1, g).sum(-1) for v in (dequantize(weight), _plain(w, g, symmetric))
    )
    assert torch.all(found <= plain * 1.0001 + 1e-9)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_a_weight_that_is_already_4_bit_comes_back(symmetric: bool) -> None:
    torch.manual_seed(0)
    q = torch.randint(0, 16, (8, 4, 32))
    q[..., :2] = torch.tensor([0, 15])
    z = torch.full((8, 4, 1), 8) if symmetric else torch.randint(0, 16, (8, 4, 1))
    s = torch.rand(8, 4, 1) + 0.5
    w = ((q - z) * s).view(8, 128)
    weight = quantize_tensor(w, 32, symmetric)
    torch.testing.assert_close(dequantize(weight), w, rtol=1e-5, atol=1e-5)
    assert torch.equal(unpack_rows(weight.q).long().view(8, 4, 32), q)


def test_importance_moves_the_error_to_where_it_matters_less() -> None:
    torch.manual_seed(0)
    w = torch.randn(64, 128)
    h = torch.full((128,), 0.01)
    h[::16] = 10.0
    error = {
        name: ((dequantize(quantize_tensor(w, 32, False, importance)) - w).square() * h).sum().item()
        for name, importance in (("equal", None), ("weighted", h))
    }
    assert error["weighted"] < 0.7 * error["equal"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-7, -3.0, 3.0], ids=str)
def test_constant_groups(value: float, symmetric: bool, dtype: torch.dtype) -> None:
    w = torch.full((2, 64), value).to(dtype)
    weight = quantize_tensor(w, 32, symmetric)
    assert weight.scales.dtype == dtype
    error = (dequantize(weight) - w.float()).abs().max().item()
    # A scale below the smallest value of its type is 0, and so is the weight then.
    assert error <= max(abs(w.float()[0, 0].item()) * 0.01, 1e-6 if dtype == torch.float16 else 0)


def test_importance_of_zero_everywhere_is_equal_importance() -> None:
    w = torch.randn(4, 64)
    a, b = quantize_tensor(w, 32), quantize_tensor(w, 32, importance=torch.zeros(64))
    torch.testing.assert_close(dequantize(a), dequantize(b))


@pytest.mark.parametrize(
    ("w", "options", "message"),
    [
        (torch.zeros(4, 48), {}, r"\[N=4, K=48\]: group_size 32 must be a multiple of 8 that divides K"),
        (torch.zeros(4, 48), {"group_size": 12}, "group_size 12"),
        (torch.zeros(48), {}, r"given torch.float32 \[48\], accepted a floating \[N, K\]"),
        (torch.zeros(4, 32).int(), {}, "given torch.int32"),
        (torch.full((4, 32), float("nan")), {}, "not finite"),
        (torch.full((4, 32), float("inf")), {}, "not finite"),
        (torch.zeros(4, 32), {"importance": torch.ones(31)}, r"importance: given \[31\], accepted \[32\]"),
        (torch.zeros(4, 32), {"scale_dtype": torch.int8}, "scale type: given torch.int8"),
    ],
    ids=["K", "group", "1-D", "integer", "nan", "inf", "importance", "scale type"],
)
def test_what_cannot_be_quantised_is_refused(w: torch.Tensor, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_tensor(w, **options)


def test_without_the_search_the_error_is_that_of_plain_rounding_at_most() -> None:
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(5))
    errors = [
        float((dequantize(quantize_tensor(w, 32, thorough=thorough), torch.float32) - w).square().mean())
        for thorough in (True, False)
    ]
    low, high = (getattr(w.view(-1, 32), end)(1, keepdim=True) for end in ("amin", "amax"))
    step = (high - low) / 15
    zero = (-low / step).round()
    plain = ((w.view(-1, 32) / step + zero).round().clamp(0, 15) - zero) * step
    assert errors[0] <= errors[1] <= float((plain - w.view(-1, 32)).square().mean())
