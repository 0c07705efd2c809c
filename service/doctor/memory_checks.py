"""Checks of memory: the pools and how they overlap, how much of it the GPU may map, and the plan for a model."""

from __future__ import annotations

from nybble.service.doctor import known
from nybble.service.doctor.facts import Facts
from nybble.service.doctor.findings import Finding, error, note, ok, size, warning
from nybble.service.doctor.host import Host
from nybble.service.memory import GIB

# Below this nothing that is worth serving fits.
LEAST_BYTES = 2 * GIB
# Linux lets the GPU map half of the memory unless told otherwise.
USUAL_PART = 0.5
# Of the memory that Linux has, this part, and at least this much, stays out of the GPU's reach when a limit is proposed.
SPARED_PART, SPARED_GIB = 1 / 8, 4
# AMD proposes 0.5 GiB; from here on a carve-out is more than a display needs.
MOST_CARVE_OUT_BYTES = 4 * GIB
WHERE = (
    "Debian, Ubuntu: GRUB_CMDLINE_LINUX_DEFAULT in /etc/default/grub, then `update-grub`; Fedora: `grubby "
    "--update-kernel=ALL --args=...`; then reboot"
)


def pools(facts: Facts) -> Finding:
    info = facts.host.meminfo()
    total, available = info.get("MemTotal"), info.get("MemAvailable")
    if total is None or available is None:
        return error(
            "/proc/meminfo has no MemTotal or no MemAvailable",
            "Linux with /proc",
            "mount /proc in the container",
        )
    linux = f"{size(available)} of {size(total)} available to Linux"
    gpu, memory = facts.gpu, facts.memory
    if gpu is None:
        return ok(linux)
    if memory is None:
        return note(
            f"{linux}; the driver says nothing of {gpu.pci_address}", change="mount /sys in the container"
        )
    vram = f"VRAM {size(memory.vram_used_bytes)} of {size(memory.vram_total_bytes)} used"
    gtt = f"GTT {size(memory.gtt_used_bytes)} of {size(memory.gtt_total_bytes)} used"
    if not known.shares_memory(gpu.arch):
        return ok(f"{vram}; {linux}; {gtt} (of the host's memory, over PCIe: not planned with)")
    told = f"one memory: {vram} (taken from Linux at boot), {gtt} (pages of what Linux has, never to be added to it), {linux}"
    if memory.vram_total_bytes <= MOST_CARVE_OUT_BYTES:
        return ok(told)
    return warning(
        f"{told}. The firmware keeps {size(memory.vram_total_bytes)} from Linux for good, and the plan takes the smaller "
        "of what the GPU can address and what Linux can spare",
        "a frame buffer (UMA) of 0.5 GiB in the firmware's settings",
        "set it there and raise ttm.pages_limit instead",
        known.STRIX_HALO_GUIDE,
    )


def mapping_limit(facts: Facts) -> Finding | None:
    """On an APU: how much the GPU may map (GTT), and what to put on the kernel command line."""
    gpu, memory, addressable = facts.gpu, facts.memory, facts.addressable_bytes
    total = facts.host.meminfo().get("MemTotal")
    if gpu is None or memory is None or addressable is None or total is None:
        return None
    if not known.shares_memory(gpu.arch):
        return None
    module = ttm_module(facts.host)
    limit = facts.host.number(f"/sys/module/{module}/parameters/pages_limit")
    wanted_gib = proposed_gib(total)
    told = f"the GPU may map {size(memory.gtt_total_bytes)} of {size(total)}"
    if limit is not None:
        told += f" ({module}.pages_limit={limit}, {limit / known.PAGES_PER_GIB:.1f} GiB)"
    if memory.vram_total_bytes > memory.gtt_total_bytes:
        told += f"; its frame buffer of {size(memory.vram_total_bytes)} is larger, and what it takes"
    accepted = f"{module}.pages_limit = GiB x {known.PAGES_PER_GIB} (pages of 4 KiB)"
    change = f"kernel command line: {_setting(module, wanted_gib)} for {wanted_gib} GiB{_leftovers(facts.host, module)}. {WHERE}"
    if addressable < LEAST_BYTES:
        return error(f"{told}: no model fits", accepted, change, known.STRIX_HALO_GUIDE)
    trap = _trap(facts.host, module)
    if trap:
        return warning(f"{told}; {trap}", accepted, change, known.GTTSIZE_SOURCE)
    part = addressable / total
    if part < 0.9 * USUAL_PART:
        return warning(f"{told}: less than Linux allows by itself", accepted, change, known.STRIX_HALO_GUIDE)
    if part < 1.1 * USUAL_PART and addressable < 0.9 * wanted_gib * GIB:
        return note(f"{told}: the usual half", accepted, change, known.STRIX_HALO_GUIDE)
    return ok(told, accepted)


def ttm_module(host: Host) -> str:
    """AMD's DKMS driver brings a TTM of its own, and reads none of the other's parameters."""
    return "amdttm" if host.exists("/sys/module/amdttm") else "ttm"


def proposed_gib(total_bytes: int) -> int:
    """What the GPU may map of this memory with enough left to the rest: even numbers of GiB, at least 1."""
    gib = total_bytes / GIB
    room = int(gib - max(SPARED_GIB, gib * SPARED_PART))
    return max(1, room - room % 2) if room > 1 else 1


def _setting(module: str, gib: int) -> str:
    return f"{module}.pages_limit={gib * known.PAGES_PER_GIB}"


def _other(module: str) -> str:
    return "ttm" if module == "amdttm" else "amdttm"


def _trap(host: Host, module: str) -> str:
    """A setting that does not do what it was meant to."""
    given, other = host.module_parameters(), f"{_other(module)}.pages_limit"
    gtt_size = given.get("amdgpu.gttsize")
    if gtt_size and gtt_size.value != "-1":
        return f"amdgpu.gttsize={gtt_size.value} (MiB) is deprecated and leaves {module}.pages_limit as it is"
    if other in given and f"{module}.pages_limit" not in given:
        return f"{other} is for a module that is not loaded here: it does nothing"
    return ""


def _leftovers(host: Host, module: str) -> str:
    given = host.module_parameters()
    stale = ("amdgpu.gttsize", f"{_other(module)}.pages_limit", f"{_other(module)}.page_pool_size")
    found = [
        f"{name} (in {given[name].file})" if given[name].file else name for name in stale if name in given
    ]
    return f", without {', '.join(found)}" if found else ""


def plan(facts: Facts) -> Finding | None:
    """What `serve` would plan for the model that --model names."""
    if not facts.model:
        return None
    if facts.torch.problem:
        return note("not planned: torch does not work here")
    from nybble.service.doctor.plan import plan_for

    return plan_for(facts)
