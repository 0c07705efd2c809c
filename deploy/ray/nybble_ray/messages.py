"""What the gateway and the replicas say to each other. Pickled by Ray, so that both sides need the same Nybble."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.types import Message


@dataclass(frozen=True)
class Call:
    """One HTTP request, whole."""

    # ASGI's, as far as it can be pickled.
    scope: dict[str, Any]
    body: bytes
    # The beginning of the text it asks about; Ray's prefix router looks for this name. Empty: no such request.
    prompt: str = ""
    # Replicas that have failed this request.
    avoid: frozenset[str] = frozenset()
    # The only replica that may answer; empty: any.
    only: str = ""


@dataclass(frozen=True)
class Part:
    """Some ASGI messages of an answer. The first part has the status line, and the whole answer unless it is a stream."""

    replica: str
    messages: list[Message]

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])
