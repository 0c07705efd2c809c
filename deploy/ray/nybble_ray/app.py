"""The deployments: `serve run serve.yaml`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message

from nybble.service import server
from nybble.service.api.middleware import REQUEST_ID
from nybble.service.api.sse import EventStream
from nybble.service.app import build_app
from nybble.service.cli import find_model
from nybble.service.client import ENGINE_MAIN, EngineState
from nybble.service.logs import configure_logging
from nybble.service.settings import load_settings
from nybble.service.text import TextCodec
from nybble_ray import known
from nybble_ray.gateway import build_gateway
from nybble_ray.messages import Call, Part

# Beyond --max-queue, so that it is the service that says 429; scrapes and probes go in, too.
SPARE_CALLS = 64
# How much longer than --shutdown-timeout-s Ray waits for a replica that it stops: the slowest end of a stuck engine.
STOP_S = 20.0
# How much busier than the idlest a replica may be and still get what begins like its prompts.
IMBALANCE = 2
# How long the service may take to notice that a client has left before its work is cancelled.
GONE_S = 1.0
EVENT_STREAM = EventStream.media_type


class Arguments(BaseModel):
    """`args` in serve.yaml."""

    model_config = ConfigDict(extra="forbid")

    # As `nybble serve` has them: model, max_queue, ... What is not here comes from each host's NYBBLE_* variables.
    settings: dict[str, Any]
    engine_main: str = ENGINE_MAIN


def build(fields: dict[str, Any]) -> serve.Application:
    """The application; `deployments` in serve.yaml says how many of each, and what a replica takes of a host.

    fields: of Arguments. Raises ValueError or ConfigError for what is not accepted.
    """
    args = Arguments.model_validate(fields)
    settings = load_settings(args.settings)
    stop_s = settings.shutdown_timeout_s + STOP_S
    replica = Replica.options(
        max_ongoing_requests=settings.max_queue + SPARE_CALLS, graceful_shutdown_timeout_s=stop_s
    )
    gateway = Gateway.options(graceful_shutdown_timeout_s=stop_s)
    return gateway.bind(args.settings, replica.bind(args.settings, args.engine_main))


@serve.deployment(
    ray_actor_options={"num_cpus": 1, "resources": {"nybble_gpu": 1}},
    health_check_period_s=5,
    graceful_shutdown_wait_loop_s=0.5,
    request_router_config=RequestRouterConfig(
        request_router_class="nybble_ray.routing:ReplicaRouter",
        request_router_kwargs={"imbalanced_threshold": IMBALANCE, "do_eviction": True},
    ),
)
class Replica:
    """The service as it is, without its HTTP server: Ray brings the requests. There once the model is loaded."""

    async def __init__(self, settings: dict[str, Any], engine_main: str) -> None:
        server.bar_torch()
        self._name = serve.get_replica_context().replica_id.unique_id
        parsed = load_settings(settings)
        configure_logging(parsed.log_config())
        folder = await asyncio.to_thread(find_model, parsed.model)
        on_loading = server.LoadingProgress(bar=False).show
        self._client = server.engine_client(parsed, folder, engine_main, on_loading=on_loading)
        await self._client.start()
        self._app: ASGIApp = build_app(parsed, self._client, await asyncio.to_thread(TextCodec.load, folder))
        await self._client.wait_ready()
        self.check_health()

    def check_health(self) -> None:
        """An engine that died is started again by the service; calls go elsewhere meanwhile. Raises when that is no use."""
        if self._client.state in (EngineState.FAILED, EngineState.STOPPED):
            raise RuntimeError(f"the engine cannot go on: {self._client.failure}")

    async def name(self) -> str:
        return self._name

    async def answer(self, call: Call) -> AsyncGenerator[Part, None]:
        """Closed, or cancelled, when the client leaves."""
        exchange = Exchange(call)
        working = asyncio.ensure_future(exchange.run(self._app))
        try:
            async for messages in exchange.batches():
                yield Part(self._name, messages)
            await working
        finally:
            exchange.gone.set()
            await asyncio.wait((working,), timeout=GONE_S)
            working.cancel()

    async def __del__(self) -> None:
        """Called once the last answer has ended, or its time was up."""
        if hasattr(self, "_client"):
            await self._client.stop(server.ENGINE_EXIT_S)


@serve.deployment(max_ongoing_requests=4096, health_check_period_s=5, graceful_shutdown_wait_loop_s=0.5)
@serve.ingress()
class Gateway:
    """What Ray's HTTP proxies talk to. There once a replica is."""

    async def __init__(self, settings: dict[str, Any], replicas: DeploymentHandle) -> None:
        self._settings = load_settings(settings)
        configure_logging(self._settings.log_config())
        self._replicas = replicas.options(stream=True)
        # Before the first call a handle knows of no replica.
        await replicas.name.remote()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return build_gateway(self._settings, self._ask, lambda: known.replicas, (RayActorError,))

    async def _ask(self, call: Call) -> AsyncGenerator[Part, None]:
        parts = self._replicas.answer.remote(call)
        try:
            async for part in parts:
                yield part
        finally:
            parts.cancel()


class Exchange:
    """One request and its answer, between an ASGI application and whoever reads batches of its messages."""

    def __init__(self, call: Call) -> None:
        self.gone = asyncio.Event()
        self._scope = call.scope
        self._body: list[bytes] = [call.body]
        self._sent: asyncio.Queue[Message | None] = asyncio.Queue()

    async def run(self, app: ASGIApp) -> None:
        try:
            await app({**self._scope, "state": {}}, self._receive, self._sent.put)
        finally:
            self._sent.put_nowait(None)

    async def batches(self) -> AsyncGenerator[list[Message], None]:
        """All that is there, at least one. The first has some of the body; all of it, if it is no stream of events."""
        held: list[Message] = []
        streams = False
        while (message := await self._sent.get()) is not None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                streams = headers.get("content-type", "").startswith(EVENT_STREAM)
                # Ray's proxy says it, too.
                del headers[REQUEST_ID]
            held.append(message)
            if streams and message["type"] == "http.response.body" and self._sent.empty():
                yield held
                held = []
        if held:
            yield held

    async def _receive(self) -> Message:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}
