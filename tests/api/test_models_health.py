"""GET routes: models, kernels, health, version, metrics, OpenAPI."""

from __future__ import annotations

import httpx
import pytest
from fake_engine import MAX_MODEL_LEN
from http_fixtures import local_app, parse_metrics

from nybble.service.app import ROUTES
from nybble.service.engine.protocol import Loading
from nybble.service.text import TextCodec


def test_models(http: httpx.Client, model_folder) -> None:
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", MAX_MODEL_LEN)
    assert http.get("/v1/models/tiny").json() == model
    assert http.get(f"/v1/models/{model_folder}").json() == model


@pytest.mark.anyio
async def test_a_served_model_name(codec: TextCodec) -> None:
    async with local_app(codec, served_model_name="org/other") as local:
        assert (await local.http.get("/v1/models/org/other")).json()["id"] == "org/other"
        assert (await local.http.get("/v1/models/tiny")).status_code == 200
        answer = await local.http.post("/v1/completions", json={"prompt": "x", "model": "org/other"})
        assert answer.json()["model"] == "org/other"


def test_kernels(http: httpx.Client) -> None:
    answer = http.get("/v1/kernels").json()
    assert answer["selfcheck"] == {"cpu": True, "general": True}
    assert answer["data"][0]["layer"] == "qkv" and answer["data"][0]["routes"][0]["path"] == "cpu"


def test_health_of_a_ready_server(http: httpx.Client) -> None:
    assert http.get("/livez").json() == {"status": "ok"}
    for path in ("/readyz", "/health"):
        assert http.get(path).json() == {"status": "ready"}
    version = http.get("/version").json()
    assert version["device"] == "cpu" and version["version"]


@pytest.mark.anyio
async def test_readiness_shows_how_far_loading_is(codec: TextCodec) -> None:
    async with local_app(codec, ready=False) as local:
        local.client.loading = None
        assert (await local.http.get("/readyz")).json()["status"] == "loading"
        local.client.send(Loading("weights", 5, 10))
        answer = (await local.http.get("/health")).json()
        assert answer["loading"] == {"stage": "weights", "done_bytes": 5, "total_bytes": 10}
        assert (await local.http.get("/v1/models")).json()["data"][0]["max_model_len"] is None
        local.client.become_ready()
        assert (await local.http.get("/readyz")).status_code == 200


def test_metrics_are_plain_text(http: httpx.Client) -> None:
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    metrics = parse_metrics(response.text)
    assert metrics['nybble_memory_bytes{pool="weights"}'] == 1_000_000
    assert metrics['nybble_kernel_selfcheck{path="cpu"}'] == 1
    assert metrics['nybble_dense_cache_state{state="enabled"}'] == 1
    assert metrics["nybble_host_available_bytes"] > 2**20


def test_unknown_paths_share_one_series(http: httpx.Client) -> None:
    for i in range(3):
        http.get(f"/scan/{i}")
    text = http.get("/metrics").text
    assert "/scan" not in text
    assert parse_metrics(text)['nybble_http_requests_total{route="other",status="404"}'] >= 3


def test_the_openapi_document_names_every_route(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert set(document["paths"]) == {path.replace(":path", "") for _, path, _ in ROUTES}
    chat = document["components"]["schemas"]["ChatCompletionRequest"]
    assert chat["additionalProperties"] is False
    assert chat["properties"]["tools"]["enum"] == [None, []]


@pytest.mark.parametrize(
    "path",
    [path.replace("{model_id:path}", "tiny") for method, path, _ in ROUTES if method == "GET"]
    + ["/openapi.json"],
)
def test_head_is_get_without_a_body(http: httpx.Client, path: str) -> None:
    head, get = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
