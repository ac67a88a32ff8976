"""Losslessness by exact enumeration: no sampling error, no threshold but rounding (behaviours 2 to 7 and 13)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from eaglekit.bench.lossless import deviation, output_law, plain_law, round_law, tiny_head
from eaglekit.core.random import GeneratorSource
from eaglekit.core.sampling import Law, RepetitionPenalty, SamplingParams
from eaglekit.core.stats import Stats
from eaglekit.core.tree import DraftTree, TreeShape
from eaglekit.core.verify import Verdict, residual, verify, verify_greedy, verify_sampling, without
from eaglekit.drafters.eagle import EagleDrafter
from eaglekit.engine.decode import Session
from eaglekit.engine.stopping import Stopper
from eaglekit.errors import InputError
from eaglekit.testing import TableTarget, every_outcome

TOLERANCE = 1e-5  # float32 laws: rounding is near 1e-7
PROMPT = [0, 1, 2]
TREES = {
    "chain": TreeShape.chain(2),
    "tree": TreeShape.from_choices([[0], [1], [0, 0]]),
    "second child goes deeper": TreeShape.from_choices([[0], [1], [1, 0]]),
    "three siblings": TreeShape.from_choices([[0], [1], [2]]),
}
EACH_TREE = pytest.mark.parametrize("shape", TREES.values(), ids=TREES.keys())
EACH_KIND = pytest.mark.parametrize("sampled", [True, False], ids=["drawn", "most probable"])


def assert_lossless(target: TableTarget, drafter: EagleDrafter, law: Law, depth: int = 3) -> None:
    """The joint law of `depth` tokens holds the laws of fewer."""
    ours = output_law(target, drafter, PROMPT, law, depth)
    assert abs(sum(ours.values()) - 1) < TOLERANCE
    assert deviation(ours, plain_law(target.next_logits, PROMPT, law, depth)) < TOLERANCE


# --- the engine with an EAGLE head


@EACH_KIND
@EACH_TREE
def test_law_of_1_2_and_3_tokens_equals_the_target_s(shape: TreeShape, sampled: bool) -> None:  # behaviour 2
    target = TableTarget(seed=1)
    drafter = EagleDrafter(tiny_head(target, 1), target, shape, sampled=sampled)
    assert_lossless(target, drafter, Law(SamplingParams(temperature=0.8)))


@EACH_KIND
def test_law_holds_for_a_head_that_is_sure_and_wrong(sampled: bool) -> None:  # behaviour 2
    target = TableTarget(seed=2)
    head = tiny_head(target, 2)
    with torch.no_grad():  # large weights make near one-hot draft laws, far from the target's
        for parameter in head.parameters():
            parameter.mul_(6.0)
    drafter = EagleDrafter(head, target, TREES["tree"], sampled=sampled)
    assert_lossless(target, drafter, Law(SamplingParams(temperature=1.0)))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.5, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.7),
        SamplingParams(temperature=1.2, min_p=0.4),
        SamplingParams(temperature=2.0, top_k=2, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_law_holds_with_tokens_dropped(params: SamplingParams) -> None:  # behaviours 2 and 12
    target = TableTarget(seed=3)
    for sampled in (True, False):
        drafter = EagleDrafter(tiny_head(target, 3), target, TREES["tree"], sampled=sampled)
        assert_lossless(target, drafter, Law(params), depth=2)


@EACH_KIND
def test_with_top_k_2_nothing_else_appears_also_behind_a_fully_accepted_path(sampled: bool) -> None:  # behaviour 3
    target = TableTarget(vocab_size=5, seed=4)
    law = Law(SamplingParams(temperature=0.5, top_k=2))
    full = 0.0
    for seed in range(3):
        drafter = EagleDrafter(tiny_head(target, seed), target, TreeShape.chain(2), sampled=sampled)
        for tokens, weight in round_law(target, drafter, PROMPT, law, 6).items():
            full += weight * (len(tokens) == 3)
            for i, token in enumerate(tokens):
                assert token in target.next_logits([*PROMPT, *tokens[:i]]).topk(2).indices.tolist()
        assert_lossless(target, drafter, law, depth=3)
    assert full > 0.01  # the case did happen


def ban_the_last_but_one(ids: Tensor, scores: Tensor) -> Tensor:
    """A custom processor that depends on the text so far."""
    return scores.scatter(-1, ids[:, -2:-1], -math.inf)


PROCESSORS: dict[str, Callable[[], list[Any]]] = {
    "repetition penalty": lambda: [RepetitionPenalty(1.5)],
    "custom n-gram ban": lambda: [ban_the_last_but_one],
    "no repeated bigram": lambda: [tf.NoRepeatNGramLogitsProcessor(2)],
    "sequence bias": lambda: [tf.SequenceBiasLogitsProcessor([[[2, 1], 2.0], [[2], -1.0]])],
    "minimum length": lambda: [tf.MinNewTokensLengthLogitsProcessor(3, 2, [0])],
    "two at once": lambda: [RepetitionPenalty(0.7), tf.NoRepeatNGramLogitsProcessor(2)],
}
EACH_PROCESSOR = pytest.mark.parametrize("processors", PROCESSORS.values(), ids=PROCESSORS.keys())


@EACH_KIND
@EACH_PROCESSOR
def test_law_holds_with_processors_that_depend_on_the_prefix(
    processors: Callable[[], list[Any]], sampled: bool
) -> None:  # behaviour 13
    target = TableTarget(seed=5)
    params = SamplingParams(temperature=0.9)
    law = Law(params, tuple(processors()))
    with_them, without_them = (plain_law(target.next_logits, PROMPT, x, 2) for x in (law, Law(params)))
    assert deviation(with_them, without_them) > 0.01
    for name in ("chain", "second child goes deeper"):
        drafter = EagleDrafter(tiny_head(target, 5), target, TREES[name], sampled=sampled)
        assert_lossless(target, drafter, law, depth=2)


@EACH_PROCESSOR
def test_greedy_ids_hold_with_processors_that_depend_on_the_prefix(
    processors: Callable[[], list[Any]],
) -> None:  # behaviour 13
    kept = 0
    for seed in range(6):
        target = TableTarget(vocab_size=4, seed=seed)
        law = Law(SamplingParams(), tuple(processors()))
        drafter = EagleDrafter(tiny_head(target, seed), target, TreeShape.from_choices([[0], [1], [0, 0], [1, 0]]))
        session, stats = Session(target, drafter, 64), Stats()
        stopper = Stopper(max_new_tokens=6)
        pieces = session.generate(PROMPT, law=law, source=Forbidden(), stopper=stopper, stats=stats)
        got = [t for piece in pieces for t in piece.token_ids]
        ids = list(PROMPT)
        while len(ids) < len(PROMPT) + 6:
            ids.append(int(law.argmax(target.next_logits(ids)[None], [torch.tensor(ids)])))
        assert got == ids[len(PROMPT) :]
        kept += stats.kept_drafts
    assert kept > 0


class Forbidden:
    """Greedy decoding makes no random decision."""

    def accept(self, probability: float) -> bool:
        raise AssertionError("a random decision")

    def draw(self, probs: Tensor) -> int:
        raise AssertionError("a random decision")

    def draw_distinct(self, probs: Tensor, count: int) -> Tensor:
        raise AssertionError("a random decision")


@pytest.mark.parametrize("eos", [(), (1,)], ids=["no eos", "eos"])
def test_the_law_of_whole_answers_holds_up_to_limit_and_end_of_text(eos: tuple[int, ...]) -> None:  # 2, 8, 9
    """Near the limit the tree is cut; end-of-text may stand in the middle of a path."""
    target = TableTarget(seed=6)
    law = Law(SamplingParams(temperature=0.9, top_k=2))
    drafter = EagleDrafter(tiny_head(target, 6), target, TreeShape.chain(2))

    def run(source: Any) -> tuple[int, ...]:
        session, stopper = Session(target, drafter, 64), Stopper(max_new_tokens=4, eos_ids=eos)
        pieces = session.generate(PROMPT, law=law, source=source, stopper=stopper, stats=Stats())
        return tuple(t for piece in pieces for t in piece.token_ids)

    ours: dict[tuple[int, ...], float] = {}
    for tokens, weight in every_outcome(run):
        ours[tokens] = ours.get(tokens, 0.0) + weight
    wanted: dict[tuple[int, ...], float] = {}
    for tokens, p in plain_law(target.next_logits, PROMPT, law, 4).items():
        end = next((i + 1 for i, t in enumerate(tokens) if t in eos), 4)
        wanted[tokens[:end]] = wanted.get(tokens[:end], 0.0) + p
    assert deviation(ours, wanted) < TOLERANCE
    assert not eos or any(len(k) < 4 for k in ours)


# --- verification alone, with laws that are chosen here

Path = tuple[int, ...]


def fixed_law(seed: int, sharpness: float = 1.5, vocab: int = 3) -> Callable[[Path], Tensor]:
    """A law for every path, a function of the path alone."""

    def law(path: Path) -> Tensor:
        number = seed
        for token in path:
            number = number * 31 + token + 1
        return (torch.randn(vocab, generator=torch.Generator().manual_seed(number)) * sharpness).softmax(-1)

    return law


def draft(shape: TreeShape, q: Callable[[Path], Tensor], source: Any) -> DraftTree:
    """A tree whose children are drawn from `q`; tokens stand in for a prefix, so the root's is 0."""
    tokens, paths = [0] * len(shape.parents), {0: ()}
    rows: list[Tensor] = []
    row_of = [-1] * len(tokens)
    for node, children in enumerate(shape.children):
        if children:
            row_of[node] = len(rows)
            rows.append(q(paths[node]))
            drawn = source.draw_distinct(rows[-1][None], len(children))[0].tolist()
            assert -1 not in drawn
            for child, token in zip(children, drawn, strict=True):
                tokens[child], paths[child] = token, (*paths[node], token)
    return DraftTree(torch.tensor(tokens), shape, torch.stack(rows), tuple(row_of))


def at(p: Callable[[Path], Tensor], tree: DraftTree) -> Callable[[int], Tensor]:
    tokens = tree.tokens.tolist()
    return lambda node: p(tuple(tokens[n] for n in tree.shape.path(node)[1:]))


def emitted_law(
    p: Callable[[Path], Tensor], run: Callable[[Any], Verdict], depth: int
) -> tuple[dict[Path, float], list[tuple[Verdict, float]]]:
    """The law of the first `depth` tokens: those of one round, and plain sampling behind them."""
    law: dict[Path, float] = {}
    verdicts = []
    for verdict, weight in every_outcome(run):
        verdicts.append((verdict, weight))
        whole = {verdict.tokens[:depth]: weight}
        while any(len(k) < depth for k in whole):
            whole = {(*k, t): w * x for k, w in whole.items() for t, x in enumerate(p(k).tolist()) if x > 0}
        for k, w in whole.items():
            law[k] = law.get(k, 0.0) + w
    return law, verdicts


def stepwise_law(p: Callable[[Path], Tensor], depth: int) -> dict[Path, float]:
    whole: dict[Path, float] = {(): 1.0}
    for _ in range(depth):
        whole = {(*k, t): w * x for k, w in whole.items() for t, x in enumerate(p(k).tolist()) if x > 0}
    return whole


SHAPES = {
    "chain": TreeShape.chain(3),
    "three siblings": TreeShape.from_choices([[0], [1], [2]]),
    "binary": TreeShape.from_choices([[0], [1], [0, 0], [0, 1], [1, 0]]),
}


@pytest.mark.parametrize("sharpness", [0.3, 2.0, 8.0], ids=["flat", "usual", "sharp"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_verification_gives_the_target_s_law_for_any_drafts(shape: TreeShape, sharpness: float) -> None:  # 2, 6
    p, q = fixed_law(1), fixed_law(2, sharpness)
    law, _ = emitted_law(p, lambda s: verify_sampling(tree := draft(shape, q, s), at(p, tree), s), 2)
    assert deviation(law, stepwise_law(p, 2)) < TOLERANCE


def test_verification_gives_the_target_s_law_where_supports_differ() -> None:  # behaviours 2 and 5
    def p(path: Path) -> Tensor:
        return torch.tensor([0.0, 0.6, 0.4, 0.0]) if len(path) % 2 == 0 else torch.tensor([0.1, 0.0, 0.0, 0.9])

    def q(path: Path) -> Tensor:
        return torch.tensor([0.5, 0.3, 0.0, 0.2])

    for shape in (TreeShape.chain(2), TreeShape.from_choices([[0], [1], [0, 0]])):

        def run(source: Any, shape: TreeShape = shape) -> Verdict:
            tree = draft(shape, q, source)
            return verify_sampling(tree, at(p, tree), source)

        law, _ = emitted_law(p, run, 2)
        assert deviation(law, stepwise_law(p, 2)) < TOLERANCE
        assert all(first in (1, 2) and second in (0, 3) for first, second in law)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(
    "p",
    [fixed_law(3), lambda path: torch.tensor([0.0, 1.0, 0.0]), lambda path: torch.tensor([0.5, 0.5, 0.0])],
    ids=["random", "one token", "two tokens"],
)
def test_where_drafts_follow_the_target_s_law_everything_is_accepted(  # behaviour 5
    p: Callable[[Path], Tensor], shape: TreeShape
) -> None:
    class Padded:
        """Draws like the source it wraps, and fills up with token 2 where nothing is left."""

        def __init__(self, source: Any) -> None:
            self.source = source

        def draw_distinct(self, probs: Tensor, count: int) -> Tensor:
            drawn = self.source.draw_distinct(probs, count)
            return torch.where(drawn < 0, 2, drawn)

    def run(source: Any) -> Verdict:
        tree = draft(shape, p, Padded(source))
        return verify_sampling(tree, at(p, tree), source)

    law, verdicts = emitted_law(p, run, 2)
    assert deviation(law, stepwise_law(p, 2)) < TOLERANCE
    for verdict, _ in verdicts:
        assert verdict.bonus and verdict.num_accepted == shape.depths[verdict.nodes[-1]] >= 1


def test_zero_residual_mass_is_never_nan() -> None:  # behaviour 5
    p = torch.tensor([0.25, 0.75, 0.0])
    assert torch.equal(residual(p, p), p)
    assert torch.equal(residual(p, torch.tensor([0.5, 0.8, 0.1])), p)
    one = torch.tensor([0.0, 1.0, 0.0])
    assert torch.equal(without(one, 1), one)
    assert without(p, 1).tolist() == [1.0, 0.0, 0.0]
    torch.testing.assert_close(residual(p, torch.tensor([0.5, 0.0, 0.5])), torch.tensor([0.0, 1.0, 0.0]))
    assert torch.equal(p, torch.tensor([0.25, 0.75, 0.0]))  # nothing is written in place


class Scripted:
    """Answers as told, and keeps what it was asked."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)
        self.asked: list[float] = []
        self.drawn_from: Tensor | None = None

    def accept(self, probability: float) -> bool:
        self.asked.append(probability)
        return self.answers.pop(0)

    def draw(self, probs: Tensor) -> int:
        self.drawn_from = probs
        return int(probs.argmax())

    def draw_distinct(self, probs: Tensor, count: int) -> Tensor:
        raise AssertionError("verification draws no drafts")


def test_the_bonus_token_comes_from_the_accepted_child_s_own_law() -> None:  # behaviour 4
    """Child 1 is rejected and child 2 accepted at the deepest level, in a row alone and in a row of a batch."""
    target = TableTarget(vocab_size=4, seed=7)
    law = Law(SamplingParams(temperature=1.0))
    shape = TREES["second child goes deeper"].limited(1)
    tree = DraftTree(torch.tensor([2, 1, 3]), shape, torch.tensor([[0.1, 0.5, 0.2, 0.2]]), (0, -1, -1))
    other = DraftTree(torch.tensor([0, 1, 2, 3]), TreeShape.chain(3))
    for batch in (1, 2):
        state = target.open(batch, 64)
        state.prefill([torch.tensor(PROMPT[:2])] * batch)
        out = state.forward_tree([tree] if batch == 1 else [other, tree])
        source = Scripted(False, True)
        verdict = verify(tree, out.logits[batch - 1], law, PROMPT, source)
        assert verdict.nodes == (0, 2) and verdict.bonus and verdict.num_accepted == 1
        own = target.next_logits([*PROMPT, 3]).softmax(-1)
        assert source.drawn_from is not None
        torch.testing.assert_close(source.drawn_from, own.double())
        assert verdict.tokens == (3, int(own.argmax()))


def test_later_siblings_are_scored_against_what_is_left_of_both_laws() -> None:  # behaviours 4 and 6
    p, q = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.6, 0.3, 0.1])
    tree = DraftTree(torch.tensor([0, 0, 1]), TreeShape.from_choices([[0], [1]]), q[None], (0, -1, -1))
    source = Scripted(False, False)
    verdict = verify_sampling(tree, lambda node: p, source)
    # p' = (0, .2, .2) / .4 and q' = (0, .3, .1) / .4: child 2 has .5 / .75; then p'' = (0, 0, .5 - .25) / .25
    assert source.asked == pytest.approx([0.2 / 0.6, 0.5 / 0.75])
    assert source.drawn_from is not None
    torch.testing.assert_close(source.drawn_from, torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))
    assert verdict == Verdict((0,), (2,), bonus=False)


def test_a_deterministic_draft_has_probability_one() -> None:  # behaviour 7
    """Scored with its softmax, the target's .5/.3/.2 would become .5/.5/0 or worse."""
    p, softmax = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.6, 0.2, 0.2])

    def law_of(tree: DraftTree) -> list[float]:
        law = emitted_law(lambda _: p, lambda s: verify_sampling(tree, lambda _: p, s), 1)[0]
        return [law.get((t,), 0.0) for t in range(3)]

    for tokens in ([0], [1], [2], [0, 1], [2, 0], [0, 1, 2], [2, 1, 0]):
        shape = TreeShape((-1, *[0] * len(tokens)))
        assert law_of(DraftTree(torch.tensor([0, *tokens]), shape)) == pytest.approx([0.5, 0.3, 0.2], abs=1e-6)
    wrong = law_of(DraftTree(torch.tensor([0, 0]), TreeShape.chain(1), softmax[None], (0, -1)))
    assert wrong[2] == 0 and abs(wrong[0] - 0.5) > 0.1


def test_a_draft_that_occurs_twice_among_siblings_does_no_harm() -> None:
    """No drafter proposes that, but a custom one may."""
    p = torch.tensor([0.5, 0.3, 0.2])
    tree = DraftTree(torch.tensor([0, 1, 1]), TreeShape.from_choices([[0], [1]]))
    law = emitted_law(lambda _: p, lambda s: verify_sampling(tree, lambda _: p, s), 1)[0]
    assert deviation(law, {(0,): 0.5, (1,): 0.3, (2,): 0.2}) < TOLERANCE


# --- greedy


def greedy(tokens: Sequence[int], shape: TreeShape, choices: Sequence[int]) -> Verdict:
    return verify_greedy(DraftTree(torch.tensor(tokens), shape), list(choices).__getitem__)


def test_greedy_follows_the_argmax_down_the_tree() -> None:  # behaviour 1
    shape = TreeShape.from_choices([[0], [1], [0, 0], [1, 0]])  # nodes: 1, 2 below the root; 3 below 1; 4 below 2
    tokens = [9, 5, 6, 7, 8]
    assert greedy(tokens, shape, [4, 0, 0, 0, 0]) == Verdict((0,), (4,), bonus=False)
    assert greedy(tokens, shape, [6, 0, 8, 0, 3]) == Verdict((0, 2, 4), (6, 8, 3), bonus=True)
    assert greedy(tokens, shape, [5, 8, 0, 0, 0]) == Verdict((0, 1), (5, 8), bonus=False)  # 8 stands elsewhere
    assert greedy([9], TreeShape.root_only(), [4]) == Verdict((0,), (4,), bonus=True)


def test_greedy_asks_only_for_nodes_that_it_reaches() -> None:
    asked: list[int] = []

    def choice(node: int) -> int:
        asked.append(node)
        return 6

    verify_greedy(DraftTree(torch.tensor([9, 5, 6, 7]), TreeShape((-1, 0, 0, 1))), choice)
    assert asked == [0, 2]


def test_prefix_of_a_node_is_the_text_up_to_and_including_it() -> None:  # behaviour 13
    seen: list[list[int]] = []

    def record(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids[0].tolist())
        return scores

    tree = DraftTree(torch.tensor([2, 1, 3, 0]), TreeShape((-1, 0, 0, 2)))
    logits = torch.eye(4)[[3, 0, 0, 1]]  # behind the root 3 (node 2), there 0 (node 3), there 1
    for temperature in (0.0, 0.001):
        seen.clear()
        law = Law(SamplingParams(temperature=temperature), (record,))
        verdict = verify(tree, logits, law, [0, 1, 2], Scripted(False, True, True))
        assert verdict.tokens == (3, 0, 1)
        assert seen == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 0]]


def test_processors_that_ban_every_token_are_an_error() -> None:  # not a NaN
    tree = DraftTree(torch.tensor([0, 1]), TreeShape.chain(1))
    law = Law(SamplingParams(temperature=1.0), (lambda ids, scores: torch.full_like(scores, -math.inf),))
    with pytest.raises(InputError, match="no token"):
        verify(tree, torch.zeros(2, 3), law, [0], GeneratorSource.seeded(0))
