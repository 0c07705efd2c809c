"""GET /livez, /readyz, /health, /version, /metrics."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from nybble.service.api.answers import respond_json
from nybble.service.api.errors import error_object, respond
from nybble.service.api.state import Service, service_of
from nybble.service.errors import Unavailable


async def livez() -> Response:
    """The API process is up."""
    return respond_json({"status": "ok"})


async def readyz(request: Request) -> Response:
    """Whether requests can be served now; until then the state and how far loading is."""
    service = service_of(request)
    state = _state(service)
    try:
        service.client.require_info()
    except Unavailable as error:
        body = error_object(error.message, error.type, None, error.code) | state
        return respond(error.status, body, {"Retry-After": str(error.retry_after_s)})
    return respond_json(state)


def _state(service: Service) -> dict[str, Any]:
    client = service.client
    state: dict[str, Any] = {"status": str(client.state)}
    loading = client.loading
    if loading is not None and client.info is None:
        state["loading"] = {
            "stage": loading.stage,
            "done_bytes": loading.done_bytes,
            "total_bytes": loading.total_bytes,
        }
    return state


async def version(request: Request) -> Response:
    """Nybble's version, and what the engine runs on once it is ready."""
    service = service_of(request)
    info = service.client.info
    engine = {} if info is None else {"device": info.device, "target": info.target, "dtype": info.dtype}
    return respond_json({"version": service.version} | engine)


async def metrics(request: Request) -> Response:
    """Prometheus metrics as text."""
    return Response(service_of(request).metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})
