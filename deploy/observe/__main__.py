"""A Nybble server on the CPU under load, a Prometheus that scrapes it, and a page of what the dashboard then shows.

    python deploy/observe MODEL [--seconds 90] [--output build/observe] [options of nybble serve]

The folder gets dashboard.png and the server's log.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path

from page import Drawn
from stack import StackError, run_nybble, run_prometheus
from traffic import SERVER_FLAGS, Traffic
from view import render


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
    except KeyboardInterrupt:
        return 130
    for panel in drawn:
        if panel.missing:
            print(panel.what_is_missing())
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
            note = f"nybble serve {model}, on a CPU; {seconds:g} s of load, answers: {answers}"
            return render(prometheus, start_s, time.time(), page, note)


if __name__ == "__main__":
    sys.exit(main())
