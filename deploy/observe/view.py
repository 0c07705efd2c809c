"""The dashboard as a Prometheus fills it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from page import Drawn, draw
from panels import Query, Variable, expand, fill, read
from stack import Prometheus, Series

# What Grafana puts for a variable that shows "All".
ALL = ".*"
# More than these are too close to each other to be seen.
MOST_POINTS = 200


def render(prometheus: Prometheus, start_s: float, end_s: float, page: Path, note: str) -> list[Drawn]:
    """Draws the dashboard as it looks over a time span; returns what each panel had to show."""
    panels, variables = read()
    step_s = max(float(prometheus.scrape_interval_s), (end_s - start_s) / MOST_POINTS)

    def fetch(query: Query) -> list[Series]:
        return prometheus.query_range(fill(query.expr, values(prometheus)), times[0], times[-1], step_s)

    chosen = {variable.name: choices(prometheus, variable) for variable in variables}
    times = np.arange(start_s, end_s + step_s / 2, step_s)
    return draw(expand(panels, chosen), fetch, times, page, "Nybble", note)


def values(prometheus: Prometheus) -> dict[str, str]:
    """Of the dashboard's variables, with everything chosen."""
    return {"instance": ALL, "path": ALL, "__rate_interval": f"{prometheus.rate_interval_s}s"}


def choices(prometheus: Prometheus, variable: Variable) -> list[str]:
    return prometheus.label_values(fill(variable.selector, values(prometheus)), variable.label)
