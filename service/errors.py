"""Errors that mean something to a caller, each with its HTTP status.

Raised anywhere; only service/api turns them into responses. A message says what was given, what is accepted and
what to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class NybbleError(Exception):
    """Base of all errors that are meant to be shown. status and type follow OpenAI's error object."""

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(NybbleError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ModelNotFound(NybbleError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class BodyTooLarge(NybbleError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class BodyTimeout(NybbleError):
    status = 408
    type = "timeout_error"
    code = "body_timeout"


class QueueFull(NybbleError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(NybbleError):
    """Loading, draining, or the engine is down."""

    status = 503
    type = "service_unavailable_error"
    code = "unavailable"

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: int = 5) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(NybbleError):
    """A request was not finished in the time that it, or the server, allows. Not a 5xx: a proxy that tries those again
    elsewhere would only double the load."""

    status = 408
    type = "timeout_error"
    code = "deadline_exceeded"


class Unauthorized(NybbleError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class GenerationFailed(NybbleError):
    """The engine ended this request with an error."""

    code = "generation_failed"


class CheckpointError(NybbleError):
    """A model folder that cannot be served as it is: names the file, module or field, the value, and the remedy."""

    status = 500
    type = "invalid_request_error"
    code = "bad_checkpoint"


class ConfigError(NybbleError):
    """Settings or a model configuration that cannot be honoured."""

    status = 500
    type = "invalid_request_error"
    code = "bad_config"


@contextmanager
def well_formed(where: str) -> Iterator[None]:
    """For code that reads a file of somebody else's by its rules: a value of another kind becomes a CheckpointError."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"{where}: a value is not of the kind it should be ({type(error).__name__}: {error!s:.200}); fetch the file "
            "again, or take another copy of this model"
        ) from error
