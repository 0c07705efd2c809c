"""Checks of versions and settings: kernel, firmware, ROCm, torch, Triton, environment."""

from __future__ import annotations

import re
from pathlib import Path

from nybble.service.doctor import known
from nybble.service.doctor.facts import Facts
from nybble.service.doctor.findings import Finding, error, note, ok, warning
from nybble.service.doctor.host import Host, version_numbers
from nybble.service.errors import ConfigError
from nybble.service.folders import kernel_cache_folder
from nybble.service.settings import Settings, ignored_variables, load_settings

OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
AMD_INDEX = "README.md, Installation: TORCH_INDEX_URL of an index with ROCm builds"


def kernel(facts: Facts) -> Finding | None:
    if facts.gpu is None:
        return None
    rule, release = facts.kernel_rule, facts.host.kernel or "unknown"
    if rule is None:
        return ok(f"Linux {release}, which lists {facts.gpu.arch} for compute")
    if facts.kernel_has_fix:
        return ok(f"Linux {release}, with the fix for {rule.arch}", rule.accepted)
    found = f"Linux {release} lacks a fix for {rule.arch}: {rule.why}"
    return warning(found, rule.accepted, "install such a kernel and reboot", rule.source)


def firmware(facts: Facts) -> Finding | None:
    """The scheduler's firmware as the driver reports it; the package only where that says more."""
    gpu = facts.gpu
    if gpu is None:
        return None
    host = facts.host
    mes = host.number(f"/sys/bus/pci/devices/{gpu.pci_address}/fw_version/mes_fw_version")
    package = firmware_package(host)
    told = f"MES {mes:#x}" if mes is not None else "MES version not readable"
    told += f", package {package}" if package else ", package not found (rpm is not read)"
    rule = next((rule for rule in known.FIRMWARE if gpu.arch.startswith(rule.arch)), None)
    if rule is None:
        return ok(told)
    change = "install another linux-firmware, rebuild the initramfs, reboot; then `nybble doctor` again"
    if mes in rule.bad_mes:
        return error(f"{told}: {rule.why}", rule.accepted, change, rule.source)
    if mes is None and any(release in package for release in rule.bad_releases):
        return warning(
            f"{told}: {rule.why}, unless the distribution took the faulty file back",
            rule.accepted,
            change,
            rule.source,
        )
    return ok(told, rule.accepted)


def firmware_package(host: Host) -> str:
    """Name and version of the package with amdgpu's firmware, "" where dpkg and pacman know none."""
    for paragraph in host.text("/var/lib/dpkg/status").split("\n\n"):
        fields = dict(re.findall(r"^(Package|Status|Version): *(.*)$", paragraph, re.MULTILINE))
        if fields.get("Package") in known.DPKG_FIRMWARE and "installed" in fields.get("Status", "").split():
            return f"{fields['Package']} {fields.get('Version', '?')}"
    installed = host.names("/var/lib/pacman/local")
    for prefix in known.PACMAN_FIRMWARE:
        for name in installed:
            if re.match(re.escape(prefix) + r"\d", name):
                return f"{prefix.rstrip('-')} {name.removeprefix(prefix)}"
    return ""


def rocm(facts: Facts) -> Finding | None:
    gpu = facts.gpu
    if gpu is None:
        return None
    version, where = facts.rocm
    numbers = version_numbers(version)
    if not numbers:
        return note("no ROCm version found", change="torch from AMD's index brings its own ROCm")
    told = f"ROCm {version} ({where})"
    for rule in known.ROCM:
        if not gpu.arch.startswith(rule.arch) or not rule.since <= numbers < rule.before:
            continue
        if rule.kernel_fixed in (None, facts.kernel_has_fix):
            return Finding(
                rule.severity,
                f"{told} with {gpu.arch}: {rule.why}",
                rule.accepted,
                "install torch for such a ROCm; distributions' own ROCm packages may carry the fix all the same"
                if rule.kernel_fixed is not False
                else "install a kernel with the fix first (see kernel)",
                rule.source,
            )
    return ok(told)


def torch(facts: Facts) -> Finding:
    asked, accepted = facts.torch, facts.ranges().get("torch", "")
    if asked.problem:
        installed = facts.versions.get("torch")
        have = f"torch {installed} does not work" if installed else "torch is not installed"
        return error(f"{have}: {asked.problem}", f"torch {accepted}", "install torch anew; " + AMD_INDEX)
    told = f"torch {asked.version} for {asked.build}"
    if not _within(asked.version, accepted):
        return warning(told, f"torch {accepted}", "install a torch that is in this range")
    if facts.gpu is None or asked.gpus:
        return ok(told, accepted)
    if asked.build != "ROCm":
        return error(f"{told}, beside a {facts.gpu.arch}", "a torch for ROCm", AMD_INDEX)
    return error(
        f"{told} sees no GPU" + (f": {asked.gpu_problem}" if asked.gpu_problem else ""),
        f"torch.cuda.is_available() with this {facts.gpu.arch}",
        "see /dev/kfd, render node and ROCm here; is the build made for this chip?",
    )


def triton(facts: Facts) -> Finding | None:
    name, version = facts.triton
    accepted = _triton_range(facts)
    needed = facts.gpu is not None or bool(facts.torch.gpus)
    if not name:
        if not needed:
            return None
        return error(
            "Triton is not installed: int4 layers would run on the slow general path",
            f"triton {accepted}",
            "on ROCm it comes with AMD's torch; elsewhere `pip install nybble[triton]`",
        )
    told = f"{name} {version}"
    if _within(version, accepted):
        return ok(told, accepted)
    return warning(told, f"triton {accepted}", "install the Triton that belongs to the installed torch")


def _triton_range(facts: Facts) -> str:
    return facts.ranges().get("triton", "")


def _within(version: str, accepted: str) -> bool:
    """Whether a version is in a range; builds and pre-releases count as their release. True where there is no range."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        parsed = Version(version)
        return SpecifierSet(accepted).contains(parsed.base_version, prereleases=True)
    except (InvalidVersion, InvalidSpecifier):
        return False


def override(facts: Facts) -> Finding | None:
    value = facts.host.environ.get(OVERRIDE)
    if value is None:
        return None
    change = f"unset {OVERRIDE}"
    gpu = facts.gpu
    if gpu is None:
        return note(f"{OVERRIDE}={value}, without a GPU here that Nybble is made for", change=change)
    if not value.strip():
        found = f"{OVERRIDE} is set to nothing, which older ROCm takes for gfx000"
        return warning(found, "unset", change, known.EMPTY_OVERRIDE)
    taken = _override_arch(value)
    if taken == gpu.arch:
        return note(f"{OVERRIDE}={value} is what the chip is anyway", change=change)
    return error(
        f"{OVERRIDE}={value} makes a {gpu.arch} pass for {taken or 'something else'}: code for another chip crashes "
        "the GPU, at times the kernel",
        "unset: ROCm and Nybble's kernels know this chip",
        change,
        known.OVERRIDE_ISSUE,
    )


def _override_arch(value: str) -> str:
    """11.0.0 -> gfx1100, "" for what is no version."""
    found = re.fullmatch(r"\s*(\d{1,2})\.(\d{1,2})\.(\d{1,2})\s*", value, re.ASCII)
    return f"gfx{int(found[1])}{int(found[2]):x}{int(found[3]):x}" if found else ""


def hipblaslt(facts: Facts) -> Finding | None:
    """What 16-bit GEMMs run on: the output head, and dense copies in prefill where they are on."""
    if facts.gpu is None or facts.torch.build != "ROCm" or not facts.torch.blas:
        return None
    if facts.torch.blas == "cublaslt":
        return ok("torch's 16-bit GEMMs run on hipBLASLt")
    copies = _dense_copies(facts)
    told = "torch's 16-bit GEMMs run on rocBLAS"
    change = "TORCH_BLAS_PREFER_HIPBLASLT=1"
    if copies == "disabled":
        return note(
            f"{told}: they are the output head, and layers that the model has in 16 bits, a few rows at a time in decode "
            "(dense copies are off)",
            change=f"{change}, if you turn --dense-copies on",
            source=known.BLAS_ISSUE,
        )
    return warning(
        f"{told}, and --dense-copies is {copies}: prefill is said to be several times slower so on gfx1151",
        "hipBLASLt",
        change,
        known.BLAS_ISSUE,
    )


def _dense_copies(facts: Facts) -> str:
    return facts.host.environ.get("NYBBLE_DENSE_COPIES") or "disabled"


def settings(facts: Facts) -> Finding | None:
    """The NYBBLE_* variables that `serve` would read."""
    given = sorted(name for name in facts.host.environ if name.startswith("NYBBLE_"))
    try:
        load_settings({"model": "checked-elsewhere"}).key_digests()
    except ConfigError as problem:
        return error(problem.message, "see `nybble serve --help`", "correct or unset the variable")
    ignored = "; ".join(ignored_variables(given))
    if ignored:
        return warning(ignored, "see `nybble serve --help`", "correct or unset the variable")
    return ok(", ".join(given)) if given else None


def warmed(facts: Facts) -> Finding | None:
    """Kernels of csrc that are compiled ahead; Triton's own are compiled where they run, and kept in its cache."""
    if facts.gpu is None or not facts.arch or facts.torch.problem:
        return None
    from nybble.service.doctor.warmed import count_warmed

    own, shared = _kernel_folders(facts)
    found, all_of_them = count_warmed(facts.arch, (shared, own))
    told = f"{found} of {all_of_them} csrc kernels for {facts.arch} compiled ahead in {shared} or {own}"
    if found == all_of_them:
        return ok(told)
    if any(own.glob(f"*-{facts.arch}-*.bin")):
        return ok(f"{told}; others were compiled at run time")
    return note(
        f"{told}: the first start compiles what its model needs",
        change=f"`nybble warm --arch {facts.arch}` (needs clang and lld) makes starts quick",
    )


def _kernel_folders(facts: Facts) -> tuple[Path, Path]:
    environ = facts.host.environ
    own = environ.get("NYBBLE_KERNEL_CACHE") or kernel_cache_folder()
    shared = environ.get("NYBBLE_KERNEL_CACHE_SHARED") or Settings.model_fields["kernel_cache_shared"].default
    return Path(own), Path(shared)
