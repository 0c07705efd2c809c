"""The engine process: a pipe in, a pipe out, and an Engine between.

It ends when told to, when the API process is gone (end of file on the pipe), or when it cannot go on; the API process
decides what to do then. While idle it sleeps in the pipe's read.
"""

from __future__ import annotations

import logging
import signal
import sys
from multiprocessing.connection import Connection
from time import monotonic

from nybble.service.engine.protocol import Abort, Add, EngineConfig, Failed, Loading, Outputs, Shutdown
from nybble.service.errors import NybbleError

log = logging.getLogger("nybble.engine")

_PROGRESS_EVERY_S = 0.2
_STATS_EVERY_S = 0.1


def main(conn: Connection, config: EngineConfig) -> None:
    """Entry point of the process. Sends Loading..., then EngineInfo and Outputs, or Failed."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C goes to the whole group: the API process shuts us down
    try:
        _run(conn, config)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        log.info("the API process is gone: engine ends")
    except NybbleError as error:
        _send_failure(conn, Failed(error.message, user_error=True))
    except Exception as error:  # the process ends here; the API process restarts it
        log.exception("engine failed")
        _send_failure(conn, Failed(f"{type(error).__name__}: {error}", user_error=False))
        sys.exit(1)


def _run(conn: Connection, config: EngineConfig) -> None:
    from nybble.service.engine.load import (
        build_engine,  # torch takes seconds to import: after the signal handler
    )

    last = 0.0

    def on_bytes(done: int, total: int) -> None:
        nonlocal last
        now = monotonic()
        if now - last >= _PROGRESS_EVERY_S or done == total:
            last = now
            conn.send(Loading("weights", done, total))

    engine = build_engine(config, on_bytes)
    conn.send(engine.info)
    conn.send(Outputs((), engine.stats()))  # what loading has counted
    told = monotonic()
    while True:
        # Asleep while there is nothing to do; otherwise take what has arrived and go on.
        while not engine.has_work or conn.poll(0):
            message = conn.recv()
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Add):
                engine.add(message.request)
            elif isinstance(message, Abort):
                engine.abort(message.request_id, message.reason)
            if not engine.has_work:
                # The last request was aborted: no step follows, but the gauges must say so.
                conn.send(Outputs((), engine.stats()))
        outputs = engine.step()
        stats = None
        if engine.stats_due or monotonic() - told >= _STATS_EVERY_S:
            stats, told = engine.stats(), monotonic()
        conn.send(Outputs(outputs, stats))


def _send_failure(conn: Connection, failure: Failed) -> None:
    try:
        conn.send(failure)
    except OSError:
        log.error("%s", failure.message)
