"""The default method: EAGLE with the tree that pays, plain decoding where none does.

Contract: greedy output does not depend on which tree a round uses (up to near ties where passes of different widths
round differently, as stock modules do), so the choice may follow the clock: seconds and tokens per round of every arm
(plain, and a few trees) are averaged, the arm with the most tokens per second is used, and the others are tried again
now and then. What was learnt lives in a `Clockwork`, which requests share.

Sampled output is the same for the same seed, so there the choice may follow nothing but what was accepted: a request
starts with the middle tree, and goes on plainly once too few drafts are accepted.

Glossary: an *arm* is a tree, or None for plain decoding; a *probe* is a round with an arm that is not the best one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eaglekit.core.tree import DraftTree, TreeShape
from eaglekit.drafters.eagle import EagleDrafter, EagleState
from eaglekit.drafters.prompt_lookup import GraftedState
from eaglekit.engine.drafter import Context, Observed

_FIRST = 3  # rounds that each arm gets before any is judged
_MEMORY = 48  # rounds that an average looks back over
_PROBE_EVERY = 48  # rounds between two probes
_SAMPLED_LOOKUP = 6  # looked-up tokens in the trees of sampled requests
_SAMPLED_ROUNDS = 8  # rounds of a sampled request before it is judged
_SAMPLED_TOKENS = 1.5  # and tokens per round that it needs, about what a round of a short chain costs


Plan = tuple[TreeShape, int]
"""A tree of the head's, and how many looked-up tokens are grafted to it."""


def default_arms() -> tuple[Plan | None, ...]:
    """Plain decoding, lookup alone, short chains, a small tree and the paper's, all with lookup."""
    small = TreeShape.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)])
    root = TreeShape.root_only()
    return None, (root, 8), (TreeShape.chain(2), 8), (TreeShape.chain(4), 8), (small, 8), (TreeShape.paper(), 8)


@dataclass
class _Arm:
    plan: Plan | None
    rounds: int = 0
    seconds: float = 0.0  # per round, averaged
    tokens: float = 0.0  # per round, averaged

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Clockwork:
    """Averages of the arms, and the choice that follows from them.

    Args:
        arms: The choices; the first is plain decoding.
    """

    def __init__(self, arms: Sequence[Plan | None]) -> None:
        self.arms = [_Arm(plan) for plan in arms]
        self._rounds = 0

    def pick(self) -> int:
        """The arm of the next round."""
        self._rounds += 1
        new = next((i for i, arm in enumerate(self.arms) if arm.rounds < _FIRST), None)
        if new is not None:
            return new
        best = max(range(len(self.arms)), key=lambda i: self.arms[i].rate)
        if self._rounds % _PROBE_EVERY == 0:
            # Probes go to the arms in turn, but not to those that were hopeless: these get one in eight.
            turn = self._rounds // _PROBE_EVERY
            near = [i for i, arm in enumerate(self.arms) if i != best and arm.rate > 0.7 * self.arms[best].rate]
            others = [i for i in range(len(self.arms)) if i != best] if turn % 8 == 0 or not near else near
            return others[turn % len(others)]
        return best

    def observe(self, arm: int, seconds: float, tokens: int) -> None:
        """Count a round."""
        it = self.arms[arm]
        it.rounds += 1
        weight = 1 / min(it.rounds, _MEMORY)
        if it.rounds > _FIRST:
            seconds = min(seconds, 5 * it.seconds)  # the machine may have been busy with something else
        it.seconds += weight * (seconds - it.seconds)
        it.tokens += weight * (tokens - it.tokens)


class AutoDrafter:
    """See the module.

    Args:
        eagle: Its own tree is used for sampled requests.
        clockwork: Shared by all requests of a head and a target.
        now: The clock, seconds.
    """

    def __init__(self, eagle: EagleDrafter, clockwork: Clockwork, now: Callable[[], float] = time.perf_counter) -> None:
        self.eagle = eagle
        self.clockwork = clockwork
        self.now = now

    @property
    def layers(self) -> tuple[int, ...]:
        """What the head wants."""
        return self.eagle.layers

    @property
    def max_draft_tokens(self) -> int:
        """Drafts in the largest of its trees."""
        plans = [arm.plan for arm in self.clockwork.arms if arm.plan is not None]
        return max(shape.num_draft_tokens + lookup for shape, lookup in [(self.eagle.shape, _SAMPLED_LOOKUP), *plans])

    def open(self, batch: int, max_length: int) -> AutoState:
        """A state for `batch` rows of at most `max_length` tokens."""
        return AutoState(self, batch, max_length)


class AutoState:
    """The head's state, and the round that is under way."""

    def __init__(self, drafter: AutoDrafter, batch: int, max_length: int) -> None:
        self._drafter = drafter
        self._eagle = EagleState(drafter.eagle, batch, max_length)
        self._lookup = GraftedState(self._eagle, batch, _SAMPLED_LOOKUP)
        self._round: tuple[int, float] | None = None  # its arm, and when it began
        self._sampled: list[int] | None = None  # rounds and tokens of a sampled request

    def propose(self, contexts: Sequence[Context]) -> list[DraftTree]:
        """See `DrafterState.propose`."""
        drafter, self._round = self._drafter, None
        if any(not context.law.greedy for context in contexts):
            rounds, tokens = self._sampled = self._sampled or [0, 0]
            if rounds >= _SAMPLED_ROUNDS and tokens < _SAMPLED_TOKENS * rounds:
                return _roots(contexts)
            return self._lookup.propose(contexts)
        if min(context.max_depth for context in contexts) < 2:  # too near the end to tell anything
            return self._lookup.propose(contexts)
        arm = drafter.clockwork.pick()
        plan = drafter.clockwork.arms[arm].plan
        if plan is not None and plan[0].num_draft_tokens:
            self._eagle.catch_up()  # what earlier rounds left unread is not this arm's cost
        self._round = arm, drafter.now()
        if plan is None:
            return _roots(contexts)
        return self._lookup.graft(self._eagle.propose(contexts, plan[0]), contexts, plan[1])

    def commit(self, observed: Sequence[Observed]) -> None:
        """See `DrafterState.commit`."""
        self._eagle.commit(observed)
        tokens = sum(len(o.tokens) for o in observed)
        if self._round is not None:
            arm, began = self._round
            self._drafter.clockwork.observe(arm, self._drafter.now() - began, tokens)
            self._round = None
        elif self._sampled is not None:
            self._sampled[0] += len(observed)
            self._sampled[1] += tokens

    def truncate(self, lengths: Sequence[int]) -> None:
        """See `DrafterState.truncate`; a new request begins."""
        self._round = self._sampled = None
        self._lookup.truncate(lengths)

    @property
    def inner(self) -> EagleState:
        """The head's state; for checks."""
        return self._eagle


def _roots(contexts: Sequence[Context]) -> list[DraftTree]:
    return [DraftTree.root_only(context.ids[-1]) for context in contexts]
