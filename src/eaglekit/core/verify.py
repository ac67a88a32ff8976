"""Verification: walk a draft tree so that what is emitted follows the target's law exactly.

Glossary:

    p            the target's law at a node, after processors, temperature and the rest
    q            the draft law that the node's children were drawn from; earlier siblings removed and renormalised
    accepted     a draft that is emitted
    recovered    the token drawn from what is left of p when every child of a node was rejected
    bonus        the token drawn from p at a leaf, when a whole path was accepted

One walk serves all cases (EAGLE, arXiv 2401.15077, Algorithm 1; SpecInfer's multi-round sampling). At a node, children
x_1 … x_k are tried in the order in which they were drawn: x_i is accepted with probability min(1, p(x_i) / q_i(x_i)),
else p becomes norm(max(0, p - q_i)) and q_{i+1} is q_i without x_i. A token proposed deterministically has q_i(x_i) =
1, so that a rejection removes just that token from p. Greedy decoding compares with the argmax instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eaglekit.core.random import RandomSource
from eaglekit.core.sampling import Law
from eaglekit.core.tree import DraftTree
from eaglekit.errors import InputError


@dataclass(frozen=True)
class Verdict:
    """The outcome of one round.

    Attributes:
        nodes: The accepted path, from the root; its nodes' cache rows are kept.
        tokens: What the round emits: the accepted drafts, then the recovered or bonus token. One per node of `nodes`:
            `tokens[i]` was decided by the target's law at `nodes[i]`.
        bonus: Whether the last token followed a fully accepted path.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    bonus: bool

    @property
    def num_accepted(self) -> int:
        """Drafts that were accepted."""
        return len(self.nodes) - 1


def verify(tree: DraftTree, logits: Tensor, law: Law, ids: Sequence[int], source: RandomSource) -> Verdict:
    """Decide what a round emits.

    Args:
        tree: The drafts.
        logits: The target's, [n+1, V], one row per node.
        law: What tokens are drawn from.
        ids: Everything before and including the root: prompt, answer so far.
        source: Random decisions; greedy decoding makes none.
    """
    before = torch.tensor(ids) if law.needs_prefix else None

    def prefix(node: int) -> list[Tensor] | None:
        if before is None:
            return None
        return [torch.cat((before, tree.tokens[list(tree.shape.path(node)[1:])]))]

    if not law.greedy:
        return verify_sampling(tree, lambda node: law.probs(logits[node : node + 1], prefix(node))[0], source)
    if before is None and logits.device.type != "cpu":  # one transfer for all nodes
        return verify_greedy(tree, law.argmax(logits).tolist().__getitem__)
    return verify_greedy(tree, lambda node: int(law.argmax(logits[node : node + 1], prefix(node))))


def verify_greedy(tree: DraftTree, choice: Callable[[int], int]) -> Verdict:
    """Follow the target's own choice from the root for as long as the tree holds it.

    Args:
        tree: The drafts.
        choice: The token that greedy decoding emits behind a node; asked only for the nodes that the walk reaches.
    """
    drafts = tree.tokens.tolist()
    nodes, tokens = [0], [choice(0)]
    while True:
        child = next((c for c in tree.shape.children[nodes[-1]] if drafts[c] == tokens[-1]), None)
        if child is None:
            bonus = not tree.shape.children[nodes[-1]]
            return Verdict(tuple(nodes), tuple(tokens), bonus)
        nodes.append(child)
        tokens.append(choice(child))


def verify_sampling(tree: DraftTree, law_at: Callable[[int], Tensor], source: RandomSource) -> Verdict:
    """Multi-round speculative sampling (Algorithm 1).

    Args:
        tree: The drafts, with the laws that they were drawn from.
        law_at: The target's law [V] behind a node; asked only for the nodes that the walk reaches.
        source: Random decisions.

    Raises:
        InputError: the processors ban every token.
    """
    drafts = tree.tokens.tolist()
    nodes: list[int] = [0]
    tokens: list[int] = []
    while True:
        node = nodes[-1]
        p = law_at(node).to("cpu", torch.float64)
        if not p.sum() > 0:  # also true of NaN
            raise InputError(
                "law: no token may come next: the processors ban them all, or the logits are not numbers (a model that "
                "overflows in half precision; try float32)"
            )
        q = tree.law_of_children(node)
        q = None if q is None else q.to("cpu", torch.float64)
        accepted = None
        for child in tree.shape.children[node]:
            token = drafts[child]
            if child in tree.fixed:
                q = None
            q_token = 1.0 if q is None else q[token].item()
            if source.accept(p[token].item() / q_token):
                accepted = child
                break
            if q is None:
                p = without(p, token)
            else:
                p, q = residual(p, q), without(q, token)
        if accepted is None:
            tokens.append(source.draw(p))
            return Verdict(tuple(nodes), tuple(tokens), bonus=not tree.shape.children[node])
        nodes.append(accepted)
        tokens.append(drafts[accepted])


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)) [V]; p itself where nothing is left, which exact arithmetic would never reach."""
    rest = (p - q).clamp_min_(0)
    total = rest.sum()
    return rest.div_(total) if total > 0 else p


def without(law: Tensor, token: int) -> Tensor:
    """`law` [V] conditioned on not being `token`; unchanged where nothing else has mass."""
    rest = law.clone()
    rest[token] = 0
    total = rest.sum()
    return rest.div_(total) if total > 0 else law
