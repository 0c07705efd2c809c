"""What the amdgpu driver shows of GPUs under /sys, made up."""

from __future__ import annotations

from pathlib import Path


def fake_gpu(sysfs: Path, address: str, card: str, *values: int) -> None:
    """values: GTT used and total, VRAM used and total, in bytes."""
    device = sysfs / "bus/pci/devices" / address
    device.mkdir(parents=True)
    names = [f"mem_info_{pool}_{what}" for pool in ("gtt", "vram") for what in ("used", "total")]
    for name, value in zip(names, values, strict=True):
        (device / name).write_text(f"{value}\n")
    (sysfs / "class/drm" / card).mkdir(parents=True)
    (sysfs / "class/drm" / card / "device").symlink_to(device)
