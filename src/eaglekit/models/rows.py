"""Many independent texts at once over a `FastTarget`: what making training text needs, and later batches build on.

Contract: `FastRows` holds up to `slots` rows of at most `max_length` tokens. Rows have lengths of their own; a slot
that was left can be given to another text at once. A row's results are those that it would have alone. Nothing is
checked: the caller keeps track of lengths.

Glossary: M slots, H features' width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eaglekit.models.fast import FastTarget
from eaglekit.models.stack import Plan, chain, join

_GROUP_TOKENS = 1024  # tokens of a pass that reads texts


class FastRows:
    """Caches of `slots` rows; see the module."""

    def __init__(self, target: FastTarget, slots: int, max_length: int) -> None:
        self.target = target
        self.max_length = max_length
        self._caches = target.caches(slots, max_length)

    @torch.inference_mode()
    def read(self, ids: Sequence[Sequence[int]], slots: Sequence[int], layers: Sequence[int] = ()) -> list[Tensor]:
        """Features [n_b, H] of each text of `ids`, read from position 0 into the caches of its slot.

        With `layers`, ids of residual streams as in `Target.open`, these follow the features in ascending order:
        [n_b, H * (1 + len(layers))].
        """
        features: list[Tensor] = []
        group: list[int] = []
        for b in range(len(ids)):
            group.append(b)
            if sum(len(ids[i]) for i in group) >= _GROUP_TOKENS or b == len(ids) - 1:
                plan = join([chain(slots[i], 0, len(ids[i])) for i in group])
                tokens = torch.tensor([t for i in group for t in ids[i]])
                out, streams = self.target.forward(tokens, plan, self._caches, layers)
                if layers:
                    out = torch.cat((out, *(streams[k] for k in sorted(streams))), -1)
                features.extend(out.split([len(ids[i]) for i in group]))
                group = []
        return features

    @torch.inference_mode()
    def step(self, slots: Sequence[int], tokens: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Read one token in each of `slots`, at position `lengths[i]`: features [len(slots), H]."""
        row, position = (np.asarray(x, dtype=np.int32) for x in (slots, lengths))
        nothing = np.zeros(len(row) + 1, dtype=np.int32)
        plan = Plan(row, position, position, position + np.int32(1), nothing, nothing)
        return self.target.forward(torch.tensor(tokens), plan, self._caches)[0]
