"""What the device is: the only file that asks.

Everything else takes a `Target`, which tests build by hand.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class Target:
    """One device as the kernels see it.

    kind            "cpu", "rocm", "cuda" or "xpu"
    arch            "gfx1151", "sm_90", "x86_64" ...
    compute_units   CUs on AMD (HIP reports WGPs on RDNA: doubled here), SMs on CUDA, threads on a CPU
    lds_bytes       on-chip memory one workgroup may use; 0 on a CPU
    """

    kind: str
    arch: str
    name: str
    compute_units: int
    lds_bytes: int
    wave: int = 32

    @property
    def sm(self) -> int:
        """CUDA's compute capability, 90 for sm_90; 0 on anything else."""
        return int(self.arch.removeprefix("sm_")) if self.kind == "cuda" else 0

    @property
    def is_rdna(self) -> bool:
        return self.kind == "rocm" and self.arch.startswith(("gfx11", "gfx120"))

    @property
    def is_gfx115x(self) -> bool:
        return self.kind == "rocm" and self.arch.startswith("gfx115")


@dataclass(frozen=True, slots=True)
class CpuTraits:
    """vendor as CPUID spells it ("AuthenticAMD"; "" where unknown), flags as Linux does ("avx512f")."""

    vendor: str
    flags: frozenset[str]

    @property
    def is_zen_avx512(self) -> bool:
        """AMD with AVX-512: Zen 4 and newer."""
        return self.vendor == "AuthenticAMD" and "avx512f" in self.flags


@cache
def cpu_traits(cpuinfo: str = "/proc/cpuinfo") -> CpuTraits:
    """The first CPU of a Linux cpuinfo file; nothing known where there is none."""
    fields = _cpu_fields(cpuinfo)
    return CpuTraits(fields.get("vendor_id", ""), frozenset(fields.get("flags", "").split()))


def cpu_target() -> Target:
    return Target("cpu", platform.machine(), _cpu_name(), torch.get_num_threads(), 0, wave=1)


def detect(device: torch.device) -> Target:
    """The Target of a torch device. Raises ValueError for a device type no kernel here runs on."""
    if device.type == "cpu":
        return cpu_target()
    if device.type == "cuda":
        props = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            arch = props.gcnArchName.split(":")[0]
            units = props.multi_processor_count
            rdna = arch.startswith(("gfx11", "gfx12"))
            return Target(
                "rocm", arch, props.name, units * 2 if rdna else units, 65536, wave=32 if rdna else 64
            )
        shared = int(getattr(props, "shared_memory_per_block_optin", 49152))
        return Target(
            "cuda", f"sm_{props.major}{props.minor}", props.name, props.multi_processor_count, shared
        )
    if device.type == "xpu":
        xpu = torch.xpu.get_device_properties(device)
        return Target("xpu", f"xpu_{xpu.architecture:x}", xpu.name, xpu.max_compute_units, xpu.local_mem_size)
    raise ValueError(
        f"device {device.type!r}: given {device}, accepted cpu, xpu or cuda (a ROCm torch calls its GPUs cuda)"
    )


def shares_host_memory(device: torch.device) -> bool:
    """Whether a GPU's memory is the host's (an APU), so that the page cache takes from it."""
    return device.type == "cuda" and bool(
        getattr(torch.cuda.get_device_properties(device), "is_integrated", False)
    )


def default_device() -> torch.device:
    """The GPU when torch sees one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def pci_address(device: torch.device) -> str:
    """As Linux spells it, "0000:c5:00.0"; empty for a CPU or where torch does not say."""
    if device.type != "cuda":
        return ""
    props = torch.cuda.get_device_properties(device)
    parts = [getattr(props, name, -1) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    return "" if -1 in parts else "{:04x}:{:02x}:{:02x}.0".format(*parts)


def usable_cores() -> int:
    """Cores this process may run on (cgroup cpusets and affinity included)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    return _cpu_fields("/proc/cpuinfo").get("model name") or platform.processor() or "cpu"


def _cpu_fields(cpuinfo: str) -> dict[str, str]:
    """key -> value of the first CPU's block, {} when the file cannot be read."""
    fields: dict[str, str] = {}
    try:
        with open(cpuinfo, encoding="utf-8", errors="replace") as f:
            for line in f:
                key, _, value = line.partition(":")
                if not key.strip():
                    break
                fields[key.strip()] = value.strip()
    except OSError:
        pass
    return fields
