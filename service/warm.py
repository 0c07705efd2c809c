"""`nybble warm`: the table of what was compiled ahead for a chip."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from nybble.kernels.native import CompileError, LibraryNotFound
from nybble.kernels.native.offline import Warmed, family_programs, offline_target, warm
from nybble.service.errors import ConfigError, NybbleError

# spills: VGPRs to scratch + SGPRs to lanes of VGPRs
_HEAD = f"{'VGPRs':>5} {'SGPRs':>5} {'LDS':>6} {'scratch':>7} {'spills':>6} {'bytes':>7} {'s':>6}  program"


@dataclass(frozen=True)
class Wanted:
    """Which models the kernels are for."""

    dtypes: tuple[str, ...]
    group_sizes: tuple[int, ...]
    symmetric: tuple[bool, ...]


def warm_chip(arch: str, wanted: Wanted, folder: Path) -> None:
    """Compile into `folder` all that a chip needs, a printed line for each. Raises ConfigError for
    a chip that does not exist, NybbleError for all else."""
    try:
        target = offline_target(arch)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None
    try:
        dtypes = [getattr(torch, name) for name in wanted.dtypes]
        programs = family_programs(target, dtypes, wanted.group_sizes, wanted.symmetric)
    except ValueError as error:
        raise NybbleError(str(error)) from None
    print(f"{arch}: {len(programs)} programs into {folder}\n{_HEAD}", flush=True)
    began, done = perf_counter(), []
    try:
        for warmed in warm(programs, arch, folder):
            print(_line(warmed), flush=True)
            done.append(warmed)
    except (CompileError, LibraryNotFound, OSError) as error:
        raise NybbleError(str(error)) from None
    compiled = sum(warmed.seconds > 0 for warmed in done)
    print(
        f"{arch}: {compiled} compiled, {len(done) - compiled} were there, "
        f"{sum(warmed.nbytes for warmed in done)} bytes, {perf_counter() - began:.1f} s"
    )


def _line(warmed: Warmed) -> str:
    vgprs = sgprs = lds = scratch = spills = "-"
    if warmed.resources is not None:
        r = warmed.resources
        vgprs, sgprs, lds, scratch = map(str, (r.vgprs, r.sgprs, r.lds_bytes, r.scratch_bytes))
        spills = f"{r.vgpr_spills}+{r.sgpr_spills}"
    took = f"{warmed.seconds:.2f}" if warmed.seconds else "there"
    return f"{vgprs:>5} {sgprs:>5} {lds:>6} {scratch:>7} {spills:>6} {warmed.nbytes:>7} {took:>6}  {warmed.program}"
