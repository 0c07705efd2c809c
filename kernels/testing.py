"""Comparison of a kernel's output with its float32 reference: one tolerance table for every test."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Accepted error relative to the reference's scale: `worst` over its largest magnitude, `rms` over its RMS."""

    worst: float
    rms: float


# Half a unit in the last place of the output type, with room for one rounding of each weight on the way
# (a path that dequantises into the activation type) and, for fp32, for the order of a long sum.
TOLERANCE = {
    torch.float16: Tolerance(worst=1.5e-3, rms=6e-4),
    torch.bfloat16: Tolerance(worst=8e-3, rms=4.5e-3),
    torch.float32: Tolerance(worst=2e-5, rms=1e-5),
}


@dataclass(frozen=True, slots=True)
class Errors:
    worst: float
    rms: float


def errors(actual: torch.Tensor, reference: torch.Tensor) -> Errors:
    """Worst and RMS error of `actual`, relative to the reference's largest magnitude and RMS; NaN counts as infinite."""
    want = reference.detach().double().cpu()
    diff = (actual.detach().double().cpu() - want).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    if diff.numel() == 0:
        return Errors(0.0, 0.0)
    tiny = torch.finfo(torch.float64).tiny
    peak, rms = want.abs().max().clamp_min(tiny), want.square().mean().sqrt().clamp_min(tiny)
    return Errors(float(diff.max() / peak), float(diff.square().mean().sqrt() / rms))


def assert_close(
    actual: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype | None = None, *, name: str = "result"
) -> None:
    """Compare `actual` with a reference of higher precision under `dtype`'s row of TOLERANCE (default: actual's type).

    Raises AssertionError naming both errors and the coordinates of the worst elements.
    """
    if actual.shape != reference.shape:
        raise AssertionError(f"{name}: shape {list(actual.shape)}, reference {list(reference.shape)}")
    dtype = dtype or actual.dtype
    limit, found = TOLERANCE[dtype], errors(actual, reference)
    if found.worst <= limit.worst and found.rms <= limit.rms:
        return
    raise AssertionError(
        f"{name} ({str(dtype).removeprefix('torch.')} {list(actual.shape)}): worst {found.worst:.3g} "
        f"(accepted {limit.worst:.3g}), rms {found.rms:.3g} (accepted {limit.rms:.3g})\n{_worst(actual, reference)}"
    )


def _worst(actual: torch.Tensor, reference: torch.Tensor, count: int = 8) -> str:
    got, want = actual.detach().double().cpu(), reference.detach().double().cpu()
    diff = (got - want).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).flatten()
    lines = []
    for flat in diff.topk(min(count, diff.numel())).indices.tolist():
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), actual.shape))
        lines.append(f"  {list(at)}: got {float(got[at]):.6g}, reference {float(want[at]):.6g}")
    return "\n".join(lines)
