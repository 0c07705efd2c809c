"""Stand-ins for zentorch's ops, with the behaviour seen in the real ones: no zeros, signed nibbles; zeros, unsigned."""

from types import SimpleNamespace

import torch

from nybble.kernels.linear.xpu import quantize_rows
from nybble.kernels.packing import pack_rows, unpack_rows


def _repack(values):
    assert values.dtype is torch.int8
    return pack_rows(values.to(torch.int16) & 0xF)


def _product(x, nibbles, scales, zeros, bias, dtype):
    groups, n = scales.shape
    assert (
        scales.is_contiguous() and scales.dtype in (torch.float32, torch.bfloat16) and nibbles.shape[0] == n
    )
    g = nibbles.shape[1] // groups
    w = nibbles.float()
    if zeros is None:
        w = torch.where(w > 7, w - 16, w)
    else:
        assert zeros.dtype is torch.int8 and zeros.is_contiguous()
        w = w - zeros.t().float().repeat_interleave(g, 1)
    w = w * scales.t().float().repeat_interleave(g, 1)
    return torch.nn.functional.linear(x.float(), w, None if bias is None else bias.float()).to(dtype)


def _woq_linear(x, weight, scales, zeros, bias=None):
    assert weight.t().is_contiguous() and x.dtype is torch.bfloat16
    return _product(x, unpack_rows(weight.t()), scales, zeros, bias, x.dtype)


def _dynamic_qlinear(x, weight, scales, bias=None):
    q, scale = quantize_rows(x.float())
    return _product(q.float() * scale, unpack_rows(weight), scales, None, bias, x.dtype)


ZEN_OPS = SimpleNamespace(
    zentorch_woq_repack_weight=_repack,
    zentorch_woq_linear=_woq_linear,
    zentorch_dynamic_qlinear=_dynamic_qlinear,
)
