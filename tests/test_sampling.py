"""The one path from logits to laws, against transformers' own processors (behaviours 12 and 13), and chance itself."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from eaglekit.bench.lossless import chi2_tail, g_test_law
from eaglekit.core.random import GeneratorSource
from eaglekit.core.sampling import Law, RepetitionPenalty, SamplingParams
from eaglekit.errors import InputError
from eaglekit.testing import every_outcome

VOCAB = 23


def some_logits(seed: int, ties: bool) -> Tensor:
    """[6, V]; with ties, values on a coarse grid, so that most of them occur more than once."""
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    return (logits * 1.5).round() / 1.5 if ties else logits


def hf_probs(logits: Tensor, ids: Tensor, params: SamplingParams) -> Tensor:
    """What `generate` of transformers would sample from: its own processors in its own order."""
    chain = tf.LogitsProcessorList()
    if params.repetition_penalty != 1:
        chain.append(tf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1:
        chain.append(tf.TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        chain.append(tf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(tf.TopPLogitsWarper(float(params.top_p)))
    if params.min_p:
        chain.append(tf.MinPLogitsWarper(params.min_p))
    return chain(ids, logits.clone()).softmax(-1)


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.8])
@pytest.mark.parametrize("temperature", [0.25, 1.0, 1.7])
def test_probs_equal_those_of_transformers(temperature: float, penalty: float, ties: bool) -> None:  # behaviour 12
    logits = some_logits(round(100 * temperature + 10 * penalty), ties)
    ids = torch.randint(VOCAB, (6, 9), generator=torch.Generator().manual_seed(5))
    seen = 0
    for top_k, top_p, min_p in itertools.product((0, 1, 2, 5, VOCAB, 99), (1.0, 0.95, 0.5, 0.01), (0.0, 0.1, 1.0)):
        params = SamplingParams(temperature, top_p, top_k, min_p, penalty)
        law = Law(params, (RepetitionPenalty(penalty),) if penalty != 1 else ())
        got, wanted = law.probs(logits, list(ids)), hf_probs(logits, ids, params)
        assert torch.equal(got > 0, wanted > 0), params  # the same set of tokens, exactly
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)
        seen += int((got == 0).any())
    assert seen > 20  # the parameters did drop tokens


def test_ties_with_the_kth_token_stay() -> None:
    probs = Law(SamplingParams(temperature=1.0, top_k=2)).probs(torch.tensor([[1.0, 3.0, 1.0, 0.0]]))
    assert (probs > 0).tolist() == [[True, True, True, False]]


def test_the_most_probable_token_always_stays() -> None:
    for params in (SamplingParams(1.0, top_p=1e-9), SamplingParams(1.0, min_p=1.0), SamplingParams(1.0, top_k=1)):
        probs = Law(params).probs(torch.tensor([[0.0, 2.0, 1.0]]))
        assert probs.tolist() == [[0.0, 1.0, 0.0]], params


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_become_laws_in_float32(dtype: torch.dtype) -> None:  # behaviour 6
    logits = some_logits(0, False).to(dtype)
    probs = Law(SamplingParams(temperature=0.7)).probs(logits)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs, (logits.float() / 0.7).softmax(-1))
    torch.testing.assert_close(probs.sum(-1), torch.ones(6), atol=1e-6, rtol=0)


def test_temperature_zero_puts_all_mass_on_the_argmax_of_the_processed_scores() -> None:
    law = Law(SamplingParams(), (RepetitionPenalty(10.0),))
    logits = torch.tensor([[5.0, 1.0, 0.4]])
    assert law.greedy
    assert law.probs(logits, [torch.tensor([0])]).tolist() == [[0.0, 1.0, 0.0]]
    assert law.probs(logits, [torch.tensor([2])]).tolist() == [[1.0, 0.0, 0.0]]
    assert law.argmax(logits, [torch.tensor([0])]).tolist() == [1]


def test_each_row_is_processed_with_its_own_prefix() -> None:  # behaviour 13
    seen: list[tuple[list[int], int]] = []

    def ban_last(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append((ids[0].tolist(), scores.shape[0]))
        return scores.scatter(-1, ids[:, -1:], -math.inf)

    logits = torch.zeros(2, 3)
    before = logits.clone()
    probs = Law(SamplingParams(temperature=1.0), (ban_last,)).probs(logits, [torch.tensor([0, 2]), torch.tensor([1])])
    assert seen == [([0, 2], 1), ([1], 1)]
    torch.testing.assert_close(probs, torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5]]))
    assert torch.equal(logits, before)


def test_a_processor_that_writes_in_place_does_not_change_the_logits() -> None:
    def in_place(ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 0] = -math.inf
        return scores

    logits = torch.ones(2, 3)
    Law(SamplingParams(temperature=1.0), (in_place,)).probs(logits, [torch.tensor([0])] * 2)
    assert torch.equal(logits, torch.ones(2, 3))


def test_processors_without_prefixes_are_an_error() -> None:
    with pytest.raises(InputError, match="prefix"):
        Law(SamplingParams(), (RepetitionPenalty(2.0),)).probs(torch.zeros(1, 3))


def test_repetition_penalty_equals_that_of_transformers() -> None:
    logits, ids = some_logits(3, False), torch.randint(VOCAB, (6, 12), generator=torch.Generator().manual_seed(1))
    for penalty in (0.5, 1.05, 4.0):
        wanted = tf.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
        assert torch.equal(RepetitionPenalty(penalty)(ids, logits), wanted)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": "1"}, "temperature='1'"),
        ({"temperature": None}, "temperature=None"),
        ({"temperature": True}, "temperature=True"),
        ({"top_p": 0}, "top_p=0"),
        ({"top_p": 1.01}, "top_p=1.01"),
        ({"top_p": math.nan}, "top_p=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 2.0}, "top_k=2.0"),
        ({"top_k": True}, "top_k=True"),
        ({"min_p": -0.01}, "min_p=-0.01"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"min_p": math.nan}, "min_p=nan"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty=-1.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty=inf"),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_it(values: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError) as error:
        SamplingParams(**values)
    assert name in str(error.value) and "expected" in str(error.value)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(InputError) as error:
        SamplingParams(temperature=-1, top_p=2, top_k=-3, min_p=4, repetition_penalty=0)
    for name in ("temperature=-1", "top_p=2", "top_k=-3", "min_p=4", "repetition_penalty=0"):
        assert name in str(error.value)
    with pytest.raises(InputError) as error:
        SamplingParams(temperature=0.5, top_p=2)
    assert "temperature" not in str(error.value)


@pytest.mark.parametrize("values", [{}, {"temperature": 1}, {"top_p": 1}, {"min_p": 1}, {"repetition_penalty": 0.1}])
def test_values_at_the_edge_are_accepted(values: dict[str, Any]) -> None:
    SamplingParams(**values)


# --- chance. Seeds are fixed, so that these pass or fail for good; the floor of 1e-4 on p says how odd a seed would
# have to be for a correct program to fail. Power: with N draws, a law whose chi-squared distance from the right one
# is w^2 = sum (q-p)^2/p gives a statistic of about N w^2; with N = 20000 and at most 19 degrees of freedom, the
# threshold (below 52) is passed with probability above 0.99 from w = 0.065 on: a shift of a few hundredths, as below.

LAW = torch.tensor([0.05, 0.0, 0.45, 0.2, 0.0, 0.3])
DRAWS = 20_000
FLOOR = 1e-4


def plackett_luce(law: Tensor, count: int) -> dict[tuple[int, ...], float]:
    """The law of `count` draws without replacement."""
    out: dict[tuple[int, ...], float] = {}
    for order in itertools.permutations([i for i, p in enumerate(law.tolist()) if p > 0], count):
        probability, left = 1.0, 1.0
        for i in order:
            probability *= float(law[i]) / left
            left -= float(law[i])
        out[order] = probability
    return out


def assert_follows(rows: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> None:
    counts: dict[tuple[int, ...], float] = {}
    for row in rows:
        counts[row] = counts.get(row, 0) + 1
    g, freedom = g_test_law(counts, law, len(rows))
    assert chi2_tail(g, freedom) > FLOOR, (g, freedom)


def test_draw_follows_the_law_and_never_takes_a_token_of_probability_zero() -> None:  # behaviour 5
    source = GeneratorSource.seeded(1)
    rows = [(source.draw(LAW),) for _ in range(DRAWS)]
    assert {i for (i,) in rows} == {0, 2, 3, 5}
    assert_follows(rows, plackett_luce(LAW, 1))


def test_draw_distinct_follows_the_plackett_luce_law() -> None:  # behaviour 6
    drawn = GeneratorSource.seeded(2).draw_distinct(LAW.expand(DRAWS, -1), 2)
    assert_follows([tuple(r) for r in drawn.tolist()], plackett_luce(LAW, 2))


def test_the_statistical_test_would_find_a_wrong_law() -> None:
    drawn = GeneratorSource.seeded(2).draw_distinct(LAW.expand(DRAWS, -1), 2)
    with pytest.raises(AssertionError):
        assert_follows([(b, a) for a, b in drawn.tolist()], plackett_luce(LAW, 2))
    with pytest.raises(AssertionError):
        source = GeneratorSource.seeded(1)
        tilted = (LAW + 0.02 * (LAW > 0)).div(1.08)
        assert_follows([(source.draw(tilted),) for _ in range(DRAWS)], plackett_luce(LAW, 1))


def test_draw_distinct_pads_with_minus_one_where_nothing_is_left() -> None:
    laws = torch.stack([LAW, torch.tensor([0, 0, 1.0, 0, 0, 0]), torch.full((6,), 1 / 6)])
    drawn = GeneratorSource.seeded(3).draw_distinct(laws, 8)
    assert drawn.shape == (3, 8) and drawn.dtype == torch.int64
    for row, support in zip(drawn.tolist(), [{0, 2, 3, 5}, {2}, set(range(6))], strict=True):
        found = row[: len(support)]
        assert set(found) == support and row[len(support) :] == [-1] * (8 - len(support))


def test_accept_follows_its_probability() -> None:
    source = GeneratorSource.seeded(4)
    rows = [(int(source.accept(0.3)),) for _ in range(DRAWS)]
    assert_follows(rows, {(0,): 0.7, (1,): 0.3})
    assert all(source.accept(1.0) and source.accept(7.5) for _ in range(2000))
    assert not any(source.accept(0.0) for _ in range(2000))


def test_a_seed_decides_everything_and_the_global_generator_is_untouched() -> None:  # behaviour 14
    def run(seed: int) -> list[Any]:
        source = GeneratorSource.seeded(seed)
        return [source.draw(LAW), source.accept(0.5), source.draw_distinct(LAW.expand(4, -1), 3).tolist()]

    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = [run(s) for s in range(20)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(999)
    assert [run(s) for s in range(20)] == first
    assert len({str(r) for r in first}) > 10


def test_every_outcome_walks_through_all_of_them_with_their_probabilities() -> None:
    outcomes: dict[Any, float] = {}

    def run(source: Any) -> Any:
        return tuple(source.draw_distinct(LAW[None], 2)[0].tolist())

    for outcome, weight in every_outcome(run):
        assert outcome not in outcomes
        outcomes[outcome] = weight
    wanted = plackett_luce(LAW, 2)
    assert outcomes.keys() == wanted.keys()
    assert all(abs(outcomes[k] - wanted[k]) < 1e-6 for k in wanted)


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-300])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature: float) -> None:
    logits = torch.tensor([[3e4, -2.0, 3e4 - 1, 7.0]])
    assert Law(SamplingParams(temperature=temperature)).probs(logits).tolist() == [[1.0, 0.0, 0.0, 0.0]]
