"""The kernel table: per platform, in order of preference. The first row that can implement a layer gets it."""

from __future__ import annotations

from dataclasses import dataclass

from nybble.kernels.linear.config import LinearConfig, LinearKernel
from nybble.kernels.linear.cpu import CpuExact, CpuInt4
from nybble.kernels.linear.general import General
from nybble.kernels.linear.humming import Humming
from nybble.kernels.linear.hybrid import Hybrid, TritonKN
from nybble.kernels.linear.xpu import XpuW4A8
from nybble.kernels.linear.zen import ZenInt4
from nybble.kernels.target import Target

BACKENDS: dict[str, tuple[LinearKernel, ...]] = {
    "cpu": (CpuInt4(), ZenInt4(), CpuExact()),
    "rocm": (Hybrid(), TritonKN(), General()),
    "cuda": (Hybrid(), TritonKN(), Humming(), General()),
    "xpu": (XpuW4A8(), General()),
}


@dataclass(frozen=True, slots=True)
class Selection:
    """The kernel chosen, why, and why each earlier row declined (name -> reason)."""

    kernel: LinearKernel
    reason: str
    declined: dict[str, str]


# Paths that failed their self-check on this machine: (kernel name, path).
Broken = frozenset[tuple[str, str]]


def select(config: LinearConfig, target: Target, broken: Broken = frozenset()) -> Selection:
    """The first kernel of the target's row that fits and has a path that works.

    Raises ValueError with every kernel's reason if none does.
    """
    declined: dict[str, str] = {}
    for kernel in BACKENDS.get(target.kind, ()):
        fits, reason = kernel.can_implement(config, target)
        if fits and all((kernel.name, path) in broken for path in kernel.paths):
            fits, reason = False, "failed its self-check on this machine"
        if fits:
            return Selection(kernel, reason, declined)
        declined[kernel.name] = reason
    lines = (
        "\n".join(f"  {name}: {reason}" for name, reason in declined.items())
        or "  (no kernels for this device)"
    )
    raise ValueError(f"no linear kernel for {config} on {target.kind} {target.arch}:\n{lines}")
