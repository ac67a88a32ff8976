"""Draft trees: which token hangs below which.

Glossary and conventions, used everywhere:

    node      an index into the tree; nodes are numbered so that a parent comes before its children
    root      node 0: the last token that was emitted, not yet read by the target. It is not a draft
    drafts    nodes 1 .. n; `num_draft_tokens` counts them, never the root
    depth     0 for the root; a draft's distance from it
    rank      a node's place among its siblings, 0 first; verification tries siblings in this order
    path      nodes from the root to a node, both included
    choices   the field's way to write a static tree: one list of ranks per draft, from the root down

A `TreeShape` is a topology alone, a plan. A `DraftTree` also has tokens and, where they were sampled, the laws they
were sampled from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from eaglekit.errors import TreeError

# The tree of the EAGLE paper (arXiv 2401.15077, figure 7 and appendix): 25 drafts in levels of 4, 8, 8, 3, 2.
_PAPER_CHOICES: tuple[tuple[int, ...], ...] = (
    *((r,) for r in range(4)),
    *((0, r) for r in range(3)), *((1, r) for r in range(2)), *((2, r) for r in range(2)), (3, 0),
    *((0, 0, r) for r in range(3)), *((0, 1, r) for r in range(2)), *((0, 2, r) for r in range(2)), (1, 0, 0),
    *((0, 0, 0, r) for r in range(3)),
    *((0, 0, 0, 0, r) for r in range(2)),
)  # fmt: skip

MAX_DRAFT_TOKENS = 1024


@dataclass(frozen=True)
class TreeShape:
    """A tree's topology.

    Attributes:
        parents: `parents[i]` is the parent of node i; `parents[0]` is -1, for the root. A parent precedes its children.

    Raises:
        TreeError: `parents` is empty, or a node's parent does not precede it.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise TreeError(f"tree: node 0 must be the root, with parent -1; got parents {list(self.parents)[:8]}")
        for node, parent in enumerate(self.parents[1:], 1):
            if not 0 <= parent < node:
                raise TreeError(
                    f"tree: node {node} has parent {parent}; a parent must come before its children (0 to {node - 1})"
                )

    @staticmethod
    def root_only() -> TreeShape:
        """The tree without drafts: plain decoding."""
        return TreeShape((-1,))

    @staticmethod
    def chain(num_steps: int) -> TreeShape:
        """`num_steps` drafts, each below the one before."""
        if not 1 <= num_steps <= MAX_DRAFT_TOKENS:
            raise TreeError(f"chain of {num_steps}: expected 1 to {MAX_DRAFT_TOKENS} draft tokens, for example chain:5")
        return TreeShape(tuple(range(-1, num_steps)))

    @staticmethod
    def paper() -> TreeShape:
        """The 25-draft tree of the EAGLE paper."""
        return TreeShape.from_choices(_PAPER_CHOICES)

    @staticmethod
    def from_choices(choices: Sequence[Sequence[int]]) -> TreeShape:
        """A tree from one list of ranks per draft, in any order.

        Raises:
            TreeError: no choices, a duplicate, a missing parent, a gap in rank or too many drafts; the message names
                the node.
        """
        if not choices:
            raise TreeError("tree: no nodes; expected at least one list of ranks, such as [[0], [1], [0, 0]]")
        if len(choices) > MAX_DRAFT_TOKENS:
            raise TreeError(f"tree: {len(choices)} nodes; at most {MAX_DRAFT_TOKENS} are allowed")
        keys: list[tuple[int, ...]] = []
        for choice in choices:
            if (
                not isinstance(choice, (list, tuple))
                or not choice
                or not all(isinstance(r, int) and not isinstance(r, bool) and r >= 0 for r in choice)
            ):
                raise TreeError(
                    f"tree: node {choice!r} is not a list of ranks; expected whole numbers from 0, such as [0, 1]"
                )
            keys.append(tuple(choice))
        known: set[tuple[int, ...]] = set()
        for key in keys:
            if key in known:
                raise TreeError(f"tree: node {list(key)} appears twice")
            known.add(key)
        for key in keys:
            if len(key) > 1 and key[:-1] not in known:
                raise TreeError(f"tree: node {list(key)} has no parent; add {list(key[:-1])}")
            if key[-1] > 0 and (*key[:-1], key[-1] - 1) not in known:
                raise TreeError(f"tree: node {list(key)} leaves a gap in rank; add {[*key[:-1], key[-1] - 1]}")
        keys.sort(key=lambda k: (len(k), k))
        index: dict[tuple[int, ...], int] = {(): 0}
        parents = [-1]
        for key in keys:
            index[key] = len(parents)
            parents.append(index[key[:-1]])
        return TreeShape(tuple(parents))

    @staticmethod
    def parse(spec: str) -> TreeShape:
        """`paper`, `chain:N`, or the path of a JSON file that holds choices (a list of lists of ranks).

        Raises:
            TreeError: the name is unknown, or the file is missing, not JSON or not a tree.
        """
        if spec == "paper":
            return TreeShape.paper()
        if spec.startswith("chain:"):
            try:
                steps = int(spec[len("chain:") :])
            except ValueError:
                raise TreeError(f"tree {spec!r}: expected a whole number after 'chain:', for example chain:5") from None
            return TreeShape.chain(steps)
        path = Path(spec)
        if not path.is_file():
            raise TreeError(
                f"tree {spec!r}: no such tree or file; expected 'paper', 'chain:N' or the path of a JSON file"
            )
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as e:
            raise TreeError(
                f"tree file {spec}: not readable as JSON ({e}); expected a list such as [[0], [1], [0, 0]]"
            ) from None
        if not isinstance(data, list):
            raise TreeError(f"tree file {spec}: got {type(data).__name__}, expected a list such as [[0], [1], [0, 0]]")
        try:
            return TreeShape.from_choices(data)
        except TreeError as e:
            raise TreeError(f"tree file {spec}: {e}") from None

    @property
    def num_draft_tokens(self) -> int:
        """Drafts in the tree; the root is not counted."""
        return len(self.parents) - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root has 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node."""
        return max(self.depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, by rank."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            children[parent].append(node)
        return tuple(tuple(c) for c in children)

    @cached_property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return all(len(c) <= 1 for c in self.children)

    @cached_property
    def mask(self) -> Tensor:
        """Bool [n+1, n+1]: `mask[i, j]` says whether node i may attend to node j (an ancestor, or itself)."""
        mask = torch.eye(len(self.parents), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], 1):
            mask[node] |= mask[parent]
        return mask

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root to `node`, both included."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Root-to-leaf paths, in the order of their leaves."""
        return tuple(self.path(n) for n, c in enumerate(self.children) if not c)

    def levels(self) -> list[tuple[int, ...]]:
        """Nodes by depth: `levels()[d]` holds the nodes of depth d."""
        levels: list[list[int]] = [[] for _ in range(self.max_depth + 1)]
        for node, depth in enumerate(self.depths):
            levels[depth].append(node)
        return [tuple(level) for level in levels]

    def limited(self, max_depth: int) -> TreeShape:
        """This tree without the nodes below `max_depth`; 0 leaves the root alone."""
        if max_depth >= self.max_depth:
            return self
        keep = [n for n, d in enumerate(self.depths) if d <= max(0, max_depth)]
        index = {n: i for i, n in enumerate(keep)}
        return TreeShape(tuple(-1 if self.parents[n] < 0 else index[self.parents[n]] for n in keep))


@dataclass(frozen=True)
class DraftTree:
    """Draft tokens in a tree, ready for one target pass.

    Attributes:
        tokens: int64 [n+1], on the CPU; `tokens[0]` is the root.
        shape: The topology of these n+1 nodes.
        draft_probs: float32 laws that children were sampled from, one row for each node that has children: node i's
            children were drawn one after the other, without replacement, from `draft_probs[row_of[i]]`, which is over
            the target's whole vocabulary [rows, V]. None when the tokens were chosen deterministically: each proposal
            then has probability one.
        row_of: For each node the row of `draft_probs`, or -1.
        fixed: Nodes proposed with probability one among siblings that may have been drawn; they come behind these.
    """

    tokens: Tensor
    shape: TreeShape
    draft_probs: Tensor | None = None
    row_of: tuple[int, ...] = ()
    fixed: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.tokens.shape != (len(self.shape.parents),):
            raise TreeError(
                f"tree: {tuple(self.tokens.shape)} tokens for {len(self.shape.parents)} nodes; the numbers must agree"
            )
        if self.draft_probs is not None:
            if len(self.row_of) != len(self.shape.parents):
                raise TreeError(
                    f"tree: row_of has {len(self.row_of)} entries for {len(self.shape.parents)} nodes; "
                    "the numbers must agree"
                )
            for node, children in enumerate(self.shape.children):
                drawn = [child for child in children if child not in self.fixed]
                if drawn and not 0 <= self.row_of[node] < len(self.draft_probs):
                    raise TreeError(f"tree: node {node} has children but no draft probabilities")

    @staticmethod
    def root_only(token: int) -> DraftTree:
        """The tree of plain decoding: the last token, and no draft."""
        return DraftTree(torch.tensor([token]), TreeShape.root_only())

    def law_of_children(self, node: int) -> Tensor | None:
        """float32 [V]: what the first child of `node` was drawn from, or None for deterministic proposals."""
        row = -1 if self.draft_probs is None else self.row_of[node]
        return None if self.draft_probs is None or row < 0 else self.draft_probs[row]
