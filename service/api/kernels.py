"""GET /v1/kernels: which kernel each kind of layer uses, and why."""

from __future__ import annotations

import dataclasses

from fastapi import Request
from starlette.responses import Response

from nybble.service.api.answers import respond_json
from nybble.service.api.state import service_of
from nybble.service.client import EngineClient


async def list_kernels(request: Request) -> Response:
    """Per kind of linear layer: shape, kernel, the reason, why others declined, and the path for each range of M."""
    client = service_of(request).client
    info = client.require_info()
    return respond_json(
        {
            "object": "list",
            "target": info.target,
            "device": info.device,
            "selfcheck": info.selfcheck,
            "data": [
                dataclasses.asdict(kernel) | {"last_sampled": _last_sampled(client, kernel.layer)}
                for kernel in info.kernels
            ],
        }
    )


def _last_sampled(client: EngineClient, layer: str) -> dict[str, dict[str, float]]:
    """Path -> the latest sampled call of this kind of layer: its seconds and its M."""
    latest = client.gemm_latest
    return {path: {"seconds": s, "m": m} for (kind, path), (s, m) in latest.items() if kind == layer}
