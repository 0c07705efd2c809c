"""What a dashboard's JSON asks for: its panels and variables, and queries with the variables filled in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parents[1] / "grafana/dashboards/nybble.json"
COLUMNS = 24
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)")
_LEGEND_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True)
class Query:
    """expr still has its variables; legend may hold {{label}}."""

    expr: str
    legend: str

    def name(self, labels: Mapping[str, str]) -> str:
        return _LEGEND_LABEL.sub(lambda match: labels.get(match[1], ""), self.legend)


@dataclass(frozen=True)
class Panel:
    """kind: row, stat, timeseries or heatmap. x, y, width, height: in the dashboard's grid of 24 columns.

    stacking: "", "normal" or "percent"; unstacked: series that are drawn as a line over the stack. thresholds: (from
    which value, color), the first from None. most: the end of the axis, None where the data decide. repeat: the
    variable for each of whose values there is one such panel.
    """

    kind: str
    title: str
    x: int
    y: int
    width: int
    height: int
    queries: tuple[Query, ...] = ()
    unit: str = ""
    stacking: str = ""
    unstacked: frozenset[str] = frozenset()
    thresholds: tuple[tuple[float | None, str], ...] = ()
    most: float | None = None
    no_value: str = ""
    repeat: str = ""
    max_per_row: int = 4


@dataclass(frozen=True)
class Variable:
    """One that is filled with the values that a label has in the series of a selector."""

    name: str
    selector: str
    label: str


def read(path: Path = DASHBOARD) -> tuple[list[Panel], list[Variable]]:
    """The panels in reading order, and the variables that queries fill."""
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    queried = [v for v in dashboard["templating"]["list"] if v["type"] == "query"]
    return [_panel(panel) for panel in dashboard["panels"]], [_variable(variable) for variable in queried]


def _panel(given: Mapping[str, Any]) -> Panel:
    grid = given["gridPos"]
    field = given.get("fieldConfig", {})
    defaults = field.get("defaults", {})
    unit = defaults.get("unit") or given.get("options", {}).get("yAxis", {}).get("unit", "")
    steps = defaults.get("thresholds", {}).get("steps", ())
    return Panel(
        kind=given["type"],
        title=given["title"],
        x=grid["x"],
        y=grid["y"],
        width=grid["w"],
        height=grid["h"],
        queries=tuple(Query(t["expr"], t.get("legendFormat", "")) for t in given.get("targets", ())),
        unit=unit,
        stacking=_stacking(defaults.get("custom", {}).get("stacking", {}).get("mode", "none")),
        unstacked=frozenset(o["matcher"]["options"] for o in field.get("overrides", ()) if _unstacks(o)),
        thresholds=tuple((step.get("value"), step["color"]) for step in steps),
        most=defaults.get("max"),
        no_value=defaults.get("noValue", ""),
        repeat=given.get("repeat", ""),
        max_per_row=int(given.get("maxPerRow", 4)),
    )


def _stacking(mode: str) -> str:
    return "" if mode == "none" else mode


def _unstacks(override: Mapping[str, Any]) -> bool:
    return any(p["id"] == "custom.stacking" and p["value"]["mode"] == "none" for p in override["properties"])


def _variable(given: Mapping[str, Any]) -> Variable:
    match = _LABEL_VALUES.fullmatch(given["query"])
    if match is None:
        raise ValueError(f"variable {given['name']}: {given['query']!r} is not label_values(SELECTOR, LABEL)")
    return Variable(given["name"], match[1], match[2])


def fill(text: str, values: Mapping[str, str]) -> str:
    """Raises ValueError for a variable that has no value."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ValueError(f"{text!r} has the variable {match[1]!r}; known are {', '.join(sorted(values))}")
        return values[match[1]]

    return _VARIABLE.sub(value, text)


def expand(panels: Sequence[Panel], values: Mapping[str, Sequence[str]]) -> list[Panel]:
    """Repeated panels side by side, as Grafana lays them out, with their variable filled in. Rows that this adds move
    everything below down."""
    expanded: list[Panel] = []
    moved = 0
    for panel in panels:
        panel = replace(panel, y=panel.y + moved)
        if not panel.repeat:
            expanded.append(panel)
            continue
        each = values[panel.repeat] or ("",)
        columns = min(len(each), panel.max_per_row)
        width = COLUMNS // columns
        for index, value in enumerate(each):
            row, column = divmod(index, columns)
            expanded.append(
                replace(
                    _with_value(panel, panel.repeat, value),
                    x=column * width,
                    y=panel.y + row * panel.height,
                    width=width,
                )
            )
        moved += (-(-len(each) // columns) - 1) * panel.height
    return expanded


def _with_value(panel: Panel, name: str, value: str) -> Panel:
    def put(text: str) -> str:
        return _VARIABLE.sub(lambda match: value if match[1] == name else match[0], text)

    queries = tuple(replace(query, expr=put(query.expr)) for query in panel.queries)
    return replace(panel, title=put(panel.title), queries=queries, repeat="")
