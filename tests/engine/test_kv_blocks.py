import random

import pytest

from nybble.service.engine.kv_blocks import BlockPool


def test_a_new_sequence_gets_a_run_and_grows_along_it():
    pool = BlockPool(16)
    first, reserved = pool.start(2, 6)
    second, _ = pool.start(2, 6)
    assert (first, reserved, second) == ([0, 1], (2, 6), [6, 7])
    assert pool.extend(first, 4) and first == [0, 1, 2, 3, 4, 5]


def test_reserved_blocks_are_taken_when_nothing_else_is_free():
    pool = BlockPool(8)
    _, _ = pool.start(1, 8)
    other, _ = pool.start(3, 3) or (None, None)
    assert other is not None and len(other) == 3
    assert pool.free == 4


def test_too_few_blocks_take_nothing():
    pool = BlockPool(4)
    blocks, _ = pool.start(3, 3)
    assert pool.start(2, 2) is None
    assert not pool.extend(blocks, 2) and len(blocks) == 3 and pool.free == 1


def test_releasing_twice_is_caught():
    pool = BlockPool(4)
    blocks, reserved = pool.start(2, 4)
    pool.release(list(blocks), reserved)
    assert pool.free == 4
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="accepted at least 1"):
        BlockPool(0)


@pytest.mark.parametrize("seed", range(5))
def test_no_block_is_ever_held_twice_or_lost(seed):
    rng = random.Random(seed)
    pool = BlockPool(40)
    held: list[tuple[list[int], tuple[int, int]]] = []
    for _ in range(400):
        action = rng.random()
        if action < 0.4:
            taken = pool.start(n := rng.randint(1, 6), n + rng.randint(0, 9))
            if taken is not None:
                held.append(taken)
        elif held and action < 0.7:
            pool.extend(rng.choice(held)[0], rng.randint(1, 3))
        elif held:
            pool.release(*held.pop(rng.randrange(len(held))))
        used = [b for blocks, _ in held for b in blocks]
        assert len(used) == len(set(used)) == pool.count - pool.free
        assert all(0 <= b < pool.count for b in used)
    for entry in held:
        pool.release(*entry)
    # Nothing is left reserved either: the whole pool is one run again.
    assert pool.start(40, 40)[0] == list(range(40))
