"""Paged attention on a real GPU: decode, long contexts, prefill over prefixes, windows, caps, graphs."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from paged_cases import Case, problem_of, reference, run  # noqa: E402

from nybble.kernels.attention.triton_paged import launch_attention, paged_attention  # noqa: E402
from nybble.kernels.testing import assert_close  # noqa: E402

pytestmark = pytest.mark.gpu

FP16, BF16 = torch.float16, torch.bfloat16
TYPES = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
# (query heads, key-value heads, head dimension) of models that are served.
MODELS = {
    "qwen3-8b": (32, 8, 128),
    "smollm2": (9, 3, 64),
    "qwen2-0.5b": (14, 2, 64),
    "phi3": (32, 32, 96),
    "gemma2-2b": (8, 4, 256),
    "mqa": (16, 1, 128),
}


@pytest.fixture
def gpu():
    return torch.device("cuda", 0)


def check(case, dtype, gpu):
    problem = problem_of(case, dtype)
    assert_close(run(case, problem.to(gpu)).cpu(), reference(case, problem), dtype, name=str(case))


@TYPES
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("splits", [None, 1, 2, 64], ids=lambda s: f"splits-{s}")
def test_decode(model, splits, dtype, gpu):
    heads, kv_heads, dim = MODELS[model]
    lengths = (1, 15, 16, 17, 64, 65, 200, 1000, 0)
    check(Case(tuple((1, n) for n in lengths), heads, kv_heads, dim, splits=splits), dtype, gpu)


@TYPES
@pytest.mark.parametrize("length", [4097, 20000])
@pytest.mark.parametrize("count", [1, 3])
def test_long_contexts(length, count, dtype, gpu):
    check(Case(((1, length),) * count, 8, 2, 128), dtype, gpu)


@TYPES
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rows", [2, 5, 16])
def test_a_few_rows_at_once(model, rows, dtype, gpu):
    heads, kv_heads, dim = MODELS[model]
    check(Case(((rows, 300), (1, 77), (rows, rows)), heads, kv_heads, dim), dtype, gpu)


@TYPES
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "spans",
    [((17, 17),), ((512, 512),), ((100, 700), (1, 50), (33, 33)), ((64, 64), (64, 128), (200, 1500))],
    ids=["short", "prompt", "mixed", "prefixes"],
)
def test_prefill(model, spans, dtype, gpu):
    heads, kv_heads, dim = MODELS[model]
    check(Case(spans, heads, kv_heads, dim), dtype, gpu)


@TYPES
@pytest.mark.parametrize("window", [1, 15, 64, 100])
@pytest.mark.parametrize("spans", [((1, 700), (1, 30)), ((7, 300),), ((150, 400), (20, 20))], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_windows_and_caps(window, spans, softcap, dtype, gpu):
    check(Case(spans, 8, 4, 256, window=window, softcap=softcap), dtype, gpu)
    check(Case(spans, 8, 2, 64, window=window, softcap=softcap, splits=None), dtype, gpu)


@TYPES
@pytest.mark.parametrize("block_size", [1, 8, 32, 128])
def test_block_sizes(block_size, dtype, gpu):
    check(Case(((1, 333), (1, 1)), 8, 2, 128, block_size), dtype, gpu)
    check(Case(((40, 333),), 8, 2, 128, block_size), dtype, gpu)


def test_sixty_four_sequences(gpu):
    lengths = [1 + 37 * i % 900 for i in range(64)]
    check(Case(tuple((1, n) for n in lengths), 32, 8, 128), BF16, gpu)


def test_a_cache_of_more_than_2_gib(gpu):
    """Offsets beyond 2^31 elements."""
    blocks = (1 << 31) // (2 * 2 * 16 * 128) + 8
    if torch.cuda.mem_get_info()[0] < 3 * blocks * 2 * 2 * 16 * 128:
        pytest.skip("the GPU has less than 12 GiB free")
    case = Case(((1, 100), (1, 40)), 4, 2, 128)
    problem = problem_of(case, BF16)
    near = problem.to(gpu)
    used = len(problem.cache)
    far = torch.zeros(blocks, *problem.cache.shape[1:], dtype=BF16, device=gpu)
    far[-used:] = near.cache
    table = near.table + (blocks - used)
    args = (near.q, far, table, near.q_start, near.kv_len)
    assert torch.equal(launch_attention(*args, 1, 0, 128**-0.5, 0.0), run(case, near))


def test_a_captured_launch_follows_growing_sequences(gpu):
    """Splits are cut from the lengths on the device: one capture serves all of them."""
    spans = [(1, 800), (1, 333), (1, 0), (1, 5)]
    case = Case(tuple(spans), 32, 8, 128)
    problem = problem_of(case, BF16)
    on = problem.to(gpu)
    paged_attention(*on.arguments, 1, 0, 128**-0.5, 0.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = paged_attention(*on.arguments, 1, 0, 128**-0.5, 0.0)
    for lengths in ((1, 1, 0, 1), (100, 16, 0, 5), (799, 333, 0, 2), (800, 200, 0, 5)):
        on.kv_len.copy_(torch.tensor(lengths))
        y.fill_(float("nan"))
        graph.replay()
        shorter = Case(tuple((1, n) for n in lengths), 32, 8, 128)
        want = type(problem)(problem.q, problem.cache, problem.table, problem.q_start, on.kv_len.cpu())
        assert_close(y.cpu(), reference(shorter, want), BF16)


def test_it_compiles_into_one_graph(gpu):
    problem = problem_of(Case(((1, 100), (1, 40))), BF16).to(gpu)

    def double(*arguments):
        return 2 * paged_attention(*arguments, 1, 0, 0.1, 0.0)

    expected = double(*problem.arguments)
    torch.testing.assert_close(torch.compile(double, fullgraph=True)(*problem.arguments), expected)
