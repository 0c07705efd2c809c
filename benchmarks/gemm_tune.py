"""Time candidate tiles of a Triton GEMM on the GPU that is here, cold weights, and print the fastest per M.

python benchmarks/gemm_tune.py [--kernel skinny] [--layers gate_up,down] [--ms 16,64,2048] [--jobs 14] [--top 4]
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from dataclasses import replace

import torch
from gemm_problem import QWEN3_8B, random_weight, random_x, time_cold

from nybble.kernels.linear import triton_kn, triton_skinny
from nybble.kernels.skinny_layout import pack
from nybble.kernels.target import detect
from nybble.kernels.tiles import Tile

COPIES = 4


def candidates(m: int, n: int, k: int, units: int) -> list[Tile]:
    """Tiles worth timing: block_m no more than twice M, and no fewer programs than a quarter of the chip."""
    found = []
    small = m <= 64
    for bm, bn, bk, warps, stages in itertools.product(
        (16, 32, 64, 128, 256), (64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4, 6)
    ):
        if bm >= 2 * max(m, 16) or (not small and bm < 64) or bm * bn > 32768 or (small and bk < 64):
            continue
        if bm < min(m, 64) or (warps == 8 and bn * bm < 8192 and bn < 128) or (small and stages == 2):
            continue
        if not small and (bk == 32 or stages == 6):
            continue
        if bm * bn // (warps * 32) > 160:
            continue
        tiles = -(-m // bm) * -(-n // bn)
        splits = {
            s
            for s in ((1, 2, 3, 4, 6, 8) if small else (1, 2, 4))
            if tiles * s <= 10 * units and k // (128 * s) >= 4
        }
        for split in sorted(splits) if tiles < 4 * units else [1]:
            if tiles * split < units // 2:
                continue
            for folded in (False, True):
                if bm * bn // (warps * 32) > 96 and not folded:
                    continue
                found.append(Tile(bm, bn, bk, warps, stages, split, folded))
    return found


def build(job: tuple[str, int, list[Tile]]) -> None:
    """Compile tiles into Triton's disk cache by running each once on a small weight of the same divisibility."""
    kernel, m, tiles = job
    device = torch.device("cuda", 0)
    weight = random_weight(512, 2048, 128, True, torch.bfloat16, device)
    x = random_x(m, 2048, torch.bfloat16, device)
    for tile in tiles:
        try:
            launch(kernel, x, prepare(kernel, weight, device), tile)
        except Exception:  # too many registers or too much shared memory: the timing pass says so again
            continue
    torch.cuda.synchronize()


def prepare(kernel: str, weight: object, device: torch.device) -> object:
    return pack(weight, arch=detect(device).arch) if kernel == "skinny" else triton_kn.pack_kn(weight)


def launch(kernel: str, x: torch.Tensor, w: object, tile: Tile) -> torch.Tensor:
    module = triton_skinny if kernel == "skinny" else triton_kn
    return module.launch(x, w.words, w.scales, w.zeros, None, w.group_size, tile=tile)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kernel", default="skinny", choices=("skinny", "kn"))
    parser.add_argument("--layers", default="gate_up,down")
    parser.add_argument("--ms", default="16,64,2048")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--top", type=int, default=4)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    units = detect(device).compute_units
    ms = [int(m) for m in args.ms.split(",")]
    layers = {name: QWEN3_8B[name] for name in args.layers.split(",")}
    plan = [
        (name, m, candidates(m, n, k, units)) for (name, (n, k)), m in itertools.product(layers.items(), ms)
    ]
    builds: dict[int, set[Tile]] = {}
    for _, m, tiles in plan:
        builds.setdefault(m, set()).update(replace(t, split_k=min(t.split_k, 2)) for t in tiles)
    jobs = [
        (args.kernel, m, sorted(tiles, key=str)[i :: args.jobs])
        for m, tiles in builds.items()
        for i in range(args.jobs)
    ]
    print(f"{sum(len(t) for t in builds.values())} tiles to compile", flush=True)
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        pool.map(build, jobs, chunksize=1)
    rows = []
    for name, m, tiles in plan:
        n, k = layers[name]
        weights = [
            prepare(args.kernel, random_weight(n, k, 128, True, torch.bfloat16, device, seed=i), device)
            for i in range(COPIES)
        ]
        x = random_x(m, k, torch.bfloat16, device)
        timed = []
        for tile in tiles:
            calls = [lambda w=w, tile=tile, x=x: launch(args.kernel, x, w, tile) for w in weights]
            try:
                timed.append((time_cold(calls, rounds=2, replays=3).median_us, tile))
            except Exception as error:
                rows.append({"layer": name, "m": m, "tile": str(tile), "error": str(error)[:80]})
        timed.sort(key=lambda pair: pair[0])
        rows += [{"layer": name, "m": m, "tile": str(tile), "us": round(us, 2)} for us, tile in timed]
        for us, tile in timed[: args.top]:
            print(f"{name:8} M={m:5} {us:8.1f} us  {tile}", flush=True)
    if args.out:
        with open(args.out, "w") as f:
            json.dump(rows, f, indent=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
