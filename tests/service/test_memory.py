import dataclasses
from pathlib import Path

import pytest
from gpu_sysfs import fake_gpu

from nybble.service.errors import ConfigError
from nybble.service.memory import (
    GIB,
    HOST_RESERVE_BYTES,
    GpuMemory,
    MemoryNeeds,
    Readings,
    make_plan,
    read_gpu_memory,
    read_host_available,
)

MIB = 1 << 20

NEEDS = MemoryNeeds(
    weights_bytes=4 * GIB,
    workspace_bytes=GIB // 2,
    block_bytes=2 * MIB,
    block_size=16,
    model_positions=8192,
    max_model_len=0,
    max_running=16,
    kv_cache_bytes=0,
    memory_fraction=0.9,
)


def needs(**change):
    return dataclasses.replace(NEEDS, **change)


def test_a_gpu_gives_the_kv_cache_what_is_left_up_to_what_can_be_used():
    plan = make_plan(Readings(64 * GIB, 16 * GIB), NEEDS)
    assert plan.budget_bytes == int(16 * GIB * 0.9)
    assert plan.kv_cache_bytes == (plan.budget_bytes - 4 * GIB - GIB // 2) // (2 * MIB) * 2 * MIB
    assert plan.max_model_len == 8192
    assert (
        make_plan(Readings(128 * GIB, 100 * GIB), NEEDS).kv_cache_bytes == 16 * GIB
    )  # 16 requests of 512 blocks


def test_shared_memory_is_counted_once():
    """A GPU that can address 96 GiB of a host with 20 GiB available may use what the host can spare."""
    plan = make_plan(Readings(20 * GIB, 96 * GIB), NEEDS)
    assert plan.budget_bytes == int((20 * GIB - HOST_RESERVE_BYTES) * 0.9)


def test_a_cpu_run_stays_modest():
    plan = make_plan(Readings(64 * GIB), needs(block_bytes=360 * 1024))
    assert plan.kv_cache_bytes <= GIB < plan.kv_cache_bytes + 360 * 1024
    # ... unless one request needs more.
    assert make_plan(Readings(64 * GIB), needs(block_bytes=4 * MIB)).kv_cache_bytes == 2 * GIB


def test_the_context_shrinks_to_what_fits_unless_it_was_asked_for():
    tight = Readings(64 * GIB, 6 * GIB)
    plan = make_plan(tight, NEEDS)
    assert plan.max_model_len == plan.kv_blocks * 16 < 8192
    with pytest.raises(ConfigError, match="one request of 8192 tokens needs 1.00 GiB") as error:
        make_plan(tight, needs(max_model_len=8192))
    for number in ("host available 64.00 GiB", "device 6.00 GiB", "budget 5.40 GiB", "weights 4.00 GiB"):
        assert number in error.value.message
    for remedy in ("--memory-fraction", "--max-model-len"):
        assert remedy in error.value.message


@pytest.mark.parametrize("host", [0, GIB // 4, 4 * GIB], ids=["none", "below-reserve", "below-weights"])
def test_no_room_at_all_is_refused(host):
    with pytest.raises(ConfigError, match="not enough memory"):
        make_plan(Readings(host), NEEDS)


def test_a_size_asked_for_is_kept_or_refused():
    assert make_plan(Readings(64 * GIB), needs(kv_cache_bytes=3 * GIB)).kv_cache_bytes == 3 * GIB
    with pytest.raises(ConfigError, match="--kv-cache-bytes 99.00 GiB"):
        make_plan(Readings(64 * GIB), needs(kv_cache_bytes=99 * GIB))


def test_a_context_longer_than_the_models_is_refused():
    with pytest.raises(ConfigError, match="max_model_len is 9000: accepted at most 8192"):
        make_plan(Readings(64 * GIB), needs(max_model_len=9000))


def test_pools_add_up_to_no_more_than_the_budget():
    for host in range(6, 40, 3):
        plan = make_plan(Readings(host * GIB), NEEDS)
        assert sum(plan.pools.values()) <= plan.budget_bytes


DENSE = needs(dense_bytes=8 * GIB, dense_mode="enabled")


def test_dense_copies_are_taken_where_one_request_still_fits():
    plan = make_plan(Readings(64 * GIB, 16 * GIB), DENSE)
    assert plan.dense_state == "enabled" and plan.dense_copies_bytes == 8 * GIB
    assert plan.dense_budget_bytes == plan.budget_bytes - 4 * GIB - GIB // 2 - GIB
    assert plan.max_model_len == 8192
    assert sum(plan.pools.values()) <= plan.budget_bytes


def test_dense_copies_are_all_or_nothing():
    tight = Readings(64 * GIB, 14 * GIB)  # 12.6 - 4.5 - 1 = 7.1 GiB left for them
    with pytest.raises(
        ConfigError, match="dense copies refused: they need 8.00 GiB .* and 7.10 GiB is left"
    ) as error:
        make_plan(tight, DENSE)
    for remedy in ("--memory-fraction", "--max-model-len", "--dense-copies disabled"):
        assert remedy in error.value.message
    plan = make_plan(tight, dataclasses.replace(DENSE, dense_mode="auto"))
    assert plan.dense_state == "refused" and plan.dense_copies_bytes == 0
    # A shorter context leaves them room.
    assert make_plan(tight, dataclasses.replace(DENSE, max_model_len=512)).dense_state == "enabled"
    assert make_plan(tight, NEEDS).dense_state == "disabled"


@pytest.mark.parametrize("carve_out", [GIB // 2, 8 * GIB, 64 * GIB], ids=["0.5", "8", "64"])
@pytest.mark.parametrize("gtt", [8 * GIB, 110 * GIB], ids=["small-gtt", "large-gtt"])
@pytest.mark.parametrize("tenant", [0, 40 * GIB], ids=["alone", "another-tenant"])
def test_an_apu_never_plans_more_than_its_one_memory(carve_out, gtt, tenant):
    """128 GiB of RAM: what the GPU can address is carve-out or GTT, never their sum, and never more than is there."""
    device = max(carve_out, gtt)
    host = 128 * GIB - carve_out - tenant - 4 * GIB
    try:
        plan = make_plan(Readings(host, device), NEEDS)
    except ConfigError as error:
        assert min(device, host) < 8 * GIB, error.message
        return
    assert sum(plan.pools.values()) <= plan.budget_bytes <= min(device, host)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="--dense-copies is 'some': accepted disabled, enabled, auto"):
        make_plan(Readings(64 * GIB), needs(dense_mode="some"))


def test_mem_available_is_read_and_its_absence_named(tmp_path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 10 kB\nMemFree: 1 kB\nMemAvailable:    7 kB\n")
    assert read_host_available(str(file)) == 7 * 1024
    file.write_bytes(b"\xff\xfe: 10 kB\nMemAvailable:    8 kB\n")
    assert read_host_available(str(file)) == 8 * 1024
    file.write_text("MemTotal: 10 kB\n")
    with pytest.raises(ConfigError, match="no MemAvailable"):
        read_host_available(str(file))
    with pytest.raises(ConfigError, match="not readable"):
        read_host_available(str(tmp_path / "absent"))


def test_the_drivers_own_figures(tmp_path: Path) -> None:
    assert read_gpu_memory(sysfs=str(tmp_path)) is None
    fake_gpu(tmp_path, "0000:c5:00.0", "card1", 10, 100, 5, 50)
    # A connector of the same card, and a card of another driver.
    (tmp_path / "class/drm/card1-HDMI-A-1").mkdir()
    (tmp_path / "class/drm/card0/device").mkdir(parents=True)
    only = GpuMemory(10, 100, 5, 50)
    assert read_gpu_memory(sysfs=str(tmp_path)) == only
    fake_gpu(tmp_path, "0000:03:00.0", "card2", 1, 2, 3, 4)
    assert read_gpu_memory(sysfs=str(tmp_path)) is None, "which one it would be is not known"
    assert read_gpu_memory("0000:c5:00.0", str(tmp_path)) == only
    assert read_gpu_memory("0000:03:00.0", str(tmp_path)) == GpuMemory(1, 2, 3, 4)
    assert read_gpu_memory("0000:99:00.0", str(tmp_path)) is None


def test_a_figure_that_cannot_be_read_is_no_figure(tmp_path: Path) -> None:
    fake_gpu(tmp_path, "0000:c5:00.0", "card0", 10, 100, 5, 50)
    (tmp_path / "bus/pci/devices/0000:c5:00.0/mem_info_gtt_used").write_text("busy")
    assert read_gpu_memory("0000:c5:00.0", str(tmp_path)) is None
