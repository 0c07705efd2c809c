"""deploy/grafana: the dashboard's JSON, what its queries ask for, and how deploy/observe reads and draws it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import panels as dashboard
import promql_labels
import pytest
import yaml
from panels import Panel, Query, Variable

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "deploy/grafana"
PANELS, VARIABLES = dashboard.read()
QUERIES = [(panel, query) for panel in PANELS for query in panel.queries]
FILLED = {"instance": ".*", "path": ".*", "__rate_interval": "20s"}


def raw() -> Any:
    return json.loads(dashboard.DASHBOARD.read_text())


def test_the_committed_dashboard_is_what_the_code_makes() -> None:
    command = [sys.executable, str(GRAFANA / "build.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- queries ---


@pytest.mark.parametrize(("panel", "query"), QUERIES, ids=lambda value: getattr(value, "legend", ""))
def test_a_query_asks_for_what_is_exported(panel: Panel, query: Query) -> None:
    labels = promql_labels.labels_of(dashboard.fill(query.expr, FILLED), promql_labels.declared())
    assert query.name(dict.fromkeys(labels, "x")).strip(), "a legend"
    missing = [
        name for name in ("path", "phase", "pool", "reason", "instance") if f"{{{{{name}}}}}" in query.legend
    ]
    assert set(missing) <= labels, "the legend names labels that the result does not have"
    assert len(labels) == 0 or labels == {"le"} or "{{" in query.legend, (
        "series that the legend cannot tell apart"
    )


def test_every_query_is_of_the_chosen_servers() -> None:
    without = [query.expr for _, query in QUERIES if 'instance=~"$instance"' not in query.expr]
    assert not without


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_a_variable_is_filled_from_what_is_exported(variable: Variable) -> None:
    labels = promql_labels.labels_of(dashboard.fill(variable.selector, FILLED), promql_labels.declared())
    assert variable.label in labels


@pytest.mark.parametrize(
    ("expr", "complaint"),
    [
        ("nybble_gem_seconds_count", "does not declare"),
        ("rate(nybble_gemm_seconds[5m])", "does not declare"),
        ('nybble_requests_waiting{path="cpu"}', "has no label path"),
        ('nybble_gemm_calls_total{path="cuda"}', "is never 'cuda'"),
        ('nybble_dense_cache_state{state=~"refused|full"}', "is never 'full'"),
        ('nybble_http_requests_total{route!~"/readyz|/ready"}', "is never '/ready'"),
        ("sum by (phase) (nybble_gemm_bandwidth_ratio)", "has no labels"),
        (
            "histogram_quantile(0.9, sum by (path) (rate(nybble_gemm_seconds_bucket[5m])))",
            "needs the label le",
        ),
        ("nybble_kernel_selfcheck == 0 and nybble_memory_budget_bytes", "never match"),
        ("nybble_requests_waiting + on (path) nybble_gemm_bandwidth_ratio", "not both sides"),
    ],
)
def test_the_check_of_queries_sees(expr: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        promql_labels.labels_of(expr, promql_labels.declared())


# --- layout and provisioning ---


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in raw()["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [
        (x, y)
        for panel in PANELS
        for x in range(panel.x, panel.x + panel.width)
        for y in range(panel.y, panel.y + panel.height)
    ]
    assert len(set(cells)) == len(cells)
    assert all(0 <= x < dashboard.COLUMNS for x, _ in cells)


def test_every_panel_says_what_it_shows() -> None:
    assert all(panel.get("description") for panel in raw()["panels"] if panel["type"] != "row")


def test_panels_ask_the_chosen_data_source() -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert all(panel["datasource"] == chosen for panel in raw()["panels"] if panel["type"] != "row")


def test_the_data_source_is_fixed_and_knows_the_scrape_interval() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    scraping = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    assert source["uid"] == "nybble-prometheus"
    assert source["jsonData"]["timeInterval"] == scraping["global"]["scrape_interval"]


# --- how deploy/observe reads it ---


def panel(**fields: Any) -> Panel:
    return Panel(**{"kind": "timeseries", "title": "t", "x": 0, "y": 0, "width": 24, "height": 8} | fields)


def test_variables_are_filled() -> None:
    assert dashboard.fill("a[$__rate_interval] ${b}c", {"__rate_interval": "4s", "b": "x"}) == "a[4s] xc"
    with pytest.raises(ValueError, match="has the variable 'other'; known are b"):
        dashboard.fill("$other", {"b": ""})


def test_a_repeated_panel_stands_side_by_side_and_moves_what_is_below() -> None:
    repeated = panel(
        title="of $path", repeat="path", max_per_row=2, queries=(Query('x{path="$path"}[$r]', ""),)
    )
    found = dashboard.expand([repeated, panel(y=8)], {"path": ["a", "b", "c"]})
    assert [(p.title, p.x, p.y, p.width) for p in found] == [
        ("of a", 0, 0, 12),
        ("of b", 12, 0, 12),
        ("of c", 0, 8, 12),
        ("t", 0, 16, 24),
    ]
    assert found[1].queries[0].expr == 'x{path="b"}[$r]'


def test_expanded_panels_of_the_dashboard_have_no_variable_of_a_repeat_left() -> None:
    expanded = dashboard.expand(PANELS, {"path": ["cpu", "dense"]})
    assert sum(p.kind == "heatmap" for p in expanded) == 2
    assert not any("$path" in query.expr for p in expanded for query in p.queries)
