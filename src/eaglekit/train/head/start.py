"""A linear start: fit the head's first map to the features by ridge regression before the first optimizer step.

Most of what a draft head predicts is linear in its input: f_{j+1} from `[e(t_{j+1}) ; f_j]`, or from what its variant
reads instead. The fit takes seconds and replaces the first hundred steps or more of training; the rest of the head
starts small and random and learns what is left.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from eaglekit.models.head import EagleHead
from eaglekit.train.features.store import FeatureSource, StoredDialogue
from eaglekit.train.head.objective import embed, pairs_of


@torch.no_grad()
def linear_start(
    head: EagleHead,
    source: FeatureSource,
    rows: Sequence[StoredDialogue],
    embedding: Tensor,
    *,
    seed: int,
    tokens: int = 60_000,
    ridge: float = 1e-3,
) -> None:
    """Set the head's first map to the least-squares prediction of the next feature.

    That map is `fc`, or `fuse` of a head without `fc`. An output norm gets the features' size, since its output takes
    their place before the read-out.

    Args:
        head: A new head, in float32.
        source: Gives tokens and features.
        rows: Its dialogues for training; from the first answer on they are fitted.
        embedding: [vocabulary, E], the target's embeddings, on any device; the fit is made on the CPU.
        seed: Of the choice of dialogues.
        tokens: About how many positions are fitted.
        ridge: Weight of the penalty, relative to the inputs' mean square, or to each input's own with `feature_layers`.
    """
    config, device = head.config, head.device
    width = config.fc_width + config.fc_bias if head.fc is not None else config.feature_width
    gram, cross = torch.zeros(width, width), torch.zeros(width, config.hidden_size)
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    count, square = 0, 0.0
    for i in order:
        row = rows[i]
        pairs = pairs_of(head, source.tokens(row), source.read([row])[0].float().cpu())
        tokens_read, features, targets = (part[row.spans[0][0] - 1 :] for part in pairs)
        if head.fc is None:
            inputs = head.fuse_input(features.to(device)).cpu()
        else:
            embedded = embed(embedding, tokens_read.to(embedding.device)).float()
            inputs = head.fc_input(embedded.to(device), features.to(device)).cpu()
        if config.fc_bias:
            inputs = torch.cat((inputs, torch.ones(len(inputs), 1)), -1)
        gram.addmm_(inputs.T, inputs)
        cross.addmm_(inputs.T, targets)
        count, square = count + len(inputs), square + float(targets.square().mean(-1).sum())
        if count >= tokens:
            break
    # Some inputs of streams are thousands of times larger than embeddings: each is divided by its own size then.
    scale = gram.diagonal().sqrt().clamp_min(1e-6) if config.feature_layers else torch.ones(width)
    gram /= scale * scale[:, None]
    gram.diagonal().add_(ridge * gram.diagonal().mean() + 1e-6)
    weight = (torch.linalg.solve(gram, cross / scale[:, None]) / scale[:, None]).T
    if head.norm is not None:
        head.norm.weight.fill_((square / max(1, count)) ** 0.5)
    if head.fc is None:
        assert head.fuse is not None
        head.fuse.weight.copy_(weight)
        return
    if config.fc_bias:
        head.fc.bias.copy_(weight[:, -1])
        weight = weight[:, :-1]
    head.fc.weight.copy_(weight)
