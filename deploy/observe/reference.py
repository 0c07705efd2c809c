"""docs/metrics.md from service/metrics.py: python deploy/observe/reference.py writes it.

With --check nothing is written; the exit code is 1 where the page is not what this makes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from nybble.kernels.linear.int8 import Int8Linear
from nybble.kernels.linear.route import PATHS
from nybble.service.api.errors import REJECTIONS
from nybble.service.engine.protocol import FINISH_REASONS, GRAPH_FALLBACKS
from nybble.service.metrics import DENSE_STATES, METRICS, PREFIX, Alias, Metric

PAGE = Path(__file__).parents[2] / "docs/metrics.md"

# Each section begins with a metric and goes on to the next one.
SECTIONS = {
    "gemm_seconds": "GEMM paths",
    "memory_bytes": "Memory",
    "requests_started_total": "Requests",
    "prompt_tokens_total": "Tokens",
    "queue_seconds": "Latencies",
    "engine_steps_total": "Engine and HTTP",
}
UNITS = {"seconds": "s", "bytes": "bytes", "ratio": "0 to 1", "tokens": "tokens"}
# Labels with few values, all of which are known. "metric.label" where a label means different things.
VALUES: dict[str, tuple[str, ...]] = {
    "path": (*PATHS, Int8Linear.path),
    "phase": ("prefill", "decode"),
    "state": DENSE_STATES,
    "pool": ("weights", "workspace", "dense_copies", "kv_cache"),
    "finish_reason": FINISH_REASONS,
    "rejected_total.reason": tuple(sorted(set(REJECTIONS.values()))),
    "graph_fallbacks_total.reason": GRAPH_FALLBACKS,
    "kernel_selfcheck.path": (*PATHS, "attention"),
}
OTHER_LABELS = {
    "kernel": "the kernel's name, such as skinny_w4a16",
    "route": "the route as it is declared, such as /v1/completions; other for what has none",
    "status": "the HTTP status; 499 for a client that left",
}
HEAD = """\
# Metrics

Made from [service/metrics.py](../service/metrics.py) by `python deploy/observe/reference.py`.

`GET /metrics` has them in Prometheus's text format. A histogram has the series `_bucket` (with the label `le`), `_sum` and `_count`. All figures of a
scrape are of one moment: `nybble_requests_started_total` is the sum of `nybble_requests_total`, `nybble_requests_running` and `nybble_requests_waiting`.
The memory plan, the self-check and the bandwidth ratio are there while an engine is ready, so that their absence tells that none is; a series with
a label that only events name (`nybble_http_requests_total`, `nybble_jit_*`) is there from the first of them on, GTT and VRAM where the amdgpu
driver tells them. Counters go on when the engine is restarted, and begin at 0 when the server is.

How to read them: [operations.md](operations.md); queries in use: [recording rules](../deploy/prometheus/recording.yml),
[alerts](../deploy/prometheus/alerts.yml), [dashboard](../deploy/grafana/build.py).
"""


def values_of(metric: str, label: str) -> tuple[str, ...]:
    """All that a label can hold; empty where no list of it exists."""
    return VALUES.get(f"{metric}.{label}", VALUES.get(label, ()))


def unit(metric: Metric) -> str:
    words = metric.name.removesuffix("_total").split("_")
    if metric.name == "gemm_bandwidth_ratio":
        return "ratio"
    return UNITS.get(words[-1], "")


def page() -> str:
    return "\n".join([HEAD, *_metrics(), *_labels(), *_buckets(), *_aliases()])


def _metrics() -> Iterator[str]:
    for metric in METRICS:
        if metric.name in SECTIONS:
            yield f"## {SECTIONS[metric.name]}\n\n| name | type | unit | labels | meaning |\n|---|---|---|---|---|"
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        alias = f" Also `{_names(metric.aliases)}`." if metric.aliases else ""
        yield (
            f"| `{PREFIX}{metric.name}` | {metric.kind} | {unit(metric)} | {labels} | {metric.help}{alias} |"
            + ("\n" if _is_last_of_section(metric) else "")
        )


def _is_last_of_section(metric: Metric) -> bool:
    after = METRICS.index(metric) + 1
    return after == len(METRICS) or METRICS[after].name in SECTIONS


def _names(aliases: tuple[Alias, ...]) -> str:
    return "`, `".join(alias.name for alias in aliases)


def _labels() -> Iterator[str]:
    yield "## Labels\n\n| label | of | values |\n|---|---|---|"
    seen: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for metric in METRICS:
        for label in metric.labels:
            seen.setdefault((label, values_of(metric.name, label)), []).append(f"`{PREFIX}{metric.name}`")
    for (label, values), names in sorted(seen.items()):
        text = ", ".join(f"`{value}`" for value in values) or OTHER_LABELS[label]
        yield f"| `{label}` | {', '.join(names)} | {text} |"
    yield ""


def _buckets() -> Iterator[str]:
    yield "## Buckets\n\nUpper bounds in seconds; each histogram has one more, `+Inf`.\n\n| histogram | `le` |\n|---|---|"
    grouped: dict[tuple[float, ...], list[str]] = {}
    for metric in METRICS:
        if metric.kind == "histogram":
            grouped.setdefault(metric.buckets, []).append(f"`{PREFIX}{metric.name}`")
    for buckets, names in grouped.items():
        yield f"| {', '.join(names)} | {', '.join(f'{bound:g}' for bound in buckets)} |"
    yield ""


def _aliases() -> Iterator[str]:
    yield (
        "## Aliases\n\nThe same values under the names that dashboards and routers made for vLLM read. They have the label `model_name` "
        "besides.\n\n| alias | is | labels |\n|---|---|---|"
    )
    for metric in METRICS:
        for alias in metric.aliases:
            pairs = zip(metric.labels, alias.labels, strict=True)
            labels = ", ".join(f"`{new}` (our `{old}`)" for old, new in pairs)
            yield f"| `{alias.name}` | `{PREFIX}{metric.name}` | {labels} |"
    yield ""


def main() -> int:
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(
        f"docs/{PAGE.name} is not what service/metrics.py says: run python {Path(__file__).name}",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
