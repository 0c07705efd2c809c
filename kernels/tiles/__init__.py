"""Tiles per chip, as data: which block sizes each GEMM kernel uses for a shape.

One JSON file per chip family. A file names the architectures it serves (exact names first, then prefixes; the file with
`"arches": ["*"]` serves the rest) and one list of rows per kernel. The first row whose conditions all hold gives the tile:

    m_min m_max n_min n_max k_min k_max   inclusive bounds
    dtype                                 "float16" or "bfloat16"
    symmetric                             true or false
    k_over_n_min                          K >= this * N

Every file is validated when this module is imported: a bad row names its file, kernel and position.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, fields, replace
from importlib import resources
from typing import Any

import torch

KERNELS = ("skinny", "skinny_rdna", "kn")
_BOUNDS = {"m_min": "m", "n_min": "n", "k_min": "k", "m_max": "m", "n_max": "n", "k_max": "k"}
_CONDITIONS = {*_BOUNDS, "dtype", "symmetric", "k_over_n_min"}
_BLOCKS = {"block_m": (16, 256), "block_n": (16, 512), "block_k": (16, 256)}


@dataclass(frozen=True, slots=True)
class Tile:
    """Block sizes of one launch: a program computes block_m x block_n outputs, block_k at a time, K in split_k parts.

    scale_weights ("skinny" only): multiply weights by their scale in the activation type rather than sums in fp32.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    split_k: int = 1
    scale_weights: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table: when it applies, and its tile.

    `programs`: where one wave of tiles is smaller, K is split to reach about this many programs; 0 never splits.
    """

    conditions: tuple[tuple[str, Any], ...]
    tile: Tile
    programs: int = 0

    def matches(self, m: int, n: int, k: int, dtype: torch.dtype, symmetric: bool) -> bool:
        size = {"m": m, "n": n, "k": k}
        for key, value in self.conditions:
            if key in _BOUNDS:
                have = size[_BOUNDS[key]]
                ok = have <= value if key.endswith("_max") else have >= value
            elif key == "dtype":
                ok = str(dtype) == f"torch.{value}"
            elif key == "symmetric":
                ok = symmetric == value
            else:
                ok = k >= value * n
            if not ok:
                return False
        return True


def tile_for(
    arch: str, m: int, n: int, k: int, g: int, dtype: torch.dtype, symmetric: bool, kernel: str = "skinny"
) -> Tile:
    """The tile of `kernel` for y [M, N] = x [M, K] @ w^T on `arch`, block_k clamped to the group size g.

    Raises ValueError when the chip's file has no table for `kernel`.
    """
    table = tables()[_file_for(arch)].get(kernel)
    if table is None:
        raise ValueError(f"tiles: given kernel {kernel!r} on {arch}, accepted one of {kernels_on(arch)}")
    row = next(r for r in table if r.matches(m, n, k, dtype, symmetric))
    tile = row.tile
    block_k = min(tile.block_k, g)
    split_k = _split_k(row, -(-m // tile.block_m) * -(-n // tile.block_n), k, max(block_k, min(g, k)))
    return replace(tile, block_k=block_k, split_k=split_k)


def kernels_on(arch: str) -> list[str]:
    """Names of the kernels with a table for `arch`."""
    return sorted(tables()[_file_for(arch)])


def rows_for(arch: str, kernel: str) -> tuple[Row, ...]:
    """Every row of a kernel's table, for tests and benchmarks that walk them all."""
    return tables()[_file_for(arch)][kernel]


def _split_k(row: Row, tiles: int, k: int, unit: int) -> int:
    """Parts to cut K into: each holds at least four units (groups), and no part is empty."""
    wanted = max(1, min(row.programs // tiles, k // (4 * unit)))
    per_part = -(-(k // unit) // wanted)
    return -(-(k // unit) // per_part)


@functools.cache
def _file_for(arch: str) -> str:
    arches = {name: json_["arches"] for name, json_ in _files().items()}
    for name, served in arches.items():
        if arch in served:
            return name
    prefixed = [(len(a), name) for name, served in arches.items() for a in served if arch.startswith(a)]
    if prefixed:
        return max(prefixed)[1]
    return next(name for name, served in arches.items() if "*" in served)


@functools.cache
def _files() -> dict[str, dict[str, Any]]:
    folder = resources.files(__package__)
    names = sorted(f.name for f in folder.iterdir() if f.name.endswith(".json"))
    return {name: json.loads((folder / name).read_text(encoding="utf-8")) for name in names}


@functools.cache
def tables() -> dict[str, dict[str, tuple[Row, ...]]]:
    """File name -> kernel -> rows, validated. Raises ValueError naming the first bad row."""
    result = {}
    for name, content in _files().items():
        unknown = set(content) - {"about", "arches", *KERNELS}
        if unknown or not content.get("arches"):
            raise ValueError(
                f"tiles/{name}: given keys {sorted(content)}, accepted about, arches, {', '.join(KERNELS)}"
            )
        result[name] = {
            kernel: _table(f"tiles/{name} {kernel}", content[kernel])
            for kernel in KERNELS
            if kernel in content
        }
    if sum("*" in c["arches"] for c in _files().values()) != 1:
        raise ValueError('tiles: exactly one file must serve "*"')
    return result


def _table(where: str, rows: list[dict[str, Any]]) -> tuple[Row, ...]:
    table = tuple(_row(f"{where} row {i}", dict(row)) for i, row in enumerate(rows))
    if not table or table[-1].conditions:
        raise ValueError(f"{where}: the last row must have no conditions, so that every shape has a tile")
    return table


def _row(where: str, row: dict[str, Any]) -> Row:
    row.pop("note", None)
    programs = row.pop("programs", 0)
    conditions = tuple(sorted((key, row.pop(key)) for key in list(row) if key in _CONDITIONS))
    accepted = {f.name for f in fields(Tile)} - {"split_k"}
    if set(row) - accepted or not {*_BLOCKS, "num_warps"} <= set(row):
        raise ValueError(
            f"{where}: given {sorted(row)}, accepted {sorted(accepted)} and {sorted(_CONDITIONS)}"
        )
    for key, (low, high) in _BLOCKS.items():
        if row[key] & (row[key] - 1) or not low <= row[key] <= high:
            raise ValueError(f"{where}: {key} given {row[key]}, accepted a power of two from {low} to {high}")
    if row["num_warps"] not in (1, 2, 4, 8, 16):
        raise ValueError(f"{where}: num_warps given {row['num_warps']}, accepted 1, 2, 4, 8 or 16")
    return Row(conditions, Tile(**row), programs)


tables()
