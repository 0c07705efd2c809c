"""`nybble bench gemm`: the linear kernels' times on the machine that is here, as a table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nybble.kernels.bench.gemm import Problem, Row, contenders, measure
from nybble.kernels.bench.problem import QWEN3_8B
from nybble.kernels.bench.timing import copy_rate
from nybble.kernels.linear import LinearConfig
from nybble.kernels.target import default_device, detect, usable_cores
from nybble.service.errors import ConfigError

_HEAD = (
    f"{'layer':9}{'M':>5} {'path':16}{'us':>9}{'low':>9}{'high':>9}{'GB/s':>8}{'of copy':>9}{'rms error':>11}"
)


@dataclass(frozen=True)
class GemmBench:
    """What is measured: layers of QWEN3_8B, rows M, a weight's form; paths: only those that contain one of these words."""

    layers: tuple[str, ...]
    ms: tuple[int, ...]
    dtype: torch.dtype
    group_size: int
    symmetric: bool
    paths: tuple[str, ...] = ()


def layers_of(text: str) -> tuple[str, ...]:
    """Names of layers, comma-separated. Raises ConfigError."""
    names = tuple(text.split(","))
    for name in names:
        if name not in QWEN3_8B:
            raise ConfigError(f"--layers={text!r}: given {name!r}, accepted {', '.join(QWEN3_8B)}")
    return names


def bench_gemm(bench: GemmBench, output: Path | None = None) -> bool:
    """Print the table, and write it as JSON to `output`. Whether all paths ran and computed the right numbers."""
    device = default_device()
    if device.type == "cpu":
        torch.set_num_threads(usable_cores())
    target = detect(device)
    rate = copy_rate(device)
    form = f"{str(bench.dtype).removeprefix('torch.')}, group size {bench.group_size}"
    form += ", symmetric" if bench.symmetric else ", with zero points"
    cores = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    print(f"{target.name} ({target.arch}{cores}), torch {torch.__version__}; {form}; weights out of cache")
    print(f"copy rate {rate / 1e9:.1f} GB/s, read and written bytes together\n{_HEAD}", flush=True)
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for layer in bench.layers:
        n, k = QWEN3_8B[layer]
        config = LinearConfig(k, n, bench.dtype, bench.group_size, bench.symmetric)
        found, declined = contenders(config, target)
        left_out |= declined
        problem = Problem.random(layer, config, device)
        for contender in found:
            if bench.paths and not any(word in contender.name for word in bench.paths):
                continue
            for row in measure(problem, contender, bench.ms):
                rows.append(row)
                print(_line(row, rate), flush=True)
    for name, reason in left_out.items():
        print(f"not run: {name}: {reason}")
    if output is not None:
        head: dict[str, Any] = {"device": target.name, "arch": target.arch, "torch": torch.__version__}
        head |= {"weight": form, "copy_bytes_per_s": round(rate)}
        output.write_text(json.dumps(head | {"rows": [_record(row, rate) for row in rows]}, indent=1) + "\n")
    return not any(row.failed for row in rows)


def _line(row: Row, rate: float) -> str:
    start = f"{row.layer:9}{row.m:5} {row.path:16}"
    if row.timing is None:
        return f"{start} FAILED {row.problem}"
    t = row.timing
    return (
        f"{start}{t.median_us:9.1f}{t.low_us:9.1f}{t.high_us:9.1f}{row.bytes_per_s / 1e9:8.1f}"
        f"{row.bytes_per_s / rate:9.0%}{row.error:11.2g}{'  WRONG' if row.failed else ''}"
    )


def _record(row: Row, rate: float) -> dict[str, Any]:
    record: dict[str, Any] = {"layer": row.layer, "m": row.m, "path": row.path}
    if row.timing is None:
        return record | {"failed": row.problem}
    t = row.timing
    return record | {
        "us": round(t.median_us, 2),
        "low_us": round(t.low_us, 2),
        "high_us": round(t.high_us, 2),
        "weight_bytes_per_s": round(row.bytes_per_s),
        "of_copy_rate": round(row.bytes_per_s / rate, 3),
        "rms_error": float(f"{row.error:.3g}"),
    }
