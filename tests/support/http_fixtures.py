"""Fixtures for tests of the HTTP service: a model folder, a server process, an application in this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_engine
import httpx
import pytest
import tiny_tokenizer

from nybble.service.app import build_app
from nybble.service.client import EngineClient, EngineState
from nybble.service.engine.protocol import Loading, Request
from nybble.service.settings import Settings
from nybble.service.text import TextCodec

SUPPORT = Path(__file__).parent
# For a machine that is busy with other things; two seconds is usual.
START_S = 120.0


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The API's part of a model folder, named tiny."""
    return tiny_tokenizer.write_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def codec(model_folder: Path) -> TextCodec:
    return TextCodec.load(model_folder)


# --- a server process ---


@dataclass
class ServerProcess:
    """`nybble serve` over the fake engine."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""

    def wait_listening(self) -> None:
        self._wait(lambda: re.search(r"listening on (https?://\S+)", self.log.read_text()), "listen")
        match = re.search(r"listening on (https?://\S+)", self.log.read_text())
        assert match is not None
        self.url = match[1]

    def wait_ready(self) -> None:
        self._wait(lambda: httpx.get(f"{self.url}/readyz").status_code == 200, "become ready")

    def _wait(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            assert self.process.poll() is None, f"the server ended: {self.log.read_text()}"
            assert time.monotonic() < deadline, f"the server did not {what}: {self.log.read_text()}"
            time.sleep(0.02)

    def engine_pid(self) -> int:
        """The child that is the engine (the other one is multiprocessing's resource tracker)."""
        for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for child in children.read_text().split():
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        raise AssertionError("no engine process")

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)

    def metrics(self) -> dict[str, float]:
        return parse_metrics(httpx.get(f"{self.url}/metrics").text)


def parse_metrics(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@contextlib.contextmanager
def run_server(folder: Path | str, log: Path, *flags: str, real: bool = False) -> Iterator[ServerProcess]:
    """real: with the engine that users get, instead of the fake one."""
    program = ["-P", "-m", "nybble.service"] if real else [str(SUPPORT / "fake_server.py")]
    command = [sys.executable, *program, "serve", str(folder), "--port", "0", *flags]
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr, stdout=stderr)
    try:
        yield ServerProcess(process, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture(scope="session")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that leave it as they found it."""
    with run_server(model_folder, tmp_path_factory.mktemp("server") / "log") as running:
        running.wait_listening()
        running.wait_ready()
        yield running


@pytest.fixture(scope="session")
def server_url(server: ServerProcess) -> str:
    return server.url


@pytest.fixture(scope="session")
def http(server_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server_url, timeout=30) as client:
        yield client


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie is dead, only not yet waited for.
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


# --- the application in this process ---


class LocalClient(EngineClient):
    """An engine client whose engine is the fake one, stepped by the event loop instead of a process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Settings(model="tiny").engine_config("tiny"), "fake_engine:main", **options)
        self.fake = fake_engine.Fake(self)  # type: ignore[arg-type]
        self.aborted: list[tuple[str, str]] = []
        self.seen: list[Request] = []
        self.step_s = 0.0
        self._stepping: asyncio.Task[None] | None = None

    def become_ready(self) -> None:
        self._on_loading(Loading("weights", 1, 2))
        self._on_info(fake_engine.info(self.config))

    def send(self, message: Any) -> None:
        """The engine's end of the pipe."""
        self._handlers[type(message)](self, message)

    def submit(self, requests: Any) -> Any:
        stream = super().submit(requests)
        self.seen += requests
        return stream

    def abort(self, request_id: str, reason: str = "abort") -> None:
        if request_id in self._live:
            self.aborted.append((request_id, reason))
        super().abort(request_id, reason)

    def _send(self, message: Any) -> None:
        self.fake.take(message)
        if self.fake.sequences and (self._stepping is None or self._stepping.done()):
            self._stepping = asyncio.get_running_loop().create_task(self._steps())

    async def _steps(self) -> None:
        while self.fake.sequences:
            await asyncio.sleep(self.step_s)
            self.fake.step()


@dataclass
class LocalApp:
    client: LocalClient
    app: Any
    http: httpx.AsyncClient


@contextlib.asynccontextmanager
async def local_app(codec: TextCodec, *, ready: bool = True, **settings: Any) -> AsyncIterator[LocalApp]:
    parsed = Settings(model="tiny", **settings)
    client = LocalClient(max_queue=parsed.max_queue)
    app = build_app(parsed, client, codec)
    if ready:
        client.become_ready()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://local") as http:
        yield LocalApp(client, app, http)
    assert client.state is not EngineState.FAILED
