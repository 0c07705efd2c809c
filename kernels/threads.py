"""Work that is split over threads of our own.

torch splits every operation over its threads and lets them wait for each other. For a chain of small steps that costs
more than it gains, and on a machine that does something else as well many times more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


# How many threads `spread` uses inside `single_steps`, where torch itself no longer says.
_workers: list[int] = []


@contextmanager
def single_steps() -> Iterator[None]:
    """Inside, each of torch's operations runs on one thread; `spread` uses as many as torch did before.

    Not for two threads at a time: how many threads torch uses is a setting of the process.
    """
    count = torch.get_num_threads()
    _workers.append(_workers[-1] if _workers else count)
    torch.set_num_threads(1)  # threads that begin from here on take it over
    try:
        yield
    finally:
        torch.set_num_threads(count)
        _workers.pop()


def spread(work: Callable[[T], None], items: Sequence[T]) -> None:
    """work(item) for every item, in `single_steps` on that many threads. Raises what work raises."""
    rest = iter(items)

    def take_turns() -> None:
        for item in rest:
            work(item)

    with single_steps():
        count = min(_workers[-1], len(items))
        if count <= 1:
            take_turns()
            return
        with ThreadPoolExecutor(count, thread_name_prefix="nybble-work") as pool:
            for done in [pool.submit(take_turns) for _ in range(count)]:
                done.result()
