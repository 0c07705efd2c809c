"""Every Triton GEMM on the GPU against a float32 reference: prints a table, exits 1 on any miss.

    python benchmarks/gemm_check.py [--jobs 8]

Paths x dtype x group size x symmetric/asymmetric x M x shapes, odd and real-model ones; plus padding, strides, bias,
split K, torch.compile and graph capture.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from dataclasses import dataclass, replace

import torch
from gemm_problem import DTYPES, random_weight, random_x

from nybble.kernels.linear import triton_kn, triton_skinny
from nybble.kernels.linear.reference import dequantize
from nybble.kernels.skinny_layout import pack
from nybble.kernels.target import detect
from nybble.kernels.testing import TOLERANCE, errors
from nybble.kernels.tiles import rows_for

MS = (1, 2, 3, 5, 6, 16, 17, 64, 129, 256, 300)
SHAPES = (  # N, K
    (8, 576),
    (576, 576),
    (1440, 1536),
    (576, 2560),
    (4096, 4096),
    (1440, 9728),
    (576, 12288),
    (4096, 17408),
    (1440, 20992),
    (24576, 4096),
)


@dataclass(frozen=True)
class Row:
    path: str
    dtype: str
    g: int
    symmetric: bool
    n: int
    k: int
    worst: float
    rms: float
    cases: int
    missed: str


def run_path(path: str, x: torch.Tensor, packed: object, bias: torch.Tensor) -> torch.Tensor:
    if path == "skinny":
        return triton_skinny.skinny_gemm(
            x, packed.words, packed.scales, packed.zeros, bias, packed.group_size
        )
    return triton_kn.kn_gemm(x, packed.words, packed.scales, packed.zeros, bias, packed.group_size)


def check(case: tuple[str, str, int, bool, int, int]) -> Row:
    """All of MS for one weight, on one path."""
    path, dtype_name, g, symmetric, n, k = case
    torch.backends.cuda.matmul.allow_tf32 = False
    device, dtype = torch.device("cuda", 0), DTYPES[dtype_name]
    weight = random_weight(n, k, g, symmetric, dtype, device, seed=n + k)
    packed = pack(weight, arch=detect(device).arch) if path == "skinny" else triton_kn.pack_kn(weight)
    exact = dequantize(weight)
    bias = torch.linspace(-1, 1, n, device=device).to(dtype)
    worst = rms = 0.0
    missed, limit = [], TOLERANCE[dtype]
    for m in MS:
        wide = torch.full((m, k + 64), float("nan"), dtype=dtype, device=device)
        wide[:, :k] = random_x(m, k, dtype, device, seed=m)
        x = wide[:, :k] if m % 2 else wide[:, :k].contiguous()
        reference = x.float() @ exact.t() + bias.float()
        found = errors(run_path(path, x, packed, bias), reference)
        worst, rms = max(worst, found.worst), max(rms, found.rms)
        if found.worst > limit.worst or found.rms > limit.rms:
            missed.append(f"M={m}:{found.worst:.2g}/{found.rms:.2g}")
    return Row(path, dtype_name, g, symmetric, n, k, worst, rms, len(MS), " ".join(missed))


def properties() -> list[tuple[str, bool]]:
    """Behaviour beyond closeness, each with its verdict."""
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    weight = random_weight(1440, 4096, 128, False, dtype, device)
    plain, padded = pack(weight, arch="gfx1100"), pack(weight, arch="gfx1151")
    bias = torch.linspace(-1, 1, 1440, device=device).to(dtype)
    exact = dequantize(weight)
    results = []
    for m in (1, 6, 64, 300):
        x = random_x(m, 4096, dtype, device)
        y = run_path("skinny", x, plain, bias)
        results.append(
            (f"padding changes no bit, M={m}", torch.equal(y, run_path("skinny", x, padded, bias)))
        )
        compiled = torch.compile(
            lambda x, w=plain: run_path("skinny", x, w, bias), fullgraph=True, backend="aot_eager"
        )
        results.append((f"torch.compile, M={m}", torch.equal(compiled(x), y)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run_path("skinny", x, plain, bias)
        captured.fill_(float("nan"))
        graph.replay()
        results.append((f"graph replay, M={m}", torch.equal(captured, y)))
        reference = x.float() @ exact.t() + bias.float()
        for row in rows_for(detect(device).arch, "skinny"):
            for split, folded in itertools.product((1, 3), (False, True)):
                tile = replace(row.tile, split_k=split, scale_weights=folded)
                args = (x, plain.words, plain.scales, plain.zeros, bias, 128)
                found = errors(triton_skinny.launch(*args, tile=tile), reference)
                results.append((f"{tile}, M={m}", found.rms <= TOLERANCE[dtype].rms))
    fp16_scales = random_weight(1440, 4096, 128, True, torch.float16, device)
    x = random_x(16, 4096, dtype, device)
    exact_y = x.float() @ dequantize(fp16_scales).t()
    packed = pack(fp16_scales, arch="sm_90")
    y = triton_skinny.skinny_gemm(x, packed.words, packed.scales, None, None, 128)
    rounding = errors(exact_y.to(dtype), exact_y).rms
    results.append(
        ("fp16 scales under bf16 activations stay exact", errors(y, exact_y).rms <= 1.02 * rounding)
    )
    return results


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=8)
    jobs = parser.parse_args().jobs
    if not torch.cuda.is_available():
        print("no GPU: given none, needed one")
        return 2
    cases = [
        (path, dtype, g, symmetric, n, k)
        for (n, k), path, dtype, g, symmetric in itertools.product(
            SHAPES[::-1], ("skinny", "kn"), DTYPES, (32, 64, 128), (True, False)
        )
        if k % g == 0
    ]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; M in {MS}")
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        rows = pool.map(check, cases, chunksize=1)
    print(f"{'path':8}{'dtype':6}{'G':>4}{'sym':>6}{'N':>7}{'K':>7}{'worst':>10}{'rms':>10}  verdict")
    for r in rows:
        verdict = f"MISS {r.missed}" if r.missed else "ok"
        print(
            f"{r.path:8}{r.dtype:6}{r.g:4}{r.symmetric!s:>6}{r.n:7}{r.k:7}{r.worst:10.2g}{r.rms:10.2g}  {verdict}"
        )
    verdicts = properties()
    for name, ok in verdicts:
        if not ok:
            print("MISS", name)
    misses = sum(bool(r.missed) for r in rows) + sum(not ok for _, ok in verdicts)
    print(f"{sum(r.cases for r in rows)} products, {len(verdicts)} properties, {misses} missed")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
