"""The dashboard as code: python deploy/grafana/build.py writes dashboards/nybble.json beside this file.

With --check nothing is written; the exit code is 1 where the file is not what this code makes. Grafana's own builders
know the fields of every panel, so that a wrong one is an error here and not an empty panel there.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as dashboard_models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

OUTPUT = Path(__file__).parent / "dashboards/nybble.json"
DATASOURCE = dashboard_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
# Grafana's grid has 24 columns; a row of it is about 38 pixels high.
STAT, PANEL, WIDE = (3, 4), (8, 8), (12, 8)
QUANTILES = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
TOKENS_PER_S, REQUESTS_PER_S = "suffix: tok/s", "reqps"
RED, GREEN, ORANGE = "red", "green", "orange"


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str


def of(metric: str, **labels: str) -> str:
    """A selector of the instances that the dashboard shows."""
    matchers = ['instance=~"$instance"', *(f'{name}="{value}"' for name, value in labels.items())]
    return f"nybble_{metric}{{{', '.join(matchers)}}}"


def rate(metric: str, **labels: str) -> str:
    return f"rate({of(metric, **labels)}[$__rate_interval])"


def quantiles(metric: str, by: str = "", chosen: tuple[tuple[float, str], ...] = QUANTILES) -> list[Query]:
    """by: labels to keep apart, such as "path, phase"."""
    kept = [name.strip() for name in by.split(",") if name.strip()]
    legend = " ".join(f"{{{{{name}}}}}" for name in kept)
    inner = f"sum by ({', '.join(['le', *kept])}) ({rate(metric + '_bucket')})"
    return [Query(f"histogram_quantile({q}, {inner})", f"{legend} {name}".strip()) for q, name in chosen]


def target(query: Query, ref: int) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .ref_id(chr(ord("A") + ref))
        .expr(query.expr)
        .legend_format(query.legend)
        .range()
    )


def steps(*pairs: tuple[float | None, str]) -> dashboard.ThresholdsConfig:
    made = [dashboard_models.Threshold(value=value, color=color) for value, color in pairs]
    return dashboard.ThresholdsConfig().mode(dashboard_models.ThresholdsMode.ABSOLUTE).steps(made)


def figure(
    title: str, expr: str, unit: str, what: str, bad: tuple[tuple[float, str], ...] = (), no_value: str = ""
) -> stat.Panel:
    """The latest value of a query in large digits, over its course."""
    width, height = STAT
    panel = (
        stat.Panel()
        .title(title)
        .description(what)
        .datasource(DATASOURCE)
        .span(width)
        .height(height)
        .unit(unit)
        .graph_mode(common_models.BigValueGraphMode.AREA)
        .color_mode(common_models.BigValueColorMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(steps((None, GREEN), *bad))
        .with_target(target(Query(expr, title), 0))
    )
    return panel.no_value(no_value) if no_value else panel


def lines(
    title: str, queries: list[Query], unit: str, what: str, size: tuple[int, int] = PANEL
) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .title(title)
        .description(what)
        .datasource(DATASOURCE)
        .span(size[0])
        .height(size[1])
        .unit(unit)
        .min(0)
        .line_width(1)
        .fill_opacity(8)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
        )
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    )
    for index, query in enumerate(queries):
        panel = panel.with_target(target(query, index))
    return panel


def stacked(
    panel: timeseries.Panel, mode: common_models.StackingMode = common_models.StackingMode.NORMAL
) -> timeseries.Panel:
    return panel.stacking(common.StackingConfig().mode(mode).group("A")).fill_opacity(40)


def limit_line(panel: timeseries.Panel, series: str) -> timeseries.Panel:
    """Draws one series of a stack as what the stack must stay below."""
    plain = [
        dashboard_models.DynamicConfigValue("custom.stacking", {"mode": "none"}),
        dashboard_models.DynamicConfigValue("custom.fillOpacity", 0),
        dashboard_models.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [10, 10]}),
    ]
    return panel.override_by_name(series, plain)


def path_heat_map() -> heatmap.Panel:
    """Once for every path that $path names."""
    query = Query(
        f"sum by (le) (increase({of('gemm_seconds_bucket', path='$path')}[$__rate_interval]))", "{{le}}"
    )
    return (
        heatmap.Panel()
        .title("Time of sampled GEMM calls: $path")
        .description("How many of the sampled calls of a path took how long, decode and prefill together.")
        .datasource(DATASOURCE)
        .span(24)
        .height(8)
        .repeat("path")
        .repeat_direction("h")
        .max_per_row(4)
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit("s"))
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_models.HeatmapColorMode.SCHEME)
            .scheme("Viridis")
            .steps(64)
        )
        .with_target(target(query, 0).format(prometheus_models.PromQueryFormat.HEATMAP))
    )


def now() -> list[stat.Panel]:
    return [
        figure("Engines ready", f"count({of('memory_budget_bytes')})", "none", "Servers whose engine has loaded its "
               "model.", no_value="0"),
        figure("Running", f"sum({of('requests_running')})", "none", "Requests that are being computed."),
        figure("Waiting", f"sum({of('requests_waiting')})", "none", "Requests in the engines' queues.",
               ((1, ORANGE),)),
        figure("Generated", f"sum({rate('generation_tokens_total')})", TOKENS_PER_S, "Tokens of answers."),
        figure("First token, p90", quantiles("time_to_first_token_seconds")[1].expr, "s", "From a request's arrival, "
               "the queue included.", ((5, ORANGE), (20, RED))),
        figure("Between tokens, p90", quantiles("inter_token_latency_seconds")[1].expr, "s", "Between two tokens of a "
               "request.", ((0.2, ORANGE), (0.5, RED))),
        figure("KV cache in use", f"max({of('kv_cache_usage_ratio')})", "percentunit", "Of the fullest server; blocks "
               "that only serve as cached prefixes do not count.", ((0.9, ORANGE), (0.95, RED))),
        figure("Engine restarts", f"sum({of('engine_restarts_total')})", "none", "Since the servers started.",
               ((1, RED),)),
    ]  # fmt: skip


def requests() -> list[timeseries.Panel]:
    # Reasons that there have been, of all that there are.
    rejected = Query(
        f"sum by (reason) ({rate('rejected_total')}) and sum by (reason) ({of('rejected_total')}) > 0",
        "rejected: {{reason}}",
    )
    failed = Query(f"sum({rate('requests_total', finish_reason='error')})", "failed in the engine")
    return [
        lines("Time to the first token", quantiles("time_to_first_token_seconds"), "s",
              "From a request's arrival to its first token, the queue included."),
        lines("Time between tokens", quantiles("inter_token_latency_seconds"), "s",
              "Between two tokens of a request, as they leave the engine."),
        lines("Time of whole requests", quantiles("e2e_request_latency_seconds"), "s",
              "From arrival to the last token, of requests that ended with stop or length."),
        lines("Tokens", [
            Query(f"sum({rate('generation_tokens_total')})", "generated"),
            Query(f"sum({rate('prompt_tokens_total')})", "prompt"),
            Query(f"sum({rate('cached_prompt_tokens_total')})", "prompt, from the cache"),
        ], TOKENS_PER_S, "Generated tokens, prompt tokens, and those of them that needed no computing."),
        lines("Requests in the engine", [
            Query(f"sum({of('requests_running')})", "running"),
            Query(f"sum({of('requests_waiting')})", "waiting"),
        ], "none", "Requests being computed and requests in the queue."),
        lines("Time in the queue", quantiles("queue_seconds"), "s",
              "From a request's arrival to its first step."),
        lines("Requests that ended", [
            Query(f"sum by (finish_reason) ({rate('requests_total')})", "{{finish_reason}}"),
        ], REQUESTS_PER_S, "Requests that ended, by reason.", WIDE),
        lines("Errors and rejections", [rejected, failed], REQUESTS_PER_S,
              "Requests that were turned away, by reason, and those that the engine gave up.", WIDE),
    ]  # fmt: skip


def gemm() -> list[timeseries.Panel]:
    calls = f"sum by (path) ({rate('gemm_calls_total')})"
    mean = f"{rate('gemm_seconds_sum')} / ({rate('gemm_seconds_count')} > 0)"
    share = lines("Share of GEMM calls by path", [Query(calls, "{{path}}")], "none",
                  "Which path the calls take. It follows from the number of rows: GET /v1/kernels has the table.",
                  WIDE)  # fmt: skip
    return [
        lines("GEMM time by path and phase", quantiles("gemm_seconds", "path, phase", (QUANTILES[0], QUANTILES[2])), "s",
              "Of the sampled calls.", WIDE),
        stacked(share, common_models.StackingMode.PERCENT),
        stacked(lines("GEMM seconds in a second", [
            Query(f"sum by (path, phase) ({rate('gemm_calls_total')} * ({mean}))", "{{path}} {{phase}}"),
        ], "s", "All calls times the mean of the sampled ones: what a path costs.", WIDE)),
        lines("Bandwidth ratio by path", [
            Query(f"avg by (path) ({of('gemm_bandwidth_ratio')})", "{{path}}"),
        ], "percentunit", "Bytes that the latest sampled calls had to move, by their time and the copy rate measured at "
            "start. More than 100 % comes out of a cache.", WIDE),
    ]  # fmt: skip


def memory() -> list[timeseries.Panel]:
    pools = stacked(lines("Memory plan by pool", [
        Query(f"sum by (pool) ({of('memory_bytes')})", "{{pool}}"),
        Query(f"sum({of('memory_budget_bytes')})", "budget"),
    ], "bytes", "What the plan gives to each pool, below the budget that it may use."))  # fmt: skip
    return [
        limit_line(pools, "budget"),
        lines("The machine's own figures", [
            Query(f"sum({of('host_available_bytes')})", "host available"),
            Query(f"sum({of('gtt_used_bytes')})", "GTT used"),
            Query(f"sum({of('gtt_total_bytes')})", "GTT total"),
            Query(f"sum({of('vram_used_bytes')})", "VRAM used"),
            Query(f"sum({of('vram_total_bytes')})", "VRAM total"),
        ], "bytes", "The host's MemAvailable, and what the amdgpu driver says: GTT is host memory that the GPU maps."),
        lines("Dense copies", [
            Query(f"sum({of('dense_cache_budget_bytes')})", "budget"),
            Query(f"sum({of('dense_cache_required_bytes')})", "required"),
            Query(f"sum({of('dense_cache_used_bytes')})", "used"),
        ], "bytes", "16-bit copies of the int4 layers: the room for them, what all would take, what they take."),
        lines("KV cache in use", [
            Query(f"max by (instance) ({of('kv_cache_usage_ratio')})", "{{instance}}"),
        ], "percentunit", "Part of the KV blocks in use.").max(1),
        lines("Preemptions", [
            Query(f"sum by (instance) ({rate('preemptions_total')})", "{{instance}}"),
        ], "ops", "Running requests that made way for another one, or for lack of KV blocks, and are computed again."),
        lines("Prefix cache hits", [
            Query(f"sum({rate('prefix_cache_hits_tokens_total')}) / sum({rate('prefix_cache_queries_tokens_total')})",
                  "of prompt tokens"),
        ], "percentunit", "Part of the prompt tokens that were found in the prefix cache.").max(1),
    ]  # fmt: skip


def engine() -> list[timeseries.Panel]:
    return [
        lines("Restarts and faults", [
            Query(f"sum({of('engine_restarts_total')})", "engine restarts"),
            Query(f"sum({of('nonfinite_total')})", "logits not finite"),
            Query(f"sum({of('out_of_memory_total')})", "steps without memory"),
            Query(f"sum({of('graph_fallbacks_total')})", "graph fallbacks"),
        ], "none", "Since the servers started."),
        lines("Self-check by path", [
            Query(f"min by (path) ({of('kernel_selfcheck')})", "{{path}}"),
        ], "none", "1: the path computed the reference's numbers at start; 0: it did not and is not used.").max(1),
        lines("Engine steps", [
            Query(f"sum({rate('engine_steps_total')})", "steps"),
        ], "ops", "Steps of the engine: each gives a token to every running request."),
    ]  # fmt: skip


def query_variable(name: str, label: str, metric: str) -> dashboard.QueryVariable:
    everything = dashboard_models.VariableOption(selected=True, text=["All"], value=["$__all"])
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(f"label_values({metric}, {name})")
        .refresh(dashboard_models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard_models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(everything)
    )


def build() -> dashboard_models.Dashboard:
    made = (
        dashboard.Dashboard("Nybble")
        .uid("nybble")
        .description("What a Nybble server does, what each GEMM path costs and how the memory is spent.")
        .tags(["nybble", "inference"])
        .timezone("browser")
        .refresh("10s")
        .time("now-30m", "now")
        .tooltip(dashboard_models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(query_variable("instance", "Server", "nybble_requests_running"))
        .with_variable(query_variable("path", "GEMM path", 'nybble_gemm_calls_total{instance=~"$instance"}'))
    )
    sections: dict[str, Sequence[Any]] = {
        "Now": now(),
        "Requests": requests(),
        "GEMM paths": [path_heat_map(), *gemm()],
        "Memory": memory(),
        "Engine": engine(),
    }
    # Links to a panel hold its id.
    ids = itertools.count(1)
    for title, panels in sections.items():
        made = made.with_row(dashboard.Row(title).id(next(ids)))
        for panel in panels:
            made = made.with_panel(panel.id(next(ids)))
    return made.build()


def main() -> int:
    text = JSONEncoder(sort_keys=True, indent=2).encode(build()) + "\n"
    if "--check" not in sys.argv[1:]:
        OUTPUT.parent.mkdir(exist_ok=True)
        OUTPUT.write_text(text, encoding="utf-8")
        return 0
    if OUTPUT.is_file() and OUTPUT.read_text(encoding="utf-8") == text:
        return 0
    print(
        f"{OUTPUT.name} is not what {Path(__file__).name} makes: run python {Path(__file__).name}",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
