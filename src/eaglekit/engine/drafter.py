"""The `Drafter` protocol: every speculative method proposes trees, and everything else is shared.

A `Drafter` is stateless and can be shared; a `DrafterState` belongs to one caller and has a row per request, in step
with the rows of a `TargetState`: after `commit`, row b of both has read the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from eaglekit.core.random import RandomSource
from eaglekit.core.sampling import Law
from eaglekit.core.tree import DraftTree


@dataclass(frozen=True)
class Context:
    """What a row's draft may depend on.

    Attributes:
        ids: Prompt and answer so far; the last one is the root of the tree to come.
        law: What the row's tokens are drawn from.
        source: The row's random decisions; drafting draws from it too.
        max_depth: Deepest draft of any use: the limit of the answer or of the context is not far.
    """

    ids: Sequence[int]
    law: Law
    source: RandomSource
    max_depth: int


@dataclass(frozen=True)
class Observed:
    """What the target has read since the last commit, for one row.

    Attributes:
        tokens: int64 [k]: the tokens **one step ahead** of the features; the last one is the new root.
        features: [k, H]: the target's features of the tokens that were read.
        layers: Residual streams [k, H] of the layers that the drafter asked for.
    """

    tokens: Tensor
    features: Tensor
    layers: Mapping[int, Tensor] = field(default_factory=dict)

    def then(self, later: Observed) -> Observed:
        """These, followed by what was observed later."""
        layers = {k: torch.cat((v, later.layers[k])) for k, v in self.layers.items()}
        return Observed(torch.cat((self.tokens, later.tokens)), torch.cat((self.features, later.features)), layers)

    def part(self, start: int, end: int) -> Observed:
        """What belongs to the tokens from `start` to `end`."""
        layers = {k: v[start:end] for k, v in self.layers.items()}
        return Observed(self.tokens[start:end], self.features[start:end], layers)


class DrafterState(Protocol):
    """The drafts' caches of one caller."""

    def propose(self, contexts: Sequence[Context]) -> list[DraftTree]:
        """A tree per row, rooted at the last of its ids."""
        ...

    def commit(self, observed: Sequence[Observed]) -> None:
        """Take note of what was accepted; drafts that were not are forgotten."""
        ...

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget what follows the first `lengths[b]` tokens that the target has read of row b."""
        ...


class Drafter(Protocol):
    """A speculative method."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers whose residual streams it wants besides the features."""
        ...

    @property
    def max_draft_tokens(self) -> int:
        """Most drafts in any of its trees."""
        ...

    def open(self, batch: int, max_length: int) -> DrafterState:
        """A state for `batch` rows of at most `max_length` tokens."""
        ...


class PlainDrafter:
    """No drafts at all: plain decoding, by the same step as every other method."""

    layers: tuple[int, ...] = ()
    max_draft_tokens: int = 0

    def open(self, batch: int, max_length: int) -> PlainDrafter:
        """It keeps no state."""
        return self

    def propose(self, contexts: Sequence[Context]) -> list[DraftTree]:
        """The root alone."""
        return [DraftTree.root_only(context.ids[-1]) for context in contexts]

    def commit(self, observed: Sequence[Observed]) -> None:
        """Nothing to remember."""

    def truncate(self, lengths: Sequence[int]) -> None:
        """Nothing to forget."""


def observe(features: Tensor, layers: Mapping[int, Tensor], nodes: Sequence[int], tokens: Sequence[int]) -> Observed:
    """Pair one row's outputs [N, …] at `nodes` with the tokens one step ahead of them."""
    index = torch.tensor(list(nodes), device=features.device)
    return Observed(
        torch.tensor(list(tokens), device=features.device),
        features.index_select(0, index),
        {k: v.index_select(0, index) for k, v in layers.items()},
    )
