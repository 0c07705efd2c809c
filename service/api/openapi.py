"""The OpenAPI document: what every route takes and can answer, and nothing that it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI

Routes = Sequence[tuple[str, str, Callable[..., Any]]]

_ERROR_SCHEMA = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
        }
    },
    "required": ["error"],
}
_REFUSED = {
    400: "A parameter is invalid, unknown or not supported; `param` names it.",
    401: "No API key, or a wrong one.",
    404: "There is no such model.",
    408: "The request's time limit, or the server's, has passed, or the body took too long to arrive.",
    413: "The body is larger than the server reads.",
    429: "Too many requests in progress.",
    500: "A fault of the server's, or the engine ended the request.",
    503: "Loading, draining, or the engine is down.",
}
# Answers other than 200, by what a route does.
_ANYWHERE = (401, 500)
_WITH_BODY = (400, 404, 408, 413, 503)
_GENERATING = (429,)
_BY_PATH = {
    "/v1/completions": _WITH_BODY + _GENERATING,
    "/v1/chat/completions": _WITH_BODY + _GENERATING,
    "/tokenize": _WITH_BODY,
    "/detokenize": _WITH_BODY,
    "/v1/models/{model_id:path}": (404,),
    "/v1/kernels": (503,),
    "/readyz": (503,),
    "/health": (503,),
}
_STREAMING = ("/v1/completions", "/v1/chat/completions")


def add_routes(app: FastAPI, routes: Routes, model_name: str) -> None:
    """Adds the routes, and the document of them to the app; it names the one model."""
    for method, path, endpoint in routes:
        app.add_api_route(
            path,
            endpoint,
            methods=[method],
            response_model=None,
            responses=_responses(path),
            operation_id=endpoint.__name__ if path != "/health" else "health",
        )
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        for operations in document["paths"].values():
            for operation in operations.values():
                for parameter in operation.get("parameters", ()):
                    if parameter["name"] == "model_id":
                        parameter["schema"] = {"enum": [model_name]}
                # FastAPI documents its own form of validation errors, which errors.py replaces.
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        for schema in document["components"]["schemas"].values():
            if "model" in schema.get("properties", {}):
                schema["properties"]["model"] = {
                    "enum": [model_name, None],
                    "description": "May be left out.",
                }
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _responses(path: str) -> dict[int | str, dict[str, Any]]:
    error = {"application/json": {"schema": _ERROR_SCHEMA}}
    readiness = {"application/json": {"schema": {"type": "object", "required": ["error", "status"]}}}
    found: dict[int | str, dict[str, Any]] = {200: {"description": "The answer.", "content": _answer(path)}}
    for status in (*_ANYWHERE, *_BY_PATH.get(path, ())):
        content = readiness if status == 503 and path in ("/readyz", "/health") else error
        found[status] = {"description": _REFUSED[status], "content": content}
        if status in (429, 503):
            found[status]["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}}}
    return found


def _answer(path: str) -> dict[str, Any]:
    if path == "/metrics":
        return {"text/plain": {"schema": {"type": "string"}}}
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path in _STREAMING:
        # Events whose data are chunks as JSON, and [DONE]; OpenAPI 3.1 cannot describe a sequence.
        content["text/event-stream"] = {}
    return content
