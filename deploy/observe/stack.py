"""Processes to look at, on 127.0.0.1 and ports of their own: a Nybble server, and a Prometheus that scrapes it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

CONFIG = Path(__file__).parents[1] / "prometheus/prometheus.yml"
# For a machine that is busy with other things.
START_S = 120.0
STOP_S = 60.0


class StackError(Exception):
    """A process that did not come up; the message has the end of its log."""


@dataclass(frozen=True)
class Series:
    labels: dict[str, str]
    times: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Prometheus:
    url: str
    scrape_interval_s: int

    @property
    def rate_interval_s(self) -> int:
        """Grafana's $__rate_interval, for steps up to three scrapes long."""
        return 4 * self.scrape_interval_s

    def wait_for_scrape(self, within_s: float = START_S) -> None:
        """Raises StackError when no scrape has worked by then."""
        deadline_s = time.monotonic() + within_s
        while [one.values for one in self.query("up")] != [(1.0,)]:
            if time.monotonic() > deadline_s:
                raise StackError(f"{self.url}: no scrape has worked within {within_s:g} s")
            time.sleep(0.1)

    def query(self, expr: str) -> list[Series]:
        """The present value of each series. Raises ValueError for an expression that Prometheus refuses."""
        found = self._get("query", query=expr)["result"]
        return [_series(one["metric"], [one["value"]]) for one in found]

    def query_range(self, expr: str, start_s: float, end_s: float, step_s: float) -> list[Series]:
        found = self._get("query_range", query=expr, start=start_s, end=end_s, step=step_s)["result"]
        return [_series(one["metric"], one["values"]) for one in found]

    def label_values(self, selector: str, label: str) -> list[str]:
        return sorted({series[label] for series in self.series(selector) if label in series})

    def series(self, selector: str) -> list[dict[str, str]]:
        """The labels of every series, __name__ among them."""
        found: list[dict[str, str]] = self._get("series", **{"match[]": selector})
        return found

    def rules(self) -> list[dict[str, Any]]:
        """Every rule with its name, type, query, health and lastError."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, path: str, **parameters: Any) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30).json()
        if answer["status"] != "success":
            raise ValueError(f"{parameters}: {answer['error']}")
        return answer["data"]


def _series(labels: dict[str, str], points: Sequence[tuple[float, str]]) -> Series:
    return Series(
        labels,
        tuple(float(time_s) for time_s, _ in points),
        tuple(float(value) for _, value in points),
    )


def local_config(target: str, interval_s: int) -> dict[str, Any]:
    """The configuration that is deployed, for one server at host:port and with other intervals."""
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["global"] = {name: f"{interval_s}s" for name in config["global"]}
    config["rule_files"] = [str(CONFIG.parent / name) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [target]}]
    return config


@contextlib.contextmanager
def run_prometheus(target: str, folder: Path, interval_s: int = 1) -> Iterator[Prometheus]:
    """Scrapes http://TARGET/metrics every interval_s, and evaluates the rules as often; its files are in folder."""
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(local_config(target, interval_s)), encoding="utf-8")
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    with running(command, folder / "prometheus.log") as log:
        address = log.wait_for(r'msg="Listening on" address=(\S+)')[1]
        log.wait_for("Server is ready to receive web requests")
        prometheus = Prometheus(f"http://{address}", interval_s)
        prometheus.wait_for_scrape()
        yield prometheus


@contextlib.contextmanager
def run_nybble(model: str, folder: Path, flags: Sequence[str] = ()) -> Iterator[str]:
    """The URL of a server whose engine is ready."""
    command = [sys.executable, "-P", "-m", "nybble.service", "serve", model, "--port", "0", *flags]
    with running(command, folder / "nybble.log") as log:
        # The demo is made from a package's weights when it is asked for the first time.
        url = log.wait_for(r"listening on (http://\S+)", 10 * START_S)[1]
        log.wait_for("engine ready", 10 * START_S)
        yield url


@dataclass(frozen=True)
class Log:
    """The log of a process that is running."""

    process: subprocess.Popen[bytes]
    path: Path

    def text(self) -> str:
        return self.path.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, pattern: str, within_s: float = START_S) -> re.Match[str]:
        """Raises StackError when the process ends, or the time does, before its log matches."""
        deadline_s = time.monotonic() + within_s
        while (match := re.search(pattern, self.text())) is None:
            if self.process.poll() is not None:
                raise StackError(f"{self.process.args!r} ended:\n{self._end()}")
            if time.monotonic() > deadline_s:
                raise StackError(
                    f"{self.process.args!r}: no {pattern!r} within {within_s:g} s:\n{self._end()}"
                )
            time.sleep(0.05)
        return match

    def _end(self) -> str:
        return self.text()[-2000:]


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Iterator[Log]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        yield Log(process, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
