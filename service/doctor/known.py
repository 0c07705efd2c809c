"""What is known of chips and versions, as tables; each row names where the fact is published.

No machine of this project has such a chip: the rows are what AMD and people with the hardware have written.
"""

from __future__ import annotations

from dataclasses import dataclass

from nybble.service.doctor.findings import Severity
from nybble.service.memory import GIB

# ttm.pages_limit counts pages of 4 KiB.
PAGES_PER_GIB = GIB // 4096

STRIX_HALO_GUIDE = "rocm.docs.amd.com/en/latest/how-to/system-optimization/strixhalo.html"
MES_ISSUE = "github.com/ROCm/legacy-rocm-build/issues/5724"
OVERRIDE_ISSUE = "github.com/ROCm/rocm-systems/issues/3531"
EMPTY_OVERRIDE = "github.com/ROCm/rocm-systems/pull/5686"
BLAS_ISSUE = "github.com/pytorch/pytorch/pull/185375"
GTTSIZE_SOURCE = "linux/drivers/gpu/drm/amd/amdgpu/amdgpu_ttm.c"


@dataclass(frozen=True, slots=True)
class Chip:
    """shared_memory: the GPU's memory is the host's. pci_ids: device ids, for a kernel that does not list the chip."""

    arch: str
    product: str
    shared_memory: bool
    pci_ids: tuple[int, ...] = ()


# Those with tiles of their own (kernels/tiles). Product names: LLVM's AMDGPUUsage; ids: pci.ids.
CHIPS = (
    Chip("gfx1151", "Strix Halo, Ryzen AI Max", shared_memory=True, pci_ids=(0x1586,)),
    Chip("gfx1100", "Radeon RX 7900", shared_memory=False, pci_ids=(0x744C, 0x7448)),
    Chip("gfx1201", "Radeon RX 9070, AI PRO R9700", shared_memory=False, pci_ids=(0x7550, 0x7551)),
)
# Other chips that the kernels are made for, with the tiles of their family.
FAMILIES = ("gfx11", "gfx120")
# LLVM's AMDGPUUsage: APUs among them.
SHARED_MEMORY = ("gfx1103", "gfx115")


def chip_of(arch: str) -> Chip | None:
    return next((chip for chip in CHIPS if chip.arch == arch), None)


def chip_of_pci(device_id: int) -> Chip | None:
    return next((chip for chip in CHIPS if device_id in chip.pci_ids), None)


def is_supported(arch: str) -> bool:
    return arch.startswith(FAMILIES)


def shares_memory(arch: str) -> bool:
    return arch.startswith(SHARED_MEMORY)


@dataclass(frozen=True, slots=True)
class KernelRule:
    """Kernels before `since` lack a fix that chips of this kind need.

    shown_by_cwsr: the fix shows in the KFD topology (cwsr_size), which counts more than the version: distributions take
    the fix into older kernels.
    """

    arch: str
    since: tuple[int, ...]
    shown_by_cwsr: bool
    accepted: str
    why: str
    source: str


KERNELS = (
    KernelRule(
        "gfx1151",
        (6, 18, 4),
        True,
        "Linux 6.18.4 or newer, Ubuntu's OEM kernel 6.14.0-1018 or newer",
        "it reserves too little for the state of a queue, so that compute may fail or crash",
        STRIX_HALO_GUIDE,
    ),
)


@dataclass(frozen=True, slots=True)
class RocmRule:
    """ROCm from `since` up to, not including, `before`. kernel_fixed: only beside a kernel that has (or lacks) the fix
    of KERNELS; None: beside any."""

    arch: str
    since: tuple[int, ...]
    before: tuple[int, ...]
    kernel_fixed: bool | None
    severity: Severity
    why: str
    accepted: str
    source: str


_STRIX_ROCM = "ROCm 7.2.1 or newer of the 7.2 line, or 7.11 or newer, on a kernel with the fix"
# The first row that fits is what is said. AMD's table is of its own builds; distributions' packages may differ.
ROCM = (
    RocmRule(
        "gfx1151",
        (0,),
        (7, 2),
        True,
        Severity.ERROR,
        "it allocates other register counts than this kernel",
        _STRIX_ROCM,
        STRIX_HALO_GUIDE,
    ),
    RocmRule(
        "gfx1151",
        (7, 9),
        (7, 11),
        True,
        Severity.ERROR,
        "it allocates other register counts than this kernel",
        _STRIX_ROCM,
        STRIX_HALO_GUIDE,
    ),
    RocmRule(
        "gfx1151",
        (7, 2),
        (7, 2, 1),
        False,
        Severity.ERROR,
        "7.2.0 needs the kernel's fix",
        _STRIX_ROCM,
        STRIX_HALO_GUIDE,
    ),
    RocmRule(
        "gfx1151",
        (0,),
        (1000,),
        False,
        Severity.WARNING,
        "without the kernel's fix AMD calls it unstable",
        _STRIX_ROCM,
        STRIX_HALO_GUIDE,
    ),
    RocmRule(
        "gfx12",
        (0,),
        (6, 4, 1),
        None,
        Severity.ERROR,
        "it does not know the chip",
        "ROCm 6.4.1 or newer",
        "github.com/ROCm/legacy-rocm-build/issues/4485",
    ),
    RocmRule(
        "gfx1100",
        (0,),
        (5, 7),
        None,
        Severity.ERROR,
        "it does not know the chip",
        "ROCm 5.7 or newer",
        "github.com/ROCm/amdgpu/issues/151",
    ),
)


@dataclass(frozen=True, slots=True)
class FirmwareRule:
    """mes: version of the scheduler's firmware as the driver reports it. release: date of linux-firmware."""

    arch: str
    bad_mes: tuple[int, ...]
    bad_releases: tuple[str, ...]
    accepted: str
    why: str
    source: str


FIRMWARE = (
    FirmwareRule(
        "gfx115",
        (0x83,),
        ("20251125",),
        "linux-firmware 20251111 (MES 0x80), or 20260110 and newer",
        "GPU hangs and memory faults under compute",
        MES_ISSUE,
    ),
)

# linux-firmware's package by distribution; of rpm nothing can be read without rpm.
DPKG_FIRMWARE = ("linux-firmware", "firmware-amd-graphics")
PACMAN_FIRMWARE = ("linux-firmware-amdgpu-", "linux-firmware-")
