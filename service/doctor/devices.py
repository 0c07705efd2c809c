"""Checks of the GPU itself: which chip, its driver, the nodes under /dev that a process must be able to open."""

from __future__ import annotations

from nybble.service.doctor import known
from nybble.service.doctor.facts import Facts
from nybble.service.doctor.findings import Finding, error, note, ok, warning
from nybble.service.doctor.gpus import Gpu, PciDevice
from nybble.service.doctor.host import Host, Node

KFD = "/dev/kfd"
_ACCEPTED_CHIPS = ", ".join(f"{chip.arch} ({chip.product})" for chip in known.CHIPS)


def chip(facts: Facts) -> Finding:
    if facts.torch.gpus and facts.torch.build != "ROCm":
        first = facts.torch.gpus[0]
        return note(
            f"{first.name} ({first.arch}), by a torch for {facts.torch.build}", f"AMD: {_ACCEPTED_CHIPS}"
        )
    if facts.gpu:
        return _supported(facts, facts.gpu)
    if facts.first:
        return _unsupported(facts, facts.first)
    if facts.gpus:
        hidden = ", ".join(f"{name}={value}" for name, value in facts.selections.items())
        return error(f"no GPU is left by {hidden}", "the number of a GPU, from 0 on", f"unset {hidden}")
    if facts.pci:
        return _not_listed(facts.pci[0])
    return note("no AMD GPU: Nybble runs on the CPU here", _ACCEPTED_CHIPS)


def _supported(facts: Facts, gpu: Gpu) -> Finding:
    tuned = known.chip_of(gpu.arch)
    product = tuned.product if tuned else "tiles of its family, not tuned"
    told = f"{gpu.arch} ({product}), {gpu.compute_units} CUs, at {gpu.pci_address}{_beside(facts, gpu)}"
    torch_gpus = facts.torch.gpus
    if torch_gpus and torch_gpus[0].arch != gpu.arch:
        return warning(
            f"{told}; to torch it is {torch_gpus[0].arch}",
            "the same from the kernel and from torch",
            "unset HSA_OVERRIDE_GFX_VERSION, or choose the GPU with HIP_VISIBLE_DEVICES",
        )
    return ok(told, _ACCEPTED_CHIPS) if tuned else note(told, _ACCEPTED_CHIPS)


def _unsupported(facts: Facts, gpu: Gpu) -> Finding:
    told = f"the first GPU is {gpu.arch}{_beside(facts, gpu)}: Nybble is not made for it"
    better = next((i for i, other in enumerate(facts.gpus) if known.is_supported(other.arch)), None)
    if better is not None:
        change = f"HIP_VISIBLE_DEVICES={better} chooses {facts.gpus[better].arch}"
        return warning(told, _ACCEPTED_CHIPS, change)
    if facts.torch.gpus:
        return warning(told, _ACCEPTED_CHIPS, "serve with --device cpu")
    return note(f"{told}, and runs on the CPU here", _ACCEPTED_CHIPS)


def _beside(facts: Facts, gpu: Gpu) -> str:
    others = [other.arch for other in facts.gpus if other is not gpu]
    return f", beside {', '.join(others)}" if others else ""


def _not_listed(device: PciDevice) -> Finding:
    """A GPU on the bus, no compute node."""
    chip_ = known.chip_of_pci(device.device_id)
    if chip_ is None:
        return note(
            f"an AMD GPU 1002:{device.device_id:04x} at {device.address} (driver {device.driver or 'none'}) that the kernel "
            "does not list for compute: Nybble runs on the CPU here",
            _ACCEPTED_CHIPS,
        )
    where = f"{chip_.arch} ({chip_.product}) at {device.address}"
    if device.driver not in ("", "amdgpu"):
        return error(
            f"{where} belongs to the driver {device.driver}",
            "the driver amdgpu",
            f"give it back to amdgpu (no {device.driver} ids= on the kernel command line)",
        )
    if device.driver:
        return error(
            f"{where} has the driver amdgpu, but the kernel lists no compute node",
            "a kernel whose amdkfd knows the chip",
            "in a container or unit: let it have /dev/kfd; else install a newer kernel, and see `dmesg | grep -i kfd`",
        )
    return error(
        f"{where} has no driver",
        "the driver amdgpu",
        "load amdgpu (`modprobe amdgpu`), install linux-firmware, see `dmesg | grep amdgpu`",
    )


def driver(facts: Facts) -> Finding | None:
    """amdgpu, from the kernel or from AMD's DKMS package, and what on the command line keeps it from working."""
    if not facts.arch:
        return None
    host = facts.host
    if "nomodeset" in host.command_line:
        return error(
            "nomodeset on the kernel command line: amdgpu does not start",
            "a command line without it",
            "remove nomodeset and reboot",
        )
    if not host.exists("/sys/module/amdgpu"):
        return error(
            "the module amdgpu is not loaded",
            "amdgpu",
            "`modprobe amdgpu`; look for a blacklist in /etc/modprobe.d",
        )
    version = host.text("/sys/module/amdgpu/version")
    told = f"amdgpu {version}, AMD's own (DKMS)" if version else f"amdgpu of Linux {host.kernel or '?'}"
    cwsr = host.module_parameters().get("amdgpu.cwsr_enable")
    if cwsr is not None and cwsr.value == "0":
        return note(
            f"{told}, with amdgpu.cwsr_enable=0",
            change="a workaround for faulty firmware and older kernels: remove it when both are mended",
            source=known.MES_ISSUE,
        )
    return ok(told)


def kfd_node(facts: Facts) -> Finding | None:
    if facts.gpu is None:
        return None
    return _node(facts.host, KFD)


def render_node(facts: Facts) -> Finding | None:
    if facts.gpu is None:
        return None
    return _node(facts.host, render_path(facts.gpu))


def render_path(gpu: Gpu) -> str:
    return f"/dev/dri/renderD{gpu.render or 128}"


def _node(host: Host, path: str) -> Finding:
    node = host.node(path)
    accepted = f"{path} that this process (uid {host.uid}) may open for reading and writing"
    if node is None:
        change = (
            f"start the container with the device: --device {path}"
            if host.in_container
            else "load amdgpu with compute support; see `dmesg | grep -i kfd`"
        )
        return error(f"{path} is not there", accepted, change)
    owner = f"{path} is {node.mode:04o}, uid {node.uid}, gid {node.gid}{_called(host, node.gid)}"
    if not node.refused:
        return ok(owner)
    mine = ", ".join(map(str, sorted(host.gids)))
    return error(
        f"{owner}; opening it as uid {host.uid}, gids {mine}: {node.refused}",
        accepted,
        _remedy(host, path, node),
    )


def _remedy(host: Host, path: str, node: Node) -> str:
    if node.refused == "ENOTTY":
        return f"{path} is no device: remove the file; in a container use --device, not a volume"
    if node.refused != "EACCES":
        return f"the device is kept from this process: --device {path} for a container, DeviceAllow={path} rw in a unit"
    if not node.mode & 0o060 == 0o060 or node.gid == 0:
        return (
            "its group has no access: restore the udev rule (package systemd or udev), which makes it group render, "
            "mode 0660, and run `udevadm trigger`"
        )
    if host.in_container:
        return f"start the container with --group-add {node.gid} (`nybble doctor --env` on the host writes it for compose)"
    group = host.group_name(node.gid) or str(node.gid)
    return f"`sudo usermod -aG {group} $USER` and log in again; in a container --group-add {node.gid}"


def _called(host: Host, gid: int) -> str:
    name = host.group_name(gid)
    return f" ({name})" if name else ""
