"""What crosses the pipe between the API process and the engine process.

Plain dataclasses, pickled. This file imports neither torch nor anything of HTTP, so both sides may import it.
Times are seconds of time.monotonic(), which all processes of one machine share.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, TypeVar

# Why a request ended. "stop": a stop token or stop string. "length": max_tokens or the context is full.
# "abort": the client went away. "error": see StepOutput.error.
FINISH_REASONS = ("stop", "length", "abort", "error")

# Why a number of rows runs without a captured graph (service/engine/graphs.py).
GRAPH_FALLBACKS = ("capture_failed", "mismatch", "out_of_memory")

# Log-probabilities go no lower: JSON has no infinities.
LOGPROB_FLOOR = -9999.0

T = TypeVar("T")


def _pickled_by_position(cls: type[T]) -> type[T]:
    """Pickles a dataclass of two fields or more as a call with its values. Messages of every step take less than half
    the time of the way that slotted dataclasses bring along (an Outputs of one request: 16 + 21 instead of 38 + 33
    microseconds to write and read)."""
    values = attrgetter(*(field.name for field in fields(cls)))  # type: ignore[arg-type]

    def reduce(self: T) -> tuple[Any, ...]:
        return cls, values(self)

    cls.__reduce__ = reduce  # type: ignore[assignment, method-assign]
    return cls


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens for one request; values are validated where they enter (service/api).

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0 are off; penalties follow the OpenAI and Hugging Face
    definitions: presence and frequency count generated tokens, repetition counts prompt and generated ones.
    stop_token_ids end the request in addition to the model's own end-of-sequence set (which ignore_eos disables).
    logprobs: None, or how many alternatives to report beside the sampled token (0..20).
    prompt_logprobs: the same for every prompt token after the first; every row of such a prompt has to be computed, so
    it takes nothing from a prefix cache. With it max_tokens may be 0: the prompt is scored and nothing is generated.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue once; n = 2 is two Requests. Of those that wait, the least priority goes first.

    cache_salt: requests share cached prefixes only with those of the same salt.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    priority: int = 0
    cache_salt: str | None = None
    # What the choices of one HTTP request have in common; empty: this is all of it.
    group: str = ""


@_pickled_by_position
@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. logprob and top (best first, pairs of token id and logprob) only when asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@_pickled_by_position
@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step did for one request.

    With finish_reason "stop" the last token of `tokens` is the stop token itself, whose text is not part of the
    answer. Set on a request's first output only: scheduled_s, when it left the queue, cached_tokens, how many
    prompt tokens needed no computing (prefix cache), and prompt_logprobs, where asked for: the prompt's tokens from the
    second on.
    """

    request_id: str
    tokens: tuple[Token, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    scheduled_s: float | None = None
    cached_tokens: int = 0
    prompt_logprobs: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Add:
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop a request and free what it holds. reason "stop" when a stop string matched, "abort" when the client
    left. No StepOutput follows; the EngineStats count it."""

    request_id: str
    reason: str = "abort"


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Finish nothing more; exit 0."""


@dataclass(frozen=True, slots=True)
class Loading:
    """Progress while the model loads."""

    stage: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Sent once, when the engine is ready."""

    model: str
    architecture: str
    dtype: str
    device: str
    target: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_blocks: int
    block_size: int
    max_running: int
    load_seconds: float
    memory: MemoryReport
    kernels: tuple[KernelReport, ...]
    selfcheck: dict[str, bool] = field(default_factory=dict)
    # Bytes read and written per second by a large copy, measured at start; 0: not measured.
    copy_bytes_per_s: float = 0.0
    # Of the device, such as "0000:c5:00.0"; empty for a CPU or where torch does not say.
    pci_address: str = ""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The MemoryPlan's outcome in bytes: pool name (weights, dense_copies, kv_cache, workspace) -> bytes."""

    budget_bytes: int
    pools: dict[str, int]
    dense_required_bytes: int = 0
    dense_budget_bytes: int = 0
    dense_state: str = "disabled"
    dense_layers: int = 0
    dense_build_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One kind of linear layer, as GET /v1/kernels shows it.

    layer: "qkv", "o", "gate_up", "down" or "lm_head"; count: how many of the model's layers share this choice.
    """

    layer: str
    count: int
    n: int
    k: int
    group_size: int
    symmetric: bool
    kernel: str
    reason: str
    declined: dict[str, str]
    routes: tuple[RouteReport, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class RouteReport:
    """Rows first..last of M (last None: and all above) take this path, for this reason, with this tile if any."""

    first_m: int
    last_m: int | None
    path: str
    reason: str
    tile: str | None


@_pickled_by_position
@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine started, and gauges now: one consistent snapshot.

    prefix_queries_tokens are the prompt tokens looked up in the prefix cache, cached_prompt_tokens those found there.
    out_of_memory counts steps that the device had no memory for. steps_ahead are those that were launched before the
    tokens of the step before them had arrived.
    jit_*: kernels compiled at run time, by name, and found in a cache instead.
    gemm_samples are the seconds of the sampled GEMM calls since the previous snapshot, per (path, phase); gemm_latest
    the seconds and M of the latest of them per (layer, path). graph_fallbacks: numbers of rows, of decode and of
    prefill, that run without a captured graph, by reason.
    """

    started: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_prompt_tokens: int = 0
    prefix_queries_tokens: int = 0
    preemptions: int = 0
    nonfinite: int = 0
    out_of_memory: int = 0
    kv_usage_ratio: float = 0.0
    steps: int = 0
    steps_ahead: int = 0
    step_overhead_seconds: float = 0.0
    jit_compiles: dict[str, int] = field(default_factory=dict)
    jit_cache_hits: dict[str, int] = field(default_factory=dict)
    jit_compile_seconds: float = 0.0
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    gemm_calls: dict[tuple[str, str], int] = field(default_factory=dict)
    gemm_samples: dict[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    gemm_latest: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict)
    graph_fallbacks: dict[str, int] = field(default_factory=dict)


@_pickled_by_position
@dataclass(frozen=True, slots=True)
class Outputs:
    """All that a step produced. An idle engine sends none, but for one when it is ready: what loading has counted.

    stats: the snapshot after it, always there when a request has come, gone or changed places since the last one; while
    the same requests go on decoding, only a few times a second, since most of a short message's cost is in it.
    """

    outputs: tuple[StepOutput, ...]
    stats: EngineStats | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine cannot start or go on. user_error: the input (model folder, settings) is at fault, so a restart
    would fail the same way."""

    message: str
    user_error: bool


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine process needs to know; made from Settings.

    model is a resolved folder. max_model_len 0: the model's own, capped by what the memory plan can hold.
    kv_cache_bytes 0: what the memory plan gives. prefill_tokens: most rows of one prefill chunk; while requests are
    decoding, a chunk has prefill_tokens_busy rows at most, or, with 0, as many as measured step times allow without
    holding up the next tokens for long (see service/engine/pacing.py).
    dense_copies: see service/memory.py's DENSE_MODES. kernel_cache: the folder that keeps compiled kernels, empty for the
    user's; kernel_cache_shared: one that `nybble warm` filled, looked at first.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int = 0
    max_running: int = 16
    block_size: int = 16
    kv_cache_bytes: int = 0
    memory_fraction: float = 0.9
    prefill_tokens: int = 512
    prefill_tokens_busy: int = 0
    prefix_cache: bool = True
    lm_head: str = "auto"
    dense_copies: str = "disabled"
    threads: int = 0
    gemm_sample_every: int = 32
    kernel_cache: str = ""
    kernel_cache_shared: str = "/usr/share/nybble/kernels"
