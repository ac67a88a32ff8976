"""The state of a Hugging Face target: caches of rows of unequal length, and the verbs over them.

Contract: `HFState` keeps the invariant of `TargetState`; it alone knows the rows' lengths, and changes them only after
a pass has succeeded, so that an exception in one leaves it as it was. Keys and values lie in its `TreeCache`
(`models/cache.py`, whose glossary holds here too).

Glossary:

    chain     tokens that each see all before them: what a prefill reads, `prefill_chunk` at a time
    boundary  for LongRoPE, the number of positions after which a *pass* rotates all of its keys and queries by other
              frequencies. None for the other families
    regime    whether a row's keys were rotated by the frequencies for long texts

LongRoPE: a row's caches are those of one full forward over its text, so its keys change with its length. Where a pass
reaches over the boundary, the row is read again first (stock generation with Phi-3 does the same); `depth_limit` keeps
a tree on one side; rows on different sides run in passes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eaglekit.core.tree import DraftTree, TreeShape
from eaglekit.errors import InputError
from eaglekit.models.cache import TreeCache
from eaglekit.models.checks import NO_TREE, RowChecks, check_path
from eaglekit.models.target import TargetOutput

if TYPE_CHECKING:
    from eaglekit.models.hf import HFTarget


@dataclass(frozen=True)
class _Part:
    """One chunk of a prefill: its rows, their counts, features [R, N, H] and residual streams by layer."""

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    features: Tensor
    layers: Mapping[int, Tensor]


class HFState(RowChecks):
    """Caches of B rows; see `TargetState`. `HFTarget.open` makes one, and describes the arguments."""

    def __init__(self, target: HFTarget, batch: int, max_length: int, layers: Sequence[int]) -> None:
        super().__init__(target.info, batch, max_length)
        self._target = target
        self._layers = tuple(layers)
        self._cache = TreeCache(batch, max_length)
        self._trees: list[DraftTree | None] | None = None  # of the last pass, until committed or overwritten
        self._ids: list[list[int]] = [[] for _ in range(batch)]  # committed; kept only where there is a boundary
        self._long: list[bool | None] = [False] * batch  # regime of each row; None when its keys are not to be trusted

    def prefill(self, ids: Sequence[Tensor]) -> TargetOutput:
        """Read and commit `ids[b]` (int64 [n_b], n_b >= 0) behind what row b holds already.

        Logits and features of rows without ids, and features behind a shorter row's last token, are zeros.

        Raises:
            InputError: a row would grow too long, or an id is outside the vocabulary; nothing was read.
        """
        ids = self._checked_ids(ids, self._target.check_ids)
        self._trees = None
        parts: list[_Part] = []
        after = [length + len(new) for length, new in zip(self._lengths, ids, strict=True)]
        for rows, long in self._regimes([row for row, new in enumerate(ids) if len(new)], after):
            self._align(rows, long)
            starts = [self._lengths[r] for r in rows]
            parts += self._read(rows, starts, [ids[r] for r in rows], long, self._layers)
        for row, new in enumerate(ids):
            self._grow(row, new.tolist())
        return self._collect(parts, [len(new) for new in ids])

    def forward_tree(self, trees: Sequence[DraftTree | None]) -> TargetOutput:
        """One pass over every row's tree; node i of row b stands at position `lengths[b] + depths[i]`.

        A row whose tree is None takes no part: it costs nothing, and its outputs are zeros.

        Raises:
            InputError: a tree reaches past a limit, or a token is outside the vocabulary; nothing was read.
        """
        self._check_rows("forward_tree", len(trees))
        given = {row: tree for row, tree in enumerate(trees) if tree is not None}
        if not given:
            raise InputError("forward_tree: every tree is None; expected at least one")
        for row, tree in given.items():
            self._check_room(row, len(tree.tokens), tree.shape.max_depth + 1)
            limit = self.depth_limit(row)
            if limit is not None and tree.shape.max_depth > limit:
                raise InputError(
                    f"row {row}: a tree of depth {tree.shape.max_depth} behind {self._lengths[row]} tokens crosses "
                    f"position {self._target.boundary}, where this model's RoPE changes; expected a depth of at most "
                    f"depth_limit(row), {limit}"
                )
            self._target.check_ids(tree.tokens)
        self._trees = None
        parts = []
        for rows, long in self._regimes(list(given), [length + 1 for length in self._lengths]):
            self._align(rows, long)
            starts = [self._lengths[r] for r in rows]
            tokens, shapes = [given[r].tokens for r in rows], [given[r].shape for r in rows]
            parts.append((rows, self._pass(rows, starts, tokens, shapes, long, self._layers)))
        self._trees = list(trees)
        if len(parts[0][0]) == len(trees):
            return parts[0][1]
        width = max(len(tree.tokens) for tree in given.values())
        return TargetOutput(
            self._spread(width, [(rows, out.logits) for rows, out in parts]),
            self._spread(width, [(rows, out.features) for rows, out in parts]),
            {k: self._spread(width, [(rows, out.layers[k]) for rows, out in parts]) for k in self._layers},
        )

    def commit(self, nodes: Sequence[Sequence[int]]) -> None:
        """Keep, in each row, these nodes of its last tree: a path from the root down (empty: nothing is kept).

        Raises:
            InputError: there is no tree pass to commit, or the nodes are not a path; nothing was kept.
        """
        self._check_rows("commit", len(nodes))
        if self._trees is None:
            raise InputError(NO_TREE)
        rows, sources, targets = [], [], []
        for row, (path, tree) in enumerate(zip(nodes, self._trees, strict=True)):
            if not path:
                continue
            still = check_path(row, path, tree)
            if still < len(path):
                rows.append(row)
                sources.append([self._lengths[row] + n for n in path[still:]])
                targets.append(self._lengths[row] + still)
        if rows:
            self._cache.move(rows, sources, targets)
        for row, (path, tree) in enumerate(zip(nodes, self._trees, strict=True)):
            if path and tree is not None:
                self._grow(row, tree.tokens[list(path)].tolist())
        self._trees = None

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget all but the first `lengths[b]` tokens of each row.

        Raises:
            InputError: a row does not hold that many; nothing was forgotten.
        """
        self._check_lengths(lengths)
        self._lengths = list(lengths)
        self._ids = [ids[:length] for ids, length in zip(self._ids, lengths, strict=True)]
        self._trees = None

    def depth_limit(self, row: int) -> int | None:
        """The deepest tree that one pass can read exactly from where `row` stands, or None for any depth."""
        boundary = self._target.boundary
        if boundary is None or self._lengths[row] >= boundary:
            return None
        return boundary - 1 - self._lengths[row]

    def _grow(self, row: int, ids: list[int]) -> None:
        self._lengths[row] += len(ids)
        if self._target.boundary is not None:
            self._ids[row] += ids

    def _regimes(self, rows: list[int], reach: Sequence[int]) -> Iterator[tuple[tuple[int, ...], bool]]:
        """`rows` in groups that one pass can read together: those that stay within the boundary, and those over it."""
        boundary = self._target.boundary
        for long in (False, True):
            group = tuple(r for r in rows if (boundary is not None and reach[r] > boundary) == long)
            if group:
                yield group, long

    def _align(self, rows: Sequence[int], long: bool) -> None:
        """Read rows again whose keys belong to the other regime."""
        for row in rows:
            if self._long[row] != long:
                self._long[row] = None
                ids = self._ids[row][: self._lengths[row]]
                if ids:
                    self._read((row,), [0], [torch.tensor(ids)], long, ())
                self._long[row] = long

    def _read(
        self, rows: tuple[int, ...], starts: Sequence[int], ids: Sequence[Tensor], long: bool, layers: tuple[int, ...]
    ) -> list[_Part]:
        """Read chains of tokens, a chunk at a time."""
        parts, size = [], self._target.prefill_chunk
        for offset in range(0, max(map(len, ids)), size):
            here = [i for i, new in enumerate(ids) if len(new) > offset]
            chunk = [ids[i][offset : offset + size] for i in here]
            group = tuple(rows[i] for i in here)
            out = self._pass(group, [starts[i] + offset for i in here], chunk, None, long, layers)
            parts.append(_Part(group, tuple(map(len, chunk)), out.features, out.layers))
        return parts

    def _pass(
        self,
        rows: tuple[int, ...],
        starts: Sequence[int],
        tokens: Sequence[Tensor],
        shapes: Sequence[TreeShape] | None,
        long: bool,
        layers_wanted: tuple[int, ...],
    ) -> TargetOutput:
        """One forward of the base over trees, or over chains where `shapes` is None; logits for trees only."""
        target, counts = self._target, tuple(map(len, tokens))
        width = max(counts)
        inputs = torch.zeros(2, len(rows), width, dtype=torch.int64)  # tokens, positions
        inputs[1] = torch.tensor(starts)[:, None]  # padding stands where its row's first token does
        for r, (new, count) in enumerate(zip(tokens, counts, strict=True)):
            inputs[0, r, :count] = new
            inputs[1, r, :count] += torch.tensor(shapes[r].depths) if shapes else torch.arange(count)
        boundary = target.boundary or 0
        if long and int(inputs[1].max()) < boundary:
            # The pass's longest position decides the frequencies: padding behind the boundary brings the long ones.
            anchor = torch.tensor([0, boundary]).view(2, 1, 1).expand(2, len(rows), 1)
            inputs = torch.cat([inputs, anchor], dim=2)
        self._cache.begin(rows, tuple(starts), counts, inputs.shape[2])
        visible = [s.mask for s in shapes] if shapes else [torch.ones(n, n, dtype=torch.bool).tril() for n in counts]
        features, layers = target.forward(inputs, visible, self._cache, layers_wanted)
        features = features[:, :width]
        with torch.no_grad():
            logits = target.lm_head(features) if shapes else features[:, :0]
        return TargetOutput(logits, features, {k: x[:, :width] for k, x in layers.items()})

    def _spread(self, width: int, parts: Sequence[tuple[tuple[int, ...], Tensor]]) -> Tensor:
        """[B, width, D] of parts [R, n, D] that are over some of the rows each; zeros elsewhere."""
        whole = parts[0][1].new_zeros(len(self._lengths), width, parts[0][1].shape[2])
        for rows, part in parts:
            whole[list(rows), : part.shape[1]] = part
        return whole

    def _collect(self, parts: Sequence[_Part], counts: Sequence[int]) -> TargetOutput:
        """The output of a prefill from those of its chunks."""
        info = self._target.info

        def joined(pieces: Sequence[Tensor], width: int) -> Tensor:
            whole = torch.zeros(len(counts), max(counts), width, dtype=info.dtype, device=info.device)
            done = [0] * len(counts)
            for part, piece in zip(parts, pieces, strict=True):
                for r, (row, n) in enumerate(zip(part.rows, part.counts, strict=True)):
                    whole[row, done[row] : done[row] + n] = piece[r, :n]
                    done[row] += n
            return whole

        features = joined([p.features for p in parts], info.hidden_size)
        layers = {
            k: joined([p.layers[k] for p in parts], parts[0].layers[k].shape[2] if parts else info.hidden_size)
            for k in self._layers
        }
        logits = torch.zeros(len(counts), 1, info.vocab_size, dtype=info.dtype, device=info.device)
        read = [row for row, n in enumerate(counts) if n]
        if read:
            with torch.no_grad():
                last = self._target.lm_head(features[read, [counts[row] - 1 for row in read]])
            logits[read, 0] = last.to(info.dtype)
        return TargetOutput(logits, features, layers)
