"""The fused kernels between GEMMs against their float32 references (in Triton's interpreter when there is no GPU)."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from weights import make_weight  # noqa: E402

from nybble.kernels.activation import GATED  # noqa: E402
from nybble.kernels.fused.activation import gated, gated_reference  # noqa: E402
from nybble.kernels.fused.kv_write import norm_rope_write, norm_rope_write_reference  # noqa: E402
from nybble.kernels.fused.norm import add_rms_norm, add_rms_norm_reference  # noqa: E402
from nybble.kernels.linear import linear_reference, triton_skinny  # noqa: E402
from nybble.kernels.packing import interleave_halves, take_rows  # noqa: E402
from nybble.kernels.parts import Parts  # noqa: E402
from nybble.kernels.rope import RopeAngles, RopeConfig, RopeTable, rotate  # noqa: E402
from nybble.kernels.skinny_layout import pack  # noqa: E402
from nybble.kernels.testing import assert_close, errors  # noqa: E402
from nybble.kernels.tiles import Tile  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP16, BF16 = torch.float16, torch.bfloat16
TYPES = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
SPLITS = pytest.mark.parametrize("splits", [1, 2, 3, 8], ids=lambda s: f"parts-{s}")


def close(y, reference, dtype):
    """The interpreter cuts fp32 to bf16 where a GPU rounds: twice the error."""
    if DEVICE.type == "cpu" and dtype is BF16:
        found = errors(y, reference)
        assert found.worst < 1.6e-2 and found.rms < 9e-3, found
    else:
        assert_close(y.cpu(), reference, dtype)


def parts(splits, rows, width, dtype, bias=False):
    gen = torch.Generator().manual_seed(width + splits)
    values = torch.randn(splits, rows, width, generator=gen)
    added = torch.randn(width, generator=gen).to(dtype) if bias else None
    return values.to(dtype) if splits == 1 else values, added


def on_device(*tensors):
    return tuple(None if t is None else t.to(DEVICE) for t in tensors)


@TYPES
@SPLITS
@pytest.mark.parametrize("width", [1, 96, 576], ids=lambda w: f"N{w}")
@pytest.mark.parametrize("norm_x", [False, True], ids=["plain", "normed"])
def test_add_and_norm(width, splits, norm_x, dtype):
    x, bias = parts(splits, 3, width, dtype, bias=splits == 2)
    weight, own = torch.randn(2, width).to(dtype)
    residual = torch.randn(3, width).to(dtype)
    more = (1e-5, own if norm_x else None, 1e-6, 0.5)
    want, want_y = add_rms_norm_reference(residual, x, bias, weight, *more)
    on = residual.to(DEVICE)
    more = (1e-5, own.to(DEVICE) if norm_x else None, 1e-6, 0.5)
    y = add_rms_norm(on, *on_device(x, bias, weight), *more)
    close(on, want.float(), dtype)
    close(y, want_y, dtype)


@TYPES
def test_norm_alone_changes_nothing_else(dtype):
    residual, weight = torch.randn(4, 100).to(dtype), torch.randn(100)  # float32 weights, as Gemma's
    on = residual.to(DEVICE)
    y = add_rms_norm(on, None, None, weight.to(DEVICE), 1e-6, None, 0.0, 1.0)
    assert torch.equal(on.cpu(), residual)
    close(y, add_rms_norm_reference(residual, None, None, weight, 1e-6, None, 0.0, 1.0)[1], dtype)


@TYPES
@SPLITS
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("activation", GATED)
def test_gate(activation, interleaved, splits, dtype):
    x, bias = parts(splits, 3, 2 * 600, dtype, bias=splits == 3)
    y = gated(*on_device(3 * x, bias), interleaved, dtype, activation)
    close(y, gated_reference(3 * x, bias, interleaved, activation), dtype)


@TYPES
@SPLITS
@pytest.mark.parametrize("norm", [False, True], ids=["no-norm", "qk-norm"])
@pytest.mark.parametrize("heads", [(4, 2, 32), (7, 1, 24), (2, 2, 128)], ids=str)
def test_norm_rotate_write(heads, norm, splits, dtype):
    h, hkv, d = heads
    x, bias = parts(splits, 5, (h + 2 * hkv) * d, dtype, bias=splits == 2)
    weights = torch.randn(2, d).to(dtype) if norm else None
    angles = RopeAngles(RopeConfig("default", 10000.0, d), 64, torch.device("cpu")).packed
    positions = torch.tensor([0, 63, 7, 7, 30], dtype=torch.int32)
    slots = torch.tensor([9, 31, -1, 0, 16], dtype=torch.int32)
    cache = torch.randn(4, 2, hkv, 8, d).to(dtype)
    args = (x, bias, weights, angles, positions, slots)
    want_q, want_cache = norm_rope_write_reference(*args, cache, 1e-5)
    on = cache.to(DEVICE)
    q = norm_rope_write(*on_device(*args), on, 1e-5)
    close(q, want_q, dtype)
    close(on, want_cache, dtype)
    untouched = torch.ones(32, dtype=torch.bool)
    untouched[slots[slots >= 0].long()] = False
    rows = on.cpu().permute(0, 3, 1, 2, 4).flatten(0, 1)
    before = cache.permute(0, 3, 1, 2, 4).flatten(0, 1)
    assert torch.equal(rows[untouched], before[untouched]), "slots of other rows stay as they were"


def test_rotation_is_that_of_the_plain_ops():
    """The two tables, two layouts and two formulas of one rotation."""
    config = RopeConfig("llama3", 500000.0, 64, factor=8.0, original_max_positions=64)
    positions = torch.tensor([0, 3, 100, 511])
    x = torch.randn(4, 4 * 64).to(FP16)
    cos, sin = RopeTable(config, 512, torch.float32, torch.device("cpu")).at(positions, 3, 1)
    plain = rotate(x.view(4, 4, 64).float(), cos, sin)
    angles = RopeAngles(config, 512, DEVICE).packed
    cache = torch.zeros(1, 2, 1, 4, 64, dtype=FP16, device=DEVICE)
    q = norm_rope_write(
        x.unsqueeze(0).to(DEVICE),
        None,
        None,
        angles,
        positions.to(DEVICE, torch.int32),
        torch.arange(4, dtype=torch.int32, device=DEVICE),
        cache,
        0.0,
    )
    assert_close(q, plain[:, :2], FP16)
    assert_close(cache[0, 0, 0], plain[:, 2], FP16)
    assert torch.equal(cache[0, 1, 0].cpu(), x.view(4, 4, 64)[:, 3])


def gate_up(n=144, k=256):
    """A weight of gates, then ups, and the same with its rows alternating."""
    weight = make_weight(n, k, 64, symmetric=False)
    return weight, take_rows(weight, interleave_halves(n))


@pytest.mark.parametrize("rows", [1, 5, 20])
@pytest.mark.parametrize("activation", GATED)
def test_the_gate_inside_the_gemm(activation, rows):
    weight, alternating = gate_up()
    bias = torch.linspace(-1, 1, 144).to(FP16)
    x = (0.2 * torch.randn(rows, 256)).to(FP16)
    packed = pack(alternating, arch="sm_90", device=DEVICE)
    order = interleave_halves(144)
    y = triton_skinny.skinny_gemm_gated(
        *on_device(x), packed.words, packed.scales, packed.zeros, bias[order].to(DEVICE), 64, activation
    )
    want = gated_reference(linear_reference(x, weight, bias).unsqueeze(0), None, False, activation)
    close(y, want, FP16)


@pytest.mark.parametrize("split_k", [1, 3])
def test_parts_add_up_to_the_product(split_k):
    weight, _ = gate_up()
    bias = torch.linspace(-1, 1, 144).to(FP16)
    x = torch.randn(5, 256).to(FP16)
    packed = pack(weight, arch="sm_90", device=DEVICE)
    args = (*on_device(x), packed.words, packed.scales, packed.zeros, bias.to(DEVICE), 64)
    values = triton_skinny.launch_parts(*args, Tile(16, 64, 32, 4, 1, split_k))
    assert values.shape == (split_k, 5, 144) and values.dtype is (FP16 if split_k == 1 else torch.float32)
    y = Parts(values, args[4] if split_k > 1 else None).total(FP16)
    close(y, linear_reference(x, weight, bias), FP16)


def test_refusals_say_what_is_accepted():
    x = torch.zeros(1, 2, 32, dtype=FP16)
    weight = torch.zeros(32, dtype=FP16)
    with pytest.raises(ValueError, match=r"x: given float16 \[1, 2, 32\], accepted .* \[S, 3, 32\]"):
        add_rms_norm(torch.zeros(3, 32, dtype=FP16), x, None, weight, 1e-5, None, 0.0, 1.0)
    with pytest.raises(ValueError, match="residual: given float32"):
        add_rms_norm(torch.zeros(2, 32), x, None, weight, 1e-5, None, 0.0, 1.0)
    with pytest.raises(ValueError, match="given N=40000, accepted 1 to 32768"):
        wide = torch.zeros(1, 40000, dtype=FP16)
        add_rms_norm(wide, None, None, wide[0], 1e-5, None, 0.0, 1.0)
    with pytest.raises(ValueError, match="activation: given 'relu', accepted silu, gelu_tanh"):
        gated(x, None, False, FP16, "relu")
    with pytest.raises(ValueError, match="an even number"):
        gated(x[:, :, :31].clone(), None, False, FP16, "silu")
    cache = torch.zeros(2, 2, 1, 4, 8, dtype=FP16)
    angles, index = torch.zeros(9, 8), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"x: given 32 columns, accepted \(H \+ 2 \* 2\) \* 8"):
        norm_rope_write(x, None, None, angles, index, index, cache.expand(2, 2, 2, 4, 8).clone(), 0.0)
    with pytest.raises(ValueError, match="positions: given int64"):
        norm_rope_write(x, None, None, angles, index.long(), index, cache, 0.0)
    with pytest.raises(ValueError, match="an even N"):
        packed = pack(make_weight(9, 64, 64, True), arch="sm_90")
        triton_skinny.skinny_gemm_gated(
            x[0, :, :1].new_zeros(1, 64), packed.words, packed.scales, None, None, 64, "silu"
        )


def test_the_ops_have_shapes_without_data():
    meta = torch.device("meta")
    x = torch.zeros(2, 3, 64, device=meta)
    assert gated(x, None, True, BF16, "silu").shape == (3, 32)
    residual = torch.zeros(3, 64, dtype=BF16, device=meta)
    assert add_rms_norm(residual, x, None, residual[0], 1e-5, None, 0.0, 1.0).shape == (3, 64)
    cache = torch.zeros(2, 2, 1, 4, 16, dtype=BF16, device=meta)
    index = torch.zeros(3, dtype=torch.int32, device=meta)
    q = norm_rope_write(x, None, None, torch.zeros(9, 16, device=meta), index, index, cache, 0.0)
    assert q.shape == (3, 2, 16) and q.dtype is BF16
