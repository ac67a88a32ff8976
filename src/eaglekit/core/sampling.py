"""From logits to the law that a token is drawn from: the one path that every decoder uses.

The order and the meaning are Hugging Face's: processors that depend on the text so far, then temperature, top-k, top-p
and min-p. All of it happens in float32 (or better, if the logits are). Temperature 0 is greedy: the law is the argmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eaglekit.errors import InputError

Processor = Callable[[Tensor, Tensor], Tensor]
"""(ids int64 [1, L], scores float32 [1, V]) -> scores [1, V]; the call of a `LogitsProcessor` of transformers."""


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: Keep the smallest set of tokens whose probabilities reach this sum; 1 keeps all.
        top_k: Keep the k most probable tokens (ties with the k-th stay); 0 keeps all.
        min_p: Keep tokens with at least this share of the most probable one's probability; 0 keeps all.
        repetition_penalty: Divide positive and multiply negative logits of tokens that appeared; 1 changes nothing.

    Raises:
        InputError: a value is out of range; all such values are named at once.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value!r} (expected {expected})"
            for name, value, good, expected in (
                ("temperature", self.temperature, _within(self.temperature, 0, math.inf), "a number from 0"),
                (
                    "top_p",
                    self.top_p,
                    _within(self.top_p, 0, 1) and self.top_p > 0,
                    "a number above 0, at most 1",
                ),
                (
                    "top_k",
                    self.top_k,
                    isinstance(self.top_k, int) and _within(self.top_k, 0, math.inf),
                    "a whole number; 0 keeps all tokens",
                ),
                ("min_p", self.min_p, _within(self.min_p, 0, 1), "a number from 0 to 1"),
                (
                    "repetition_penalty",
                    self.repetition_penalty,
                    _within(self.repetition_penalty, 0, math.inf) and self.repetition_penalty > 0,
                    "a number above 0; 1 changes nothing",
                ),
            )
            if not good
        ]
        if problems:
            raise InputError("sampling: " + "; ".join(problems))


def _within(value: Any, low: float, high: float) -> bool:
    """Whether `value` is a finite number between `low` and `high`."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and low <= value <= high
    )


class RepetitionPenalty:
    """Penalise tokens that the prompt or the answer holds already, as transformers does."""

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """See `Processor`."""
        seen = scores.gather(-1, ids)
        seen = torch.where(seen < 0, seen * self.penalty, seen / self.penalty)
        return scores.scatter(-1, ids, seen)


@dataclass(frozen=True)
class Law:
    """What one request draws its tokens from.

    Attributes:
        params: Temperature and the sets of tokens kept.
        processors: Applied in order, before the temperature, each to one position with its own prefix.
    """

    params: SamplingParams
    processors: tuple[Processor, ...] = ()

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.params.temperature == 0

    @property
    def needs_prefix(self) -> bool:
        """Whether the law of a position depends on the ids before it."""
        return bool(self.processors)

    def scores(self, logits: Tensor, prefixes: Sequence[Tensor] | None = None) -> Tensor:
        """Logits [R, V] after the processors, in float32 or better.

        Args:
            logits: [R, V].
            prefixes: For each row the ids that stand before its position, int64 [L]; needed if `needs_prefix`.
        """
        scores = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        if not self.processors:
            return scores
        if prefixes is None:
            raise InputError("law: processors were given, so a prefix is needed for every row; got none")
        rows = []
        for row, ids in zip(scores, prefixes, strict=True):
            one, ids = row[None].clone(), ids[None].to(row.device)
            for number, process in enumerate(self.processors):
                one = process(ids, one)
                if not isinstance(one, Tensor) or one.shape != (1, len(row)):
                    got = tuple(one.shape) if isinstance(one, Tensor) else type(one).__name__
                    raise InputError(
                        f"logits processor {number} ({type(process).__name__}) returned {got}; expected a tensor of "
                        f"scores of shape (1, {len(row)})"
                    )
            rows.append(one)
        return torch.cat(rows)

    def argmax(self, logits: Tensor, prefixes: Sequence[Tensor] | None = None) -> Tensor:
        """The most probable token of each row, the first of equal ones: int64 [R]."""
        scores = self.scores(logits, prefixes)
        if scores.device.type == "cpu":  # NumPy's is ten times as fast
            return torch.from_numpy(scores.numpy().argmax(-1))
        return scores.argmax(-1)

    def probs(self, logits: Tensor, prefixes: Sequence[Tensor] | None = None) -> Tensor:
        """The law of each row, [R, V]: non-negative, rows sum to 1.

        With temperature 0 all the mass is on the argmax.
        """
        scores = self.scores(logits, prefixes)
        if self.greedy:
            return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
        if self.params.temperature < 1e-4:  # float32 could overflow; what is far below the best may
            scores = scores - scores.amax(-1, keepdim=True)
        return torch.softmax(_keep(scores / max(self.params.temperature, 1e-30), self.params), dim=-1)


def _keep(scores: Tensor, params: SamplingParams) -> Tensor:
    """Set the scores of tokens that top-k, top-p or min-p drop to minus infinity. [R, V] -> [R, V]."""
    if 0 < params.top_k < scores.shape[-1]:
        smallest = scores.topk(params.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < smallest, -math.inf)
    if params.top_p < 1:
        ordered, order = scores.sort(dim=-1)
        drop = ordered.softmax(-1).cumsum(-1) <= 1 - params.top_p
        drop[..., -1] = False
        scores = scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -math.inf)
    if params.min_p > 0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), -math.inf)
    return scores
