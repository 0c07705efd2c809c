"""Every metric, declared once; what is counted here and what is read from the engine's last snapshot.

A row with `read` is taken from a Snapshot at scrape time, all of them from the same one, so that their relations
(started = finished + running + waiting) hold in every scrape. A row without is observed as things happen. Aliases
are names that existing dashboards and routers read; they carry the same values and a model_name label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import prometheus_client
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from nybble.service.engine.protocol import (
    FINISH_REASONS,
    GRAPH_FALLBACKS,
    EngineInfo,
    EngineStats,
    KernelReport,
    MemoryReport,
)
from nybble.service.memory import GpuMemory

# 10 microseconds to 82 ms: a GEMM call of any path.
GEMM_BUCKETS_S = tuple(1e-5 * 2**i for i in range(14))
# 1 ms to 20 min: whole requests, the queue and the first token.
REQUEST_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0),
    *(60.0, 120.0, 300.0, 600.0, 1200.0),
)
# 1 ms to 60 s: one token.
TOKEN_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0),
    *(2.5, 10.0, 60.0),
)
DENSE_STATES = ("disabled", "enabled", "refused")


@dataclass(frozen=True)
class Snapshot:
    """What is true at one moment. info is None while no engine is ready."""

    stats: EngineStats
    info: EngineInfo | None
    engine_restarts: int
    host_available_bytes: int | None
    gpu_memory: GpuMemory | None = None
    # (layer, path) -> seconds and M of its latest sampled GEMM call
    gemm_latest: Mapping[tuple[str, str], tuple[float, int]] = field(default_factory=dict)


Samples = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True)
class Alias:
    """The same values under another name; labels renames the metric's own labels, in order."""

    name: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Metric:
    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    read: Callable[[Snapshot], Samples] | None = None
    buckets: tuple[float, ...] = ()
    aliases: tuple[Alias, ...] = ()


def _one(value: Callable[[Snapshot], float | None]) -> Callable[[Snapshot], Samples]:
    """A metric without labels; None leaves it out."""

    def read(snapshot: Snapshot) -> Samples:
        found = value(snapshot)
        return [] if found is None else [((), found)]

    return read


def _memory(value: Callable[[MemoryReport], float]) -> Callable[[Snapshot], Samples]:
    return _one(lambda snapshot: None if snapshot.info is None else value(snapshot.info.memory))


def _gpu(name: str) -> Callable[[Snapshot], Samples]:
    return _one(lambda snapshot: None if snapshot.gpu_memory is None else getattr(snapshot.gpu_memory, name))


def _bandwidth(snapshot: Snapshot) -> Samples:
    """Bytes that the latest sampled calls of a path had to move, over their time and the measured copy rate."""
    info = snapshot.info
    if info is None or not info.copy_bytes_per_s:
        return []
    # Kinds of layers may come in several shapes; the call that was sampled says no more than its kind.
    reports = {report.layer: report for report in info.kernels}
    totals: dict[str, tuple[float, float]] = {}
    for (layer, path), (seconds, m) in snapshot.gemm_latest.items():
        if layer in reports and seconds > 0:
            nbytes, before_s = totals.get(path, (0.0, 0.0))
            totals[path] = nbytes + _gemm_bytes(reports[layer], path, m), before_s + seconds
    return [((path,), nbytes / seconds / info.copy_bytes_per_s) for path, (nbytes, seconds) in totals.items()]


def _gemm_bytes(report: KernelReport, path: str, m: int) -> float:
    """Weights, x and y once each; 16-bit activations."""
    weights = 2 * report.n * report.k if path == "dense" else report.nbytes / report.count
    return weights + 2 * m * (report.n + report.k)


def _finished(snapshot: Snapshot) -> Samples:
    # All reasons are there from the start, so that a rate over them has no gaps.
    reasons = dict.fromkeys(FINISH_REASONS, 0) | snapshot.stats.finished
    return [((reason,), count) for reason, count in reasons.items()]


def _gemm_calls(snapshot: Snapshot) -> Samples:
    return snapshot.stats.gemm_calls.items()


def _jit_compiles(snapshot: Snapshot) -> Samples:
    return [((kernel,), count) for kernel, count in snapshot.stats.jit_compiles.items()]


def _jit_cache_hits(snapshot: Snapshot) -> Samples:
    return [((kernel,), count) for kernel, count in snapshot.stats.jit_cache_hits.items()]


def _graph_fallbacks(snapshot: Snapshot) -> Samples:
    reasons = dict.fromkeys(GRAPH_FALLBACKS, 0) | snapshot.stats.graph_fallbacks
    return [((reason,), count) for reason, count in reasons.items()]


def _pools(snapshot: Snapshot) -> Samples:
    pools = {} if snapshot.info is None else snapshot.info.memory.pools
    return [((pool,), nbytes) for pool, nbytes in pools.items()]


def _dense_state(snapshot: Snapshot) -> Samples:
    if snapshot.info is None:
        return []
    return [((state,), float(state == snapshot.info.memory.dense_state)) for state in DENSE_STATES]


def _selfcheck(snapshot: Snapshot) -> Samples:
    checks = {} if snapshot.info is None else snapshot.info.selfcheck
    return [((path,), float(passed)) for path, passed in checks.items()]


# fmt: off
METRICS: tuple[Metric, ...] = (
    # GEMM paths
    Metric("gemm_seconds", "histogram", "Time of a sampled GEMM call, by path and phase.", ("path", "phase"),
           buckets=GEMM_BUCKETS_S),
    Metric("gemm_calls_total", "counter", "GEMM calls, by path and phase.", ("path", "phase"), _gemm_calls),
    Metric("gemm_sampled_calls_total", "counter", "GEMM calls whose time was sampled.", ("path", "phase")),
    Metric("gemm_bandwidth_ratio", "gauge",
           "Bytes per second of the path's latest sampled calls over the device's measured copy rate.", ("path",),
           _bandwidth),
    Metric("graph_fallbacks_total", "counter", "Numbers of rows, of decode, prompts and both, that run without a captured graph, by reason.",
           ("reason",), _graph_fallbacks),
    Metric("kernel_selfcheck", "gauge", "1 if the GEMM path passed its self-check at start, 0 if not.", ("path",),
           _selfcheck),
    Metric("jit_compiles_total", "counter", "Kernels compiled at run time, by kernel.", ("kernel",), _jit_compiles),
    Metric("jit_compile_seconds_total", "counter", "Time that compiling kernels at run time took, summed over threads.",
           read=_one(lambda snapshot: snapshot.stats.jit_compile_seconds)),
    Metric("jit_cache_hits_total", "counter", "Kernels found compiled in a cache on disk, by kernel.", ("kernel",),
           _jit_cache_hits),
    # memory
    Metric("memory_bytes", "gauge", "Bytes planned for each pool of memory.", ("pool",), _pools),
    Metric("memory_budget_bytes", "gauge", "Bytes that the memory plan may use.",
           read=_memory(lambda memory: memory.budget_bytes)),
    Metric("dense_cache_budget_bytes", "gauge", "Bytes that dense copies of weights may take.",
           read=_memory(lambda memory: memory.dense_budget_bytes)),
    Metric("dense_cache_required_bytes", "gauge", "Bytes that dense copies of all weights would take.",
           read=_memory(lambda memory: memory.dense_required_bytes)),
    Metric("dense_cache_used_bytes", "gauge", "Bytes that dense copies of weights take.",
           read=_memory(lambda memory: memory.pools.get("dense_copies", 0))),
    Metric("dense_cache_layers", "gauge", "Layers that have a dense copy.",
           read=_memory(lambda memory: memory.dense_layers)),
    Metric("dense_cache_build_seconds", "gauge", "Time that building the dense copies took.",
           read=_memory(lambda memory: memory.dense_build_seconds)),
    Metric("dense_cache_state", "gauge", "1 for the present state of the dense copies.", ("state",), _dense_state),
    Metric("host_available_bytes", "gauge", "The host's MemAvailable.",
           read=_one(lambda snapshot: snapshot.host_available_bytes)),
    Metric("gtt_used_bytes", "gauge", "Host memory that the GPU has mapped (GTT).", read=_gpu("gtt_used_bytes")),
    Metric("gtt_total_bytes", "gauge", "Host memory that the GPU may map (GTT).", read=_gpu("gtt_total_bytes")),
    Metric("vram_used_bytes", "gauge", "The GPU's own memory in use.", read=_gpu("vram_used_bytes")),
    Metric("vram_total_bytes", "gauge", "The GPU's own memory.", read=_gpu("vram_total_bytes")),
    Metric("kv_cache_usage_ratio", "gauge", "Part of the KV cache blocks in use, 0 to 1.",
           read=_one(lambda snapshot: snapshot.stats.kv_usage_ratio), aliases=(Alias("vllm:kv_cache_usage_perc"),)),
    # requests
    Metric("requests_started_total", "counter", "Requests that the engine has accepted.",
           read=_one(lambda snapshot: snapshot.stats.started)),
    Metric("requests_total", "counter", "Requests that have ended, by reason.", ("finish_reason",), _finished,
           aliases=(Alias("vllm:request_success_total", ("finished_reason",)),)),
    Metric("requests_running", "gauge", "Requests that are being computed.",
           read=_one(lambda snapshot: snapshot.stats.running), aliases=(Alias("vllm:num_requests_running"),)),
    Metric("requests_waiting", "gauge", "Requests in the engine's queue.",
           read=_one(lambda snapshot: snapshot.stats.waiting), aliases=(Alias("vllm:num_requests_waiting"),)),
    Metric("rejected_total", "counter", "Requests turned away, or given up at their time limit, by reason.", ("reason",)),
    Metric("preemptions_total", "counter", "Times a running request made way for another one, or for lack of KV blocks.",
           read=_one(lambda snapshot: snapshot.stats.preemptions)),
    Metric("nonfinite_total", "counter", "Steps of a request whose logits were not finite.",
           read=_one(lambda snapshot: snapshot.stats.nonfinite)),
    Metric("out_of_memory_total", "counter", "Steps that the device had no memory for; the youngest request made room.",
           read=_one(lambda snapshot: snapshot.stats.out_of_memory)),
    # tokens
    Metric("prompt_tokens_total", "counter", "Prompt tokens of all requests.",
           read=_one(lambda snapshot: snapshot.stats.prompt_tokens), aliases=(Alias("vllm:prompt_tokens_total"),)),
    Metric("generation_tokens_total", "counter", "Generated tokens.",
           read=_one(lambda snapshot: snapshot.stats.generation_tokens),
           aliases=(Alias("vllm:generation_tokens_total"),)),
    Metric("cached_prompt_tokens_total", "counter", "Prompt tokens that needed no computing.",
           read=_one(lambda snapshot: snapshot.stats.cached_prompt_tokens)),
    Metric("prefix_cache_queries_tokens_total", "counter", "Prompt tokens looked up in the prefix cache.",
           read=_one(lambda snapshot: snapshot.stats.prefix_queries_tokens),
           aliases=(Alias("vllm:prefix_cache_queries_total"),)),
    Metric("prefix_cache_hits_tokens_total", "counter", "Prompt tokens found in the prefix cache.",
           read=_one(lambda snapshot: snapshot.stats.cached_prompt_tokens),
           aliases=(Alias("vllm:prefix_cache_hits_total"),)),
    Metric("spec_draft_tokens_total", "counter", "Tokens drafted by speculation.",
           read=_one(lambda snapshot: snapshot.stats.spec_draft_tokens)),
    Metric("spec_accepted_tokens_total", "counter", "Drafted tokens that were kept.",
           read=_one(lambda snapshot: snapshot.stats.spec_accepted_tokens)),
    # latencies
    Metric("queue_seconds", "histogram", "From a request's arrival to its first step.", buckets=REQUEST_BUCKETS_S),
    Metric("time_to_first_token_seconds", "histogram", "From a request's arrival to its first token.",
           buckets=REQUEST_BUCKETS_S, aliases=(Alias("vllm:time_to_first_token_seconds"),)),
    Metric("inter_token_latency_seconds", "histogram", "Between two tokens of a request.", buckets=TOKEN_BUCKETS_S,
           aliases=(Alias("vllm:inter_token_latency_seconds"),)),
    Metric("time_per_output_token_seconds", "histogram", "A request's mean time per token after its first.",
           buckets=TOKEN_BUCKETS_S),
    Metric("e2e_request_latency_seconds", "histogram", "From a request's arrival to its end (stop or length).",
           buckets=REQUEST_BUCKETS_S, aliases=(Alias("vllm:e2e_request_latency_seconds"),)),
    # engine and HTTP
    Metric("engine_steps_total", "counter", "Steps of the engine.", read=_one(lambda snapshot: snapshot.stats.steps)),
    Metric("engine_steps_ahead_total", "counter", "Steps that were launched before the last one's tokens had arrived.",
           read=_one(lambda snapshot: snapshot.stats.steps_ahead)),
    Metric("engine_step_overhead_seconds_total", "counter", "Time in engine steps outside the model's forward.",
           read=_one(lambda snapshot: snapshot.stats.step_overhead_seconds)),
    Metric("engine_restarts_total", "counter", "Times the engine process was started again after it died.",
           read=_one(lambda snapshot: snapshot.engine_restarts)),
    Metric("http_requests_total", "counter", "HTTP responses, by route and status.", ("route", "status")),
)
# fmt: on

PREFIX = "nybble_"
_OBSERVED: dict[str, type] = {
    "histogram": prometheus_client.Histogram,
    "counter": prometheus_client.Counter,
    "gauge": prometheus_client.Gauge,
}


@dataclass
class Metrics:
    """The metrics of one app, in a registry of its own. Implements client.Observer.

    reasons: of rejections. Their series are there from the start: a rate does not see a series begin above 0.
    """

    model_name: str
    snapshot: Callable[[], Snapshot]
    aliases: bool = True
    reasons: Iterable[str] = ()
    registry: prometheus_client.CollectorRegistry = field(
        default_factory=lambda: prometheus_client.CollectorRegistry(auto_describe=False)
    )

    def __post_init__(self) -> None:
        # The *_created series double every histogram and counter and nothing here uses them.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._observed: dict[str, Any] = {m.name: _observed(m) for m in METRICS if m.read is None}
        self._children: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._queue = self._observed["queue_seconds"]
        self._first_token = self._observed["time_to_first_token_seconds"]
        self._next_token = self._observed["inter_token_latency_seconds"]
        self._per_token = self._observed["time_per_output_token_seconds"]
        self._e2e = self._observed["e2e_request_latency_seconds"]
        for reason in self.reasons:
            self._child("rejected_total", (reason,))
        self.registry.register(_Families(self))

    def render(self) -> bytes:
        """The text exposition format, version 0.0.4."""
        return prometheus_client.generate_latest(self.registry)

    def queued(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        for _ in range(count):
            self._next_token.observe(seconds / count)

    def finished(self, seconds: float, per_token_seconds: float | None) -> None:
        self._e2e.observe(seconds)
        if per_token_seconds is not None:
            self._per_token.observe(per_token_seconds)

    def gemm(self, samples: dict[tuple[str, str], tuple[float, ...]]) -> None:
        for labels, seconds in samples.items():
            histogram = self._child("gemm_seconds", labels)
            for value in seconds:
                histogram.observe(value)
            self._child("gemm_sampled_calls_total", labels).inc(len(seconds))

    def rejected(self, reason: str) -> None:
        self._child("rejected_total", (reason,)).inc()

    def http(self, route: str, status: int) -> None:
        self._child("http_requests_total", (route, str(status))).inc()

    def families(self) -> Iterator[Family]:
        """All metrics of one moment, aliases after the metric they repeat."""
        snapshot = self.snapshot()
        for metric in METRICS:
            family = self._read(metric, snapshot) if metric.read is not None else self._collect(metric)
            yield family
            for alias in metric.aliases if self.aliases else ():
                yield self._alias(metric, alias, family)

    def _child(self, name: str, labels: tuple[str, ...]) -> Any:
        child = self._children.get((name, labels))
        if child is None:
            child = self._children[name, labels] = self._observed[name].labels(*labels)
        return child

    def _read(self, metric: Metric, snapshot: Snapshot) -> Family:
        assert metric.read is not None
        family = Family(_family_name(PREFIX + metric.name, metric.kind), metric.help, metric.kind)
        for values, number in metric.read(snapshot):
            family.add_sample(PREFIX + metric.name, dict(zip(metric.labels, values, strict=True)), number)
        return family

    def _collect(self, metric: Metric) -> Family:
        (family,) = self._observed[metric.name].collect()
        assert isinstance(family, Family)
        return family

    def _alias(self, metric: Metric, alias: Alias, family: Family) -> Family:
        renamed = dict(zip(metric.labels, alias.labels, strict=True))
        copy = Family(
            _family_name(alias.name, metric.kind),
            f"Alias of {PREFIX}{metric.name}: {metric.help}",
            metric.kind,
        )
        for sample in family.samples:
            labels = {renamed.get(name, name): value for name, value in sample.labels.items()}
            suffix = sample.name.removeprefix(PREFIX + metric.name)
            copy.add_sample(alias.name + suffix, {"model_name": self.model_name} | labels, sample.value)
        return copy


class _Families(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Family]:
        return self._metrics.families()


def _observed(metric: Metric) -> Any:
    buckets = {"buckets": metric.buckets} if metric.buckets else {}
    return _OBSERVED[metric.kind](PREFIX + metric.name, metric.help, metric.labels, registry=None, **buckets)


def _family_name(name: str, kind: str) -> str:
    return name.removesuffix("_total") if kind == "counter" else name
