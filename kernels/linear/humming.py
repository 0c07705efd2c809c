"""W4A16 on CUDA through the package `humming-kernels` (PyPI; imports as `humming`), which compiles a GEMM per layer.

Written against version 0.1.20 and its public `humming.layer.HummingLayer`. That layer's tensors are ours already:
weight int32 [N, K/8] (eight consecutive k per word, low nibble first, 8 = zero when symmetric), weight_scale
[N, K/G] in the activation type, zero_point int32 [N/8, K/G] (eight consecutive n per word), w = (q - z) * s.
`transform()` turns them into the package's own layout on the GPU.

Checked here: the names, shapes and types of those tensors, against the package itself where it imports. Not run:
the compiled kernels, which need an NVIDIA GPU (sm_75, bf16 sm_80) and nvcc or NVRTC; shapes it splits or pads by
itself (other groups, ragged N) are therefore left to the general path.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch

from nybble.kernels.linear.config import LinearConfig, LinearKernel
from nybble.kernels.packing import W4A16Weight, pack_rows
from nybble.kernels.target import Target

_GROUPS = (32, 64, 128)
# The package's smallest tile: transform() asserts both.
_N_MULTIPLE = 64
_K_MULTIPLE = 32
_MIN_SM = {torch.float16: 75, torch.bfloat16: 80}


@cache
def why_no_humming() -> str:
    """Imports the package. "" when it is there, else the reason it is not."""
    if importlib.util.find_spec("humming") is None:
        return "the package humming-kernels is not installed"
    try:
        layer = importlib.import_module("humming.layer")
    except Exception as e:  # other packages are called humming too, and a CUDA library may be missing
        return f"humming does not import: {e}"
    return "" if hasattr(layer, "HummingLayer") else "this humming has no HummingLayer"


def layer_tensors(weight: W4A16Weight, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What HummingLayer.load_from_tensors takes: weight, weight_scale and, asymmetric, zero_point (see above)."""
    tensors = {"weight": weight.q, "weight_scale": weight.scales.to(dtype)}
    if weight.zeros is not None:
        tensors["zero_point"] = pack_rows(weight.zeros.t()).t().contiguous()
    return tensors


class Humming(LinearKernel):
    name = "humming"
    paths = ("general",)

    def can_implement(self, config: LinearConfig, target: Target) -> tuple[bool, str]:
        if target.kind != "cuda":
            return False, f"device {target.kind}: runs on CUDA"
        if config.dtype not in _MIN_SM:
            return False, f"activations {config.dtype}: accepted float16 and bfloat16"
        if target.sm < _MIN_SM[config.dtype]:
            return False, f"{target.arch}: {config.dtype} needs sm_{_MIN_SM[config.dtype]}"
        if config.group_size not in _GROUPS:
            return False, f"group_size {config.group_size}: accepted {_GROUPS}"
        if config.n % _N_MULTIPLE or config.k % _K_MULTIPLE:
            return (
                False,
                f"N={config.n}, K={config.k}: accepted N % {_N_MULTIPLE} == 0, K % {_K_MULTIPLE} == 0",
            )
        if config.act_order:
            return False, "act-order: the groups of K must be consecutive"
        if missing := why_no_humming():
            return False, missing
        return True, "humming's compiled int4 GEMM"

    def prepare(self, weight: W4A16Weight, config: LinearConfig, device: torch.device) -> Any:
        """A transformed HummingLayer. Raises ValueError when this version's layer wants other tensors."""
        tensors = layer_tensors(weight, config.dtype)
        # Its constructor allocates on the current CUDA device.
        with torch.cuda.device(device):
            layer = importlib.import_module("humming.layer").HummingLayer(
                shape_n=weight.n,
                shape_k=weight.k,
                weight_config={
                    "dtype": "uint4",
                    "group_size": weight.group_size,
                    "has_zero_point": not weight.symmetric,
                },
                torch_dtype=config.dtype,
            )
            wanted = {name for name, _ in layer.named_parameters()}
            # load_from_tensors skips names it does not know and leaves the rest uninitialised.
            if wanted != set(tensors):
                raise ValueError(
                    f"HummingLayer: given {sorted(tensors)}, this version accepts {sorted(wanted)}; "
                    "install humming-kernels 0.1.20"
                )
            layer.load_from_tensors(tensors)
            layer = layer.to(device)
            layer.transform()
        return layer

    def apply(self, state: Any, x: torch.Tensor, bias: torch.Tensor | None, path: str) -> torch.Tensor:
        y: torch.Tensor = state(x.contiguous())
        return y if bias is None else y.add_(bias)

    def nbytes(self, state: Any) -> int:
        return sum(t.nbytes for t in (*state.parameters(), *state.buffers()))
