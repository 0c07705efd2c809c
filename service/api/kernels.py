"""GET /v1/kernels: which kernel each kind of layer uses, and why."""

from __future__ import annotations

import dataclasses

from fastapi import Request
from starlette.responses import Response

from nybble.service.api.answers import respond_json
from nybble.service.api.state import service_of


async def list_kernels(request: Request) -> Response:
    """Per kind of linear layer: shape, kernel, the reason, why others declined, and the path for each range of M."""
    info = service_of(request).client.require_info()
    return respond_json(
        {
            "object": "list",
            "target": info.target,
            "device": info.device,
            "selfcheck": info.selfcheck,
            "data": [dataclasses.asdict(kernel) for kernel in info.kernels],
        }
    )
