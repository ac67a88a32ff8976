"""A linear start: fit `fc` to the features by ridge regression before the first optimizer step.

Most of what a draft head predicts is linear in its input: f_{j+1} from `[e(t_{j+1}) ; f_j]`. The fit takes seconds
and replaces the first hundred steps or more of training; the rest of the head starts small and random and learns what
is left.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from eaglekit.models.head import EagleHead
from eaglekit.train.features import FeatureStore, StoredDialogue


@torch.no_grad()
def linear_start(
    head: EagleHead,
    rows: Sequence[tuple[FeatureStore, StoredDialogue]],
    embedding: Tensor,
    *,
    seed: int,
    tokens: int = 60_000,
    ridge: float = 1e-3,
) -> None:
    """Set `head.fc` to the least-squares prediction of the next feature.

    Args:
        head: A new head, in float32.
        rows: Training dialogues; from the first answer on they are fitted.
        embedding: [vocabulary, E], the target's embeddings, on any device; the fit is made on the CPU.
        seed: Of the choice of dialogues.
        tokens: About how many positions are fitted.
        ridge: Weight of the penalty, relative to the inputs' mean square.
    """
    width = head.config.embedding_size + head.config.hidden_size + head.config.fc_bias
    gram, cross = torch.zeros(width, width), torch.zeros(width, head.config.hidden_size)
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    count = 0
    for i in order:
        store, row = rows[i]
        first = row.spans[0][0] - 1
        features, ids = store.features(row)[first:].float(), store.tokens(row)[first + 1 : -1]
        inputs = torch.cat((embedding[ids.to(embedding.device)].float().cpu(), features[:-1]), -1)
        if head.config.fc_bias:
            inputs = torch.cat((inputs, torch.ones(len(inputs), 1)), -1)
        gram.addmm_(inputs.T, inputs)
        cross.addmm_(inputs.T, features[1:])
        count += len(inputs)
        if count >= tokens:
            break
    gram.diagonal().add_(ridge * gram.diagonal().mean() + 1e-6)
    weight = torch.linalg.solve(gram, cross).T
    if head.config.fc_bias:
        head.fc.bias.copy_(weight[:, -1])
        weight = weight[:, :-1]
    head.fc.weight.copy_(weight)
