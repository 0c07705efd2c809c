"""The Triton skinny-layout GEMM against the float32 reference (in Triton's interpreter when there is no GPU)."""

import pytest
import torch

from nybble.kernels.linear import operands
from nybble.kernels.linear.reference import linear_reference
from nybble.kernels.packing import W4A16Weight, pack_rows
from nybble.kernels.skinny_layout import SkinnyWeight, pack
from nybble.kernels.testing import assert_close, errors

triton_skinny = pytest.importorskip("nybble.kernels.linear.triton_skinny", reason="triton is not installed")
from nybble.kernels.tiles import Tile  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP16, BF16 = torch.float16, torch.bfloat16


def make_weight(n: int, k: int, g: int, symmetric: bool, dtype: torch.dtype, seed: int = 0) -> W4A16Weight:
    """Scales differ by up to 2^8 between neighbouring groups and a group may be all zero: no swap can hide."""
    gen = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (n, k), generator=gen, dtype=torch.uint8)
    zeros = None if symmetric else torch.randint(0, 16, (n, k // g), generator=gen, dtype=torch.uint8)
    mantissa = 1 + torch.rand(n, k // g, generator=gen)
    scales = mantissa * torch.exp2(torch.randint(-11, -3, (n, k // g), generator=gen).float())
    scales[:: max(1, n // 3), 0] = 0
    return W4A16Weight(pack_rows(q), scales.to(dtype), zeros, None, g, n, k)


def make_x(m: int, k: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=gen) * torch.linspace(0.5, 2.0, k)
    return x.to(dtype)


def run(
    x: torch.Tensor, w: SkinnyWeight, bias: torch.Tensor | None = None, tile: Tile | None = None
) -> torch.Tensor:
    args = (x.to(DEVICE), w.words, w.scales, w.zeros, None if bias is None else bias.to(DEVICE), w.group_size)
    if tile is None:
        return triton_skinny.skinny_gemm(*args).cpu()
    return triton_skinny.launch(*args, tile=tile).cpu()


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("g", [32, 64, 128])
def test_every_format(g: int, dtype: torch.dtype, symmetric: bool):
    weight = make_weight(40, 384, g, symmetric, dtype)
    x = make_x(3, 384, dtype)
    bias = torch.linspace(-3, 3, 40).to(dtype)
    y = run(x, pack(weight, arch="gfx1151", device=DEVICE), bias)
    assert_close(y, linear_reference(x, weight, bias), dtype)


@pytest.mark.parametrize("m", [1, 2, 5, 6, 16, 17, 64])
@pytest.mark.parametrize(
    ("n", "k", "g"), [(8, 576, 64), (24, 576, 32), (40, 128, 128), (9, 64, 64), (1, 32, 32)]
)
def test_ragged_shapes(m: int, n: int, k: int, g: int):
    weight = make_weight(n, k, g, n % 8 != 0, FP16, seed=m)
    x = make_x(m, k, FP16, seed=n)
    assert_close(run(x, pack(weight, arch="sm_90", device=DEVICE)), linear_reference(x, weight))


@pytest.mark.parametrize("split_k", [1, 2, 3])
def test_split_k_adds_bias_once(split_k: int):
    weight = make_weight(24, 640, 64, False, BF16)
    x, bias = make_x(5, 640, BF16), torch.full((24,), 7.0, dtype=BF16)
    tile = Tile(16, 16, 32, 4, 1, split_k)
    y = run(x, pack(weight, arch="sm_90", device=DEVICE), bias, tile)
    assert_close(y, linear_reference(x, weight, bias))


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_scaling_the_weights_instead(dtype: torch.dtype, symmetric: bool):
    weight = make_weight(24, 384, 64, symmetric, dtype)
    # The interpreter cuts fp32 to bf16 instead of rounding: powers of two keep the product exact.
    weight.scales.copy_(torch.exp2(weight.scales.float().clamp_min(2**-11).log2().round()))
    x = make_x(5, 384, dtype)
    y = run(x, pack(weight, arch="sm_90", device=DEVICE), tile=Tile(16, 16, 32, 4, scale_weights=True))
    assert_close(y, linear_reference(x, weight))


def test_padding_and_row_strides_change_no_bit():
    weight = make_weight(16, 2048, 128, False, FP16)
    x = make_x(3, 2048, FP16)
    plain, padded = pack(weight, arch="gfx1100", device=DEVICE), pack(weight, arch="gfx1151", device=DEVICE)
    assert padded.qweight.stride(0) > plain.qweight.stride(0)
    wide_scales = torch.full((16, 20), float("nan"), dtype=FP16, device=DEVICE)
    wide_zeros = torch.full((2, 19), -1, dtype=torch.int32, device=DEVICE)
    assert plain.zeros is not None
    wide_scales[:, :16], wide_zeros[:, :16] = plain.scales, plain.zeros
    strided = SkinnyWeight(padded.qweight, wide_scales[:, :16], wide_zeros[:, :16], 128, 16, 2048)
    wide_x = torch.full((3, 2080), float("nan"), dtype=FP16)
    wide_x[:, :2048] = x
    want = run(x, plain)
    assert torch.equal(run(wide_x[:, :2048], strided), want)
    assert_close(want, linear_reference(x, weight))


def test_scales_keep_the_checkpoints_type():
    """fp16 scales under bf16 activations: the scale meets the fp32 sum unrounded."""
    weight = make_weight(16, 128, 64, True, FP16)
    x = make_x(4, 128, BF16)
    y = run(x, pack(weight, arch="sm_90", device=DEVICE))
    exact = linear_reference(x, weight)
    assert_close(y, exact)
    if DEVICE.type == "cuda":  # the interpreter cuts fp32 to bf16 instead of rounding
        assert errors(y, exact).rms <= 1.01 * errors(exact.to(BF16), exact).rms


@pytest.mark.parametrize(("m", "n"), [(0, 16), (3, 0)])
def test_empty(m: int, n: int):
    weight = make_weight(n, 64, 64, True, FP16)
    assert run(make_x(m, 64, FP16), pack(weight, arch="sm_90", device=DEVICE)).shape == (m, n)


def test_a_step_wider_than_a_group_is_refused():
    packed = pack(make_weight(16, 128, 32, True, FP16), arch="sm_90", device=DEVICE)
    with pytest.raises(ValueError, match="block_k 64: given group_size 32"):
        run(make_x(1, 128, FP16), packed, tile=Tile(16, 16, 64, 4))


def _arguments() -> dict[str, torch.Tensor | int | None]:
    packed = pack(make_weight(16, 128, 64, False, FP16), arch="sm_90", device=DEVICE)
    x = make_x(2, 128, FP16).to(DEVICE)
    return {
        "x": x,
        "words": packed.words,
        "scales": packed.scales,
        "zeros": packed.zeros,
        "bias": None,
        "group_size": 64,
    }


BAD = {
    "x of float32": ({"x": torch.zeros(2, 128)}, "x: given float32"),
    "x of rank 3": ({"x": torch.zeros(2, 2, 128, dtype=FP16)}, "x: given float16"),
    "column stride": ({"x": torch.zeros(128, 2, dtype=FP16).t()}, "x: given strides"),
    "K and group_size": ({"x": torch.zeros(2, 96, dtype=FP16)}, "x: given K=96"),
    "group_size": ({"group_size": 256}, "group_size: given 256, accepted 32, 64, 128"),
    "int8 weight": ({"words": torch.zeros(16, 64, dtype=torch.int8)}, "words: given int8"),
    "short weight row": ({"words": torch.zeros(16, 15, dtype=torch.int32)}, r"accepted int32 \[N, 16\]"),
    "scale shape": ({"scales": torch.zeros(16, 3, dtype=FP16)}, r"scales: given float16 \[16, 3\]"),
    "scale type": ({"scales": torch.zeros(16, 2, dtype=torch.int16)}, "scales: given int16"),
    "activation-type zero points": ({"zeros": torch.zeros(16, 2, dtype=FP16)}, "zeros: given float16"),
    "activation type in the packed extents": (
        {"zeros": torch.zeros(2, 2, dtype=FP16)},
        "zeros: given float16",
    ),
    "zero points unpacked": ({"zeros": torch.zeros(16, 2, dtype=torch.int32)}, r"accepted int32 \[2, 2\]"),
    "bias type": ({"bias": torch.zeros(16)}, "bias: given float32"),
    "bias length": ({"bias": torch.zeros(8, dtype=FP16)}, r"accepted contiguous float16 \[16\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case: str):
    change, message = BAD[case]
    moved = {
        k: v.to(DEVICE) if isinstance(v, torch.Tensor) and v.device.type == "cpu" else v
        for k, v in change.items()
    }
    with pytest.raises(ValueError, match=message):
        triton_skinny.skinny_gemm(**{**_arguments(), **moved})


def test_another_device_is_refused():
    elsewhere = {**_arguments(), "scales": torch.zeros(16, 2, dtype=FP16, device="meta")}
    with pytest.raises(ValueError, match="scales: given meta, accepted x's device"):
        operands.check(**elsewhere)


def test_n_must_divide_by_8_with_zero_points():
    args = _arguments()
    words, scales = args["words"], args["scales"]
    assert isinstance(words, torch.Tensor) and isinstance(scales, torch.Tensor)
    with pytest.raises(ValueError, match="zeros: given N=12"):
        triton_skinny.skinny_gemm(**{**args, "words": words[:12], "scales": scales[:12]})


def test_undersized_weight_view_is_refused():
    args = _arguments()
    words = args["words"]
    assert isinstance(words, torch.Tensor)
    view = words.clone()
    view.untyped_storage().resize_(view.untyped_storage().nbytes() - 4)
    with pytest.raises(ValueError, match="words: given a view"):
        triton_skinny.skinny_gemm(**{**args, "words": view})


def test_fake_implementation_traces_without_data():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        y = triton_skinny.skinny_gemm(
            torch.empty(3, 128, dtype=BF16),
            torch.empty(16, 16, dtype=torch.int32),
            torch.empty(16, 2, dtype=BF16),
            None,
            None,
            64,
        )
    assert (tuple(y.shape), y.dtype) == ((3, 16), BF16)


def test_torch_compile_sees_one_operator():
    packed = pack(make_weight(16, 128, 64, True, FP16), arch="sm_90", device=DEVICE)
    x = make_x(2, 128, FP16).to(DEVICE)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return triton_skinny.skinny_gemm(x, packed.words, packed.scales, None, None, 64) * 2

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize(
    ("arch", "m", "k", "moved"),
    [
        ("gfx1151", 2, 1024, True),
        ("gfx1151", 300, 4096, True),
        ("gfx1151", 1, 4096, False),
        ("gfx1151", 16, 576, False),
        ("gfx1151", 16, 512, False),
        ("gfx1100", 16, 4096, False),
        ("sm_90", 16, 4096, False),
    ],
)
def test_activation_rows_move_off_the_cliff_of_gfx1151(arch: str, m: int, k: int, moved: bool):
    x = make_x(m, k, FP16)
    y = triton_skinny._off_the_cliff(x, arch)
    assert torch.equal(x, y)
    assert (y is not x) == moved
    assert y.stride() == (k + 64 * moved, 1)


def test_rdna_falls_back_to_plain_triton_without_gluon(monkeypatch: pytest.MonkeyPatch):
    assert triton_skinny.table_name("gfx942") == "skinny"
    monkeypatch.setattr(triton_skinny, "_gluon_kernel", lambda: None)
    assert triton_skinny.table_name("gfx1151") == "skinny"
