import math
from collections import Counter

import pytest
import torch

from nybble.service.engine import sampler
from nybble.service.engine.protocol import Request, SamplingParams
from nybble.service.engine.sampler import LOGPROB_FLOOR, sample
from nybble.service.engine.sequence import Sequence


def sequence(prompt=(0,), generated=(), **fields):
    s = Sequence(Request("r", tuple(prompt), SamplingParams(100, **({"temperature": 0.0} | fields)), 0.0), ())
    for token in generated:
        s.append(token)
    return s


def draw(logits, count=2000, **fields):
    """Frequencies of `count` draws from one distribution."""
    sequences = [sequence(**({"temperature": 1.0, "seed": seed} | fields)) for seed in range(count)]
    rows = torch.tensor(logits).float().expand(count, -1)
    return {k: v / count for k, v in Counter(t.token_id for t in sample(rows, sequences)).items()}


def softmax(logits):
    e = [math.exp(x) for x in logits]
    return [x / sum(e) for x in e]


def test_greedy_takes_the_first_of_the_best():
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    assert [t.token_id for t in sample(logits, [sequence(), sequence()])] == [1, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_rows_that_are_not_finite_give_none_and_spare_their_neighbours(bad):
    logits = torch.zeros(3, 5)
    logits[1, 3] = bad
    logits[2, 4] = 1
    tokens = sample(logits, [sequence(), sequence(temperature=1.0), sequence(logprobs=2)])
    assert tokens[0] is not None and tokens[1] is None and tokens[2].token_id == 4
    greedy = sample(logits, [sequence(), sequence(), sequence()])
    assert [t and t.token_id for t in greedy] == [0, None, 4]


def test_a_row_of_minus_infinity_gives_none():
    assert sample(torch.full((1, 4), float("-inf")), [sequence()]) == [None]


def test_temperature_sampling_follows_the_distribution():
    logits = [2.0, 1.0, 0.0, -3.0]
    got = draw(logits, count=20000, temperature=0.7)
    expected = softmax([x / 0.7 for x in logits])
    for token, p in enumerate(expected):
        assert got.get(token, 0) == pytest.approx(p, abs=0.015)


def test_a_tiny_temperature_is_greedy():
    assert draw([1.0, 1.1, 0.9], temperature=1e-8) == {1: 1.0}


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"top_k": 1}, {3}),
        ({"top_k": 2}, {3, 1}),
        ({"top_k": 100}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.5}, {3}),
        ({"top_p": 0.8}, {3, 1}),
        ({"top_p": 1e-9}, {3}),
        ({"top_k": 3, "top_p": 0.9}, {3, 1, 0}),
        ({"min_p": 0.3}, {3, 1}),
        ({"min_p": 1.0}, {3}),
        ({"top_k": 3, "min_p": 0.3}, {3, 1}),
    ],
    ids=str,
)
def test_cuts_keep_the_right_candidates(fields, allowed):
    # probabilities 0.10, 0.25, 0.03, 0.60, 0.02
    logits = [math.log(p) for p in (0.10, 0.25, 0.03, 0.60, 0.02)]
    assert set(draw(logits, **fields)) == allowed


def test_top_p_counts_within_what_top_k_left():
    # Of the two best (0.60, 0.25 -> 0.706, 0.294) the first alone holds 0.7.
    logits = [math.log(p) for p in (0.10, 0.25, 0.03, 0.60, 0.02)]
    assert set(draw(logits, top_k=2, top_p=0.7)) == {3}
    assert set(draw(logits, top_p=0.7)) == {3, 1}


def test_top_p_over_a_flat_distribution_looks_beyond_the_first_candidates():
    got = draw([0.0] * 5000, count=4000, top_p=0.9)
    assert len(got) > 2000, "cut to the first 1024 candidates"


def test_a_seed_gives_the_same_answer_alone_and_in_a_batch():
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    fields = {"temperature": 1.0, "seed": 7, "top_p": 0.9}

    def answer(s, *neighbours):
        for row in logits:
            tokens = sample(row.expand(1 + len(neighbours), -1), [*neighbours, s])
            s.append(tokens[-1].token_id)
        return s.tokens

    alone = answer(sequence(**fields))
    assert len(set(alone)) > 10
    assert alone == answer(sequence(**fields))
    assert alone == answer(sequence(**fields), sequence(temperature=0.5, seed=3), sequence())


def test_requests_without_a_seed_differ():
    tokens = sample(torch.zeros(20, 1000), [sequence(temperature=1.0) for _ in range(20)])
    assert len({t.token_id for t in tokens}) > 10


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"repetition_penalty": 2.0}, 2),  # 4/2, 3/2 seen, 2.5 not
        ({"presence_penalty": 1.1}, 1),  # 4-1.1, 3, 2.5
        ({"frequency_penalty": 0.6}, 1),  # 4-1.2, 3, 2.5
        ({"frequency_penalty": 0.4}, 0),  # 4-0.8, 3, 2.5
        ({"logit_bias": ((2, 5.0),)}, 2),
        ({"logit_bias": ((0, -100.0), (1, -100.0))}, 2),
    ],
    ids=str,
)
def test_penalties_and_bias(fields, expected):
    """Token 1 is in the prompt, token 0 was generated twice."""
    logits = torch.tensor([[4.0, 3.0, 2.5]])
    assert sample(logits, [sequence(prompt=(1,), generated=(0, 0), **fields)])[0].token_id == expected


def test_a_repetition_penalty_pushes_negative_scores_down_too():
    logits = torch.tensor([[-1.0, -1.5]])
    assert sample(logits, [sequence(prompt=(0,), repetition_penalty=2.0)])[0].token_id == 1


def test_penalties_do_not_change_the_logits_of_the_caller():
    logits = torch.tensor([[4.0, 3.0]])
    sample(logits, [sequence(prompt=(0,), repetition_penalty=5.0)])
    assert logits.tolist() == [[4.0, 3.0]]


def test_logprobs_are_those_of_the_plain_logits_best_first():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    (token,) = sample(logits, [sequence(logprobs=2, logit_bias=((0, 50.0),))])
    expected = torch.tensor([1.0, 3.0, 2.0]).log_softmax(-1).tolist()
    assert token.token_id == 0
    assert token.logprob == pytest.approx(expected[0])
    assert [i for i, _ in token.top] == [1, 2]
    assert [v for _, v in token.top] == pytest.approx([expected[1], expected[2]])


def test_logprobs_zero_report_the_token_alone_and_none_is_below_the_floor():
    (token,) = sample(torch.tensor([[0.0, -1e30]]), [sequence(logprobs=0, logit_bias=((1, 0.0),))])
    assert token.top == () and token.logprob == 0.0
    (token,) = sample(torch.tensor([[0.0, -1e30]]), [sequence(logprobs=2)])
    assert token.top[1] == (1, LOGPROB_FLOOR)


@pytest.mark.gpu
def test_a_gpu_chooses_what_a_cpu_does_without_waiting():
    logits = torch.randn(8, 5000, generator=torch.Generator().manual_seed(0)) * 3
    logits[5, 7] = float("nan")
    logits[6] *= 0.01  # flat: more candidates than are looked at first

    def sequences():
        return [
            sequence(),
            sequence(temperature=1.0, seed=1),
            sequence(temperature=0.7, seed=2, top_k=20, top_p=0.8, logprobs=3),
            sequence(prompt=(4, 9), generated=(7, 7), repetition_penalty=1.5, frequency_penalty=0.2),
            sequence(logit_bias=((123, 50.0),), logprobs=0),
            sequence(temperature=1.0, seed=3),
            sequence(temperature=1.0, seed=4, top_p=0.9),
            sequence(temperature=1.0, seed=5, min_p=0.1),
        ]

    expected, got = sample(logits, sequences()), sample(logits.cuda(), sequences())
    assert [t and t.token_id for t in got] == [t and t.token_id for t in expected]
    assert got[2].logprob == pytest.approx(expected[2].logprob, abs=1e-4)
    assert [i for i, _ in got[2].top] == [i for i, _ in expected[2].top]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_greedy_rows_on_a_gpu(dtype):
    logits = torch.randn(5, 50257, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, 50000] = float("-inf")
    logits[3, 7:9] = 20
    sequences = [sequence() for _ in logits]
    draft = sampler.draw(logits.cuda(), sequences)
    expected = [t and t.token_id for t in sample(logits, sequences)]
    assert expected[1] is None and expected[3] == 7
    assert [t and t.token_id for t in draft.tokens()] == expected
    ids = draft.token_ids().tolist()
    assert draft.token_ids().is_cuda and all(e is None or i == e for i, e in zip(ids, expected, strict=True))
    assert 0 <= ids[1] < 50257


def test_greedy_rows_are_the_same_beside_others():
    """The two ways to a draft: rows that all take their best, and rows among which one does not."""
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    logits[2, 5] = float("nan")
    greedy = sample(logits, [sequence() for _ in logits])
    mixed = sampler.draw(logits, [sequence(), sequence(logprobs=1), sequence(), sequence(temperature=1.0)])
    tokens = mixed.tokens()
    assert tokens[0] == greedy[0] and tokens[2] is greedy[2] is None
    assert tokens[1].token_id == greedy[1].token_id
    assert [int(i) for i in mixed.token_ids()[[0, 1, 3]]] == [tokens[r].token_id for r in (0, 1, 3)]


def test_a_number_belongs_to_its_place_however_often_and_early_it_is_asked_for():
    s, undisturbed = sequence(temperature=1.0, seed=9), sequence(temperature=1.0, seed=9)
    wanted = [undisturbed.random.random() for _ in range(7)]
    numbers = []
    for failing in (True, False, True, True, False):
        numbers.append(s.uniform())
        if not failing:
            s.append(1)
    assert numbers == [wanted[0]] * 2 + [wanted[1]] * 3
    assert [s.uniform(1), s.uniform(), s.uniform(1)] == [wanted[3], wanted[2], wanted[3]]
    s.append(1)
    assert [s.uniform(), s.uniform(2)] == [wanted[3], wanted[5]]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-46},
        {"temperature": 1e-30, "top_p": 0.5},
        {"temperature": 0.0, "repetition_penalty": 1e-300},
        {"temperature": 1.0, "repetition_penalty": 1e-300, "seed": 1},
    ],
)
def test_no_wish_is_too_small_for_the_arithmetic(fields):
    logits = torch.tensor([[0.0, 1.0, 7.0, 3.0]])
    assert sample(logits, [sequence(prompt=(2,), **fields)])[0].token_id == 2


MANY = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.5, "seed": 3, "top_k": 5},
]


@pytest.mark.parametrize("fields", [MANY, MANY[:1]], ids=["drawn", "greedy"])
def test_ids_are_told_before_the_tokens_are_read(fields):
    logits = torch.randn(len(fields), 300, generator=torch.Generator().manual_seed(0))
    draft = sampler.draw(logits, [sequence(**f) for f in fields])
    ids = draft.token_ids()
    assert draft.token_ids([len(fields) - 1]).tolist() == ids[-1:].tolist()
    assert [t.token_id for t in draft.tokens()] == ids.tolist() and not draft.redrawn


def test_a_row_that_is_drawn_again_says_so_and_needs_no_logits_any_more(monkeypatch):
    """Meanwhile a step launched ahead may have written its own logits in their place."""
    logits = torch.randn(len(MANY), 300, generator=torch.Generator().manual_seed(0)) / 4
    expected = sample(logits, [sequence(**f) for f in MANY])
    monkeypatch.setattr(sampler, "_TOP_P_CANDIDATES", 1)
    draft = sampler.draw(logits, [sequence(**f) for f in MANY])
    ids = draft.token_ids().tolist()
    logits.uniform_()
    assert draft.tokens() == expected
    assert draft.redrawn == {2} and ids[2] != expected[2].token_id


def test_a_row_one_place_ahead_draws_the_number_of_its_place():
    logits = torch.zeros(1, 1000)
    early, late = (sequence(temperature=1.0, seed=4) for _ in range(2))
    ahead = sampler.draw(logits, [early], ahead=1).tokens()
    first = sample(logits, [early])
    assert first == sample(logits, [late]) != ahead
    late.append(0)
    assert sample(logits, [late]) == ahead
