"""Times of the int4 GEMMs of a decode step one after another, microseconds for a layer of the model, on the GPU that is here.

    python benchmarks/skinny_chain.py [--models qwen3-8b llama-3.1-8b] [--m 1 8 16] [--type bf16] [--group 128] [--asymmetric]
    python benchmarks/skinny_chain.py --models qwen3-8b --m 1 --layer gate_up --blocks 32x4 48x4 48x8x8x2

Each layer has weights of its own, out of cache; launches are dependent, as layers make them, in a captured graph. Without
--layer every plan is that of `plan_for`; with it each of --blocks takes its place there: rows of w, waves and, if not those
of `plan_for`, step and stages. Where many launches of one kernel follow each other, as in skinny_tune.py, plans rank otherwise.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from gemm_problem import DTYPES, random_weight, random_x, time_cold

from nybble.kernels import native
from nybble.kernels.linear import skinny
from nybble.kernels.skinny_layout import SkinnyWeight, pack
from nybble.kernels.target import Target, detect
from nybble.service.checkpoints.random_weights import SHAPES

MODELS: dict[str, dict[str, int]] = {
    **{name: shape for name, shape in SHAPES.items() if shape["hidden_size"] >= 1024},
    "llama-3.2-3b": {
        **{"hidden_size": 3072, "intermediate_size": 8192},
        **{"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128},
    },
    "qwen2.5-7b": {
        **{"hidden_size": 3584, "intermediate_size": 18944},
        **{"num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128},
    },
}
GATES = {"gate_up": "silu"}
WEIGHT_BYTES, LAYERS_AT_LEAST = 1_200_000_000, 3

Plans = dict[str, skinny.Plan]


def shapes(model: str) -> dict[str, tuple[int, int]]:
    """N and K of each layer, in the order in which they run."""
    shape = MODELS[model]
    hidden, intermediate = shape["hidden_size"], shape["intermediate_size"]
    heads, head_dim = shape["num_attention_heads"], shape["head_dim"]
    return {
        "qkv": ((heads + 2 * shape["num_key_value_heads"]) * head_dim, hidden),
        "o": (hidden, heads * head_dim),
        "gate_up": (2 * intermediate, hidden),
        "down": (hidden, intermediate),
    }


def with_blocks(plan: skinny.Plan, blocks: str) -> skinny.Plan:
    """`plan` with "ROWSxWAVES" or "ROWSxWAVESxSTEPxSTAGES" of its engine."""
    rows, waves, *ring = map(int, blocks.split("x"))
    step, stages = ring or (plan.step, plan.stages)
    return replace(plan, rows=rows, waves=waves, step=step, stages=stages, splits=1)


def measure_model(model: str, target: Target, device: torch.device, args: argparse.Namespace) -> None:
    dtype, g = DTYPES[args.type], args.group
    layers = shapes(model)
    layer_bytes = sum(n * k // 2 for n, k in layers.values())
    weights: list[dict[str, SkinnyWeight]] = [
        {
            name: pack(random_weight(n, k, g, not args.asymmetric, dtype, device, seed=i), arch=target.arch)
            for name, (n, k) in layers.items()
        }
        for i in range(max(LAYERS_AT_LEAST, WEIGHT_BYTES // layer_bytes))
    ]
    for m in args.m:
        chosen: Plans = {
            name: skinny.plan_for(target, m, n, k, g, 2, args.asymmetric) for name, (n, k) in layers.items()
        }
        choices = {"plan_for": chosen}
        if args.layer:
            for blocks in args.blocks:
                choices[blocks] = chosen | {args.layer: with_blocks(chosen[args.layer], blocks)}
        programs = {
            plan.program(dtype, dtype, g, args.asymmetric, GATES.get(name))
            for plans in choices.values()
            for name, plan in plans.items()
        }
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda program: native.compile_program(program, target), programs))
        x = {name: random_x(m, k, dtype, device) for name, (_, k) in layers.items()}
        for choice, plans in choices.items():
            calls = [
                partial(
                    skinny.bind(
                        plans[name], x[name], w.words, w.scales, w.zeros, None, g, True, GATES.get(name)
                    ),
                    x[name],
                )
                for layer in weights
                for name, w in layer.items()
            ]
            taken = time_cold(calls, rounds=1).low_us * len(layers)  # low_us is of a call
            what = ", ".join(f"{name} {plan}" for name, plan in plans.items())
            print(f"{model} M={m:2} {choice:12} {taken:7.1f} us  {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--m", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--type", default="bf16", choices=list(DTYPES))
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--asymmetric", action="store_true")
    parser.add_argument("--layer", choices=["qkv", "o", "gate_up", "down"])
    parser.add_argument("--blocks", nargs="*", default=[], metavar="ROWSxWAVES[xSTEPxSTAGES]")
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    for model in args.models:
        measure_model(model, detect(device), device, args)


if __name__ == "__main__":
    main()
