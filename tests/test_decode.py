"""The decoding loop over a tiny llama: identity, limits, states, chance, numbers (1, 8, 9, 14, 15, 19, 25, 31)."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import CONTEXT
from eaglekit.api import Model
from eaglekit.bench.lossless import (
    deviation,
    fresh_logits,
    head_difference,
    output_law,
    plain_law,
    probe,
    tiny_head,
)
from eaglekit.core.random import GeneratorSource
from eaglekit.core.sampling import Law, RepetitionPenalty, SamplingParams
from eaglekit.core.stats import Stats
from eaglekit.core.tree import DraftTree, TreeShape
from eaglekit.drafters.eagle import EagleDrafter, EagleState
from eaglekit.engine import reference
from eaglekit.engine.decode import Session
from eaglekit.engine.drafter import Context, Drafter, Observed, PlainDrafter
from eaglekit.engine.stopping import Piece, Stopper
from eaglekit.errors import InputError
from eaglekit.models.draft import ModuleState
from eaglekit.models.head import EagleHead
from eaglekit.models.hf import HFTarget
from eaglekit.models.state import HFState
from eaglekit.testing import TableTarget

GREEDY = Law(SamplingParams())
WARM = Law(SamplingParams(temperature=0.8))
PROMPT = [5, 17, 3, 42, 8, 23]
BUSHY = TreeShape.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [1, 0, 1]])
TREES = {"paper": TreeShape.paper(), "chain:1": TreeShape.chain(1), "chain:5": TreeShape.chain(5), "bushy": BUSHY}
# Heads of other inputs and layers; the target has two layers, and so streams 0 to 2.
VARIANTS: dict[str, dict[str, Any]] = {
    "today's": {},
    "feature+token": {"inputs": "feature+token"},
    "feature": {"inputs": "feature"},
    "token": {"inputs": "token"},
    "half-layer": {"mlp": False},
    "norms": {"input_norm": True, "fc_bias": True},
    "fused": {"feature_layers": (0, 2)},
    "fused+token-norms-two-layers": {
        "feature_layers": (0, 1, 2), "inputs": "feature+token", "input_norm": True, "num_hidden_layers": 2,
    },
    "fused-feature-half-layer": {"feature_layers": (1, 2), "inputs": "feature", "mlp": False},
    "eagle3": {
        "method": "eagle3", "feature_layers": (0, 1, 2), "input_norm": True, "output_norm": True, "fuse_norms": True,
        "readout_size": 3, "draft_vocab": [0, 1, 2],
    },
}  # fmt: skip
EACH_VARIANT = pytest.mark.parametrize("variant", VARIANTS)
EACH_TREE = pytest.mark.parametrize("shape", TREES.values(), ids=TREES.keys())


@pytest.fixture(scope="module")
def next_logits(target: HFTarget) -> reference.NextLogits:
    return fresh_logits(target)


class Hinting:
    """A drafter that knows the greedy answer, and puts its next token in the tree when it feels like it.

    Args:
        next_logits: Of the target.
        shape: The tree.
        hits: How often a node of the walk gets the right child; at 1, and on a chain, the drafter is perfect.
    """

    layers: tuple[int, ...] = ()

    def __init__(self, next_logits: reference.NextLogits, shape: TreeShape, hits: float = 1.0) -> None:
        self.next_logits = next_logits
        self.shape = shape
        self.hits = hits
        self.rng = random.Random(0)
        self.max_draft_tokens = shape.num_draft_tokens

    def open(self, batch: int, max_length: int) -> Hinting:
        return self

    def propose(self, contexts: Sequence[Context]) -> list[DraftTree]:
        return [self.tree(c) for c in contexts]

    def tree(self, context: Context) -> DraftTree:
        shape = self.shape.limited(context.max_depth)
        tokens = [context.ids[-1], *(self.rng.randrange(64) for _ in range(shape.num_draft_tokens))]
        node, ids = 0, list(context.ids)
        while shape.children[node] and self.rng.random() < self.hits:
            node = self.rng.choice(shape.children[node])
            ids.append(int(context.law.argmax(self.next_logits(ids)[None], [torch.tensor(ids)])))
            tokens[node] = ids[-1]
        return DraftTree(torch.tensor(tokens), shape)

    def commit(self, observed: Sequence[Observed]) -> None:
        pass

    def truncate(self, lengths: Sequence[int]) -> None:
        pass


def oracle(
    next_logits: reference.NextLogits, prompt: Sequence[int], n: int, law: Law = GREEDY, eos: Sequence[int] = ()
) -> list[int]:
    """Greedy ids by full recomputation."""
    stopper = Stopper(max_new_tokens=n, eos_ids=eos)
    pieces = reference.decode(next_logits, prompt, law=law, source=GeneratorSource.seeded(0), stopper=stopper)
    return [t for p in pieces for t in p.token_ids]


def answer(
    session: Session,
    prompt: Sequence[int],
    n: int,
    *,
    law: Law = GREEDY,
    seed: int = 0,
    eos: Sequence[int] = (),
    stats: Stats | None = None,
    logprobs: bool = False,
) -> list[Piece]:
    return list(
        session.generate(
            prompt,
            law=law,
            source=GeneratorSource.seeded(seed),
            stopper=Stopper(max_new_tokens=n, eos_ids=eos),
            stats=Stats() if stats is None else stats,
            logprobs=logprobs,
        )
    )


def ids_of(pieces: Sequence[Piece]) -> list[int]:
    return [t for p in pieces for t in p.token_ids]


# --- identity


@EACH_TREE
@pytest.mark.parametrize("seed", [0, 1])
def test_greedy_ids_equal_stepwise_argmax_for_a_random_head(
    target: HFTarget, next_logits: reference.NextLogits, shape: TreeShape, seed: int
) -> None:  # behaviour 1
    session = Session(target, EagleDrafter(tiny_head(target, seed), target, shape), CONTEXT)
    assert ids_of(answer(session, PROMPT, 30)) == oracle(next_logits, PROMPT, 30)


@EACH_TREE
@pytest.mark.parametrize("hits", [0.6, 1.0])
def test_greedy_ids_equal_stepwise_argmax_when_paths_of_every_kind_are_accepted(
    target: HFTarget, next_logits: reference.NextLogits, shape: TreeShape, hits: float
) -> None:  # behaviour 1
    stats = Stats()
    session = Session(target, Hinting(next_logits, shape, hits), CONTEXT)
    n = CONTEXT - len(PROMPT)  # up to the context limit
    assert ids_of(answer(session, PROMPT, n, stats=stats)) == oracle(next_logits, PROMPT, n)
    assert stats.kept_drafts > n / 4


def test_greedy_ids_hold_with_a_penalty_that_depends_on_the_path(
    target: HFTarget, next_logits: reference.NextLogits
) -> None:  # behaviour 13
    law = Law(SamplingParams(), (RepetitionPenalty(1.6),))
    expected = oracle(next_logits, PROMPT, 40, law)
    assert expected != oracle(next_logits, PROMPT, 40)
    for drafter in (Hinting(next_logits, BUSHY, 0.8), EagleDrafter(tiny_head(target, 3), target, BUSHY)):
        assert ids_of(answer(Session(target, drafter, CONTEXT), PROMPT, 40, law=law)) == expected


def test_plain_decoding_is_the_same_step_without_drafts(target: HFTarget, next_logits: reference.NextLogits) -> None:
    stats = Stats()
    pieces = answer(Session(target, PlainDrafter(), CONTEXT), PROMPT, 20, stats=stats)
    assert [len(p.token_ids) for p in pieces] == [1] * 20
    assert ids_of(pieces) == oracle(next_logits, PROMPT, 20)
    assert (stats.rounds, stats.drafted, stats.tau) == (19, 0, 1.0)


def test_sampled_ids_of_plain_decoding_equal_those_of_full_recomputation(
    target: HFTarget, next_logits: reference.NextLogits
) -> None:
    for seed in range(3):
        pieces = reference.decode(
            next_logits,
            PROMPT,
            law=WARM,
            source=GeneratorSource.seeded(seed),
            stopper=Stopper(max_new_tokens=15),
        )
        got = answer(Session(target, PlainDrafter(), CONTEXT), PROMPT, 15, law=WARM, seed=seed)
        assert ids_of(got) == ids_of(pieces)


def test_past_the_head_s_trained_length_nothing_crashes_and_ids_are_exact(
    target: HFTarget, next_logits: reference.NextLogits
) -> None:  # behaviour 25
    expected = oracle(next_logits, PROMPT, 60)
    random_head = tiny_head(target, 4)
    for scaling in (None, {"rope_type": "dynamic", "factor": 2.0}):
        config = dataclasses.replace(random_head.config, max_position_embeddings=16, rope_scaling=scaling)
        head = EagleHead(config)
        head.load_state_dict(random_head.state_dict())
        session = Session(target, EagleDrafter(head, target, BUSHY), CONTEXT)
        assert ids_of(answer(session, PROMPT, 60)) == expected


@EACH_VARIANT
def test_greedy_ids_equal_stepwise_argmax_for_every_variant_of_the_head(
    target: HFTarget, next_logits: reference.NextLogits, variant: str
) -> None:  # behaviour 1
    drafter = EagleDrafter(tiny_head(target, 5, **VARIANTS[variant]), target, BUSHY)
    session, prompt = Session(target, drafter, CONTEXT), list(PROMPT)
    for _ in range(3):
        got = ids_of(answer(session, prompt, 15))
        assert got == oracle(next_logits, prompt, 15)
        assert_pure(session)
        prompt = [*prompt, *got[:9], 7]  # cut short, and gone on with


@pytest.mark.parametrize("method", [{}, {"tree": "chain:2+lookup:6"}, {"tree": "paper", "temperature": 1.0, "seed": 1}])
def test_every_method_gives_a_head_the_streams_that_it_reads(
    target: HFTarget, next_logits: reference.NextLogits, method: dict[str, Any]
) -> None:
    model = Model.wrap(target, None, tiny_head(target, 5, feature_layers=(0, 2)))
    got = model.generate(PROMPT, max_new_tokens=40, **method)
    assert got.stats.drafted > 0
    if "seed" not in method:
        assert got.token_ids == oracle(next_logits, PROMPT, 40)


@pytest.mark.parametrize("sampled", [True, False], ids=["drawn", "most probable"])
@EACH_VARIANT
def test_the_exact_law_of_the_output_is_the_target_s_for_every_variant_of_the_head(variant: str, sampled: bool) -> None:
    changes = dict(VARIANTS[variant])
    if "feature_layers" in changes:
        changes["feature_layers"] = (0, 1)  # the target has one layer
    table = TableTarget(vocab_size=3)
    shape = TreeShape.from_choices([[0], [1], [0, 0], [1, 0]])
    drafter = EagleDrafter(tiny_head(table, 0, **changes), table, shape, sampled=sampled)
    ours, plain = output_law(table, drafter, [0, 1, 2], WARM, 2), plain_law(table.next_logits, [0, 1, 2], WARM, 2)
    assert sum(ours.values()) == pytest.approx(1, abs=1e-6)
    assert deviation(ours, plain) < 1e-5


# --- length


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 20])
def test_exactly_n_tokens_come(target: HFTarget, next_logits: reference.NextLogits, n: int) -> None:  # behaviour 9
    for drafter in (Hinting(next_logits, BUSHY), Hinting(next_logits, TreeShape.chain(5))):
        stats = Stats()
        pieces = answer(Session(target, drafter, CONTEXT), PROMPT, n, stats=stats)
        assert ids_of(pieces) == oracle(next_logits, PROMPT, n)
        assert stats.new_tokens == n and all(p.token_ids for p in pieces)


def test_no_tokens_asked_for_none_given_and_nothing_computed(
    target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:  # behaviour 9
    forbid_passes(monkeypatch)
    session = Session(target, PlainDrafter(), CONTEXT)
    assert answer(session, PROMPT, 0) == []
    assert session.ids == []


def forbid_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was computed")

    for name in ("forward", "lm_head", "embed", "open"):
        monkeypatch.setattr(HFTarget, name, forbidden)


@pytest.mark.parametrize("shape", [TreeShape.paper(), TreeShape.chain(9)], ids=["paper", "chain:9"])
def test_prompt_and_answer_may_fill_the_context(
    target: HFTarget, head: EagleHead, next_logits: reference.NextLogits, shape: TreeShape
) -> None:  # behaviour 9
    prompt = [(7 * i + 3) % 64 for i in range(CONTEXT - 6)]
    expected = oracle(next_logits, prompt, 6)
    for drafter in (EagleDrafter(head, target, shape), Hinting(next_logits, shape)):
        assert ids_of(answer(Session(target, drafter, CONTEXT), prompt, 6)) == expected
    whole = [*prompt, *expected[:-1]]
    assert ids_of(answer(Session(target, EagleDrafter(head, target, shape), CONTEXT), whole, 1)) == expected[-1:]


@pytest.mark.parametrize(
    ("prompt", "n", "words"),
    [
        ([1] * (CONTEXT - 5), 6, f"make {CONTEXT + 1}, but the context holds {CONTEXT}.*max_new_tokens to 5"),
        ([1] * (CONTEXT + 3), 1, f"context holds {CONTEXT}"),
        ([], 3, "no tokens"),
        ([1, 64], 3, "token id 64 is not in the target's vocabulary"),
        ([1, -1], 3, "token id -1"),
    ],
    ids=["one too many", "prompt too long", "empty", "id too large", "negative id"],
)
def test_what_cannot_be_answered_is_an_error_before_any_computation(
    target: HFTarget, head: EagleHead, prompt: list[int], n: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # behaviour 9
    forbid_passes(monkeypatch)
    with pytest.raises(InputError, match=words):
        answer(Session(target, EagleDrafter(head, target, BUSHY), CONTEXT), prompt, n)
    if prompt:
        with pytest.raises(InputError, match=words):
            Model.wrap(target, None, head).stream(prompt, max_new_tokens=n)


# --- end of text, in the loop


def first_new(ids: Sequence[int], at: int) -> int:
    """An index from `at` on whose token did not stand before."""
    return next(i for i in range(at, len(ids)) if ids[i] not in ids[:i])


def test_eos_in_the_middle_of_a_path_ends_ids_scores_and_counters(
    target: HFTarget, next_logits: reference.NextLogits
) -> None:  # behaviours 8 and 31
    whole = oracle(next_logits, PROMPT, 30)
    at = first_new(whole, 3)
    drafter = Hinting(next_logits, TreeShape.chain(12))
    stats = Stats()
    session = Session(target, drafter, CONTEXT)
    pieces = answer(session, PROMPT, 30, eos=[63, whole[at]], stats=stats, logprobs=True)
    assert at < 12  # the path went on behind it
    assert ids_of(pieces) == whole[: at + 1]
    assert sum(len(p.logprobs or ()) for p in pieces) == at + 1
    assert (stats.new_tokens, stats.rounds, stats.tau) == (at + 1, 1, float(at))
    assert stats.kept_drafts == at and stats.tried == stats.accepted == [1] * at
    # and the session goes on as a fresh one would
    longer = [*PROMPT, *whole[: at + 1], 9, 9]
    assert ids_of(answer(session, longer, 10)) == oracle(next_logits, longer, 10)


# --- log-probabilities


@pytest.mark.parametrize("law", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_logprobs_are_the_target_s_own_of_the_emitted_tokens(
    target: HFTarget, head: EagleHead, next_logits: reference.NextLogits, law: Law, monkeypatch: pytest.MonkeyPatch
) -> None:  # behaviour 15
    passes = []
    forward = HFTarget.forward

    def counted(self: HFTarget, *arguments: Any) -> Any:
        passes.append(1)
        return forward(self, *arguments)

    monkeypatch.setattr(HFTarget, "forward", counted)
    for drafter in (Hinting(next_logits, BUSHY, 0.8), EagleDrafter(head, target, BUSHY)):
        passes.clear()
        stats = Stats()
        pieces = answer(Session(target, drafter, CONTEXT), PROMPT, 25, law=law, logprobs=True, stats=stats)
        assert len(passes) >= 1 + stats.rounds and stats.rounds + 1 == len(pieces)
        ids = list(PROMPT)
        for piece in pieces:
            assert piece.logprobs is not None and len(piece.logprobs) == len(piece.token_ids)
            for token, logprob in zip(piece.token_ids, piece.logprobs, strict=True):
                assert logprob == pytest.approx(torch.log_softmax(next_logits(ids), -1)[token].item(), abs=1e-4)
                ids.append(token)


def test_logprobs_need_no_extra_pass(
    target: HFTarget, head: EagleHead, monkeypatch: pytest.MonkeyPatch
) -> None:  # behaviour 15
    session = Session(target, EagleDrafter(head, target, BUSHY), CONTEXT)
    passes: list[int] = []
    forward = HFTarget.forward

    def counted(self: HFTarget, *arguments: Any) -> Any:
        passes.append(1)
        return forward(self, *arguments)

    monkeypatch.setattr(HFTarget, "forward", counted)
    stats = Stats()
    pieces = answer(session, PROMPT, 12, logprobs=True, stats=stats)
    assert len(passes) == 1 + stats.rounds
    assert [p.token_ids for p in pieces] == [p.token_ids for p in answer(session, PROMPT, 12)]
    assert all(p.logprobs is None for p in answer(session, PROMPT, 12))


# --- states


@pytest.mark.parametrize("law", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_a_session_that_goes_on_equals_a_fresh_one_and_reads_only_what_is_new(
    target: HFTarget, head: EagleHead, law: Law
) -> None:
    drafter = EagleDrafter(head, target, BUSHY)
    session = Session(target, drafter, CONTEXT)
    prompt = list(PROMPT)
    read = 0
    for turn in range(4):
        stats = Stats()
        got = ids_of(answer(session, prompt, 9, law=law, seed=turn, stats=stats))
        assert got == ids_of(answer(Session(target, drafter, CONTEXT), prompt, 9, law=law, seed=turn))
        assert stats.cached_prompt_tokens == read and stats.prompt_tokens == len(prompt)
        read = len(prompt) + len(got) - 1  # the last token was emitted and not read
        prompt = [*prompt, *got, 30 + turn, 31]


@pytest.mark.parametrize(
    ("second", "cached"),
    [
        (PROMPT, len(PROMPT) - 1),  # the same again: the last token must be read for its logits
        (PROMPT[:3], 2),
        ([*PROMPT[:4], 60, 61], 3),  # what the draft head read of the last common token was paired with another one
        ([60, 61], 0),
        ([PROMPT[0]], 0),
    ],
)
def test_a_session_keeps_only_the_common_beginning(
    target: HFTarget, head: EagleHead, next_logits: reference.NextLogits, second: list[int], cached: int
) -> None:
    session = Session(target, EagleDrafter(head, target, BUSHY), CONTEXT)
    answer(session, PROMPT, 12)
    stats = Stats()
    assert ids_of(answer(session, second, 12, stats=stats)) == oracle(next_logits, second, 12)
    assert stats.cached_prompt_tokens == cached
    assert_pure(session)


def assert_pure(session: Session) -> None:
    """Both caches equal those of a fresh prefill of the session's tokens."""
    fresh = Session(session.target, session.drafter, session.max_length)
    fresh.restore(session.ids)
    torch.testing.assert_close(probe(session), probe(fresh), atol=1e-3, rtol=0)
    assert head_difference(session, fresh) < 1e-3


@EACH_TREE
def test_caches_equal_a_fresh_prefill_after_every_round(
    target: HFTarget, head: EagleHead, shape: TreeShape
) -> None:  # behaviour 19
    drafter = EagleDrafter(head, target, shape)
    session, stats = Session(target, drafter, CONTEXT), Stats()
    pieces = session.generate(
        PROMPT,
        law=Law(SamplingParams(temperature=3.0)),  # near uniform: drafts are accepted often
        source=GeneratorSource.seeded(1),
        stopper=Stopper(max_new_tokens=40),
        stats=stats,
    )
    for number, _ in enumerate(pieces):
        if number in (0, 1, 2, 5, 9):
            assert_pure(session)
    assert stats.kept_drafts > 5


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException, *, when: str) -> list[int]:
    """Let the third call of a method raise, before or after it has done its work."""
    calls: list[int] = []
    real = getattr(owner, name)

    def method(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) != 3:
            return real(self, *arguments)
        if when == "after":
            real(self, *arguments)
        raise error

    monkeypatch.setattr(owner, name, method)
    return calls


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (HFState, "forward_tree"),
        (HFState, "commit"),
        (EagleState, "propose"),
        (EagleState, "commit"),
        (EagleState, "read_pending"),
        (ModuleState, "read_drafts"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_session_that_was_interrupted_anywhere_behaves_as_a_fresh_one(
    target: HFTarget,
    head: EagleHead,
    next_logits: reference.NextLogits,
    owner: Any,
    name: str,
    error: BaseException,
    when: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = Session(target, EagleDrafter(head, target, BUSHY), CONTEXT)
    calls = fail_once(monkeypatch, owner, name, error, when=when)
    with pytest.raises(type(error)):
        answer(session, PROMPT, 12)
    assert len(calls) == 3
    prompt = [*PROMPT, 11]
    assert ids_of(answer(session, prompt, 12)) == oracle(next_logits, prompt, 12)
    assert_pure(session)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(HFState, "prefill"), (HFState, "truncate"), (EagleState, "truncate"), (EagleState, "commit")],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_prompt_that_failed_half_way_is_forgotten(
    target: HFTarget,
    head: EagleHead,
    next_logits: reference.NextLogits,
    owner: Any,
    name: str,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caches hold another prompt than the one before; a third one that continues the first must not use them."""
    session = Session(target, EagleDrafter(head, target, BUSHY), CONTEXT)
    got = ids_of(answer(session, PROMPT, 12))
    longer = [*PROMPT, *got, 11]
    with monkeypatch.context() as patch:
        real = getattr(owner, name)

        def raising(self: Any, *arguments: Any) -> Any:
            real(self, *arguments)
            raise error

        patch.setattr(owner, name, raising)
        with pytest.raises(type(error)):
            answer(session, [*PROMPT[:3], *range(20, 40)], 12)
    assert ids_of(answer(session, longer, 12)) == oracle(next_logits, longer, 12)
    assert_pure(session)


def test_a_processor_that_raises_leaves_a_usable_session(
    target: HFTarget, head: EagleHead, next_logits: reference.NextLogits
) -> None:
    calls: list[int] = []

    def fragile(ids: Tensor, scores: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 30:
            raise ZeroDivisionError
        return scores

    session = Session(target, EagleDrafter(head, target, BUSHY), CONTEXT)
    with pytest.raises(ZeroDivisionError):
        answer(session, PROMPT, 40, law=Law(SamplingParams(), (fragile,)))
    assert ids_of(answer(session, PROMPT, 12)) == oracle(next_logits, PROMPT, 12)


def test_a_refused_prompt_leaves_the_session_as_it_was(
    target: HFTarget, head: EagleHead, next_logits: reference.NextLogits
) -> None:
    session = Session(target, EagleDrafter(head, target, BUSHY), CONTEXT)
    got = ids_of(answer(session, PROMPT, 5))
    with pytest.raises(InputError):
        answer(session, [*PROMPT, 99], 5)
    stats, longer = Stats(), [*PROMPT, *got, 2]
    assert ids_of(answer(session, longer, 5, stats=stats)) == oracle(next_logits, longer, 5)
    assert stats.cached_prompt_tokens == len(PROMPT) + 4


@pytest.mark.parametrize("pieces_read", [1, 2, 4])
def test_a_stream_closed_early_leaves_a_session_that_goes_on(
    target: HFTarget, next_logits: reference.NextLogits, head: EagleHead, pieces_read: int
) -> None:
    for drafter in (EagleDrafter(head, target, BUSHY), Hinting(next_logits, BUSHY)):
        session = Session(target, drafter, CONTEXT)
        pieces = session.generate(
            PROMPT,
            law=GREEDY,
            source=GeneratorSource.seeded(0),
            stopper=Stopper(max_new_tokens=30),
            stats=Stats(),
        )
        got = [t for _ in range(pieces_read) for t in next(pieces).token_ids]
        pieces.close()
        stats, longer = Stats(), [*PROMPT, *got, 12]
        assert ids_of(answer(session, longer, 15, stats=stats)) == oracle(next_logits, longer, 15)
        assert stats.cached_prompt_tokens == len(PROMPT) + len(got) - 1


# --- chance


def test_same_seed_same_ids_and_other_seeds_others(target: HFTarget, head: EagleHead) -> None:  # behaviour 14
    def run(seed: int) -> list[int]:
        return ids_of(
            answer(Session(target, EagleDrafter(head, target, BUSHY), CONTEXT), PROMPT, 15, law=WARM, seed=seed)
        )

    first = [run(s) for s in range(4)]
    torch.manual_seed(77)
    before = torch.get_rng_state()
    assert [run(s) for s in range(4)] == first  # whatever the global generator's state
    assert torch.equal(torch.get_rng_state(), before)  # which is not touched
    assert len({tuple(r) for r in first}) == 4


def observed(count: int, seed: int, width: int = 32, layers: Sequence[int] = ()) -> Observed:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (count,), generator=generator)
    features = torch.randn(count, width, generator=generator)
    return Observed(tokens, features, {k: torch.randn(count, width, generator=generator) for k in layers})


@pytest.mark.parametrize("sampled", [True, False], ids=["drawn", "most probable"])
@pytest.mark.parametrize("depths", [(9, 9), (9, 1), (0, 9), (2, 3)], ids=str)
def test_a_row_s_draft_does_not_depend_on_its_neighbours(
    target: HFTarget, head: EagleHead, depths: tuple[int, int], sampled: bool
) -> None:  # behaviour 14
    """Rows of different length, limit, law and seed: each as if alone, and its generator goes on as if alone."""
    drafter = EagleDrafter(head, target, BUSHY, sampled=sampled)
    reads = [[observed(7, 1), observed(2, 2), observed(1, 3)], [observed(3, 4), observed(1, 5), observed(4, 6)]]
    laws = [WARM, Law(SamplingParams(temperature=1.3, top_k=20), (RepetitionPenalty(1.2),))]

    def propose(rows: Sequence[int]) -> tuple[list[list[DraftTree]], list[Tensor]]:
        state = drafter.open(len(rows), 64)
        generators = [torch.Generator().manual_seed(100 + r) for r in rows]
        sources = [GeneratorSource(g) for g in generators]
        trees = []
        for round_ in range(3):
            state.commit([reads[r][round_] for r in rows])
            contexts = []
            for r, source in zip(rows, sources, strict=True):
                ids = torch.cat([o.tokens for o in reads[r][: round_ + 1]]).tolist()
                contexts.append(Context([1, *ids], laws[r], source, depths[r]))
            trees.append(state.propose(contexts))
        return trees, [g.get_state() for g in generators]

    both, both_generators = propose([0, 1])
    for row in (0, 1):
        alone, generators = propose([row])
        assert torch.equal(both_generators[row], generators[0])
        for batched, single in zip(both, alone, strict=True):
            a, b = batched[row], single[0]
            assert a.shape == b.shape and torch.equal(a.tokens, b.tokens)
            assert a.shape == BUSHY.limited(depths[row])
            for node, children in enumerate(a.shape.children):
                x, y = a.law_of_children(node), b.law_of_children(node)
                if children and sampled:
                    assert x is not None and y is not None
                    torch.testing.assert_close(x, y, atol=1e-5, rtol=0)
                    assert all(x[a.tokens[c]] > 0 for c in children)


@pytest.mark.parametrize(
    ("variant", "shape"),
    [("today's", TreeShape.paper()), ("today's", TreeShape.chain(4)), *((variant, BUSHY) for variant in VARIANTS)],
    ids=lambda x: x if isinstance(x, str) else str(x.num_draft_tokens),
)
def test_each_draft_law_is_what_the_head_gives_for_the_node_s_own_path(
    target: HFTarget, variant: str, shape: TreeShape
) -> None:  # behaviours 6 and 21
    """By one pass without a cache per path: a draft is the pair of its parent's predicted feature and its token, or, as
    the variant has it, its parent's token."""
    head = tiny_head(target, 1, **VARIANTS[variant]).requires_grad_(False)
    state = EagleDrafter(head, target, shape).open(2, 64)
    layers = (2, 1, 0)  # more than any head reads, and not in the order in which it reads them
    reads = [[observed(n, 10 * row + i, layers=layers) for i, n in enumerate(counts)]
             for row, counts in enumerate([(6, 2, 1, 3), (3, 3, 4, 1)])]  # fmt: skip
    texts: list[Observed] = []
    trees: list[DraftTree] = []
    for round_ in range(4):
        new = [row[round_] for row in reads]
        if round_ == 2:  # parts of what was read, and of what was not, are forgotten
            lengths = [5, 4]
            state.truncate(lengths)
            texts = [text.part(0, n) for text, n in zip(texts, lengths, strict=True)]
        state.commit(new)
        texts = [text.then(more) for text, more in zip(texts, new, strict=True)] if texts else new
        if round_ == 1:
            continue  # committed in parts, read in one
        contexts = [Context([1, *text.tokens.tolist()], WARM, GeneratorSource.seeded(7), 9) for text in texts]
        trees = state.propose(contexts)
        for text, tree in zip(texts, trees, strict=True):
            check_laws(target, head, text, tree)


def check_laws(target: HFTarget, head: EagleHead, text: Observed, tree: DraftTree) -> None:
    """Each node's law against the head's, by a full pass over the pairs that lead to it."""
    ids, vocab = head.config.feature_layers, head.draft_vocab

    def predicted(tokens: Tensor, features: Tensor) -> Tensor:
        embeddings = target.embed(tokens).detach()
        if head.config.inputs == "feature+token":
            embeddings = torch.cat((torch.zeros_like(embeddings[:1]), embeddings[:-1]))
        return head(embeddings[None], features[None], torch.arange(len(tokens))[None])[0, -1]

    true = head.fused(torch.cat([text.layers[k] for k in ids], -1)) if ids else text.features
    for node, children in enumerate(tree.shape.children):
        if not children:
            continue
        tokens, features = text.tokens, true
        for draft in tree.shape.path(node)[1:]:
            features = torch.cat((features, predicted(tokens, features)[None]))
            tokens = torch.cat((tokens, tree.tokens[draft][None]))
        logits = head.read_out(predicted(tokens, features)[None], target.lm_head).detach()
        wanted = WARM.probs(logits)[0]
        if vocab is not None:
            wanted = torch.zeros(target.info.vocab_size).index_copy(0, vocab, wanted)
        law = tree.law_of_children(node)
        assert law is not None
        torch.testing.assert_close(law, wanted, atol=1e-4, rtol=0)


def test_drafting_draws_from_the_request_s_source_and_greedy_decoding_draws_nothing(
    target: HFTarget, head: EagleHead
) -> None:  # behaviour 14
    for law, draws in ((GREEDY, False), (WARM, True)):
        generator = torch.Generator().manual_seed(3)
        before = generator.get_state()
        state = EagleDrafter(head, target, BUSHY).open(1, 64)
        state.commit([observed(4, 1)])
        state.propose([Context([1, 2], law, GeneratorSource(generator), 9)])
        assert torch.equal(generator.get_state(), before) != draws


# --- numbers


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_perfect_chain_has_n_alpha_1_and_tau_steps_plus_1(
    target: HFTarget, next_logits: reference.NextLogits, steps: int
) -> None:  # behaviour 31
    stats = Stats()
    n = 1 + 5 * (steps + 1)
    answer(Session(target, Hinting(next_logits, TreeShape.chain(steps)), CONTEXT), PROMPT, n, stats=stats)
    assert stats.tau == steps + 1
    assert stats.n_alpha == (1.0,) * steps
    assert (stats.rounds, stats.drafted, stats.kept_drafts) == (5, 5 * steps, 5 * steps)
    assert stats.tried == stats.accepted == [5] * steps


def test_n_alpha_is_accepted_over_tried_at_each_step(target: HFTarget, next_logits: reference.NextLogits) -> None:
    """The third draft is wrong on purpose."""  # behaviour 31

    class ThirdWrong(Hinting):
        def tree(self, context: Context) -> DraftTree:
            right = super().tree(context)
            tokens = right.tokens.clone()
            if len(tokens) > 3:
                tokens[3] = (tokens[3] + 1) % 64
            return DraftTree(tokens, right.shape)

    stats = Stats()
    answer(Session(target, ThirdWrong(next_logits, TreeShape.chain(5)), CONTEXT), PROMPT, 1 + 4 * 3, stats=stats)
    # Every round emits two drafts and the recovered token; the last one has room for two drafts only.
    assert (stats.rounds, stats.tau) == (4, 3.0)
    assert stats.tried == [4, 4, 3] and stats.accepted == [4, 4, 0]
    assert stats.n_alpha == (1.0, 1.0, 0.0)


def test_n_alpha_is_for_chains_only_and_sums_add_up(target: HFTarget, next_logits: reference.NextLogits) -> None:
    chain, tree = Stats(), Stats()
    answer(Session(target, Hinting(next_logits, TreeShape.chain(3)), CONTEXT), PROMPT, 20, stats=chain)
    answer(Session(target, Hinting(next_logits, BUSHY), CONTEXT), PROMPT, 20, stats=tree)
    assert chain.n_alpha is not None and tree.n_alpha is None
    total = Stats()
    total.add(chain)
    total.add(tree)
    assert total.n_alpha is None
    assert total.new_tokens == 40 and total.first_tokens == 2 and total.rounds == chain.rounds + tree.rounds
    assert total.tau == pytest.approx(38 / total.rounds)
    assert total.tried[0] == total.rounds
    assert total.total_seconds == pytest.approx(chain.total_seconds + tree.total_seconds)


def test_time_of_the_consumer_is_not_counted(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def tick() -> float:
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr("eaglekit.engine.decode.time.perf_counter", tick)
    stats = Stats()
    pieces = Session(target, PlainDrafter(), CONTEXT).generate(
        PROMPT, law=GREEDY, source=GeneratorSource.seeded(0), stopper=Stopper(max_new_tokens=5), stats=stats
    )
    for _ in pieces:
        now[0] += 1000.0
    assert 0 < stats.total_seconds < 1
    assert all(v > 0 for v in stats.seconds.values())


def test_stats_of_nothing_are_zeros() -> None:
    stats = Stats()
    assert (stats.tau, stats.tokens_per_second, stats.decode_tokens_per_second, stats.n_alpha) == (0.0, 0.0, 0.0, ())


@pytest.mark.parametrize("make", [lambda t, h: PlainDrafter(), lambda t, h: EagleDrafter(h, t, BUSHY)])
def test_drafters_keep_to_the_protocol(
    target: HFTarget, head: EagleHead, make: Callable[[HFTarget, EagleHead], Drafter]
) -> None:
    drafter = make(target, head)
    state = drafter.open(1, 32)
    state.commit([observed(3, 1)])
    tree = state.propose([Context([1, 2, 3, 4], GREEDY, GeneratorSource.seeded(0), 5)])[0]
    assert tree.tokens[0] == 4 and tree.shape.num_draft_tokens <= drafter.max_draft_tokens
    root = state.propose([Context([1, 2, 3, 4], GREEDY, GeneratorSource.seeded(0), 0)])[0]
    assert root.shape.num_draft_tokens == 0 and root.tokens.tolist() == [4]
    state.truncate([1])


def test_an_outgrown_session_is_opened_anew_and_answers_as_a_fresh_one(
    target: HFTarget, head: EagleHead, next_logits: reference.NextLogits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eaglekit.engine.decode._FIRST_ROOM", 12)
    opened: list[int] = []
    drafter = EagleDrafter(head, target, TreeShape.chain(2))
    right = drafter.open
    monkeypatch.setattr(drafter, "open", lambda batch, room: (opened.append(room), right(batch, room))[1])
    session = Session(target, drafter, CONTEXT)
    prompt = list(PROMPT)
    for _ in range(4):
        got = ids_of(answer(session, prompt, 4))
        assert got == oracle(next_logits, prompt, 4)
        prompt += [*got, 7]
    assert opened == [12 + 3, 24 + 3, 48 + 3]  # each with slots for a tree of three nodes


@pytest.mark.parametrize("penalty", [1.0, 1.3], ids=["", "penalty"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_head_with_a_draft_vocabulary_drafts_from_it_alone(
    target: HFTarget, next_logits: reference.NextLogits, temperature: float, penalty: float
) -> None:
    vocab = [1, 5, 8, 13, 40]
    law = Law(SamplingParams(temperature), (RepetitionPenalty(penalty),) if penalty != 1 else ())
    state = EagleDrafter(tiny_head(target, 3, draft_vocab=vocab), target, BUSHY).open(1, 40)
    state.commit([observed(4, 1)])
    tree = state.propose([Context([1, 2, 3, 4, 5], law, GeneratorSource.seeded(0), 9)])[0]
    assert set(tree.tokens[1:].tolist()) <= set(vocab) and tree.shape.num_draft_tokens > 3
    if temperature:
        assert tree.draft_probs is not None and tree.draft_probs.shape[1] == target.info.vocab_size
        assert torch.allclose(tree.draft_probs[:, vocab].sum(-1), torch.ones(len(tree.draft_probs)))
    else:
        session = Session(target, EagleDrafter(tiny_head(target, 3, draft_vocab=vocab), target, BUSHY), CONTEXT)
        assert ids_of(answer(session, PROMPT, 20, law=law)) == oracle(next_logits, PROMPT, 20, law)


def test_a_long_prompt_is_read_by_the_head_in_parts_with_the_same_result(
    target: HFTarget, head: EagleHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draft() -> tuple[list[Tensor], DraftTree]:
        state = EagleDrafter(head, target, BUSHY).open(2, 60)
        state.commit([observed(17, 1), observed(5, 2)])
        trees = state.propose([Context([1, 2], GREEDY, GeneratorSource.seeded(0), 9)] * 2)
        return [*state.committed(0), *state.committed(1)], trees[1]

    whole, tree = draft()
    monkeypatch.setattr("eaglekit.drafters.eagle._CHUNK", 4)
    parts, same = draft()
    assert [c.shape[1] for c in parts[:2]] == [17, 17] and parts[-1].shape[1] == 5
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(whole, parts, strict=True))
    assert tree.tokens.tolist() == same.tokens.tolist()
