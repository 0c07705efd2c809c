"""nybble doctor on machines that are folders, and on this one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fake_host
import pytest
from fake_host import HOSTS, RENDER, VIDEO, FakeHost
from pretend_compiler import PretendCompiler

from nybble.kernels.native.offline import family_programs, offline_target
from nybble.kernels.native.offline import warm as compile_ahead
from nybble.kernels.tiles import tables
from nybble.service.doctor import CHECKS, Report, examine, known
from nybble.service.doctor.facts import Facts, accepted_ranges
from nybble.service.doctor.findings import Severity
from nybble.service.doctor.gpus import arch_name, read_gpus
from nybble.service.doctor.host import Host, Node, read_node, version_numbers
from nybble.service.doctor.memory_checks import proposed_gib
from nybble.service.doctor.plan import local_folder
from nybble.service.doctor.report import CPU_PROFILE, as_env, as_json, as_text
from nybble.service.doctor.torch_probe import Torch, TorchGpu, probe_torch
from nybble.service.doctor.warmed import count_warmed
from nybble.service.engine.load import build_engine
from nybble.service.engine.protocol import EngineConfig
from nybble.service.folders import kernel_cache_folder
from nybble.service.memory import GIB

MODEL = Path(__file__).parents[1] / "data/qwen3-ct-asym-g128"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the machine that runs the tests nothing counts."""
    for name in [name for name in os.environ if name.startswith(("NYBBLE_", "HSA_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def halo(tmp_path: Path) -> FakeHost:
    return fake_host.strix_halo(tmp_path / "root")


def severities(report: Report) -> dict[str, str]:
    return {name: finding.severity.word for name, finding in report.findings.items()}


def found(host: FakeHost, check: str, model: str = "") -> str:
    """A finding in one line."""
    finding = dict(CHECKS)[check](host.facts(model))
    assert finding is not None
    return " | ".join([finding.severity.word, finding.found, finding.accepted, finding.change])


GPU_CHECKS = dict.fromkeys(
    ("chip", "driver", "kernel", "firmware", "/dev/kfd", "render node", "memory", "torch", "ROCm", "Triton"),
    "ok",
)
EXPECTED = {
    "strix_halo": GPU_CHECKS | {"mapping limit": "ok", "hipBLASLt": "ok", "kernels": "note"},
    "radeon_7900": GPU_CHECKS | {"hipBLASLt": "ok", "kernels": "note"},
    "radeon_9700": GPU_CHECKS | {"hipBLASLt": "ok", "kernels": "note"},
    "bare_vm": {"chip": "note", "memory": "ok", "torch": "ok"},
    "broken": {
        **{"chip": "ok", "driver": "ok", "kernel": "warning", "firmware": "error", "/dev/kfd": "error"},
        **{
            "render node": "error",
            "memory": "ok",
            "mapping limit": "error",
            "torch": "error",
            "ROCm": "error",
        },
        **{"Triton": "error", "GFX override": "error", "kernels": "note"},
    },
}


@pytest.mark.parametrize("name", HOSTS)
def test_what_is_said_of_each_machine(name: str, tmp_path: Path) -> None:
    report = examine(HOSTS[name](tmp_path).facts())
    assert severities(report) == EXPECTED[name]
    assert report.exit_code == (2 if name == "broken" else 0)


def test_a_finding_that_asks_for_something_says_what_is_accepted_and_what_to_change(tmp_path: Path) -> None:
    for finding in examine(fake_host.broken(tmp_path).facts()).findings.values():
        if finding.severity >= Severity.WARNING:
            assert finding.accepted and finding.change


@pytest.mark.parametrize(
    ("arch", "product", "units"), [("strix_halo", "gfx1151", 40), ("radeon_7900", "gfx1100", 96)]
)
def test_the_chip_is_read_from_the_kernels_topology(
    arch: str, product: str, units: int, tmp_path: Path
) -> None:
    assert re.search(rf"{product} .*, {units} CUs, at 0000:", found(HOSTS[arch](tmp_path), "chip"))


@pytest.mark.parametrize(
    ("version", "name"),
    [(110501, "gfx1151"), (110000, "gfx1100"), (120001, "gfx1201"), (90010, "gfx90a"), (90402, "gfx942")],
)
def test_the_kernels_numbers_are_names(version: int, name: str) -> None:
    assert arch_name(version) == name


def test_every_known_chip_has_tiles() -> None:
    assert {f"{chip.arch}.json" for chip in known.CHIPS} <= set(tables())


# --- memory ---


def test_the_command_line_is_gib_times_262144(tmp_path: Path) -> None:
    assert known.PAGES_PER_GIB == 262144
    told = found(fake_host.broken(tmp_path), "mapping limit")
    assert "ttm.pages_limit=14155776 for 54 GiB, without amdgpu.gttsize" in told and 54 * 262144 == 14155776


@pytest.mark.parametrize("total_gib", [0.5, 3.0, 7.6, 15.3, 31.0, 62.0, 93.0, 124.9, 251.0])
def test_a_proposed_limit_leaves_the_rest_of_the_machine_room(total_gib: float) -> None:
    gib = proposed_gib(int(total_gib * GIB))
    assert gib >= 1 and (gib == 1 or total_gib - gib >= max(4, total_gib / 8))
    assert total_gib < 16 or gib >= 0.7 * total_gib


def test_the_usual_half_is_a_note_and_less_a_warning(tmp_path: Path) -> None:
    half = fake_host.strix_halo(tmp_path / "a", gtt_gib=62.4)
    assert found(half, "mapping limit").startswith("note | the GPU may map 62.4 GiB of 124.9 GiB")
    assert found(fake_host.strix_halo(tmp_path / "b", gtt_gib=30), "mapping limit").startswith("warning")


@pytest.mark.parametrize(
    ("command_line", "dkms", "says"),
    [
        ("amdgpu.gttsize=110592", False, "amdgpu.gttsize=110592 (MiB) is deprecated"),
        ("amdttm.pages_limit=28311552", False, "amdttm.pages_limit is for a module that is not loaded here"),
        ("ttm.pages_limit=28311552", True, "ttm.pages_limit is for a module that is not loaded here"),
    ],
)
def test_settings_that_do_not_do_what_they_were_meant_to(
    halo: FakeHost, command_line: str, dkms: bool, says: str
) -> None:
    halo.write("/proc/cmdline", f"ro {command_line}")
    if dkms:
        halo.write("/sys/module/amdttm/parameters/pages_limit", "28311552")
    told = found(halo, "mapping limit")
    assert told.startswith("warning") and says in told
    assert f"command line: {'amdttm' if dkms else 'ttm'}.pages_limit=28311552" in told


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        (
            "amdgpu.conf",
            "# GPU\noptions amdgpu dc=1 gttsize=110592\n",
            "amdgpu.gttsize=110592 (MiB) is deprecated",
        ),
        (
            "ttm.conf",
            "options amdttm \\\n pages_limit=28311552 page_pool_size=1\n",
            "amdttm.pages_limit is for a module",
        ),
    ],
)
def test_modprobes_files_are_read_like_the_command_line(
    file: str, text: str, says: str, halo: FakeHost
) -> None:
    halo.write(f"/etc/modprobe.d/{file}", text)
    halo.write("/proc/cmdline", "ro")
    halo.write(f"/etc/modprobe.d/{file}.off", "options amdgpu gttsize=1\n")
    told = found(halo, "mapping limit")
    assert told.startswith("warning") and says in told
    assert f"without {says.split('=')[0].split()[0]} (in /etc/modprobe.d/{file})" in told


@pytest.mark.parametrize(
    "line", ["options ttm pages_limit=28311552", "#options amdgpu gttsize=9", "blacklist x"]
)
def test_files_of_modprobe_that_are_as_they_should_be(line: str, halo: FakeHost) -> None:
    halo.write("/etc/modprobe.d/ttm.conf", line + "\n")
    halo.write("/proc/cmdline", "ro")
    assert found(halo, "mapping limit").startswith("ok")


def test_the_command_line_counts_more_than_modprobes_files(halo: FakeHost) -> None:
    halo.write("/etc/modprobe.d/amdgpu.conf", "options amdgpu gttsize=9 cwsr-enable=0\n")
    halo.write("/proc/cmdline", "amdgpu.gttsize=-1")
    assert "is deprecated" not in found(halo, "mapping limit")
    assert found(halo, "driver").startswith("note") and "cwsr_enable=0" in found(halo, "driver")


def test_what_may_be_mapped_is_of_what_linux_has(tmp_path: Path) -> None:
    host = fake_host.strix_halo(tmp_path, vram_gib=96, gtt_gib=15.5)
    host.write("/proc/meminfo", "MemTotal: 32505856 kB\nMemAvailable: 30000000 kB\n")
    told = found(host, "mapping limit")
    assert "may map 15.5 GiB of 31.0 GiB" in told and "frame buffer of 96.0 GiB is larger" in told


def test_a_large_frame_buffer_is_memory_lost(tmp_path: Path) -> None:
    told = found(fake_host.strix_halo(tmp_path, vram_gib=64, gtt_gib=30), "memory")
    assert told.startswith("warning") and "UMA" in told and "never to be added" in told


def test_an_apus_pools_are_no_sum(halo: FakeHost, tmp_path: Path) -> None:
    assert halo.facts().addressable_bytes == 108 * GIB
    carved = fake_host.strix_halo(tmp_path / "carved", vram_gib=96, gtt_gib=15).facts()
    assert carved.addressable_bytes == 96 * GIB and carved.free_bytes == 96 * GIB - (1 << 20)
    assert fake_host.radeon_7900(tmp_path / "card").facts().addressable_bytes == int(23.98 * GIB)


# --- the plan ---


def test_the_plan_is_that_of_the_engine(tmp_path: Path) -> None:
    told = found(fake_host.bare_vm(tmp_path), "plan", str(MODEL))
    info = build_engine(EngineConfig(str(MODEL), device="cpu", threads=1)).info
    assert told.startswith("ok")
    assert f"holds {info.kv_blocks * info.block_size} tokens, requests up to {info.max_model_len};" in told


def test_settings_count_in_the_plan(halo: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NYBBLE_MAX_MODEL_LEN", "128")
    assert "requests up to 128;" in found(halo, "plan", str(MODEL))
    monkeypatch.setenv("NYBBLE_KV_CACHE_BYTES", str(500 * GIB))
    told = found(halo, "plan", str(MODEL))
    assert told.startswith("error | not enough memory: host available 118.00 GiB, device 107.90 GiB")


def test_a_plan_for_the_cpu_of_a_machine_with_a_gpu(halo: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "on gfx1151: budget" in found(halo, "plan", str(MODEL))
    monkeypatch.setenv("NYBBLE_DEVICE", "cpu")
    assert "gfx1151" not in found(halo, "plan", str(MODEL))


def test_without_torchs_word_the_drivers_figures_are_planned_with(
    halo: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    halo.torch = replace(halo.torch, gpus=())
    monkeypatch.setenv("NYBBLE_KV_CACHE_BYTES", str(500 * GIB))
    assert "device 108.00 GiB" in found(halo, "plan", str(MODEL))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("demo", "note | demo has not been fetched yet"),
        ("org/never-fetched", "note | org/never-fetched has not been fetched yet"),
        (
            "org/name/model.gguf",
            "note | org/name/model.gguf is planned from the folder that it is converted to",
        ),
        ("/no/such/model.gguf", "error | /no/such/model.gguf: no folder with a config.json and no GGUF file"),
        ("no\0name.gguf", "error | "),
        ("/no/such/folder", "error | /no/such/folder: no folder with a config.json"),
        ("no\0name", "error | "),
    ],
)
def test_nothing_is_fetched_for_a_plan(
    model: str, says: str, halo: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(halo.root / "hub"))
    assert local_folder(model) is None
    assert found(halo, "plan", model).startswith(says)


def test_a_gguf_file_is_planned_where_it_is_converted_to(tmp_path: Path, halo: FakeHost) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    for model in (tmp_path, tmp_path / "a.gguf"):
        assert found(halo, "plan", str(model)).startswith(f"note | {model} is planned from the folder")


def test_a_folder_that_cannot_be_served_is_named(tmp_path: Path, halo: FakeHost) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert found(halo, "plan", str(tmp_path)).startswith("error | ")


# --- devices ---


@pytest.mark.parametrize(
    ("node", "container", "says"),
    [
        (
            Node(0, RENDER, 0o660),
            False,
            f"`sudo usermod -aG render $USER` and log in again; in a container --group-add {RENDER}",
        ),
        (Node(0, RENDER, 0o660), True, f"start the container with --group-add {RENDER}"),
        (Node(0, 0, 0o600), False, "restore the udev rule"),
        (Node(0, RENDER, 0o666, "EPERM"), True, "DeviceAllow=/dev/kfd rw"),
        (Node(0, RENDER, 0o644, "ENOTTY"), True, "is no device"),
        (None, True, "--device /dev/kfd"),
        (None, False, "dmesg"),
    ],
    ids=[
        "group",
        "group in a container",
        "mode",
        "device list",
        "no device",
        "no node in a container",
        "no node",
    ],
)
def test_why_a_device_does_not_open(node: Node | None, container: bool, says: str, halo: FakeHost) -> None:
    halo.gids = frozenset((1000,))
    halo.nodes.pop("/dev/kfd")
    if node is not None:
        halo.nodes["/dev/kfd"] = node
    if container:
        halo.write("/run/.containerenv", "")
    told = found(halo, "/dev/kfd")
    assert told.startswith("error") and says in told and "uid 1000" in told


def test_a_node_that_anybody_may_open_needs_no_group(halo: FakeHost) -> None:
    halo.gids, halo.nodes["/dev/kfd"] = frozenset((1000,)), Node(0, 0, 0o666)
    assert found(halo, "/dev/kfd").startswith("ok | /dev/kfd is 0666, uid 0, gid 0 (root)")


def test_real_nodes_are_opened(tmp_path: Path) -> None:
    null = read_node("/dev/null")
    assert null is not None and null.refused == "" and null.mode == 0o666
    (tmp_path / "kfd").write_text("")
    plain = read_node(str(tmp_path / "kfd"))
    assert plain is not None and plain.refused == "ENOTTY"
    assert read_node(str(tmp_path / "absent")) is None and read_node("nul\0") is None


@pytest.mark.parametrize(
    ("driver", "says"),
    [
        ("vfio-pci", "belongs to the driver vfio-pci"),
        ("", "has no driver"),
        ("amdgpu", "the kernel lists no compute node"),
    ],
)
def test_a_gpu_that_the_kernel_does_not_list(driver: str, says: str, halo: FakeHost) -> None:
    shutil.rmtree(halo.root / "sys/class/kfd")
    link = next(halo.root.glob("sys/bus/pci/devices/*/driver"))
    link.unlink()
    if driver:
        link.symlink_to(f"../../drivers/{driver}")
    told = found(halo, "chip")
    assert told.startswith("error | gfx1151 (Strix Halo, Ryzen AI Max) at 0000:c5:00.0") and says in told
    # The image for it can be made all the same.
    assert "NYBBLE_ARCH=gfx1151" in as_env(halo.facts())[0]


def test_nomodeset_and_a_missing_driver(halo: FakeHost) -> None:
    halo.write("/proc/cmdline", "ro nomodeset")
    assert found(halo, "driver").startswith("error | nomodeset")
    halo.write("/proc/cmdline", "ro")
    shutil.rmtree(halo.root / "sys/module/amdgpu")
    assert found(halo, "driver").startswith("error | the module amdgpu is not loaded")


def two_gpus(tmp_path: Path) -> FakeHost:
    """A desktop whose processor's GPU comes first."""
    host = fake_host.radeon_7900(tmp_path)
    shutil.rmtree(host.root / "sys/class/kfd/kfd/topology/nodes/1")
    fake_host.add_gpu(host, 100306, 0x164E, vram_gib=0.5, gtt_gib=31, simds=4, node=1, bus=0x0E)
    fake_host.add_gpu(host, 110000, 0x744D, vram_gib=23.98, gtt_gib=31, simds=192, node=2, bus=4)
    host.torch = replace(host.torch, gpus=())
    return host


def test_the_first_gpu_is_what_is_served_on(tmp_path: Path) -> None:
    host = two_gpus(tmp_path)
    assert "gfx1036, beside gfx1100: Nybble is not made for it" in found(host, "chip")
    assert "HIP_VISIBLE_DEVICES=1 chooses gfx1100" in found(host, "chip")
    lines, hint = as_env(host.facts())
    assert "NYBBLE_ARCH=gfx1100" in lines and "HIP_VISIBLE_DEVICES=1" in hint
    host.environ["HIP_VISIBLE_DEVICES"] = "1"
    assert found(host, "chip").startswith("ok | gfx1100") and as_env(host.facts())[1] == ""
    assert found(host, "render node").startswith("ok | /dev/dri/renderD129")


def test_a_processors_small_gpu_asks_for_nothing(tmp_path: Path) -> None:
    """A desktop without a card: torch for the CPU is right there, whatever the groups, the firmware or the GTT."""
    host = two_gpus(tmp_path)
    shutil.rmtree(tmp_path / "sys/class/kfd/kfd/topology/nodes/2")
    host.nodes.clear()
    host.torch, host.packages = Torch(version="2.13.0+cpu"), {}
    host.environ["HSA_OVERRIDE_GFX_VERSION"] = "10.3.0"
    report = examine(host.facts())
    assert severities(report) == {"chip": "note", "memory": "ok", "torch": "ok", "GFX override": "note"}
    assert as_env(host.facts()) == (CPU_PROFILE, "")
    fake_host.with_rocm(host, "gfx1036")
    assert found(host, "chip").startswith("warning") and "--device cpu" in found(host, "chip")


def test_a_card_of_nvidia_beside_it(tmp_path: Path) -> None:
    host = two_gpus(tmp_path)
    host.torch = Torch(version="2.13.0", cuda="13.0", gpus=(TorchGpu("NVIDIA H200", "sm_90", 1, 1),))
    assert found(host, "chip").startswith("note | NVIDIA H200 (sm_90), by a torch for CUDA")


def test_a_gpu_that_is_not_known_and_not_listed(halo: FakeHost) -> None:
    shutil.rmtree(halo.root / "sys/class/kfd")
    next(halo.root.glob("sys/bus/pci/devices/*/device")).write_text("0x6779\n")
    assert found(halo, "chip").startswith("note | an AMD GPU 1002:6779 at 0000:c5:00.0 (driver amdgpu)")
    assert as_env(halo.facts()) == (CPU_PROFILE, "")


@pytest.mark.parametrize(
    ("environ", "archs"),
    [
        ({}, ["gfx1036", "gfx1100"]),
        ({"HIP_VISIBLE_DEVICES": ""}, ["gfx1036", "gfx1100"]),
        ({"HIP_VISIBLE_DEVICES": "1,0"}, ["gfx1100", "gfx1036"]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"HIP_VISIBLE_DEVICES": "1,-1,0"}, ["gfx1100"]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "7"}, ["gfx1100"]),
        ({"CUDA_VISIBLE_DEVICES": "7"}, []),
        ({"ROCR_VISIBLE_DEVICES": "GPU-abc"}, ["gfx1036", "gfx1100"]),
    ],
    ids=str,
)
def test_visible_devices(environ: dict[str, str], archs: list[str], tmp_path: Path) -> None:
    host = two_gpus(tmp_path)
    host.environ = environ
    assert [gpu.arch for gpu in host.facts().visible] == archs
    assert archs or found(host, "chip").startswith("error | no GPU is left by")


# --- versions ---


@pytest.mark.parametrize(
    ("rocm", "fixed", "severity"),
    [
        ("6.4.4", True, "error"),
        ("7.1.1", True, "error"),
        ("7.1.1", False, "warning"),
        ("7.2", False, "error"),
        ("7.2.0", False, "error"),
        ("7.2.0", True, "ok"),
        ("7.2.1", True, "ok"),
        ("7.2.1", False, "warning"),
        ("7.10.0", True, "error"),
        ("7.11.0a20260213", True, "ok"),
        ("7.11.0", False, "warning"),
        ("10.0.0", True, "ok"),
    ],
)
def test_amds_table_of_rocm_and_kernel(rocm: str, fixed: bool, severity: str, tmp_path: Path) -> None:
    host = fake_host.strix_halo(tmp_path, cwsr=fixed)
    fake_host.with_rocm(host, "gfx1151", rocm)
    assert found(host, "ROCm").startswith(f"{severity} | ROCm {rocm} (torch's version)")


@pytest.mark.parametrize(("make", "rocm", "severity"), [("radeon_9700", "6.4.0", "error"), ("radeon_9700", "6.4.1", "ok"), ("radeon_7900", "5.6", "error"), ("radeon_7900", "6.4.0", "ok")])  # fmt: skip
def test_a_rocm_that_is_older_than_the_chip(make: str, rocm: str, severity: str, tmp_path: Path) -> None:
    host = HOSTS[make](tmp_path)
    fake_host.with_rocm(host, "gfx1201" if make == "radeon_9700" else "gfx1100", rocm)
    assert found(host, "ROCm").startswith(severity)


@pytest.mark.parametrize(
    ("torch", "packages", "file", "says"),
    [
        (Torch(version="2.13.0", hip="7.2.26015"), {}, "", "ROCm 7.2 (torch.version.hip)"),
        (
            Torch(version="2.13.0", hip="7.2.26015"),
            {"rocm-sdk-core": "7.11.0a1"},
            "",
            "ROCm 7.11.0a1 (package rocm-sdk-core)",
        ),
        (Torch(problem="?"), {}, "7.2.4-93", "ROCm 7.2.4-93 (/opt/rocm/.info/version)"),
        (Torch(problem="?"), {}, "", "no ROCm version found"),
    ],
)
def test_where_the_version_of_rocm_comes_from(
    torch: Torch, packages: dict[str, str], file: str, says: str, halo: FakeHost
) -> None:
    halo.torch, halo.packages = torch, packages
    halo.write("/opt/rocm/.info/version", file)
    assert says in found(halo, "ROCm")


def test_a_kernel_that_has_the_fix_at_whatever_version(tmp_path: Path) -> None:
    host = fake_host.strix_halo(tmp_path)
    host.write("/proc/sys/kernel/osrelease", "6.14.0-1018-oem")
    assert found(host, "kernel").startswith("ok | Linux 6.14.0-1018-oem")


@pytest.mark.parametrize(
    ("mes", "dpkg", "severity", "says"),
    [
        ("0x00000083", "", "error", "MES 0x83"),
        ("0x00000080", "linux-firmware 20251125-1", "ok", "20251125"),
        ("", "linux-firmware 20251125-1", "warning", "MES version not readable"),
        ("", "linux-firmware 20240318.git3b128b60-0ubuntu2.19", "ok", "20240318"),
        ("garbage", "", "ok", "not readable"),
    ],
)
def test_firmware(mes: str, dpkg: str, severity: str, says: str, tmp_path: Path) -> None:
    host = fake_host.strix_halo(tmp_path, mes=mes)
    shutil.rmtree(tmp_path / "var/lib/pacman")
    if dpkg:
        name, version = dpkg.split()
        gone = "Package: firmware-amd-graphics\nStatus: deinstall ok config-files\nVersion: 1\n"
        host.write(
            "/var/lib/dpkg/status",
            f"{gone}\nPackage: {name}\nStatus: install ok installed\nVersion: {version}\n",
        )
    assert found(host, "firmware").startswith(severity) and says in found(host, "firmware")


@pytest.mark.parametrize(
    ("version", "severity"),
    [("2.11.0+rocm7.2", "ok"), ("2.14.1", "ok"), ("2.13.0a0+gitabc", "ok"), ("2.10.1+rocm7.2", "warning"), ("2.15.0", "warning"), ("banana", "warning")],
)  # fmt: skip
def test_torchs_range_is_the_packages_own(version: str, severity: str, halo: FakeHost) -> None:
    assert accepted_ranges()["torch"] == fake_host.RANGES["torch"], (
        "the fake range is not pyproject's any more"
    )
    assert accepted_ranges()["triton"] == fake_host.RANGES["triton"]
    halo.torch = replace(halo.torch, version=version)
    assert found(halo, "torch").startswith(severity)


@pytest.mark.parametrize(
    ("version", "severity"),
    [("3.6.0", "ok"), ("3.9.9+rocm7.2", "ok"), ("3.5.1", "warning"), ("3.10.0", "warning")],
)
@pytest.mark.parametrize("name", ["triton", "pytorch-triton-rocm"])
def test_triton(name: str, version: str, severity: str, halo: FakeHost) -> None:
    halo.packages = {name: version}
    assert found(halo, "Triton").startswith(f"{severity} | {name} {version}")


def test_a_torch_that_cannot_use_the_gpu(halo: FakeHost) -> None:
    halo.torch = Torch(version="2.13.0+cpu")
    assert found(halo, "torch").startswith(
        "error | torch 2.13.0+cpu for CPU, beside a gfx1151 | a torch for ROCm"
    )
    halo.torch = Torch(problem="`import torch` ended with signal 11: no message")
    assert found(halo, "torch").startswith(
        "error | torch 2.13.0+rocm7.2.1 does not work: `import torch` ended"
    )
    halo.packages = {}
    assert found(halo, "torch").startswith("error | torch is not installed")
    # What needs torch is left out, not reported a second time.
    report = examine(halo.facts(str(MODEL)))
    assert "kernels" not in report.findings and report.findings["plan"].severity is Severity.NOTE


@pytest.mark.parametrize(
    ("value", "severity"),
    [
        ("11.0.0", "error"),
        ("11.5.1", "note"),
        ("", "warning"),
        ("  ", "warning"),
        ("twelve", "error"),
        ("12.0.1", "error"),
    ],
)
def test_the_gfx_override(value: str, severity: str, halo: FakeHost) -> None:
    halo.environ["HSA_OVERRIDE_GFX_VERSION"] = value
    assert found(halo, "GFX override").startswith(severity)


def test_a_chip_that_torch_takes_for_another(halo: FakeHost) -> None:
    fake_host.with_rocm(halo, "gfx1100")
    assert found(halo, "chip").startswith("warning") and "to torch it is gfx1100" in found(halo, "chip")


@pytest.mark.parametrize(
    ("copies", "severity"), [("disabled", "note"), ("enabled", "warning"), ("auto", "warning")]
)
def test_hipblaslt_matters_where_there_are_dense_copies(copies: str, severity: str, halo: FakeHost) -> None:
    halo.environ["NYBBLE_DENSE_COPIES"] = copies
    assert found(halo, "hipBLASLt").startswith("ok")
    halo.torch = replace(halo.torch, blas="cublas")
    told = found(halo, "hipBLASLt")
    assert told.startswith(severity) and "TORCH_BLAS_PREFER_HIPBLASLT=1" in told


def test_kernels_that_are_compiled_ahead_are_counted(tmp_path: Path) -> None:
    import torch

    folder, types = tmp_path / "warm", (torch.float16, torch.bfloat16)
    programs = family_programs(offline_target("sm_90"), types, (32, 64, 128), (True, False))
    assert count_warmed("sm_90", (tmp_path, folder)) == (0, len(programs))
    list(compile_ahead(programs[:5], "sm_90", folder, compiler=PretendCompiler()))
    assert count_warmed("sm_90", (tmp_path, folder)) == (5, len(programs))
    assert count_warmed("sm_80", (tmp_path, folder))[0] == 0


@pytest.mark.parametrize(
    ("counted", "severity"), [((0, 144), "note"), ((143, 144), "note"), ((144, 144), "ok")]
)
def test_kernels_that_are_not(
    counted: tuple[int, int], severity: str, halo: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nybble.service.doctor.warmed.count_warmed", lambda arch, folders: counted)
    assert found(halo, "kernels").startswith(f"{severity} | {counted[0]} of 144 csrc kernels for gfx1151")
    own = kernel_cache_folder()
    own.mkdir(parents=True)
    (own / "skinny-gfx1151-0.bin").write_bytes(b"")
    assert found(halo, "kernels").startswith("ok | ")


def test_a_bad_variable_is_said_before_serve_says_it(monkeypatch: pytest.MonkeyPatch, halo: FakeHost) -> None:
    monkeypatch.setenv("NYBBLE_PORT", "http")
    halo.environ["NYBBLE_PORT"] = "http"
    assert found(halo, "settings").startswith("error | NYBBLE_PORT='http' is not accepted")


def test_a_variable_that_nobody_reads_is_named(halo: FakeHost) -> None:
    halo.environ |= {"NYBBLE_MAX_RUNING": "4", "NYBBLE_MODEL": "demo"}
    told = found(halo, "settings")
    assert told.startswith("warning | NYBBLE_MAX_RUNING is no setting") and "NYBBLE_MAX_RUNNING meant" in told
    del halo.environ["NYBBLE_MAX_RUNING"]
    assert found(halo, "settings").startswith("ok | NYBBLE_MODEL")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("6.14.0-1018-oem", (6, 14, 0)), ("v7", (7,)), ("", ()), ("rolling", ()), ("7.11.0a2", (7, 11, 0))],
)
def test_version_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert version_numbers(text) == numbers


# --- .env ---


ENV = f"COMPOSE_PROFILES=gpu\nNYBBLE_ARCH=gfx1151\nNYBBLE_RENDER_GID={RENDER}\nNYBBLE_VIDEO_GID={VIDEO}"


def test_the_env_file(halo: FakeHost, tmp_path: Path) -> None:
    assert as_env(halo.facts()) == (ENV, "")
    assert as_env(fake_host.bare_vm(tmp_path / "vm").facts()) == ("COMPOSE_PROFILES=cpu\nNYBBLE_ARCH=cpu", "")
    assert CPU_PROFILE == "COMPOSE_PROFILES=cpu\nNYBBLE_ARCH=cpu"


@pytest.mark.parametrize(
    ("nodes", "render", "video"),
    [
        ({"/dev/kfd": 107}, RENDER, 107),
        ({"/dev/kfd": 0, "/dev/dri/renderD128": 0}, RENDER, VIDEO),
        ({"/dev/dri/card1": None}, RENDER, VIDEO),
        ({"/dev/dri/renderD128": None}, RENDER, VIDEO),
    ],
    ids=["kfd of another group", "root's", "no display", "no render node"],
)
def test_groups_in_the_env_file(
    nodes: dict[str, int | None], render: int, video: int, halo: FakeHost
) -> None:
    for path, gid in nodes.items():
        if gid is None:
            del halo.nodes[path]
        else:
            halo.nodes[path] = Node(0, gid, 0o660)
    assert as_env(halo.facts())[0].endswith(f"NYBBLE_RENDER_GID={render}\nNYBBLE_VIDEO_GID={video}")


def test_groups_that_nothing_tells(halo: FakeHost) -> None:
    halo.nodes.clear()
    halo.write("/etc/group", "garbage\n:::\nrender:x:many:\n")
    lines, hint = as_env(halo.facts())
    assert "GID" not in lines and "NYBBLE_RENDER_GID is not known" in hint


# --- form ---


def test_the_text_is_aligned_and_steers_no_terminal(halo: FakeHost) -> None:
    halo.write("/proc/sys/kernel/osrelease", "6.18.9\x1b[31m\u202e" + "x" * 200)
    text = as_text(examine(halo.facts()))
    lines = text.splitlines()[:-2]
    starts = [line for line in lines if not line.startswith(" ")]
    assert [line.split()[1] for line in starts] == [n.split()[0] for n in examine(halo.facts()).findings]
    column = lines[0].index("gfx1151")
    assert all(line[column - 1] == " " and line[column] != " " for line in starts)
    assert "\x1b" not in text and "\u202e" not in text
    assert text.splitlines()[-1] == "0 errors, 0 warnings: exit code 0"


def test_json_has_every_field(tmp_path: Path) -> None:
    report = examine(fake_host.broken(tmp_path).facts())
    whole = json.loads(as_json(report))
    assert whole["severity"] == "error" and whole["exit_code"] == 2
    assert [row["check"] for row in whole["checks"]] == list(report.findings)
    assert all(
        set(row) == {"check", "severity", "found", "accepted", "change", "source"} for row in whole["checks"]
    )


def test_every_check_is_seen_by_a_test(tmp_path: Path) -> None:
    seen = {name for expected in EXPECTED.values() for name in expected}
    assert {name for name, _ in CHECKS} - seen == {"settings", "plan"}


# --- odd machines ---


ODD = {
    "missing": None,
    "empty": b"",
    "bytes": bytes(range(256)) * 5,
    "huge number": b"9" * 5000,
    "negative": b"-1\n",
    "no number": b"busy busy busy\n",
    "half a line": b"gfx_target_version\nsimd_count x\n=\n",
    "digits of another script": "\u0663\u0662 \u0663".encode(),
    "folder": "folder",
    "loop": "loop",
}


@pytest.mark.parametrize("kind", ODD)
def test_whatever_a_file_is_each_check_says_something(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file of a machine in turn, and then all of them."""
    monkeypatch.setattr("nybble.service.doctor.warmed.count_warmed", lambda arch, folders: (0, 144))
    host = fake_host.strix_halo(tmp_path)
    host.write("/var/lib/dpkg/status", "Package: linux-firmware\nStatus: install ok installed\nVersion: 1\n")
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink())
    assert len(files) > 12
    for path in files:
        before = path.read_bytes()
        replace_file(path, kind)
        assert_examined(host)
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        path.write_bytes(before)
    for path in files:
        replace_file(path, kind)
    assert_examined(host)


def replace_file(path: Path, kind: str) -> None:
    content = ODD[kind]
    path.unlink()
    if content == "folder":
        path.mkdir()
    elif content == "loop":
        path.symlink_to(path.name)
    elif content is not None:
        path.write_bytes(content)


def assert_examined(host: FakeHost) -> None:
    report = examine(host.facts(str(MODEL)))
    broke = {
        name: finding.found
        for name, finding in report.findings.items()
        if "this check broke" in finding.found
    }
    assert not broke
    assert {"chip", "memory", "torch"} <= set(report.findings)
    as_text(report), json.loads(as_json(report)), as_env(host.facts())


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch, halo: FakeHost) -> None:
    monkeypatch.setattr(Facts, "kernel_rule", property(lambda self: 1 // 0))
    report = examine(halo.facts())
    assert (
        report.findings["kernel"].found
        == "this check broke: ZeroDivisionError: integer division or modulo by zero"
    )
    assert severities(report)["chip"] == "ok" and report.exit_code == 1


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert Host(tmp_path).text("/pipe") == ""


def test_an_empty_root(tmp_path: Path) -> None:
    host = Host(tmp_path, {}, 1000, frozenset(), lambda path: None)
    facts = Facts(host, ask_torch=lambda: Torch(version="2.13.0"), packages=dict, ranges=dict)
    assert read_gpus(facts.host) == ()
    assert severities(examine(facts)) == {"chip": "note", "memory": "error", "torch": "ok"}


# --- torch, asked in a process of its own ---


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import sys; sys.exit(3)", "exit code 3: no message"),
        ("raise ImportError('libamdhip64.so.7: cannot open')", "exit code 1: ImportError: libamdhip64.so.7"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
        ("print('nybble-torch {}')", "exit code 0"),
        ("print('nybble-torch [1')", "exit code 0"),
        ("print('nybble-torch {\"gpus\": [{}]}')", "exit code 0"),
        ('print(\'nybble-torch {"gpus": [], "what": 1}\')', "exit code 0"),
    ],
)
def test_a_torch_that_breaks(code: str, problem: str) -> None:
    assert problem in probe_torch([sys.executable, "-c", code]).problem


def test_a_torch_that_hangs_or_is_not_there() -> None:
    assert "had not ended" in probe_torch([sys.executable, "-c", "import time; time.sleep(60)"], 0.5).problem
    assert "does not start" in probe_torch(["/no/such/python"]).problem


def test_the_env_file_needs_no_torch(halo: FakeHost) -> None:
    facts = replace(halo.facts(), ask_torch=lambda: pytest.fail("torch was asked"))
    assert as_env(facts) == (ENV, "")


def test_what_else_is_printed_does_no_harm() -> None:
    answer = {
        "version": "2.13.0",
        "gpus": [{"name": "a", "arch": "gfx1151", "free_bytes": 1, "total_bytes": 2}],
    }
    said = f"print('warning: {{')\nprint('nybble-torch ' + {json.dumps(json.dumps(answer))})"
    assert probe_torch([sys.executable, "-c", said]) == Torch(
        version="2.13.0", gpus=(TorchGpu("a", "gfx1151", 1, 2),)
    )


# --- this machine ---


def doctor(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "nybble.service", "doctor", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environ,
        check=False,
        timeout=240,
    )


def test_the_command_on_this_machine(tmp_path: Path) -> None:
    import torch

    done = doctor("--json")
    whole = json.loads(done.stdout)
    assert done.returncode == whole["exit_code"], done.stderr
    told = {row["check"]: row["found"] for row in whole["checks"]}
    assert torch.__version__ in told["torch"]
    env = doctor("--env").stdout
    assert set(re.findall(r"^(\w+)=", env, re.MULTILINE)) >= {"COMPOSE_PROFILES", "NYBBLE_ARCH"}
    both = doctor("--env", "--json")
    assert both.returncode == 2 and not both.stdout and "leave out --json" in both.stderr


def test_a_broken_torch_keeps_nothing_from_being_said(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('no good')")
    done = doctor("--model", str(MODEL), PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.search(r"error\s+torch .*ImportError: no\s+good", done.stdout) and "not planned" in done.stdout


# --- docs ---


DOCS = Path(__file__).parents[2] / "docs"
WRITE_DOCS = os.environ.get("NYBBLE_WRITE_DOCS") == "1"


def test_the_guide_shows_what_doctor_says(
    halo: FakeHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With NYBBLE_WRITE_DOCS=1 the guide is written anew."""
    total = count_warmed("gfx1151", ())[1]
    monkeypatch.setattr("nybble.service.doctor.warmed.count_warmed", lambda arch, folders: (total, total))
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/me/.cache")
    said = as_text(examine(halo.facts()))
    page = (DOCS / "strix-halo.md").read_text(encoding="utf-8")
    block = re.compile(r"(?<=```text\n).*?(?=```)", re.DOTALL)
    if WRITE_DOCS:
        (DOCS / "strix-halo.md").write_text(block.sub(lambda _: said + "\n", page, count=1), encoding="utf-8")
    else:
        found_block = block.search(page)
        assert found_block is not None and found_block[0] == said + "\n"
    assert "".join(f"    {line}\n" for line in ENV.splitlines()) in page


def test_the_guides_numbers_are_the_codes() -> None:
    page = (DOCS / "strix-halo.md").read_text(encoding="utf-8")
    assert f"GiB x {known.PAGES_PER_GIB}" in page
    assert f"ttm.pages_limit={108 * known.PAGES_PER_GIB}" in page
    assert proposed_gib(int(124.9 * GIB)) == 108


def test_the_places_where_a_chip_is_added_are_there() -> None:
    """Each file that the page names exists and has each name that the page says is in it; deploy/ has tests of its own."""
    page = (DOCS / "adding-a-chip.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:csrc|kernels|service|tests|benchmarks)/[\w/.]+)`", page)
    assert len(named) > 20 and [name for name in named if not (DOCS.parent / name).exists()] == []
    for files, what in re.findall(r"^\| (`.*?) \| (.*) \|$", page, re.MULTILINE):
        for file in re.findall(r"`([\w/.]+\.py)`", files):
            text = (DOCS.parent / file).read_text(encoding="utf-8")
            for name in re.findall(r"`([A-Za-z_]+)`", what):
                assert re.search(rf"\b{name}\b", text), (file, name)
