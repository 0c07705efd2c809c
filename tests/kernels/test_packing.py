import pytest
import torch

from nybble.kernels.packing import W4A16Weight, concat_rows, pack_rows, unpack_rows


def weight(n=4, k=64, g=32, symmetric=True, seed=0, scale_dtype=torch.float16, g_idx=None):
    gen = torch.Generator().manual_seed(seed)
    q = pack_rows(torch.randint(0, 16, (n, k), generator=gen))
    scales = torch.rand(n, k // g, generator=gen).to(scale_dtype)
    zeros = None if symmetric else torch.randint(0, 16, (n, k // g), generator=gen).to(torch.uint8)
    return W4A16Weight(q, scales, zeros, g_idx, g, n, k)


@pytest.mark.parametrize("shape", [(1, 8), (3, 40), (0, 16), (5, 8)], ids=str)
def test_unpack_is_the_inverse_of_pack(shape):
    values = torch.randint(0, 16, shape)
    assert torch.equal(unpack_rows(pack_rows(values)).long(), values)


@pytest.mark.parametrize("count", [1, 2])
def test_columns_of_a_wider_tensor_unpack_too(count):
    wide = pack_rows(torch.randint(0, 16, (5, 64)))
    assert torch.equal(unpack_rows(wide[:, 3 : 3 + count]), unpack_rows(wide)[:, 24 : 24 + 8 * count])
    assert torch.equal(unpack_rows(wide.t()[:1]), unpack_rows(wide.t().contiguous()[:1]))


def test_words_hold_the_first_column_in_their_lowest_nibble():
    words = pack_rows(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15]]))
    assert words.tolist() == [[0xF7654321 - (1 << 32)]]


def test_pack_refuses_columns_that_do_not_fill_words():
    with pytest.raises(ValueError, match="given 12 columns, accepted a multiple of 8"):
        pack_rows(torch.zeros(1, 12))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 7, dtype=torch.int32)}, r"q: given int32 \[4, 7\], accepted int32 \[4, 8\]"),
        ({"q": torch.zeros(4, 8, dtype=torch.int64)}, "q: given int64"),
        ({"scales": torch.zeros(4, 3)}, "scales: given"),
        ({"zeros": torch.zeros(4, 2)}, "zeros: given float32"),
        ({"g_idx": torch.zeros(64)}, "g_idx: given float32"),
        ({"group_size": 24}, "multiple of 8 and of group_size"),
        ({"group_size": -1}, "multiple of 8 and of group_size"),
    ],
    ids=["q-shape", "q-type", "scales", "zeros-type", "g_idx-type", "group", "minus-one"],
)
def test_a_weight_that_does_not_fit_together_is_refused(change, message):
    good = weight()
    fields = {name: getattr(good, name) for name in ("q", "scales", "zeros", "g_idx", "group_size", "n", "k")}
    with pytest.raises(ValueError, match=message):
        W4A16Weight(**(fields | change))


def test_rows_of_mixed_symmetry_fuse_with_explicit_zero_points():
    whole = concat_rows([weight(n=2, symmetric=True), weight(n=3, symmetric=False, seed=1)])
    assert whole is not None and whole.n == 5
    assert whole.zeros[:2].unique().tolist() == [8]
    assert torch.equal(whole.zeros[2:], weight(n=3, symmetric=False, seed=1).zeros)


@pytest.mark.parametrize(
    "other",
    [
        {"g": 64},
        {"k": 128},
        {"scale_dtype": torch.bfloat16},
        {"g_idx": torch.arange(64, dtype=torch.int32) // 32},
    ],
    ids=["group", "k", "scale-type", "g_idx"],
)
def test_rows_of_different_formats_do_not_fuse(other):
    assert concat_rows([weight(), weight(**other)]) is None
