"""Where chance comes from.

Drafting and verification ask a `RandomSource` for every random decision. `GeneratorSource` answers from a
`torch.Generator`, so that a request's seed decides its whole output. A test or a check can answer with a source that
walks through *every* outcome instead, and so compute the exact law of the code that users run.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class RandomSource(Protocol):
    """Every random decision that decoding makes."""

    def accept(self, probability: float) -> bool:
        """True with this probability (values above 1 count as 1)."""
        ...

    def draw(self, probs: Tensor) -> int:
        """An index drawn from the law `probs` [V]."""
        ...

    def draw_distinct(self, probs: Tensor, count: int) -> Tensor:
        """`count` indices per row of `probs` [R, V], drawn one after the other without replacement.

        Returns:
            int64 [R, count], in the order drawn; -1 where a row has no index of positive probability left.
        """
        ...


class GeneratorSource:
    """Random decisions from a `torch.Generator` on the CPU, in float64; the global generator is never used.

    Laws may lie on any device: the few rows that decisions need are brought over, so that a seed means the same on
    every device, and devices without float64 will do.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    @staticmethod
    def seeded(seed: int) -> GeneratorSource:
        """A source whose decisions follow from `seed`."""
        return GeneratorSource(torch.Generator().manual_seed(seed))

    def accept(self, probability: float) -> bool:
        """See `RandomSource.accept`."""
        return torch.rand((), dtype=torch.float64, generator=self.generator).item() < probability

    def draw(self, probs: Tensor) -> int:
        """See `RandomSource.draw`."""
        totals = probs.to("cpu", torch.float64).cumsum(-1)
        place = torch.rand((), dtype=torch.float64, generator=self.generator) * totals[-1]
        # The first index whose sum lies above: it has a probability of its own, whatever rounding does.
        found = int(torch.searchsorted(totals, place, right=True))
        return found if found < len(totals) else int(torch.searchsorted(totals, totals[-1]))

    def draw_distinct(self, probs: Tensor, count: int) -> Tensor:
        """See `RandomSource.draw_distinct`."""
        keys, indices = self._race(probs).topk(min(count, probs.shape[-1]), dim=-1)
        indices = torch.where(keys > 0, indices, -1)
        missing = count - indices.shape[-1]
        return torch.nn.functional.pad(indices, (0, missing), value=-1) if missing else indices

    def _race(self, probs: Tensor) -> Tensor:
        """Keys p / Exp(1): their order, largest first, is the order of draws without replacement (Plackett-Luce)."""
        wait = torch.empty(probs.shape, dtype=torch.float64).exponential_(generator=self.generator)
        return probs.to("cpu", torch.float64) / wait.clamp_min_(torch.finfo(torch.float64).tiny)
