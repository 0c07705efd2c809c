"""deploy/nginx in front of three servers: streams, clients that leave, a host that is killed and one that drains."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_tokenizer
from fake_engine import SLOW, SLOW_LOAD
from http_fixtures import ServerProcess, run_server

NGINX = Path(__file__).parents[2] / "deploy" / "nginx"
PROGRAM = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(PROGRAM is None, reason="nginx is not installed"),
]

# A token each 50 ms.
SLOW_BODY: dict[str, Any] = {"prompt": [SLOW, 100, 101], "max_tokens": 60}
LIMIT_S = 60.0
SHORT, LONG = 30, 200


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def run_nginx(folder: Path, hosts: list[str]) -> Iterator[str]:
    """nginx with the configuration that is shipped; only the address to listen on and the hosts are the test's."""
    folder.mkdir()
    text = (NGINX / "nginx.conf").read_text()
    port = free_port()
    assert text.count("listen 8080;") == 1
    (folder / "nginx.conf").write_text(text.replace("listen 8080;", f"listen 127.0.0.1:{port};"))
    shipped = (NGINX / "hosts.conf").read_text().splitlines()
    (options,) = {line.split(" ", 2)[2] for line in shipped if line.startswith("server ")}
    (folder / "hosts.conf").write_text("".join(f"server {host} {options}\n" for host in hosts))
    directives = "daemon off;" + (" user root;" if os.geteuid() == 0 else "")
    log = folder / "log"
    with log.open("wb") as output:
        command = [str(PROGRAM), "-p", f"{folder}/", "-c", "nginx.conf", "-g", directives]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{url}/metrics").status_code == 404
            return False

        until(answers, "nginx did not listen")
        yield url
    finally:
        process.terminate()
        process.wait(LIMIT_S)


@dataclass
class Site:
    url: str
    servers: list[ServerProcess]

    def running(self) -> list[int]:
        """Requests in the engine of each server that lives."""
        return [
            int(server.metrics()["nybble_requests_running"])
            for server in self.servers
            if server.process.poll() is None
        ]


@contextlib.contextmanager
def run_site(tmp_path: Path, count: int, *flags: str, slow_load: bool = False) -> Iterator[Site]:
    folder = tiny_tokenizer.write_folder(tmp_path / "tiny")
    if slow_load:
        (folder / SLOW_LOAD).touch()
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(run_server(folder, tmp_path / f"log{i}", *flags)) for i in range(count)
        ]
        for server in servers:
            server.wait_listening()
            if not slow_load:
                server.wait_ready()
        hosts = [server.url.removeprefix("http://") for server in servers]
        yield Site(stack.enter_context(run_nginx(tmp_path / "nginx", hosts)), servers)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """For tests that leave it as they found it."""
    with run_site(tmp_path_factory.mktemp("site"), 2) as running:
        yield running


def complete(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=SLOW_BODY | body, timeout=LIMIT_S)


def test_the_first_event_comes_while_the_rest_is_made(site: Site) -> None:
    with httpx.stream(
        "POST", f"{site.url}/v1/completions", json=SLOW_BODY | {"stream": True}, timeout=LIMIT_S
    ) as answer:
        events = (line for line in answer.iter_lines() if line)
        assert next(events).startswith("data: ")
        assert sum(site.running()) == 1
        assert list(events)[-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_a_client_that_leaves_is_aborted(site: Site, stream: bool) -> None:
    def aborted() -> float:
        return sum(
            server.metrics()['nybble_requests_total{finish_reason="abort"}'] for server in site.servers
        )

    before = aborted()
    body = json.dumps(SLOW_BODY | {"max_tokens": 200, "stream": stream}).encode()
    host, port = site.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: sum(site.running()) == 1, "the request did not arrive")
    until(lambda: aborted() == before + 1, "the request was not aborted")
    assert sum(site.running()) == 0


def test_the_host_with_the_fewest_connections_is_next(site: Site) -> None:
    body = SLOW_BODY | {"max_tokens": LONG, "stream": True}
    with contextlib.ExitStack() as stack:
        reading = []  # an iterator that is dropped closes its stream
        for _ in range(6):
            stream = httpx.stream("POST", f"{site.url}/v1/completions", json=body, timeout=LIMIT_S)
            reading.append(stack.enter_context(stream).iter_lines())
            next(reading[-1])
        assert site.running() == [3, 3]
    until(lambda: sum(site.running()) == 0, "the requests were not aborted")


def test_what_the_service_refuses_keeps_its_words(site: Site) -> None:
    refused = httpx.post(f"{site.url}/v1/completions", content=b"x" * (9 << 20), timeout=LIMIT_S)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
    assert str(8 << 20) in refused.json()["error"]["message"]
    assert complete(site.url, no_such=1).json()["error"]["code"] == "unknown_parameter"


def test_what_nginx_says_itself_has_the_form_of_the_service(site: Site, tmp_path: Path) -> None:
    refused = httpx.post(f"{site.url}/v1/completions", content=b"x" * (17 << 20), timeout=LIMIT_S)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
    metrics = httpx.get(f"{site.url}/metrics")
    assert (metrics.status_code, metrics.json()["error"]["code"]) == (404, "not_found")
    with run_nginx(tmp_path / "nginx", [f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"]) as url:
        nobody = complete(url)
        assert (nobody.status_code, nobody.json()["error"]["code"]) == (503, "no_host")
        assert int(nobody.headers["retry-after"]) > 0


def test_while_every_host_loads_that_is_the_answer(tmp_path: Path) -> None:
    with run_site(tmp_path, 2, slow_load=True) as site:
        answer = complete(site.url)
        if answer.status_code == 503:  # else the machine was slower than the loading
            assert answer.json()["error"]["code"] == "loading"
            assert int(answer.headers["retry-after"]) > 0
        for server in site.servers:
            server.wait_ready()
        until(lambda: complete(site.url, max_tokens=1).status_code == 200, "no host came back")


# --- hosts that go away under load ---


@dataclass
class Outcome:
    """status 0: the connection ended before the answer was whole. events: lines of a stream."""

    stream: bool
    max_tokens: int
    status: int
    text: str = ""
    begun: bool = False
    events: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        if self.status != 200:
            return False
        return self.events[-1] == "data: [DONE]" if self.stream else self.text != ""


async def ask(http: httpx.AsyncClient, *, stream: bool, max_tokens: int) -> Outcome:
    events: list[str] = []
    body = SLOW_BODY | {"max_tokens": max_tokens, "stream": stream}
    try:
        if not stream:
            answer = await http.post("/v1/completions", json=body)
            text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
            return Outcome(False, max_tokens, answer.status_code, text)
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line:
                    events.append(line)
            return Outcome(True, max_tokens, answer.status_code, begun=bool(events), events=tuple(events))
    except httpx.RemoteProtocolError:
        return Outcome(stream, max_tokens, 0, begun=bool(events), events=tuple(events))


async def load_until(done: asyncio.Event, http: httpx.AsyncClient, outcomes: list[Outcome]) -> None:
    """One user, who asks again and again, in turn for a stream and for a whole answer."""
    stream = False
    while not done.is_set():
        outcomes.append(await ask(http, stream=stream, max_tokens=SHORT))
        stream = not stream


def test_a_host_that_is_killed_and_one_that_drains_lose_nothing_that_had_not_begun(tmp_path: Path) -> None:
    with run_site(tmp_path, 3) as site:
        texts = {
            count: complete(site.url, prompt=[100, 101], max_tokens=count).json()["choices"][0]["text"]
            for count in (SHORT, LONG)
        }
        outcomes = asyncio.run(kill_and_drain(site))
        assert site.servers[1].process.wait(LIMIT_S) == 0

    lost = [outcome for outcome in outcomes if not outcome.whole]
    assert all(one.text == texts[one.max_tokens] for one in outcomes if one.whole and not one.stream)
    # Only what had begun to stream, and its reader is told by the connection.
    assert all(one.stream and one.begun and one.status == 0 for one in lost), lost
    assert lost, "no stream was under way on the host that was killed"


async def kill_and_drain(site: Site) -> list[Outcome]:
    killed, drained, _ = site.servers
    outcomes: list[Outcome] = []
    done = asyncio.Event()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=site.url, timeout=LIMIT_S, limits=limits) as http:
        users = [asyncio.create_task(load_until(done, http, outcomes)) for _ in range(9)]
        # Of each kind one, so that both are certainly under way on the host that dies.
        held = [
            asyncio.create_task(ask(http, stream=stream, max_tokens=LONG))
            for stream in (True, False)
            for _ in range(3)
        ]
        await until_async(lambda: min(site.running()) >= 2)
        killed.process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(killed.process.wait)
        await until_async(lambda: min(site.running()) >= 2)
        drained.process.send_signal(signal.SIGTERM)
        await until_async(lambda: drained.process.poll() is not None)
        after = len(outcomes)
        await until_async(lambda: len(outcomes) >= after + 20)
        done.set()
        await asyncio.gather(*users)
        outcomes += await asyncio.gather(*held)
    return outcomes


async def until_async(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
