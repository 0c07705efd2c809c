"""The decoder on the fused kernels and the paged cache, against transformers; Triton's interpreter where there is no GPU."""

import pytest
import torch
from twins import TWINS, twin

from nybble.kernels.attention import CacheShape, Span
from nybble.service.models import Batch, load, read_config

pytest.importorskip("triton", reason="triton is not installed")
from nybble.kernels.attention.paged import PagedAttention  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 8
# fp16 activations against float32: logits here have a standard deviation near 1.
MAX_LOGIT_ERROR = 0.03


def decoder(source, raw, dtype=torch.float16):
    config = read_config(raw)
    attention = PagedAttention()
    model = load(config, source, attention, dtype, DEVICE, config.default_positions)
    attention.allocate(CacheShape(config.layers, 32, BLOCK, config.kv_heads, config.head_dim, dtype), DEVICE)
    attention.whole.fill_(float("nan"))  # a slot that is read without having been written shows
    return model


def run(model, ids, start=0, blocks=None):
    stop = start + len(ids)
    batch = Batch(
        torch.tensor(ids, device=DEVICE),
        torch.arange(start, stop, device=DEVICE),
        [Span(len(ids), stop, blocks or list(range(32)))],
    )
    with torch.inference_mode():
        return model.forward(batch).float().cpu()


def prompt(length, seed=0):
    return torch.randint(3, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", TWINS)
def test_logits_equal_transformers(name):
    """A prompt, a single row, and two rows: prefill, and decode over a cached prefix."""
    reference, source, raw = twin(name, symmetric=False)
    ids = prompt(20)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    model = decoder(source, raw)
    blocks = [7, 2, 30]
    parts = [run(model, ids[a:b], a, blocks) for a, b in ((0, 17), (17, 18), (18, 20))]
    assert (torch.cat(parts) - expected).abs().max() < MAX_LOGIT_ERROR
