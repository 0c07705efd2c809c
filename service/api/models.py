"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.responses import Response

from nybble.service.api.answers import respond_json
from nybble.service.api.state import Service, service_of


async def list_models(request: Request) -> Response:
    """The one model that is served."""
    return respond_json({"object": "list", "data": [_model(service_of(request))]})


async def get_model(request: Request, model_id: str) -> Response:
    """The model, by its name or by the path it was given as."""
    service = service_of(request)
    # A path that starts with a slash comes without it.
    service.check_model(service.settings.model if "/" + model_id == service.settings.model else model_id)
    return respond_json(_model(service))


def _model(service: Service) -> dict[str, Any]:
    """max_model_len is null until the engine is ready."""
    info = service.client.info
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "nybble",
        "max_model_len": None if info is None else info.max_model_len,
    }
