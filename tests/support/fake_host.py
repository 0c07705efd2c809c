"""Machines that are folders: what `nybble doctor` reads of /sys, /proc, /dev and /etc, and a torch that says what it is
told to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from nybble.service.doctor.facts import Facts
from nybble.service.doctor.host import Host, Node
from nybble.service.doctor.torch_probe import Torch, TorchGpu
from nybble.service.memory import GIB

RENDER, VIDEO = 993, 44
RANGES = {"torch": "<2.15,>=2.11", "triton": "<3.10,>=3.6"}
GROUPS = f"root:x:0:\nvideo:x:{VIDEO}:me\nrender:x:{RENDER}:me\n"


@dataclass
class FakeHost:
    """Files are written as they are asked for; the rest is changed in place before `facts` is called."""

    root: Path
    nodes: dict[str, Node] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=lambda: {"torch": "2.13.0+cpu"})
    torch: Torch = Torch(version="2.13.0+cpu")
    gids: frozenset[int] = frozenset((1000, VIDEO, RENDER))

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def facts(self, model: str = "") -> Facts:
        return Facts(
            host=Host(self.root, self.environ, 1000, self.gids, self._node),
            model=model,
            ask_torch=lambda: self.torch,
            packages=lambda: self.packages,
            ranges=lambda: RANGES,
        )

    def _node(self, path: str) -> Node | None:
        """What opening it gives, by the rules of the kernel for modes and groups."""
        node = self.nodes.get(path)
        if node is None or node.refused:
            return node
        rights = node.mode >> (6 if node.uid == 1000 else 3 if node.gid in self.gids else 0) & 6
        return node if rights == 6 else Node(node.uid, node.gid, node.mode, "EACCES")


def computer(
    root: Path, kernel: str, memory_gib: float, available_gib: float, command_line: str = "quiet"
) -> FakeHost:
    host = FakeHost(root)
    host.write("/proc/sys/kernel/osrelease", kernel + "\n")
    host.write("/proc/cmdline", f"BOOT_IMAGE=/vmlinuz root=UUID=1 ro {command_line}\n")
    total, available = int(memory_gib * GIB) >> 10, int(available_gib * GIB) >> 10
    host.write(
        "/proc/meminfo",
        f"MemTotal:  {total} kB\nMemFree:  9 kB\nMemAvailable:  {available} kB\nHugePages_Total: 0\n",
    )
    host.write("/etc/group", GROUPS)
    host.write("/sys/class/kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 32\nsimd_count 0\n")
    return host


def add_gpu(
    host: FakeHost,
    gfx_version: int,
    device_id: int,
    *,
    vram_gib: float,
    gtt_gib: float,
    simds: int = 80,
    cwsr: bool = True,
    mes: str = "0x00000080",
    node: int = 1,
    bus: int = 0xC5,
) -> None:
    address = f"0000:{bus:02x}:00.0"
    properties = {
        "simd_count": simds,
        "simd_per_cu": 2,
        "gfx_target_version": gfx_version,
        "vendor_id": 4098,
        "device_id": device_id,
        "location_id": bus << 8,
        "domain": 0,
        "drm_render_minor": 127 + node,
        "hive_id": 2**64 - 1,
    }
    if cwsr:
        properties |= {"cwsr_size": 23855104, "ctl_stack_size": 24576}
    lines = "".join(f"{name} {value}\n" for name, value in properties.items())
    host.write(f"/sys/class/kfd/kfd/topology/nodes/{node}/properties", lines)
    device = f"/sys/bus/pci/devices/{address}"
    files = {"class": "0x038000", "vendor": "0x1002", "device": f"{device_id:#06x}"}
    files |= {"mem_info_vram_total": str(int(vram_gib * GIB)), "mem_info_vram_used": str(1 << 20)}
    files |= {"mem_info_gtt_total": str(int(gtt_gib * GIB)), "mem_info_gtt_used": str(1 << 20)}
    files |= {"fw_version/mes_fw_version": mes}
    for name, text in files.items():
        host.write(f"{device}/{name}", text + "\n")
    driver = host.root / "sys/bus/pci/drivers/amdgpu"
    driver.mkdir(parents=True, exist_ok=True)
    (host.root / device.lstrip("/") / "driver").symlink_to(driver)
    host.write("/sys/module/amdgpu/refcnt", "1\n")
    host.write("/sys/module/ttm/parameters/pages_limit", f"{int(gtt_gib * 262144)}\n")
    host.nodes["/dev/kfd"] = Node(0, RENDER, 0o660)
    host.nodes[f"/dev/dri/renderD{127 + node}"] = Node(0, RENDER, 0o660)
    host.nodes[f"/dev/dri/card{node}"] = Node(0, VIDEO, 0o660)
    host.write(f"/dev/dri/card{node}", "")


def with_rocm(
    host: FakeHost, arch: str, rocm: str = "7.2.1", free_gib: float = 100, blas: str = "cublaslt"
) -> None:
    """A torch for ROCm that sees the GPU."""
    version = f"2.13.0+rocm{rocm}"
    gpu = TorchGpu("AMD Radeon Graphics", arch, int(free_gib * GIB), int(free_gib * GIB))
    host.torch = Torch(version=version, hip="7.2.53211", gpus=(gpu,), blas=blas)
    host.packages = {"torch": version, "triton": "3.7.1"}


def strix_halo(root: Path, **change: object) -> FakeHost:
    """128 GB, set up as docs/strix-halo.md says."""
    host = computer(root, "6.18.9-200.fc43.x86_64", 124.9, 118, "quiet ttm.pages_limit=28311552")
    add_gpu(host, 110501, 0x1586, **({"vram_gib": 0.5, "gtt_gib": 108} | change))  # type: ignore[arg-type]
    with_rocm(host, "gfx1151", free_gib=107.9)
    host.write("/var/lib/pacman/local/linux-firmware-amdgpu-20260110-1/desc", "")
    return host


def radeon_7900(root: Path) -> FakeHost:
    host = computer(root, "6.8.0-60-generic", 62.7, 55)
    add_gpu(host, 110000, 0x744C, vram_gib=23.98, gtt_gib=31.3, simds=192, cwsr=False, bus=3)
    with_rocm(host, "gfx1100", free_gib=23.9)
    return host


def radeon_9700(root: Path) -> FakeHost:
    host = computer(root, "6.14.0-33-generic", 125.6, 119)
    add_gpu(host, 120001, 0x7551, vram_gib=31.86, gtt_gib=62.8, simds=128, mes="0x0000008b", bus=3)
    with_rocm(host, "gfx1201", free_gib=31.7)
    host.write("/sys/module/amdgpu/version", "6.16.13\n")
    host.write("/sys/module/amdttm/parameters/pages_limit", "16462643\n")
    return host


def bare_vm(root: Path) -> FakeHost:
    host = computer(root, "6.1.0-37-cloud-amd64", 7.8, 6.9)
    return host


def broken(root: Path) -> FakeHost:
    """A Strix Halo with an old kernel, faulty firmware, a GTT of 512 MiB, and a user in no group."""
    host = computer(root, "6.8.0-45-generic", 62.0, 58, "quiet amdgpu.gttsize=512")
    add_gpu(host, 110501, 0x1586, vram_gib=0.5, gtt_gib=0.5, cwsr=False, mes="0x00000083")
    host.gids = frozenset((1000,))
    host.environ = {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}
    host.torch = Torch(version="2.13.0+rocm7.2.0", hip="7.2.26015", gpu_problem="No HIP GPUs are available")
    host.packages = {"torch": "2.13.0+rocm7.2.0"}
    return host


HOSTS = {f.__name__: f for f in (strix_halo, radeon_7900, radeon_9700, bare_vm, broken)}
