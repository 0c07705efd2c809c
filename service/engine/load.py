"""From an EngineConfig to a running Engine: device, weights, memory plan, KV cache, self-check."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from nybble.kernels import native
from nybble.kernels.attention import AttentionBackend, CacheShape, choose
from nybble.kernels.attention.selfcheck import paged_problem
from nybble.kernels.bench.timing import copy_rate
from nybble.kernels.host_memory import kept_blocks
from nybble.kernels.linear import W4A16Linear, dense_bytes
from nybble.kernels.linear.int8 import Int8Linear, can_run, quantize_rows
from nybble.kernels.selfcheck import check_paths
from nybble.kernels.target import (
    Target,
    default_device,
    detect,
    pci_address,
    shares_host_memory,
    usable_cores,
)
from nybble.kernels.threads import single_steps
from nybble.service.checkpoints import Checkpoint, open_checkpoint
from nybble.service.checkpoints.prepacked import prepacked_layout
from nybble.service.engine.engine import Engine
from nybble.service.engine.graphs import Capture, DeviceCapture
from nybble.service.engine.inputs import Limits, captured_logit_rows
from nybble.service.engine.protocol import EngineConfig, EngineInfo, KernelReport, MemoryReport, RouteReport
from nybble.service.engine.runner import Runner
from nybble.service.errors import CheckpointError, ConfigError
from nybble.service.folders import kernel_cache_folder
from nybble.service.malloc import large_blocks_go_back
from nybble.service.memory import MemoryNeeds, Readings, make_plan, read_host_available
from nybble.service.models import Decoder, DecoderConfig, load, read_config
from nybble.service.models.load import HeadQuantizer, block_modules

log = logging.getLogger(__name__)

OnBytes = Callable[[int, int], None]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# --lm-head: a 16-bit output head as it is, read in int8, or read in int4 and rescored (see RescoredHead), in groups of this
# size.
HEADS = ("auto", "keep", "int8", "int4")
HEAD_GROUP_SIZE = 32


def build_engine(config: EngineConfig, on_bytes: OnBytes | None = None) -> Engine:
    """Load config.model and return an engine that is ready to step.

    Raises CheckpointError and ConfigError for what the user must change, ValueError when no kernel that passed its
    self-check can run a layer.
    """
    started = perf_counter()
    device = _device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(config.threads or usable_cores())
    target = detect(device)
    _set_up_compilation(config, device)
    copy_bytes_per_s = _copy_rate(device)
    readings = _readings(device)
    folder = Path(config.model)
    shared = device.type != "cpu" and shares_host_memory(device)
    pin = device.type == "cuda"
    with large_blocks_go_back(), kept_blocks(), open_checkpoint(folder, on_bytes, shared, pin) as checkpoint:
        model_config = read_config(checkpoint.config, folder)
        dtype = _dtype(config.dtype, model_config, device)
        attention, attention_passed = _attention(
            target, device, dtype, model_config.head_dim, config.block_size
        )
        head = head_quantizer(config.lm_head, checkpoint, model_config, dtype, device)
        # Before anything is read, from the sizes in the files: a plan that cannot work is refused at once, and whether
        # layers get dense copies has to be known while they are made.
        expected = _expected(config, checkpoint, model_config, dtype, target)
        first_plan = make_plan(readings, expected)
        dense = first_plan.dense_state == "enabled"
        selfcheck = check_paths(device, dtype, target)
        if not dense:  # a dense copy is made from the logical weight
            checkpoint.use_prepacked(prepacked_layout(target, dtype, selfcheck.left_out))
        length = min(config.max_model_len or model_config.default_positions, model_config.max_positions)
        with single_steps() if device.type == "cpu" else nullcontext():
            model = load(
                model_config, checkpoint, attention, dtype, device, length, head, dense, selfcheck.left_out
            )
        _refuse_unread(checkpoint, model_config)

    needs = _needs(config, model_config, model.nbytes, dtype, target)
    mode = "enabled" if dense else "disabled"
    plan = make_plan(readings, replace(needs, dense_mode=mode, dense_bytes=model.dense_nbytes))
    attention.allocate(_cache_shape(config, model_config, dtype, plan.kv_blocks), device)
    limits = Limits(config.max_running, config.prefill_tokens, plan.max_model_len, plan.kv_blocks)
    runner = Runner(model, device, limits, _capture(device, attention))
    runner.warm_up()
    if device.type == "cpu" and not config.threads:
        log.info("%d CPU threads: the fastest for one decode row here", runner.choose_threads(usable_cores()))
    info = EngineInfo(
        model=str(folder),
        architecture=model_config.architecture,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        target=f"{target.name} ({target.arch})",
        max_model_len=plan.max_model_len,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        kv_blocks=plan.kv_blocks,
        block_size=config.block_size,
        max_running=config.max_running,
        load_seconds=perf_counter() - started,
        memory=MemoryReport(
            plan.budget_bytes,
            plan.pools,
            dense_required_bytes=expected.dense_bytes,
            dense_budget_bytes=first_plan.dense_budget_bytes,
            dense_state=first_plan.dense_state,
            dense_layers=model.dense_layers,
            dense_build_seconds=model.dense_build_seconds,
        ),
        kernels=_reports(model),
        selfcheck=selfcheck.passed | attention_passed,
        copy_bytes_per_s=copy_bytes_per_s,
        pci_address=pci_address(device),
    )
    return Engine(runner, info, config)


def needs_before_loading(
    config: EngineConfig, checkpoint: Checkpoint, target: Target, device: torch.device
) -> MemoryNeeds:
    """What build_engine's first plan is made from: sizes in the files alone. Of `device` only the type counts."""
    model_config = read_config(checkpoint.config, Path(config.model))
    return _expected(config, checkpoint, model_config, _dtype(config.dtype, model_config, device), target)


def _set_up_compilation(config: EngineConfig, device: torch.device) -> None:
    """Where compiled kernels are kept, and that compilations are counted, Triton's too where it is used."""
    shared = [Path(config.kernel_cache_shared)] if config.kernel_cache_shared else []
    native.set_cache_folders(Path(config.kernel_cache or kernel_cache_folder()), shared)
    if device.type != "cpu":
        native.count_triton()


def _attention(
    target: Target, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> tuple[AttentionBackend, dict[str, bool]]:
    """The back end, and whether the paged one, where it was chosen, passed its self-check."""
    passed: dict[str, bool] = {}
    choice = choose(target, dtype, head_dim, block_size)
    if choice.backend.name == "triton" and device.type != "cpu":
        problem = paged_problem(device, dtype, head_dim)
        passed["attention"] = problem is None
        if problem is not None:
            log.error("self-check on %s %s: paged attention, %s", target.name, target.arch, problem)
            choice = choose(
                target, dtype, head_dim, block_size, {"triton": f"failed its self-check: {problem}"}
            )
    for name, reason in choice.declined.items():
        log.warning("attention: %s, since %s declines: %s", choice.backend.name, name, reason)
    return choice.backend, passed


def _capture(device: torch.device, attention: AttentionBackend) -> Capture | None:
    """How steps are captured: where the device can, and the step's numbers stand at fixed addresses."""
    return DeviceCapture(device) if device.type == "cuda" and attention.name == "triton" else None


def _copy_rate(device: torch.device) -> float:
    """What bandwidths are relative to, in a fraction of a second; gives its memory back."""
    if device.type == "cpu":
        return copy_rate(device, nbytes=64 << 20, least_s=0.05)
    rate = copy_rate(device)
    torch.cuda.empty_cache()
    return rate


def _device(name: str) -> torch.device:
    if name == "auto":
        return default_device()
    if name not in ("cpu", "cuda") and not name.startswith("cuda:"):
        raise ConfigError(
            f"--device is {name!r}: accepted auto, cpu, cuda or cuda:N (ROCm GPUs are cuda to torch)"
        )
    if name != "cpu" and not torch.cuda.is_available():
        raise ConfigError(
            f"--device is {name!r}, but torch {torch.__version__} sees no GPU: use cpu or install its build"
        )
    return torch.device(name)


def _dtype(name: str, model: DecoderConfig, device: torch.device) -> torch.dtype:
    """auto: what the checkpoint computes in, bfloat16 unless it says float16; on a CPU always bfloat16, since the int4
    GEMM there is 30 times slower in float16."""
    if name != "auto":
        if name not in DTYPES:
            raise ConfigError(f"--dtype is {name!r}: accepted auto, {', '.join(DTYPES)}")
        if name == "float16" and model.post_norms:
            log.warning("%s overflows float16: answers may break off; use bfloat16", model.architecture)
        return DTYPES[name]
    return torch.float16 if model.dtype == "float16" and device.type != "cpu" else torch.bfloat16


def _readings(device: torch.device) -> Readings:
    host = read_host_available()
    if device.type == "cpu":
        return Readings(host)
    free, _ = torch.cuda.mem_get_info(device)
    return Readings(host, free)


def head_quantizer(
    mode: str, checkpoint: Checkpoint, model: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> HeadQuantizer | None:
    """auto: int4 on a CPU in bfloat16, where the head is a third of a small model's bytes; kept elsewhere."""
    if mode not in HEADS:
        raise ConfigError(f"--lm-head is {mode!r}: accepted {', '.join(HEADS)}")
    if mode == "int8":
        runs, reason = can_run(device, dtype, model.hidden_size)
        if not runs:
            raise ConfigError(f"--lm-head int8: {reason}; use keep or int4")
        return partial(quantize_rows, dtype=dtype)
    int4 = mode == "int4" or (mode == "auto" and device.type == "cpu" and dtype is torch.bfloat16)
    if not int4:
        return None
    if model.hidden_size % HEAD_GROUP_SIZE:
        if mode == "auto":
            return None
        raise ConfigError(
            f"--lm-head int4: hidden_size {model.hidden_size} is no multiple of {HEAD_GROUP_SIZE}: use keep"
        )
    from nybble.service.checkpoints.rounding import quantize_tensor

    importance = checkpoint.head_importance(model.hidden_size)
    # Not thoroughly: it only screens, and would take longer than reading the whole model.
    return partial(
        quantize_tensor, group_size=HEAD_GROUP_SIZE, symmetric=False, importance=importance, thorough=False
    )


def _refuse_unread(checkpoint: Checkpoint, model: DecoderConfig) -> None:
    """A tensor nobody asked for means that the file describes another model than config.json does."""
    unread = checkpoint.unread()
    if unread:
        shown = ", ".join(unread[:3]) + (f" and {len(unread) - 3} more" if len(unread) > 3 else "")
        raise CheckpointError(
            f"{checkpoint.folder}: tensors that {model.architecture} with this config.json does not use: {shown}; "
            "config.json and the weights do not belong together"
        )


def _cache_shape(config: EngineConfig, m: DecoderConfig, dtype: torch.dtype, blocks: int) -> CacheShape:
    return CacheShape(m.layers, blocks, config.block_size, m.kv_heads, m.head_dim, dtype)


def _expected(
    config: EngineConfig, checkpoint: Checkpoint, m: DecoderConfig, dtype: torch.dtype, target: Target
) -> MemoryNeeds:
    needs = _needs(config, m, checkpoint.total_bytes, dtype, target)
    return replace(needs, dense_bytes=_dense_bytes(checkpoint, m, dtype, target))


def _dense_bytes(checkpoint: Checkpoint, m: DecoderConfig, dtype: torch.dtype, target: Target) -> int:
    """What copies of all int4 layers of the blocks would take."""
    return sum(
        dense_bytes(n, k, dtype, target)
        for module, (n, k) in block_modules(m).items()
        if checkpoint.quantized(module)
    )


def _needs(
    config: EngineConfig, m: DecoderConfig, weights_bytes: int, dtype: torch.dtype, target: Target
) -> MemoryNeeds:
    widest = max(2 * m.intermediate_size, (m.heads + 2 * m.kv_heads) * m.head_dim)
    rows = config.prefill_tokens * (2 * widest + 4 * m.hidden_size) * dtype.itemsize
    logits = config.max_running * m.vocab_size * 4 * 4
    if target.kind != "cpu":
        rows *= 2  # captured passes and eager ones keep their memory apart
        logits += (
            captured_logit_rows(config.max_running, config.prefill_tokens) * m.vocab_size * dtype.itemsize
        )
    mask = config.prefill_tokens * m.max_positions * dtype.itemsize
    return MemoryNeeds(
        weights_bytes=weights_bytes,
        workspace_bytes=rows + logits + mask,
        block_bytes=_cache_shape(config, m, dtype, 1).block_bytes,
        block_size=config.block_size,
        model_positions=m.max_positions if config.max_model_len else m.default_positions,
        max_model_len=config.max_model_len,
        max_running=config.max_running,
        kv_cache_bytes=config.kv_cache_bytes,
        memory_fraction=config.memory_fraction,
        dense_mode=config.dense_copies,
    )


def _reports(model: Decoder) -> tuple[KernelReport, ...]:
    """One row per layer kind and distinct kernel choice, for GET /v1/kernels."""
    reports: list[KernelReport] = []
    for kind, layers in model.linears.items():
        groups: dict[object, list[W4A16Linear]] = {}
        for layer in layers:
            if isinstance(layer, W4A16Linear):
                groups.setdefault((layer.config, layer.kernel.name), []).append(layer)
            elif isinstance(layer, Int8Linear):
                reports.append(_int8_report(kind, layer))
        for same in groups.values():
            first = same[0]
            reports.append(
                KernelReport(
                    layer=kind,
                    count=len(same),
                    n=first.config.n,
                    k=first.config.k,
                    group_size=first.config.group_size,
                    symmetric=first.config.symmetric,
                    kernel=first.kernel.name,
                    reason=first.selection.reason,
                    declined=first.selection.declined,
                    routes=tuple(
                        RouteReport(r.first, r.last, r.path, r.reason, r.tile) for r in first.routes()
                    ),
                    nbytes=sum(layer.nbytes for layer in same),
                )
            )
    return tuple(reports)


def _int8_report(kind: str, layer: Int8Linear) -> KernelReport:
    n, k = layer.weight.q.shape
    return KernelReport(
        layer=kind,
        count=1,
        n=n,
        k=k,
        group_size=k,
        symmetric=True,
        kernel="int8",
        reason=layer.reason,
        declined={},
        routes=(RouteReport(1, None, layer.path, "asked for by --lm-head", None),),
        nbytes=layer.nbytes,
    )
