"""deploy/prometheus: what the rules ask for, what alerts tell, and that each has been tried. docs/metrics.md is current.

That they work in Prometheus is tested in test_prometheus_live.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import promql_labels
import promql_parser
import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/prometheus"
SEVERITIES = ("critical", "warning", "info")


def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def rules(name: str) -> list[dict[str, Any]]:
    return [rule for group in load(name)["groups"] for rule in group["rules"]]


RECORDING, ALERTS = rules("recording.yml"), rules("alerts.yml")
TESTS = {test["name"]: test for test in load("rules_test.yml")["tests"]}


def known() -> dict[str, frozenset[str]]:
    """What is scraped, and what the rules record of it."""
    series = promql_labels.declared()
    for rule in RECORDING:
        series[rule["record"]] = promql_labels.labels_of(rule["expr"], series)
    return series


@pytest.mark.parametrize("rule", RECORDING, ids=lambda rule: rule["record"])
def test_a_recorded_figure_is_named_by_its_labels(rule: dict[str, Any]) -> None:
    level = rule["record"].split(":")[0].split("_")
    assert set(level) <= promql_labels.labels_of(rule["expr"], known())


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
class TestAlert:
    def test_asks_for_what_is_exported(self, alert: dict[str, Any]) -> None:
        labels = promql_labels.labels_of(alert["expr"], known())
        assert "instance" in labels or is_of_absence(alert), "whose it is"
        texts = " ".join(alert["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", texts)) <= labels

    def test_says_what_is_wrong_and_what_to_do(self, alert: dict[str, Any]) -> None:
        notes = alert["annotations"]
        assert set(notes) == {"summary", "description", "runbook"}
        assert ("$labels.instance" in notes["summary"]) != is_of_absence(alert)
        assert len(notes["summary"]) < 120
        assert len(notes["description"]) > 60
        assert alert["labels"]["severity"] in SEVERITIES

    def test_names_a_section_of_the_operations_guide(self, alert: dict[str, Any]) -> None:
        page, _, anchor = alert["annotations"]["runbook"].partition("#")
        assert page == "docs/operations.md"
        assert anchor in anchors(ROOT / page)

    def test_has_been_tried_with_a_sick_and_a_well_server(self, alert: dict[str, Any]) -> None:
        test = TESTS[alert["alert"]]
        firing = [
            e["exp_samples"]
            for e in test["promql_expr_test"]
            if f'alertname="{alert["alert"]}", alertstate="firing"' in e["expr"]
        ]
        if is_of_absence(alert):
            assert sorted(map(len, firing)) == [0, 1]
            return
        given = {name: {metric_of(i["series"]) for i in test["input_series"] if f'"{name}"' in i["series"]}
                 for name in ("sick", "well")}  # fmt: skip
        assert given["sick"] == given["well"] != set()
        samples = [sample["labels"] for expected in firing for sample in expected]
        assert samples and all('instance="sick"' in labels for labels in samples)


def is_of_absence(alert: dict[str, Any]) -> bool:
    """Of no server: that there is none."""
    return str(alert["expr"]).startswith("absent(")


def metric_of(series: str) -> str:
    return str(promql_parser.parse(series).name)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_each_alert_has_a_name_of_its_own() -> None:
    names = [alert["alert"] for alert in ALERTS]
    assert len(set(names)) == len(names)


def test_every_failure_that_is_counted_has_an_alert() -> None:
    asked = " ".join(alert["expr"] for alert in ALERTS)
    for name in ("engine_restarts", "nonfinite", "out_of_memory", "graph_fallbacks", "rejected"):
        assert f"nybble_{name}_total" in asked


def test_the_reference_of_metrics_is_current() -> None:
    command = [sys.executable, str(ROOT / "deploy/observe/reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
