"""Doubles for tests and for `eaglekit check`: a target of a few tokens, and chance that takes every turn.

`TableTarget` has no neural network: the feature behind a prefix is drawn, once and for all, from a generator seeded
by the prefix, and logits are a fixed matrix times the feature. Its law can be written down, so the law of what the
engine emits can be compared with it exactly. `every_outcome` runs a function once for each outcome of its random
decisions, and gives the probability of each: no sampling error, no threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from eaglekit.core.random import RandomSource
from eaglekit.core.tree import DraftTree
from eaglekit.models.target import TargetInfo, TargetOutput

T = TypeVar("T")


class TableTarget:
    """A `Target` whose features are a function of the prefix alone.

    Args:
        vocab_size: V.
        hidden_size: H.
        seed: Decides features, embeddings and the output matrix.
        max_length: The context limit.
        sharpness: Logits grow with it; large values make the law nearly deterministic.
    """

    def __init__(
        self,
        vocab_size: int = 3,
        hidden_size: int = 8,
        seed: int = 0,
        max_length: int = 64,
        sharpness: float = 1.5,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._embeddings = torch.randn(vocab_size, hidden_size, generator=generator)
        self._matrix = torch.randn(vocab_size, hidden_size, generator=generator)
        self._matrix *= sharpness / hidden_size**0.5
        self._seed = seed
        self._features: dict[tuple[int | None, ...], Tensor] = {}
        self.info = TargetInfo(
            name="table",
            model_type="table",
            hidden_size=hidden_size,
            embedding_size=hidden_size,
            vocab_size=vocab_size,
            num_layers=1,
            max_length=max_length,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )

    def feature(self, ids: Sequence[int], layer: int | None = None) -> Tensor:
        """[H]: the feature behind `ids`, or the residual stream that enters a layer there."""
        key = (layer, *ids)
        if key not in self._features:
            number = self._seed
            for token in (*ids, *(() if layer is None else (-2 - layer,))):
                number = (number * 1_000_003 + token + 1) % (2**61 - 1)
            generator = torch.Generator().manual_seed(number)
            self._features[key] = torch.randn(self.info.hidden_size, generator=generator)
        return self._features[key]

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """[V]: the logits behind `ids`."""
        return self.lm_head(self.feature(ids)[None])[0]

    def embed(self, ids: Tensor) -> Tensor:
        """See `Target.embed`."""
        return self._embeddings[ids]

    def lm_head(self, features: Tensor) -> Tensor:
        """See `Target.lm_head`."""
        # Row by row, so that a row's bits do not depend on how many rows there are.
        return (features[..., None, :] * self._matrix).sum(-1)

    def lm_head_of(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        """See `Target.lm_head_of`."""
        return lambda features: self.lm_head(features)[..., ids]

    def open(self, batch: int, max_length: int, layers: Sequence[int] = ()) -> TableState:
        """See `Target.open`."""
        return TableState(self, batch, layers)


class TableState:
    """The `TargetState` of a `TableTarget`: its cache is the list of tokens."""

    def __init__(self, target: TableTarget, batch: int, layers: Sequence[int] = ()) -> None:
        self._target, self._layers = target, layers
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self._trees: Sequence[DraftTree] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """See `TargetState.lengths`."""
        return tuple(len(row) for row in self.rows)

    def prefill(self, ids: Sequence[Tensor]) -> TargetOutput:
        """See `TargetState.prefill`."""
        texts = []
        for row, new in zip(self.rows, ids, strict=True):
            start = len(row)
            row.extend(new.tolist())
            texts.append([row[: i + 1] for i in range(start, len(row))])
        return self._output(texts, last=True)

    def forward_tree(self, trees: Sequence[DraftTree]) -> TargetOutput:
        """See `TargetState.forward_tree`."""
        self._trees = trees
        texts = []
        for row, tree in zip(self.rows, trees, strict=True):
            tokens = tree.tokens.tolist()
            texts.append([row + [tokens[n] for n in tree.shape.path(node)] for node in range(len(tokens))])
        return self._output(texts, last=False)

    def commit(self, nodes: Sequence[Sequence[int]]) -> None:
        """See `TargetState.commit`."""
        for row, tree, kept in zip(self.rows, self._trees, nodes, strict=True):
            row.extend(tree.tokens[list(kept)].tolist())

    def truncate(self, lengths: Sequence[int]) -> None:
        """See `TargetState.truncate`."""
        for row, length in zip(self.rows, lengths, strict=True):
            del row[length:]

    def depth_limit(self, row: int) -> int | None:
        """See `TargetState.depth_limit`."""
        return None

    def _output(self, texts: list[list[list[int]]], *, last: bool) -> TargetOutput:
        """What follows from the texts that end in each row's tokens."""
        width = max(map(len, texts))
        zero = torch.zeros(self._target.info.hidden_size)

        def stacked(layer: int | None) -> Tensor:
            found = [[self._target.feature(text, layer) for text in row] for row in texts]
            return torch.stack([torch.stack(f + [zero] * (width - len(f))) for f in found])

        features = stacked(None)
        ends = torch.stack([f[len(row) - 1] if row else zero for f, row in zip(features, texts, strict=True)])[:, None]
        logits = self._target.lm_head(ends if last else features)
        return TargetOutput(logits, features, {layer: stacked(layer) for layer in self._layers})


class _Script:
    """A `RandomSource` that follows a list of choices, and takes the first possible outcome beyond its end."""

    def __init__(self, choices: list[int], forced: Sequence[int]) -> None:
        self.choices = choices
        self.options: list[int] = []
        self.weight = 1.0
        self._forced = list(forced)

    def _choose(self, weights: Sequence[float]) -> int:
        total = sum(weights)
        probs = [w / total for w in weights] if total > 0 else [1.0]  # like the race of `GeneratorSource`
        possible = [i for i, p in enumerate(probs) if p > 0]
        turn = len(self.options)
        if turn == len(self.choices):
            self.choices.append(0)
        self.options.append(len(possible))
        outcome = possible[self.choices[turn]]
        self.weight *= probs[outcome]
        return outcome

    def accept(self, probability: float) -> bool:
        p = min(1.0, probability)
        return self._choose([1 - p, p]) == 1

    def draw(self, probs: Tensor) -> int:
        if self._forced:
            return self._forced.pop(0)
        return self._choose(probs.double().tolist())

    def draw_distinct(self, probs: Tensor, count: int) -> Tensor:
        rows = []
        for law in probs.double():
            chosen: list[int] = []
            left = law.clone()
            while len(chosen) < count and left.sum() > 0:
                chosen.append(self._choose(left.tolist()))
                left[chosen[-1]] = 0
            rows.append(chosen + [-1] * (count - len(chosen)))
        return torch.tensor(rows)


def every_outcome(run: Callable[[RandomSource], T], forced: Sequence[int] = ()) -> Iterator[tuple[T, float]]:
    """Yield what `run` returns for each outcome of the random decisions that it makes, with its probability.

    Args:
        run: Called once per outcome, each time from the start; must depend on nothing but its source.
        forced: Outcomes of the first calls of `draw`; their probabilities are not counted.
    """
    choices: list[int] = []
    while True:
        script = _Script(choices, forced)
        result = run(script)
        yield result, script.weight
        while choices and choices[-1] + 1 >= script.options[len(choices) - 1]:
            choices.pop()
        if not choices:
            return
        choices[-1] += 1
