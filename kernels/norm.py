"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * w, statistics in float32."""

from __future__ import annotations

import torch


class RmsNorm:
    """RMSNorm over the last dimension. weight [D] in the activation type; eps as in the model's config.

    On the CPU it runs as a layer norm of (x, -x): that vector's mean is 0 and its variance mean(x^2), and torch's
    fused layer norm costs 7 us where its composite rms_norm costs 12 us at D = 576 (a model of 30 layers calls it 61
    times a token).
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._shape = tuple(weight.shape)
        self._mirrored = torch.cat((weight, weight)) if weight.device.type == "cpu" else None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self._mirrored is None else self._mirrored.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._mirrored is None:
            return torch.nn.functional.rms_norm(x, self._shape, self.weight, self.eps)
        d = self._shape[-1]
        both = torch.cat((x, x.neg()), dim=-1)
        return torch.layer_norm(both, (2 * d,), self._mirrored, None, self.eps).narrow(-1, 0, d)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float32 [..., D] of x [..., D] and weight [D]."""
    x = x.to(torch.float32)
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.to(torch.float32)
