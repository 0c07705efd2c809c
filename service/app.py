"""The HTTP application: every route in one table, middleware, error handlers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from nybble.service.api import chat, completions, errors, health, kernels, models, openapi, tokens
from nybble.service.api.auth import OPEN_ROUTES, RequireKey
from nybble.service.api.cors import Cors
from nybble.service.api.middleware import (
    CLIENT_CLOSED,
    REQUEST_ID,
    BodyLimit,
    BodyReads,
    Faults,
    Heads,
    RequestContext,
)
from nybble.service.api.sse import ClientGone
from nybble.service.api.state import Service, nybble_version
from nybble.service.api.strict_json import StrictRoute
from nybble.service.client import EngineClient
from nybble.service.errors import ConfigError
from nybble.service.memory import read_gpu_memory, read_host_available
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


def build_app(settings: Settings, client: EngineClient, codec: TextCodec) -> FastAPI:
    """The application over an engine client; the caller starts and stops the client."""
    metrics = Metrics(
        settings.api_model_name(),
        lambda: _snapshot(client),
        settings.metrics_aliases,
        errors.REJECTIONS.values(),
    )
    client.observer = metrics
    reads = BodyReads(settings.body_timeout_s)
    client.on_drain = reads.drain
    app = FastAPI(
        title="Nybble",
        version=nybble_version(),
        docs_url=None,
        redoc_url=None,
        strict_content_type=False,
        redirect_slashes=False,
        middleware=_middleware(settings, metrics, reads),
    )
    app.router.route_class = StrictRoute
    app.state.service = Service(settings, client, codec, metrics)
    openapi.add_routes(app, ROUTES, settings.api_model_name())
    errors.install(app)
    app.add_exception_handler(ClientGone, _on_client_gone)
    return app


def _middleware(settings: Settings, metrics: Metrics, reads: BodyReads) -> list[Middleware]:
    """From the outside in. A preflight has no key, and an answer to a browser is readable whatever its status: CORS
    stands around both."""
    layers = [Middleware(RequestContext, count=metrics.http)]
    if settings.origins:
        layers.append(
            Middleware(
                Cors,
                allow_origins=settings.origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=[REQUEST_ID, "Retry-After"],
            )
        )
    layers.append(Middleware(Faults))
    digests = settings.key_digests()
    if digests:
        open_paths = OPEN_ROUTES | ({"/metrics"} if settings.metrics_without_key else set())
        layers.append(
            Middleware(RequireKey, digests=digests, open_paths=open_paths, on_reject=metrics.rejected)
        )
    layers.append(
        Middleware(BodyLimit, limit_bytes=settings.body_limit_bytes, reads=reads, on_reject=metrics.rejected)
    )
    layers.append(Middleware(Heads))
    return layers


def _snapshot(client: EngineClient) -> Snapshot:
    try:
        available_bytes = read_host_available()
    except ConfigError:
        available_bytes = None  # the engine's plan refuses such a host in its own words
    info = client.info
    gpu = read_gpu_memory("" if info is None else info.pci_address)
    return Snapshot(client.totals(), info, client.restarts, available_bytes, gpu, client.gemm_latest)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this; the status is for the log and the count."""
    return Response(status_code=CLIENT_CLOSED)
