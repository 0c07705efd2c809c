"""The kernels that read logits against their references on a small problem, once a device and type.

Where one is wrong or does not run, torch's own ops do its work.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)

_VOCAB, _COUNT = 5001, 32
# Of the largest logit.
_TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 2e-2, torch.float32: 1e-4}


@functools.cache
def best_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong with fused/argmax.py here, or None. The first call waits for the device and logs a problem."""
    return _found("best of rows", _best, device, dtype)


@functools.cache
def rescore_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """The same of fused/rescore.py."""
    return _found("rescored head", _rescore, device, dtype)


def _found(
    name: str,
    check: Callable[[torch.device, torch.Tensor], str | None],
    device: torch.device,
    dtype: torch.dtype,
) -> str | None:
    gen = torch.Generator().manual_seed(0)
    logits = (16 * torch.randn(3, _VOCAB, generator=gen)).round().to(dtype)  # many equals
    logits[2, -1] = float("nan")
    try:
        problem = check(device, logits)
    except Exception as error:  # kernels that cannot run are left out like ones that are wrong
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        log.error("self-check on %s: %s, %s; torch's ops are used instead", device, name, problem)
    return problem


def _best(device: torch.device, logits: torch.Tensor) -> str | None:
    from nybble.kernels.fused.argmax import best_rows, best_rows_reference

    found, want = best_rows(logits.to(device)).cpu(), best_rows_reference(logits)
    if torch.equal(found[1], want[1]) and torch.equal(found[0, :2], want[0, :2]):
        return None
    return f"given {found.tolist()}, expected {want.tolist()}"


def _rescore(device: torch.device, logits: torch.Tensor) -> str | None:
    from nybble.kernels.fused.rescore import are_largest, largest, rescore, rescore_reference

    gen = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(n, 96, generator=gen).to(logits.dtype) for n in (_VOCAB, 3))
    on = logits.to(device)
    best = largest(on, _COUNT)
    if not are_largest(logits, best.cpu()):
        return f"indices that are not those of the {_COUNT} largest"
    rescore(on, best, weight.to(device), x.to(device))
    exact = rescore_reference(logits, best.cpu(), weight, x)[:, :-1]
    error = float((on[:, :-1].cpu().to(torch.float32) - exact).abs().max() / exact.abs().max())
    if not error <= _TOLERANCE[logits.dtype]:  # NaN too
        return f"relative error {error:.3g}, accepted {_TOLERANCE[logits.dtype]:g}"
    return None
