"""Request bodies as JSON in which no object has a key twice: which of the two was meant, nobody can tell."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from nybble.service.errors import InvalidRequest


class StrictRoute(APIRoute):
    """Parses bodies with `load`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


class _StrictRequest(Request):
    async def json(self) -> Any:
        return load(await self.body())


def load(body: bytes) -> Any:
    """Raises InvalidRequest for a key that an object has more than once, or that is no text."""
    return json.loads(body, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    for key in made:
        if not key.isascii() and (shown := _shown(key)) != key[:100]:
            raise InvalidRequest(
                f"unknown parameter {shown!r}, whose name has a lone surrogate, which is not a character",
                param=shown,
                code="unknown_parameter",
            )
    if len(made) < len(pairs):
        (key, count), *_ = Counter(key for key, _ in pairs).most_common(1)
        shown = _shown(key)
        raise InvalidRequest(
            f"an object in the body has the key {shown!r} {count} times; send it once", param=shown
        )
    return made


def _shown(key: str) -> str:
    return key.encode(errors="replace").decode()[:100]
