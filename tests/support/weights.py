"""Random int4 weights for tests of the linear layer."""

import torch

from nybble.kernels.packing import W4A16Weight, pack_rows


def make_weight(n, k, g, symmetric, act_order=False, seed=0):
    """Scales differ 1000-fold between groups and every column is distinct, so that no swap can hide."""
    gen = torch.Generator().manual_seed(seed)
    q = pack_rows(torch.randint(0, 16, (n, k), generator=gen))
    scales = (10.0 ** -(torch.rand(n, k // g, generator=gen) * 3 + 1)).to(torch.float16)
    zeros = None if symmetric else torch.randint(0, 16, (n, k // g), generator=gen).to(torch.uint8)
    g_idx = (torch.randperm(k, generator=gen) // g).to(torch.int32) if act_order else None
    return W4A16Weight(q, scales, zeros, g_idx, g, n, k)
