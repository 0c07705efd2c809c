"""The memory plan of a model that is not loaded: sizes from its files, readings from this machine. Imports torch."""

from __future__ import annotations

from pathlib import Path

import torch

from nybble.kernels.native.offline import offline_target
from nybble.kernels.target import Target, cpu_target
from nybble.service.checkpoints import DEMO, HUB_FILE, HUB_ID, open_checkpoint
from nybble.service.doctor.facts import Facts
from nybble.service.doctor.findings import Finding, error, note, ok, size
from nybble.service.engine.load import needs_before_loading
from nybble.service.errors import CheckpointError, ConfigError
from nybble.service.memory import MemoryNeeds, MemoryPlan, Readings, make_plan
from nybble.service.settings import load_settings


def plan_for(facts: Facts) -> Finding:
    """Never loads, fetches or converts anything."""
    folder = local_folder(facts.model)
    if folder is None:
        return _not_here(facts.model)
    try:
        config = load_settings({"model": facts.model}).engine_config(str(folder))
        target, device = _device(facts, config.device)
        with open_checkpoint(folder) as checkpoint:
            needs = needs_before_loading(config, checkpoint, target, device)
        plan = make_plan(_readings(facts, target), needs)
    except (CheckpointError, ConfigError) as problem:
        return error(problem.message, "a model that fits", "as the sentence says")
    return ok(_told(plan, needs, target))


def _not_here(model: str) -> Finding:
    accepted = "a model folder, `demo` or a hub id that was served before"
    if model == DEMO or HUB_ID.fullmatch(model):
        return note(
            f"{model} has not been fetched yet", accepted, "`hf download` it or serve it once, then ask again"
        )
    if HUB_FILE.fullmatch(model) or _is_gguf(model):
        return note(
            f"{model} is planned from the folder that it is converted to",
            accepted,
            "serve it once; then give the folder in ~/.cache/nybble/gguf",
        )
    return error(f"{model}: no folder with a config.json and no GGUF file", accepted, "correct --model")


def _is_gguf(model: str) -> bool:
    """A GGUF file, or a folder with one, that is here."""
    try:
        path = Path(model).expanduser()
        return (path.suffix == ".gguf" and path.is_file()) or any(path.glob("*.gguf"))
    except (OSError, ValueError, RuntimeError):
        return False


def local_folder(model: str) -> Path | None:
    """Where MODEL lies, without fetching or making it."""
    if model == DEMO:
        from nybble.service.checkpoints.demo import demo_folder

        return demo_folder() if demo_folder().is_dir() else None
    try:
        path = Path(model).expanduser()
        if (path / "config.json").is_file():
            return path
    except (OSError, ValueError, RuntimeError):
        return None
    return _in_hub_cache(model) if HUB_ID.fullmatch(model) and ".." not in model else None


def _in_hub_cache(model: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    repo, _, revision = model.partition("@")
    try:
        return Path(snapshot_download(repo, revision=revision or None, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


def _device(facts: Facts, asked: str) -> tuple[Target, torch.device]:
    """The device that `serve` would take: torch's first GPU, or the chip that the kernel lists, else the CPU."""
    arch = facts.torch.gpus[0].arch if facts.torch.gpus else facts.arch if facts.gpu else ""
    if asked == "cpu" or not arch:
        return cpu_target(), torch.device("cpu")
    return offline_target(arch), torch.device("cuda")


def _readings(facts: Facts, target: Target) -> Readings:
    host = facts.host.meminfo().get("MemAvailable")
    if host is None:
        raise ConfigError("the host's memory is not known: /proc/meminfo has no MemAvailable; mount /proc")
    if target.kind == "cpu":
        return Readings(host)
    device = facts.torch.gpus[0].free_bytes if facts.torch.gpus else facts.free_bytes
    if device is None:
        raise ConfigError("the GPU's memory is not known: neither torch nor the driver says; mount /sys")
    return Readings(host, device)


def _told(plan: MemoryPlan, needs: MemoryNeeds, target: Target) -> str:
    pools = ", ".join(
        f"{name.replace('_', ' ')} {size(count)}" for name, count in plan.pools.items() if count
    )
    tokens = plan.kv_blocks * needs.block_size
    return (
        f"on {target.arch}: budget {size(plan.budget_bytes)}: {pools}; the KV cache holds {tokens} tokens, requests up to "
        f"{plan.max_model_len}; dense copies {plan.dense_state}"
        + (f" (they would take {size(needs.dense_bytes)})" if plan.dense_state == "disabled" else "")
    )
