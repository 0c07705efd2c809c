"""The engine process, seen from the API process: start, talk, supervise, restart.

All methods run on the event loop. Messages are read by a loop callback; they are written by one thread, so that a
pipe that is full never holds up the loop. The accounting identity started = finished + running + waiting holds at
any moment, because all four come from one snapshot of the engine plus what earlier engine processes left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import logging
import math
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from enum import StrEnum
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

from nybble.service.engine.protocol import (
    Abort,
    Add,
    EngineConfig,
    EngineInfo,
    EngineStats,
    Failed,
    Loading,
    Outputs,
    Request,
    Shutdown,
    StepOutput,
)
from nybble.service.errors import NybbleError, QueueFull, Unavailable
from nybble.service.logs import LogConfig, configure_logging

logger = logging.getLogger(__name__)

# "module:function" of the engine's main(connection, config); a name, because importing it would import torch here.
ENGINE_MAIN = "nybble.service.engine.process:main"

BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
# An engine that served this long before it died is restarted after the first, short pause again.
STABLE_S = 300.0
RECENT_FINISHES = 32
# How often the watchdog looks, at most.
WATCH_EVERY_S = 5.0
# A process that was killed may take a moment to go; one that is stuck in its driver may never.
GONE_S = 5.0


class EngineState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DOWN = "down"
    FAILED = "failed"
    DRAINING = "draining"
    STOPPED = "stopped"


# What a client is told while there is no engine to ask: error code, sentence.
_UNAVAILABLE = {
    EngineState.LOADING: ("loading", "the model is loading"),
    EngineState.DOWN: ("engine_down", "the engine stopped unexpectedly and is being restarted"),
    EngineState.FAILED: ("engine_failed", "the engine cannot start"),
    EngineState.DRAINING: ("draining", "the server is shutting down"),
    EngineState.STOPPED: ("draining", "the server has shut down"),
}


class Observer(Protocol):
    """Is told what happens to requests; see service/metrics.py. All times in seconds."""

    def queued(self, seconds: float) -> None: ...
    def first_token(self, seconds: float) -> None: ...
    def next_tokens(self, seconds: float, count: int) -> None: ...
    def finished(self, seconds: float, per_token_seconds: float | None) -> None: ...
    def gemm(self, samples: dict[tuple[str, str], tuple[float, ...]]) -> None: ...


def _run_engine(engine_main: str, log: LogConfig, connection: Connection, config: EngineConfig) -> None:
    """The first function of the engine process.

    SIGTERM, which may be sent to the whole group, is the API process's business: it drains, then ends this process.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logging(log)
    module, _, function = engine_main.partition(":")
    getattr(importlib.import_module(module), function)(connection, config)


class _Live:
    """A request that the engine has not finished."""

    __slots__ = ("arrival_s", "first_s", "last_s", "stream", "tokens")

    def __init__(self, stream: OutputStream, arrival_s: float) -> None:
        self.stream = stream
        self.arrival_s = arrival_s
        self.first_s = 0.0
        self.last_s = 0.0
        self.tokens = 0


class OutputStream:
    """The outputs of one or more requests in the order the engine made them.

    Close it when done: what has not finished by then is aborted. `async with` does.
    """

    def __init__(self, client: EngineClient, request_ids: Sequence[str]) -> None:
        self._client = client
        self._open = set(request_ids)
        self._ready: list[StepOutput] = []
        self._error: NybbleError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> list[StepOutput]:
        """All outputs that are there, at least one; an empty list after the last. Raises when the engine dies."""
        while not self._ready:
            if self._error is not None:
                raise self._error
            if not self._open:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        ready, self._ready = self._ready, []
        return ready

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """Ends one request; nothing more of it comes. No effect if it has ended."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._client.abort(request_id, reason)

    def close(self) -> None:
        for request_id in list(self._open):
            self.abort(request_id)

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def push(self, output: StepOutput) -> None:
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        self._ready.append(output)
        self._wake()

    def fail(self, error: NybbleError) -> None:
        self._open.clear()
        self._error = error
        self._wake()

    def give_up(self, error: NybbleError) -> None:
        """Aborts what has not ended and lets next() raise, once it has handed out what is there."""
        self.close()
        self.fail(error)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Writer:
    """Sends messages from a thread of its own."""

    def __init__(self, connection: Connection, on_failure: Callable[[], None]) -> None:
        self._connection = connection
        self._on_failure = on_failure
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="engine-writer", daemon=True).start()

    def send(self, message: Any) -> None:
        self._queue.put(message)

    def stop(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self._connection.send(message)
            except (BrokenPipeError, ConnectionResetError):
                # The engine is gone; the reading side sees the end of the pipe and takes care of it.
                return
            except Exception:
                if self._connection.closed:
                    return
                # It would wait for ever for what it was not told.
                logger.exception("the engine cannot be written to and is killed")
                self._on_failure()
                return


class EngineClient:
    """One engine process at a time, replaced when it dies.

    engine_main names what runs in the process; max_queue bounds the requests in flight. on_loading is called as
    loading goes on, on_fatal with a sentence when starting again would fail the same way. An engine that says nothing
    for load_timeout_s while it loads, or for step_timeout_s while it has requests (0: however long), counts as hung and
    is killed.
    """

    def __init__(
        self,
        config: EngineConfig,
        engine_main: str = ENGINE_MAIN,
        *,
        max_queue: int = 256,
        step_timeout_s: float = 0.0,
        load_timeout_s: float = 0.0,
        observer: Observer | None = None,
        log: LogConfig | None = None,
        on_loading: Callable[[Loading], None] | None = None,
        on_fatal: Callable[[str], None] | None = None,
        backoff_s: Sequence[float] = BACKOFF_S,
    ) -> None:
        self.config = config
        self.max_queue = max_queue
        self.state = EngineState.LOADING
        self.info: EngineInfo | None = None
        self.loading: Loading | None = None
        self.failure: str | None = None
        self.restarts = 0
        # (layer, path) -> seconds and M of the latest sampled GEMM call.
        self.gemm_latest: dict[tuple[str, str], tuple[float, int]] = {}
        self.observer = observer
        # Is told when draining begins.
        self.on_drain: Callable[[], None] | None = None
        self._engine_main = engine_main
        self._on_loading_progress = on_loading
        self._on_fatal = on_fatal
        self._log = log or LogConfig(logger.getEffectiveLevel())
        self._step_timeout_s = step_timeout_s
        self._load_timeout_s = load_timeout_s
        self._heard_s = 0.0
        self._watchdog_task: asyncio.Task[None] | None = None
        self._backoff_s = tuple(backoff_s)
        self._failures_in_a_row = 0
        self._ready_s = 0.0
        self._live: dict[str, _Live] = {}
        self._finish_times: deque[float] = deque(maxlen=RECENT_FINISHES)
        self._stats = EngineStats()
        self._past = EngineStats()
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._writer: _Writer | None = None
        self._restart_task: asyncio.Task[None] | None = None
        self._ready_event = asyncio.Event()

    # --- requests ---

    @property
    def in_flight(self) -> int:
        return len(self._live)

    def require_info(self) -> EngineInfo:
        """What the engine said of itself. Raises Unavailable unless it is ready for requests."""
        if self.state is not EngineState.READY or self.info is None:
            code, sentence = _UNAVAILABLE.get(self.state, ("unavailable", "the engine is not ready"))
            raise Unavailable(sentence, code=code)
        return self.info

    def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Hands requests to the engine, all or none. Raises Unavailable or QueueFull."""
        self.require_info()
        if len(self._live) + len(requests) > self.max_queue:
            raise QueueFull(
                f"{len(self._live)} requests are in progress and this asks for {len(requests)} more; "
                f"the limit is {self.max_queue}; try again later",
                self.retry_after_s(len(self._live) + len(requests) - self.max_queue),
            )
        stream = OutputStream(self, [request.request_id for request in requests])
        if not self._live:
            # An idle engine has been silent for good reason.
            self._heard_s = time.monotonic()
        for request in requests:
            self._live[request.request_id] = _Live(stream, request.arrival_s)
            self._send(Add(request))
        return stream

    async def generate(self, request: Request) -> AsyncIterator[StepOutput]:
        """The outputs of one request. Leaving the iterator early aborts the request."""
        async with self.submit([request]) as stream:
            while outputs := await stream.next():
                for output in outputs:
                    yield output

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """Ends a request; reason "stop" counts it as finished by a stop string. No effect on an unknown one."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        self._send(Abort(request_id, reason))
        if reason != "abort":
            self._observe_finish(live)

    def retry_after_s(self, places: int = 1) -> int:
        """How long it takes until this many requests have finished, at the rate of late; 1 to 60 s."""
        times = self._finish_times
        if len(times) < 2 or time.monotonic() - times[-1] > 60:
            return 1
        each_s = (time.monotonic() - times[0]) / len(times)
        return min(60, max(1, math.ceil(each_s * places)))

    # --- what metrics and health show ---

    def totals(self) -> EngineStats:
        """Counters over all engine processes so far and the gauges of the present one."""
        return _add(self._past, self._stats)

    async def wait_ready(self) -> None:
        """Waits until the engine is ready, or can no longer become so."""
        await self._ready_event.wait()

    # --- life ---

    async def start(self) -> None:
        """Starts the engine process; it loads in the background."""
        await asyncio.to_thread(self._spawn)
        self._watch()

    def drain(self) -> None:
        """Accepts no more requests; the running ones go on."""
        if self.state not in (EngineState.STOPPED, EngineState.FAILED):
            self._set_state(EngineState.DRAINING)
        if self.on_drain is not None:
            self.on_drain()

    def fail_all(self, error: NybbleError) -> None:
        """Ends every request in flight with an error."""
        for request_id, live in list(self._live.items()):
            self._send(Abort(request_id))
            live.stream.fail(error)
        self._live.clear()

    async def stop(self, timeout_s: float) -> None:
        """Tells the engine to end, waits, and kills it if it does not."""
        if self.state is not EngineState.FAILED:
            self._set_state(EngineState.STOPPED)
        if self._restart_task is not None:
            self._restart_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._restart_task
        self.fail_all(Unavailable("the server is shutting down", code="draining"))
        self._send(Shutdown())
        process = self._process
        if process is not None:
            await asyncio.to_thread(process.join, timeout_s)
            if process.is_alive():
                logger.warning("the engine did not end within %g s and is killed", timeout_s)
            self.kill()
            await asyncio.to_thread(process.join, GONE_S)
        self._disconnect()

    def kill(self) -> None:
        """Tells the system to end the engine process at once."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=True)
        process = context.Process(
            target=_run_engine,
            args=(self._engine_main, self._log, theirs, self.config),
            name="nybble-engine",
            daemon=True,
        )
        try:
            process.start()
        except OSError:
            ours.close()
            raise
        finally:
            # Only then does the engine's death end the pipe, on either side.
            theirs.close()
        self._process, self._connection, self._writer = process, ours, _Writer(ours, process.kill)

    def _watch(self) -> None:
        assert self._connection is not None and self._process is not None
        loop = asyncio.get_running_loop()
        loop.add_reader(self._connection.fileno(), self._read)
        # uvloop makes it non-blocking, for both sides of it: a message larger than what the pipe holds would be cut.
        os.set_blocking(self._connection.fileno(), True)
        loop.add_reader(self._process.sentinel, self._process_ended)
        self._heard_s = time.monotonic()
        if self._step_timeout_s or self._load_timeout_s:
            self._watchdog_task = loop.create_task(self._kill_when_hung())

    def _disconnect(self) -> None:
        loop = asyncio.get_running_loop()
        if self._watchdog_task is not None:
            self._watchdog_task.cancel()
            self._watchdog_task = None
        if self._process is not None:
            loop.remove_reader(self._process.sentinel)
        if self._connection is not None:
            loop.remove_reader(self._connection.fileno())
            assert self._writer is not None
            self._writer.stop()
            self._connection.close()
            self._connection = self._writer = None

    def _send(self, message: Any) -> None:
        if self._writer is not None:
            self._writer.send(message)

    def _read(self) -> None:
        """One message: the loop calls again while there are more."""
        if self._connection is None:
            return
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            self._died()
            return
        self._heard_s = time.monotonic()
        self._handlers[type(message)](self, message)

    def _process_ended(self) -> None:
        """The process is gone: take what it still said, then clean up (the end of the pipe may come first)."""
        while self._connection is not None and self._connection.poll(0):
            self._read()
        if self._connection is not None:
            self._died()

    async def _kill_when_hung(self) -> None:
        """Every step of a busy engine says something, and so does loading as it goes on; one that is silent for too long is
        not coming back."""
        limits_s = [limit_s for limit_s in (self._step_timeout_s, self._load_timeout_s) if limit_s]
        period_s = min(WATCH_EVERY_S, *(limit_s / 4 for limit_s in limits_s))
        while True:
            before = time.monotonic()
            await asyncio.sleep(period_s)
            now = time.monotonic()
            if now - before > 2 * period_s:
                # It is this process that stood still, and what the engine said meanwhile is still in the pipe.
                self._heard_s = now
            silent_s = now - self._heard_s
            limit_s = self._patience_s()
            if limit_s and silent_s > limit_s:
                logger.error("the engine has said nothing for %.1f s: it hangs and is killed", silent_s)
                self.kill()
                self._died()
                return

    def _patience_s(self) -> float:
        """How long the engine may say nothing, as things are; 0: however long."""
        if self.info is None:
            return self._load_timeout_s
        return self._step_timeout_s if self._live else 0.0

    # --- messages ---

    def _on_outputs(self, message: Outputs) -> None:
        now = time.monotonic()
        if message.stats is not None:
            self._stats = message.stats
            self.gemm_latest.update(message.stats.gemm_latest)
            if self.observer is not None and message.stats.gemm_samples:
                self.observer.gemm(message.stats.gemm_samples)
        for output in message.outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue
            self._observe(live, output, now)
            if output.finish_reason is not None:
                del self._live[output.request_id]
                if output.finish_reason in ("stop", "length"):
                    self._observe_finish(live)
            live.stream.push(output)

    def _on_loading(self, message: Loading) -> None:
        self.loading = message
        if self._on_loading_progress is not None:
            self._on_loading_progress(message)

    def _on_info(self, message: EngineInfo) -> None:
        self.info = message
        self._ready_s = time.monotonic()
        logger.info(
            "engine ready in %.1f s: %s on %s (%s), context %d tokens, %d KV blocks of %d tokens",
            message.load_seconds,
            message.architecture,
            message.device,
            message.dtype,
            message.max_model_len,
            message.kv_blocks,
            message.block_size,
        )
        if self.state in (EngineState.LOADING, EngineState.DOWN):
            self._set_state(EngineState.READY)

    def _on_failed(self, message: Failed) -> None:
        self.failure = message.message
        if message.user_error:
            self._set_state(EngineState.FAILED)
            if self._on_fatal is not None:
                self._on_fatal(message.message)
        else:
            logger.error("the engine failed: %s", message.message)

    _handlers: dict[type, Callable[[EngineClient, Any], None]] = {
        Outputs: _on_outputs,
        Loading: _on_loading,
        EngineInfo: _on_info,
        Failed: _on_failed,
    }

    def _set_state(self, state: EngineState) -> None:
        self.state = state
        if state in (EngineState.LOADING, EngineState.DOWN):
            self._ready_event.clear()
        else:
            self._ready_event.set()

    # --- death and restart ---

    def _died(self) -> None:
        if self._connection is None:
            return
        process = self._process
        self._disconnect()
        if process is not None and self.state is not EngineState.STOPPED:
            # The pipe may end a moment before the process does; it may also close the pipe and hang.
            process.join(0.2)
            self.kill()
        self._bury(process.exitcode if process is not None else None)
        if self.state in (EngineState.LOADING, EngineState.READY, EngineState.DOWN):
            self._set_state(EngineState.DOWN)
            self._restart_task = asyncio.get_running_loop().create_task(self._restart())

    def _bury(self, exit_code: int | None) -> None:
        """Carries the dead engine's counters over; requests it did not finish count as errors."""
        stats, self._stats = self._stats, EngineStats()
        # The next engine may have other paths, and is to be judged by its own calls.
        self.gemm_latest = {}
        lost = stats.running + stats.waiting
        unseen = max(0, len(self._live) - lost)
        if self.state not in (EngineState.STOPPED, EngineState.FAILED):
            logger.error(
                "the engine process ended (exit code %s), %d requests lost", exit_code, len(self._live)
            )
        finished = Counter(stats.finished)
        if lost + unseen:
            finished["error"] += lost + unseen
        stats = dataclasses.replace(stats, started=stats.started + unseen, finished=dict(finished))
        self._past = _add(self._past, dataclasses.replace(stats, running=0, waiting=0, kv_usage_ratio=0.0))
        error = Unavailable(_UNAVAILABLE[EngineState.DOWN][1], code="engine_down")
        for live in self._live.values():
            live.stream.fail(error)
        self._live.clear()

    async def _restart(self) -> None:
        if self.info is not None and time.monotonic() - self._ready_s > STABLE_S:
            self._failures_in_a_row = 0
        self.info = self.loading = None
        if self._process is not None:
            await asyncio.to_thread(self._process.join, GONE_S)
        while True:
            pause_s = self._backoff_s[min(self._failures_in_a_row, len(self._backoff_s) - 1)]
            self._failures_in_a_row += 1
            logger.info("the engine is restarted in %g s", pause_s)
            await asyncio.sleep(pause_s)
            self.restarts += 1
            try:
                await self._spawn_whole()
            except Exception:
                # Whatever it is (no memory, no process left), giving up would leave the server without an engine.
                logger.exception("the engine process cannot be started")
            else:
                break
        if self.state is EngineState.DOWN:
            self._set_state(EngineState.LOADING)
        self._watch()

    async def _spawn_whole(self) -> None:
        """Also when cancelled meanwhile: a process that is on its way has to be there for stop() to end it."""
        spawn = asyncio.get_running_loop().run_in_executor(None, self._spawn)
        try:
            await asyncio.shield(spawn)
        except asyncio.CancelledError:
            await spawn
            raise

    # --- timings ---

    def _observe(self, live: _Live, output: StepOutput, now: float) -> None:
        count = len(output.tokens)
        observer = self.observer
        if observer is not None:
            if output.scheduled_s is not None:
                observer.queued(max(0.0, output.scheduled_s - live.arrival_s))
            if count:
                if live.tokens:
                    observer.next_tokens(now - live.last_s, count)
                else:
                    observer.first_token(now - live.arrival_s)
        if count:
            if not live.tokens:
                live.first_s = now
            live.last_s = now
            live.tokens += count

    def _observe_finish(self, live: _Live) -> None:
        now = time.monotonic()
        self._finish_times.append(now)
        if self.observer is not None:
            per_token = (live.last_s - live.first_s) / (live.tokens - 1) if live.tokens > 1 else None
            self.observer.finished(now - live.arrival_s, per_token)


# What is true of the present engine only; everything else of its statistics counts up.
_GAUGES = ("running", "waiting", "kv_usage_ratio")
# Taken as they come, see EngineClient._on_outputs.
_SAMPLES = ("gemm_samples", "gemm_latest")


def _add(past: EngineStats, now: EngineStats) -> EngineStats:
    """Counters summed, gauges of now, no samples."""
    sums: dict[str, Any] = {name: {} for name in _SAMPLES}
    for field in dataclasses.fields(EngineStats):
        if field.name not in (*_GAUGES, *_SAMPLES):
            sums[field.name] = _sum(getattr(past, field.name), getattr(now, field.name))
    return dataclasses.replace(now, **sums)


def _sum(past: Any, now: Any) -> Any:
    if isinstance(now, dict):
        return {key: past.get(key, 0) + now.get(key, 0) for key in past.keys() | now.keys()}
    return past + now
