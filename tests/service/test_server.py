"""A server process as a person or a service manager sees it: start, faults, signals, exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fake_engine
import httpx
import openai
import pytest
import tiny_tokenizer
from fake_engine import CRASH_AFTER_3, SLOW
from http_fixtures import ServerProcess, alive, run_server

from nybble.service.engine.protocol import Loading
from nybble.service.server import LoadingProgress, _uvicorn_config, engine_client, listen
from nybble.service.settings import Settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_tokenizer.write_folder(tmp_path / "tiny")


def until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def accounted(metrics: dict[str, float]) -> bool:
    ended = sum(value for name, value in metrics.items() if name.startswith("nybble_requests_total{"))
    started = metrics["nybble_requests_started_total"]
    return started == ended + metrics["nybble_requests_running"] + metrics["nybble_requests_waiting"]


def idle(server: ServerProcess) -> bool:
    metrics = server.metrics()
    return metrics["nybble_requests_running"] == metrics["nybble_requests_waiting"] == 0


SLOW_BODY = {"prompt": [SLOW, 100, 101], "max_tokens": 200}


# --- clients that leave ---


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_a_client_that_leaves_is_aborted(server: ServerProcess, stream: bool) -> None:
    before = server.metrics()['nybble_requests_total{finish_reason="abort"}']
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(SLOW_BODY | {"stream": stream, "n": 2}).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        if stream:
            assert b"200 OK" in connection.recv(1000)
        else:
            until(lambda: server.metrics()["nybble_requests_running"] == 2)
    until(lambda: idle(server), 2)
    metrics = server.metrics()
    assert metrics['nybble_requests_total{finish_reason="abort"}'] == before + 2
    assert accounted(metrics)


def test_many_clients_that_leave(server: ServerProcess) -> None:
    def leave() -> None:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=SLOW_BODY | {"stream": True}
        ) as response:
            next(response.iter_bytes())

    threads = [threading.Thread(target=leave) for _ in range(20)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert accounted(server.metrics())
    until(lambda: idle(server))
    assert accounted(server.metrics())


# --- the engine dies ---


def test_a_crash_in_a_stream_is_one_error_event_and_the_engine_comes_back(
    folder: Path, tmp_path: Path
) -> None:
    with run_server(folder, tmp_path / "log") as server:
        server.wait_listening()
        server.wait_ready()
        body = {"prompt": [CRASH_AFTER_3, 100, 101], "max_tokens": 50}
        response = httpx.post(f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=30)
        events = [event for event in response.text.split("\n\n") if event]
        assert [('"error"' in event) for event in events] == [False] * 3 + [True]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "engine_down"
        assert "[DONE]" not in response.text
        assert httpx.get(f"{server.url}/livez").status_code == 200
        down = httpx.get(f"{server.url}/readyz")
        assert down.status_code == 503 and down.json()["status"] in ("down", "loading")
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        server.wait_ready()
        metrics = server.metrics()
        assert metrics["nybble_engine_restarts_total"] == 1
        assert metrics['nybble_requests_total{finish_reason="error"}'] == 1
        assert accounted(metrics)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.APIError, match="stopped unexpectedly"):
                list(client.completions.create(model="tiny", **body, stream=True))
            server.wait_ready()
            assert (
                client.completions.create(model="tiny", prompt="x", max_tokens=2).usage.completion_tokens == 2
            )


FAULTS = {
    "killed": (CRASH_AFTER_3, "the engine process ended (exit code -9)"),
    "hung": (fake_engine.HANG_AFTER_3, "it hangs and is killed"),
    "out of memory": (fake_engine.NO_MEMORY_AFTER_3, "HIP out of memory"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_answer_under_way_ends_once_when_the_engine_fails(
    folder: Path, tmp_path: Path, fault: str
) -> None:
    command, said = FAULTS[fault]
    with run_server(folder, tmp_path / "log", "--step-timeout-s", "1") as server:
        server.wait_listening()
        server.wait_ready()
        bodies = [
            {"prompt": [command, 100], "max_tokens": 50, "stream": True},
            {"prompt": [SLOW, 100], "max_tokens": 200, "stream": True, "n": 3},
            {"prompt": [SLOW, 100], "max_tokens": 200},
        ]
        # The fault comes last, when the others are under way.
        with ThreadPoolExecutor(3) as pool:
            answers = []
            for body, running in zip(reversed(bodies), (1, 4, 0), strict=True):
                answers.append(pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=30))
                until(lambda running=running: server.metrics()["nybble_requests_running"] >= running)
            whole, three, faulty = (answer.result() for answer in answers)
        assert whole.status_code == 503 and whole.json()["error"]["code"] == "engine_down"
        assert whole.headers["retry-after"]
        for response in (three, faulty):
            events = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
            assert response.status_code == 200 and "[DONE]" not in events
            errors = [event for event in events if '"error"' in event]
            assert errors == events[-1:] and json.loads(errors[0])["error"]["code"] == "engine_down"
        assert httpx.get(f"{server.url}/livez").status_code == 200
        server.wait_ready()
        metrics = server.metrics()
        assert metrics["nybble_engine_restarts_total"] == 1
        assert metrics['nybble_requests_total{finish_reason="error"}'] == 5 and accounted(metrics)
        log = server.log.read_text()
        assert said in log and "Traceback" not in log
        assert "abort" not in log, "the log's word is the metrics': error"
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2})
        assert answer.json()["usage"]["completion_tokens"] == 2


def test_an_idle_engine_is_not_a_hung_one(folder: Path, tmp_path: Path) -> None:
    with run_server(folder, tmp_path / "log", "--step-timeout-s", "0.4") as server:
        server.wait_listening()
        server.wait_ready()
        for _ in range(2):
            time.sleep(1.2)
            body = {"prompt": [SLOW, 100], "max_tokens": 20}
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).status_code == 200
        assert server.metrics()["nybble_engine_restarts_total"] == 0


def test_a_server_that_was_stopped_and_goes_on_does_not_blame_its_engine(
    folder: Path, tmp_path: Path
) -> None:
    with run_server(folder, tmp_path / "log", "--step-timeout-s", "0.5") as server:
        server.wait_listening()
        server.wait_ready()
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=SLOW_BODY | {"stream": True}
        ) as response:
            pieces = response.iter_text()
            text = next(pieces)
            os.kill(server.process.pid, signal.SIGSTOP)
            time.sleep(2)
            os.kill(server.process.pid, signal.SIGCONT)
            text += "".join(pieces)
        assert text.endswith("data: [DONE]\n\n") and '"error"' not in text


# --- signals ---


def test_sigterm_lets_running_requests_finish(folder: Path, tmp_path: Path) -> None:
    with run_server(folder, tmp_path / "log") as server:
        server.wait_listening()
        server.wait_ready()
        engine_pid = server.engine_pid()
        body = {"prompt": [SLOW, 100], "max_tokens": 15, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
            pieces = response.iter_text()
            text = next(pieces)
            os.kill(server.process.pid, signal.SIGTERM)
            text += "".join(pieces)
        assert text.count('"text"') == 15 and text.endswith("data: [DONE]\n\n")
        assert server.process.wait(15) == 0
        assert not alive(engine_pid)
        assert "Traceback" not in server.log.read_text()


def test_while_it_drains_it_answers_that_it_does(folder: Path, tmp_path: Path) -> None:
    with run_server(folder, tmp_path / "log") as server:
        server.wait_listening()
        server.wait_ready()
        body = {"prompt": [SLOW, 100], "max_tokens": 30, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
            pieces = response.iter_text()
            text = next(pieces)
            os.kill(server.process.pid, signal.SIGTERM)
            until(lambda: httpx.get(f"{server.url}/readyz").status_code == 503)
            ready = httpx.get(f"{server.url}/readyz")
            assert ready.json()["status"] == "draining" and ready.headers["retry-after"]
            refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
            assert refused.headers["retry-after"]
            assert httpx.get(f"{server.url}/livez").status_code == 200
            text += "".join(pieces)
        assert text.endswith("data: [DONE]\n\n") and '"error"' not in text
        assert server.process.wait(15) == 0


def test_sigterm_does_not_wait_for_a_body_that_does_not_arrive(folder: Path, tmp_path: Path) -> None:
    with run_server(folder, tmp_path / "log") as server:
        server.wait_listening()
        server.wait_ready()
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(0.3)
            os.kill(server.process.pid, signal.SIGTERM)
            received = b""
            while data := connection.recv(4096):
                received += data
        assert received.startswith(b"HTTP/1.1 503 ") and b'"draining"' in received
        assert server.process.wait(5) == 0
        assert "Traceback" not in server.log.read_text()


def test_sigterm_ends_what_does_not_finish_in_time_with_an_error(folder: Path, tmp_path: Path) -> None:
    with run_server(folder, tmp_path / "log", "--shutdown-timeout-s", "0.3") as server:
        server.wait_listening()
        server.wait_ready()
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=SLOW_BODY | {"stream": True}
        ) as response:
            pieces = response.iter_text()
            text = next(pieces)
            os.kill(server.process.pid, signal.SIGTERM)
            text += "".join(pieces)
        assert '"code":"draining"' in text.split("\n\n")[-2]
        assert server.process.wait(15) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_second_signal_ends_at_once(folder: Path, tmp_path: Path, number: int) -> None:
    with run_server(folder, tmp_path / "log") as server:
        server.wait_listening()
        server.wait_ready()
        engine_pid = server.engine_pid()
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=SLOW_BODY | {"stream": True}
        ) as response:
            pieces = response.iter_text()
            next(pieces)
            os.kill(server.process.pid, number)
            time.sleep(0.5)
            assert server.process.poll() is None
            os.kill(server.process.pid, number)
            assert server.process.wait(5) == 0
        assert not alive(engine_pid)
        assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_that_comes_twice_at_once_is_one(folder: Path, tmp_path: Path, number: int) -> None:
    """As from a terminal or a supervisor that signals the whole group, and a `make` in it that passes it on."""
    with run_server(folder, tmp_path / "log") as server:
        server.wait_listening()
        server.wait_ready()
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=SLOW_BODY | {"max_tokens": 5, "stream": True}
        ) as response:
            pieces = response.iter_text()
            text = next(pieces)
            for _ in range(2):
                os.kill(server.process.pid, number)
                time.sleep(0.05)
            text += "".join(pieces)
        assert text.endswith("data: [DONE]\n\n") and '"error"' not in text
        assert server.process.wait(15) == 0
        assert "ending at once" not in server.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_second_signal_ends_an_engine_that_does_not(folder: Path, tmp_path: Path, number: int) -> None:
    (folder / fake_engine.IGNORE_SHUTDOWN).touch()
    with run_server(folder, tmp_path / "log") as server:
        server.wait_listening()
        server.wait_ready()
        os.kill(server.process.pid, number)
        time.sleep(1.0)
        assert server.process.poll() is None
        os.kill(server.process.pid, number)
        assert server.process.wait(5) == 0


def test_the_engine_ends_when_the_server_is_killed(folder: Path, tmp_path: Path) -> None:
    with run_server(folder, tmp_path / "log") as server:
        server.wait_listening()
        engine_pid = server.engine_pid()
        server.stop(signal.SIGKILL)
        until(lambda: not alive(engine_pid))


# --- starting ---


def test_the_engine_client_does_what_the_settings_say() -> None:
    """That of a server, and that of a replica under Ray."""
    settings = Settings(model="m", max_queue=11, step_timeout_s=12, load_timeout_s=13, log_format="json")
    client = engine_client(settings, "folder")
    assert client.config == settings.engine_config("folder")
    assert (client.max_queue, client._step_timeout_s, client._load_timeout_s) == (11, 12, 13)
    assert client._log == settings.log_config()


def test_it_answers_while_the_model_loads(folder: Path, tmp_path: Path) -> None:
    (folder / fake_engine.SLOW_LOAD).touch()
    with run_server(folder, tmp_path / "log") as server:
        server.wait_listening()
        states = []
        while (response := httpx.get(f"{server.url}/readyz")).status_code == 503:
            states.append(response.json())
            assert httpx.get(f"{server.url}/livez").status_code == 200
        assert {state["status"] for state in states} <= {"loading"}
        server.wait_ready()
        assert "loading weights: " in server.log.read_text()


def ended(folder: Path | str, tmp_path: Path, *flags: str) -> tuple[int, str]:
    with run_server(folder, tmp_path / "log", *flags) as server:
        code = server.process.wait(60)
    return code, server.log.read_text()


def test_a_model_that_cannot_be_served_ends_with_one_sentence(folder: Path, tmp_path: Path) -> None:
    (folder / fake_engine.USER_ERROR).touch()
    code, log = ended(folder, tmp_path)
    assert code == 1
    assert log.splitlines()[-1] == "nybble: config.json: model_type 'banana' is not supported"
    assert "Traceback" not in log


def test_a_folder_without_a_tokenizer_ends_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, log = ended(tmp_path / "empty", tmp_path)
    assert code == 1
    assert "tokenizer cannot be read" in log.splitlines()[-1]
    assert "Traceback" not in log


def test_a_port_in_use_ends_with_one_sentence(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, log = ended(folder, tmp_path, "--port", str(port))
    assert code == 1
    # And nothing was begun before it was known.
    assert log.splitlines() == [
        f"nybble: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --host or --port"
    ]


def test_a_name_with_several_addresses_has_one_port() -> None:
    with listen(Settings(model="x", host="localhost", port=0)) as sockets:
        ports = {one.getsockname()[1] for one in sockets}
        assert len(ports) == 1
        for one in sockets:
            with socket.socket(one.family) as client:
                client.settimeout(5)
                client.connect(one.getsockname()[:2])


def test_a_host_that_cannot_be_ends_with_one_sentence(folder: Path, tmp_path: Path) -> None:
    code, log = ended(folder, tmp_path, "--host", "a..b")
    assert code == 1
    assert log.splitlines()[-1].startswith("nybble: cannot listen on a..b:0: ")
    assert "Traceback" not in log


def test_connections_are_kept_for_longer_than_clients_and_load_balancers_keep_theirs() -> None:
    """Or they would send a request at the moment in which its connection is closed."""
    assert _uvicorn_config(None, Settings(model="x")).timeout_keep_alive > 60


def test_torch_is_never_imported(model_folder: Path) -> None:
    program = f"""
import sys
from nybble.service import app, cli, server
assert "torch" not in sys.modules, "an import of ours needs torch"
server.bar_torch()
from nybble.service.text import TextCodec
codec = TextCodec.load({str(model_folder)!r})
assert codec.encode("Hello") and codec.render_chat([{{"role": "user", "content": "hi"}}])
assert sys.modules["torch"] is None
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


# --- progress ---


def test_progress_in_a_log_is_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    now = 0.0
    progress = LoadingProgress(bar=False, clock=lambda: now)
    for step in range(101):
        now = step * 0.1
        progress.show(Loading("weights", step * 10**6, 10**8))
    lines = [record.getMessage() for record in caplog.records]
    assert 5 <= len(lines) <= 8
    assert lines[-1] == "loading weights: 100 of 100 MB, 10 MB/s, 0 s left"


def test_progress_on_a_terminal_is_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    progress = LoadingProgress(bar=True)
    for done in (0, 50, 100):
        progress.show(Loading("weights", done, 100))
    assert "weights: 100%" in capsys.readouterr().err
