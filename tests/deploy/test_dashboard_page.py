"""deploy/observe/page.py: how a dashboard is drawn."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import panels as dashboard
import promql_labels
import pytest
from panels import Query
from stack import Series

page = pytest.importorskip("page", reason="matplotlib is not installed: make venv", exc_type=ImportError)

FILLED = {"instance": ".*", "path": ".*", "__rate_interval": "20s"}


def canned(query: Query) -> list[Any]:
    """Series with the labels that the query's result has; nothing for GTT."""
    if "_gtt_" in query.expr:
        return []
    labels = promql_labels.labels_of(dashboard.fill(query.expr, FILLED), promql_labels.declared())
    values = {"le": ("0.001", "0.01", "+Inf"), "path": ("skinny", "dense"), "phase": ("decode",)}
    return [
        Series(
            dict(zip(sorted(labels), chosen, strict=True)),
            tuple(range(10)),
            tuple(float(t * i) for t in range(10)),
        )
        for i, chosen in enumerate(
            itertools.product(*(values.get(label, ("x",)) for label in sorted(labels))), 1
        )
    ]


def test_the_page_shows_every_panel_and_says_what_is_missing(tmp_path: Path) -> None:
    panels, _ = dashboard.read()
    shown = dashboard.expand(panels, {"path": ["skinny", "dense"]})
    drawn = page.draw(shown, canned, np.arange(10.0), tmp_path / "page.png", "Nybble", "a test")
    assert [one.panel for one in drawn] == [p for p in shown if p.queries]
    missing = [expr for one in drawn for expr in one.missing]
    assert len(missing) == 2 and all("_gtt_" in expr for expr in missing)
    with page.Image.open(tmp_path / "page.png") as image:
        assert image.width > 1000 and image.height > 1500
        # Blank cards have a handful of colours.
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0025, "s", "2.5 ms"),
        (90.0, "s", "1.5 min"),
        (1e-5, "s", "10 µs"),
        (0.0, "s", "0 s"),
        (1.5 * 2**30, "bytes", "1.5 GiB"),
        (512.0, "bytes", "512 B"),
        (0.256, "percentunit", "25.6 %"),
        (1234.4, "suffix: tok/s", "1234 tok/s"),
        (3.0, "reqps", "3 req/s"),
        (100.0, "none", "100"),
        (math.nan, "s", "–"),
    ],
)
def test_numbers_are_written_with_their_units(value: float, unit: str, text: str) -> None:
    assert page.number(value, unit) == text


def test_a_heat_map_shows_each_bucket_alone() -> None:
    times = np.arange(3.0)
    series = [
        Series({"le": "+Inf"}, (0.0, 1.0, 2.0), (5.0, 5.0, 9.0)),
        Series({"le": "0.1"}, (0.0, 2.0), (2.0, 9.0)),
    ]
    cells = page._cells([page._line("", one, times) for one in series])
    assert cells is not None
    bounds, counts = cells
    assert bounds.tolist() == [0.1, math.inf]
    assert counts.tolist() == [[2, 0, 9], [3, 5, 0]]


@pytest.mark.parametrize("color", page.KEPT)
def test_a_color_of_few_pixels_is_kept(color: str, tmp_path: Path) -> None:
    figure = page.Figure(figsize=(2, 2), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1))
    noise = np.random.default_rng(0).random((200, 200, 3))
    noise[:100] = 0.98  # near to white, and far more of it
    axes.imshow(noise)
    axes.add_patch(page.FancyBboxPatch((100, 100), 4, 4, boxstyle="square,pad=0", color=color))
    page._save(figure, tmp_path / "page.png")
    drawn = page.Image.open(tmp_path / "page.png").convert("RGB")
    assert drawn.getpixel((102, 102)) == page.ImageColor.getrgb(color)


def test_what_found_nothing_is_named_and_why_that_may_be() -> None:
    panel = dashboard.Panel("timeseries", "Memory", 0, 0, 8, 8)
    found = {"sum(nybble_gtt_used_bytes{x})": 0, "nybble_vram_used_bytes": 0, "nybble_requests_running": 1}
    told = page.Drawn(panel, found).what_is_missing()
    assert told.endswith(": nybble_gtt_used_bytes, nybble_vram_used_bytes (only amdgpu tells GTT and VRAM)")
    told = page.Drawn(panel, found | {"sum(nybble_queue_seconds_count)": 0}).what_is_missing()
    assert told.endswith("nybble_queue_seconds_count")


def test_observe_says_when_prometheus_is_not_installed(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(page.__file__).parent), "demo", "--output", str(tmp_path / "out")]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "observe: prometheus is not on PATH; on Debian: apt-get install prometheus\n"
    assert not (tmp_path / "out").exists()
