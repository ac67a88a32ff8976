"""The draft head at work: packed and fused where that can be, in its own module elsewhere.

Contract: a `DraftModel` is a head next to its target: it can be shared. Its `HeadState`s hold the keys and values of
one caller's rows. A row's first `lengths[b]` entries are committed pairs (token one step ahead, true feature); drafts
are written behind them and are overwritten by what comes next. Both kinds of state do the same arithmetic up to
rounding; a head's own precision decides nothing but how many drafts are accepted.

A head keeps its own precision whatever the target's: a checkpoint in float16 is packed as float16, any other as
float32; int8 where that is asked for. A read-out that is the target's matrix has the target's format; float16 for a
float32 target's draft vocabulary.

Glossary: B rows, n drafts of a level, H width of the features, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from eaglekit.core.tree import TreeShape
from eaglekit.errors import InputError
from eaglekit.models.fast import FastTarget
from eaglekit.models.head import EagleHead, HeadCache
from eaglekit.models.native import MOST_TOP, GrowLevel, NativeBackend, NativeGrower, NativeHead, NativeMatrix, native
from eaglekit.models.stack import (
    Caches,
    LayerWeights,
    Plan,
    RotaryTables,
    StackShape,
    Weights,
    chain,
    join,
)
from eaglekit.models.target import Target

Pairs = tuple[Tensor, Tensor]
"""Tokens int64 [k], one step ahead of the features [k, H], or [k, feature_width] of a head with `feature_layers`.

All heads are given the same tokens; one that reads the features' own tokens remembers those before.
"""


@dataclass(frozen=True)
class Level:
    """The drafts of a tree's level that have children, and what the head reads them with.

    Attributes:
        nodes: Their numbers in the tree.
        above: For each, the place of its parent among the level above's `nodes`.
        depth: 0 for the root's.
        offset: Drafts of the levels above, the root not counted: as many entries stand behind the committed ones.
        mask: bool [n, offset + n]: which of these entries and its own level's each attends to.
    """

    nodes: tuple[int, ...]
    above: tuple[int, ...]
    depth: int
    offset: int
    mask: Tensor

    @cached_property
    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """The mask as int32 [n + 1] and [...]: draft i attends to the entries `flat[path[i] : path[i + 1]]`."""
        rows = [np.flatnonzero(row) for row in self.mask.cpu().numpy()]
        path = np.cumsum([0, *map(len, rows)])
        return path.astype(np.int32), np.concatenate([*rows, np.zeros(1)]).astype(np.int32)


@lru_cache(maxsize=64)
def levels_of(shape: TreeShape) -> tuple[Level, ...]:
    """The levels that have nodes with children, from the root's on."""
    found: list[Level] = []
    inner: list[int] = []
    for depth, all_nodes in enumerate(shape.levels()):
        nodes = tuple(n for n in all_nodes if shape.children[n])
        if not nodes:
            break
        places = {n: i for i, n in enumerate(found[-1].nodes)} if found else {}
        offset = len(inner)
        inner += nodes if depth else []
        mask = shape.mask[list(nodes)][:, inner]
        found.append(Level(nodes, tuple(places.get(shape.parents[n], 0) for n in nodes), depth, offset, mask))
    return tuple(found)


@dataclass(frozen=True)
class Drafted:
    """The head's output: predicted features [B, n, H], and their logits over the draft vocabulary [B, n, Vd]."""

    features: Tensor
    logits: Tensor


def _grow_level(level: Level, shape: TreeShape) -> GrowLevel:
    path, seen = level.seen
    children = [shape.children[node] for node in level.nodes]
    first = np.cumsum([0, *map(len, children)])
    flat = [child for some in children for child in some]
    node, above, first, child = (np.asarray(x, dtype=np.int32) for x in (level.nodes, level.above, first, flat))
    return GrowLevel(level.depth, level.offset, node, above, path, seen, first, child)


class HeadState(Protocol):
    """The head's caches of B rows."""

    @property
    def lengths(self) -> list[int]:
        """Committed pairs of each row."""
        ...

    def read(self, pairs: Sequence[Pairs | None]) -> Drafted:
        """Read and commit each row's next pairs; what follows the last ones [B, 1, ...], zeros where there are none.

        Raises:
            InputError: a row is full.
        """
        ...

    def read_drafts(self, level: Level, tokens: Tensor, features: Tensor) -> Drafted:
        """What follows a level's drafts [B, n, ...], of tokens [B, n] with their parents' features [B, n, H]."""
        ...

    def grow(self, shape: TreeShape, root: int, behind: Drafted) -> Tensor | None:
        """A whole greedy tree for a state of one row, or None where it must be grown level by level.

        Args:
            shape: The tree; each node's children are the best tokens behind it, best first.
            root: The root's token.
            behind: What `read` gave last.

        Returns:
            Tokens of all nodes, int64 [n + 1].
        """
        ...

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget all but the first `lengths[b]` pairs of each row."""
        ...

    def committed(self, row: int) -> list[Tensor]:
        """Keys and values [kv, length, D] of a row's committed pairs, layer by layer; for checks."""
        ...


class DraftModel:
    """A head and what it borrows of its target.

    Args:
        head: On the target's device.
        target: Lends its embeddings and its `lm_head`.
        fast: Whether to pack the head where it can be: on a CPU with compiled kernels.
        weights: Format of a packed head's matrices; None for its own precision.
    """

    def __init__(self, head: EagleHead, target: Target, *, fast: bool = True, weights: Weights | None = None) -> None:
        self.head = head
        self.target = target
        self.vocab = head.draft_vocab
        readout = target.lm_head if self.vocab is None else target.lm_head_of(self.vocab)
        self.packed = _pack(head, target, readout, weights) if fast and isinstance(target, FastTarget) else None
        self._readout, self._dtype = readout, target.info.dtype

    def drafted(self, features: Tensor) -> Drafted:
        """Features [B, n, H] with their logits."""
        return Drafted(features, self.head.read_out(features, lambda x: self._readout(x.to(self._dtype))))

    def open(self, batch: int, max_length: int) -> HeadState:
        """Empty caches for `batch` rows of at most `max_length` entries, drafts included."""
        kind = ModuleState if self.packed is None else PackedState
        return kind(self, batch, max_length)


class ModuleState:
    """See `HeadState`; the head as a module of PyTorch, on any device."""

    def __init__(self, model: DraftModel, batch: int, max_length: int) -> None:
        self._model, head = model, model.head
        self._device = head.device
        self._cache = HeadCache(head.config, batch, max_length, head.dtype, self._device)
        # What a head that reads the features' own tokens remembers: the committed pairs' tokens, and the last level's.
        self._tokens = torch.zeros(batch, 0 if head.shifted else max_length, dtype=torch.long, device=self._device)
        self._drafts = self._tokens[:, :0]

    @property
    def lengths(self) -> list[int]:
        """See `HeadState`."""
        return self._cache.lengths

    def read(self, pairs: Sequence[Pairs | None]) -> Drafted:
        """See `HeadState`."""
        head, device = self._model.head, self._device
        counts = [0 if p is None else len(p[0]) for p in pairs]
        width, hidden = max(counts), head.config.hidden_size
        tokens = torch.zeros(len(counts), width, dtype=torch.long, device=device)
        features = torch.zeros(len(counts), width, head.config.feature_width, dtype=head.dtype, device=device)
        for row, pair in enumerate(pairs):
            if pair is not None:
                tokens[row, : counts[row]], features[row, : counts[row]] = pair
        starts = torch.tensor(self._cache.lengths, device=device)
        positions = starts[:, None] + torch.arange(width, device=device)
        embedded = self._embed(tokens if head.shifted else torch.cat((self._last_tokens(), tokens[:, :-1]), 1))
        if not head.shifted:
            embedded = embedded.masked_fill(positions[..., None] == 0, 0)
        out = head(embedded, features, positions, None, self._cache)
        if not head.shifted:
            for row, (start, count) in enumerate(zip(self._cache.lengths, counts, strict=True)):
                self._tokens[row, start : start + count] = tokens[row, :count]
        self._cache.advance(counts)
        last = torch.zeros(len(counts), hidden, dtype=head.dtype, device=device)
        rows = [row for row, count in enumerate(counts) if count]
        last[rows] = out[rows, [counts[row] - 1 for row in rows]]
        return self._model.drafted(last[:, None])

    def read_drafts(self, level: Level, tokens: Tensor, features: Tensor) -> Drafted:
        """See `HeadState`."""
        head, cache, n = self._model.head, self._cache, len(level.nodes)
        lengths = torch.tensor(cache.lengths, device=self._device)
        # The pair of a draft of depth d stands where its parent's feature does: at M - 1 + d, M pairs being committed.
        positions = (lengths + level.depth - 1)[:, None].expand(-1, n)
        end = level.offset + n
        slots = torch.arange(max(cache.lengths) + end, device=self._device)
        mask = (slots < lengths[:, None])[:, None, :].expand(-1, n, -1).clone()
        for row, length in enumerate(cache.lengths):
            mask[row, :, length : length + end] = level.mask
        own = tokens.to(self._device)
        if not head.shifted:  # the features are the parents', and so are the tokens
            parents = self._last_tokens() if level.depth == 1 else self._drafts
            self._drafts, own = own, parents[:, level.above]
        out = head(self._embed(own), features, positions, mask[:, None], cache, offset=level.offset)
        return self._model.drafted(out)

    def grow(self, shape: TreeShape, root: int, behind: Drafted) -> Tensor | None:
        """See `HeadState`; never."""
        return None

    def truncate(self, lengths: Sequence[int]) -> None:
        """See `HeadState`."""
        self._cache.truncate(lengths)

    def committed(self, row: int) -> list[Tensor]:
        """See `HeadState`."""
        length = self._cache.lengths[row]
        return [t[row, :, :length] for t in (*self._cache.keys, *self._cache.values)]

    def _embed(self, tokens: Tensor) -> Tensor:
        return self._model.target.embed(tokens).to(self._model.head.dtype)

    def _last_tokens(self) -> Tensor:
        """Tokens [B, 1] of the last committed pairs: the roots; any where there are none."""
        last = torch.tensor(self._cache.lengths, device=self._device) - 1
        return self._tokens.gather(1, last.clamp_min(0)[:, None])


class _Fuse:
    """`EagleHead.fused` of streams [T, feature_width]."""

    def __init__(self, head: EagleHead, backend: NativeBackend, weights: Weights) -> None:
        assert head.fuse is not None
        self._matrix, self._backend = backend.matrix(head.fuse.weight, weights), backend
        self._weights = [weight.detach().float() for weight in head.fuse_norms.parameters()]
        self._eps = head.config.rms_norm_eps

    def __call__(self, streams: Tensor) -> Tensor:
        if self._weights:  # all streams' sizes in one call
            width = len(self._weights[0])
            sized = self._backend.norm(streams.float().reshape(-1, width), torch.ones(width), self._eps)
            streams = sized.view(streams.shape).mul_(torch.cat(self._weights))
        return self._matrix(streams)


@dataclass(frozen=True)
class _Packed:
    """A head for compiled kernels, its layers' shape, the target's embeddings [V, E], and `fuse` where there is one."""

    head: NativeHead
    shape: StackShape
    table: Tensor
    fuse: _Fuse | None


def _pack(head: EagleHead, target: FastTarget, readout: Any, weights: Weights | None) -> _Packed | None:
    """The head for compiled kernels; None where there are none, or they cannot compute it."""
    backend, c = native(), head.config
    if not head.shifted or not c.reads_features or not c.reads_embeddings:
        return None
    inner = c.intermediate_size if c.mlp else 16
    shape = StackShape(
        c.hidden_size, inner, c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.hidden_act,
        c.rms_norm_eps,
    )  # fmt: skip
    if backend is None or shape.why_not() or c.embedding_size % 16 or not isinstance(readout.matrix, NativeMatrix):
        return None
    tensors = [p.detach() for p in head.parameters()]
    if weights is None:
        weights = "fp16" if all(torch.equal(t.half().to(t.dtype), t) for t in tensors) else "fp32"

    # A layer without an MLP gets the narrowest one, which adds zero.
    gap = torch.zeros(inner, c.hidden_size, dtype=head.dtype)
    zeros = {"gate": gap, "up": gap, "down": gap.T}

    def layer(module: torch.nn.Module) -> LayerWeights:
        t = dict(module.named_parameters())
        q, k, v, o = (t[f"self_attn.{n}_proj.weight"] for n in "qkvo")
        gate, up, down = (t.get(f"mlp.{n}_proj.weight", zeros[n]) for n in ("gate", "up", "down"))
        return LayerWeights(
            t.get("input_layernorm.weight"), torch.cat([q, k, v]), None, None, o,
            t.get("post_attention_layernorm.weight", gap.new_ones(c.hidden_size)), torch.cat([gate, up]), down,
        )  # fmt: skip

    with torch.no_grad():
        stack = backend.stack(shape, map(layer, head.layers), weights, RotaryTables(head.inv_freq, head.rope_factor))
        norms = [None if m is None else m.weight for m in (head.embed_layernorm, head.hidden_layernorm, head.norm)]
        packed = NativeHead(
            c.embedding_size,
            None if head.fc is None else backend.matrix(head.fc.weight, weights),
            stack,
            readout.matrix if head.lm_head is None else backend.matrix(head.lm_head.weight, weights),
            bias=None if head.fc is None else head.fc.bias,
            norms=norms,
        )
        fuse = None if head.fuse is None else _Fuse(head, backend, weights)
        return _Packed(packed, shape, target.embedding, fuse)


class PackedState:
    """See `HeadState`; all rows' pairs in one flat pass of compiled kernels."""

    def __init__(self, model: DraftModel, batch: int, max_length: int) -> None:
        assert model.packed is not None
        self._embed, self._head, self._table = model.target.embed, model.packed.head, model.packed.table
        self._fuse = model.packed.fuse
        self._vocab, self._most = model.vocab, min(MOST_TOP, self._head.readout.shape[0])
        self._growers: dict[tuple[int, ...], NativeGrower] = {}
        self._caches = Caches.allocate(model.head.config.num_hidden_layers, model.packed.shape, batch, max_length)
        self._limit = max_length
        self.lengths = [0] * batch

    def read(self, pairs: Sequence[Pairs | None]) -> Drafted:
        """See `HeadState`."""
        given = [(row, *pair) for row, pair in enumerate(pairs) if pair is not None and len(pair[0])]
        counts = [len(tokens) for _, tokens, _ in given]
        self._check_room(counts, [row for row, _, _ in given])
        plans = [chain(row, self.lengths[row], count) for (row, _, _), count in zip(given, counts, strict=True)]
        if len(pairs) == 1:
            _, tokens, features = given[0]
            features, logits = self._run(tokens, self._fused(features), plans[0], 1)
            self.lengths[0] += counts[0]
            return Drafted(features[None, -1:], logits[None])
        tokens, features = torch.cat([t for _, t, _ in given]), torch.cat([f for _, _, f in given])
        features, logits = self._run(tokens, self._fused(features), join(plans), len(tokens))
        rows, ends = [row for row, _, _ in given], (np.cumsum(counts) - 1).tolist()
        last = Drafted(
            features.new_zeros(len(pairs), 1, features.shape[1]), logits.new_zeros(len(pairs), 1, logits.shape[1])
        )
        last.features[rows, 0], last.logits[rows, 0] = features[ends], logits[ends]
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count
        return last

    def read_drafts(self, level: Level, tokens: Tensor, features: Tensor) -> Drafted:
        """See `HeadState`."""
        batch, n = tokens.shape
        self._check_room([level.offset + n] * batch, range(batch))
        plans = [self._plan(level, row) for row in range(batch)]
        plan = plans[0] if batch == 1 else join(plans)
        features, logits = self._run(tokens.reshape(-1), features.reshape(batch * n, -1), plan, batch * n)
        return Drafted(features.view(batch, n, -1), logits.view(batch, n, -1))

    def grow(self, shape: TreeShape, root: int, behind: Drafted) -> Tensor | None:
        """See `HeadState`."""
        if len(self.lengths) != 1 or max(map(len, shape.children)) > self._most:
            return None
        grower = self._growers.get(shape.parents)
        if grower is None:
            levels = [_grow_level(level, shape) for level in levels_of(shape)]
            grower = NativeGrower(self._head, levels, len(shape.parents), self._table, self._vocab)
            self._growers[shape.parents] = grower
        self._check_room([len(shape.parents)], [0])
        return grower.grow(root, behind.features[0, 0], behind.logits[0, 0], self._caches, self.lengths[0])

    def truncate(self, lengths: Sequence[int]) -> None:
        """See `HeadState`."""
        for old, new in zip(self.lengths, lengths, strict=True):
            if not 0 <= new <= old:
                raise InputError(f"head cache: length {new} for a row of {old}; expected 0 to {old}")
        self.lengths = list(lengths)

    def committed(self, row: int) -> list[Tensor]:
        """See `HeadState`."""
        keys, values = self._caches.read(row, self.lengths[row])
        return [*keys, *values]

    def _plan(self, level: Level, row: int) -> Plan:
        """Where a level's drafts of a row stand."""
        n, length = len(level.nodes), np.int32(self.lengths[row])
        path, flat = level.seen
        prefix = np.full(n, length, dtype=np.int32)
        slot = np.arange(length + level.offset, length + level.offset + n, dtype=np.int32)
        return Plan(np.full(n, row, np.int32), slot, prefix + np.int32(level.depth - 1), prefix, path, flat + length)

    def _fused(self, features: Tensor) -> Tensor:
        """What stands in the features' place [T, H], of committed pairs' features."""
        return features if self._fuse is None else self._fuse(features)

    def _run(self, tokens: Tensor, features: Tensor, plan: Plan, count: int) -> tuple[Tensor, Tensor]:
        inputs = torch.cat((self._embed(tokens).float(), features.float()), -1)
        return self._head.run(inputs, plan, self._caches, count)

    def _check_room(self, counts: Sequence[int], rows: Sequence[int]) -> None:
        end = max(self.lengths[row] + count for row, count in zip(rows, counts, strict=True))
        if end > self._limit:
            raise InputError(f"head cache: {end} entries needed, room for {self._limit}; open it with a larger length")
