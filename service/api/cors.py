"""Web pages of other origins."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from nybble.service.api.errors import respond_to
from nybble.service.errors import InvalidRequest


class Cors(CORSMiddleware):
    """Starlette's, except that a preflight which it refuses gets the error object that all errors have."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        refusal = respond_to(
            InvalidRequest("this origin, method or header is not allowed", code="cors_refused")
        )
        for name, value in response.headers.items():
            if name.startswith("access-control-") or name == "vary":
                refusal.headers[name] = value
        return refusal
