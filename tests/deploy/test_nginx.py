"""deploy/nginx in front of three servers: streams, clients that leave, a host that is killed and one that drains."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_tokenizer
from fake_engine import CRASH_AT_START
from http_fixtures import ServerProcess, run_server
from under_load import (
    LIMIT_S,
    LONG,
    SHORT,
    Outcome,
    body,
    check,
    expected_text,
    how_it_ended,
    streaming,
    under_load,
    until,
)
from waiting import free_port, wait_until

from nybble.service.server import KEEP_ALIVE_S

NGINX = Path(__file__).parents[2] / "deploy" / "nginx"
PROGRAM = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(PROGRAM is None, reason="nginx is not installed"),
]


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

        wait_until("nginx listens", answers)
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
def run_site(tmp_path: Path, count: int, *, ready: bool = True) -> Iterator[Site]:
    """ready: else their engines end as they start, until the file that makes them is removed."""
    folder = tiny_tokenizer.write_folder(tmp_path / "tiny")
    if not ready:
        (folder / CRASH_AT_START).touch()
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(run_server(folder, tmp_path / f"log{i}")) for i in range(count)]
        for server in servers:
            server.wait_listening()
            if ready:
                server.wait_ready()
        hosts = [server.url.removeprefix("http://") for server in servers]
        yield Site(stack.enter_context(run_nginx(tmp_path / "nginx", hosts)), servers)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """For tests that leave it as they found it."""
    with run_site(tmp_path_factory.mktemp("site"), 2) as running:
        yield running


def complete(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body(SHORT) | fields, timeout=LIMIT_S)


def test_a_worker_may_open_as_many_files_as_it_has_connections() -> None:
    """And as many again for bodies on disk. At 1024, the usual limit, 500 streams would be all."""
    text = (NGINX / "nginx.conf").read_text()
    (connections,) = re.findall(r"^    worker_connections (\d+);$", text, re.MULTILINE)
    (files,) = re.findall(r"^worker_rlimit_nofile (\d+);$", text, re.MULTILINE)
    assert int(files) >= 2 * int(connections)


def test_idle_connections_are_closed_by_nginx_and_not_by_the_host() -> None:
    text = (NGINX / "nginx.conf").read_text()
    (seconds,) = re.findall(r"keepalive_timeout (\d+)s;$", text, re.MULTILINE)
    assert int(seconds) < KEEP_ALIVE_S
    assert f"the {KEEP_ALIVE_S} s after which the service closes" in text


def test_the_first_event_comes_while_the_rest_is_made(site: Site) -> None:
    with streaming(site.url, 1, SHORT) as (events,):
        assert sum(site.running()) == 1
        assert how_it_ended(events) == "done"


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_a_client_that_leaves_is_aborted(site: Site, stream: bool) -> None:
    def aborted() -> float:
        return sum(
            server.metrics()['nybble_requests_total{finish_reason="abort"}'] for server in site.servers
        )

    before = aborted()
    data = json.dumps(body(LONG, stream=stream)).encode()
    host, port = site.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wait_until("the request has arrived", lambda: sum(site.running()) == 1)
    wait_until("the request is aborted", lambda: aborted() == before + 1)
    assert sum(site.running()) == 0


def test_the_host_with_the_fewest_connections_is_next(site: Site) -> None:
    with streaming(site.url, 6):
        assert site.running() == [3, 3]
    wait_until("the requests are aborted", lambda: sum(site.running()) == 0)


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


def test_while_no_host_has_an_engine_their_words_are_the_answer(tmp_path: Path) -> None:
    with run_site(tmp_path, 2, ready=False) as site:
        answer = complete(site.url)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] in ("loading", "engine_down")
        assert int(answer.headers["retry-after"]) > 0
        (tmp_path / "tiny" / CRASH_AT_START).unlink()
        wait_until("a host is back", lambda: complete(site.url, max_tokens=1).status_code == 200)


# --- hosts that go away under load ---


def test_a_host_that_is_killed_and_one_that_drains_lose_nothing_that_had_not_begun(tmp_path: Path) -> None:
    with run_site(tmp_path, 3) as site:
        text = expected_text(site.url)
        with streaming(site.url, 6) as readers:
            assert site.running() == [2, 2, 2]
            outcomes = asyncio.run(kill_and_drain(site))
            ends = Counter(map(how_it_ended, readers))
        assert site.servers[1].process.wait(LIMIT_S) == 0
    check(outcomes, text)
    assert ends == {"done": 4, "broken": 2}


async def kill_and_drain(site: Site) -> list[Outcome]:
    killed, drained, _ = site.servers
    async with under_load(site.url) as load:
        await until(lambda: min(site.running()) >= 4)
        killed.process.send_signal(signal.SIGKILL)
        await until(lambda: killed.process.poll() is not None)
        await load.more(10)
        drained.process.send_signal(signal.SIGTERM)
        await until(lambda: drained.process.poll() is not None)
        await load.more(20)
    return load.ended
