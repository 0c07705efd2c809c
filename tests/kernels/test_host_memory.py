"""Blocks of host memory are used again, but never while somebody still reads them."""

import pytest
import torch

from nybble.kernels import host_memory
from nybble.kernels.host_memory import LARGE_BYTES, empty, empty_bytes, kept_blocks
from nybble.kernels.threads import single_steps, spread


@pytest.mark.parametrize("nbytes", [0, 1, 4096, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 3])
def test_every_size_can_be_written(nbytes):
    data = empty_bytes(nbytes).fill_(7)
    assert data.numel() == nbytes
    assert data.dtype is torch.uint8
    assert bool((data == 7).all())


def test_shape_and_type():
    value = empty((1024, 2048), torch.int32)
    assert value.shape == (1024, 2048)
    assert value.dtype is torch.int32


def test_a_block_is_handed_out_again_only_when_its_tensors_are_gone():
    with kept_blocks():
        first = empty_bytes(LARGE_BYTES)
        address, view = first.data_ptr(), first.view(torch.int32)[5:]
        del first
        second = empty_bytes(LARGE_BYTES)
        assert second.data_ptr() != address, "a view of the first still lies there"
        del view
        assert empty_bytes(LARGE_BYTES).data_ptr() == address
        assert empty_bytes(2 * LARGE_BYTES).data_ptr() not in (address, second.data_ptr())


def test_what_waits_is_bounded(monkeypatch):
    monkeypatch.setattr(host_memory, "IDLE_BYTES", 3 * LARGE_BYTES)
    with kept_blocks():
        for extra in range(8):
            empty_bytes(LARGE_BYTES + extra)
        assert sum(map(len, host_memory._kept[-1]._blocks)) <= 5 * LARGE_BYTES


def test_tensors_outlive_the_end_of_keeping():
    with kept_blocks():
        kept = empty_bytes(LARGE_BYTES).fill_(3)
    assert not host_memory._kept
    assert bool((kept == 3).all())


@pytest.mark.parametrize("threads", [1, 3])
def test_work_is_spread_over_threads_that_split_nothing_further(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seen: list[tuple[int, int]] = []
        with single_steps():
            assert torch.get_num_threads() == 1
            spread(lambda i: seen.append((i, torch.get_num_threads())), range(20))
        assert sorted(seen) == [(i, 1) for i in range(20)]
        assert torch.get_num_threads() == threads
        with pytest.raises(ValueError, match="seven"):
            spread(_refuse_seven, range(20))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def _refuse_seven(i: int) -> None:
    if i == 7:
        raise ValueError("seven")
