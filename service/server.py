"""Runs the API process: engine client, tokenizer, application, uvicorn; signals and exit.

This process never imports torch: the engine process owns the device. transformers would import it to look for it,
so it is barred here, which also saves seconds and memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
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
from nybble.service.http_protocol import LimitedProtocol
from nybble.service.settings import Settings
from nybble.service.text import TextCodec

logger = logging.getLogger(__name__)

# After the limit for running requests, for their last events to leave.
GRACE_S = 2
DRAIN_LOOK_S = 0.05
BACKLOG = 2048
# How long a connection may wait for its next request: longer than clients and load balancers keep theirs (5 to 60 s), or
# they would send it at the moment in which it is closed here.
KEEP_ALIVE_S = 75
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ENGINE_EXIT_S = 10.0
PROGRESS_EVERY_S = 2.0
# Whoever signals a whole group of processes may be heard twice: from them, and from a `make` that passes it on.
SAME_SIGNAL_S = 0.3


def bar_torch() -> None:
    """Makes `import torch` fail in this process, and libraries believe that it is not installed."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    # transformers warns of its absence on import, before its logging can be configured otherwise.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@contextlib.contextmanager
def listen(settings: Settings) -> Iterator[list[socket.socket]]:
    """Takes the port, and looks at the TLS files, before anything slow begins; connections wait until run() accepts
    them.

    A name may stand for several addresses, which then share one port. Raises ConfigError when there is none to be had.
    """
    _check_tls(settings)
    where = f"{settings.host}:{settings.port}"
    with contextlib.ExitStack() as opened:
        try:
            found = socket.getaddrinfo(
                settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            addresses = dict.fromkeys((family, address) for family, _, _, _, address in found)
            sockets: list[socket.socket] = []
            for family, address in addresses:
                port = sockets[0].getsockname()[1] if sockets else address[1]
                try:
                    one = _listener(family, (address[0], port, *address[2:]))
                except OSError as error:
                    # A name may have addresses of a kind that this machine does not speak.
                    if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) or len(addresses) == 1:
                        raise
                else:
                    sockets.append(opened.enter_context(one))
            if not sockets:
                raise OSError("none of its addresses is this machine's")
        except (OSError, UnicodeError) as error:  # the latter for a name that no host can have
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(
                f"cannot listen on {where}: {reason}; choose another --host or --port"
            ) from None
        yield sockets


def _check_tls(settings: Settings) -> None:
    if not settings.tls_certfile and not settings.tls_keyfile:
        return
    if not settings.tls_certfile:
        raise ConfigError(
            "--tls-keyfile is given without --tls-certfile; give both, or a file with both as the latter"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An encrypted key has nobody to ask for its password.
        context.load_cert_chain(settings.tls_certfile, settings.tls_keyfile or None, password="")
    except OSError as error:  # SSLError is one
        reason = error.strerror or str(error)
        raise ConfigError(
            f"--tls-certfile {settings.tls_certfile!r}, --tls-keyfile {settings.tls_keyfile!r}: {reason}; give a "
            "certificate chain and its private key, both PEM, the key not encrypted"
        ) from None


def _listener(family: int, address: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def run(
    settings: Settings, folder: str, sockets: list[socket.socket], engine_main: str = ENGINE_MAIN
) -> None:
    """Serves the model in `folder` on sockets of listen() until told to stop. Raises NybbleError when it cannot start
    or the engine cannot."""
    bar_torch()
    # Only its choice of event loop (uvloop where it is installed) is used here.
    loop_factory = uvicorn.Config("", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_serve(settings, folder, sockets, engine_main))


def engine_client(
    settings: Settings,
    folder: str,
    engine_main: str = ENGINE_MAIN,
    *,
    on_loading: Callable[[Loading], None] | None = None,
    on_fatal: Callable[[str], None] | None = None,
) -> EngineClient:
    """The client of an engine that does what the settings say, not yet started."""
    return EngineClient(
        settings.engine_config(folder),
        engine_main,
        max_queue=settings.max_queue,
        step_timeout_s=settings.step_timeout_s,
        load_timeout_s=settings.load_timeout_s,
        log=settings.log_config(),
        on_loading=on_loading,
        on_fatal=on_fatal,
    )


async def _serve(settings: Settings, folder: str, sockets: list[socket.socket], engine_main: str) -> None:
    failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    client = engine_client(
        settings, folder, engine_main, on_loading=LoadingProgress().show, on_fatal=failure.set_result
    )
    engine_exit_s = ENGINE_EXIT_S
    if not settings.key_digests() and settings.host not in LOOPBACK:
        logger.warning("no API keys: whoever reaches this port may use the model (--api-key-file)")
    # The engine loads while the tokenizer does.
    await client.start()
    try:
        codec = await asyncio.to_thread(TextCodec.load, folder)
        server = _Server(_uvicorn_config(build_app(settings, client, codec), settings), client, settings)
        failure.add_done_callback(server.exit)
        await server.serve(sockets)
        if server.force_exit:
            engine_exit_s = 0.0
    finally:
        await client.stop(engine_exit_s)
    if failure.done():
        raise ConfigError(failure.result())


def _uvicorn_config(app: Any, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=LimitedProtocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        ssl_certfile=settings.tls_certfile or None,
        ssl_keyfile=settings.tls_keyfile or None,
        timeout_graceful_shutdown=GRACE_S,
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
    """The first SIGTERM or SIGINT drains: readiness is off, new requests get 503, the running ones go on within the
    limit, and then the server ends. A second one ends it at once."""

    def __init__(self, config: uvicorn.Config, client: EngineClient, settings: Settings) -> None:
        super().__init__(config)
        self._client = client
        self._timeout_s = settings.shutdown_timeout_s
        self._host = settings.host
        self._signalled_s = 0.0
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # They stay until the loop closes, so that a second signal is heard while the engine ends, too.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        host = f"[{self._host}]" if ":" in self._host else self._host
        scheme = "https" if self.config.is_ssl else "http"
        logger.info("listening on %s://%s:%d", scheme, host, sockets[0].getsockname()[1])

    def exit(self, _: object) -> None:
        self.should_exit = True

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        now = time.monotonic()
        if now - self._signalled_s < SAME_SIGNAL_S:
            return
        self._signalled_s = now
        if self._draining is not None:
            logger.warning("%s again: ending at once", name)
            self.force_exit = self.should_exit = True
            self._client.fail_all(Unavailable("the server has shut down", code="draining"))
            self._client.kill()
            return
        logger.info("%s: no new requests; running ones have %g s", name, self._timeout_s)
        self._client.drain()
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        """Goes on answering, load balancers too, until the last request has ended or its time is up."""
        deadline_s = time.monotonic() + self._timeout_s
        while self._client.in_flight and time.monotonic() < deadline_s and not self.should_exit:
            await asyncio.sleep(DRAIN_LOOK_S)
        left_s = max(0.0, deadline_s - time.monotonic())
        self._client.fail_all(
            Unavailable(
                f"the server shut down before this request had ended ({self._timeout_s:g} s)", code="draining"
            )
        )
        # Readers may be slower than the engine.
        self.config.timeout_graceful_shutdown = round(left_s) + GRACE_S
        self.should_exit = True
