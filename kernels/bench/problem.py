"""Problems of real models' sizes, made on the device."""

from __future__ import annotations

import torch

from nybble.kernels.packing import W4A16Weight

# name -> (N, K) of the layers timed
QWEN3_8B = {"gate_up": (24576, 4096), "down": (4096, 12288), "qkv": (6144, 4096), "o": (4096, 4096)}


def random_weight(
    n: int, k: int, g: int, symmetric: bool, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> W4A16Weight:
    """Random int4 weight made on the device. Scales of neighbouring groups differ by up to 2^8."""
    gen = torch.Generator(device).manual_seed(seed)
    q = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), generator=gen, device=device, dtype=torch.int64).to(
        torch.int32
    )
    exponent = torch.randint(-13, -5, (n, k // g), generator=gen, device=device).float()
    scales = (1 + torch.rand(n, k // g, generator=gen, device=device)) * torch.exp2(exponent)
    zeros = None
    if not symmetric:
        zeros = torch.randint(0, 16, (n, k // g), generator=gen, device=device, dtype=torch.uint8)
    return W4A16Weight(q, scales.to(dtype), zeros, None, g, n, k)


def random_x(m: int, k: int, dtype: torch.dtype, device: torch.device, seed: int = 1) -> torch.Tensor:
    """x [m, k], its columns of different sizes."""
    gen = torch.Generator(device).manual_seed(seed)
    x = torch.randn(m, k, generator=gen, device=device) * torch.linspace(0.5, 2.0, k, device=device)
    return x.to(dtype)
