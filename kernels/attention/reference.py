"""Causal attention of one sequence in readable float32 torch."""

from __future__ import annotations

import torch


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """q [Q, H, D], the last Q positions; k, v [L, Hkv, D], all positions -> float32 [Q, H, D].

    Head h reads key-value head h // (H / Hkv). A row at position p sees positions max(0, p - window + 1)..p.
    softcap: scores become softcap * tanh(score / softcap) before the mask.
    """
    (rows, heads, _), (length, kv_heads, _) = q.shape, k.shape
    repeat = heads // kv_heads
    k = k.to(torch.float32).repeat_interleave(repeat, dim=1)
    v = v.to(torch.float32).repeat_interleave(repeat, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.to(torch.float32), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(length - rows, length).unsqueeze(1)
    key = torch.arange(length)
    visible = key <= position
    if window is not None:
        visible &= key > position - window
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v)
