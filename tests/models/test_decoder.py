"""The decoder against transformers' own models, on the same dequantised weights in float32."""

import pytest
import torch
from twins import TWINS, round_to_int4, twin

from nybble.kernels.attention import CacheShape, Span
from nybble.kernels.attention.sdpa import SdpaAttention
from nybble.service.errors import CheckpointError
from nybble.service.models import ARCHITECTURES, Batch, load, read_config
from nybble.service.models.layers import RescoredHead

CPU = torch.device("cpu")
BLOCK = 8
# float32 on both sides; the sums differ in order only. Logits here have a standard deviation near 1.
MAX_LOGIT_ERROR = 2e-4


def decoder(source, raw, dtype=torch.float32, positions=None):
    config = read_config(raw)
    attention = SdpaAttention()
    model = load(config, source, attention, dtype, CPU, positions or config.default_positions)
    attention.allocate(CacheShape(config.layers, 32, BLOCK, config.kv_heads, config.head_dim, dtype), CPU)
    return model


def run(model, ids, start=0):
    """Logits [T, V] of ids at positions start.., in blocks 0.. of the cache."""
    stop = start + len(ids)
    with torch.inference_mode():
        return model.forward(
            Batch(torch.tensor(ids), torch.arange(start, stop), [Span(len(ids), stop, list(range(32)))])
        )


def prompt(length, seed=0):
    return torch.randint(3, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_every_architecture_has_a_twin():
    assert {twin(name)[2]["architectures"][0] for name in TWINS} == set(ARCHITECTURES)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("name", TWINS)
def test_logits_equal_transformers(name, symmetric):
    reference, source, raw = twin(name, symmetric)
    ids = prompt(43)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    actual = run(decoder(source, raw), ids)
    assert expected.std() > 0.3, "logits too flat to tell anything"
    assert (actual - expected).abs().max() < MAX_LOGIT_ERROR


@pytest.mark.parametrize("name", TWINS)
def test_greedy_text_is_equal_for_64_tokens(name):
    reference, source, raw = twin(name, seed=1)
    ids = prompt(11)
    expected = reference.generate(
        torch.tensor([ids]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0].tolist()
    model = decoder(source, raw)
    actual = list(ids)
    logits = run(model, ids)
    for _ in range(64):
        actual.append(int(logits[-1].argmax()))
        logits = run(model, actual[-1:], start=len(actual) - 1)
    assert actual == expected


def test_longrope_beyond_the_original_context_takes_its_long_factors():
    reference, source, raw = twin("phi3-partial-longrope")
    ids = prompt(200)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    assert read_config(raw).default_positions == 128
    assert (run(decoder(source, raw, positions=512), ids) - expected).abs().max() < MAX_LOGIT_ERROR


@pytest.mark.parametrize("own", [None, "equal", "other", "int4"], ids=str)
def test_a_tied_head_in_the_files_counts_where_it_differs(own, caplog):
    _, source, raw = twin("llama-tied-bias")
    expected = run(decoder(source, raw), prompt(9))
    embedding = source.tensors["model.embed_tokens.weight"]
    del source.weights["lm_head"]
    if own is not None:
        heads = {"equal": embedding.clone(), "other": 2 * embedding, "int4": round_to_int4(embedding, False)}
        source.weights["lm_head"] = heads[own]
    model = decoder(source, raw)
    actual = run(model, prompt(9))
    torch.testing.assert_close(actual, 2 * expected if own == "other" else expected, rtol=0.2, atol=0.5)
    assert model.head.weight.data_ptr() == embedding.data_ptr() if own in (None, "equal") else True
    assert ("the files hold" in caplog.text) == (own in ("other", "int4"))


def test_an_untied_head_that_is_missing_is_named():
    _, source, raw = twin("llama")
    del source.weights["lm_head"]
    with pytest.raises(CheckpointError, match='no weight for lm_head.*set "tie_word_embeddings": true'):
        decoder(source, raw)


def test_parts_of_a_fused_layer_that_differ_are_said_once(caplog):
    _, source, raw = twin("llama", keep=("k_proj",))
    decoder(source, raw)
    said = [r.message for r in caplog.records]
    assert len(said) == 1 and "layers.0.self_attn.q_proj" in said[0] and "3 such layers" in said[0]


def test_chunks_give_the_logits_of_the_whole():
    _, source, raw = twin("qwen3")
    model = decoder(source, raw)
    ids = prompt(40)
    whole = run(model, ids)
    parts = torch.cat([run(model, ids[a:b], start=a) for a, b in ((0, 1), (1, 17), (17, 32), (32, 40))])
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)


def test_only_the_rows_asked_for_get_logits():
    _, source, raw = twin("llama")
    model = decoder(source, raw)
    ids = prompt(9)
    whole = run(model, ids)
    rows = torch.tensor([2, 8])
    some = model.forward(Batch(torch.tensor(ids), torch.arange(9), [Span(9, 9, list(range(32)))], rows))
    torch.testing.assert_close(some, whole[rows])


@pytest.mark.parametrize(
    "keep", [("q_proj",), ("k_proj", "up_proj"), ("down_proj", "o_proj"), ("proj",)], ids=str
)
def test_layers_left_in_16_bits_work_beside_quantised_ones(keep):
    reference, source, raw = twin("llama", keep=keep)
    ids = prompt(12)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    assert (run(decoder(source, raw), ids) - expected).abs().max() < MAX_LOGIT_ERROR


@pytest.mark.parametrize("name", ["llama", "llama-tied-bias", "qwen3", "phi3", "gemma3"])
def test_weights_are_read_in_the_order_that_was_said(name):
    """Reading ahead depends on it."""
    _, source, raw = twin(name)
    said, asked = [], []
    tensor, linear = source.tensor, source.linear
    source.expect = said.extend
    source.tensor = lambda n: asked.append(n) or tensor(n)
    source.linear = lambda m, n, k: asked.append(m) or linear(m, n, k)
    decoder(source, raw)
    assert [item for item in said if item in asked] == asked and len(set(asked)) == len(asked)


def test_a_missing_bias_is_named():
    _, source, raw = twin("qwen2")
    del source.tensors["model.layers.1.self_attn.k_proj.bias"]
    with pytest.raises(CheckpointError, match=r"layers.1.self_attn.k_proj.bias: missing"):
        decoder(source, raw)


@pytest.mark.parametrize("name", ["llama", "llama-tied-bias"], ids=["untied", "tied"])
def test_a_rescored_head_is_exact_where_it_matters(name):
    _, source, raw = twin(name)
    exact = decoder(source, raw)
    config = read_config(raw)
    attention = SdpaAttention()
    model = load(
        config, source, attention, torch.float32, CPU, 64, lambda w: round_to_int4(w, symmetric=False)
    )
    attention.allocate(
        CacheShape(config.layers, 32, BLOCK, config.kv_heads, config.head_dim, torch.float32), CPU
    )
    few = RescoredHead.EXACT_ROWS_ON_CPU - 1
    expected, actual = run(exact, prompt(few)), run(model, prompt(few))
    best = expected.topk(5, dim=-1).indices
    torch.testing.assert_close(actual.gather(1, best), expected.gather(1, best), rtol=1e-4, atol=1e-4)
    assert (actual.argmax(-1) == expected.argmax(-1)).all()
    off = (actual - expected).abs() > 1e-3
    assert off.sum(dim=-1).max() <= 256 - RescoredHead.RESCORED and off.any(), "the rest are int4 logits"
    many, of_many = run(exact, prompt(30)), run(model, prompt(30))
    torch.testing.assert_close(of_many, many, msg="many rows on a CPU are the 16-bit product")
    assert model.nbytes > exact.nbytes, "the int4 part is beside the 16-bit rows"


def test_a_shared_head_is_counted_once():
    _, source, raw = twin("llama-tied-bias")
    model = decoder(source, raw)
    untied = decoder(*twin("llama")[1:])
    assert untied.nbytes - untied.head.nbytes - untied.embedding.nbytes < model.nbytes
    assert sum(len(layers) for layers in model.linears.values()) == 4 * 3 + 1
    assert model.head.weight.data_ptr() == model.embedding.data_ptr()
