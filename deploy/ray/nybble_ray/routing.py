"""Which replica gets a call: the one that has seen a prompt which begins alike, as Ray's own router knows it.

ray.serve.llm offers that router, but importing it needs the packages that vLLM brings; its module alone does not.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from typing import Any

from ray.exceptions import RayError
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from nybble_ray import known
from nybble_ray.messages import Call

logger = logging.getLogger(__name__)


class ReplicaRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Adds to Ray's router what a call says of replicas, and outlives the actor that keeps the prefixes: without it, calls
    go to the less busy of two."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        with _prefixes():
            super().update_replicas(replicas)
        known.replicas.clear()
        known.replicas.update({one.replica_id.unique_id: one.node_id for one in replicas})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        known.replicas.pop(replica_id.unique_id, None)
        with _prefixes():
            super().on_replica_actor_died(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        call = _call_of(pending_request)
        if call is None or pending_request is None:
            return [_two_of(candidate_replicas)]
        # Else Ray asks again at once, without a pause, when nobody has room.
        pending_request.routing_context.should_backoff = True
        fit = [one for one in candidate_replicas if _fits(one, call)] or candidate_replicas
        alike: list[RunningReplica] = []
        if call.prompt and not call.only:
            with _prefixes():
                ranks = await super().choose_replicas(candidate_replicas, pending_request)
                alike = [one for rank in ranks for one in rank if one in fit]
        return [alike, _two_of(fit)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        call = _call_of(pending_request)
        if call is not None and call.prompt:
            with _prefixes():
                super().on_request_routed(pending_request, replica_id, result)


@contextlib.contextmanager
def _prefixes() -> Iterator[None]:
    """Around what asks for prefixes. Whatever happens there, the call is routed: Ray would let it wait for ever."""
    try:
        yield
    except (RayError, LookupError):
        logger.warning("no routing by prefix", exc_info=True)


def _call_of(pending_request: PendingRequest | None) -> Call | None:
    args = pending_request.args if pending_request is not None else ()
    return args[0] if args and isinstance(args[0], Call) else None


def _fits(replica: RunningReplica, call: Call) -> bool:
    name = replica.replica_id.unique_id
    return name == call.only if call.only else name not in call.avoid


def _two_of(candidates: list[RunningReplica]) -> list[RunningReplica]:
    return random.sample(candidates, min(2, len(candidates)))
