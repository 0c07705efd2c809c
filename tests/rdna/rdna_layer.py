"""Attention, norm, rotation with KV write, gates and what reads logits, for `rdna_worker.py`: (result, reference, launches) of a case."""

from __future__ import annotations

from typing import Any

import torch
from rdna_device import Launch, pretend

from nybble.kernels.attention import triton_paged
from nybble.kernels.fused import activation, argmax, kv_write, norm, rescore

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
Result = tuple[torch.Tensor, torch.Tensor, list[Launch]]


def _pretend(case: dict[str, Any]) -> Any:
    return pretend(case["arch"], run=case.get("run", False), **case.get("schedule", {}))


def _parts(case: dict[str, Any], rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A GEMM's parts of the case's count, and a bias where there are several."""
    gen = torch.Generator().manual_seed(rows * 7 + width)
    dtype, splits = DTYPES[case["dtype"]], case.get("splits", 1)
    values = torch.randn(splits, rows, width, generator=gen)
    if splits == 1:
        return values.to(dtype), None
    return values, torch.randn(width, generator=gen).to(dtype)


def attention(case: dict[str, Any]) -> Result:
    """case["spans"]: (q_len, kv_len) of each sequence; their blocks are scattered over a cache of NaN."""
    gen = torch.Generator().manual_seed(5)
    dtype, (heads, kv_heads, dim), size = DTYPES[case["dtype"]], case["heads"], case.get("block_size", 16)
    spans = case["spans"]
    counts = [-(-kv_len // size) for _, kv_len in spans]
    order = torch.randperm(sum(counts), generator=gen).tolist()
    cache = torch.full((sum(counts), 2, kv_heads, size, dim), float("nan"), dtype=dtype)
    table = torch.zeros(len(spans), max(counts), dtype=torch.int32)
    for b, (_, kv_len) in enumerate(spans):
        for i in range(counts[b]):
            block, filled = order.pop(), min(size, kv_len - i * size)
            table[b, i] = block
            cache[block, :, :, :filled] = torch.randn(2, kv_heads, filled, dim, generator=gen).to(dtype)
    starts = torch.tensor([0, *(q for q, _ in spans)]).cumsum(0).to(torch.int32)
    kv_len = torch.tensor([length for _, length in spans], dtype=torch.int32)
    q = (2 * torch.randn(int(starts[-1]), heads, dim, generator=gen)).to(dtype)
    args = (q, cache, table, starts, kv_len)
    max_q, window, softcap = max(q for q, _ in spans), case.get("window", 0), case.get("softcap", 0.0)
    with _pretend(case) as launches:
        triton_paged.check_arguments(*args, max_q, window, softcap)
        y = triton_paged.launch_attention(
            *args, max_q, window, dim**-0.5, softcap, splits=case.get("kv_splits")
        )
    reference = triton_paged.paged_attention_reference(*args, window, dim**-0.5, softcap)
    return y, reference, launches


def add_norm(case: dict[str, Any]) -> Result:
    gen = torch.Generator().manual_seed(6)
    dtype, (rows, width) = DTYPES[case["dtype"]], case["shape"]
    x, bias = _parts(case, rows, width)
    residual = torch.randn(rows, width, generator=gen).to(dtype)
    weight, own = torch.randn(2, width, generator=gen).to(dtype)
    args = (x, bias, weight, 1e-5, own if case.get("norm_x") else None, 1e-6, 0.7)
    want, want_y = norm.add_rms_norm_reference(residual, *args)
    with _pretend(case) as launches:
        y = norm.add_rms_norm(residual, *args)
    return torch.cat((y, residual)), torch.cat((want_y, want.float())), launches


def write(case: dict[str, Any]) -> Result:
    gen = torch.Generator().manual_seed(7)
    dtype, (heads, kv_heads, dim), rows = DTYPES[case["dtype"]], case["heads"], case["rows"]
    x, bias = _parts(case, rows, (heads + 2 * kv_heads) * dim)
    weights = torch.randn(2, dim, generator=gen).to(dtype) if case.get("norm") else None
    angles = torch.randn(64, dim, generator=gen)
    positions = torch.randint(0, 64, (rows,), generator=gen, dtype=torch.int32)
    slots = torch.randperm(32, generator=gen)[:rows].to(torch.int32)
    slots[1:2] = -1
    cache = torch.randn(2, 2, kv_heads, 16, dim, generator=gen).to(dtype)
    args = (x, bias, weights, angles, positions, slots)
    want_q, want_cache = kv_write.norm_rope_write_reference(*args, cache, 1e-6)
    with _pretend(case) as launches:
        q = kv_write.norm_rope_write(*args, cache, 1e-6)
    return (
        torch.cat((q.flatten(), cache.flatten())),
        torch.cat((want_q.flatten(), want_cache.flatten())),
        launches,
    )


def gate(case: dict[str, Any]) -> Result:
    rows, width = case["shape"]
    x, bias = _parts(case, rows, 2 * width)
    name, interleaved = case.get("activation", "silu"), case.get("interleaved", False)
    with _pretend(case) as launches:
        y = activation.gated(x, bias, interleaved, DTYPES[case["dtype"]], name)
    return y, activation.gated_reference(x, bias, interleaved, name), launches


def _logits(case: dict[str, Any]) -> torch.Tensor:
    """[R, V] with many equals, the last row not finite in its last column."""
    rows, vocab = case["shape"]
    gen = torch.Generator().manual_seed(vocab)
    logits = (8 * torch.randn(rows, vocab, generator=gen)).round().to(DTYPES[case["dtype"]])
    logits[-1, -1] = case.get("last", float("nan"))
    return logits


def best(case: dict[str, Any]) -> Result:
    """An index is right or wrong, not nearly right: 1 where it is what it should be."""
    logits = _logits(case)
    with _pretend(case) as launches:
        y = argmax.best_rows(logits)
    y[0] = torch.where(y[1] > 0, y[0], -1)
    right = (y == argmax.best_rows_reference(logits)).to(torch.float32)
    return right, torch.ones_like(right), launches


def rescored(case: dict[str, Any]) -> Result:
    """New logits of a head of K columns; all of them far off where they are not those of the largest."""
    logits, count, k = _logits(case), case["count"], case["k"]
    (rows, vocab), gen = logits.shape, torch.Generator().manual_seed(8)
    weight = torch.randn(vocab, k, generator=gen).to(logits.dtype)
    x = (torch.randn(rows, k, generator=gen) / k**0.5).to(logits.dtype)
    before = logits.clone()
    with _pretend(case) as launches:
        chosen = rescore.largest(logits, count)
        rescore.rescore(logits, chosen, weight, x)
    if not rescore.are_largest(before, chosen):
        return torch.zeros(1), torch.ones(1), launches
    want = rescore.rescore_reference(before, chosen, weight, x)
    assert bool(logits[-1, -1].isnan()), "a NaN stays"
    return logits.nan_to_num(), want.nan_to_num(), launches


RUNNERS = {
    "attention": attention,
    "add_norm": add_norm,
    "write": write,
    "gate": gate,
    "best": best,
    "rescored": rescored,
}
