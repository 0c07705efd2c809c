"""Draws a dashboard's panels, in its own grid, from the results of its queries."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray
from panels import COLUMNS, Panel, Query
from PIL import Image, ImageColor
from stack import Series

Fetch = Callable[[Query], list[Series]]

COLUMN_PX, ROW_PX, HEAD_PX, GAP_PX, DPI = 60, 33, 46, 4, 100
COLORS = ("#3274d9", "#e0752d", "#37872d", "#a352cc", "#12959f", "#c4162a", "#b8860b", "#777777")
PAGE, CARD, EDGE, INK, FAINT = "#f4f5f8", "#ffffff", "#dfe2e8", "#24292f", "#7b838f"
STAT_COLORS = {"green": "#37872d", "orange": "#e0752d", "red": "#e02f44"}
KEPT = tuple(dict.fromkeys((PAGE, CARD, EDGE, INK, FAINT, *STAT_COLORS.values(), *COLORS)))
# (from this many, divided by, written as)
TIME = ((60.0, 60.0, "min"), (1.0, 1.0, "s"), (1e-3, 1e-3, "ms"), (0.0, 1e-6, "µs"))
BYTES = ((2.0**30, 2.0**30, "GiB"), (2.0**20, 2.0**20, "MiB"), (2.0**10, 2.0**10, "KiB"), (0.0, 1.0, "B"))
SUFFIXES = {"reqps": "req/s", "ops": "/s", "none": "", "": ""}


@dataclass(frozen=True)
class Drawn:
    """What a panel showed: per query, how many series had a number in them."""

    panel: Panel
    found: dict[str, int]

    @property
    def missing(self) -> list[str]:
        return [expr for expr, count in self.found.items() if not count]

    def what_is_missing(self) -> str:
        """In a line, and why where that is known."""
        names = list(dict.fromkeys(re.findall(r"nybble_\w+", " ".join(self.missing))))
        amdgpus = all(name.startswith(("nybble_gtt_", "nybble_vram_")) for name in names)
        why = " (only amdgpu tells GTT and VRAM)" if amdgpus else ""
        return f"no data in {self.panel.title!r}: {', '.join(names)}{why}"


def number(value: float, unit: str) -> str:
    """As Grafana writes it: 0.0025 of unit s is 2.5 ms."""
    if not math.isfinite(value):
        return "–"
    if unit == "percentunit":
        return f"{_digits(100 * value)} %"
    if unit in ("s", "bytes"):
        if value == 0:
            return f"0 {'s' if unit == 's' else 'B'}"
        _, scale, name = next(row for row in (TIME if unit == "s" else BYTES) if abs(value) >= row[0])
        return f"{_digits(value / scale)} {name}"
    suffix = SUFFIXES.get(unit, unit.removeprefix("suffix:").strip())
    return f"{_digits(value)} {suffix}".strip()


def _digits(value: float) -> str:
    """Three that count."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(decimals, 3)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def draw(
    panels: Sequence[Panel], fetch: Fetch, times: NDArray[np.float64], path: Path, title: str, note: str
) -> list[Drawn]:
    """Writes a PNG of all panels; fetch has the series of one query at `times`, which are evenly spaced."""
    rows = max(panel.y + panel.height for panel in panels)
    width_px, height_px = COLUMNS * COLUMN_PX + 2 * GAP_PX, rows * ROW_PX + HEAD_PX + 2 * GAP_PX
    figure = Figure(figsize=(width_px / DPI, height_px / DPI), dpi=DPI, facecolor=PAGE)
    figure.text(0.008, 1 - 16 / height_px, title, size=15, weight="bold", color=INK, va="center")
    figure.text(0.008, 1 - 36 / height_px, note, size=8.5, color=FAINT, va="center")
    canvas = _Canvas(figure, width_px, height_px)
    drawn = []
    for panel in panels:
        found = [(query, fetch(query)) for query in panel.queries]
        lines = [_line(q.name(s.labels), s, times) for q, series in found for s in series if has_number(s)]
        _DRAW[panel.kind](canvas, panel, lines)
        if panel.queries:
            numbers = {query.expr: sum(map(has_number, series)) for query, series in found}
            drawn.append(Drawn(panel, numbers))
    _save(figure, path)
    return drawn


def has_number(series: Series) -> bool:
    return any(map(math.isfinite, series.values))


def _save(figure: Figure, path: Path) -> None:
    """With a palette, a third of the size. Colors that mean something are in it whatever else is drawn: of few pixels, red
    would become orange."""
    whole = io.BytesIO()
    figure.savefig(whole, format="png", facecolor=PAGE)
    image = Image.open(whole).convert("RGB")
    kept = [ImageColor.getrgb(color) for color in KEPT]
    flat = image.quantize(256 - len(kept)).getpalette() or []
    # Pillow looks for the nearest color in steps of 4: one so close would be taken in its place.
    usual = [one for one in zip(*[iter(flat)] * 3, strict=True) if min(_distance(one, k) for k in kept) > 8]
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for color in (*kept, *usual) for part in color])
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)


def _distance(one: Sequence[int], other: Sequence[int]) -> int:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@dataclass(frozen=True)
class _Line:
    """values [T] at times [T]; NaN where the series has none."""

    name: str
    labels: dict[str, str]
    times: NDArray[np.float64]
    values: NDArray[np.float64]


def _line(name: str, series: Series, times: NDArray[np.float64]) -> _Line:
    values = np.full(len(times), np.nan)
    step = times[1] - times[0]
    at = np.rint((np.array(series.times) - times[0]) / step).astype(int)
    values[at] = series.values
    values[np.isinf(values)] = np.nan
    return _Line(name, series.labels, times, values)


@dataclass(frozen=True)
class _Canvas:
    """Places things by pixels from the upper left corner, as a dashboard's grid does."""

    figure: Figure
    width_px: int
    height_px: int

    def box(self, panel: Panel) -> tuple[float, float, float, float]:
        """Left, top, width, height of the panel's card in pixels."""
        left, top = GAP_PX + panel.x * COLUMN_PX, HEAD_PX + panel.y * ROW_PX
        return (
            left + GAP_PX,
            top + GAP_PX,
            panel.width * COLUMN_PX - 2 * GAP_PX,
            panel.height * ROW_PX - 2 * GAP_PX,
        )

    def rectangle(
        self, left: float, top: float, width: float, height: float
    ) -> tuple[float, float, float, float]:
        """The same in the figure's own coordinates: left, bottom, width, height."""
        w, h = self.width_px, self.height_px
        return left / w, 1 - (top + height) / h, width / w, height / h

    def card(self, panel: Panel, title_size: float = 9.5) -> tuple[float, float, float, float]:
        left, top, width, height = self.box(panel)
        x, y, w, h = self.rectangle(left, top, width, height)
        self.figure.patches.append(
            FancyBboxPatch(
                (x, y),
                w,
                h,
                boxstyle="round,pad=0,rounding_size=0.002",
                transform=self.figure.transFigure,
                facecolor=CARD,
                edgecolor=EDGE,
                linewidth=0.8,
                mutation_aspect=self.width_px / self.height_px,
                zorder=-1,
            )
        )
        self.text(left + 10, top + 13, panel.title, size=title_size, weight="bold")
        return left, top, width, height

    def text(
        self, left: float, top: float, text: str, size: float, color: str = INK, weight: str = "normal"
    ) -> None:
        x, y = left / self.width_px, 1 - top / self.height_px
        self.figure.text(x, y, text, size=size, color=color, weight=weight, va="center")

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        axes = self.figure.add_axes(self.rectangle(left, top, width, height))
        assert isinstance(axes, Axes)
        axes.set_facecolor("none")
        for side in axes.spines.values():
            side.set_visible(False)
        axes.tick_params(length=0, labelsize=7.5, labelcolor=FAINT, pad=6)
        return axes


def _row(canvas: _Canvas, panel: Panel, lines: list[_Line]) -> None:
    left, top, _, height = canvas.box(panel)
    canvas.text(left + 4, top + height / 2, panel.title, size=11, weight="bold")


def _stat(canvas: _Canvas, panel: Panel, lines: list[_Line]) -> None:
    left, top, width, height = canvas.card(panel, title_size=9)
    finite = [value for line in lines for value in line.values if np.isfinite(value)]
    text = number(finite[-1], panel.unit) if finite else panel.no_value or "no data"
    color = STAT_COLORS[_threshold(panel, finite[-1])] if finite else FAINT
    if len(finite) > 1:
        axes = canvas.axes(left + 1, top + height - 44, width - 2, 43)
        (line,) = lines
        axes.fill_between(line.times, line.values, color=color, alpha=0.15, linewidth=0)
        axes.plot(line.times, line.values, color=color, linewidth=1, alpha=0.6)
        axes.set(xticks=[], yticks=[], xlim=(line.times[0], line.times[-1]))
        axes.set_ylim(0, max(np.nanmax(line.values) * 1.2, 1e-9))
    canvas.text(left + 10, top + 48, text, size=19, color=color, weight="bold")


def _threshold(panel: Panel, value: float) -> str:
    passed = [color for start, color in panel.thresholds if start is None or value >= start]
    return passed[-1] if passed else "green"


def _time_series(canvas: _Canvas, panel: Panel, lines: list[_Line]) -> None:
    left, top, width, height = canvas.card(panel)
    if not lines:
        canvas.text(left + width / 2 - 22, top + height / 2, "no data", size=9, color=FAINT)
        return
    lines.sort(key=lambda line: line.name in panel.unstacked)
    bottom = 22 + 15 * _legend(
        canvas, [line.name for line in lines], left + 12, top + height - 12, width - 24
    )
    axes = canvas.axes(left + 58, top + 32, width - 74, height - 36 - bottom)
    if panel.stacking:
        _stack(axes, panel, lines)
    else:
        for line, color in zip(lines, _colors(len(lines)), strict=True):
            axes.plot(line.times, line.values, color=color, linewidth=1.3)
            axes.fill_between(line.times, line.values, color=color, alpha=0.06, linewidth=0)
    percent = panel.stacking == "percent"
    _value_axis(axes, "percentunit" if percent else panel.unit, 1.0 if percent else panel.most)
    _time_axis(axes, lines[0].times)


def _colors(count: int) -> list[str]:
    return [COLORS[index % len(COLORS)] for index in range(count)]


def _stack(axes: Axes, panel: Panel, lines: list[_Line]) -> None:
    below = [line for line in lines if line.name not in panel.unstacked]
    times = below[0].times
    rows = np.array([np.nan_to_num(line.values) for line in below])
    if panel.stacking == "percent":
        rows = rows / np.maximum(rows.sum(axis=0), 1e-30)
    colors = _colors(len(lines))
    axes.stackplot(times, rows, colors=colors[: len(below)], alpha=0.45, linewidth=0)
    for top, color in zip(np.cumsum(rows, axis=0), colors, strict=False):
        axes.plot(times, top, color=color, linewidth=1)
    for line, color in zip(lines[len(below) :], colors[len(below) :], strict=True):
        axes.plot(line.times, line.values, color=color, linewidth=1.3, linestyle=(0, (4, 3)))


def _value_axis(axes: Axes, unit: str, most: float | None) -> None:
    top = most if most is not None else axes.dataLim.y1 * 1.08
    if top <= 0 or unit == "none":
        top = max(top, 1.2)
    axes.set_ylim(0, top * (1.02 if most is not None else 1))
    locator = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=unit == "none" and top > 2)
    if unit == "bytes":
        scale = next(row[1] for row in BYTES if top >= row[0])
        ticks = [tick * scale for tick in MaxNLocator(5).tick_values(0, top / scale)]
        axes.set_yticks([tick for tick in ticks if tick <= top * 1.0001])
    else:
        axes.yaxis.set_major_locator(locator)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, unit)))
    axes.grid(axis="y", color=EDGE, linewidth=0.6)
    axes.set_axisbelow(True)


def _time_axis(axes: Axes, times: NDArray[np.float64]) -> None:
    """Minutes and seconds since the beginning."""
    start_s, end_s = times[0], times[-1]
    axes.set_xlim(start_s, end_s)
    steps = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
    step = next((s for s in steps if (end_s - start_s) / s <= 7), steps[-1])
    ticks = np.arange(0, end_s - start_s + 1e-9, step)
    axes.set_xticks(start_s + ticks, [f"{int(tick) // 60}:{int(tick) % 60:02d}" for tick in ticks])
    axes.grid(axis="x", color=EDGE, linewidth=0.4)


def _legend(canvas: _Canvas, names: list[str], left: float, bottom: float, width: float) -> int:
    """Writes the names in lines that end at `bottom`; returns how many lines that took."""
    rows: list[list[tuple[float, int]]] = [[]]
    at = 0.0
    for index, name in enumerate(names):
        needed = 24 + 6.2 * len(name)
        if at and at + needed > width:
            rows.append([])
            at = 0.0
        rows[-1].append((at, index))
        at += needed
    for line, row in enumerate(rows):
        y = bottom - 15 * (len(rows) - 1 - line)
        for x, index in row:
            canvas.text(left + x, y, "▬", size=8, color=COLORS[index % len(COLORS)])
            canvas.text(left + x + 12, y, names[index], size=8)
    return len(rows)


def _heat_map(canvas: _Canvas, panel: Panel, lines: list[_Line]) -> None:
    left, top, width, height = canvas.card(panel)
    cells = _cells(lines)
    if cells is None:
        canvas.text(left + width / 2 - 22, top + height / 2, "no data", size=9, color=FAINT)
        return
    bounds, counts = cells
    times = lines[0].times
    used = np.flatnonzero(np.nansum(counts, axis=1) > 0)
    first, last = max(used[0] - 1, 0), min(used[-1] + 2, len(bounds))
    shown = np.ma.masked_less_equal(counts[first:last], 0)
    axes = canvas.axes(left + 70, top + 32, width - 130, height - 66)
    mesh = axes.pcolormesh(
        times,
        np.arange(first, last),
        shown,
        norm=PowerNorm(0.5, vmin=0),
        cmap="viridis_r",
        shading="nearest",
        edgecolors=CARD,
        linewidth=0.4,
    )
    labels = [f"≤ {number(bound, panel.unit)}" if np.isfinite(bound) else "above" for bound in bounds]
    axes.set_yticks(np.arange(first, last), labels[first:last])
    _time_axis(axes, times)
    axes.grid(False)
    scale = canvas.axes(left + width - 50, top + 32, 8, height - 66)
    bar = canvas.figure.colorbar(mesh, cax=scale)
    bar.outline.set_visible(False)
    scale.tick_params(length=0, labelsize=7.5, labelcolor=FAINT)
    scale.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def _cells(lines: list[_Line]) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Upper bounds [B], and counts [B, T] of each bucket alone, from the cumulative ones; None if there are none."""
    lines = sorted((line for line in lines if "le" in line.labels), key=lambda line: float(line.labels["le"]))
    if not any(np.nansum(line.values) > 0 for line in lines):
        return None
    cumulative = np.array([np.nan_to_num(line.values) for line in lines])
    bounds = np.array([float(line.labels["le"]) for line in lines])
    return bounds, np.maximum(np.diff(cumulative, axis=0, prepend=0), 0)


_DRAW: dict[str, Callable[[_Canvas, Panel, list[_Line]], None]] = {
    "row": _row,
    "stat": _stat,
    "timeseries": _time_series,
    "heatmap": _heat_map,
}
