"""The tile tables: lookup, clamping, splitting, and what validation refuses."""

import json
from importlib import resources

import pytest
import torch

import nybble.kernels.tiles as tiles
from nybble.kernels.tiles import Tile, kernels_on, rows_for, tile_for

BF16, FP16 = torch.bfloat16, torch.float16
ARCHES = ["gfx1151", "gfx1150", "gfx1100", "gfx1102", "gfx1200", "gfx1201", "gfx942", "sm_80", "sm_90", "cpu"]
SHAPES = [(8, 576), (1440, 1536), (4096, 4096), (24576, 4096), (4096, 12288), (4096, 20992)]


@pytest.mark.parametrize("arch", ARCHES)
def test_every_shape_has_a_tile(arch: str):
    for kernel in kernels_on(arch):
        for n, k in SHAPES:
            for m in (1, 2, 16, 17, 64, 129, 300, 5000):
                for g in (32, 64, 128):
                    if k % g:
                        continue
                    tile = tile_for(arch, m, n, k, g, BF16, True, kernel)
                    assert g % tile.block_k == 0
                    parts, groups = tile.split_k, k // g
                    per_part = -(-groups // parts)
                    assert (parts - 1) * per_part < groups, "an empty part"


@pytest.mark.parametrize(
    ("arch", "file"),
    [
        ("gfx1151", "gfx1151"),
        ("gfx1152", "gfx1151"),
        ("gfx1103", "gfx1100"),
        ("gfx1200", "gfx1201"),
        ("sm_100", "default"),
    ],
)
def test_relatives_share_a_file(arch: str, file: str):
    assert tiles._file_for(arch) == f"{file}.json"


def test_only_rdna_has_the_gluon_kernel():
    assert "skinny_rdna" in kernels_on("gfx1151") and "skinny_rdna" not in kernels_on("sm_90")
    with pytest.raises(ValueError, match="given kernel 'skinny_rdna' on sm_90, accepted one of"):
        tile_for("sm_90", 1, 64, 64, 64, FP16, True, "skinny_rdna")


def test_block_k_is_clamped_to_the_group():
    assert tile_for("sm_90", 64, 4096, 4096, 32, FP16, True).block_k == 32


def test_k_is_split_only_where_tiles_are_few():
    assert tile_for("sm_90", 16, 4096, 12288, 128, BF16, True).split_k > 1
    assert tile_for("sm_90", 4096, 24576, 4096, 128, BF16, True).split_k == 1


def _write(tmp_path, monkeypatch, *rows):
    for file in ("default.json",):
        content = {"about": "", "arches": ["*"], "skinny": list(rows)}
        (tmp_path / file).write_text(json.dumps(content))
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    for cached in (tiles._files, tiles.tables, tiles._file_for):
        cached.cache_clear()


@pytest.fixture
def _restore_caches(monkeypatch):
    yield
    monkeypatch.undo()
    for cached in (tiles._files, tiles.tables, tiles._file_for):
        cached.cache_clear()
    tiles.tables()


GOOD = {"block_m": 16, "block_n": 64, "block_k": 32, "num_warps": 4}


def test_the_first_matching_row_wins(tmp_path, monkeypatch, _restore_caches):
    rows = [
        {**GOOD, "block_m": 32, "m_max": 8, "dtype": "float16"},
        {**GOOD, "block_m": 64, "m_max": 8, "symmetric": False},
        {**GOOD, "block_m": 128, "k_over_n_min": 4},
        GOOD,
    ]
    _write(tmp_path, monkeypatch, *rows)

    def block_m(m, n, dtype, symmetric):
        return tile_for("any", m, n, 4096, 64, dtype, symmetric).block_m

    assert block_m(8, 4096, FP16, True) == 32
    assert block_m(8, 4096, BF16, False) == 64
    assert block_m(9, 1024, BF16, False) == 128
    assert block_m(9, 4096, BF16, False) == 16
    assert rows_for("any", "skinny")[3].tile == Tile(16, 64, 32, 4)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**GOOD, "block_m": 24}, "block_m given 24, accepted a power of two"),
        ({**GOOD, "block_n": 1024}, "block_n given 1024"),
        ({**GOOD, "num_warps": 3}, "num_warps given 3"),
        ({**GOOD, "blok": 1}, "given .*blok.*, accepted"),
        ({"block_m": 16}, "given .*, accepted"),
        ({**GOOD, "m_max": 4}, "last row must have no conditions"),
    ],
)
def test_a_bad_row_names_itself(row, message, tmp_path, monkeypatch, _restore_caches):
    _write(tmp_path, monkeypatch, row)
    with pytest.raises(ValueError, match=message):
        tiles.tables()
