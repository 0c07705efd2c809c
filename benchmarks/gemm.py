"""Time the W4A16 GEMM beside its peers on the GPU that is here: cold weights, graph replay, one table.

    python benchmarks/gemm.py [--layers gate_up,down] [--ms 1,6,16,64,512,2048] [--out FILE.json]

Peers: torch's 16-bit GEMM, torch's int4 `_weight_int4pack_mm` (tinygemm) and gemlite. All run one group size and bf16
on the same problem. A peer that is missing is an error, not a blank; exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

import torch
import triton
from gemm_problem import QWEN3_8B, Timing, commit, random_weight, random_x, time_cold

from nybble.kernels.bench.peers import PEERS, Gemm
from nybble.kernels.linear import W4A16Linear, triton_kn, triton_skinny
from nybble.kernels.linear.reference import dequantize
from nybble.kernels.packing import W4A16Weight
from nybble.kernels.skinny_layout import pack
from nybble.kernels.target import detect
from nybble.kernels.testing import errors

G = 128
COPIES = 4


def nybble_skinny(weight: W4A16Weight) -> Gemm:
    w = pack(weight, arch=detect(weight.q.device).arch)
    return lambda x: triton_skinny.skinny_gemm(x, w.words, w.scales, w.zeros, None, G)


def nybble_kn(weight: W4A16Weight) -> Gemm:
    w = triton_kn.pack_kn(weight)
    return lambda x: triton_kn.kn_gemm(x, w.words, w.scales, w.zeros, None, G)


def nybble_layer(weight: W4A16Weight) -> Gemm:
    """The layer as it is served with dense copies: routed, so from RouteLimits.dense_min_m rows on the copy."""
    return W4A16Linear(weight, None, torch.bfloat16, weight.q.device, dense=True)


def peer(name: str) -> Callable[[W4A16Weight], Gemm]:
    return lambda weight: PEERS[name].make(weight, torch.bfloat16)


PATHS: dict[str, Callable[[W4A16Weight], Gemm]] = {
    "skinny": nybble_skinny,
    "kn": nybble_kn,
    "dense": peer("dense 16-bit"),
    "layer": nybble_layer,
    "tinygemm": peer("tinygemm"),
    "gemlite": peer("gemlite"),
}


def measure(
    path: str, weights: list[W4A16Weight], x: torch.Tensor, exact: torch.Tensor
) -> tuple[Timing, float]:
    gemms = [PATHS[path](w) for w in weights]
    error = errors(gemms[0](x), exact).rms
    return time_cold([lambda gemm=gemm: gemm(x) for gemm in gemms]), error


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", default="gate_up,down")
    parser.add_argument("--ms", default="1,6,16,64,512,2048")
    parser.add_argument("--gemlite-ms", default="1,16,64,2048", help="its autotuner takes long")
    parser.add_argument("--paths", default=",".join(PATHS))
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    ms = [int(m) for m in args.ms.split(",")]
    gemlite_ms = {int(m) for m in args.gemlite_ms.split(",") if m}
    head = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "gemlite": version("gemlite") if "gemlite" in args.paths else "not asked for",
        "commit": args.commit or commit(),
        "dtype": "bf16",
        "group_size": G,
        "weights": f"cold, {COPIES} copies in turn",
    }
    print(head)
    rows, failed = [], []
    print(
        f"{'layer':9}{'M':>6} {'path':10}{'us':>9}{'low':>9}{'high':>9}{'GB/s':>8}{'TFLOP/s':>9}{'rms error':>11}"
    )
    for layer in args.layers.split(","):
        n, k = QWEN3_8B[layer]
        weights = [random_weight(n, k, G, True, torch.bfloat16, device, seed=i) for i in range(COPIES)]
        for path in args.paths.split(","):
            for m in ms:
                if path == "gemlite" and m not in gemlite_ms:
                    continue
                x = random_x(m, k, torch.bfloat16, device)
                exact = x.float() @ dequantize(weights[0]).t()
                begun = time.perf_counter()
                try:
                    timing, error = measure(path, weights, x, exact)
                except Exception as problem:
                    failed.append(f"{layer} M={m} {path}: {type(problem).__name__}: {problem}")
                    print("FAILED", failed[-1][:300], flush=True)
                    continue
                us = timing.median_us
                weight_bytes = n * k * 2 if path == "dense" else n * k // 2 + n * k // G * 2
                row = {
                    "layer": layer,
                    "m": m,
                    "path": path,
                    "us": round(us, 2),
                    "low_us": round(timing.low_us, 2),
                    "high_us": round(timing.high_us, 2),
                    "weight_gb_per_s": round(weight_bytes / us / 1e3, 1),
                    "tflops": round(2 * m * n * k / us / 1e6, 1),
                    "rms_error": float(f"{error:.3g}"),
                }
                rows.append(row)
                print(
                    f"{layer:9}{m:6} {path:10}{us:9.1f}{timing.low_us:9.1f}{timing.high_us:9.1f}"
                    f"{row['weight_gb_per_s']:8.0f}{row['tflops']:9.1f}{error:11.2g}  ({time.perf_counter() - begun:.0f} s)",
                    flush=True,
                )
    print(compare(rows))
    if args.out:
        with open(args.out, "w") as f:
            json.dump({**head, "rows": rows, "failed": failed}, f, indent=1)
            f.write("\n")
    for line in failed:
        print("FAILED", line[:200])
    return 1 if failed else 0


def compare(rows: list[dict[str, object]]) -> str:
    """skinny against dense and the best int4 peer, per layer and M."""
    by = {(r["layer"], r["m"], r["path"]): float(str(r["us"])) for r in rows}
    lines = [f"{'layer':9}{'M':>6}{'dense/skinny':>14}{'best int4 peer/skinny':>23}"]
    for layer, m, path in by:
        if path != "skinny":
            continue
        ours, dense_us = by[layer, m, "skinny"], by.get((layer, m, "dense"))
        peers = [by[layer, m, p] for p in ("tinygemm", "gemlite") if (layer, m, p) in by]
        ratio = [f"{t / ours:.2f}" if t else "-" for t in (dense_us, min(peers, default=0.0))]
        lines.append(f"{layer:9}{m:6}{ratio[0]:>14}{ratio[1]:>23}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
