"""`eaglekit check` passes on a correct program and fails on each planted bug."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch

import tiny
from eaglekit.bench import lossless
from eaglekit.core import verify as verify_module
from eaglekit.core.sampling import Law, SamplingParams
from eaglekit.core.verify import Verdict
from eaglekit.drafters.eagle import EagleState
from eaglekit.engine import decode
from eaglekit.errors import InputError
from eaglekit.models.cache import TreeCache
from eaglekit.models.hf import HFTarget
from eaglekit.models.state import HFState

OPTIONS = lossless.CheckOptions(
    identity_prompts=2, identity_tokens=24, recomputed_tokens=12, law_prompts=1, draws=200, purity_rounds=4
)


def test_a_correct_program_passes() -> None:
    findings = list(lossless.check(tiny.model(), OPTIONS))
    assert all(f.passed for f in findings), [f.detail for f in findings if not f.passed]
    assert {f.name.split(":")[0] for f in findings} == {"law, exact", "identity", "law, sampled", "purity"}


def test_it_needs_a_head() -> None:
    model = tiny.model()
    model.head = None
    with pytest.raises(InputError, match="--head"):
        next(lossless.check(model))


def bonus_without_temperature(patch: pytest.MonkeyPatch) -> None:
    right = decode.verify

    def wrong(tree, logits, law, ids, source):  # type: ignore[no-untyped-def]
        verdict = right(tree, logits, law, ids, source)
        if law.greedy or not verdict.bonus:
            return verdict
        bare = Law(SamplingParams(temperature=1.0)).probs(logits[verdict.nodes[-1] :][:1])[0]
        return Verdict(verdict.nodes, (*verdict.tokens[:-1], source.draw(bare)), True)

    patch.setattr(decode, "verify", wrong)


def residual_not_renormalised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify_module, "residual", lambda p, q: (p - q).clamp_min(0))


def siblings_not_removed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify_module, "without", lambda law, token: law)


def deterministic_drafts_scored_by_softmax(patch: pytest.MonkeyPatch) -> None:
    right = verify_module.verify_sampling

    def wrong(tree, law_at, source):  # type: ignore[no-untyped-def]
        if tree.draft_probs is None and tree.shape.num_draft_tokens:
            rows = torch.full((len(tree.shape.parents), len(law_at(0))), 1 / len(law_at(0)))
            tree = type(tree)(tree.tokens, tree.shape, rows, tuple(range(len(rows))))
        return right(tree, law_at, source)

    patch.setattr(verify_module, "verify_sampling", wrong)


def position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    right_pass, right_forward, in_tree = HFState._pass, HFTarget.forward, [False]

    def mark(self, rows, starts, tokens, shapes, long, layers):  # type: ignore[no-untyped-def]
        in_tree[0] = shapes is not None
        return right_pass(self, rows, starts, tokens, shapes, long, layers)

    def wrong(self, inputs, *rest):  # type: ignore[no-untyped-def]
        if in_tree[0]:
            inputs = inputs.clone()
            inputs[1, :, 1:] += 1
        return right_forward(self, inputs, *rest)

    patch.setattr(HFState, "_pass", mark)
    patch.setattr(HFTarget, "forward", wrong)


def wrong_cache_row_kept(patch: pytest.MonkeyPatch) -> None:
    right = TreeCache.move
    patch.setattr(
        TreeCache,
        "move",
        lambda self, rows, sources, targets: right(self, rows, [[s - 1 for s in r] for r in sources], targets),
    )


def head_keeps_its_own_features(patch: pytest.MonkeyPatch) -> None:
    right = EagleState.commit

    def wrong(self: EagleState, observed) -> None:  # type: ignore[no-untyped-def]
        right(self, [type(o)(o.tokens, o.features + 0.1, o.layers) if len(o.tokens) < 7 else o for o in observed])

    patch.setattr(EagleState, "commit", wrong)


@pytest.mark.parametrize(
    ("plant", "part"),
    [
        (bonus_without_temperature, "enumeration"),
        (residual_not_renormalised, "enumeration"),
        (siblings_not_removed, "enumeration"),
        (deterministic_drafts_scored_by_softmax, "enumeration"),
        (position_off_by_one, "identity"),
        (position_off_by_one, "purity"),
        (wrong_cache_row_kept, "purity"),
        (head_keeps_its_own_features, "purity"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The parts are what `check` consists of; one at a time, to find the first failure soon.
    parts: dict[str, Callable[[], Iterator[lossless.Finding]]] = {
        "enumeration": lambda: lossless.check_enumeration(OPTIONS.seed),
        "identity": lambda: lossless.check_identity(model, OPTIONS),
        "purity": lambda: lossless.check_purity(model, OPTIONS),
    }
    model = tiny.model()
    plant(monkeypatch)
    assert any(not finding.passed for finding in parts[part]())


def test_a_first_difference_is_reported_with_the_gap_of_the_best_logits() -> None:
    model = tiny.model()
    prompt = [1, 2, 3]
    right = model.generate(prompt, max_new_tokens=6, method="plain").token_ids
    wrong = [*right[:4], (right[4] + 1) % 200, right[5]]
    finding = lossless._compare("identity", model, [(prompt, right, wrong)], lossless.fresh_logits(model.target))
    assert not finding.passed
    assert "token 4" in finding.detail and "best two logits" in finding.detail and "DIFFERENT" in finding.detail


@pytest.mark.parametrize("freedom", [1, 2, 8, 26])
def test_the_tail_of_chi_squared_has_its_tabulated_values(freedom: int) -> None:
    # 95th and 99.9th percentiles from printed tables.
    table = {1: (3.841, 10.828), 2: (5.991, 13.816), 8: (15.507, 26.124), 26: (38.885, 54.052)}
    for quantile, tail in zip(table[freedom], (0.05, 0.001), strict=True):
        assert lossless.chi2_tail(quantile, freedom) == pytest.approx(tail, rel=2e-3)


def test_the_g_tests_tell_laws_apart() -> None:
    law = {(0,): 0.5, (1,): 0.3, (2,): 0.2}
    near: dict[tuple[int, ...], float] = {(0,): 152, (1,): 88, (2,): 60}
    far: dict[tuple[int, ...], float] = {(0,): 110, (1,): 120, (2,): 70}
    assert lossless.chi2_tail(*lossless.g_test_law(near, law, 300)) > 0.5
    assert lossless.chi2_tail(*lossless.g_test_law(far, law, 300)) < 1e-4
    assert lossless.chi2_tail(*lossless.g_test(near, near)) == 1
    assert lossless.chi2_tail(*lossless.g_test(near, far)) < 5e-3
    assert lossless.chi2_tail(*lossless.g_test_law({(3,): 1}, law, 1)) == 0


def test_near_ties_are_judged_on_the_scores_that_greedy_decoding_compares() -> None:
    model = tiny.model()
    prompt = [1, 2, 3]
    logits = torch.zeros(260)
    logits[1], logits[5] = 2.0, 1.0  # token 1 was seen: with a penalty of 2 it is level with token 5
    assert lossless.best_gap(model, prompt, [], lambda ids: logits) == 1.0
    model.defaults = dataclasses.replace(model.defaults, sampling=SamplingParams(repetition_penalty=2.0))
    assert lossless.best_gap(model, prompt, [], lambda ids: logits) == 0.0
