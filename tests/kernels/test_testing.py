"""The comparison helper itself: it must be able to fail."""

import pytest
import torch

from nybble.kernels.testing import TOLERANCE, assert_close, errors


def test_equal_and_empty_pass():
    x = torch.randn(4, 5)
    assert_close(x, x)
    assert_close(torch.empty(0, 3), torch.empty(0, 3))


def test_one_wrong_element_is_found_and_named():
    want = torch.randn(6, 7, generator=torch.Generator().manual_seed(0))
    got = want.clone()
    got[3, 4] += 1
    with pytest.raises(AssertionError, match=r"\[3, 4\]: got"):
        assert_close(got, want)


def test_a_small_error_everywhere_is_found():
    want = torch.ones(100)
    with pytest.raises(AssertionError, match="rms"):
        assert_close((want * (1 + 1.5 * TOLERANCE[torch.float16].rms)).half(), want)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_never_passes(bad: float):
    want = torch.ones(8)
    got = want.clone()
    got[2] = bad
    with pytest.raises(AssertionError, match=r"\[2\]"):
        assert_close(got, want)


def test_shapes_must_agree():
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.zeros(3, 1), torch.zeros(3))


def test_errors_are_relative_to_the_reference():
    found = errors(torch.tensor([2.0, 4.02]), torch.tensor([2.0, 4.0]))
    assert found.worst == pytest.approx(0.005, rel=1e-3)
    assert found.rms == pytest.approx(0.02 / 20**0.5, rel=1e-3)
