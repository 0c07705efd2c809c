"""AMD GPUs as the kernel lists them: compute nodes of the KFD topology, and display devices on the PCI bus."""

from __future__ import annotations

from dataclasses import dataclass

from nybble.service.doctor.host import Host

KFD_NODES = "/sys/class/kfd/kfd/topology/nodes"
PCI_DEVICES = "/sys/bus/pci/devices"
AMD = 0x1002
# linux/drivers/gpu/drm/amd/amdkfd and libdrm: a render node's number is 128 or more.
FIRST_RENDER = 128


@dataclass(frozen=True, slots=True)
class Gpu:
    """One compute node.

    render      number of /dev/dri/renderD*, 0 where the kernel gives none
    cwsr_bytes  what the kernel says a queue's saved state takes; 0 where it does not say (older kernels)
    """

    node: int
    arch: str
    pci_address: str
    render: int
    compute_units: int
    cwsr_bytes: int


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A display device of AMD. driver: "amdgpu", "vfio-pci", "" for none."""

    address: str
    device_id: int
    driver: str


def arch_name(version: int) -> str:
    """KFD's gfx_target_version as a name: 110501 -> gfx1151, 90010 -> gfx90a."""
    major, minor, step = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{step:x}"


def read_gpus(host: Host) -> tuple[Gpu, ...]:
    """In the kernel's order, which is that of HIP without a *_VISIBLE_DEVICES. A node that cannot be made out is left
    out."""
    return tuple(gpu for name in host.names(KFD_NODES) if name.isdecimal() and (gpu := _gpu(host, name)))


def _gpu(host: Host, name: str) -> Gpu | None:
    properties = _properties(host.text(f"{KFD_NODES}/{name}/properties"))
    version = properties.get("gfx_target_version", 0)
    if not version or not properties.get("simd_count"):  # a CPU
        return None
    location, render = properties.get("location_id", 0), properties.get("drm_render_minor", 0)
    bus, device, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 7
    return Gpu(
        node=int(name),
        arch=arch_name(version),
        pci_address=f"{properties.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function}",
        render=render if render >= FIRST_RENDER else 0,
        compute_units=properties["simd_count"] // (properties.get("simd_per_cu") or 2),
        cwsr_bytes=properties.get("cwsr_size", 0),
    )


def _properties(text: str) -> dict[str, int]:
    rows = [line.split() for line in text.splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal() and len(row[1]) <= 20}


def read_pci(host: Host) -> tuple[PciDevice, ...]:
    """AMD's display controllers."""
    found = []
    for address in host.names(PCI_DEVICES):
        folder = f"{PCI_DEVICES}/{address}"
        kind, vendor = host.number(f"{folder}/class"), host.number(f"{folder}/vendor")
        if kind is not None and kind >> 16 == 0x03 and vendor == AMD:
            device_id = host.number(f"{folder}/device") or 0
            found.append(PciDevice(address, device_id, host.link_name(f"{folder}/driver")))
    return tuple(found)
