"""What targets and their states check before they compute or keep anything, and what they say of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eaglekit.core.tree import DraftTree
from eaglekit.errors import InputError
from eaglekit.models.target import TargetInfo


class RowChecks:
    """Lengths of B rows that may hold `max_length` tokens each, and the questions about them."""

    def __init__(self, info: TargetInfo, batch: int, max_length: int) -> None:
        self._info = info
        self._max_length = max_length
        self._lengths = [0] * batch

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed tokens of each row."""
        return tuple(self._lengths)

    def _check_rows(self, verb: str, got: int) -> None:
        if got != len(self._lengths):
            raise InputError(f"{verb}: got {got} rows, expected {len(self._lengths)}: one entry for each row")

    def _check_room(self, row: int, slots: int, positions: int) -> None:
        length, limit = self._lengths[row], self._info.max_length
        if length + positions > limit:
            raise InputError(
                f"row {row}: {positions} more tokens behind {length} make {length + positions}, over the context "
                f"limit of {limit}; shorten the prompt or ask for fewer new tokens"
            )
        if length + slots > self._max_length:
            raise InputError(
                f"row {row}: {slots} more tokens or nodes behind {length} make {length + slots}, but the state was "
                f"opened for {self._max_length}; open it with a larger max_length"
            )

    def _checked_ids(self, ids: Sequence[Tensor], check_ids: Callable[[Tensor], None]) -> list[Tensor]:
        """What a prefill is to read, int64 on the CPU: there is room for it, and `check_ids` has nothing against it."""
        self._check_rows("prefill", len(ids))
        flat = [i.detach().to("cpu", torch.int64).reshape(-1) for i in ids]
        for row, new in enumerate(flat):
            self._check_room(row, len(new), len(new))
            check_ids(new)
        return flat

    def _check_lengths(self, lengths: Sequence[int]) -> None:
        """For truncation."""
        self._check_rows("truncate", len(lengths))
        for row, (new, old) in enumerate(zip(lengths, self._lengths, strict=True)):
            if not 0 <= new <= old:
                raise InputError(f"truncate: row {row} holds {old} tokens, got {new}; expected 0 to {old}")


def check_open(name: str, batch: int, max_length: int, layers: Sequence[int], last: int) -> None:
    """Refuse what no state can be opened for; `last` is the highest id of a layer that `layers` may ask for."""
    if batch < 1 or max_length < 1:
        raise InputError(f"open: got batch {batch} and max_length {max_length}; expected at least 1 of each")
    for layer in layers:
        if not 0 <= layer <= last:
            raise InputError(f"open: no layer {layer} in {name}; expected 0 (embeddings) to {last}")


def check_vocabulary(name: str, ids: Tensor, size: int) -> None:
    """Refuse `ids` (on the CPU) that have none of the `size` embeddings: devices report that badly, or not at all."""
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        bad = next(i for i in ids.tolist() if not 0 <= i < size)
        raise InputError(f"token id {bad}: expected 0 to {size - 1}, the vocabulary of {name}")


def unused_weights(name: str, unused: Sequence[str]) -> tuple[str, ...]:
    """What a user is told of tensors of a checkpoint that were not read; nothing if there are none."""
    if not unused:
        return ()
    return (
        f"{name}: {len(unused)} weights of the checkpoint are not used, {unused[0]} first; "
        "is its config.json the right one?",
    )


def check_path(row: int, path: Sequence[int], tree: DraftTree | None) -> int:
    """How many leading nodes of `path` lie in place already; raise InputError unless it is a path from the root."""
    parents = tree.shape.parents if tree is not None else ()
    above = (-1, *path)
    if not all(0 <= n < len(parents) and parents[n] == a for n, a in zip(path, above, strict=False)):
        raise InputError(f"commit: row {row}: nodes {list(path)} are not a path from the tree's root")
    return next((i for i, n in enumerate(path) if i != n), len(path))


NO_TREE = "commit: no tree to commit; expected forward_tree right before it"
