"""API keys, CORS, request ids, TLS, and what answers and logs never say."""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_fixtures import local_app, parse_metrics, run_server

from nybble.service.api.middleware import REQUEST_ID
from nybble.service.app import ROUTES
from nybble.service.text import TextCodec

pytestmark = pytest.mark.anyio

KEYS = ("first-secret-key", "second-secret-key")
BODY = {"prompt": "Hello", "max_tokens": 2}
PAGE = "https://chat.example"
TLS = Path(__file__).parents[1] / "data" / "tls"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# --- keys ---


@pytest.mark.parametrize("key", KEYS)
async def test_any_of_the_keys_opens_every_route(codec: TextCodec, key: str) -> None:
    async with local_app(codec, api_keys=",".join(KEYS)) as local:
        answer = await local.http.post("/v1/completions", json=BODY, headers=bearer(key))
        assert answer.status_code == 200
        for path in ("/v1/models", "/metrics", "/readyz", "/openapi.json"):
            assert (await local.http.get(path, headers=bearer(key))).status_code == 200


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_api_key"),
        ({"Authorization": ""}, "invalid_api_key"),
        (bearer(""), "invalid_api_key"),
        (bearer("first-secret-ke"), "invalid_api_key"),
        (bearer("first-secret-key2"), "invalid_api_key"),
        (bearer(",".join(KEYS)), "invalid_api_key"),
        ({"Authorization": f"Basic {KEYS[0]}"}, "invalid_api_key"),
        ({"Authorization": KEYS[0]}, "invalid_api_key"),
        ({"Authorization": b"Bearer \xff\xfe"}, "invalid_api_key"),
    ],
    ids=["none", "empty", "no key", "shorter", "longer", "both", "basic", "bare", "not text"],
)
async def test_without_a_key_every_route_but_liveness_is_401(
    codec: TextCodec, headers: Any, code: str
) -> None:
    async with local_app(codec, api_keys=",".join(KEYS)) as local:
        # A body that would be refused as too large, or as no JSON, is not even looked at.
        asked = [(method, path.replace("{model_id:path}", "tiny")) for method, path, _ in ROUTES]
        asked += [
            ("GET", "/openapi.json"),
            ("GET", "/nowhere"),
            ("OPTIONS", "/v1/models"),
            ("GET", "/livez/"),
        ]
        for method, path in asked:
            answer = await local.http.request(method, path, headers=headers, content=b"{" * 100)
            if path == "/livez":
                assert answer.status_code == 200
                continue
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == code
            assert answer.json()["error"]["type"] == "authentication_error"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert not any(key in answer.text for key in KEYS)
        metrics = await local.http.get("/metrics", headers=bearer(KEYS[0]))
        values = parse_metrics(metrics.text)
        assert values['nybble_rejected_total{reason="unauthorized"}'] == len(asked) - 1


async def test_a_large_body_without_a_key_is_read_on_so_that_the_answer_arrives(codec: TextCodec) -> None:
    left, sent = 100, []

    async def receive() -> dict[str, Any]:
        nonlocal left
        left -= 1
        return {"type": "http.request", "body": b"x" * 100_000, "more_body": left > 0}

    async def send(message: Any) -> None:
        sent.append((left, message))

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    async with local_app(codec, api_keys=",".join(KEYS)) as local:
        await local.app(scope, receive, send)
    assert sent[0][1]["status"] == 401 and sent[1][1]["body"]
    assert [at for at, _ in sent] == [100, 100, 0] and not sent[-1][1]["more_body"]


async def test_metrics_can_be_left_open(codec: TextCodec) -> None:
    async with local_app(codec, api_keys=KEYS[0], metrics_without_key=True) as local:
        assert (await local.http.get("/metrics")).status_code == 200
        assert (await local.http.get("/readyz")).status_code == 401


async def test_without_keys_none_is_needed(codec: TextCodec) -> None:
    async with local_app(codec) as local:
        assert (await local.http.get("/v1/models", headers=bearer("whatever"))).status_code == 200


def test_no_process_shows_a_key(model_folder: Path, tmp_path: Path) -> None:
    """Not in a command line, not in the engine's environment, not in the log."""
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{KEYS[1]}  # the second\n\n")
    os.environ["NYBBLE_API_KEYS"] = KEYS[0]
    try:
        flags = ("--api-key-file", str(file), "--log-level", "debug")
        with run_server(model_folder, tmp_path / "log", *flags) as server:
            server.wait_listening()
            for key, status in ((KEYS[0], 200), (KEYS[1], 200), ("another-key", 401)):
                assert httpx.get(f"{server.url}/v1/models", headers=bearer(key)).status_code == status
            engine = Path(f"/proc/{server.engine_pid()}")
            shown = (engine / "environ").read_bytes() + (engine / "cmdline").read_bytes()
            shown += Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
            log = server.log.read_text()
        assert not any(key in log or key.encode() in shown for key in (*KEYS, "another-key"))
    finally:
        del os.environ["NYBBLE_API_KEYS"]


# --- web pages of other origins ---


async def test_a_preflight_needs_no_key_and_every_answer_is_readable(codec: TextCodec, monkeypatch) -> None:
    async with local_app(codec, api_keys=KEYS[0], cors_origins=f"{PAGE}, https://other.example") as local:
        asks = {
            "Origin": PAGE,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
        }
        preflight = await local.http.options("/v1/chat/completions", headers=asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        origin = {"Origin": PAGE} | bearer(KEYS[0])
        answers = [
            await local.http.post("/v1/completions", json=BODY, headers=origin),
            await local.http.post("/v1/completions", json=BODY | {"stream": True}, headers=origin),
            await local.http.post("/v1/completions", json={}, headers=origin),
            await local.http.post("/v1/completions", json=BODY, headers={"Origin": PAGE}),
            await local.http.post("/v1/completions", content=b"x" * 9_000_000, headers=origin),
            await local.http.get("/nowhere", headers=origin),
        ]
        monkeypatch.setattr(local.client, "submit", lambda requests: 1 / 0)
        answers.append(await local.http.post("/v1/completions", json=BODY, headers=origin))
        assert [answer.status_code for answer in answers] == [200, 200, 400, 401, 413, 404, 500]
        for answer in answers:
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert REQUEST_ID.lower() in answer.headers["access-control-expose-headers"].lower()


async def test_another_origin_is_refused_with_an_error_object(codec: TextCodec) -> None:
    async with local_app(codec, cors_origins=PAGE) as local:
        asks = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        refused = await local.http.options("/v1/completions", headers=asks)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "cors_refused"
        assert "access-control-allow-origin" not in refused.headers
        answer = await local.http.get("/v1/models", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers


async def test_without_origins_there_is_no_cors(codec: TextCodec) -> None:
    async with local_app(codec) as local:
        answer = await local.http.get("/v1/models", headers={"Origin": PAGE})
        assert not any(name.startswith("access-control") for name in answer.headers)


# --- request ids ---


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("abc-123_x.y:z/1", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("a b", False),
        ('a"b', False),
        ("", False),
        ("é".encode(), False),
    ],
    ids=["usual", "longest", "too long", "space", "quote", "empty", "not ASCII"],
)
async def test_a_usable_request_id_comes_back(codec: TextCodec, given: Any, kept: bool) -> None:
    async with local_app(codec) as local:
        for path, status in (("/v1/models", 200), ("/nowhere", 404)):
            answer = await local.http.get(path, headers={REQUEST_ID: given})
            assert answer.status_code == status
            assert (answer.headers[REQUEST_ID] == given) is kept
            assert re.fullmatch(r"[!-~]{1,128}", answer.headers[REQUEST_ID])


async def test_every_answer_has_an_id_of_its_own(codec: TextCodec) -> None:
    async with local_app(codec) as local:
        ids = {(await local.http.get("/livez")).headers[REQUEST_ID] for _ in range(5)}
        ids.add((await local.http.post("/v1/completions", json=BODY | {"stream": True})).headers[REQUEST_ID])
        assert len(ids) == 6


# --- TLS ---


def test_https(model_folder: Path, tmp_path: Path) -> None:
    flags = ("--tls-certfile", str(TLS / "cert.pem"), "--tls-keyfile", str(TLS / "key.pem"))
    with run_server(model_folder, tmp_path / "log", *flags) as server:
        server.wait_listening()
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
        assert httpx.get(f"{server.url}/livez", verify=trusted).json() == {"status": "ok"}
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/livez")


@pytest.mark.parametrize(
    "flags",
    [
        ("--tls-certfile", "no-such-file"),
        ("--tls-keyfile", str(TLS / "key.pem")),
        ("--tls-certfile", str(TLS / "cert.pem")),
        ("--tls-certfile", __file__, "--tls-keyfile", __file__),
        ("--api-key-file", "no-such-file"),
        ("--api-key-file", os.devnull),
    ],
    ids=["no file", "key alone", "certificate alone", "no PEM", "no key file", "key file without keys"],
)
def test_files_that_do_not_do_end_with_one_sentence(model_folder: Path, flags: tuple[str, ...]) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "nybble.service",
        "serve",
        str(model_folder),
        "--port",
        "0",
        *flags,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (1, 2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("nybble: --") and flags[0] in line


# --- what is never said ---


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_no_answer_shows_a_path_or_a_traceback(
    codec: TextCodec, monkeypatch, path: str, caplog
) -> None:
    async with local_app(codec) as local:

        def fails(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"secret in {__file__}")

        monkeypatch.setattr(TextCodec, "encode", fails)
        answer = await local.http.post(path, json={"prompt": "Hello"})
        assert answer.status_code == 500
        text = json.dumps(dict(answer.headers)) + answer.text
        assert "secret" not in text and "/" not in answer.json()["error"]["message"]
        assert "Traceback" not in text
        # The operator, though, can find it by the id in the answer.
        (record,) = [record for record in caplog.records if record.exc_info]
        assert answer.headers[REQUEST_ID] in record.getMessage()
