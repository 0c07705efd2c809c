"""nybble.service.metrics: what a scrape shows."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess

import pytest
from http_fixtures import parse_metrics
from prometheus_client.parser import text_string_to_metric_families

from nybble.service.engine.protocol import EngineInfo, EngineStats, KernelReport, MemoryReport
from nybble.service.memory import GpuMemory
from nybble.service.metrics import GEMM_BUCKETS_S, METRICS, Metrics, Snapshot

MEMORY = MemoryReport(1000, {"weights": 600, "dense_copies": 100}, 500, 200, "refused")
INFO = EngineInfo(
    "m",
    "A",
    "bfloat16",
    "cpu",
    "cpu",
    64,
    10,
    (2,),
    4,
    16,
    2,
    0.5,
    MEMORY,
    (),
    {"cpu": True, "skinny": False},
)
STATS = EngineStats(
    started=10,
    finished={"stop": 3, "error": 1},
    running=2,
    waiting=4,
    prompt_tokens=100,
    generation_tokens=50,
    cached_prompt_tokens=7,
    preemptions=1,
    nonfinite=5,
    kv_usage_ratio=0.25,
    prefix_queries_tokens=90,
    graph_fallbacks={"batch": 3},
    spec_draft_tokens=8,
    spec_accepted_tokens=5,
    gemm_calls={("cpu", "decode"): 40, ("cpu", "prefill"): 2},
    jit_compiles={"skinny_w4a16": 12},
    jit_cache_hits={"skinny_w4a16": 3},
    jit_compile_seconds=4.5,
)


GPU = GpuMemory(1, 2, 3, 4)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("demo", lambda: Snapshot(STATS, INFO, 6, 12345, GPU))


def scrape(metrics: Metrics) -> dict[str, float]:
    return parse_metrics(metrics.render().decode())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nybble_requests_started_total", 10),
        ('nybble_requests_total{finish_reason="stop"}', 3),
        ('nybble_requests_total{finish_reason="length"}', 0),
        ('nybble_requests_total{finish_reason="error"}', 1),
        ("nybble_requests_running", 2),
        ("nybble_requests_waiting", 4),
        ("nybble_prompt_tokens_total", 100),
        ("nybble_generation_tokens_total", 50),
        ("nybble_cached_prompt_tokens_total", 7),
        ("nybble_preemptions_total", 1),
        ("nybble_nonfinite_total", 5),
        ("nybble_kv_cache_usage_ratio", 0.25),
        ('nybble_gemm_calls_total{path="cpu",phase="decode"}', 40),
        ('nybble_jit_compiles_total{kernel="skinny_w4a16"}', 12),
        ('nybble_jit_cache_hits_total{kernel="skinny_w4a16"}', 3),
        ("nybble_jit_compile_seconds_total", 4.5),
        ('nybble_memory_bytes{pool="weights"}', 600),
        ("nybble_memory_budget_bytes", 1000),
        ("nybble_dense_cache_budget_bytes", 200),
        ("nybble_dense_cache_required_bytes", 500),
        ("nybble_dense_cache_used_bytes", 100),
        ('nybble_dense_cache_state{state="refused"}', 1),
        ('nybble_dense_cache_state{state="enabled"}', 0),
        ('nybble_kernel_selfcheck{path="skinny"}', 0),
        ("nybble_engine_restarts_total", 6),
        ("nybble_host_available_bytes", 12345),
        ("nybble_gtt_used_bytes", 1),
        ("nybble_gtt_total_bytes", 2),
        ("nybble_vram_used_bytes", 3),
        ("nybble_vram_total_bytes", 4),
        ("nybble_prefix_cache_queries_tokens_total", 90),
        ("nybble_prefix_cache_hits_tokens_total", 7),
        ("nybble_spec_draft_tokens_total", 8),
        ("nybble_spec_accepted_tokens_total", 5),
        ('nybble_graph_fallbacks_total{reason="batch"}', 3),
        ('vllm:num_requests_running{model_name="demo"}', 2),
        ('vllm:num_requests_waiting{model_name="demo"}', 4),
        ('vllm:kv_cache_usage_perc{model_name="demo"}', 0.25),
        ('vllm:prompt_tokens_total{model_name="demo"}', 100),
        ('vllm:generation_tokens_total{model_name="demo"}', 50),
        ('vllm:request_success_total{finished_reason="stop",model_name="demo"}', 3),
    ],
)
def test_values_of_a_snapshot(metrics: Metrics, name: str, value: float) -> None:
    assert scrape(metrics)[name] == value


def test_observations(metrics: Metrics) -> None:
    metrics.queued(0.5)
    metrics.first_token(0.02)
    metrics.next_tokens(0.01, 2)
    metrics.finished(3.0, 0.005)
    metrics.finished(4.0, None)
    metrics.gemm({("cpu", "decode"): (1e-5, 3e-5), ("cpu", "prefill"): (0.5,)})
    metrics.rejected("queue_full")
    metrics.http("/v1/models", 200)
    values = scrape(metrics)
    assert values["nybble_queue_seconds_sum"] == 0.5
    assert values['nybble_time_to_first_token_seconds_bucket{le="0.025"}'] == 1
    assert values["nybble_inter_token_latency_seconds_count"] == 2
    assert values["nybble_inter_token_latency_seconds_sum"] == 0.01
    assert values["nybble_e2e_request_latency_seconds_count"] == 2
    assert values["nybble_time_per_output_token_seconds_count"] == 1
    assert values['nybble_gemm_seconds_bucket{le="1e-05",path="cpu",phase="decode"}'] == 1
    assert values['nybble_gemm_seconds_bucket{le="+Inf",path="cpu",phase="prefill"}'] == 1
    assert values['nybble_gemm_sampled_calls_total{path="cpu",phase="decode"}'] == 2
    assert values['nybble_rejected_total{reason="queue_full"}'] == 1
    assert values['nybble_http_requests_total{route="/v1/models",status="200"}'] == 1
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert values[f'vllm:{name}_count{{model_name="demo"}}'] == values[f"nybble_{name}_count"] > 0
        assert values[f'vllm:{name}_sum{{model_name="demo"}}'] == values[f"nybble_{name}_sum"]


def test_gemm_buckets_double_from_10_microseconds() -> None:
    assert len(GEMM_BUCKETS_S) == 14
    assert GEMM_BUCKETS_S[0] == 1e-5 and GEMM_BUCKETS_S[-1] == pytest.approx(0.08192)


def test_the_exposition_is_well_formed(metrics: Metrics) -> None:
    metrics.finished(1.0, 0.1)
    text = metrics.render().decode()
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    assert all(
        family.documentation and family.type in ("counter", "gauge", "histogram") for family in families
    )
    assert "_created" not in text


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_metric_is_named_by_the_rules(metric) -> None:
    assert re.fullmatch(r"[a-z0-9_]+", metric.name)
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert (metric.kind == "histogram") == bool(metric.buckets)
    assert metric.help.endswith(".")
    if metric.kind == "histogram":
        assert metric.name.endswith("_seconds")


def test_before_the_engine_is_ready_there_is_no_plan() -> None:
    values = scrape(Metrics("demo", lambda: Snapshot(EngineStats(), None, 0, None)))
    assert values["nybble_requests_running"] == 0
    assert not any(name.startswith(("nybble_memory", "nybble_dense", "nybble_host")) for name in values)


def test_apps_do_not_share_metrics(metrics: Metrics) -> None:
    metrics.first_token(1.0)
    other = Metrics("demo", lambda: Snapshot(STATS, INFO, 0, 0))
    assert scrape(other)["nybble_time_to_first_token_seconds_count"] == 0


def kernel(layer: str, n: int, k: int, count: int, nbytes: int) -> KernelReport:
    return KernelReport(layer, count, n, k, 32, True, "hybrid", "", {}, (), nbytes)


def test_bandwidth_is_bytes_over_time_over_the_copy_rate() -> None:
    info = dataclasses.replace(
        INFO,
        copy_bytes_per_s=1e9,
        kernels=(kernel("qkv", 200, 100, 4, 40_000), kernel("down", 100, 300, 1, 20_000)),
    )
    latest = {
        ("qkv", "skinny"): (4e-5, 1),
        ("down", "skinny"): (6e-5, 1),
        ("down", "dense"): (1e-4, 10),
        ("gone", "skinny"): (1.0, 1),
    }
    values = scrape(Metrics("demo", lambda: Snapshot(STATS, info, 0, 0, None, latest)))
    # 10,000 + 20,000 bytes of weights, 600 and 800 of x and y, in 100 microseconds, at 1 byte a nanosecond.
    assert values['nybble_gemm_bandwidth_ratio{path="skinny"}'] == pytest.approx(0.314)
    assert values['nybble_gemm_bandwidth_ratio{path="dense"}'] == pytest.approx(0.68)
    unmeasured = dataclasses.replace(info, copy_bytes_per_s=0.0)
    text = Metrics("demo", lambda: Snapshot(STATS, unmeasured, 0, 0, None, latest)).render().decode()
    assert "nybble_gemm_bandwidth_ratio{" not in text


DESIGNED = """
gemm_seconds gemm_calls_total gemm_sampled_calls_total gemm_bandwidth_ratio dense_cache_budget_bytes
dense_cache_required_bytes dense_cache_used_bytes dense_cache_layers dense_cache_state dense_cache_build_seconds
memory_bytes memory_budget_bytes host_available_bytes gtt_used_bytes gtt_total_bytes vram_used_bytes vram_total_bytes
requests_started_total requests_total requests_running requests_waiting rejected_total nonfinite_total
graph_fallbacks_total prompt_tokens_total generation_tokens_total cached_prompt_tokens_total
time_to_first_token_seconds inter_token_latency_seconds time_per_output_token_seconds e2e_request_latency_seconds
queue_seconds kv_cache_usage_ratio prefix_cache_queries_tokens_total prefix_cache_hits_tokens_total
spec_draft_tokens_total spec_accepted_tokens_total engine_restarts_total kernel_selfcheck jit_compiles_total
jit_compile_seconds_total
"""


def test_names_that_dashboards_rely_on_are_there() -> None:
    assert set(DESIGNED.split()) <= {metric.name for metric in METRICS}


@pytest.mark.parametrize(
    "buckets", [m.buckets for m in METRICS if m.name in ("queue_seconds", "e2e_request_latency_seconds")]
)
def test_request_buckets_go_from_a_millisecond_to_20_minutes(buckets: tuple[float, ...]) -> None:
    assert (buckets[0], buckets[-1]) == (0.001, 1200.0) and list(buckets) == sorted(set(buckets))


ALIASES = {alias.name for metric in METRICS for alias in metric.aliases}


@pytest.mark.parametrize("aliases", [True, False], ids=["with aliases", "without"])
def test_promtool_finds_nothing_to_complain_of(aliases: bool) -> None:
    """But the colons of the aliases, which are named as they are elsewhere."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    metrics = Metrics("demo", lambda: Snapshot(STATS, INFO, 6, 12345, GPU), aliases)
    metrics.finished(1.0, 0.1)
    metrics.first_token(0.1)
    metrics.gemm({("cpu", "decode"): (1e-5,)})
    metrics.rejected("queue_full")
    metrics.http("/v1/models", 200)
    done = subprocess.run(
        [promtool, "check", "metrics"], input=metrics.render(), capture_output=True, check=False
    )
    said = sorted((done.stdout + done.stderr).decode().splitlines())
    # Nothing more is said, so every other family has passed; that each alias is named shows that it looked.
    assert said == sorted(f"{name} metric names should not contain ':'" for name in ALIASES if aliases)
    assert done.returncode == (3 if aliases else 0)


def test_the_aliases_are_there_unless_they_are_unwanted() -> None:
    def names(aliases: bool) -> set[str]:
        return {
            family.name for family in Metrics("demo", lambda: Snapshot(STATS, INFO, 6, 1), aliases).families()
        }

    assert names(True) - names(False) == {name.removesuffix("_total") for name in ALIASES}
    assert not names(False) - names(True) and len(ALIASES) >= 9
