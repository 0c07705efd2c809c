"""The running server against its own OpenAPI document: schemathesis makes requests, valid and not, from the document, and
looks for 5xx, for statuses, types and bodies that it does not name, and for bad input that is let through.

One check is left out, that whatever the document allows is accepted: a prompt may be longer than the context, and two
parameters may contradict each other, which no schema says.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from http_fixtures import run_server

pytestmark = pytest.mark.fuzz

CHECKPOINT = Path(__file__).parents[1] / "data" / "llama-ct-g32"
# A short context: the default length of a chat is all of it.
FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--lm-head", "keep", "--threads", "1"),
    *("--max-model-len", "64", "--kv-cache-bytes", "8000000", "--max-queue", "4096"),
)
FUZZ_S = int(os.environ.get("FUZZ_S", "120"))
LEAST_CASES = 2000


def test_no_request_is_answered_other_than_the_document_says(tmp_path: Path) -> None:
    program = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    assert program is not None, "schemathesis is not installed: it is in the extra `dev`"
    with run_server(CHECKPOINT, tmp_path / "log", *FLAGS, real=True) as server:
        server.wait_listening()
        server.wait_ready()
        engine_pid = server.engine_pid()
        command = [program, "run", f"{server.url}/openapi.json", "--phases", "fuzzing"]
        command += ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]
        command += ["--workers", "2", "--max-examples", "500", "--max-time", str(FUZZ_S)]
        command += ["--continue-on-failure", "--request-timeout", "60", "--no-color"]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=FUZZ_S * 2 + 120, check=False
        )
        report = done.stdout[-6000:]
        assert done.returncode == 0, report
        cases = re.search(r"(\d+) generated, (\d+) passed", report)
        assert cases is not None, report
        print(f"{cases[1]} cases")
        assert int(cases[1]) == int(cases[2]) >= LEAST_CASES * FUZZ_S / 120, report

        assert server.engine_pid() == engine_pid
        metrics = server.metrics()
        assert metrics["nybble_requests_running"] == metrics["nybble_requests_waiting"] == 0
        assert metrics["nybble_kv_cache_usage_ratio"] == 0
        assert metrics["nybble_requests_started_total"] > 100
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "Hello", "max_tokens": 3}, timeout=30
        )
        assert answer.status_code == 200
        assert "Traceback" not in server.log.read_text()
