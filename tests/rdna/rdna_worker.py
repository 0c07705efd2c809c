"""Compiles, and where asked runs, a list of GEMM cases for chips that are not there.

    python rdna_worker.py < cases.json > results.json

A process of its own, because the other kernel tests import Triton in its interpreter mode. One result per case:
resources of each launch and, for cases with "run", the error against the float32 reference and the executed counts.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import rdna_layer
import torch
from rdna_device import Launch, counts, pretend, resources, run_csrc

from nybble.kernels.fused.activation import gated_reference
from nybble.kernels.linear import operands, triton_int8, triton_kn, triton_skinny
from nybble.kernels.linear import skinny as csrc_skinny
from nybble.kernels.linear.int8 import int8_reference, quantize_rows
from nybble.kernels.linear.reference import linear_reference
from nybble.kernels.packing import W4A16Weight, pack_rows
from nybble.kernels.skinny_layout import pack
from nybble.kernels.target import Target
from nybble.kernels.testing import TOLERANCE, errors
from nybble.kernels.tiles import Tile

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def problem(case: dict[str, Any]) -> tuple[torch.Tensor, W4A16Weight, torch.Tensor | None]:
    """x, weight, bias. Scales of neighbouring groups differ by up to 2^8, every column is distinct, some groups are 0."""
    m, n, k, g, dtype = case["m"], case["n"], case["k"], case["g"], DTYPES[case["dtype"]]
    gen = torch.Generator().manual_seed(m * 7 + n * 3 + k)
    q = torch.randint(0, 16, (n, k), generator=gen, dtype=torch.uint8)
    zeros = None
    if not case["symmetric"]:
        zeros = torch.randint(0, 16, (n, k // g), generator=gen, dtype=torch.uint8)
    scales = (1 + torch.rand(n, k // g, generator=gen)) * torch.exp2(
        torch.randint(-11, -3, (n, k // g), generator=gen).float()
    )
    scales[:: max(1, n // 3), 0] = 0
    weight = W4A16Weight(pack_rows(q), scales.to(dtype), zeros, None, g, n, k)
    x = (torch.randn(m, k, generator=gen) * torch.linspace(0.5, 2, k)).to(dtype)
    bias = torch.randn(n, generator=gen).to(dtype) if case.get("bias") else None
    return x, weight, bias


def skinny(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, list[Launch]]:
    """(result, reference, launches) of the skinny-layout GEMM through its launcher."""
    x, weight, bias = problem(case)
    packed = pack(weight, arch=case["arch"])
    tile = Tile(**case["tile"]) if "tile" in case else None
    with pretend(case["arch"], run=case.get("run", False), **case.get("schedule", {})) as launches:
        args = (x, packed.words, packed.scales, packed.zeros, bias, weight.group_size)
        if case.get("short_scales"):  # what the launcher's checks are there to stop
            args = (x, packed.words, packed.scales[:-8].clone(), *args[3:])
        else:
            operands.check(*args)
        gluon = case.get("kernel", "skinny_rdna") == "skinny_rdna"
        restore = triton_skinny._gluon_kernel
        if not gluon:
            triton_skinny._gluon_kernel = lambda: None
        try:
            y = triton_skinny.launch(*args, tile=tile)
        finally:
            triton_skinny._gluon_kernel = restore
    return y, linear_reference(x, weight, bias), launches


def kn(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, list[Launch]]:
    """(result, reference, launches) of the [K, N/8] GEMM through its launcher."""
    x, weight, bias = problem(case)
    packed = triton_kn.pack_kn(weight)
    tile = Tile(**case["tile"]) if "tile" in case else None
    with pretend(case["arch"], run=case.get("run", False), **case.get("schedule", {})) as launches:
        args = (x, packed.words, packed.scales, packed.zeros, bias, weight.group_size)
        triton_kn.check_arguments(*args)
        y = triton_kn.launch(*args, tile=tile)
    return y, linear_reference(x, weight, bias), launches


def int8(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, list[Launch]]:
    """(result, reference, launches) of the int8 GEMM through its launcher."""
    m, n, k, dtype = case["m"], case["n"], case["k"], DTYPES[case["dtype"]]
    gen = torch.Generator().manual_seed(m * 7 + n * 3 + k)
    weight = quantize_rows(torch.randn(n, k, generator=gen), dtype)
    x = torch.randn(m, k, generator=gen).to(dtype)
    with pretend(case["arch"], run=case.get("run", False), **case.get("schedule", {})) as launches:
        y = triton_int8.int8_gemm(x, weight.q, weight.scales)
    return y, int8_reference(x, weight), launches


def skinny_gated(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, list[Launch]]:
    """The gate inside the skinny-layout GEMM, of a weight whose rows alternate gate and up."""
    x, weight, bias = problem(case)
    packed = pack(weight, arch=case["arch"])
    name = case.get("activation", "silu")
    with pretend(case["arch"], run=case.get("run", False), **case.get("schedule", {})) as launches:
        y = triton_skinny.skinny_gemm_gated(
            x, packed.words, packed.scales, packed.zeros, bias, weight.group_size, name
        )
    both = linear_reference(x, weight, bias).unsqueeze(0)
    return y, gated_reference(both, None, True, name), launches


def csrc(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, list[Launch]]:
    """(result, reference, launches) of csrc's kernel as clang compiles it, with the plan that its launcher makes."""
    x, weight, bias = problem(case)
    scale_dtype = DTYPES.get(case.get("scales", ""), x.dtype)
    packed = pack(weight, arch=case["arch"], scale_dtype=scale_dtype)
    if "scales" in case:
        weight = dataclasses.replace(weight, scales=packed.scales)
    target = Target("rocm", case["arch"], "", case.get("units", 40), 65536)
    plan = csrc_skinny.plan_for(
        target,
        case["m"],
        weight.n,
        weight.k,
        weight.group_size,
        scale_dtype.itemsize,
        packed.zeros is not None,
    )
    plan = dataclasses.replace(plan, **case.get("plan", {}))
    y, launch = run_csrc(
        case["arch"],
        plan,
        x,
        packed,
        bias,
        run=case.get("run", False),
        schedule=case.get("schedule", {}),
        gate=case.get("gate"),
    )
    reference = linear_reference(x, weight, bias)
    if "gate" in case:
        reference = gated_reference(reference.unsqueeze(0), None, True, case["gate"])
    return y, reference, [launch]


RUNNERS = {
    "skinny": skinny,
    "skinny_rdna": skinny,
    "kn": kn,
    "csrc": csrc,
    "skinny_gated": skinny_gated,
    "int8": int8,
    **rdna_layer.RUNNERS,
}


def main() -> None:
    torch.set_num_threads(1)
    for case in json.load(sys.stdin):
        try:
            y, reference, launches = RUNNERS[case.get("kernel", "skinny_rdna")](case)
        except RuntimeError as error:  # an emulated fault
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
            continue
        result: dict[str, Any] = {
            "launches": [
                {"kernel": entry.kernel, **dataclasses.asdict(resources(entry))} for entry in launches
            ]
        }
        if case.get("run"):
            found, limit = errors(y, reference), TOLERANCE[DTYPES[case["dtype"]]]
            result["worst"], result["rms"] = found.worst, found.rms
            result["close"] = found.worst <= limit.worst and found.rms <= limit.rms
            result["counts"] = [counts(entry.executed) for entry in launches]
            result["unreplicated"] = sum(entry.unreplicated for entry in launches)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
