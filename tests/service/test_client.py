"""nybble.service.client over fake engine processes: supervision, accounting, a pipe that is full."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import fake_engine
import pytest
from fake_engine import CRASH_AFTER_3, IN_PIECES, MAX_RUNNING, SLOW
from http_fixtures import LocalClient, alive

from nybble.service.client import EngineClient, EngineState
from nybble.service.engine.protocol import EngineConfig, EngineStats, Outputs, Request, SamplingParams
from nybble.service.errors import QueueFull, Unavailable

pytestmark = pytest.mark.anyio


# The server runs on uvloop; it has its own way with pipes.
LOOPS = [
    pytest.param(("asyncio", {"use_uvloop": uvloop}), id="uvloop" if uvloop else "asyncio")
    for uvloop in (True, False)
]


class Observed:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values: self.calls.append((name, values))

    def count(self, name: str) -> int:
        return sum(1 for called, _ in self.calls if called == name)


@contextlib.asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncIterator[EngineClient]:
    client = EngineClient(
        EngineConfig(model=str(folder)), "fake_engine:main", backoff_s=(0.05, 0.1), **options
    )
    await client.start()
    try:
        yield client
    finally:
        await client.stop(2.0)
        assert client._process is not None and not client._process.is_alive()


@contextlib.asynccontextmanager
async def ready(folder: Path, **options: Any) -> AsyncIterator[EngineClient]:
    async with running(folder, **options) as client:
        await asyncio.wait_for(client.wait_ready(), 30)
        assert client.state is EngineState.READY
        yield client


async def until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def request(number: int, *prompt: int, **sampling: Any) -> Request:
    return Request(
        f"r{number}", prompt or (100, 101), SamplingParams(**{"max_tokens": 5} | sampling), time.monotonic()
    )


def accounted(client: EngineClient) -> bool:
    totals = client.totals()
    return totals.started == sum(totals.finished.values()) + totals.running + totals.waiting


async def tokens_of(client: EngineClient, wanted: Request) -> list[int]:
    return [token.token_id async for output in client.generate(wanted) for token in output.tokens]


async def test_a_request_gets_its_tokens(tmp_path: Path) -> None:
    observed = Observed()
    async with ready(tmp_path, observer=observed) as client:
        assert await tokens_of(client, request(1, 100, 101, 102)) == fake_engine.reply(
            (100, 101, 102), None, 5
        )
        totals = client.totals()
        assert (totals.started, totals.finished, totals.running) == (1, {"length": 1}, 0)
        assert client.in_flight == 0
        assert [observed.count(name) for name in ("queued", "first_token", "next_tokens", "finished")] == [
            1,
            1,
            4,
            1,
        ]
        assert observed.count("gemm") > 0


async def test_loading_is_shown_and_ends_in_ready(tmp_path: Path) -> None:
    shown = []
    async with running(tmp_path, on_loading=shown.append) as client:
        assert client.state is EngineState.LOADING
        with pytest.raises(Unavailable) as caught:
            client.submit([request(1)])
        assert caught.value.code == "loading"
        await asyncio.wait_for(client.wait_ready(), 30)
        assert [loading.done_bytes for loading in shown] == [0, 250_000, 500_000, 750_000, 1_000_000]
        assert client.info is not None and client.info.max_model_len == fake_engine.MAX_MODEL_LEN


async def test_several_requests_in_one_stream(tmp_path: Path) -> None:
    async with ready(tmp_path) as client, client.submit([request(1), request(2, max_tokens=9)]) as stream:
        counts = {"r1": 0, "r2": 0}
        while outputs := await stream.next():
            for output in outputs:
                counts[output.request_id] += len(output.tokens)
        assert counts == {"r1": 5, "r2": 9}


async def test_leaving_early_aborts(tmp_path: Path) -> None:
    async with ready(tmp_path) as client:
        generating = client.generate(request(1, SLOW, 100, max_tokens=200))
        assert (await anext(generating)).tokens
        await generating.aclose()
        assert client.in_flight == 0
        await until(lambda: client.totals().finished == {"abort": 1})
        assert client.totals().running == 0


async def test_an_abort_for_a_stop_string_counts_as_stop(tmp_path: Path) -> None:
    observed = Observed()
    async with (
        ready(tmp_path, observer=observed) as client,
        client.submit([request(1, max_tokens=200)]) as stream,
    ):
        await stream.next()
        stream.abort("r1", "stop")
        while await stream.next():
            pass
        await until(lambda: client.totals().finished == {"stop": 1})
        assert observed.count("finished") == 1


async def test_the_queue_is_bounded_all_or_none(tmp_path: Path) -> None:
    async with ready(tmp_path, max_queue=2) as client, client.submit([request(1, SLOW)]):
        with pytest.raises(QueueFull) as caught:
            client.submit([request(2), request(3)])
        assert caught.value.retry_after_s >= 1
        assert client.in_flight == 1
        async with client.submit([request(4)]):
            assert client.in_flight == 2


async def test_a_crash_ends_running_requests_and_the_engine_comes_back(tmp_path: Path) -> None:
    async with ready(tmp_path) as client:
        crash = client.submit([request(1, CRASH_AFTER_3, 100, max_tokens=50)])
        # More than the engine computes at once: some are lost while they wait.
        others = [client.submit([request(10 + i, SLOW, max_tokens=200)]) for i in range(MAX_RUNNING + 3)]
        for stream in (crash, *others):
            with pytest.raises(Unavailable) as caught:
                while await stream.next():
                    assert accounted(client)
            assert caught.value.code == "engine_down"
        assert client.in_flight == 0 and client.state is EngineState.DOWN
        before = client.totals()
        assert accounted(client)
        assert (before.started, before.finished) == (MAX_RUNNING + 4, {"error": MAX_RUNNING + 4})
        assert before.running == before.waiting == 0
        with pytest.raises(Unavailable):
            client.submit([request(3)])
        await asyncio.wait_for(client.wait_ready(), 30)
        assert client.restarts == 1
        assert await tokens_of(client, request(4)) == fake_engine.reply((100, 101), None, 5)
        totals = client.totals()
        assert (totals.started, totals.finished) == (MAX_RUNNING + 5, {"error": MAX_RUNNING + 4, "length": 1})
        assert totals.generation_tokens == before.generation_tokens + 5
        assert accounted(client)


async def test_requests_the_engine_never_reported_are_counted() -> None:
    client = LocalClient()
    client.become_ready()
    client._send = lambda message: None  # type: ignore[method-assign]
    stream = client.submit([request(1), request(2)])
    client._bury(-9)
    totals = client.totals()
    assert (totals.started, totals.finished) == (2, {"error": 2})
    with pytest.raises(Unavailable):
        await stream.next()


async def test_an_engine_is_not_judged_by_the_calls_of_the_one_before() -> None:
    client = LocalClient()
    client.become_ready()
    client._on_outputs(Outputs((), EngineStats(gemm_latest={("qkv", "skinny"): (1e-4, 1)})))
    assert client.gemm_latest
    client._bury(-9)
    assert client.gemm_latest == {}


async def test_an_engine_that_cannot_load_is_tried_again_with_longer_pauses(tmp_path: Path) -> None:
    (tmp_path / fake_engine.CRASH_AT_START).touch()
    async with running(tmp_path) as client:
        await until(lambda: client.restarts >= 2)
        assert client._failures_in_a_row >= 2
        (tmp_path / fake_engine.CRASH_AT_START).unlink()
        await asyncio.wait_for(client.wait_ready(), 30)
        assert client.state is EngineState.READY


async def test_an_engine_that_hangs_while_it_loads_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / fake_engine.HANG_IN_LOAD).touch()
    # Long enough for a slow machine to start the next one in.
    async with running(tmp_path, load_timeout_s=3.0) as client:
        await until(lambda: client.restarts >= 1, 60)
        (tmp_path / fake_engine.HANG_IN_LOAD).unlink()
        await until(lambda: client.state is EngineState.READY, 60)
        assert "it hangs and is killed" in caplog.text
        # Idle, it may be silent for as long as it likes.
        assert client._patience_s() == 0


async def test_progress_in_loading_is_a_sign_of_life(tmp_path: Path) -> None:
    (tmp_path / fake_engine.SLOW_LOAD).touch()
    heard: list[float] = []
    async with running(
        tmp_path, load_timeout_s=60.0, on_loading=lambda _: heard.append(client._heard_s)
    ) as client:
        assert client._patience_s() == 60
        await until(lambda: client.state is EngineState.READY, 60)
        assert len(heard) == 5 and heard == sorted(set(heard))
        assert client.restarts == 0


async def test_a_process_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch) -> None:
    async with ready(tmp_path) as client:
        spawn, failures = client._spawn, 0

        def fail_twice() -> None:
            nonlocal failures
            failures += 1
            if failures <= 2:
                raise OSError("cannot allocate memory")
            spawn()

        monkeypatch.setattr(client, "_spawn", fail_twice)
        client.kill()
        await until(lambda: client.restarts == 3)
        await asyncio.wait_for(client.wait_ready(), 30)
        assert client.state is EngineState.READY


async def test_a_users_error_is_final(tmp_path: Path) -> None:
    (tmp_path / fake_engine.USER_ERROR).touch()
    said: list[str] = []
    async with running(tmp_path, on_fatal=said.append) as client:
        await asyncio.wait_for(client.wait_ready(), 30)
        await asyncio.sleep(0.3)
        assert client.state is EngineState.FAILED and client.restarts == 0
        assert said == ["config.json: model_type 'banana' is not supported"]


async def test_an_engine_that_does_not_end_is_killed(tmp_path: Path) -> None:
    (tmp_path / fake_engine.IGNORE_SHUTDOWN).touch()
    async with ready(tmp_path) as client:
        started = time.monotonic()
        await client.stop(0.2)
        assert time.monotonic() - started < 5
        assert client.state is EngineState.STOPPED


async def test_stopping_while_a_restart_is_due(tmp_path: Path) -> None:
    (tmp_path / fake_engine.CRASH_AT_START).touch()
    async with running(tmp_path) as client:
        await until(lambda: client.state is EngineState.DOWN)
        await client.stop(1)
        restarts = client.restarts
        await asyncio.sleep(0.3)
        assert client.restarts == restarts and client.state is EngineState.STOPPED


async def test_draining_refuses_new_requests_and_finishes_old_ones(tmp_path: Path) -> None:
    async with ready(tmp_path) as client, client.submit([request(1, max_tokens=50)]) as stream:
        client.drain()
        with pytest.raises(Unavailable) as caught:
            client.submit([request(2)])
        assert caught.value.code == "draining"
        count = 0
        while outputs := await stream.next():
            count += sum(len(output.tokens) for output in outputs)
        assert count == 50


@pytest.mark.parametrize("anyio_backend", LOOPS)
async def test_a_full_pipe_does_not_hold_up_the_event_loop(tmp_path: Path, anyio_backend: Any) -> None:
    """Prompts of 20 MB in all, to an engine that is stopped: far beyond what the pipe holds."""
    async with ready(tmp_path) as client:
        assert client._process is not None and client._process.pid is not None
        os.kill(client._process.pid, signal.SIGSTOP)
        try:
            prompt = tuple(range(100, 400)) * 70
            streams = [client.submit([request(i, *prompt, max_tokens=1)]) for i in range(200)]
            await asyncio.sleep(0)
        finally:
            os.kill(client._process.pid, signal.SIGCONT)
        for stream in streams:
            assert (await asyncio.wait_for(stream.next(), 30))[0].finish_reason == "length"


@pytest.mark.parametrize("anyio_backend", LOOPS)
async def test_an_answer_larger_than_the_pipe_holds_arrives_whole(tmp_path: Path, anyio_backend: Any) -> None:
    """Scores of long prompts, 20 alternatives each: megabytes in one message."""
    async with ready(tmp_path) as client:
        prompt = tuple(range(100, 400)) * 20
        for number in range(3):
            wanted = request(number, *prompt, max_tokens=1, prompt_logprobs=20)
            scored = [token async for output in client.generate(wanted) for token in output.prompt_logprobs]
            assert [token.token_id for token in scored] == list(prompt[1:])
        assert client.state is EngineState.READY and client.restarts == 0


@pytest.mark.parametrize("anyio_backend", LOOPS)
async def test_a_message_that_arrives_in_pieces_is_read_whole(tmp_path: Path, anyio_backend: Any) -> None:
    async with ready(tmp_path) as client:
        assert len(await tokens_of(client, request(1, IN_PIECES, 7, 8, max_tokens=5))) == 5
        assert client.state is EngineState.READY and client.restarts == 0


async def test_a_message_that_cannot_be_sent_ends_the_engine_rather_than_the_requests_patience(
    tmp_path: Path,
) -> None:
    async with ready(tmp_path) as client:
        stream = client.submit([request(1, SLOW, max_tokens=200)])
        client._send(lambda: None)  # not to be pickled
        with pytest.raises(Unavailable):
            while await asyncio.wait_for(stream.next(), 20):
                pass
        await asyncio.wait_for(client.wait_ready(), 30)
        assert await tokens_of(client, request(2))


async def test_the_engine_ends_when_the_api_process_is_killed(tmp_path: Path) -> None:
    program = f"""
import asyncio, os
from nybble.service.client import EngineClient
from nybble.service.engine.protocol import EngineConfig

async def main():
    client = EngineClient(EngineConfig(model={str(tmp_path)!r}), "fake_engine:main")
    await client.start()
    await client.wait_ready()
    print(client._process.pid, flush=True)
    await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""
    script = tmp_path / "parent.py"
    script.write_text(program)
    environment = os.environ | {"PYTHONPATH": str(Path(fake_engine.__file__).parent)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        engine_pid = int(await asyncio.to_thread(parent.stdout.readline))
        assert alive(engine_pid)
        # What a service manager sends to the whole group leaves the engine to its parent.
        os.kill(engine_pid, signal.SIGTERM)
        os.kill(engine_pid, signal.SIGINT)
        await asyncio.sleep(0.2)
        assert alive(engine_pid)
        parent.kill()
        await until(lambda: not alive(engine_pid))
