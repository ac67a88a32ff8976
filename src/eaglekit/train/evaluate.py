"""How well a head drafts known greedy continuations, without decoding.

Contract: a static tree's accepted path depends only on the rank that the head gives to each true token along the true
continuation, so one unrolled pass over a dialogue says what a chain or any static tree rooted at any position would
have had accepted. The numbers equal those of real greedy decoding with the same features (arXiv 2401.15077, section
4: τ and n-α); n-α here is over all positions as roots, τ over the rounds that decoding would have gone through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eaglekit.core.tree import TreeShape
from eaglekit.models.head import EagleHead
from eaglekit.train.objective import unroll

Example = tuple[Tensor, Tensor, int]
"""ids int64 [n]; features [n - 1 or more, H]; where the answer, which goes to the end, starts."""


@dataclass(frozen=True)
class Acceptance:
    """Result of `simulate`.

    Attributes:
        tau: For each tree, new tokens per target pass, the bonus token included.
        n_alpha: For each depth of a chain, accepted / tried.
        tokens: New tokens that τ was measured on.
    """

    tau: dict[str, float]
    n_alpha: tuple[float, ...]
    tokens: int


def standard_shapes() -> dict[str, TreeShape]:
    """The chain of 5 and the paper's tree."""
    return {"chain": TreeShape.chain(5), "tree": TreeShape.paper()}


@torch.no_grad()
def simulate(
    head: EagleHead,
    examples: Sequence[Example],
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
    mode = head.training
    head.eval()
    depth = max(shape.max_depth for shape in shapes.values())
    width = max(len(children) for shape in shapes.values() for children in shape.children)
    tokens, rounds = dict.fromkeys(shapes, 0), dict.fromkeys(shapes, 0)
    tried, hit = [0] * depth, [0] * depth
    banned = torch.zeros(len(readout))
    if head.draft_vocab is not None:
        banned.fill_(-torch.inf)[head.draft_vocab.cpu()] = 0
    banned = banned.to(readout.device)
    for ids, features, start in examples:
        length = len(ids) - 2
        inputs = embedding[ids[1:-1].to(embedding.device)], features[:length].to(embedding.device)
        outputs = unroll(head, inputs[0][None].to(head.dtype), inputs[1][None].to(head.dtype), depth)
        ranks = _ranks([y[0] for y in outputs], ids[2:], readout, start - 1, width, banned)
        for root in range(start - 1, length):
            for s in range(min(depth, length - root)):
                tried[s] += 1
                hit[s] += ranks[s][root + s] == 0
                if ranks[s][root + s] != 0:
                    break
        for name, shape in shapes.items():
            root = start - 1
            while root < length:
                new = min(_accepted(shape, ranks, root, length) + 1, length - root)
                tokens[name] += new
                rounds[name] += 1
                root += new
    head.train(mode)
    return Acceptance(
        {name: tokens[name] / max(1, rounds[name]) for name in shapes},
        tuple(h / max(1, t) for h, t in zip(hit, tried, strict=True)),
        max(tokens.values()),
    )


def _accepted(shape: TreeShape, ranks: Sequence[Sequence[int]], root: int, length: int) -> int:
    """Drafts accepted in a tree rooted at input `root`."""
    node = accepted = 0
    while accepted < len(ranks) and root + accepted < length:
        rank = ranks[accepted][root + accepted]
        if rank >= len(shape.children[node]):
            break
        node = shape.children[node][rank]
        accepted += 1
    return accepted


def _ranks(
    outputs: Sequence[Tensor], labels: Tensor, readout: Tensor, first: int, width: int, banned: Tensor
) -> list[list[int]]:
    """For each step and input, the rank of the true token; `width` where no tree can have followed so far.

    `banned` [V] is 0 for tokens that may be drafted, minus infinity for the others.
    """
    alive = torch.zeros(len(labels), dtype=torch.bool)
    alive[first:] = True
    result = []
    for output in outputs:
        ranks = torch.full((len(labels),), width)
        rows = alive.nonzero()[:, 0]
        for part in rows.split(256):
            logits = output[part].to(readout.dtype) @ readout.T + banned
            own = logits.gather(1, labels[part, None].to(logits.device))
            ranks[part] = (logits > own).sum(-1).clamp_(max=width).cpu()
        result.append(ranks.tolist())
        alive = torch.cat((torch.zeros(1, dtype=torch.bool), (ranks < width)[:-1]))
    return result
