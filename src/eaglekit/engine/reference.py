"""Plain decoding by full recomputation: the oracle of the tests and of `eaglekit check`.

It knows no cache, no tree and no drafter: each token comes from one pass over everything before it. Only the law and
the stopping are shared with the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eaglekit.core.random import RandomSource
from eaglekit.core.sampling import Law
from eaglekit.engine.stopping import Piece, Stopper

NextLogits = Callable[[Sequence[int]], Tensor]
"""Token ids -> logits [V] behind the last one."""


def next_probs(next_logits: NextLogits, ids: Sequence[int], law: Law) -> Tensor:
    """The law [V] of the token behind `ids`."""
    return law.probs(next_logits(ids)[None], [torch.tensor(list(ids))])[0]


def decode(
    next_logits: NextLogits,
    prompt: Sequence[int],
    *,
    law: Law,
    source: RandomSource,
    stopper: Stopper,
) -> list[Piece]:
    """Answer `prompt` step by step, one token per pass."""
    ids = list(prompt)
    pieces: list[Piece] = []
    while not stopper.finished:
        logits = next_logits(ids)
        probs = law.probs(logits[None], [torch.tensor(ids)])[0]
        token = int(probs.argmax()) if law.greedy else source.draw(probs)
        logprob = torch.log_softmax(logits.float(), -1)[token].item()
        pieces.append(stopper.push([token], [logprob]))
        ids.append(token)
    return pieces
