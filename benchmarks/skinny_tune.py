"""Times of the csrc kernel for every way to cut a problem up, on the GPU that is here, cold weights, in a captured graph.

    python benchmarks/skinny_tune.py [--m 1 4 8 16] [--layers gate_up down qkv o] [--type bf16] [--write FILE]

Every plan's result is compared with the float32 reference; a wrong one is marked. The plan that `plan_for` takes is
marked with a star.
"""

from __future__ import annotations

import argparse
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from gemm_problem import DTYPES, QWEN3_8B, random_weight, random_x, time_cold

from nybble.kernels import native
from nybble.kernels.linear import skinny
from nybble.kernels.linear.reference import linear_reference
from nybble.kernels.skinny_layout import pack
from nybble.kernels.target import detect
from nybble.kernels.testing import TOLERANCE, errors

COLD_BYTES = 400 << 20


def plans(m: int, args: argparse.Namespace) -> list[skinny.Plan]:
    bucket = 1 << (m - 1).bit_length()
    return [
        skinny.Plan("MmaTile", bucket, rows, waves, step, stages)
        for rows, waves, step, stages in itertools.product(args.rows, args.waves, args.step, args.stages)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--m", type=int, nargs="*", default=[1, 4, 8, 16])
    parser.add_argument("--layers", nargs="*", default=list(QWEN3_8B))
    parser.add_argument("--type", default="bf16")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--asymmetric", action="store_true")
    for name, values in (
        ("rows", [16, 32, 48, 64, 96]),
        ("waves", [2, 4, 8, 16]),
        ("step", [4, 8]),
        ("stages", [2, 3, 4]),
    ):
        parser.add_argument(f"--{name}", type=int, nargs="*", default=values)
    parser.add_argument(
        "--dependent", action="store_true", help="dependent launches alone, as layers make them"
    )
    parser.add_argument("--write")
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    target, dtype, g = detect(device), DTYPES[args.type], args.group
    zeros = args.asymmetric
    every = [p for m in args.m for p in plans(m, args)]
    programs = {p.program(dtype, dtype, g, zeros) for p in every}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda p: native.compile_program(p, target), programs))
    rows = []
    for layer in args.layers:
        n, k = QWEN3_8B[layer]
        copies = max(2, -(-COLD_BYTES // (n * k // 2)))
        weights = [random_weight(n, k, g, not zeros, dtype, device, seed=i) for i in range(copies)]
        packed = [pack(w, arch=target.arch) for w in weights]
        for m in args.m:
            x = random_x(m, k, dtype, device)
            reference = linear_reference(x, weights[0])
            chosen = skinny.plan_for(target, m, n, k, g, 2, zeros)
            found = []
            for plan in plans(m, args):
                if plan.shared_bytes(k, g, 2, zeros) > target.lds_bytes:
                    continue
                for dependent in (True,) if args.dependent else (False, True):
                    calls = [
                        skinny.bind(plan, x, p.words, p.scales, p.zeros, None, g, dependent) for p in packed
                    ]
                    error = errors(calls[0](x), reference)
                    right = error.rms <= TOLERANCE[dtype].rms
                    timing = time_cold(
                        [partial(call, x) for call in calls], rounds=max(1, 32 // copies), replays=5
                    )
                    found.append((timing.median_us, dependent, plan, right))
                    rows.append(
                        {
                            "layer": layer,
                            "m": m,
                            "us": round(timing.median_us, 2),
                            "dependent": dependent,
                            "right": right,
                        }
                        | {key: getattr(plan, key) for key in ("rows", "waves", "step", "stages")}
                    )
            found.sort(key=lambda f: f[0])
            for us, dependent, plan, right in [
                *[f for f in found if not f[1]][:3],
                *[f for f in found if f[1]][:3],
                *[f for f in found if f[2] == chosen],
            ]:
                star = "*" if plan == chosen else " "
                print(
                    f"{layer:8} M={m:2} {us:7.2f} us {'dependent' if dependent else '         '} {star} {plan} step {plan.step} stages {plan.stages}{'' if right else ' WRONG'}",
                    flush=True,
                )
            wrong = [f for f in found if not f[3]]
            if wrong:
                print(f"{layer} M={m}: {len(wrong)} of {len(found)} plans WRONG", wrong[0])
        del weights, packed
    if args.write:
        with open(args.write, "w", encoding="utf-8") as file:
            json.dump(rows, file)


if __name__ == "__main__":
    main()
