"""Paged attention against the reference: several sequences a step, scattered blocks, chunks, windows."""

import pytest
import torch

from nybble.kernels.attention import CacheShape, Span
from nybble.kernels.attention.reference import attention_reference
from nybble.kernels.attention.sdpa import SdpaAttention

BLOCK = 4


def build(kv_heads=2, head_dim=16, blocks=32, dtype=torch.float32):
    attention = SdpaAttention()
    attention.allocate(CacheShape(1, blocks, BLOCK, kv_heads, head_dim, dtype), torch.device("cpu"))
    # A slot that is read without having been written shows.
    attention.cache[0].fill_(float("nan"))
    return attention


CASES = {
    "one-row": [(1, 1, [0])],
    "decode-in-a-run": [(1, 11, [3, 4, 5])],
    "decode-scattered": [(1, 11, [9, 2, 30])],
    "prompt": [(13, 13, [1, 2, 3, 4])],
    "chunk-after-prefix": [(5, 18, [7, 1, 20, 21, 3])],
    "decoders": [
        (1, 9, [0, 1, 2]),
        (1, 16, [9, 8, 7, 6]),
        (1, 10, [3, 4, 5]),
        (1, 3, [31]),
        (1, 15, [20, 21, 22, 23]),
    ],
    "mixed": [(1, 9, [0, 1, 2]), (1, 4, [31]), (6, 6, [10, 4]), (3, 12, [5, 6, 7])],
}


@pytest.mark.parametrize("window", [None, 1, 3, 8], ids=lambda w: f"window-{w}")
@pytest.mark.parametrize("heads", [2, 4, 6], ids=lambda h: f"heads-{h}")
@pytest.mark.parametrize("softcap", [None, 0.7], ids=["", "softcap"])
@pytest.mark.parametrize("case", CASES)
def test_attention_equals_the_reference(case, softcap, heads, window):
    gen = torch.Generator().manual_seed(0)
    attention = build()
    scale = 0.3
    sequences, q_rows, expected = [], [], []
    for q_len, kv_len, blocks in CASES[case]:
        k = torch.randn(kv_len, 2, 16, generator=gen)
        v = torch.randn(kv_len, 2, 16, generator=gen)
        q = torch.randn(q_len, heads, 16, generator=gen)
        if kv_len > q_len:  # what earlier steps wrote
            before = attention.plan([Span(kv_len - q_len, kv_len - q_len, blocks)], [None])
            attention.write(0, torch.cat((k, v), dim=1)[: kv_len - q_len], before)
        sequences.append((Span(q_len, kv_len, blocks), torch.cat((k, v), dim=1)[-q_len:]))
        q_rows.append(q)
        expected.append(attention_reference(q, k, v, scale, window, softcap))
    plan = attention.plan([s for s, _ in sequences], [window])
    attention.write(0, torch.cat([kv for _, kv in sequences]), plan)
    out = attention.attend(0, torch.cat(q_rows), plan, window, scale, softcap)
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_a_softcap_bounds_the_scores():
    """Uncapped, one huge score takes all; capped at 1, weights differ by e^2 at most."""
    q, k = torch.full((1, 1, 16), 50.0), torch.cat((torch.ones(1, 1, 16), -torch.ones(3, 1, 16)))
    v = torch.eye(4).view(4, 1, 4).repeat(1, 1, 4)
    weights = attention_reference(q, k, v, 1.0, softcap=1.0)[0, 0, :4]
    torch.testing.assert_close(weights[0] / weights[1], torch.tensor(2.0).exp())


def test_block_bytes_count_keys_and_values_of_all_layers():
    assert CacheShape(30, 1, 16, 3, 64, torch.bfloat16).block_bytes == 2 * 30 * 16 * 3 * 64 * 2
