"""The skinny layout: bit positions, padding, exact inverse, bounded temporaries."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nybble.kernels.linear.reference import dequantize
from nybble.kernels.packing import W4A16Weight, pack_rows
from nybble.kernels.skinny_layout import (
    dequantize_skinny,
    pack,
    pack_zeros,
    row_stride_bytes,
    unpack,
    unpack_zeros,
)

ARCHES = ["gfx1151", "gfx1100", "gfx1201", "sm_90"]


def make_weight(n: int, k: int, g: int, *, symmetric: bool, seed: int = 0) -> W4A16Weight:
    gen = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (n, k), generator=gen, dtype=torch.uint8)
    zeros = None if symmetric else torch.randint(0, 16, (n, k // g), generator=gen, dtype=torch.uint8)
    scales = torch.exp2(torch.randint(-9, 3, (n, k // g), generator=gen).float()).to(torch.float16)
    return W4A16Weight(pack_rows(q), scales, zeros, None, g, n, k)


def test_each_value_sits_at_its_shift():
    q = torch.arange(16, dtype=torch.uint8).view(1, 16).flip(1)
    weight = W4A16Weight(pack_rows(q), torch.ones(1, 1), None, None, 16, 1, 16)
    with pytest.raises(ValueError, match="group_size"):
        pack(weight, arch="gfx1151")
    q = q.repeat(1, 2)
    packed = pack(W4A16Weight(pack_rows(q), torch.ones(1, 1), None, None, 32, 1, 32), arch="gfx1151")
    for word in range(4):
        for j, shift in enumerate((0, 16, 4, 20, 8, 24, 12, 28)):
            assert (int(packed.words[0, word]) >> shift) & 0xF == int(q[0, 8 * word + j])


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize(
    ("n", "k", "g"), [(8, 32, 32), (24, 576, 64), (40, 2560, 128), (64, 4096, 128), (0, 128, 64)]
)
@pytest.mark.parametrize("arch", ARCHES)
def test_unpack_is_the_exact_inverse(n: int, k: int, g: int, symmetric: bool, arch: str):
    weight = make_weight(n, k, g, symmetric=symmetric)
    packed = pack(weight, arch=arch)
    back = unpack(packed)
    assert torch.equal(back.q, weight.q)
    assert torch.equal(back.scales, weight.scales)
    assert (back.zeros is None) == symmetric
    if weight.zeros is not None and back.zeros is not None:
        assert torch.equal(back.zeros, weight.zeros)
    assert torch.equal(dequantize_skinny(packed, torch.float32), dequantize(weight))


@pytest.mark.parametrize(
    ("k", "arch", "stride"),
    [
        (2048, "gfx1151", 1024 + 128),
        (4096, "gfx1151", 2048 + 128),
        (9728, "gfx1151", 4864),
        (576, "gfx1151", 288),
        (4096, "gfx1100", 2048),
        (4096, "gfx1201", 2048),
        (4096, "sm_90", 2048),
    ],
)
def test_only_rows_on_the_cliff_of_gfx1151_are_padded(k: int, arch: str, stride: int):
    assert row_stride_bytes(k, arch) == stride
    packed = pack(make_weight(8, k, 64, symmetric=True), arch=arch)
    assert packed.qweight.stride() == (stride, 1)
    assert packed.words.stride() == (stride // 4, 1)
    assert packed.words.data_ptr() == packed.qweight.data_ptr()
    assert packed.nbytes == 8 * stride + packed.scales.numel() * 2


def test_padding_never_changes_a_value():
    weight = make_weight(16, 4096, 128, symmetric=False)
    padded, plain = pack(weight, arch="gfx1151"), pack(weight, arch="gfx1100")
    assert padded.qweight.stride(0) != plain.qweight.stride(0)
    assert torch.equal(padded.qweight, plain.qweight)


def test_source_weight_is_left_alone():
    weight = make_weight(16, 256, 64, symmetric=False)
    before = weight.q.clone()
    packed = pack(weight, arch="gfx1151")
    packed.scales.zero_()
    assert torch.equal(weight.q, before)
    assert weight.scales.abs().min() > 0


def test_zero_points_pack_along_n():
    zeros = torch.arange(48, dtype=torch.uint8).view(16, 3) % 16
    words = pack_zeros(zeros)
    assert words.shape == (2, 3)
    for n in range(16):
        for group in range(3):
            assert (int(words[n // 8, group]) >> (4 * (n % 8))) & 0xF == int(zeros[n, group])
    assert torch.equal(unpack_zeros(words), zeros)


def test_refusals_say_what_is_accepted():
    with pytest.raises(ValueError, match="K a multiple of 16"):
        pack(make_weight(8, 8 * 5, 40, symmetric=True), arch="gfx1151")
    with pytest.raises(ValueError, match="accepted group_size 32, 64, 128"):
        pack(make_weight(8, 256, 256, symmetric=True), arch="gfx1151")
    with pytest.raises(ValueError, match="N a multiple of 8"):
        pack(make_weight(12, 256, 64, symmetric=False), arch="gfx1151")
    sorted_groups = (torch.arange(256) // 64).to(torch.int32)
    weight = make_weight(8, 256, 64, symmetric=True)
    ordered = W4A16Weight(weight.q, weight.scales, None, sorted_groups, 64, 8, 256)
    with pytest.raises(ValueError, match="g_idx"):
        pack(ordered, arch="gfx1151")


_PEAK = """
import re, torch
from nybble.kernels.packing import W4A16Weight
from nybble.kernels.skinny_layout import pack
torch.set_num_threads(1)
n, k, g = 24576, 4096, 128
q = torch.full((n, k // 8), 0x12345678, dtype=torch.int32)
weight = W4A16Weight(q, torch.ones(n, k // g, dtype=torch.float16), torch.ones(n, k // g, dtype=torch.uint8), None, g, n, k)
small = W4A16Weight(q[:8].clone(), weight.scales[:8].clone(), weight.zeros[:8].clone(), None, g, 8, k)
pack(small, arch="gfx1151")  # load what the first call loads
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
packed = pack(weight, arch="gfx1151")
print((peak() - before) * 1024 / (n * k // 2))
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="peak memory is read from /proc/self/status"
)
def test_packing_a_large_layer_needs_little_beside_it():
    """24576 x 4096: all memory taken during `pack`, the result included, in multiples of the int4 bytes."""
    out = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True)
    ratio = float(out.stdout)
    assert 0.9 < ratio < 1.6, f"packing took {ratio:.2f} times the int4 bytes"
