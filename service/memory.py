"""The memory plan: the single owner of memory. Pure arithmetic over readings, which tests make up.

    budget = min(what the device can address, what the host can spare) * fraction
    budget = weights + workspace + dense copies (all layers or none) + KV cache

On a GPU that shares the host's memory there is one physical RAM: its aperture and the host's free memory are two views
of the same bytes and are never added. Page cache is not "used": MemAvailable counts it as available.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nybble.service.errors import ConfigError

GIB = 1 << 30
# Left to the rest of the machine before the fraction is taken.
HOST_RESERVE_BYTES = GIB // 2
# A CPU run is usually somebody's first try on their own machine: its KV cache stays modest unless asked for.
CPU_KV_BYTES = GIB
# --dense-copies. "auto" takes them where they fit and goes on without them where they do not.
DENSE_MODES = ("disabled", "enabled", "auto")


@dataclass(frozen=True, slots=True)
class Readings:
    """Taken before the model is loaded. device_bytes: what the GPU can still address, None on a CPU."""

    host_available_bytes: int
    device_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What the model and the settings ask for.

    block_bytes: one KV block over all layers. max_model_len 0: as long as the model and the memory allow.
    kv_cache_bytes 0: chosen here. dense_mode: a key of DENSE_MODES; dense_bytes: what copies of all layers take.
    """

    weights_bytes: int
    workspace_bytes: int
    block_bytes: int
    block_size: int
    model_positions: int
    max_model_len: int
    max_running: int
    kv_cache_bytes: int
    memory_fraction: float
    dense_mode: str = "disabled"
    dense_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """dense_state: "disabled" (not asked for), "enabled", or "refused" (asked for with "auto", does not fit).
    dense_budget_bytes: what was left for copies beside the KV cache of one request of max_model_len."""

    budget_bytes: int
    weights_bytes: int
    workspace_bytes: int
    dense_copies_bytes: int
    dense_budget_bytes: int
    dense_state: str
    kv_blocks: int
    kv_cache_bytes: int
    max_model_len: int

    @property
    def pools(self) -> dict[str, int]:
        return {
            "weights": self.weights_bytes,
            "workspace": self.workspace_bytes,
            "dense_copies": self.dense_copies_bytes,
            "kv_cache": self.kv_cache_bytes,
        }


def make_plan(readings: Readings, needs: MemoryNeeds) -> MemoryPlan:
    """Raises ConfigError with every number used and what to change: when one request of max_model_len cannot fit, or
    when dense copies were asked for ("enabled") and would leave it no room."""
    spare = max(0, readings.host_available_bytes - HOST_RESERVE_BYTES)
    limit = spare if readings.device_bytes is None else min(readings.device_bytes, spare)
    budget = int(limit * needs.memory_fraction)
    left = budget - needs.weights_bytes - needs.workspace_bytes
    wanted = needs.max_model_len or needs.model_positions
    if wanted > needs.model_positions:
        raise ConfigError(
            f"max_model_len is {wanted}: accepted at most {needs.model_positions}, the model's max_position_embeddings"
        )
    one_request = _blocks(wanted, needs.block_size) * needs.block_bytes
    dense_budget = max(0, left - max(one_request, needs.kv_cache_bytes))
    dense_state = _dense_state(needs, dense_budget)
    if dense_state == "refused" and needs.dense_mode == "enabled":
        raise ConfigError(_dense_refusal(readings, needs, budget, dense_budget, one_request, wanted))
    dense = needs.dense_bytes if dense_state == "enabled" else 0
    left -= dense

    most = one_request * needs.max_running
    if needs.kv_cache_bytes:
        kv_bytes = needs.kv_cache_bytes
    elif readings.device_bytes is None:
        kv_bytes = min(left, most, max(one_request, CPU_KV_BYTES))
    else:
        kv_bytes = min(left, most)
    kv_blocks = max(0, kv_bytes) // needs.block_bytes
    fits = kv_blocks * needs.block_size
    if kv_bytes > left or kv_blocks == 0 or (needs.max_model_len and fits < wanted):
        raise ConfigError(_refusal(readings, needs, budget, left, one_request, wanted))
    return MemoryPlan(
        budget_bytes=budget,
        weights_bytes=needs.weights_bytes,
        workspace_bytes=needs.workspace_bytes,
        dense_copies_bytes=dense,
        dense_budget_bytes=dense_budget,
        dense_state=dense_state,
        kv_blocks=kv_blocks,
        kv_cache_bytes=kv_blocks * needs.block_bytes,
        max_model_len=min(wanted, fits),
    )


def _dense_state(needs: MemoryNeeds, dense_budget: int) -> str:
    if needs.dense_mode not in DENSE_MODES:
        raise ConfigError(f"--dense-copies is {needs.dense_mode!r}: accepted {', '.join(DENSE_MODES)}")
    if needs.dense_mode == "disabled":
        return "disabled"
    return "enabled" if needs.dense_bytes <= dense_budget else "refused"


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _refusal(r: Readings, n: MemoryNeeds, budget: int, left: int, one_request: int, wanted: int) -> str:
    device = "" if r.device_bytes is None else f", device {_gib(r.device_bytes)}"
    asked = f", --kv-cache-bytes {_gib(n.kv_cache_bytes)}" if n.kv_cache_bytes else ""
    return (
        f"not enough memory: host available {_gib(r.host_available_bytes)}{device}, budget {_gib(budget)} "
        f"(fraction {n.memory_fraction:g}), weights {_gib(n.weights_bytes)}, workspace {_gib(n.workspace_bytes)}, "
        f"left for the KV cache {_gib(max(0, left))}{asked}; one request of {wanted} tokens needs {_gib(one_request)}. "
        "Free memory, raise --memory-fraction, lower --max-model-len or set a --kv-cache-bytes that fits"
    )


def _dense_refusal(
    r: Readings, n: MemoryNeeds, budget: int, dense_budget: int, one_request: int, wanted: int
) -> str:
    device = "" if r.device_bytes is None else f", device {_gib(r.device_bytes)}"
    return (
        f"dense copies refused: they need {_gib(n.dense_bytes)} for all layers and {_gib(dense_budget)} is left "
        f"(host available {_gib(r.host_available_bytes)}{device}, budget {_gib(budget)} at fraction "
        f"{n.memory_fraction:g}, weights {_gib(n.weights_bytes)}, workspace {_gib(n.workspace_bytes)}, KV cache for one "
        f"request of {wanted} tokens {_gib(max(one_request, n.kv_cache_bytes))}). Raise --memory-fraction, lower "
        "--max-model-len, or use --dense-copies disabled"
    )


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"


def read_host_available(meminfo: str = "/proc/meminfo") -> int:
    """MemAvailable in bytes. Raises ConfigError where the file does not say."""
    try:
        with open(meminfo, encoding="ascii", errors="replace") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError as error:
        raise ConfigError(f"{meminfo}: not readable ({error}); Linux is needed") from error
    raise ConfigError(f"{meminfo}: has no MemAvailable line; Linux 3.14 or newer is needed")


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """What the amdgpu driver says of a GPU's memory, in bytes: VRAM, and GTT, the host's memory that it may map."""

    gtt_used_bytes: int
    gtt_total_bytes: int
    vram_used_bytes: int
    vram_total_bytes: int


def read_gpu_memory(pci_address: str = "", sysfs: str = "/sys") -> GpuMemory | None:
    """Of the GPU at the PCI address, or without one of the only GPU; None where the driver says nothing of it."""
    root = Path(sysfs)
    if pci_address:
        return _gpu_memory(root / "bus/pci/devices" / pci_address)
    # Connectors, such as card0-HDMI-A-1, have no `device` of that kind.
    cards = [path.parent for path in root.glob("class/drm/card*/device/mem_info_vram_total")]
    return _gpu_memory(cards[0]) if len(cards) == 1 else None


def _gpu_memory(folder: Path) -> GpuMemory | None:
    try:
        values = [
            int((folder / f"mem_info_{pool}_{what}").read_text())
            for pool in ("gtt", "vram")
            for what in ("used", "total")
        ]
    except (OSError, ValueError):
        return None
    return GpuMemory(*values)
