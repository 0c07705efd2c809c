"""`nybble bench decode` and `prefill`: what a step of the engine costs, beside what its bytes cost.

The engine runs in this process, on a model folder or on random weights in a named shape. A decode step is bound by reading
memory: the limit is the bytes of the weights that it reads, its 16-bit or quantised head and the KV cache of its sequences,
over the read rate measured here. A prompt is bound by multiplying: its limit is what the library's 16-bit GEMM takes for the
same layers.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from nybble.kernels.linear import RECORDER, W4A16Linear
from nybble.kernels.linear.int8 import Int8Linear
from nybble.service.checkpoints.random_weights import random_folder
from nybble.service.engine.engine import Engine
from nybble.service.engine.load import build_engine
from nybble.service.engine.protocol import EngineConfig, Request, SamplingParams
from nybble.service.errors import ConfigError
from nybble.service.models.layers import DenseLinear, RescoredHead, SideBySide

_WARM_STEPS = 8
# Steps that it may take until all sequences of a batch have begun.
_STARTING_STEPS = 64
_SPLIT_STEPS = 8
_PROMPT_ROUNDS = 3
_PREFILLS = itertools.count()
# Part of a step -> words in the names of its device kernels; the first part that fits.
_DEVICE_PARTS = (
    ("attention", ("attention", "reduce_splits", "reduce_prompt_splits", "fmha", "flash", "sdpa")),
    ("gemm int4", ("w4a16", "skinny")),
    ("gemm int8", ("w8a16",)),
    ("gemm 16-bit", ("gemm", "gemv", "nvjet", "cutlass", "Cijk", "splitK", "matmul")),
    ("copies", ("Memcpy", "Memset")),
)


@dataclass(frozen=True)
class EngineBench:
    """shape: random weights; empty: the folder `model`. contexts and batches are numbers of tokens and sequences."""

    shape: str = "qwen3-8b"
    model: str = ""
    batches: tuple[int, ...] = (1, 8, 64)
    contexts: tuple[int, ...] = (1024,)
    tokens: int = 64
    group_size: int = 128
    device: str = "auto"
    dtype: str = "auto"
    lm_head: str = "auto"
    dense_copies: str = "disabled"
    prefill_tokens: int = 512
    threads: int = 0

    @property
    def longest(self) -> int:
        return max(self.contexts) + self.tokens + 2 * (_WARM_STEPS + _SPLIT_STEPS) + _STARTING_STEPS


@dataclass(frozen=True)
class DecodeRow:
    """One batch size at one context, milliseconds of a step. host_ms: what it takes beyond the model's own time, for
    sampling and for Python as far as the device waits for it; parts_ms: where the model's time goes."""

    batch: int
    context: int
    tpot_ms: float
    p99_ms: float
    tokens_per_s: float
    limit_ms: float
    host_ms: float
    parts_ms: dict[str, float] = field(default_factory=dict)

    @property
    def of_limit(self) -> float:
        return self.tpot_ms / self.limit_ms


@dataclass(frozen=True)
class PrefillRow:
    """One prompt alone, from its arrival to its first token; library_ms: the 16-bit GEMMs of its layers alone."""

    tokens: int
    ttft_ms: float
    tokens_per_s: float
    library_ms: float


@contextmanager
def engine_of(bench: EngineBench) -> Iterator[Engine]:
    """Raises ConfigError or CheckpointError for what cannot be built."""
    with tempfile.TemporaryDirectory(prefix="nybble-bench-") as name:
        folder = bench.model or str(random_folder(Path(name), bench.shape, bench.group_size, bench.longest))
        yield build_engine(
            EngineConfig(
                folder,
                dtype=bench.dtype,
                device=bench.device,
                max_model_len=bench.longest,
                max_running=max(bench.batches),
                prefill_tokens=bench.prefill_tokens,
                # A batch starts together because its prompts are there: see `decode`.
                prefix_cache=True,
                lm_head=bench.lm_head,
                dense_copies=bench.dense_copies,
                threads=bench.threads,
                gemm_sample_every=0,
            )
        )


def bench_decode(bench: EngineBench, output: Path | None) -> None:
    with engine_of(bench) as engine:
        rate = read_rate(engine.runner.device)
        print(_describe(engine, bench), f"read rate {rate / 1e9:.1f} GB/s", sep="\n")
        print(
            f"\n{'batch':>6}{'context':>9}{'TPOT ms':>10}{'p99':>9}{'limit':>9}{'x limit':>9}{'tokens/s':>11}"
        )
        rows = []
        for context in bench.contexts:
            for batch in bench.batches:
                row = decode(engine, batch, context, bench.tokens, rate)
                rows.append(row)
                print(
                    f"{row.batch:6}{row.context:9}{row.tpot_ms:10.3f}{row.p99_ms:9.3f}{row.limit_ms:9.3f}"
                    f"{row.of_limit:9.2f}{row.tokens_per_s:11.1f}   host {row.host_ms:.3f}, "
                    + ", ".join(f"{part} {ms:.3f}" for part, ms in row.parts_ms.items()),
                    flush=True,
                )
        _write(output, engine, bench, [asdict(row) for row in rows], read_bytes_per_s=rate)


def bench_prefill(bench: EngineBench, output: Path | None) -> None:
    with engine_of(bench) as engine:
        print(_describe(engine, bench))
        print(f"\n{'tokens':>7}{'TTFT ms':>11}{'tokens/s':>11}{'library ms':>12}{'of library':>12}")
        rows = []
        for tokens in bench.contexts:
            row = prefill(engine, tokens)
            rows.append(row)
            share = row.library_ms / row.ttft_ms
            print(
                f"{row.tokens:7}{row.ttft_ms:11.2f}{row.tokens_per_s:11.1f}{row.library_ms:12.2f}{share:12.2f}",
                flush=True,
            )
        _write(output, engine, bench, [asdict(row) for row in rows])


def decode(engine: Engine, batch: int, context: int, tokens: int, rate: float) -> DecodeRow:
    """Time `tokens` steps of `batch` sequences whose middle step has about `context` positions behind it.

    Each prompt is computed alone first. Then all of them are asked for at once and found in the prefix cache, so that the
    sequences run side by side from the beginning and have one length. Raises ConfigError for what the cache cannot hold.
    """
    behind = max(1, context - tokens // 2 - _WARM_STEPS)
    # Whole blocks and a row: that row alone is to be computed, so that all begin in a step or a few, however many they are.
    first = (behind - 1) // engine.info.block_size * engine.info.block_size + 1
    if batch * (first + tokens) > engine.info.kv_blocks * engine.info.block_size:
        raise ConfigError(
            f"{batch} sequences of {first + tokens} tokens: the KV cache holds "
            f"{engine.info.kv_blocks * engine.info.block_size}; ask for smaller batches or contexts"
        )
    for i in range(batch):
        engine.add(random_request(engine, "prompt", first, 1, seed=i))
        while engine.has_work:
            engine.step()
    most = tokens + 2 * _WARM_STEPS + _SPLIT_STEPS + _STARTING_STEPS
    for i in range(batch):
        engine.add(random_request(engine, f"{i}", first, most, seed=i))
    begun: set[str] = set()
    while len(begun) < batch:
        begun |= {out.request_id for out in engine.step()}
    for _ in range(_WARM_STEPS + behind - first):
        engine.step()
    seconds = []
    before = engine.stats()
    for _ in range(tokens):
        started = perf_counter()
        outputs = engine.step()
        seconds.append(perf_counter() - started)
        if sum(len(out.tokens) for out in outputs) != batch:
            raise ConfigError(
                f"{batch} sequences did not fit side by side: ask for smaller batches or contexts"
            )
    after = engine.stats()
    mean = statistics.fmean(seconds)
    if engine.runner.device.type == "cuda":
        parts = _split_on_device(engine, batch, _SPLIT_STEPS)
        host = max(0.0, mean - sum(parts.values()))
    else:
        parts = _split_on_host(engine, _SPLIT_STEPS)
        host = (after.step_overhead_seconds - before.step_overhead_seconds) / tokens
    for i in range(batch):
        engine.abort(str(i))
    engine.step()
    return DecodeRow(
        batch,
        context,
        tpot_ms=mean * 1e3,
        p99_ms=sorted(seconds)[int(0.99 * (len(seconds) - 1))] * 1e3,
        tokens_per_s=batch / mean,
        limit_ms=step_bytes(engine, batch, context) / rate * 1e3,
        host_ms=host * 1e3,
        parts_ms={part: value * 1e3 for part, value in parts.items()},
    )


def prefill(engine: Engine, tokens: int) -> PrefillRow:
    best = float("inf")
    for i in range(_PROMPT_ROUNDS):
        # Longer prompts begin as shorter ones of the same seed do; under a salt of its own none is found in the prefix cache.
        salt = f"prefill {next(_PREFILLS)}"
        engine.add(random_request(engine, "prompt", tokens, 1, seed=i, salt=salt))
        started = perf_counter()
        while engine.has_work:
            engine.step()
        best = min(best, perf_counter() - started)
    rows = min(tokens, engine.prefill_tokens)
    library = library_gemm_seconds(engine, rows) * tokens / rows
    return PrefillRow(tokens, best * 1e3, tokens / best, library * 1e3)


def step_bytes(engine: Engine, batch: int, context: int) -> int:
    """Bytes that one decode step has to read: every layer, the head once, the keys and values of each sequence."""
    model = engine.runner.model
    head = model.head
    shared = 0
    if isinstance(head, (DenseLinear, RescoredHead)) and head.weight.data_ptr() == model.embedding.data_ptr():
        shared = head.weight.nbytes
    total = model.nbytes - model.embedding.nbytes - (head.nbytes - shared)
    if not isinstance(head, RescoredHead):
        total += head.nbytes
    elif head.is_exact(batch):
        total += head.weight.nbytes
    else:
        # The int4 part whole; of its 16-bit rows only those of the best.
        total += head.screen.nbytes + batch * head.count * head.weight.shape[1] * head.weight.itemsize
    c = model.config
    per_token = 2 * c.layers * c.kv_heads * c.head_dim * model.embedding.dtype.itemsize
    return total + batch * context * per_token


def read_rate(device: torch.device) -> float:
    """Bytes per second of the fastest of some sums over a buffer far larger than the caches."""
    nbytes = (1 << 28) if device.type == "cpu" else (1 << 30)
    # Not zeros: they can be read faster than numbers.
    buffer = torch.rand(nbytes // 4, dtype=torch.float32, device=device)
    return nbytes / _fastest(lambda: buffer.sum(), device, 6)


def library_gemm_seconds(engine: Engine, rows: int) -> float:
    """What the library's 16-bit GEMM takes for `rows` rows through the int4 and 16-bit layers of the blocks."""
    model, device = engine.runner.model, engine.runner.device
    shapes: dict[tuple[int, int], int] = {}
    for kind, layers in model.linears.items():
        for layer in layers if kind != "lm_head" else ():
            for part in layer.parts if isinstance(layer, SideBySide) else (layer,):
                shapes[_shape_of(part)] = shapes.get(_shape_of(part), 0) + 1
    seconds = 0.0
    for (n, k), count in shapes.items():
        x = torch.randn(rows, k, device=device).to(model.embedding.dtype)
        w = torch.randn(n, k, device=device).to(model.embedding.dtype)
        seconds += count * _fastest(lambda x=x, w=w: torch.nn.functional.linear(x, w), device, 5)  # type: ignore[misc]
    return seconds


def _shape_of(layer: W4A16Linear | DenseLinear | Int8Linear | SideBySide) -> tuple[int, int]:
    if isinstance(layer, W4A16Linear):
        return layer.config.n, layer.config.k
    assert not isinstance(layer, SideBySide)
    n, k = layer.weight.shape if isinstance(layer, DenseLinear) else layer.weight.q.shape
    return n, k


def _fastest(run: Callable[[], Any], device: torch.device, rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        _synchronize(device)
        started = perf_counter()
        run()
        _synchronize(device)
        best = min(best, perf_counter() - started)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- where a step's time goes ---


def _split_on_device(engine: Engine, batch: int, steps: int) -> dict[str, float]:
    """Seconds of a step by part of its model: what its captured graph takes replayed alone, divided as a profiler sees it,
    which makes everything take longer. Without a graph whole steps are profiled, and their sum is a little too large."""
    from torch.profiler import ProfilerActivity, profile

    device, graphs = engine.runner.device, engine.runner.graphs.get("decode")
    bucket = next((b for b in graphs.buckets if b >= batch), None) if graphs is not None else None

    def run() -> None:
        for _ in range(steps):
            if graphs is None or bucket is None:
                engine.step()
            else:
                graphs.run(bucket)

    seconds = None if bucket is None else _fastest(run, device, 3) / steps
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        _synchronize(device)
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if str(event.device_type) == "DeviceType.CUDA"
    ]
    shares = _shares(spans)
    scale = 1 / 1e6 / steps if seconds is None else seconds / sum(shares.values())
    return {part: us * scale for part, us in shares.items()}


def _shares(spans: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Of kernels (name, start, end), some of which begin while the one before still runs: part -> time that the kernels of
    that part alone add."""
    parts: dict[str, float] = {}
    reached = 0.0
    for name, start, end in sorted(spans, key=lambda span: span[1:]):
        part = _part_of(name)
        parts[part] = parts.get(part, 0.0) + max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return parts


def _part_of(kernel: str) -> str:
    for part, words in _DEVICE_PARTS:
        if any(word in kernel for word in words):
            return part
    return "rest"


def _split_on_host(engine: Engine, steps: int) -> dict[str, float]:
    """From the recorder's samples of int4 GEMMs, and clocks around attention and the head. "launch": outside the model."""
    model, runner = engine.runner.model, engine.runner
    clock: dict[str, float] = {"attention": 0.0, "head": 0.0}
    attention, head = model.attention, model.head
    kept = {name: getattr(attention, name) for name in ("plan", "write", "attend")}

    def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            sampling, RECORDER.sampling = RECORDER.sampling, False
            started = perf_counter()
            try:
                return call(*arguments)
            finally:
                clock[part] += perf_counter() - started
                RECORDER.sampling = sampling

        return run

    for name, call in kept.items():
        setattr(attention, name, timed("attention", call))
    model.head = timed("head", head)  # type: ignore[assignment]
    every, engine.gemm_sample_every = engine.gemm_sample_every, 1
    RECORDER.take_samples()
    forward, started = runner.forward_seconds, perf_counter()
    try:
        for _ in range(steps):
            engine.step()
        wall, forward = perf_counter() - started, runner.forward_seconds - forward
    finally:
        engine.gemm_sample_every, model.head = every, head
        for name in kept:
            delattr(attention, name)
    parts = {f"gemm {path}": sum(values) for (path, _), values in RECORDER.take_samples().items()}
    parts |= clock
    parts["rest"] = max(0.0, forward - sum(parts.values()))
    parts["launch"] = wall - forward
    return {part: seconds / steps for part, seconds in parts.items()}


# --- saying it ---


def random_request(
    engine: Engine, name: str, prompt_len: int, tokens: int, seed: int, salt: str | None = None
) -> Request:
    """Greedy, `tokens` long whatever they are, behind `prompt_len` random ids of that seed."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, engine.info.vocab_size, (prompt_len,), generator=generator).tolist()
    sampling = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
    return Request(name, tuple(ids), sampling, 0.0, cache_salt=salt)


def _describe(engine: Engine, bench: EngineBench) -> str:
    info = engine.info
    what = bench.model or f"random weights in the shape of {bench.shape}, groups of {_group_size(engine)}"
    kernels = ", ".join(sorted({k.kernel for k in info.kernels}))
    return (
        f"{what}; {info.dtype} on {info.target}; head {bench.lm_head}; kernels {kernels}; "
        f"weights {info.memory.pools['weights'] / 1e9:.2f} GB; torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads"
    )


def _group_size(engine: Engine) -> int:
    return max((k.group_size for k in engine.info.kernels if k.layer != "lm_head"), default=0)


def _write(output: Path | None, engine: Engine, bench: EngineBench, rows: list[Any], **more: float) -> None:
    if output is None:
        return
    about = {"about": _describe(engine, bench), "bench": asdict(bench), **more}
    output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
