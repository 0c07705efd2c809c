"""Runs the API process: engine client, tokenizer, application, uvicorn; signals and exit.

This process never imports torch: the engine process owns the device. transformers would import it to look for it,
so it is barred here, which also saves seconds and memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from tqdm import tqdm

from nybble.service.app import build_app
from nybble.service.client import ENGINE_MAIN, EngineClient
from nybble.service.engine.protocol import Loading
from nybble.service.errors import ConfigError, Unavailable
from nybble.service.settings import Settings
from nybble.service.text import TextCodec

logger = logging.getLogger(__name__)

# After the limit for running requests, for their last events to leave.
GRACE_S = 2
ENGINE_EXIT_S = 10.0
PROGRESS_EVERY_S = 2.0
# Whoever signals a whole group of processes may be heard twice: from them, and from a `make` that passes it on.
SAME_SIGNAL_S = 0.3


def bar_torch() -> None:
    """Makes `import torch` fail in this process, and libraries believe that it is not installed."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    # transformers warns of its absence on import, before its logging can be configured otherwise.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def run(settings: Settings, folder: str, engine_main: str = ENGINE_MAIN) -> None:
    """Serves the model in `folder` until told to stop. Raises NybbleError when it cannot start or the engine cannot."""
    bar_torch()
    # Only its choice of event loop (uvloop where it is installed) is used here.
    loop_factory = uvicorn.Config("", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_serve(settings, folder, engine_main))


async def _serve(settings: Settings, folder: str, engine_main: str) -> None:
    failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    client = EngineClient(
        settings.engine_config(folder),
        engine_main,
        max_queue=settings.max_queue,
        on_loading=LoadingProgress().show,
        on_fatal=failure.set_result,
    )
    engine_exit_s = ENGINE_EXIT_S
    # The engine loads while the tokenizer does.
    await client.start()
    try:
        codec = await asyncio.to_thread(TextCodec.load, folder)
        server = _Server(_uvicorn_config(build_app(settings, client, codec), settings), client, settings)
        failure.add_done_callback(server.exit)
        await server.serve()
        if server.force_exit:
            engine_exit_s = 0.0
    finally:
        await client.stop(engine_exit_s)
    if failure.done():
        raise ConfigError(failure.result())


def _uvicorn_config(app: Any, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=round(settings.shutdown_timeout_s) + GRACE_S,
    )


class LoadingProgress:
    """Shows how loading goes on: a bar on a terminal, else a log line every few seconds."""

    def __init__(self, *, bar: bool | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._bar_wanted = sys.stderr.isatty() if bar is None else bar
        self._bar: Any = None
        self._clock = clock
        self._stage = ""
        self._started_s = self._shown_s = 0.0

    def show(self, loading: Loading) -> None:
        now = self._clock()
        if loading.stage != self._stage:
            self._stage, self._started_s, self._shown_s = loading.stage, now, float("-inf")
            self._close()
        done = loading.done_bytes >= loading.total_bytes
        if self._bar_wanted and loading.total_bytes:
            self._show_bar(loading)
        elif done or now - self._shown_s >= PROGRESS_EVERY_S:
            self._shown_s = now
            logger.info("%s", self._line(loading, now - self._started_s))
        if done:
            self._close()

    @staticmethod
    def _line(loading: Loading, elapsed_s: float) -> str:
        if not loading.total_bytes:
            return f"loading: {loading.stage}"
        rate = ""
        if elapsed_s > 0 and loading.done_bytes:
            bytes_per_s = loading.done_bytes / elapsed_s
            left_s = (loading.total_bytes - loading.done_bytes) / bytes_per_s
            rate = f", {bytes_per_s / 1e6:.0f} MB/s, {left_s:.0f} s left"
        return f"loading {loading.stage}: {loading.done_bytes / 1e6:.0f} of {loading.total_bytes / 1e6:.0f} MB{rate}"

    def _show_bar(self, loading: Loading) -> None:
        if self._bar is None:
            self._bar = tqdm(total=loading.total_bytes, desc=loading.stage, unit="B", unit_scale=True)
        self._bar.update(loading.done_bytes - self._bar.n)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _Server(uvicorn.Server):
    """The first SIGTERM or SIGINT drains: no new requests, the running ones go on within the limit. A second one
    ends at once."""

    def __init__(self, config: uvicorn.Config, client: EngineClient, settings: Settings) -> None:
        super().__init__(config)
        self._client = client
        self._timeout_s = settings.shutdown_timeout_s
        self._signalled_s = 0.0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # They stay until the loop closes, so that a second signal is heard while the engine ends, too.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        yield

    async def startup(self, sockets: Any = None) -> None:
        try:
            await super().startup(sockets)
        except (SystemExit, UnicodeError):  # the latter for a name that no host can have
            self._client.kill()
            where = f"{self.config.host}:{self.config.port}"
            raise ConfigError(f"cannot listen on {where}; choose another --host or --port") from None
        port = self.servers[0].sockets[0].getsockname()[1]
        logger.info("listening on http://%s:%d", self.config.host, port)

    def exit(self, _: object) -> None:
        self.should_exit = True

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        now = time.monotonic()
        if now - self._signalled_s < SAME_SIGNAL_S:
            return
        self._signalled_s = now
        if self.should_exit:
            logger.warning("%s again: ending at once", name)
            self.force_exit = True
            self._client.fail_all(Unavailable("the server has shut down", code="draining"))
            self._client.kill()
            return
        logger.info("%s: no new requests; running ones have %g s", name, self._timeout_s)
        self._client.drain()
        self.should_exit = True
        loop = asyncio.get_running_loop()
        loop.call_later(self._timeout_s, self._time_is_up)

    def _time_is_up(self) -> None:
        self._client.fail_all(
            Unavailable(
                f"the server shut down before this request had ended ({self._timeout_s:g} s)", code="draining"
            )
        )
