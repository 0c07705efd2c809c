"""The kernels that read logits against their references (in Triton's interpreter when there is no GPU)."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from nybble.kernels.fused import selfcheck  # noqa: E402
from nybble.kernels.fused.argmax import best_rows, best_rows_reference  # noqa: E402
from nybble.kernels.fused.rescore import (  # noqa: E402
    are_largest,
    largest,
    largest_reference,
    rescore,
    rescore_reference,
)
from nybble.kernels.linear import W4A16Linear  # noqa: E402
from nybble.service.checkpoints.rounding import quantize_tensor  # noqa: E402
from nybble.service.models.layers import RescoredHead  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
NAN, INF = float("nan"), float("inf")
TYPES = pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=["fp16", "bf16", "fp32"])
SHAPES = pytest.mark.parametrize(
    ("rows", "vocab"),
    [(1, 1), (3, 1), (1, 31), (5, 33), (3, 2049), (2, 4096), (3, 49152), (1, 151936)],
    ids=lambda v: str(v),
)


def random_logits(rows, vocab, dtype):
    """Half of the digits: most of the largest have equals."""
    gen = torch.Generator().manual_seed(rows * 7 + vocab)
    return (8 * torch.randn(rows, vocab, generator=gen)).round().to(dtype)


def best(logits):
    """best_rows, and -1 instead of the index of a row that is not finite; every index in range."""
    y = best_rows(logits.to(DEVICE)).cpu()
    assert ((y[0] >= 0) & (y[0] < logits.shape[1])).all()
    y[0] = torch.where(y[1] > 0, y[0], -1)
    return y


def found_largest(logits, count):
    y = largest(logits.to(DEVICE), count).cpu()
    assert y.shape == (len(logits), count) and are_largest(logits, y)
    return y


@TYPES
@SHAPES
def test_the_best_of_a_row(rows, vocab, dtype):
    logits = random_logits(rows, vocab, dtype)
    assert torch.equal(best(logits), best_rows_reference(logits))
    where = [r * vocab // rows for r in range(rows)]
    for row, at in zip(logits, where, strict=True):
        row[at] = 100
    assert best(logits).tolist() == [where, [1] * rows]


@TYPES
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF], ids=str)
def test_one_number_that_is_not_finite_is_seen_wherever_it_is(bad, dtype):
    vocab = 5000
    logits = random_logits(1, vocab, dtype).expand(6, vocab).clone()
    for row, at in enumerate((0, 2047, 2048, 4095, vocab - 1)):
        logits[row, at] = bad
    assert best(logits)[1].tolist() == [0] * 5 + [1]
    assert best(torch.full((2, 70), bad, dtype=dtype))[1].tolist() == [0, 0]


@TYPES
def test_the_first_of_equals(dtype):
    logits = torch.full((4, 5000), -3.0, dtype=dtype)
    logits[1, [100, 4000]] = 2
    logits[2, 70:] = 0
    logits[2, 60] = -0.0  # equals 0, and comes first
    logits[3] = torch.finfo(dtype).min
    assert best(logits).tolist() == [[0, 100, 60, 0], [1] * 4]


@TYPES
def test_rows_of_any_stride(dtype):
    wide = random_logits(5, 3000, dtype)
    for logits in (wide[:, :2500], wide[::2, 1:2222], wide[1:2].expand(3, -1), wide[:0]):
        assert torch.equal(best(logits), best_rows_reference(logits))
        found_largest(logits, 32)


@TYPES
@SHAPES
def test_the_largest_of_a_row(rows, vocab, dtype):
    found_largest(random_logits(rows, vocab, dtype), min(32, vocab))


def test_many_rows():
    logits = random_logits(64, 70, FP16)
    assert torch.equal(best(logits), best_rows_reference(logits))
    assert torch.equal(found_largest(logits, 32), found_largest(logits, 32))


@TYPES
@pytest.mark.parametrize("count", [1, 33, 64])
def test_any_count_and_groups_that_share_the_largest(count, dtype):
    gen = torch.Generator().manual_seed(count)
    logits = torch.randn(3, 4000, generator=gen).to(dtype)
    logits[0, 64:128] += 50  # all in one group
    logits[1, ::64] += 50  # one in each
    logits[2] = 1
    assert sorted(found_largest(logits, count)[2].tolist()) == list(range(count))


@TYPES
def test_a_nan_is_not_among_the_largest_while_there_are_numbers(dtype):
    logits = random_logits(5, 200, dtype)
    logits[0, 7] = NAN
    logits[1] = NAN
    logits[2, 20:] = -INF
    logits[3, :180] = NAN
    logits[4, 199] = INF
    found = found_largest(logits, 32)
    assert 7 not in found[0].tolist() and 199 in found[4].tolist()


@TYPES
@pytest.mark.parametrize("k", [1, 96, 1100], ids=lambda k: f"K{k}")
def test_new_logits(k, dtype):
    gen = torch.Generator().manual_seed(k)
    weight = torch.randn(300, k, generator=gen).to(dtype)
    x = (torch.randn(4, k, generator=gen) / k**0.5).to(dtype)
    logits = random_logits(4, 300, dtype)
    chosen = largest_reference(logits, 32)
    want = rescore_reference(logits, chosen, weight, x)
    on = logits.to(DEVICE)
    rescore(on, chosen.to(DEVICE), weight.to(DEVICE), x.to(DEVICE))
    # The interpreter cuts fp32 to bf16 where a GPU rounds.
    tolerance = {FP16: 1e-3, BF16: 8e-3, FP32: 1e-5}[dtype]
    torch.testing.assert_close(on.cpu().float(), want, rtol=tolerance, atol=tolerance)
    untouched = torch.ones(4, 300, dtype=torch.bool).scatter(1, chosen.long(), False)
    assert torch.equal(on.cpu()[untouched], logits[untouched])


def test_a_rescored_head_with_the_kernels_is_the_one_without():
    gen = torch.Generator().manual_seed(3)
    weight = torch.randn(999, 64, generator=gen).to(BF16)
    screen = quantize_tensor(weight, group_size=32, symmetric=False, thorough=False)
    head = RescoredHead(W4A16Linear(screen, None, BF16, DEVICE), weight.to(DEVICE))
    x = torch.randn(3, 64, generator=gen).to(BF16).to(DEVICE)
    results = []
    for fused in (False, True):
        head.fused = fused
        results.append(head(x).cpu().float())
    torch.testing.assert_close(*results, rtol=0.02, atol=0.1)
    exact = torch.nn.functional.linear(x.cpu().float(), weight.float())
    at = results[1].topk(5, dim=1).indices
    torch.testing.assert_close(results[1].gather(1, at), exact.gather(1, at), rtol=0.02, atol=0.1)
    x[1, 5] = NAN
    assert head(x).isfinite().all(dim=1).tolist() == [True, False, True]


@TYPES
def test_the_self_check_passes_and_sees_a_fault(dtype, monkeypatch, caplog):
    for check in (selfcheck.best_problem, selfcheck.rescore_problem):
        check.cache_clear()
        assert check(DEVICE, dtype) is None
        check.cache_clear()
    monkeypatch.setattr("nybble.kernels.fused.argmax.best_rows", lambda logits: best_rows(-logits))
    monkeypatch.setattr("nybble.kernels.fused.rescore.largest", lambda logits, n: largest(-logits, n))
    assert "expected" in selfcheck.best_problem(DEVICE, dtype)
    assert "not those of the 32 largest" in selfcheck.rescore_problem(DEVICE, dtype)
    assert "torch's ops are used instead" in caplog.text
    for check in (selfcheck.best_problem, selfcheck.rescore_problem):
        check.cache_clear()


def test_refusals_say_what_is_accepted():
    logits = torch.zeros(2, 100, dtype=FP16)
    index = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="logits: given float64 .* accepted float16 or bfloat16 or float32"):
        best_rows(logits.double())
    with pytest.raises(ValueError, match="logits: given strides"):
        best_rows(logits.T)
    with pytest.raises(ValueError, match="given V=0, accepted at least 1"):
        largest(logits[:, :0], 1)
    for count in (0, 65, 101):
        with pytest.raises(ValueError, match=f"count: given {count}, accepted 1 to 64"):
            largest(logits, count)
    with pytest.raises(ValueError, match="accepted at most 2097152"):
        largest(torch.zeros(1, (1 << 21) + 1, dtype=FP16), 1)
    with pytest.raises(ValueError, match="best: given int64"):
        rescore(logits, index.long(), torch.zeros(100, 8, dtype=FP16), torch.zeros(2, 8, dtype=FP16))
    with pytest.raises(ValueError, match=r"weight: given float16 \[99, 8\], accepted float16 \[100, 8\]"):
        rescore(logits, index, torch.zeros(99, 8, dtype=FP16), torch.zeros(2, 8, dtype=FP16))


def test_the_references_see_what_is_wrong():
    logits = torch.tensor([[1.0, 5.0, NAN, 5.0, -INF]])
    for right in ([1, 3], [3, 1, 0], [0, 1, 3, 4], [4, 3, 2, 1, 0]):
        assert are_largest(logits, torch.tensor([right]))
    for wrong in ([1, 0], [1, 1], [1, 3, 2], [0, 1, 3, 2], [1, 5], [1, -1]):
        assert not are_largest(logits, torch.tensor([wrong]))


def test_the_ops_have_shapes_without_data():
    logits = torch.zeros(3, 64, dtype=BF16, device="meta")
    assert best_rows(logits).shape == (2, 3) and largest(logits, 5).shape == (3, 5)
