"""Key/value buffers for trees and for rows of unequal length, and the mask that goes with them.

Contract: a `TreeCache` goes to the model as its cache argument. Before a pass, `begin` says where the tokens go; during
it every layer writes its new keys and values there, in place, and hands back views of what the pass may see. Which
slots hold what is the caller's to know (`models/state.py`); nothing behind a row's length is ever read.

Glossary:

    slot      an index along a row's buffer; a committed token at position p lies in slot p
    start     committed tokens of a row: its pass writes from this slot on
    count     tokens of a row in a pass; a row with fewer than the pass is wide is padded
    scratch   the last slot of every buffer: padding is written there, and it is never read
    visible   which of a pass's tokens each may attend to, [n, n]; the committed prefix is always visible

Buffers are allocated at a layer's first update, from the shapes it sends: head counts, head sizes and devices may
differ between layers, and between keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True)
class Placement:
    """Where the tokens of one pass go.

    Attributes:
        rows: Buffer rows that take part, ascending. The pass's batch dimension follows them.
        starts: Committed tokens of each.
        counts: Tokens of each in this pass.
        width: Tokens per row as the model sees them, padding included.
        scratch: The slot for padding.
    """

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    width: int
    scratch: int

    @cached_property
    def length(self) -> int:
        """Slots of each row that the pass is shown."""
        return max(s + c for s, c in zip(self.starts, self.counts, strict=True))

    @cached_property
    def adjacent(self) -> bool:
        """Whether `rows` is a range, so that views of the buffers do."""
        return self.rows[-1] - self.rows[0] + 1 == len(self.rows)

    @cached_property
    def block(self) -> bool:
        """Whether every row writes the same slots, all of them real: one slice instead of indices."""
        return self.adjacent and len(set(self.starts)) == 1 and min(self.counts) == self.width

    @cached_property
    def slots(self) -> Tensor:
        """int64 [R, N], on the CPU: the slot that each token is written to."""
        steps = torch.arange(self.width)
        real = steps < torch.tensor(self.counts)[:, None]
        return torch.where(real, torch.tensor(self.starts)[:, None] + steps, self.scratch)


class _TreeLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's buffers: keys [B, heads, max_length + 1, key size], values likewise."""

    is_sliding = False

    def __init__(self, owner: TreeCache) -> None:
        super().__init__()
        self._owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for keys [R, heads, N, D] and values [R, heads, N, D']. Zeros: a masked NaN would still spread."""
        size = (self._owner.batch, self._owner.max_length + 1)
        self.keys, self.values = (
            torch.zeros(size[0], x.shape[1], size[1], x.shape[3], dtype=x.dtype, device=x.device)
            for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the pass's keys and values [R, heads, N, D]; give back all that it may see, [R, heads, length, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, buffer: Tensor, new: Tensor) -> Tensor:
        place = self._owner.place
        first, last = place.rows[0], place.rows[-1] + 1
        if place.block:
            buffer[first:last, :, place.starts[0] : place.starts[0] + place.width] = new
        else:
            rows, slots = self._owner.indices(buffer.device)
            buffer[rows[:, None], :, slots] = new.transpose(1, 2)
        if place.adjacent:
            return buffer[first:last, :, : place.length]
        return buffer[:, :, : place.length].index_select(0, self._owner.indices(buffer.device)[0])

    def get_seq_length(self, *_: Any) -> int:
        """Committed tokens of the longest row in the pass."""
        return max(self._owner.place.starts)

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """Length and offset of what `update` gives back."""
        return self._owner.place.length, 0

    def get_max_length(self) -> int:
        """Tokens that a row can hold."""
        return self._owner.max_length

    get_max_cache_shape = get_max_length  # its name in older releases


class TreeCache(Cache):  # type: ignore[misc]
    """Buffers of all layers for `batch` rows of `max_length` slots."""

    def __init__(self, batch: int, max_length: int) -> None:
        super().__init__(layer_class_to_replicate=partial(_TreeLayer, self))
        self.batch = batch
        self.max_length = max_length
        self.place = Placement((0,), (0,), (0,), 0, max_length)
        self._indices: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def begin(self, rows: tuple[int, ...], starts: tuple[int, ...], counts: tuple[int, ...], width: int) -> None:
        """Set where the next pass writes."""
        self.place = Placement(rows, starts, counts, width, self.max_length)
        self._indices.clear()

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The pass's rows [R] and slots [R, N] on `device`."""
        if device not in self._indices:
            self._indices[device] = torch.tensor(self.place.rows, device=device), self.place.slots.to(device)
        return self._indices[device]

    def move(self, rows: Sequence[int], sources: Sequence[Sequence[int]], targets: Sequence[int]) -> None:
        """In each of `rows`, copy the slots `sources[r]` to the slots from `targets[r]` on; all reads come first."""
        width = max(map(len, sources))
        pad = self.max_length
        source = torch.tensor([[*s, *[pad] * (width - len(s))] for s in sources])
        target = torch.tensor(
            [[*range(t, t + len(s)), *[pad] * (width - len(s))] for s, t in zip(sources, targets, strict=True)]
        )
        which = torch.tensor(rows)[:, None]
        for layer in self.layers:
            for buffer in (layer.keys, layer.values) if layer.is_initialized else ():
                if len(rows) == 1:
                    moved = buffer[rows[0]].index_select(1, source[0].to(buffer.device))
                    buffer[rows[0], :, targets[0] : targets[0] + width] = moved
                else:
                    r, s, t = (x.to(buffer.device) for x in (which, source, target))
                    buffer[r, :, t] = buffer[r, :, s]


def additive_mask(
    place: Placement, positions: Tensor, visible: Sequence[Tensor], dtype: torch.dtype, window: int | None
) -> Tensor:
    """The mask of one pass: 0 where attention is allowed, the dtype's lowest number elsewhere.

    A token sees its row's committed prefix and what `visible` allows, within the last `window` positions if there is a
    window. Padding sees the prefix and the row's first token, so that no row of the mask is empty.

    Args:
        place: The pass.
        positions: int64 [R, N], on the device of the mask.
        visible: For each row bool [n, n] on any device, n its count.
        dtype: Of the mask.
        window: Positions that a token looks back to, itself included; None for all.

    Returns:
        [R, 1, N, place.length].
    """
    device, low = positions.device, torch.finfo(dtype).min
    mask = torch.full((len(place.rows), 1, place.width, place.length), low, dtype=dtype, device=device)
    for r, (start, count) in enumerate(zip(place.starts, place.counts, strict=True)):
        mask[r, 0, :, :start] = 0
        mask[r, 0, count:, start] = 0
        own = mask[r, 0, :count, start : start + count]
        own.masked_fill_(visible[r].to(device), 0)
    if window is not None:
        slots = torch.arange(place.length, device=device).repeat(len(place.rows), 1)
        for r, (start, count) in enumerate(zip(place.starts, place.counts, strict=True)):
            slots[r, start : start + count] = positions[r, :count]
        mask.masked_fill_((positions[:, :, None] - slots[:, None, :] >= window)[:, None], low)
    return mask
