"""The paged back end and the fused kernels around it against their references on small problems, once at start.

They are one choice (the fused kernels write the cache that the paged kernels read), so they pass or fail together: on a
machine where one is wrong, attention and element work run in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# Relative to the reference's norm; a wrong key, row or half gives errors near 1.
_TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 2e-2}
_HEADS, _KV_HEADS, _BLOCK_SIZE = 4, 2, 16


def paged_problem(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """What is wrong with them here, or None."""
    checks = {"attention": _attention, "KV write": _write, "add and norm": _add_norm, "gate": _gate}
    for name, check in checks.items():
        try:
            worst = max(check(device, dtype, head_dim))
        except Exception as error:  # kernels that cannot run are left out like ones that are wrong
            return f"{name}: {type(error).__name__}: {error}"
        if not worst <= _TOLERANCE[dtype]:  # NaN too
            return f"{name}: relative error {worst:.3g}, accepted {_TOLERANCE[dtype]:g}"
    return None


def _error(y: torch.Tensor, reference: torch.Tensor) -> float:
    reference = reference.cpu().to(torch.float32)
    return float((y.cpu().to(torch.float32) - reference).norm() / reference.norm())


def _random(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=gen).to(dtype)


def _attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[float]:
    """Decode with its keys split and a prompt over a cached prefix, with and without a window."""
    from nybble.kernels.attention.triton_paged import launch_attention, paged_attention_reference

    random, found = _random(dtype), []
    for q_lens, kv_lens in (((1, 1), (75, 18)), ((20, 3), (50, 33))):
        cache = random(10, 2, _KV_HEADS, _BLOCK_SIZE, head_dim)
        table = torch.tensor([[7, 2, 9, 0, 4], [3, 8, 1, 0, 0]], dtype=torch.int32)
        q_start = torch.tensor([0, q_lens[0], sum(q_lens)], dtype=torch.int32)
        arguments = (
            random(sum(q_lens), _HEADS, head_dim),
            cache,
            table,
            q_start,
            torch.tensor(kv_lens, dtype=torch.int32),
        )
        for window in (0, 30):
            reference = paged_attention_reference(*arguments, window, head_dim**-0.5, 0.0)
            splits = 2 if max(q_lens) == 1 else 1
            on = [t.to(device) for t in arguments]
            y = launch_attention(
                on[0], on[1], on[2], on[3], on[4], max(q_lens), window, head_dim**-0.5, 0.0, splits=splits
            )
            found.append(_error(y, reference))
    return found


def _write(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[float]:
    from nybble.kernels.fused.kv_write import norm_rope_write, norm_rope_write_reference

    random, found = _random(dtype), []
    width = (_HEADS + 2 * _KV_HEADS) * head_dim
    angles = torch.randn(8, head_dim, generator=torch.Generator().manual_seed(1))
    positions, slots = (torch.tensor(v, dtype=torch.int32) for v in ((7, 0, 3), (17, -1, 30)))
    for x, bias, norm in (
        (random(1, 3, width), None, None),
        (random(2, 3, width).to(torch.float32), random(width), random(2, head_dim)),
    ):
        cache = random(2, 2, _KV_HEADS, _BLOCK_SIZE, head_dim)
        arguments = x, bias, norm, angles, positions, slots
        want_q, want_cache = norm_rope_write_reference(*arguments, cache, 1e-6)
        on = cache.to(device)
        q = norm_rope_write(*(None if t is None else t.to(device) for t in arguments), on, 1e-6)
        found += [_error(q, want_q), _error(on, want_cache)]
    return found


def _add_norm(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[float]:
    from nybble.kernels.fused.norm import add_rms_norm, add_rms_norm_reference

    random = _random(dtype)
    residual, x, bias, weight = random(3, 576), random(3, 3, 576).to(torch.float32), random(576), random(576)
    want, want_y = add_rms_norm_reference(residual, x, bias, weight, 1e-5, weight, 1e-6, 0.5)
    on, weight = residual.to(device), weight.to(device)
    y = add_rms_norm(on, x.to(device), bias.to(device), weight, 1e-5, weight, 1e-6, 0.5)
    return [_error(on, want), _error(y, want_y)]


def _gate(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[float]:
    from nybble.kernels.activation import GATED
    from nybble.kernels.fused.activation import gated, gated_reference

    x, bias = _random(dtype)(2, 3, 600).to(torch.float32), _random(dtype)(600)
    return [
        _error(gated(x.to(device), bias.to(device), True, dtype, name), gated_reference(x, bias, True, name))
        for name in GATED
    ]
