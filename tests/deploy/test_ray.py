"""deploy/ray as docs/scale-out.md starts it: two replicas, clients that leave, replicas and engines that are killed.

Ray lives in an environment of its own, whose bin folder NYBBLE_RAY names (`make test-ray` makes one). It listens on every
address, so that the cluster is started where there is none but 127.0.0.1: in a network namespace, with the test in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_tokenizer
import yaml
from http_fixtures import alive, parse_metrics
from model_folders import prompts
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
from waiting import wait_until

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "ray"
REAL_MODEL = ROOT / "tests" / "data" / "llama-ct-g32"
REAL_SETTINGS: dict[str, Any] = {
    "model": str(REAL_MODEL),
    "device": "cpu",
    "dtype": "float32",
    "lm_head": "keep",
}
REAL_SETTINGS |= {"threads": 1, "kv_cache_bytes": 8 << 20}
PORT = 8000
REPLICA, GATEWAY = "ServeReplica:nybble:Replica", "ServeReplica:nybble:Gateway"
URL = f"http://127.0.0.1:{PORT}"
# For a machine that is busy with other things; 40 s is usual.
START_S = 240.0
CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40
# In the environment of every process of the cluster, and of no other.
MARK = f"NYBBLE_RAY_TEST={secrets.token_hex(8)}"


def wait(what: str, holds: Callable[[], bool], logs: Callable[[], str] = str) -> None:
    wait_until(what, holds, START_S, logs)


@contextlib.contextmanager
def only_loopback() -> Iterator[None]:
    """This thread, and what it starts, in a network of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    outside = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(CLONE_NEWNET):
            pytest.skip("needs a network namespace: unshare is not permitted here")
        with socket.socket() as one:
            lo_up = struct.pack("16sH14x", b"lo", IFF_UP | IFF_RUNNING)
            fcntl.ioctl(one, SIOCSIFFLAGS, lo_up)
        yield
        assert libc.setns(outside, CLONE_NEWNET) == 0
    finally:
        os.close(outside)


# --- processes of the cluster ---


def ours() -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if MARK.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def pids(title: str) -> set[int]:
    """Of actors: Ray sets their command lines."""
    found = set()
    for pid in ours():
        with contextlib.suppress(OSError):
            if f"ray::{title}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def engine_of(pid: int) -> int:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise AssertionError(f"no engine process of {pid}")


@dataclass
class Cluster:
    folder: Path
    environment: dict[str, str]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"log{len(self.processes)}"
        with log.open("wb") as output:
            process = subprocess.Popen(command, env=self.environment, stdout=output, stderr=output)
        self.processes.append(process)
        return process

    def serve(self, replicas: int) -> subprocess.Popen[bytes]:
        """`serve run` with the file that is shipped, for this machine and the fake engine."""
        config: dict[str, Any] = yaml.safe_load((DEPLOY / "serve.yaml").read_text())
        config["http_options"]["host"] = "127.0.0.1"
        (shipped,) = config["applications"]
        config["applications"] = [shipped, real := copy.deepcopy(shipped)]
        shipped["args"] = {
            "engine_main": "fake_engine:main",
            "settings": {"model": str(self.folder / "tiny")},
        }
        real |= {"name": "real", "route_prefix": "/real", "args": {"settings": REAL_SETTINGS}}
        for application, count in ((shipped, replicas), (real, 1)):
            replica, gateway = application["deployments"]
            replica["num_replicas"], gateway["num_replicas"] = count, 1
            gateway["ray_actor_options"] = {"num_cpus": 0}
            replica["ray_actor_options"]["num_cpus"] = 0
        file = self.folder / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        return self.start("serve", "run", "--address", "127.0.0.1:6379", str(file))

    def logs(self) -> str:
        return "\n".join(log.read_text()[-3000:] for log in sorted(self.folder.glob("log*")))

    def stop(self) -> None:
        while left := ours():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self.processes:
                process.poll()
            time.sleep(0.1)


def targets() -> dict[str, dict[str, Any]]:
    """As Prometheus reads them."""
    found = httpx.get(f"{URL}/metrics/targets", timeout=30)
    return {one["labels"]["instance"]: one for one in found.json()} if found.status_code == 200 else {}


def metrics() -> dict[str, dict[str, float]]:
    """Of each replica, scraped as its target says."""
    scraped = {}
    for name, target in targets().items():
        (address,) = target["targets"]
        answer = httpx.get(
            f"http://{address}/metrics", params={"replica": target["labels"]["__param_replica"]}, timeout=30
        )
        if answer.status_code == 200:
            scraped[name] = parse_metrics(answer.text)
    return scraped


def running() -> list[float]:
    return sorted(one["nybble_requests_running"] for one in metrics().values())


def ready(replicas: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        states = [httpx.get(f"{URL}{prefix}/readyz").status_code for prefix in ("", "/real")]
        return len(metrics()) == replicas and states == [200, 200]
    return False


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    tools = os.environ.get("NYBBLE_RAY")
    assert tools, (
        "NYBBLE_RAY is not set: it names the bin folder of an environment with Ray, see make test-ray"
    )
    # Ray's sockets have long names, and a socket's name has 107 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="nr"))
    tiny_tokenizer.write_folder(folder / "tiny")
    name, _, value = MARK.partition("=")
    environment = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": f"{DEPLOY}:{ROOT / 'tests' / 'support'}",
        "HOME": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        name: value,
    }
    running_cluster = Cluster(folder, environment)
    with only_loopback():
        try:
            start = ["ray", "start", "--head", "--block", "--port=6379", "--disable-usage-stats"]
            start += ["--include-dashboard=false", "--include-log-monitor=false", f"--temp-dir={folder}/ray"]
            start += ["--object-store-memory=100000000", "--num-cpus=1", '--resources={"nybble_gpu": 3}']
            running_cluster.start(*start)
            wait("Ray listens", lambda: listens(6379))
            running_cluster.serve(2)
            wait("two replicas are ready", lambda: ready(2), running_cluster.logs)
            yield running_cluster
        finally:
            running_cluster.stop()
            shutil.rmtree(folder, ignore_errors=True)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(autouse=True)
def whole(cluster: Cluster) -> None:
    """Each test begins with two replicas that have nothing to do."""
    wait("two idle replicas", lambda: running() == [0, 0] and ready(2), cluster.logs)


def test_the_first_event_comes_while_the_rest_is_made() -> None:
    with streaming(URL, 1, SHORT) as (events,):
        assert sum(running()) == 1
        assert how_it_ended(events) == "done"


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_a_client_that_leaves_is_aborted(stream: bool) -> None:
    def aborted() -> float:
        return sum(one['nybble_requests_total{finish_reason="abort"}'] for one in metrics().values())

    before = aborted()
    data = json.dumps(body(LONG, stream=stream)).encode()
    with socket.create_connection(("127.0.0.1", PORT)) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wait("the request has arrived", lambda: sum(running()) == 1)
    wait("the request is aborted", lambda: aborted() == before + 1)
    assert sum(running()) == 0


def test_every_replica_has_metrics_of_its_own() -> None:
    before = metrics()
    with streaming(URL, 10):
        now = metrics()
        started = {
            name: now[name]["nybble_requests_started_total"] - one["nybble_requests_started_total"]
            for name, one in before.items()
        }
        assert sum(started.values()) == 10
        assert min(started.values()) > 0
    nobody = httpx.get(f"{URL}/metrics")
    assert (nobody.status_code, nobody.json()["error"]["param"]) == (400, "replica")
    unknown = httpx.get(f"{URL}/metrics?replica=none")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "replica")


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_finds_every_replica(cluster: Cluster) -> None:
    shipped = (DEPLOY / "prometheus.yml").read_text()
    config = cluster.folder / "prometheus.yml"
    config.write_text(
        shipped.replace("gateway:8000", f"127.0.0.1:{PORT}") + "global: {scrape_interval: 1s}\n"
    )
    storage = f"--storage.tsdb.path={cluster.folder}/tsdb"
    cluster.start("prometheus", f"--config.file={config}", "--web.listen-address=127.0.0.1:9090", storage)

    def scraped() -> set[str]:
        with contextlib.suppress(httpx.TransportError):
            query = {"query": "nybble_requests_started_total and on (instance) up == 1"}
            answer = httpx.get("http://127.0.0.1:9090/api/v1/query", params=query)
            if answer.status_code == 200:
                return {one["metric"]["instance"] for one in answer.json()["data"]["result"]}
        return set()

    wait("every replica is scraped", lambda: scraped() == targets().keys())


def test_the_real_engine_answers() -> None:
    expected = prompts(REAL_MODEL)[0]
    asked = {"prompt": expected["input_ids"], "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    answer = httpx.post(f"{URL}/real/v1/completions", json=asked, timeout=START_S)
    assert answer.json()["choices"][0]["token_ids"] == expected["greedy_ids"][:8]
    assert len(answer.headers.get_list("x-request-id")) == 1


def test_what_begins_alike_goes_to_the_same_replica() -> None:
    def served() -> Counter[str]:
        return Counter({name: int(one["nybble_requests_started_total"]) for name, one in metrics().items()})

    for letter in "ab":
        before = served()
        for i in range(6):
            asked = {"prompt": letter * 100 + str(i), "max_tokens": 1}
            assert httpx.post(f"{URL}/v1/completions", json=asked).status_code == 200
        assert list((served() - before).values()) == [6]


def test_refusals_keep_the_words_of_the_service() -> None:
    refused = httpx.post(f"{URL}/v1/completions", json=body(1) | {"no_such": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unknown_parameter")
    large = httpx.post(f"{URL}/v1/completions", content=b"x" * (9 << 20))
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("victim", ["replica", "engine"])
def test_a_kill_loses_nothing_that_had_not_begun(victim: str) -> None:
    replica = min(pids(REPLICA))
    engine = engine_of(replica)
    text = expected_text(URL)

    async def kill() -> list[Outcome]:
        async with under_load(URL) as load:
            await until(lambda: min(running()) >= 4)
            os.kill(replica if victim == "replica" else engine, signal.SIGKILL)
            await load.more(30)
        return load.ended

    with streaming(URL, 8) as readers:
        assert min(running()) > 0
        outcomes = asyncio.run(kill())
        ends = Counter(map(how_it_ended, readers))
    check(outcomes, text)
    assert ends.keys() == {"done", "error"}
    wait("the engine has ended with its replica", lambda: not alive(engine))


def test_what_a_gateway_takes_with_it_does_not_look_whole() -> None:
    (gateway,) = pids(GATEWAY)
    with ThreadPoolExecutor() as pool, streaming(URL, 2) as readers:
        waiting = pool.submit(httpx.post, f"{URL}/v1/completions", json=body(LONG), timeout=LIMIT_S)
        wait("the request has arrived", lambda: sum(running()) == 3)
        os.kill(gateway, signal.SIGKILL)
        assert set(map(how_it_ended, readers)) == {"broken"}
        assert waiting.result().status_code == 500


def test_without_the_actor_that_keeps_prefixes_requests_are_routed() -> None:
    for prefixes in pids("PrefixTreeActor"):
        os.kill(prefixes, signal.SIGKILL)
    with streaming(URL, 6, SHORT) as readers:
        assert set(map(how_it_ended, readers)) == {"done"}


def test_a_replica_that_is_taken_away_ends_what_it_has_begun(cluster: Cluster) -> None:
    """The last test: one replica is left after it."""
    cluster.serve(1)
    deadline_s = time.monotonic() + START_S
    with contextlib.ExitStack() as stack:
        readers = []
        while len(targets()) == 2:
            assert time.monotonic() < deadline_s, cluster.logs()
            readers += stack.enter_context(streaming(URL, 1))
            time.sleep(0.5)
        # It gets nothing new, and is there until its streams have ended.
        assert len(pids(REPLICA)) == 2
        assert set(map(how_it_ended, readers)) == {"done"}
    wait("the replica is gone", lambda: len(pids(REPLICA)) == 1)
    assert ready(1)
