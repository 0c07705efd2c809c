"""For tests of programs that take their time: wait until something holds; a port that nobody listens on."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

LOOK_S = 0.05


def wait_until(
    what: str, holds: Callable[[], bool], within_s: float = 60.0, logs: Callable[[], str] = str
) -> None:
    """logs: what the assertion shows when it does not."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, f"after {within_s:g} s still not: {what}\n{logs()}"
        time.sleep(LOOK_S)


def free_port() -> int:
    """It may be taken again by whoever asks for any; for programs that do not tell which port they were given."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
