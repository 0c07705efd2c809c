"""A Nybble server on the CPU under load, a Prometheus that scrapes it, and a page of what the dashboard then shows.

python deploy/observe MODEL [--seconds 120] [--output build/observe]
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from page import Drawn, draw
from panels import Query, Variable, expand, fill, read
from stack import Prometheus, Series, StackError, run_nybble, run_prometheus
from traffic import SERVER_FLAGS, Traffic

# Shared by all instances of the dashboard's variables where it shows "All".
ALL = ".*"


def main() -> int:
    options = _options()
    if shutil.which("prometheus") is None:
        print("observe: prometheus is not on PATH; on Debian: apt-get install prometheus", file=sys.stderr)
        return 1
    options.output.mkdir(parents=True, exist_ok=True)
    page = options.output / "dashboard.png"
    try:
        drawn = observe(options.model, options.server_flags, options.seconds, options.output, page)
    except StackError as error:
        print(f"observe: {error}", file=sys.stderr)
        return 1
    for panel in drawn:
        for expr in panel.missing:
            print(f"no data in {panel.panel.title!r}: {expr}")
    print(f"the dashboard: {page}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="observe", description=__doc__.split("\n")[0])
    parser.add_argument("model", help="as for nybble serve, such as demo")
    parser.add_argument("--seconds", type=float, default=90.0, help="how long the load lasts")
    parser.add_argument(
        "--output", type=Path, default=Path("build/observe"), help="folder of the page and the logs"
    )
    options, server_flags = parser.parse_known_args()
    options.server_flags = server_flags
    return options


def observe(model: str, server_flags: list[str], seconds: float, logs: Path, page: Path) -> list[Drawn]:
    flags = ("--device", "cpu", *SERVER_FLAGS, *server_flags)
    with tempfile.TemporaryDirectory() as folder, run_nybble(model, logs, flags) as url:
        with run_prometheus(url.removeprefix("http://"), Path(folder)) as prometheus:
            print(f"{seconds:g} s of load on {url}, scraped by {prometheus.url}", flush=True)
            start_s = time.time()
            traffic = Traffic(url)
            asyncio.run(traffic.run(seconds, lambda: time.time() > start_s + seconds))
            answers = ", ".join(
                f"{count} x {status or 'left'}" for status, count in sorted(traffic.statuses.items())
            )
            note = f"nybble serve {model}, on a CPU; {seconds:g} s of load: {answers}"
            return render(prometheus, start_s, time.time(), page, note)


def render(prometheus: Prometheus, start_s: float, end_s: float, page: Path, note: str) -> list[Drawn]:
    """Draws the dashboard as it looks over a time span; returns what each panel had to show."""
    panels, variables = read()
    step_s = max(float(prometheus.scrape_interval_s), (end_s - start_s) / 200)

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


if __name__ == "__main__":
    sys.exit(main())
