"""The Triton paged attention against the float32 reference (in Triton's interpreter when there is no GPU)."""

import importlib
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from paged_cases import Case, problem_of, reference, run  # noqa: E402

from nybble.kernels.attention import BACKENDS, CacheShape, Span, choose  # noqa: E402
from nybble.kernels.attention.paged import PagedAttention  # noqa: E402
from nybble.kernels.attention.selfcheck import paged_problem  # noqa: E402
from nybble.kernels.attention.triton_paged import (  # noqa: E402
    FEW_ROWS,
    MAX_PROMPT_SPLITS,
    MAX_SPLITS,
    paged_attention,
    prompt_splits_for,
    splits_for,
    tile_for,
)
from nybble.kernels.target import Target  # noqa: E402
from nybble.kernels.testing import assert_close  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP16, BF16 = torch.float16, torch.bfloat16
STRIX = Target("rocm", "gfx1151", "", 40, 65536)
HOPPER = Target("cuda", "sm_90", "", 132, 232448)
AMPERE = Target("cuda", "sm_86", "", 84, 101376)

CASES = [
    Case(((1, 1),)),
    Case(((1, 40), (1, 7), (1, 64))),
    Case(((1, 70), (1, 3), (1, 129)), splits=3),
    Case(((1, 200),), splits=MAX_SPLITS),
    Case(((1, 50), (1, 0), (1, 0)), splits=2),
    Case(((1, 50), (1, 0)), splits=1),
    Case(((3, 50), (16, 16), (1, 90)), heads=6, splits=4),
    Case(((16, 40),), heads=16, kv_heads=1, splits=2),
    Case(((20, 20), (1, 33))),
    Case(((33, 70),), heads=7, kv_heads=1, dim=32),
    Case(((9, 90), (17, 17)), heads=2, kv_heads=2, dim=24, block_size=4),
    Case(((1, 90), (2, 65)), window=20, splits=3),
    Case(((1, 90),), window=1, splits=2),
    Case(((40, 70), (1, 5)), window=9),
    Case(((1, 60),), softcap=2.0, splits=2),
    Case(((18, 30),), softcap=0.5, window=7),
    Case(((1, 20),), heads=2, kv_heads=1, dim=256, splits=2),
    Case(((17, 20),), heads=2, kv_heads=1, dim=96),
    # A captured prompt: sequences that are not there, with a row of padding each and then with none.
    Case(((20, 50), (1, 0), (1, 0), (0, 0), (0, 0))),
    Case(((20, 50), (1, 0), (0, 0)), window=9),
    Case(((9, 50), (1, 0), (0, 0))),
    # A prompt whose keys are split: many, few (one part, stored at once), and a sequence that is not there.
    Case(((18, 600), (20, 20), (1, 0), (0, 0)), heads=6, splits=3),
    Case(((33, 900),), heads=2, kv_heads=1, dim=24, splits=16),
    Case(((18, 700), (17, 300)), window=400, splits=4),
    Case(((300, 520),), heads=2, kv_heads=1, dim=32, softcap=3.0, splits=2),
    # Streams beside prompts; places of streams that are not there have no row.
    Case(((1, 40), (1, 7), (0, 0), (0, 0), (20, 50), (1, 0), (0, 0)), streams=4),
    Case(((1, 600), (0, 0), (18, 600), (3, 30)), streams=2, splits=4),
    Case(((1, 40), (0, 0), (0, 0), (0, 0), (9, 30), (1, 0)), streams=4, window=11),
]


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case, dtype):
    problem = problem_of(case, dtype)
    y = run(case, problem.to(DEVICE)).cpu()
    assert_close(y, reference(case, problem), dtype)


def test_a_sequence_that_is_not_there_gives_zeros():
    case = Case(((1, 5), (1, 0)), splits=1)
    for splits in (1, 2):
        y = run(Case(case.spans, splits=splits), problem_of(case, FP16).to(DEVICE))
        assert (y[1] == 0).all() and (y[0] != 0).all()


def test_strided_queries_and_block_major_tables():
    """As the fused kernels and StepBuffers hand them over."""
    case = Case(((2, 30), (2, 50)))
    problem = problem_of(case, FP16).to(DEVICE)
    want = run(case, problem)
    wide = torch.zeros(4, 10, 64, dtype=FP16, device=DEVICE)
    wide[:, :4] = problem.q
    table = problem.table.t().contiguous().t()
    assert table.stride() != problem.table.stride()
    args = (wide[:, :4], problem.cache, table, problem.q_start, problem.kv_len)
    assert torch.equal(paged_attention(*args, 2, 0, 64**-0.5, 0.0), want)


def test_one_part_of_a_prompt_is_the_result_at_once():
    """fp32 parts are neither written nor read for it: bit for bit what a launch without splits gives."""
    case = Case(((40, 200), (18, 90)))
    problem = problem_of(case, FP16).to(DEVICE)
    assert torch.equal(run(replace(case, splits=5), problem), run(replace(case, splits=1), problem))


@pytest.mark.parametrize("target", [STRIX, HOPPER, AMPERE], ids=lambda t: t.arch)
def test_few_tiles_serve_every_row_count(target):
    """Each is compiled at the start."""
    for group, dim in ((1, 64), (4, 128), (7, 64), (16, 128), (2, 256)):
        tiles = {q: tile_for(target, group, dim, q <= FEW_ROWS, q) for q in (1, 2, 5, FEW_ROWS, 17, 512)}
        assert tiles[2] == tiles[5] == tiles[FEW_ROWS] and tiles[17] == tiles[512]
        assert all(t.block_m >= 16 for t in tiles.values())


@pytest.mark.parametrize(
    ("sequences", "expected"), [(1, 20), (8, 2), (64, 1), (1000, 1)], ids=lambda v: str(v)
)
def test_splits_fill_the_chip_and_no_more(sequences, expected):
    assert splits_for(STRIX, sequences, 8, 1) == expected
    assert splits_for(HOPPER, 1, 1, 1) == MAX_SPLITS and splits_for(HOPPER, 64, 8, 1) == 1


def test_prompts_are_split_as_far_as_their_rows_leave_the_chip_idle():
    small = replace(HOPPER, compute_units=32)
    assert [prompt_splits_for(small, 8, blocks) for blocks in (1, 4, 8, 512)] == [8, 2, 1, 1]
    assert prompt_splits_for(HOPPER, 8, 1) == MAX_PROMPT_SPLITS and prompt_splits_for(STRIX, 8, 1) == 1


def shrunk(t):
    """t over a storage that has since lost half of its bytes."""
    t.untyped_storage().resize_(t.nbytes // 2)
    return t


def refusals():
    p = problem_of(Case(((2, 30), (2, 50))), FP16)
    good = {"q": p.q, "cache": p.cache, "table": p.table, "q_start": p.q_start, "kv_len": p.kv_len}
    return good, {
        "float32": ({"q": p.q.float()}, r"q: given float32 \[4, 4, 64\], accepted float16 or bfloat16"),
        "two-types": ({"cache": p.cache.to(BF16)}, "cache: given bfloat16 .* accepted float16"),
        "token-major": ({"cache": p.cache.transpose(2, 3)}, "cache: given strides"),
        "heads": ({"q": p.q[:, :3].clone()}, "given 3 heads, accepted a multiple of the cache's 2"),
        "long": ({"kv_len": p.kv_len.long()}, "kv_len: given int64"),
        "starts": ({"q_start": p.q_start[:-1]}, r"q_start: given int32 \[2\], accepted int32 \[3\]"),
        "table": ({"table": p.table[:1]}, r"table: given int32 .* accepted int32 \[2, W\]"),
        "block-size": (
            {"cache": torch.zeros(8, 2, 2, 12, 64, dtype=FP16)},
            "block_size 12, accepted a power",
        ),
        "past-storage": (
            {"q": shrunk(torch.zeros(4, 4, 64, dtype=FP16))},
            "q: given a view that ends",
        ),
    }


@pytest.mark.parametrize("name", refusals()[1])
def test_refusals_say_what_is_accepted(name):
    good, bad = refusals()
    change, message = bad[name]
    with pytest.raises(ValueError, match=message):
        paged_attention(**(good | change), max_q=2, window=0, scale=0.1, softcap=0.0)
    with pytest.raises(ValueError, match="given 0, -1, 0.0"):
        paged_attention(**good, max_q=0, window=-1, scale=0.1, softcap=0.0)
    with pytest.raises(ValueError, match="streams: given 2, accepted 0 to 1, of 2 sequences"):
        paged_attention(**good, max_q=2, window=0, scale=0.1, softcap=0.0, streams=2)


def test_the_op_has_a_shape_without_data():
    p = problem_of(Case(((2, 30), (2, 50))), FP16)
    meta = paged_attention(*(t.to("meta") for t in p.arguments), 2, 0, 0.1, 0.0)
    assert meta.shape == p.q.shape and meta.dtype is FP16 and meta.device.type == "meta"


@pytest.mark.parametrize("window", [None, 5], ids=["all", "window"])
def test_the_back_end_writes_and_reads_its_cache(window):
    """Through the contract that all back ends share: two steps, the second over what the first wrote."""
    attention = PagedAttention()
    attention.allocate(CacheShape(2, 16, 8, 2, 32, FP16), DEVICE)
    attention.whole.fill_(float("nan"))
    gen = torch.Generator().manual_seed(0)
    kv = torch.randn(21, 4, 32, generator=gen).to(FP16)
    q = torch.randn(21, 4, 32, generator=gen).to(FP16)
    rows = []
    for start, stop in ((0, 13), (13, 20), (20, 21)):
        plan = attention.plan([Span(stop - start, stop, [9, 4, 11])], [window])
        attention.write(1, kv[start:stop].to(DEVICE), plan)
        rows.append(attention.attend(1, q[start:stop].to(DEVICE), plan, window, 0.2).cpu())
    from nybble.kernels.attention.reference import attention_reference

    assert_close(torch.cat(rows), attention_reference(q, kv[:, :2], kv[:, 2:], 0.2, window), FP16)
    assert attention.whole.nbytes == 16 * attention.shape.block_bytes


CHOICES = {
    "strix": (STRIX, BF16, 128, 16, "triton", None),
    "hopper": (HOPPER, FP16, 256, 16, "triton", None),
    "cpu": (Target("cpu", "x86_64", "", 2, 0), BF16, 128, 16, "sdpa", None),
    "xpu": (Target("xpu", "xpu_1", "", 2, 0), BF16, 128, 16, "sdpa", None),
    "float32": (HOPPER, torch.float32, 128, 16, "sdpa", "float32: accepted float16, bfloat16"),
    "wide-heads": (STRIX, BF16, 512, 16, "sdpa", "head dimension 512"),
    "odd-blocks": (STRIX, BF16, 128, 24, "sdpa", "block size 24"),
    "turing": (Target("cuda", "sm_75", "", 40, 65536), FP16, 128, 16, "sdpa", "sm_75: accepted sm_80"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_table_chooses_and_says_why(name):
    target, dtype, dim, block, wanted, reason = CHOICES[name]
    choice = choose(target, dtype, dim, block)
    assert choice.backend.name == wanted and wanted in BACKENDS[target.kind]
    assert (reason is None) == (not choice.declined)
    assert reason is None or reason in choice.declined["triton"]


FAULTS = {
    "attention": ("nybble.kernels.attention.triton_paged.launch_attention", "attention: relative error"),
    "KV write": ("nybble.kernels.fused.kv_write.norm_rope_write", "KV write: relative error"),
    "add and norm": ("nybble.kernels.fused.norm.add_rms_norm", "add and norm: relative error"),
    "gate": ("nybble.kernels.fused.activation.gated", "gate: relative error"),
}


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_the_selfcheck_passes_here(dtype):
    assert paged_problem(DEVICE, dtype, 64) is None


@pytest.mark.parametrize("name", FAULTS)
def test_the_selfcheck_finds_a_wrong_kernel(name, monkeypatch):
    path, message = FAULTS[name]
    module, attribute = path.rsplit(".", 1)
    right = getattr(importlib.import_module(module), attribute)

    def wrong(*args, **kwargs):
        y = right(*args, **kwargs)
        y[-1] = y[0]  # one row of another sequence
        return y

    monkeypatch.setattr(path, wrong)
    assert message in paged_problem(DEVICE, FP16, 64)

    def refuses(*args, **kwargs):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(path, refuses)
    assert paged_problem(DEVICE, FP16, 64) == f"{name}: RuntimeError: no kernel image is available"


def test_what_failed_its_selfcheck_is_not_chosen():
    choice = choose(HOPPER, BF16, 128, 16, {"triton": "wrong here"})
    assert choice.backend.name == "sdpa" and choice.declined == {"triton": "wrong here"}
