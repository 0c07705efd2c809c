"""What the GEMM table is made of: who takes part, what a line says, and that wrong numbers do not pass for fast ones."""

from __future__ import annotations

import math

import pytest
import torch

from nybble.kernels.bench.gemm import Contender, Problem, contenders, measure
from nybble.kernels.bench.peers import PEERS
from nybble.kernels.bench.problem import random_x
from nybble.kernels.bench.timing import copy_rate, time_cold_on_host
from nybble.kernels.linear import LinearConfig, linear_reference
from nybble.kernels.target import Target, cpu_target
from nybble.kernels.testing import errors

CPU = torch.device("cpu")
BF16, FP16 = torch.bfloat16, torch.float16
HOPPER = Target("cuda", "sm_90", "", 132, 232448)
STRIX = Target("rocm", "gfx1151", "", 40, 65536)


def config(dtype: torch.dtype = BF16, symmetric: bool = True) -> LinearConfig:
    return LinearConfig(k=256, n=64, dtype=dtype, group_size=64, symmetric=symmetric)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_all_that_run_on_a_cpu_compute_the_same(dtype: torch.dtype, symmetric: bool) -> None:
    layer = config(dtype, symmetric)
    problem = Problem.random("o", layer, CPU)
    found, declined = contenders(layer, cpu_target())
    names = [contender.name for contender in found]
    assert "cpu_exact" in names and "dense 16-bit" in names and ("cpu_int4" in names) == (dtype is BF16)
    assert set(declined) >= {"tinygemm", "gemlite"}
    for contender in found:
        rows = list(measure(problem, contender, (1, 3), cold_bytes=1))
        assert [row.m for row in rows] == [1, 3]
        for row in rows:
            assert not row.failed and row.error < 0.01, row
            assert row.timing is not None and row.timing.low_us <= row.timing.median_us <= row.timing.high_us
            assert row.bytes_per_s > 0


def test_a_gpus_paths_and_why_others_are_left_out() -> None:
    names = [contender.name for contender in contenders(config(), HOPPER)[0]]
    assert any(name.startswith("hybrid") for name in names) and {"general", "tinygemm"} <= set(names)
    declined = contenders(config(FP16), HOPPER)[1]
    assert declined["tinygemm"] == "activations torch.float16: accepted bfloat16"
    assert "device rocm" in contenders(config(), STRIX)[1]["tinygemm"]


def test_the_decode_kernel_is_not_asked_for_more_rows_than_it_takes() -> None:
    most = {contender.name: contender.most_m for contender in contenders(config(), STRIX)[0]}
    assert most["hybrid skinny"] == 16 and most["hybrid triton"] is None
    problem = Problem.random("o", config(), CPU)
    limited = Contender("x", lambda weight: (lambda x: x @ problem.exact.t().to(x.dtype), 1 << 30), most_m=2)
    assert [row.m for row in measure(problem, limited, (3, 1, 2, 4))] == [1, 2]


def test_copies_of_the_weight_exceed_the_cache() -> None:
    made = []

    def make(weight: object) -> tuple[object, int]:
        made.append(weight)
        return (lambda x: x @ problem.exact.t().to(x.dtype)), 1000

    problem = Problem.random("o", config(), CPU)
    list(measure(problem, Contender("x", make), (1,), cold_bytes=9500))  # type: ignore[arg-type]
    assert len(made) == 10
    made.clear()
    list(measure(problem, Contender("x", make), (1,), cold_bytes=1 << 40))  # type: ignore[arg-type]
    assert len(made) == 64


def test_wrong_numbers_fail() -> None:
    problem = Problem.random("o", config(), CPU)
    shifted = Contender(
        "shifted", lambda weight: (lambda x: (x.float() @ problem.exact.t()).roll(1), 1 << 30)
    )
    (row,) = measure(problem, shifted, (2,))
    assert row.timing is not None and row.error > 0.5 and row.failed
    not_finite = Contender(
        "nan", lambda weight: (lambda x: x @ problem.exact.t().to(x.dtype) * math.nan, 1 << 30)
    )
    (row,) = measure(problem, not_finite, (2,))
    assert row.failed


def test_one_that_cannot_be_built_or_run_is_a_line_that_says_why() -> None:
    problem = Problem.random("o", config(), CPU)

    def broken(weight: object) -> tuple[object, int]:
        raise ImportError("no such\nthing")

    rows = list(measure(problem, Contender("x", broken), (1, 2)))  # type: ignore[arg-type]
    assert [(row.m, row.problem, row.failed) for row in rows] == [
        (m, "ImportError: no such thing", True) for m in (1, 2)
    ]

    def only_one_row(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1:
            raise RuntimeError("M > 1")
        return x @ problem.exact.t().to(x.dtype)

    rows = list(measure(problem, Contender("x", lambda weight: (only_one_row, 1 << 30)), (1, 2)))
    assert [row.failed for row in rows] == [False, True] and rows[1].problem == "RuntimeError: M > 1"


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_the_dense_peer(symmetric: bool) -> None:
    problem = Problem.random("o", config(BF16, symmetric), CPU)
    x = random_x(3, 256, BF16, CPU)
    found = errors(PEERS["dense 16-bit"].make(problem.weight, BF16)(x), linear_reference(x, problem.weight))
    assert found.rms < 0.005


@pytest.mark.gpu
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_all_that_run_on_a_gpu(symmetric: bool) -> None:
    from nybble.kernels.target import detect

    device = torch.device("cuda", 0)
    layer = LinearConfig(k=1024, n=512, dtype=BF16, group_size=128, symmetric=symmetric)
    problem = Problem.random("o", layer, device)
    for contender in contenders(layer, detect(device))[0]:
        for row in measure(problem, contender, (1, 5), cold_bytes=1 << 20):
            assert not row.failed, row


def test_timing_takes_turns_and_enough_rounds() -> None:
    turns: list[str] = []
    timing = time_cold_on_host(
        [lambda: turns.append("a"), lambda: turns.append("b")], least_s=0.0, least_rounds=4
    )
    assert turns == ["a", "b"] * 5
    assert 0 < timing.low_us <= timing.median_us <= timing.high_us


def test_a_copy_rate_is_that_of_a_machine() -> None:
    assert 1e7 < copy_rate(CPU, 1 << 20) < 1e14
