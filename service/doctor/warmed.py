"""How many of csrc's kernels are compiled for a chip already. Imports torch."""

from __future__ import annotations

from pathlib import Path

import torch

from nybble.kernels.native.build import entry_name, offline_key
from nybble.kernels.native.cache import CodeCache
from nybble.kernels.native.offline import family_programs, offline_target
from nybble.kernels.native.program import csrc


def count_warmed(arch: str, folders: tuple[Path, ...]) -> tuple[int, int]:
    """How many of the programs that models of any kind call for lie in the folders as `nybble warm` makes them from
    this version's sources, and how many there are. Raises ValueError for a chip that csrc is not for."""
    target, sources = offline_target(arch), csrc()
    programs = family_programs(target, (torch.float16, torch.bfloat16), (32, 64, 128), (True, False))
    found = 0
    for program in programs:
        name, key = entry_name(program, arch), offline_key(program, sources, target)
        found += any(CodeCache(folder).path(name, key).is_file() for folder in folders)
    return found, len(programs)
