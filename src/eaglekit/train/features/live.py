"""Features read off the target: for a store, or on the fly.

Contract: a row's features depend on its tokens alone, never on the rows that are read with it, so that `LiveFeatures`
gives the bits that a store filled by `extract` holds. Targets that `FastRows` can run are read there with int8 weights,
as answers are made, so that features that came for free with an answer are the same bits too; others row by row by the
stock adapter.

Glossary: see `features`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from eaglekit.errors import DataError, UnsupportedModelError
from eaglekit.models.checks import check_open
from eaglekit.models.fast import fast_target
from eaglekit.models.hf import HFTarget
from eaglekit.models.rows import FastRows
from eaglekit.train.features.store import FEATURE_DTYPE, FeatureSink, StoredDialogue
from eaglekit.train.text.answers import is_fast
from eaglekit.train.text.dataset import Dialogue

_READ_SLOTS = 16

Reader = Callable[[Sequence[Sequence[int]]], list[Tensor]]
"""Token ids of rows -> features [n, W] of each, on the CPU."""


class LiveFeatures:
    """Dialogues held in memory, features read when they are asked for. See `FeatureSource`.

    Args:
        target: The target.
        dialogues: Of two tokens at least.
        layers: See `FeatureFacts`.

    Raises:
        DataError: there are no dialogues.
        InputError: the target has no such layer.
    """

    def __init__(self, target: HFTarget, dialogues: Sequence[Dialogue], layers: Sequence[int] = ()) -> None:
        if not dialogues:
            raise DataError("no training dialogues; nothing to train on")
        self.dialogues: Sequence[StoredDialogue] = [
            StoredDialogue(i, len(d.ids), tuple(d.spans), d.greedy) for i, d in enumerate(dialogues)
        ]
        self._ids = [torch.tensor(d.ids, dtype=torch.int32) for d in dialogues]
        self._read = reader(target, max(map(len, self._ids)), layers)

    def tokens(self, row: StoredDialogue) -> Tensor:
        """int64 [n]."""
        return self._ids[row.number].long()

    def read(self, rows: Sequence[StoredDialogue]) -> list[Tensor]:
        """float16 [n - 1, W] of each row, float32 where float16 cannot hold a value of it; all are read in one go."""
        found = self._read([self._ids[row.number].tolist() for row in rows])
        return [_rounded(features[:-1]) for features in found]


def _rounded(features: Tensor) -> Tensor:
    small = features.to(FEATURE_DTYPE)
    return small if bool(torch.isfinite(small).all()) else features.float().clone()


def extract(
    target: HFTarget,
    dialogues: Sequence[Dialogue],
    sink: FeatureSink,
    *,
    layers: Sequence[int] = (),
    group_tokens: int = 8192,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Give `sink` each of `dialogues`, in their order, with its features from teacher-forced passes of `target`.

    Args:
        target: The target.
        dialogues: Of two tokens at least.
        sink: Such as the `append` of a writer.
        layers: See `FeatureFacts`.
        group_tokens: About how many tokens are read in one call.
        on_progress: Called with (tokens read, tokens in all).

    Raises:
        InputError: the target has no such layer, or a dialogue is longer than its context.
    """
    total = sum(len(d.ids) for d in dialogues)
    read = reader(target, max((len(d.ids) for d in dialogues), default=1), layers)
    done = 0
    for group in _groups(dialogues, group_tokens):
        for dialogue, features in zip(group, read([d.ids for d in group]), strict=True):
            sink(dialogue, features)
            done += len(dialogue.ids)
        if on_progress is not None:
            on_progress(done, total)


def _groups(dialogues: Sequence[Dialogue], size: int) -> Iterator[list[Dialogue]]:
    group: list[Dialogue] = []
    tokens = 0
    for dialogue in dialogues:
        group.append(dialogue)
        tokens += len(dialogue.ids)
        if tokens >= size:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def reader(target: HFTarget, max_length: int, layers: Sequence[int] = ()) -> Reader:
    """What reads rows of 1 to `max_length` tokens.

    Raises:
        InputError: the target has no such layer.
    """
    check_open(target.info.name, 1, max_length, layers, target.info.num_layers)
    return _fast_reader(target.model, max_length, layers) if is_fast(target.model) else _stock_reader(target, layers)


def _fast_reader(model: Any, max_length: int, layers: Sequence[int]) -> Reader:
    rows = FastRows(fast_target(model, "int8"), _READ_SLOTS, max_length)

    def read(ids: Sequence[Sequence[int]]) -> list[Tensor]:
        parts = [ids[i : i + _READ_SLOTS] for i in range(0, len(ids), _READ_SLOTS)]
        return [features for part in parts for features in rows.read(part, range(len(part)), layers)]

    return read


def read_row(target: HFTarget, ids: Sequence[int], layers: Sequence[int] = ()) -> Tensor:
    """Features [n, W] of n tokens, in the target's dtype, on the CPU; see `FeatureFacts`.

    Raises:
        UnsupportedModelError: a layer is of another width than the features.
    """
    out = target.open(1, len(ids), layers).prefill([torch.tensor(ids)])
    parts = [out.features, *(out.layers[k] for k in layers)]
    if any(x.shape != out.features.shape for x in parts):
        raise UnsupportedModelError(
            f"{target.info.name}: its layers are {parts[1].shape[-1]} wide, its features "
            f"{target.info.hidden_size}; expected the same width; train a head on features alone"
        )
    return torch.cat(parts, -1)[0].cpu()


def _stock_reader(target: HFTarget, layers: Sequence[int]) -> Reader:
    # Row by row: products over several rows at once may round otherwise than those over one.
    return lambda ids: [read_row(target, row, layers) for row in ids]
