"""How well a head drafts known greedy continuations, without decoding.

Contract: a static tree's accepted path depends only on the rank that the head gives to each true token along the true
continuation, so one unrolled pass over a dialogue says what a chain or any static tree rooted at any position would
have had accepted. The numbers equal those of real greedy decoding with the same features (arXiv 2401.15077, section
4: τ and n-α); n-α here is over all positions as roots, τ over the rounds that decoding would have gone through.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eaglekit.core.tree import TreeShape
from eaglekit.models.head import EagleHead
from eaglekit.train.features.store import FeatureSource, StoredDialogue
from eaglekit.train.head.objective import block_rows, embed, pairs_of, unroll

Example = tuple[Tensor, Tensor, int]
"""ids int64 [n]; features [n - 1 or more, W], see `pairs_of`; where the answer, which goes to the end, starts."""


def examples_of(source: FeatureSource, rows: Sequence[StoredDialogue]) -> list[Example]:
    """Dialogues of one answer each, with their features in float32."""
    read = zip(rows, source.read(rows), strict=True)
    return [(source.tokens(row), features.float(), row.spans[0][0]) for row, features in read]


@dataclass(frozen=True)
class Acceptance:
    """Result of `simulate`.

    Attributes:
        tau: For each tree, new tokens per target pass, the bonus token included.
        n_alpha: For each depth of a chain, accepted / tried.
        tokens: New tokens that τ was measured on.
        by_depth: For each tree and depth, rounds in which a child was accepted there / rounds that tried some there.
    """

    tau: dict[str, float]
    n_alpha: tuple[float, ...]
    tokens: int
    by_depth: dict[str, tuple[float, ...]]

    def to_dict(self) -> dict[str, Any]:
        """τ, n-α and acceptance by depth, rounded, for JSON."""
        return {
            "tau": {name: round(value, 4) for name, value in self.tau.items()},
            "n_alpha": [round(x, 4) for x in self.n_alpha],
            "acceptance_by_depth": {name: [round(x, 4) for x in row] for name, row in self.by_depth.items()},
        }


def standard_shapes() -> dict[str, TreeShape]:
    """The chain of 5 and the paper's tree."""
    return {"chain": TreeShape.chain(5), "tree": TreeShape.paper()}


def simulate(
    head: EagleHead,
    examples: Iterable[Example],
    embedding: Tensor,
    readout: Tensor,
    shapes: Mapping[str, TreeShape],
) -> Acceptance:
    """Draft at every position of every example.

    Args:
        head: The head; put into evaluation mode, and back into the mode it was in.
        examples: Greedy continuations, on the CPU.
        embedding: [vocabulary, E], the target's embeddings, on the head's device.
        readout: [V, H], the target's whole `lm_head`.
        shapes: The trees to measure.
    """
    tally = Tally(head, embedding, readout, shapes)
    for example in examples:
        tally.add(example)
    return tally.acceptance()


class Tally:
    """`simulate`, an example at a time."""

    def __init__(self, head: EagleHead, embedding: Tensor, readout: Tensor, shapes: Mapping[str, TreeShape]) -> None:
        self._head, self._embedding, self._shapes = head, embedding, shapes
        self._depth = max(shape.max_depth for shape in shapes.values())
        self._width = max(len(children) for shape in shapes.values() for children in shape.children)
        self._tokens, self._rounds = dict.fromkeys(shapes, 0), dict.fromkeys(shapes, 0)
        self._chain = _Counts.of(self._depth)
        self._by_depth = {name: _Counts.of(shape.max_depth) for name, shape in shapes.items()}
        # Tokens that are never drafted need no logits; a label that is one has the place -1.
        vocab = torch.arange(len(readout)) if head.draft_vocab is None else head.draft_vocab.cpu()
        self._readout = readout if head.draft_vocab is None else readout[vocab.to(readout.device)]
        if head.lm_head is not None:
            self._readout = head.lm_head.weight.detach().float()
        self._places = torch.full((len(readout),), -1).index_copy(0, vocab, torch.arange(len(vocab)))

    @torch.no_grad()
    def add(self, example: Example) -> None:
        """Draft at every position of an example."""
        ids, features, start = example
        head, device, length = self._head, self._embedding.device, len(ids) - 2
        if start - 1 >= length:
            return  # an answer of one token: no round begins
        mode = head.training
        head.eval()
        try:
            tokens, read, _ = pairs_of(head, ids, features[: len(ids) - 1])
            embedded = embed(self._embedding, tokens.to(device)).to(head.dtype)
            outputs = unroll(head, embedded, read.to(device, head.dtype), [length], self._depth, [start - 1])
            if head.norm is not None:
                outputs = [head.norm(output) for output in outputs]
        finally:
            head.train(mode)
        ranks = _ranks(outputs, self._places[ids[2:]], self._readout, start - 1, self._width)
        for root in range(start - 1, length):
            for s in range(min(self._depth, length - root)):
                good = ranks[s][root + s] == 0
                self._chain.add(s, good)
                if not good:
                    break
        for name, shape in self._shapes.items():
            root = start - 1
            while root < length:
                new = min(_accepted(shape, ranks, root, length, self._by_depth[name]) + 1, length - root)
                self._tokens[name] += new
                self._rounds[name] += 1
                root += new

    def counts(self) -> list[int]:
        """Tokens so far, the same for all trees, then the rounds of each."""
        return [max(self._tokens.values()), *self._rounds.values()]

    def acceptance(self) -> Acceptance:
        """Of all examples so far."""
        return Acceptance(
            {name: self._tokens[name] / max(1, self._rounds[name]) for name in self._shapes},
            self._chain.shares(),
            self.counts()[0],
            {name: counts.shares() for name, counts in self._by_depth.items()},
        )


@dataclass(frozen=True)
class _Counts:
    """How often drafting was tried at each depth, and how often a token was accepted."""

    tried: list[int]
    hit: list[int]

    @staticmethod
    def of(depth: int) -> _Counts:
        return _Counts([0] * depth, [0] * depth)

    def add(self, depth: int, good: bool) -> None:
        self.tried[depth] += 1
        self.hit[depth] += good

    def shares(self) -> tuple[float, ...]:
        return tuple(h / max(1, t) for h, t in zip(self.hit, self.tried, strict=True))


def _accepted(shape: TreeShape, ranks: Sequence[Sequence[int]], root: int, length: int, counts: _Counts) -> int:
    """Drafts accepted in a tree rooted at input `root`; each depth that was tried is counted."""
    node = accepted = 0
    while shape.children[node] and root + accepted < length:
        rank = ranks[accepted][root + accepted]
        good = rank < len(shape.children[node])
        counts.add(accepted, good)
        if not good:
            break
        node = shape.children[node][rank]
        accepted += 1
    return accepted


def _ranks(outputs: Sequence[Tensor], labels: Tensor, readout: Tensor, first: int, width: int) -> list[list[int]]:
    """For each step and input, the rank of the true token; `width` where no tree can have followed so far.

    Args:
        outputs: Of each step, [T, H].
        labels: int64 [T]: the row of `readout` that is the true token's, -1 if it has none and so is never drafted.
        readout: [Vd, H].
        first: The first input that a tree starts from.
        width: Most children of a node.
    """
    alive = torch.zeros(len(labels), dtype=torch.bool)
    alive[first:] = True
    result = []
    for output in outputs:
        ranks = torch.full((len(labels),), width)
        rows = (alive & (labels >= 0)).nonzero()[:, 0]
        for part in rows.split(block_rows(len(readout))):
            logits = output[part].to(readout.dtype) @ readout.T
            own = logits.gather(1, labels[part, None].to(logits.device))
            ranks[part] = (logits > own).sum(-1).clamp_(max=width).cpu()
        result.append(ranks.tolist())
        alive = torch.cat((torch.zeros(1, dtype=torch.bool), (ranks < width)[:-1]))
    return result
