"""Every error as OpenAI's object: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from nybble.service.errors import (
    BodyTimeout,
    BodyTooLarge,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NybbleError,
    QueueFull,
    Unauthorized,
    Unavailable,
)

logger = logging.getLogger(__name__)

MAX_ECHO_CHARS = 100
# Errors counted as nybble_rejected_total{reason}.
REJECTIONS: dict[type[NybbleError], str] = {
    BodyTimeout: "body_timeout",
    BodyTooLarge: "body_too_large",
    DeadlineExceeded: "deadline",
    InvalidRequest: "invalid",
    ModelNotFound: "model_not_found",
    QueueFull: "queue_full",
    Unauthorized: "unauthorized",
    Unavailable: "unavailable",
}
_HTTP_CODES = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}


def error_object(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_of(error: NybbleError) -> dict[str, Any]:
    return error_object(error.message, error.type, error.param, error.code)


def internal_error() -> NybbleError:
    """What a client is told of a fault of ours."""
    return NybbleError("an internal error; the server's log has it")


def respond(status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(body), status, headers, media_type="application/json")


def respond_to(error: NybbleError) -> Response:
    retry_after_s = getattr(error, "retry_after_s", None)
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return respond(error.status, error_of(error), headers)


def install(app: FastAPI) -> None:
    """Registers the handlers that turn every exception into an error object."""
    app.add_exception_handler(NybbleError, _on_nybble_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)


async def _on_nybble_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, NybbleError)
    reason = REJECTIONS.get(type(error))
    if reason is not None:
        request.app.state.service.metrics.rejected(reason)
    request.state.error = error.code
    return respond_to(error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    request.app.state.service.metrics.rejected(REJECTIONS[InvalidRequest])
    body = _explain(error.errors()[0])
    request.state.error = body["error"]["code"]
    return respond(400, body)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, NybbleError):  # raised while the body was parsed
        return await _on_nybble_error(request, error.__cause__)
    status = error.status_code
    message = {
        # The only one that FastAPI raises: a body that json.loads trips over, other than by its syntax.
        400: "the body is not valid JSON: it is not UTF-8, nested too deep, or has a number of too many digits",
        404: f"{request.method} {_short(request.url.path)}: there is no such route",
        405: f"{request.method} is not allowed on {_short(request.url.path)}",
    }.get(status, str(error.detail))
    kind = "invalid_request_error" if status < 500 else "server_error"
    return respond(
        status, error_object(message, kind, None, _HTTP_CODES.get(status, "invalid_value")), error.headers
    )


def _explain(problem: Mapping[str, Any]) -> dict[str, Any]:
    """The first problem that pydantic found, as an error object."""
    location = [str(part) for part in problem["loc"] if part != "body"]
    param = _param(problem["loc"])
    kind, code = problem["type"], "invalid_value"
    if kind == "json_invalid":
        detail = problem.get("ctx", {}).get("error", "").removesuffix(" at")
        return error_object(
            f"the body is not valid JSON: {detail} at character {location[0]}",
            "invalid_request_error",
            None,
            "invalid_json",
        )
    if param is None:
        message = "the body must be a JSON object with Content-Type: application/json"
    elif kind == "missing":
        message, code = f"{param!r} is missing", "missing_parameter"
    elif kind == "extra_forbidden":
        message, code = f"unknown parameter {_short(param)!r}", "unknown_parameter"
    elif kind == "unsupported_parameter":
        message, code = f"{param!r}: {problem['msg']}", kind
    else:
        message = f"{param!r}: {_sentence(problem)}"
    return error_object(
        message[:600], "invalid_request_error", None if param is None else _short(param), code
    )


def _param(location: tuple[Any, ...]) -> str | None:
    """("body", "messages", 0, "role") -> messages[0].role"""
    name = ""
    for part in location[1:]:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else str(part)
    return name if len(location) > 1 else None


def _sentence(problem: Mapping[str, Any]) -> str:
    message = str(problem["msg"]).removeprefix("Input should ").removeprefix("Value error, ")
    if message == problem["msg"]:
        return message[:400]
    return f"should {message[:400]}, not {_short(_echo(problem.get('input')))}"


def _echo(value: Any) -> str:
    """The given value in a few characters: containers by their kind only, since they may be huge."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, str):
        return json.dumps(value[: MAX_ECHO_CHARS + 1])
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else _number(value)


def _number(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # an int of more digits than Python prints
        return "a number of many digits"


def _short(text: str) -> str:
    return text if len(text) <= MAX_ECHO_CHARS else text[:MAX_ECHO_CHARS] + "..."
