"""Times of the csrc kernel for every way to cut a problem up, on the GPU that is here, cold weights, in a captured graph.

    python benchmarks/skinny_tune.py [--m 1 4 8 16] [--layers gate_up down qkv o] [--type bf16] [--write FILE]
    python benchmarks/skinny_tune.py --dependent --engine BlockTile --ms 16 32 64
    python benchmarks/skinny_tune.py --dependent --engine WarpgroupTile --ms 16 32 64

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
from nybble.kernels.target import Target, detect
from nybble.kernels.testing import TOLERANCE, errors

COLD_BYTES = 400 << 20
SWEPT = {
    "MmaTile": {"rows": [16, 32, 48, 64, 96], "waves": [2, 4, 8, 16], "step": [4, 8], "stages": [2, 3, 4]},
    "BlockTile": {
        "rows": [64, 96, 128, 192, 256],
        "waves": [2, 4, 8],
        "step": [4, 8, 16],
        "stages": [2, 3, 4],
    },
    "WarpgroupTile": {
        **{"rows": [64, 128, 192, 256], "waves": [4, 8, 12, 16]},
        **{"step": [4, 8], "stages": [3, 4, 5, 6]},
    },
}

# Of a multiprocessor: what the registers of a wave with many sums leave room for.
RESIDENT_WAVES = {"BlockTile": 12, "WarpgroupTile": 16}
FILLED = 0.7  # of the places for blocks: a grid that leaves more of them empty is not tried


def plans(m: int, n: int, k: int, args: argparse.Namespace, target: Target) -> list[skinny.Plan]:
    if args.engine != "MmaTile":
        return block_plans(m, n, k, args, target)
    bucket = 1 << (m - 1).bit_length()
    found = [
        skinny.Plan("MmaTile", bucket, rows, waves, step, stages)
        for rows, waves, step, stages in itertools.product(args.rows, args.waves, args.step, args.stages)
    ]
    return [p for p in found if p.shared_bytes(k, args.group, 2, args.asymmetric) <= target.lds_bytes]


def block_plans(m: int, n: int, k: int, args: argparse.Namespace, target: Target) -> list[skinny.Plan]:
    """Those whose sums fit into registers, whose blocks fit a multiprocessor, and whose grid fills the chip."""
    engine, found = args.engine, []
    bucket = skinny.power_of_two(m) if engine == "WarpgroupTile" else -(-m // 16) * 16
    bucket = max(8, bucket)
    for rows, waves, step, stages, teams in itertools.product(
        args.rows, args.waves, args.step, args.stages, args.teams
    ):
        tiles, rest = divmod(rows * teams, 16 * waves)
        if rest or waves % teams or step % (2 * teams) or step * 32 < args.group:
            continue
        if engine == "BlockTile" and (waves * 32 % (8 * step) or step // teams > 8):
            continue
        if engine == "WarpgroupTile" and (waves // teams % 4 or waves % step or step // teams % 2):
            continue
        if (
            not 1 <= tiles <= 4
            or tiles * bucket // 8 > 24
            or (engine == "BlockTile" and bucket >= 48 and tiles == 1)
        ):
            continue
        for resident in (1, 2, 3):
            places = resident * target.compute_units
            blocks = -(-n // rows)
            splits = max(1, places // blocks)
            turns = -(-blocks * splits // places)
            plan = skinny.Plan(engine, bucket, rows, waves, step, stages, splits, teams)
            shared = plan.shared_bytes(k, args.group, 2, args.asymmetric)
            if (
                resident * waves <= max(RESIDENT_WAVES[engine], waves)
                and shared <= target.lds_bytes
                and resident * (shared + 1024) <= target.lds_bytes + 1024
                and blocks * splits >= FILLED * turns * places
                and splits <= min(args.most_splits, plan.steps(k) // 2)
                and plan.partial_bytes(m, n) <= skinny._PARTIAL_BYTES
                and plan not in found
            ):
                found.append(plan)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--m", "--ms", type=int, nargs="*", default=[1, 4, 8, 16])
    parser.add_argument("--engine", choices=tuple(SWEPT), default="MmaTile")
    parser.add_argument("--layers", nargs="*", default=list(QWEN3_8B))
    parser.add_argument("--type", default="bf16")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--asymmetric", action="store_true")
    for name in ("rows", "waves", "step", "stages"):
        parser.add_argument(f"--{name}", type=int, nargs="*")
    parser.add_argument("--teams", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--most-splits", type=int, default=8)
    parser.add_argument(
        "--dependent", action="store_true", help="dependent launches alone, as layers make them"
    )
    parser.add_argument("--write")
    args = parser.parse_args()
    for name, values in SWEPT[args.engine].items():
        if getattr(args, name) is None:
            setattr(args, name, values)
    device = torch.device("cuda", 0)
    target, dtype, g = detect(device), DTYPES[args.type], args.group
    zeros = args.asymmetric
    every = [p for m in args.m for layer in args.layers for p in plans(m, *QWEN3_8B[layer], args, target)]
    programs = {p.program(dtype, dtype, g, zeros) for p in every}
    print(f"{len(every)} plans, {len(programs)} programs", flush=True)
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
            for plan in plans(m, n, k, args, target):
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
                        | {
                            key: getattr(plan, key)
                            for key in ("rows", "waves", "step", "stages", "splits", "teams")
                        }
                    )
            found.sort(key=lambda f: f[0])
            for us, dependent, plan, right in [
                *[f for f in found if not f[1]][:3],
                *[f for f in found if f[1]][:3],
                *[f for f in found if f[2] == chosen],
            ]:
                star = "*" if plan == chosen else " "
                print(
                    f"{layer:8} M={m:2} {us:7.2f} us {'dependent' if dependent else '         '} {star} {plan} step {plan.step} stages {plan.stages} teams {plan.teams}{'' if right else ' WRONG'}",
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
