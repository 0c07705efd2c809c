"""API keys: only their digests are kept."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from nybble.service.api.errors import REJECTIONS
from nybble.service.api.middleware import refuse
from nybble.service.errors import Unauthorized
from nybble.service.settings import digest

# Open to whoever asks: a supervisor has no key, and the answer says nothing of anybody.
OPEN_ROUTES = frozenset(("/livez",))


class RequireKey:
    """Answers 401 unless the request brings one of the keys, as `Authorization: Bearer KEY`; open_paths need none."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        digests: Collection[bytes],
        open_paths: Collection[str],
        on_reject: Callable[[str], None],
    ) -> None:
        self._app = app
        self._digests = tuple(digests)
        self._open = frozenset(open_paths)
        self._on_reject = on_reject

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        self._on_reject(REJECTIONS[Unauthorized])
        await refuse(self._refusal(scope), scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = digest(key.strip())
        # All are compared, and each in constant time: how long it takes tells nothing of them.
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return any(matches) and kind.lower() == "bearer"

    @staticmethod
    def _refusal(scope: Scope) -> Unauthorized:
        if "authorization" in Headers(scope=scope):
            return Unauthorized(
                "the API key is not one of this server's; send a valid one as Authorization: Bearer KEY"
            )
        return Unauthorized("no API key: send one as Authorization: Bearer KEY", code="missing_api_key")
