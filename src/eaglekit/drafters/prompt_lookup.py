"""Prompt lookup: what followed the last few tokens the last time that they stood in the text is drafted again.

Contract: `GraftedDrafter` adds a branch of such tokens to another drafter's trees, below the root: where the tree holds
a token of the branch already, the branch goes on from there. With `PlainDrafter` inside, it is prompt lookup alone. The
tokens follow from the text, not from a law: each is proposed with probability one, tried after its siblings, and so the
output follows the target's law exactly, at any temperature (`core/verify.py`).

A branch is the longer, the longer the match is that it follows from: a pair of tokens says little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from eaglekit.core.tree import DraftTree, TreeShape
from eaglekit.engine.drafter import Context, Drafter, DrafterState, Observed
from eaglekit.errors import InputError

_MATCHES = ((4, 64), (3, 5), (2, 3))  # length of a match, and the most tokens that are drafted from it


class NgramIndex:
    """Where runs of tokens last stood in one text, which only grows."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # a run -> the place behind its last occurrence but the end's

    def read(self, ids: Sequence[int]) -> None:
        """Take in what is new of the text `ids`."""
        for place in range(len(self._ids), len(ids)):
            # Runs that end just before `place` are followed by ids[place].
            for length, _ in _MATCHES:
                if place >= length:
                    self._after[tuple(self._ids[place - length : place])] = place
            self._ids.append(ids[place])

    def find(self, most: int) -> list[int]:
        """Up to `most` tokens that may come next; none without a match."""
        ids = self._ids
        for length, limit in _MATCHES:
            place = self._after.get(tuple(ids[len(ids) - length :])) if len(ids) >= length else None
            if place is not None:
                found = ids[place : place + min(most, limit)]
                while 0 < len(found) < min(most, limit):  # the text repeats itself up to its end
                    found += found[: min(most, limit) - len(found)]
                return found
        return []


def graft(tree: DraftTree, tokens: Sequence[int]) -> DraftTree:
    """`tree` with a branch `tokens` below its root, each token below the one before."""
    parents, values = list(tree.shape.parents), tree.tokens.tolist()
    children: dict[int, dict[int, int]] = {}
    for node in range(1, len(parents)):
        children.setdefault(parents[node], {}).setdefault(values[node], node)
    node, added = 0, []
    for token in tokens:
        known = children.get(node, {}).get(token)
        if known is None:
            known = len(parents)
            parents.append(node)
            values.append(token)
            added.append(known)
        node = known
    if not added:
        return tree
    rows = (*tree.row_of, *(-1 for _ in added)) if tree.row_of else ()
    return replace(
        tree,
        tokens=torch.tensor(values),
        shape=TreeShape(tuple(parents)),
        row_of=rows,
        fixed=tree.fixed | frozenset(added),
    )


class GraftedDrafter:
    """See the module.

    Args:
        inner: Makes the trees.
        num_tokens: Most tokens of a branch.

    Raises:
        InputError: `num_tokens` is out of range.
    """

    def __init__(self, inner: Drafter, num_tokens: int) -> None:
        if not 1 <= num_tokens <= 64:
            raise InputError(f"lookup of {num_tokens} tokens: expected 1 to 64, for example lookup:6")
        self.inner = inner
        self.num_tokens = num_tokens

    @property
    def layers(self) -> tuple[int, ...]:
        """What the inner drafter wants."""
        return self.inner.layers

    @property
    def max_draft_tokens(self) -> int:
        """Drafts in its largest tree."""
        return self.inner.max_draft_tokens + self.num_tokens

    def open(self, batch: int, max_length: int) -> GraftedState:
        """A state for `batch` rows of at most `max_length` tokens."""
        return GraftedState(self.inner.open(batch, max_length), batch, self.num_tokens)


class GraftedState:
    """The inner drafter's state, and an index of each row's text."""

    def __init__(self, inner: DrafterState, batch: int, num_tokens: int) -> None:
        self.inner = inner
        self._num_tokens = num_tokens
        self._indices = [NgramIndex() for _ in range(batch)]

    def propose(self, contexts: Sequence[Context]) -> list[DraftTree]:
        """See `DrafterState.propose`."""
        return self.graft(self.inner.propose(contexts), contexts, self._num_tokens)

    def graft(self, trees: Sequence[DraftTree], contexts: Sequence[Context], num_tokens: int) -> list[DraftTree]:
        """`trees` with branches of at most `num_tokens` tokens."""
        grafted = []
        for index, tree, context in zip(self._indices, trees, contexts, strict=True):
            index.read(context.ids)
            grafted.append(graft(tree, index.find(min(num_tokens, context.max_depth))))
        return grafted

    def commit(self, observed: Sequence[Observed]) -> None:
        """See `DrafterState.commit`."""
        self.inner.commit(observed)

    def truncate(self, lengths: Sequence[int]) -> None:
        """See `DrafterState.truncate`."""
        self._indices = [NgramIndex() for _ in self._indices]
        self.inner.truncate(lengths)
