"""A real Prometheus: it accepts the configuration, the rules do what their tests say, and every query of the dashboard
and of the rules finds data in what a real server exports under load."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import panels as dashboard
import promql_labels
import pytest
import yaml
from gpu_sysfs import fake_gpu
from http_fixtures import SUPPORT
from model_folders import DATA
from reference import values_of
from stack import CONFIG, Prometheus, run_prometheus, running
from traffic import SERVER_FLAGS, Traffic

from nybble.service.metrics import PREFIX

pytest.importorskip("page", reason="matplotlib is not installed: make venv", exc_type=ImportError)
from page import has_number  # noqa: E402
from view import choices, render, values  # noqa: E402

pytestmark = pytest.mark.deploy

# Too few KV blocks for all that run.
FLAGS = (
    *("--device", "cpu", "--threads", "1", "--max-model-len", "512", "--kv-cache-bytes", "1500000"),
    *SERVER_FLAGS,
)
WAVE_S = 8.0
WITHIN_S = 120.0
# Rules that find nothing without a GPU, and why.
WITHOUT_DATA = {
    "instance_path:nybble_gemm_bandwidth_ratio:busy": "the path skinny is GPU code",
    "instance_path:nybble_gemm_bandwidth_ratio:mean15m": "the path skinny is GPU code",
    "instance_path:nybble_gemm_bandwidth_ratio:usual1d": "the path skinny is GPU code",
    "NybbleBandwidthSagging": "is made of those",
    "NybbleNotScraped": "there is a server",
}


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=CONFIG.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_is_accepted() -> None:
    promtool("check", "config", CONFIG.name)


def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", "rules_test.yml")


# --- a server under load ---


@dataclass(frozen=True)
class Live:
    """without_data: (panel or rule, expression) that has not had data all the time since start_s."""

    prometheus: Prometheus
    start_s: float
    without_data: set[tuple[str, str]]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("live")
    fake_gpu(folder / "sys", "0000:c5:00.0", "card1", 3 << 30, 96 << 30, 1 << 28, 1 << 29)
    program = [sys.executable, str(SUPPORT / "sysfs_server.py"), str(folder / "sys")]
    command = [*program, "serve", str(DATA / "llama-ct-g32"), "--port", "0", *FLAGS]
    with running(command, folder / "nybble.log") as log:
        url = log.wait_for(r"listening on (http://\S+)")[1]
        # An impatient client makes the first 5xx.
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 503
        log.wait_for("engine ready")
        with run_prometheus(url.removeprefix("http://"), folder) as prometheus, under_load(url):
            start_s = time.time()
            yield Live(prometheus, start_s, wait_for_data(prometheus))


class under_load:
    """Traffic from another thread until the block ends."""

    def __init__(self, url: str) -> None:
        self._traffic = Traffic(url)
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> None:
        self._done = self._pool.submit(lambda: asyncio.run(self._traffic.run(WAVE_S, self._stop.is_set)))

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._done.result(60)
        assert self._traffic.statuses[200] and self._traffic.statuses[429]


def expressions(prometheus: Prometheus) -> set[tuple[str, str]]:
    """(panel or rule, expression), variables filled in; of an alert, what it compares."""
    panels, variables = dashboard.read()
    chosen = {variable.name: choices(prometheus, variable) for variable in variables}
    found = {
        (panel.title, dashboard.fill(query.expr, values(prometheus)))
        for panel in dashboard.expand(panels, chosen)
        for query in panel.queries
    }
    for name in ("recording.yml", "alerts.yml"):
        for group in yaml.safe_load((CONFIG.parent / name).read_text())["groups"]:
            for rule in group["rules"]:
                if "record" in rule:
                    found |= {(rule["record"], rule["expr"]), (rule["record"], rule["record"])}
                else:
                    found |= {(rule["alert"], expr) for expr in promql_labels.operands(rule["expr"])}
    return found


def wait_for_data(prometheus: Prometheus) -> set[tuple[str, str]]:
    """Until all expressions but those of the listed rules have had data; what has had none.

    Once is enough: between two requests a rate may have nothing to divide by.
    """
    wait_until(lambda: bool(prometheus.label_values("nybble_gemm_calls_total", "path")))
    waiting = expressions(prometheus)

    def all_but_the_listed_have_had_data() -> bool:
        for name, expr in sorted(waiting):
            if any(map(has_number, prometheus.query(expr))):
                waiting.discard((name, expr))
        return {name for name, _ in waiting} <= set(WITHOUT_DATA)

    wait_until(all_but_the_listed_have_had_data)
    return waiting


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.5)


def test_every_query_finds_data(live: Live) -> None:
    assert {name for name, _ in live.without_data} == set(WITHOUT_DATA), live.without_data


def test_every_rule_is_evaluated(live: Live) -> None:
    wait_until(lambda: all(rule["health"] != "unknown" for rule in live.prometheus.rules()))
    rules = live.prometheus.rules()
    assert len(rules) > 20
    assert {(rule["name"], rule.get("lastError", "")) for rule in rules if rule["health"] != "ok"} == set()


def test_what_is_scraped_is_declared_with_the_values_that_the_reference_lists(live: Live) -> None:
    declared = promql_labels.declared()
    for series in live.prometheus.series('{job="nybble", __name__=~"nybble_.+|vllm:.+"}'):
        name = series.pop("__name__")
        assert set(series) == declared[name], name
        for label, value in series.items():
            listed = values_of(re.sub("_(bucket|sum|count)$", "", name.removeprefix(PREFIX)), label)
            assert not listed or value in listed, (name, label, value)


def test_the_page_has_data_in_every_panel(live: Live, tmp_path: Path) -> None:
    drawn = render(live.prometheus, live.start_s, time.time(), tmp_path / "page.png", "a test")
    assert {one.panel.title: one.missing for one in drawn if one.missing} == {}
    assert (tmp_path / "page.png").stat().st_size < 500_000
