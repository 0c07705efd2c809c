"""The HTTP application: every route in one table, middleware, error handlers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from nybble.service.api import chat, completions, errors, health, kernels, models, tokens
from nybble.service.api.middleware import CLIENT_CLOSED, AccessLog, BodyLimit
from nybble.service.api.sse import ClientGone
from nybble.service.api.state import Service, nybble_version
from nybble.service.client import EngineClient
from nybble.service.errors import ConfigError
from nybble.service.memory import read_host_available
from nybble.service.metrics import Metrics, Snapshot
from nybble.service.settings import Settings
from nybble.service.text import TextCodec

ROUTES: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("POST", "/v1/completions", completions.create_completion),
    ("POST", "/v1/chat/completions", chat.create_chat_completion),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("GET", "/tokenizer_info", tokens.tokenizer_info),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/v1/models/{model_id:path}", models.get_model),
    ("GET", "/v1/kernels", kernels.list_kernels),
    ("GET", "/livez", health.livez),
    ("GET", "/readyz", health.readyz),
    ("GET", "/health", health.readyz),
    ("GET", "/version", health.version),
    ("GET", "/metrics", health.metrics),
)

_ERROR = {"description": "An error object: {error: {message, type, param, code}}."}
_STATUSES: dict[int | str, dict[str, Any]] = {status: _ERROR for status in (400, 404, 413, 429, 500, 503)}


def build_app(settings: Settings, client: EngineClient, codec: TextCodec) -> FastAPI:
    """The application over an engine client; the caller starts and stops the client."""
    metrics = Metrics(settings.api_model_name(), lambda: _snapshot(client))
    client.observer = metrics
    app = FastAPI(
        title="Nybble",
        version=nybble_version(),
        docs_url=None,
        redoc_url=None,
        strict_content_type=False,
    )
    app.state.service = Service(settings, client, codec, metrics)
    for method, path, endpoint in ROUTES:
        app.add_api_route(path, endpoint, methods=[method], response_model=None, responses=_STATUSES)
    errors.install(app)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_middleware(BodyLimit, limit_bytes=settings.body_limit_bytes, on_reject=metrics.rejected)
    app.add_middleware(AccessLog, count=metrics.http)
    return app


def _snapshot(client: EngineClient) -> Snapshot:
    try:
        available_bytes = read_host_available()
    except ConfigError:
        available_bytes = None  # the engine's plan refuses such a host in its own words
    return Snapshot(client.totals(), client.info, client.restarts, available_bytes)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this; the status is for the log and the count."""
    return Response(status_code=CLIENT_CLOSED)
