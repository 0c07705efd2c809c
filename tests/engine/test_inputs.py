"""Static inputs: ladders, padding, and what the device sees after one copy."""

import pytest
import torch

from nybble.kernels.attention import Span
from nybble.service.engine.inputs import Limits, StaticInputs, decode_buckets, prefill_rungs

CPU = torch.device("cpu")


def inputs(max_running=5, prefill_tokens=100):
    return StaticInputs(Limits(max_running, prefill_tokens, 200, 64), 8, CPU)


@pytest.mark.parametrize("most", [1, 2, 3, 16, 20, 64, 65, 200])
def test_every_batch_size_has_a_bucket(most):
    buckets = decode_buckets(most)
    assert list(buckets) == sorted(set(buckets)) and buckets[0] == 1 and buckets[-1] == most
    assert all(b >= a for a, b in zip(buckets, buckets[1:], strict=False))
    assert all(b <= max(2 * a, a + 32) for a, b in zip(buckets, buckets[1:], strict=False))


@pytest.mark.parametrize("most", [1, 16, 17, 64, 512, 2048, 5000])
def test_every_prefill_has_a_rung(most):
    rungs = prefill_rungs(most)
    assert rungs[-1] >= most and (len(rungs) == 1 or rungs[-2] < most)
    assert all(a < b <= 2 * a and b % 16 == 0 for a, b in zip(rungs, rungs[1:], strict=False))


def test_a_decode_batch_is_padded_with_rows_that_touch_nothing():
    static = inputs()
    spans = [Span(1, 9, [3, 6]), Span(1, 8, [4]), Span(1, 17, [9, 8, 7])]
    batch = static.batch("decode", [11, 12, 13], [8, 7, 16], spans, None)
    assert batch is static.fixed("decode")[4]
    assert batch.token_ids.tolist() == [11, 12, 13, 0] and batch.positions.tolist() == [8, 7, 16, 0]
    plan = batch.plan
    assert plan.slots.tolist() == [6 * 8 + 0, 4 * 8 + 7, 7 * 8 + 0, -1]
    assert plan.q_start.tolist() == [0, 1, 2, 3, 4] and plan.kv_len.tolist() == [9, 8, 17, 0]
    assert plan.table[0, :2].tolist() == [3, 6] and plan.table[2, :3].tolist() == [9, 8, 7]
    assert plan.max_q == 1 and batch.logit_rows is None


def test_addresses_stay_while_sequences_change():
    static = inputs()
    first = static.batch("decode", [1, 2], [0, 0], [Span(1, 1, [0]), Span(1, 1, [1])], None)
    before = [t.data_ptr() for t in (first.token_ids, first.positions, first.plan.slots, first.plan.table)]
    second = static.batch("decode", [3, 4], [8, 1], [Span(1, 9, [5, 2]), Span(1, 2, [1])], None)
    after = [t.data_ptr() for t in (second.token_ids, second.positions, second.plan.slots, second.plan.table)]
    assert before == after
    assert second.plan.table[0, :2].tolist() == [5, 2] and second.plan.table[1, 0] == 1
    # A block in the middle is exchanged, in place: no length tells.
    blocks = [5, 2, 8]
    static.batch("decode", [3, 4], [16, 1], [Span(1, 17, blocks), Span(1, 2, [1])], None)
    blocks[1] = 7
    third = static.batch("decode", [3, 4], [16, 1], [Span(1, 17, blocks), Span(1, 2, [1])], None)
    assert third.plan.table[0, :3].tolist() == [5, 7, 8]


def test_prefill_is_padded_to_its_rung():
    static = inputs()
    spans = [Span(3, 11, [2, 5]), Span(15, 15, [9, 1])]
    batch = static.batch("prefill", list(range(18)), [*range(8, 11), *range(15)], spans, [2, 17])
    assert len(batch.token_ids) == 32 and batch.token_ids[18:].abs().sum() == 0
    assert batch.plan.slots.tolist() == [40, 41, 42, *range(72, 80), *range(8, 15), *[-1] * 14]
    assert batch.plan.q_start.tolist() == [0, 3, 18, 19, 20, 21]
    assert batch.plan.kv_len.tolist() == [11, 15, 0, 0, 0] and batch.plan.max_q == 32
    assert batch.logit_rows.tolist() == [2, 17, 0, 0, 0]


@pytest.mark.parametrize("count", [1, 3, 5, 6, 7, 9, 11, 13])
def test_rows_of_logits_that_nobody_asked_for_exist_in_the_pass(count):
    """A pass of its own reads as many as there are in a bucket; those of a longer pass before it lie beyond its rows."""
    static = inputs(max_running=16, prefill_tokens=512)

    def passing(count, length):
        blocks = list(range(-(-length // 8)))
        ids, positions = [0] * count * length, [*range(length)] * count
        last = [length * (i + 1) - 1 for i in range(count)]
        return static.batch("prefill", ids, positions, [Span(length, length, blocks)] * count, last)

    passing(16, 32)
    batch = passing(count, 2)
    assert len(batch.token_ids) in (16, 32)
    assert batch.logit_rows.tolist()[:count] == list(range(1, 2 * count, 2))
    assert batch.logit_rows.tolist()[count:] == [0] * (len(batch.logit_rows) - count)


def test_prompts_come_in_the_fixed_batch_of_their_rows():
    static = inputs()
    one = static.batch("prefill", range(20), range(8, 28), [Span(20, 28, [3, 6, 1, 2])], [19])
    assert one is static.fixed("prefill")[32] and static.is_fixed("prefill", one)
    assert one.plan.q_start.tolist() == [0, 20, 21, 22, 23, 24] and one.plan.max_q == 32
    assert one.plan.kv_len.tolist() == [28, 0, 0, 0, 0] and one.plan.slots[20:].tolist() == [-1] * 12
    assert one.logit_rows.tolist() == [19, 0, 0, 0, 0]
    spans = [Span(30, 30, [0, 1, 2, 3]), Span(1, 9, [4, 5])]
    two = static.batch("prefill", range(31), [*range(30), 8], spans, [30])
    assert two is one and two.plan.q_start.tolist() == [0, 30, 31, 32, 32, 32]
    assert two.plan.kv_len.tolist() == [30, 9, 0, 0, 0] and two.logit_rows[0] == 30


def test_streams_beside_prompts_have_a_place_of_their_own():
    """Room for as many as may run, in the same Batch however many there are, prompts behind them."""
    static = inputs()
    streams = [Span(1, 9, [3, 6]), Span(1, 4, [2])]
    prompt = Span(15, 20, [7, 8, 9])
    batch = static.batch("mixed", range(17), [8, 3, *range(5, 20)], [*streams, prompt], [0, 1, 16], 2)
    assert batch is static.fixed("mixed")[32] and static.is_fixed("mixed", batch)
    assert not static.is_fixed("prefill", batch)
    plan = batch.plan
    assert plan.streams == 8 and plan.max_q == 32
    assert plan.q_start.tolist() == [0, 1, *[2] * 6, 2, 17, 18, 19, 20, 21]
    assert plan.kv_len.tolist() == [9, 4, *[0] * 6, 20, 0, 0, 0, 0]
    assert plan.slots[:3].tolist() == [6 * 8, 2 * 8 + 3, 7 * 8 + 5] and plan.slots[17:].tolist() == [-1] * 15
    assert plan.table[0, :2].tolist() == [3, 6] and plan.table[8, :3].tolist() == [7, 8, 9]
    assert batch.logit_rows.tolist() == [0, 1, 16] + [0] * 10
    # Fewer rows than they take places: nobody's row is beyond the pass.
    few = static.batch("mixed", range(16), [8, *range(15)], [streams[0], Span(15, 15, [7, 8])], [0, 15], 1)
    assert few is static.fixed("mixed")[16] and few.plan.q_start.tolist() == [0, *[1] * 8, *[16] * 5]


def test_one_sequence_has_none_beside_it():
    assert not inputs(max_running=1).fixed("mixed")
    assert not StaticInputs(Limits(4, 32, 16, 1), 16, CPU).fixed("mixed")
    assert inputs().holds(128) and not inputs().holds(129)


@pytest.mark.parametrize(
    ("counts", "logit_rows", "streams"),
    [
        ((20,), None, 0),
        ((17, 1, 1, 1, 1, 1, 1, 1, 1), [16], 0),
        ((1, 1, 17, 1, 1, 1, 1, 1, 1, 1, 1), [0, 1, 18], 2),
    ],
    ids=["all logits", "more than there is room for", "the same beside streams"],
)
def test_other_prompts_get_a_batch_of_their_own(counts, logit_rows, streams):
    static = inputs(max_running=12)
    kind = "mixed" if streams else "prefill"
    spans = [Span(n, n, [3 * i, 3 * i + 1, 3 * i + 2]) for i, n in enumerate(counts)]
    positions = [p for n in counts for p in range(n)]
    batch = static.batch(kind, range(sum(counts)), positions, spans, logit_rows, streams)
    assert not static.is_fixed(kind, batch)
    room = 12 if streams else 0
    assert len(batch.plan.kv_len) == room + len(counts) - streams and batch.plan.max_q == max(counts)
    assert batch.plan.streams == room and batch.plan.q_start[-1] == sum(counts)


def test_every_section_starts_at_a_multiple_of_16_bytes():
    """The Triton kernels are compiled for pointers that do."""
    static = inputs(max_running=3)
    for batch in (b for kind in ("decode", "prefill", "mixed") for b in static.fixed(kind).values()):
        plan, first = batch.plan, batch.plan.streams
        parts = (plan.q_start[first:], plan.kv_len[first:], plan.table[first:])
        for t in (
            batch.token_ids,
            batch.positions,
            plan.slots,
            plan.q_start,
            plan.kv_len,
            plan.table,
            *parts,
        ):
            assert (t.data_ptr() - batch.token_ids.data_ptr()) % 16 == 0
