"""deploy/healthcheck.py, which images run against the service they hold."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from nybble.service.settings import digest, load_settings

SCRIPT = Path(__file__).resolve().parents[2] / "deploy/healthcheck.py"
KEY = "a-key-of-this-test"


class Handler(BaseHTTPRequestHandler):
    """/livez is open, /readyz asks for a key, /health is never well."""

    def do_GET(self) -> None:
        has_key = self.headers.get("Authorization") == f"Bearer {KEY}"
        self.send_response({"/livez": 200, "/readyz": 200 if has_key else 401}.get(self.path, 503))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def server() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        Thread(target=httpd.serve_forever, daemon=True).start()
        yield httpd.server_address[1]
        httpd.shutdown()


def check(port: int, *route: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", str(SCRIPT), *route],
        env={"NYBBLE_PORT": str(port), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_live_service_is_healthy() -> None:
    with server() as port:
        assert check(port).returncode == 0


def test_another_status_is_not() -> None:
    with server() as port:
        done = check(port, "/health")
    assert done.returncode == 1
    assert done.stderr == "/health: 503\n"


def test_nobody_there_is_not() -> None:
    with server() as port:
        pass
    done = check(port)
    assert done.returncode == 1
    assert done.stderr.startswith("/livez: ")


@pytest.mark.parametrize("where", ["variable", "file"])
def test_it_asks_with_a_key_of_the_service(where: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of the test\n\n{KEY}  # the first\nanother-key\n")
    keys = {
        "variable": {"NYBBLE_API_KEYS": f" {KEY}, another-key"},
        "file": {"NYBBLE_API_KEY_FILE": str(file)},
    }
    with server() as port:
        assert check(port, "/readyz").returncode == 1
        assert check(port, "/readyz", **keys[where]).returncode == 0


@pytest.mark.parametrize("variable", ["first-key,second-key", " ,first-key ", "first#key", "#first-key"])
def test_the_service_accepts_the_key(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the variable # is a character like another."""
    monkeypatch.setenv("NYBBLE_API_KEYS", variable)
    key = runpy.run_path(str(SCRIPT))["api_key"](os.environ)
    assert digest(key) in load_settings({"model": "demo"}).key_digests()
