"""auto-round files: GPTQ's or AWQ's tensors under settings of its own.

packing_format (earlier `backend`) says whose: "auto_round:auto_gptq" is GPTQ v1, "auto_round:auto_awq" AWQ gemm, and
auto-round's own kernels ("auto_round:exllamav2", "auto_round:tritonv2", ...) GPTQ with the zero point itself, as in v2.
`extra_config` changes the settings of single modules.
Format: https://github.com/intel/auto-round
"""

from __future__ import annotations

from typing import Any

from nybble.service.checkpoints.awq import Awq
from nybble.service.checkpoints.base import Format, refused
from nybble.service.checkpoints.gptq import V1, V2, Gptq

OWN = ("auto_round", "exllamav2", "triton", "auto")
SIXTEEN = 16


def auto_round(quantization: dict[str, Any], where: str) -> Format:
    """The format of an auto-round folder. Raises CheckpointError naming the field that is not understood."""
    for field, given, accepted in (
        ("data_type", quantization.get("data_type") or "int", "int"),
        ("act_bits", quantization.get("act_bits") or SIXTEEN, "16 (16-bit activations)"),
    ):
        if given not in ("int",) and not (isinstance(given, int) and given >= SIXTEEN):
            raise refused(where, field, given, accepted)
    packing = quantization.get("packing_format") or quantization.get("backend") or "auto_round:auto_gptq"
    name = str(packing).lower().replace("-", "_")
    if "awq" in name:
        return Awq({**quantization, "version": "gemm"}, where)
    if "gptq" in name:
        return Gptq({**quantization, "checkpoint_format": V1}, where)
    if any(own in name for own in OWN) and "compressor" not in name:
        return Gptq({**quantization, "checkpoint_format": V2}, where)
    raise refused(
        where, "packing_format", packing, "auto_round:auto_gptq, auto_round:auto_awq, auto_round:exllamav2"
    )
