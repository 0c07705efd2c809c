"""nybble.service.logs, and the one line per request."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_engine import ERROR_AFTER_3
from http_fixtures import local_app

from nybble.service import logs
from nybble.service.text import TextCodec

SECRET = "A private question"


@pytest.fixture
def stream(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """What has been written to stderr."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    ours = logging.getLogger("nybble").level
    yield lambda: capsys.readouterr().err
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("nybble").setLevel(ours)


def test_lines_for_people(stream: Callable[[], str]) -> None:
    logs.configure_logging(logs.LogConfig("INFO", "human"))
    fields = {"status": 200, "route": "/v1/models", "text": 'say "hi"\nnow', "none": None, "ratio": {"a": 1}}
    logging.getLogger("nybble.x").info("done with %d", 3, extra=logs.with_fields(fields))
    line = stream()
    assert line.count("\n") == 1
    assert " INFO nybble.x: done with 3 status=200 route=/v1/models" in line
    assert 'text="say \\"hi\\"\\nnow" ratio={"a": 1}' in line and "none" not in line


def test_lines_for_machines(stream: Callable[[], str]) -> None:
    logs.configure_logging(logs.LogConfig("INFO", "json"))
    logger = logging.getLogger("nybble.x")
    logger.info("one\ntwo", extra=logs.with_fields({"status": 200}))
    try:
        raise ValueError("bad")
    except ValueError:
        logger.exception("failed")
    first, second = (json.loads(line) for line in stream().splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {"level": "info", "logger": "nybble.x", "message": "one\ntwo", "status": 200}
    assert second["exception"].endswith("ValueError: bad") and second["level"] == "error"


def test_libraries_are_heard_from_warnings_on(stream: Callable[[], str]) -> None:
    logs.configure_logging(logs.LogConfig("DEBUG", "human"))
    logging.getLogger("uvicorn.error").info("chatter")
    logging.getLogger("nybble.x").debug("ours")
    written = stream()
    assert "chatter" not in written and "ours" in written


def fields_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [r.nybble_fields for r in caplog.records if r.name == "nybble.access"]  # type: ignore[attr-defined]


@pytest.mark.anyio
@pytest.mark.parametrize("stream_it", [True, False])
async def test_a_request_is_one_line_with_its_timings(
    codec: TextCodec, caplog: pytest.LogCaptureFixture, stream_it: bool
) -> None:
    caplog.set_level("INFO", "nybble")
    async with local_app(codec) as local:
        body = {"prompt": SECRET, "max_tokens": 5, "n": 2, "stream": stream_it}
        answer = await local.http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 200
    (line,) = fields_of(caplog)
    assert 0 <= line.pop("queue_ms") <= line.pop("first_token_ms") <= line.pop("duration_ms") + 1
    assert line == {
        "request_id": "mine",
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "stream": stream_it,
        "choices": 2,
        "prompt_tokens": len(codec.encode(SECRET)),
        "cached_tokens": 0,
        "completion_tokens": 10,
        "finish_reason": "length",
    }
    assert "private" not in caplog.text and not any(" private" in str(r.__dict__) for r in caplog.records)


@pytest.mark.anyio
async def test_prompts_are_logged_when_asked_for(codec: TextCodec, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nybble")
    async with local_app(codec, log_prompts=True) as local:
        await local.http.post("/v1/completions", json={"prompt": [SECRET, "Hello"], "max_tokens": 1, "n": 2})
    assert fields_of(caplog)[0]["prompts"] == [SECRET, "Hello"]


@pytest.mark.anyio
async def test_what_went_wrong_is_in_the_line(codec: TextCodec, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nybble")
    async with local_app(codec) as local:
        await local.http.post("/v1/completions", json={"prompt": "x", "n": 0})
        await local.http.post("/v1/completions", json={"prompt": "x", "model": "other"})
        broken = {"prompt": [ERROR_AFTER_3, *codec.encode("abc")], "stream": True}
        await local.http.post("/v1/completions", json=broken)
        await local.http.get("/nowhere/private")
    lines = fields_of(caplog)
    assert [(line["status"], line.get("error")) for line in lines] == [
        (400, "invalid_value"),
        (404, "model_not_found"),
        (200, "generation_failed"),
        (404, None),
    ]
    assert lines[-1]["route"] == "other"


@pytest.mark.anyio
async def test_probes_and_scrapes_are_quiet(codec: TextCodec, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nybble")
    async with local_app(codec) as local:
        for path in ("/livez", "/readyz", "/health", "/metrics"):
            assert (await local.http.get(path)).status_code == 200
    assert fields_of(caplog) == []
