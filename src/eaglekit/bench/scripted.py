"""A scripted drafter: the engine's speed whatever the head, at an acceptance that is chosen instead of learnt.

Contract: `ScriptedDrafter` costs what the head costs, for the real EAGLE drafter proposes every tree and commits every
pair; then its tokens are thrown away and others are put in their place. The script is the text that plain greedy
decoding gives, known beforehand. Each step of a chain is that text's next token with probability α, independently, by
a seeded generator of its own, and some other token otherwise. Verification knows nothing of this, so the output is
plain decoding's whatever the script says.

With k steps, and α the chance of each, a round emits (1 - α^(k+1)) / (1 - α) tokens on average: the accepted run of
steps, and the one that the target adds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from eaglekit.core.tree import DraftTree, TreeShape
from eaglekit.drafters.eagle import EagleDrafter, EagleState
from eaglekit.engine.drafter import Context, Observed
from eaglekit.errors import InputError


def expected_tau(alpha: float, steps: int) -> float:
    """Mean tokens per round of a chain of `steps` drafts, each right with probability `alpha`."""
    return sum(alpha**i for i in range(steps + 1))


def tau_variance(alpha: float, steps: int) -> float:
    """Variance of the tokens of such a round."""
    square = sum((2 * i + 1) * alpha**i for i in range(steps + 1))  # E[X²] = Σ (2i + 1) P(X > i)
    return square - expected_tau(alpha, steps) ** 2


class ScriptedDrafter:
    """See the module.

    Args:
        eagle: What it costs; its tree must be a chain, whose length is the number of steps.
        script: Prompt and answer, token ids.
        alpha: Probability of a right step.
        seed: Of the steps that are wrong, and of what stands there.

    Raises:
        InputError: the tree is no chain, or `alpha` is no probability.
    """

    layers: tuple[int, ...] = ()

    def __init__(self, eagle: EagleDrafter, script: Sequence[int], alpha: float, seed: int = 0) -> None:
        if not eagle.shape.is_chain:
            raise InputError(f"scripted drafter: a tree of {len(eagle.shape.parents)} nodes; expected a chain")
        if not 0 <= alpha <= 1:
            raise InputError(f"alpha={alpha!r}: expected a probability, 0 to 1")
        self.eagle, self.script, self.alpha, self.seed = eagle, tuple(script), alpha, seed
        self.rounds: list[int] = []  # tokens of every round whose chain had its full length

    @property
    def max_draft_tokens(self) -> int:
        """Steps of its chain."""
        return self.eagle.max_draft_tokens

    @property
    def tau(self) -> float:
        """Mean tokens of the rounds with a chain of full length: near an answer's end chains are cut. 0 before any."""
        return sum(self.rounds) / len(self.rounds) if self.rounds else 0.0

    def open(self, batch: int, max_length: int) -> ScriptedState:
        """A state for one row of at most `max_length` tokens.

        Raises:
            InputError: `batch` is not 1: there is one script.
        """
        if batch != 1:
            raise InputError(f"scripted drafter: got {batch} rows, expected 1")
        return ScriptedState(self, max_length)


class ScriptedState:
    """The head's state, and the dice."""

    def __init__(self, drafter: ScriptedDrafter, max_length: int) -> None:
        self._drafter = drafter
        self._eagle = EagleState(drafter.eagle, 1, max_length)
        self._dice = random.Random(drafter.seed)
        self._full = False  # whether the chain under way has its full length

    def propose(self, contexts: Sequence[Context]) -> list[DraftTree]:
        """The head's chain with the script's tokens."""
        drafter, (context,) = self._drafter, contexts
        (drafted,) = self._eagle.propose(contexts)
        count, at = drafted.shape.num_draft_tokens, len(context.ids)
        self._full = count == drafter.max_draft_tokens
        if not count:
            return [drafted]
        tokens = [context.ids[-1], *(self._step(at + i) for i in range(count))]
        return [DraftTree(torch.tensor(tokens), TreeShape.chain(count))]

    def _step(self, place: int) -> int:
        """What the chain says at `place` of the text; behind the script's end nothing is right or wrong."""
        script, size = self._drafter.script, self._drafter.eagle.target.info.vocab_size
        right = script[place] if place < len(script) else 0
        if self._dice.random() < self._drafter.alpha:
            return right
        return (right + self._dice.randrange(1, size)) % size

    def commit(self, observed: Sequence[Observed]) -> None:
        """See `DrafterState.commit`."""
        self._eagle.commit(observed)
        if self._full:
            self._drafter.rounds.append(len(observed[0].tokens))
            self._full = False

    def truncate(self, lengths: Sequence[int]) -> None:
        """See `DrafterState.truncate`."""
        self._full = False
        self._eagle.truncate(lengths)
