"""Is it lossless, here, with this model? Evidence, line by line.

    identity   greedy ids of EAGLE equal plain decoding's, and plain decoding's equal full recomputation
    law        above temperature 0: the exact law of the decoding loop on a target of three tokens, by enumeration of
               every random outcome; and on the loaded model a G-test of EAGLE's tokens against plain sampling's
    purity     after random rounds, both caches hold what a fresh prefill of the same tokens gives

Enumeration has no sampling error: a deviation above 1e-5 (rounding is near 1e-7) is a bug. The G-tests use fixed
seeds and fail below p = 1e-4, so that a correct program fails one run of a dozen tests in about a thousand seeds.
Their power: 300 draws find a total variation distance of 0.15 from a law of three tokens with probability above 0.99.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eaglekit.api import Model
from eaglekit.core.random import GeneratorSource
from eaglekit.core.sampling import Law, RepetitionPenalty, SamplingParams
from eaglekit.core.stats import Stats
from eaglekit.core.tree import DraftTree, TreeShape
from eaglekit.drafters.auto import AutoState
from eaglekit.drafters.eagle import EagleDrafter, EagleState
from eaglekit.drafters.prompt_lookup import GraftedDrafter, GraftedState
from eaglekit.engine import reference
from eaglekit.engine.decode import Session
from eaglekit.engine.drafter import Drafter, PlainDrafter
from eaglekit.engine.stopping import Stopper
from eaglekit.errors import InputError
from eaglekit.models.fast import FastTarget
from eaglekit.models.head import EagleHead, HeadConfig
from eaglekit.models.target import Target
from eaglekit.testing import TableTarget, every_outcome

PROMPTS: tuple[str, ...] = (
    "Explain why the sky is blue.",
    "Write a short poem about the sea.",
    "List three uses of a paper clip.",
    "def fibonacci(n):",
    "What is 17 times 23? Think step by step.",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "Translate 'good morning' into French, German and Spanish.",
    "Give me a recipe for pancakes.",
)
ENUMERATION_TOLERANCE = 1e-5
P_VALUE_FLOOR = 1e-4


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    passed: bool
    detail: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckOptions:
    """How much evidence to gather.

    Attributes:
        identity_prompts: Prompts decoded greedily.
        identity_tokens: New tokens of each.
        recomputed_tokens: Tokens of the first prompt compared with full recomputation.
        law_prompts: Prompts of the G-tests.
        draws: Draws per prompt.
        purity_rounds: Random rounds before caches are compared.
        trees: Trees tried on the loaded model.
        seed: Decides everything random.
    """

    identity_prompts: int = 8
    identity_tokens: int = 96
    recomputed_tokens: int = 48
    law_prompts: int = 3
    draws: int = 300
    purity_rounds: int = 12
    trees: tuple[str, ...] = ("paper", "chain:5", "chain:2+lookup:6")
    seed: int = 0

    @staticmethod
    def quick() -> CheckOptions:
        """Under a minute on a small model."""
        return CheckOptions(
            identity_prompts=2,
            identity_tokens=40,
            recomputed_tokens=20,
            law_prompts=1,
            draws=40,
            purity_rounds=4,
        )


def check(model: Model, options: CheckOptions | None = None) -> Iterator[Finding]:
    """Gather evidence, and yield it as it comes.

    Raises:
        InputError: the model has no draft head, so that there is nothing to check.
    """
    options = options or CheckOptions()
    if model.head is None:
        raise InputError("check: this target has no draft head, so nothing can be checked; pass --head DIR")
    yield from check_enumeration(options.seed)
    yield from check_identity(model, options)
    yield from check_law(model, options)
    yield from check_purity(model, options)
    if isinstance(model.target, FastTarget):
        yield check_rows(model, options)


# --- exact laws on a tiny target


def round_law(
    target: Target, drafter: Drafter, ids: Sequence[int], law: Law, max_new_tokens: int
) -> dict[tuple[int, ...], float]:
    """The exact law of the tokens that one round emits behind `ids` (its last token is the root)."""

    def run(source: Any) -> tuple[int, ...]:
        session = Session(target, drafter, target.info.max_length)
        stopper = Stopper(max_new_tokens=max_new_tokens + 1)
        pieces = session.generate(ids[:-1], law=law, source=source, stopper=stopper, stats=Stats())
        next(pieces)
        return next(pieces).token_ids

    outcomes: Counter[tuple[int, ...]] = Counter()
    for tokens, weight in every_outcome(run, forced=[ids[-1]]):
        outcomes[tokens] += weight  # type: ignore[assignment]
    return dict(outcomes)


def output_law(
    target: Target, drafter: Drafter, ids: Sequence[int], law: Law, depth: int
) -> dict[tuple[int, ...], float]:
    """The exact law of the next `depth` tokens behind `ids`, round after round."""
    if depth == 0:
        return {(): 1.0}
    total: dict[tuple[int, ...], float] = {}
    for tokens, weight in round_law(target, drafter, ids, law, max_new_tokens=6).items():
        rest = output_law(target, drafter, [*ids, *tokens], law, max(0, depth - len(tokens)))
        for more, w in rest.items():
            key = (*tokens, *more)[:depth]
            total[key] = total.get(key, 0.0) + weight * w
    return total


def plain_law(
    next_logits: reference.NextLogits, ids: Sequence[int], law: Law, depth: int
) -> dict[tuple[int, ...], float]:
    """The law of the next `depth` tokens by step-wise decoding."""
    if depth == 0:
        return {(): 1.0}
    total: dict[tuple[int, ...], float] = {}
    for token, p in enumerate(reference.next_probs(next_logits, ids, law).tolist()):
        if p > 0:
            for more, w in plain_law(next_logits, [*ids, token], law, depth - 1).items():
                total[(token, *more)] = p * w
    return total


def deviation(a: Mapping[tuple[int, ...], float], b: Mapping[tuple[int, ...], float]) -> float:
    """Largest difference of two laws."""
    return max(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in {*a, *b})


def tiny_head(target: Target, seed: int, draft_vocab: Sequence[int] | None = None, **changes: Any) -> EagleHead:
    """A random head for a tiny target, with `changes` in its configuration.

    It is a bad drafter, which must cost speed and nothing else.
    """
    info = target.info
    config = HeadConfig(
        hidden_size=info.hidden_size,
        embedding_size=info.embedding_size,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=info.hidden_size // 2,
        intermediate_size=2 * info.hidden_size,
        vocab_size=info.vocab_size,
        **changes,
    )
    head = EagleHead(config, draft_vocab=None if draft_vocab is None else torch.tensor(draft_vocab))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return head.eval()


def check_enumeration(seed: int) -> Iterator[Finding]:
    """The exact law of 1, 2 and 3 tokens, for kinds of trees, drafts and sampling."""
    target = TableTarget(vocab_size=3, seed=seed)
    full, partial = tiny_head(target, seed), tiny_head(target, seed, draft_vocab=[0, 2])
    warm = SamplingParams(temperature=0.7)
    penalised = SamplingParams(temperature=0.9, repetition_penalty=1.4)
    branching = TreeShape.from_choices([[0], [1], [0, 0]])
    siblings, second = TreeShape.from_choices([[0], [1], [2]]), TreeShape.from_choices([[0], [1], [1, 0]])
    cases: list[tuple[str, Drafter, SamplingParams]] = [
        ("chain:2", EagleDrafter(full, target, TreeShape.chain(2)), SamplingParams(temperature=1.0)),
        ("chain:2, cold", EagleDrafter(full, target, TreeShape.chain(2)), SamplingParams(temperature=0.4, top_k=2)),
        ("tree", EagleDrafter(full, target, branching), warm),
        ("tree, three siblings", EagleDrafter(full, target, siblings), SamplingParams(temperature=1.3)),
        ("tree, top-p", EagleDrafter(full, target, branching), SamplingParams(temperature=1.0, top_p=0.8)),
        ("tree, penalty", EagleDrafter(full, target, second), penalised),
        ("tree, most probable drafts", EagleDrafter(full, target, branching, sampled=False), warm),
        ("tree, draft vocabulary", EagleDrafter(partial, target, branching), warm),
        ("tree, lookup grafted", GraftedDrafter(EagleDrafter(full, target, branching), 3), warm),
        ("lookup alone", GraftedDrafter(PlainDrafter(), 3), warm),
    ]
    for name, drafter, params in cases:
        processors = (RepetitionPenalty(params.repetition_penalty),) if params.repetition_penalty != 1 else ()
        law = Law(params, processors)
        ids = [0, 1, 2, 0, 1] if isinstance(drafter, GraftedDrafter) else [0, 1, 2]  # something to look up
        ours = output_law(target, drafter, ids, law, 3)
        plain = plain_law(target.next_logits, ids, law, 3)
        worst = max(deviation(_marginal(ours, depth), _marginal(plain, depth)) for depth in (1, 2, 3))
        yield Finding(
            f"law, exact: {name}",
            worst < ENUMERATION_TOLERANCE,
            f"1, 2 and 3 tokens, every outcome: largest deviation {worst:.1e}",
            {"deviation": worst, "tolerance": ENUMERATION_TOLERANCE},
        )


# --- the loaded model


def fresh_logits(target: Target) -> reference.NextLogits:
    """Logits by full recomputation, remembered by prefix."""
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def next_logits(ids: Sequence[int]) -> torch.Tensor:
        key = tuple(ids)
        if key not in known:
            state = target.open(1, len(key) + 1)
            known[key] = state.prefill([torch.tensor(key)]).logits[0, -1]
        return known[key]

    return next_logits


def _encoded(model: Model, count: int) -> list[list[int]]:
    """Token ids of `count` prompts; without a tokenizer, random ones."""
    if model.tokenizer is not None:
        return [model.encode(PROMPTS[i % len(PROMPTS)]) for i in range(count)]
    generator = torch.Generator().manual_seed(1)
    size = model.target.info.vocab_size
    return [torch.randint(size, (6,), generator=generator).tolist() for _ in range(count)]


def check_identity(model: Model, options: CheckOptions) -> Iterator[Finding]:
    """Greedy ids, up to the first difference."""
    prompts = _encoded(model, options.identity_prompts)
    tokens = options.identity_tokens
    next_logits = fresh_logits(model.target)
    plain = [model.generate(p, max_new_tokens=tokens, method="plain").token_ids for p in prompts]
    law = model.law(len(prompts[0]))
    stopper = Stopper(max_new_tokens=options.recomputed_tokens, eos_ids=model.defaults.eos_ids)
    source = GeneratorSource.seeded(options.seed)
    oracle = [
        t
        for piece in reference.decode(next_logits, prompts[0], law=law, source=source, stopper=stopper)
        for t in piece.token_ids
    ]
    yield _compare(
        "identity: plain against full recomputation",
        model,
        [(prompts[0], oracle, plain[0][: len(oracle)])],
        next_logits,
    )
    for name, tree in (("auto", None), *((f"EAGLE ({tree})", tree) for tree in options.trees)):
        runs = [model.generate(p, max_new_tokens=tokens, tree=tree).token_ids for p in prompts]
        yield _compare(
            f"identity: {name} against plain",
            model,
            list(zip(prompts, plain, runs, strict=True)),
            next_logits,
        )


def _compare(
    name: str,
    model: Model,
    runs: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]],
    next_logits: reference.NextLogits,
) -> Finding:
    """A finding on (prompt, expected, got) triples: equal, a near tie, or different."""
    tolerance = near_tie(model.target.info.dtype)
    total = sum(len(expected) for _, expected, _ in runs)
    ties, passed, details = 0, True, []
    for number, (prompt, expected, got) in enumerate(runs):
        at = first_difference(expected, got)
        if at is None:
            continue
        gap = best_gap(model, prompt, expected[:at], next_logits)
        ties += gap < tolerance
        passed &= gap < tolerance
        kind = "near tie" if gap < tolerance else "DIFFERENT"
        details.append(
            f"prompt {number}, token {at}: {expected[at : at + 1]} against {got[at : at + 1]}, "
            f"best two logits {gap:.2g} apart ({kind})"
        )
    summary = f"{len(runs) - len(details)} of {len(runs)} prompts identical, {total} tokens"
    return Finding(
        name,
        passed,
        "; ".join([summary, *details]),
        {"prompts": len(runs), "tokens": total, "identical": len(runs) - len(details), "near_ties": ties},
    )


def best_gap(model: Model, prompt: Sequence[int], answer: Sequence[int], next_logits: reference.NextLogits) -> float:
    """How far apart the two best tokens behind an answer's beginning are, in the scores that greedy compares."""
    ids = [*prompt, *answer]
    scores = model.law(len(prompt)).scores(next_logits(ids)[None], [torch.tensor(ids)])
    best = scores.float().topk(2).values[0]
    return float(best[0] - best[1])


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first difference, or None."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def near_tie(dtype: torch.dtype) -> float:
    """A gap of logits that rounding can turn over: logits are tens, and sums of many terms come in another order."""
    return 2e4 * torch.finfo(dtype).eps if dtype == torch.float32 else 64 * torch.finfo(dtype).eps


def check_law(model: Model, options: CheckOptions) -> Iterator[Finding]:
    """EAGLE's tokens against plain sampling's, by G-tests on the joint law of the first 1, 2 and 3 tokens."""
    params = SamplingParams(temperature=1.0, top_k=3)
    for number, prompt in enumerate(_encoded(model, options.law_prompts)):
        next_logits = fresh_logits(model.target)
        law = Law(params)
        exact = plain_law(next_logits, prompt, law, 3)
        tree = options.trees[number % len(options.trees)]
        drafter = model.drafter("eagle", tree)
        session = Session(model.target, drafter, len(prompt) + 16)
        plain_source = GeneratorSource.seeded(options.seed + 2 * number)
        source = GeneratorSource.seeded(options.seed + 2 * number + 1)
        ours: Counter[tuple[int, ...]] = Counter()
        plain: Counter[tuple[int, ...]] = Counter()
        for _ in range(options.draws):
            ours[_draw(session, prompt, law, source)] += 1
        for _ in range(options.draws):
            pieces = reference.decode(
                next_logits, prompt, law=law, source=plain_source, stopper=Stopper(max_new_tokens=3)
            )
            plain[tuple(t for p in pieces for t in p.token_ids)] += 1
        for depth in (1, 2, 3):
            g, freedom = g_test(_marginal(ours, depth), _marginal(plain, depth))
            g1, freedom1 = g_test_law(_marginal(ours, depth), _marginal(exact, depth), options.draws)
            p, p1 = chi2_tail(g, freedom), chi2_tail(g1, freedom1)
            yield Finding(
                f"law, sampled: prompt {number} ({tree}), first {depth} token{'s' * (depth > 1)}",
                min(p, p1) > P_VALUE_FLOOR,
                f"{options.draws} draws: against plain sampling's frequencies G={g:.1f}, df={freedom}, p={p:.3f}; "
                f"against its law G={g1:.1f}, df={freedom1}, p={p1:.3f}",
                {"draws": options.draws, "g": g, "df": freedom, "p": p, "g_law": g1, "df_law": freedom1, "p_law": p1},
            )


def _draw(session: Session, prompt: Sequence[int], law: Law, source: GeneratorSource) -> tuple[int, ...]:
    """Three tokens of an answer whose limit is far enough for whole trees."""
    stopper = Stopper(max_new_tokens=min(12, session.max_length - len(prompt)))
    tokens: list[int] = []
    pieces = session.generate(prompt, law=law, source=source, stopper=stopper, stats=Stats())
    while len(tokens) < 3:
        tokens.extend(next(pieces).token_ids)
    return tuple(tokens[:3])


def _marginal(counts: Mapping[tuple[int, ...], Any], depth: int) -> dict[tuple[int, ...], float]:
    out: dict[tuple[int, ...], float] = {}
    for key, n in counts.items():
        out[key[:depth]] = out.get(key[:depth], 0) + n
    return out


def g_test(a: Mapping[tuple[int, ...], float], b: Mapping[tuple[int, ...], float]) -> tuple[float, int]:
    """Two-sample G statistic and degrees of freedom; outcomes seen fewer than 10 times in all are pooled."""
    pairs = _pooled([(a.get(k, 0.0), b.get(k, 0.0)) for k in {*a, *b}], lambda x: x[0] + x[1] < 10)
    na, nb = sum(x for x, _ in pairs), sum(y for _, y in pairs)
    g = 0.0
    for x, y in pairs:
        for observed, n in ((x, na), (y, nb)):
            if observed > 0:
                g += 2 * observed * math.log(observed * (na + nb) / (n * (x + y)))
    return g, len(pairs) - 1


def g_test_law(
    counts: Mapping[tuple[int, ...], float], law: Mapping[tuple[int, ...], float], draws: int
) -> tuple[float, int]:
    """One-sample G statistic against a known law; outcomes expected fewer than 5 times are pooled."""
    if any(k not in law for k in counts):
        return math.inf, 1
    pairs = _pooled([(counts.get(k, 0.0), p * draws) for k, p in law.items()], lambda x: x[1] < 5)
    return sum(2 * n * math.log(n / e) for n, e in pairs if n > 0), len(pairs) - 1


def _pooled(
    pairs: Sequence[tuple[float, float]], rare: Callable[[tuple[float, float]], bool]
) -> list[tuple[float, float]]:
    kept = [p for p in pairs if not rare(p)]
    rest = [p for p in pairs if rare(p)]
    return [*kept, (sum(x for x, _ in rest), sum(y for _, y in rest))] if rest else kept


def chi2_tail(g: float, freedom: int) -> float:
    """Probability that a chi-squared variable exceeds `g`."""
    if freedom < 1:
        return 1.0
    if math.isinf(g):
        return 0.0
    half = torch.tensor([freedom / 2, max(0.0, g) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def check_purity(model: Model, options: CheckOptions) -> Iterator[Finding]:
    """After random rounds, caches against those of a fresh prefill."""
    prompt = _encoded(model, 1)[0]
    law = Law(SamplingParams(temperature=1.0))
    for tree in options.trees:
        drafter = model.drafter("eagle", tree)
        room = len(prompt) + (options.purity_rounds + 1) * (drafter.max_draft_tokens + 1)
        session = Session(model.target, drafter, min(room, model.target.info.max_length))
        source = GeneratorSource.seeded(options.seed)
        stopper = Stopper(max_new_tokens=session.max_length - len(prompt))
        pieces = session.generate(prompt, law=law, source=source, stopper=stopper, stats=Stats())
        for _ in range(options.purity_rounds + 1):
            next(pieces)
        ids = list(session.ids)
        fresh = Session(model.target, drafter, session.max_length)
        fresh.restore(ids)
        target_gap = (probe(session) - probe(fresh)).abs().max().item()
        head_gap = head_difference(session, fresh)
        tolerance = purity_tolerance(model.target.info.dtype)
        yield Finding(
            f"purity: {tree}",
            max(target_gap, head_gap) < tolerance,
            f"{options.purity_rounds} random rounds, {len(ids)} tokens: target's logits differ by {target_gap:.1e}, "
            f"head's cache by {head_gap:.1e} (tolerance {tolerance:.0e})",
            {"target": target_gap, "head": head_gap, "tolerance": tolerance},
        )


def check_rows(model: Model, options: CheckOptions) -> Finding:
    """Every node of a tree against the same token read alone, behind its path: the very same logits."""
    prompt = torch.tensor(_encoded(model, 1)[0])
    shape, random = TreeShape.paper(), torch.Generator().manual_seed(options.seed)
    tokens = torch.randint(0, model.target.info.vocab_size, (len(shape.parents),), generator=random)
    whole, alone = (model.target.open(1, len(prompt) + len(tokens)) for _ in range(2))
    for state in (whole, alone):
        state.prefill([prompt])
    logits, equal = whole.forward_tree([DraftTree(tokens, shape)]).logits[0], 0
    for path in shape.paths:
        for node in path:
            row = alone.forward_tree([DraftTree.root_only(int(tokens[node]))]).logits[0, 0]
            equal += torch.equal(row, logits[node])
            alone.commit([[0]])
        alone.truncate([len(prompt)])
    total = sum(map(len, shape.paths))
    return Finding(
        "rows: each token alone against in a tree",
        equal == total,
        f"{equal} of {total} logits bit for bit the same, weights {getattr(model.target, 'weights', 'stock')}",
        {"equal": equal, "of": total},
    )


def purity_tolerance(dtype: torch.dtype) -> float:
    """Rounding in another order of summation, on logits and keys of some tens."""
    return 2e-3 if dtype == torch.float32 else 512 * torch.finfo(dtype).eps


def probe(session: Session) -> torch.Tensor:
    """The target's logits [n+1, V] for a small branching tree behind a session's tokens; commits nothing."""
    shape = TreeShape.from_choices([[0], [1], [0, 0], [1, 0], [0, 0, 0]])
    tokens = torch.arange(shape.num_draft_tokens + 1) * 7 % session.target.info.vocab_size
    tokens[0] = session.ids[-1]
    out = session.target_state.forward_tree([DraftTree(tokens, shape)])
    return out.logits[0].float()


def head_difference(a: Session, b: Session) -> float:
    """Largest difference of two sessions' head caches."""
    states = [s.drafter_state for s in (a, b)]
    caches = []
    for state in states:
        state = state.inner if isinstance(state, GraftedState | AutoState) else state
        if not isinstance(state, EagleState):
            return 0.0
        state.read_pending()
        caches.append(state.committed())
    return max(float((x.float() - y.float()).abs().max()) for x, y in zip(*caches, strict=True))
