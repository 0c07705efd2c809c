"""What the checks look at, read once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from itertools import takewhile

from nybble.service.doctor import known
from nybble.service.doctor.gpus import Gpu, PciDevice, read_gpus, read_pci
from nybble.service.doctor.host import Host, version_numbers
from nybble.service.doctor.torch_probe import Torch, probe_torch
from nybble.service.memory import GpuMemory, read_gpu_memory

# Which of the GPUs a process sees: ROCr's choice first, then HIP's among those that are left.
VISIBLE_ROCR, VISIBLE_HIP = "ROCR_VISIBLE_DEVICES", ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
# Names that Triton and ROCm's own packages are published under.
TRITON_NAMES = ("triton", "pytorch-triton-rocm", "triton-rocm")
ROCM_PACKAGES = ("rocm-sdk-core", "rocm")


def installed_versions() -> dict[str, str]:
    """Name -> version of every package that this Python has."""
    found = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found[name.lower().replace("_", "-")] = distribution.version or ""
    return found


def accepted_ranges() -> dict[str, str]:
    """Name -> versions that this package says it runs with, as its metadata has them."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in metadata.requires("nybble") or ()]
    except metadata.PackageNotFoundError:
        return {}
    return {requirement.name.lower(): str(requirement.specifier) for requirement in requirements}


@dataclass(frozen=True)
class Facts:
    """ask_torch, packages, ranges: replaced by tests. model: what --model named, "" for nothing."""

    host: Host = field(default_factory=Host)
    model: str = ""
    ask_torch: Callable[[], Torch] = probe_torch
    packages: Callable[[], Mapping[str, str]] = installed_versions
    ranges: Callable[[], Mapping[str, str]] = accepted_ranges

    @cached_property
    def torch(self) -> Torch:
        return self.ask_torch()

    @cached_property
    def versions(self) -> Mapping[str, str]:
        return self.packages()

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        return read_gpus(self.host)

    @cached_property
    def pci(self) -> tuple[PciDevice, ...]:
        return read_pci(self.host)

    @cached_property
    def first(self) -> Gpu | None:
        """The compute node that is a ROCm torch's first GPU: what `serve` takes."""
        visible = self.visible
        return visible[0] if visible else None

    @property
    def gpu(self) -> Gpu | None:
        """The same where Nybble is made for it, else None: then nothing that is about AMD's GPUs matters here."""
        return self.first if self.first and known.is_supported(self.first.arch) else None

    @property
    def visible(self) -> tuple[Gpu, ...]:
        """The compute nodes that *_VISIBLE_DEVICES leave, in their order. Lists of UUIDs are not looked at."""
        gpus = self.gpus
        for numbers in filter(None, map(_numbers, self.selections.values())):
            gpus = tuple(gpus[n] for n in numbers if n < len(gpus)) if numbers != (-1,) else ()
        return gpus

    @property
    def selections(self) -> dict[str, str]:
        """The *_VISIBLE_DEVICES that count. One that is empty does not; of HIP's and CUDA's the first."""
        environ = self.host.environ
        hip = next((name for name in VISIBLE_HIP if environ.get(name, "").strip()), "")
        return {name: environ[name] for name in (VISIBLE_ROCR, hip) if environ.get(name, "").strip()}

    @cached_property
    def memory(self) -> GpuMemory | None:
        """What the driver says of that GPU's memory."""
        if self.gpu is None:
            return None
        found = read_gpu_memory(self.gpu.pci_address, str(self.host.at("/sys")))
        values = () if found is None else (found.gtt_used_bytes, found.vram_used_bytes, found.gtt_total_bytes)
        return None if found is None or min(values) < 0 else found

    @property
    def addressable_bytes(self) -> int | None:
        """What the GPU can address: of an APU the larger of its two pools, which is where Linux allocates."""
        if self.memory is None or self.gpu is None:
            return None
        if known.shares_memory(self.gpu.arch):
            return max(self.memory.vram_total_bytes, self.memory.gtt_total_bytes)
        return self.memory.vram_total_bytes

    @property
    def free_bytes(self) -> int | None:
        """The same, less what is taken; None where it is not known."""
        if self.memory is None or self.gpu is None:
            return None
        m = self.memory
        vram, gtt = m.vram_total_bytes - m.vram_used_bytes, m.gtt_total_bytes - m.gtt_used_bytes
        if not known.shares_memory(self.gpu.arch):
            return max(0, vram)
        return max(0, gtt if m.gtt_total_bytes >= m.vram_total_bytes else vram)

    @property
    def arch(self) -> str:
        """Of the GPU that `serve` takes, as far as the kernel alone can tell; "" for none that Nybble is made for."""
        if self.gpus:
            return self.gpu.arch if self.gpu else ""
        chips = (known.chip_of_pci(device.device_id) for device in self.pci)
        return next((chip.arch for chip in chips if chip), "")

    @property
    def kernel_has_fix(self) -> bool | None:
        """Whether the kernel has the fix that this chip needs (known.KERNELS); None where it needs none."""
        rule = self.kernel_rule
        if rule is None or self.gpu is None:
            return None
        if rule.shown_by_cwsr:
            return self.gpu.cwsr_bytes > 0
        return version_numbers(self.host.kernel) >= rule.since

    @property
    def kernel_rule(self) -> known.KernelRule | None:
        gpu = self.gpu
        return None if gpu is None else next((r for r in known.KERNELS if gpu.arch == r.arch), None)

    @property
    def triton(self) -> tuple[str, str]:
        """Name and version of the installed Triton; ("", "") for none."""
        return next(((n, self.versions[n]) for n in TRITON_NAMES if n in self.versions), ("", ""))

    @property
    def rocm(self) -> tuple[str, str]:
        """Version of the ROCm that torch runs on, and where it says so; ("", "") where nothing does."""
        local = (
            self.torch.version.partition("+rocm")[2] or self.versions.get("torch", "").partition("+rocm")[2]
        )
        told = [("torch's version", local)]
        told += [(f"package {name}", self.versions.get(name, "")) for name in ROCM_PACKAGES]
        # HIP's third number is not ROCm's.
        told += [("torch.version.hip", ".".join(self.torch.hip.split(".")[:2]))]
        told += [("/opt/rocm/.info/version", self.host.text("/opt/rocm/.info/version"))]
        return next(((version, where) for where, version in told if version_numbers(version)), ("", ""))


def _numbers(value: str) -> tuple[int, ...]:
    """0,2 -> (0, 2); (-1,) where nothing is left; () for a list of UUIDs. What follows a word that is no number, -1
    included, does not count, as in HIP."""
    words = [word.strip() for word in value.split(",")]
    if not re.fullmatch(r"-?\d+", words[0], re.ASCII):
        return ()
    numbers = tuple(
        int(word) for word in takewhile(lambda word: re.fullmatch(r"\d{1,3}", word, re.ASCII), words)
    )
    return numbers or (-1,)
