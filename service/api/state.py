"""What the routes work with: one Service per app, at app.state.service."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from starlette.requests import Request

from nybble.service.client import EngineClient
from nybble.service.errors import ModelNotFound
from nybble.service.metrics import Metrics
from nybble.service.settings import Settings
from nybble.service.text import TextCodec


def nybble_version() -> str:
    try:
        return version("nybble")
    except PackageNotFoundError:
        return "0+unknown"


@dataclass(frozen=True)
class Service:
    settings: Settings
    client: EngineClient
    codec: TextCodec
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    version: str = field(default_factory=nybble_version)

    @property
    def model_name(self) -> str:
        return self.settings.api_model_name()

    @property
    def fingerprint(self) -> str:
        return f"nybble-{self.version}"

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound unless the name, None for any, is the served one or MODEL as it was given."""
        if name is not None and name not in (self.model_name, self.settings.model):
            raise ModelNotFound(
                f"the model {name[:100]!r} does not exist here; this server serves {self.model_name!r}",
                param="model",
            )


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service
