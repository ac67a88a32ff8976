"""EAGLE: drafts from a head that predicts the target's next feature (arXiv 2401.15077).

With x_0 … x_M known and x_M the root, the head has read the pairs (f_j, x_{j+1}) for j < M; its output behind the
last one is the predicted feature of the root, whose logits (through the target's own `lm_head`) are the draft law of
the root's children. A draft x with a predicted feature f̂ of its parent becomes the pair (f̂, x), one position
further on. One pass of the head per level of the tree; pairs of drafts are dropped after the round, and accepted
tokens are read again with their true features.

Children are drawn without replacement from the draft law, or, with greedy decoding, are its most probable tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eaglekit.core.tree import DraftTree, TreeShape
from eaglekit.engine.drafter import Context, Observed
from eaglekit.models.checkpoint import check_fit
from eaglekit.models.head import EagleHead, HeadCache
from eaglekit.models.target import Target

_CHUNK = 512  # pairs of a long prompt that the head reads in one pass: its mask grows with their square


class EagleDrafter:
    """Draft trees of a fixed shape from an EAGLE head.

    Args:
        head: The draft head.
        target: Lends its embeddings and its `lm_head`.
        shape: The tree.
        sampled: Whether drafts are drawn at random when tokens are; False proposes the most probable ones always, each
            with probability one. Both are exact.
        readout: Logits [..., Vd] over the head's draft vocabulary; None makes it, which copies part of a matrix.

    Raises:
        HeadError: the head was made for another width or vocabulary.
    """

    layers: tuple[int, ...] = ()

    def __init__(
        self,
        head: EagleHead,
        target: Target,
        shape: TreeShape,
        *,
        sampled: bool = True,
        readout: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        check_fit(head.config, target.info)
        self.head = head
        self.target = target
        self.shape = shape
        self.sampled = sampled
        self.readout = readout or make_readout(head, target)

    @property
    def max_draft_tokens(self) -> int:
        """Drafts in its tree."""
        return self.shape.num_draft_tokens

    def open(self, batch: int, max_length: int) -> EagleState:
        """A state for `batch` rows of at most `max_length` tokens."""
        return EagleState(self, batch, max_length)


def make_readout(head: EagleHead, target: Target) -> Callable[[Tensor], Tensor]:
    """A function from features [..., H] to logits over the head's draft vocabulary, or over all tokens."""
    return target.lm_head if head.draft_vocab is None else target.lm_head_of(head.draft_vocab)


class EagleState:
    """The head's cache, and the pairs that were committed but not read yet."""

    def __init__(self, drafter: EagleDrafter, batch: int, max_length: int) -> None:
        self._drafter = drafter
        head = drafter.head
        self._device = head.fc.weight.device
        self._cache = HeadCache(head.config, batch, max_length, head.dtype, self._device)
        self._pending: list[Observed | None] = [None] * batch
        # [B, H]: the head's output behind each row's last pair.
        self._last = torch.zeros(batch, head.config.hidden_size, dtype=head.dtype, device=self._device)

    @torch.inference_mode()
    def propose(self, contexts: Sequence[Context]) -> list[DraftTree]:
        """See `DrafterState.propose`."""
        shape = self._drafter.shape.limited(max(c.max_depth for c in contexts))
        if not shape.num_draft_tokens:
            return [DraftTree.root_only(c.ids[-1]) for c in contexts]
        self.read_pending()
        grower = _Grower(self._drafter, shape, contexts)
        features = self._last[:, None]
        levels = shape.levels()
        inner = [n for level in levels for n in level if shape.children[n]]
        mask = shape.mask[inner][:, inner][:, 1:].to(features.device)
        read = 0  # inner nodes, other than the root, whose pairs the head has read
        for depth, level in enumerate(levels[:-1]):
            nodes = [n for n in level if shape.children[n]]
            if depth > 0:
                features = self._read_drafts(grower, nodes, features, depth, mask[read + 1 :], read)
                read += len(nodes)
            grower.grow(nodes, features)
        return [grower.tree(row) for row in range(len(contexts))]

    def commit(self, observed: Sequence[Observed]) -> None:
        """See `DrafterState.commit`."""
        pairs = zip(self._pending, observed, strict=True)
        self._pending = [new if old is None else old.then(new) for old, new in pairs]

    def truncate(self, lengths: Sequence[int]) -> None:
        """See `DrafterState.truncate`."""
        for row, length in enumerate(lengths):
            pending = self._pending[row]
            room = length - self._cache.lengths[row]
            if pending is not None and room < len(pending.tokens):
                self._pending[row] = pending.part(0, room) if room > 0 else None
        self._cache.truncate([min(a, b) for a, b in zip(lengths, self._cache.lengths, strict=True)])

    def committed(self, row: int = 0) -> list[Tensor]:
        """Keys and values [kv, length, D] of a row's committed pairs, layer by layer; for checks."""
        length = self._cache.lengths[row]
        return [t[row, :, :length] for t in (*self._cache.keys, *self._cache.values)]

    @torch.inference_mode()
    def read_pending(self) -> None:
        """Read the committed pairs that were not read yet, in one pass unless there are many; all features are true."""
        for start in range(0, max((len(p.tokens) for p in self._pending if p is not None), default=0), _CHUNK):
            parts = [None if p is None else p.part(start, start + _CHUNK) for p in self._pending]
            self._read_pairs([p if p is not None and len(p.tokens) else None for p in parts])
        self._pending = [None] * len(self._pending)

    def _read_pairs(self, pairs: Sequence[Observed | None]) -> None:
        """One pass over some pairs of each row, the next ones behind those in the cache."""
        drafter, device = self._drafter, self._device
        counts = [0 if p is None else len(p.tokens) for p in pairs]
        width, hidden = max(counts), drafter.target.info.hidden_size
        tokens = torch.zeros(len(counts), width, dtype=torch.long, device=device)
        features = torch.zeros(len(counts), width, hidden, dtype=drafter.head.dtype, device=device)
        for row, pair in enumerate(pairs):
            if pair is not None:
                tokens[row, : counts[row]] = pair.tokens
                features[row, : counts[row]] = pair.features
        starts = torch.tensor(self._cache.lengths, device=device)
        positions = starts[:, None] + torch.arange(width, device=device)
        out = drafter.head(drafter.target.embed(tokens).to(features.dtype), features, positions, None, self._cache)
        self._cache.advance(counts)
        rows = [row for row, count in enumerate(counts) if count]
        self._last[rows] = out[rows, [counts[row] - 1 for row in rows]]

    def _read_drafts(
        self, grower: _Grower, nodes: list[int], features: Tensor, depth: int, mask: Tensor, read: int
    ) -> Tensor:
        """One pass over the drafts `nodes` of a level: their predicted features [B, n, H].

        Args:
            grower: Holds the drafts' tokens.
            nodes: The level's nodes that have children.
            features: [B, m, H]: predicted features of the level above, of its nodes that have children.
            depth: The level's depth.
            mask: bool [≥ n, inner]: which inner nodes each node attends to.
            read: How many inner nodes stand in the cache already.
        """
        drafter, cache, n = self._drafter, self._cache, len(nodes)
        above = grower.parents_seen(nodes)
        tokens = grower.tokens[:, nodes].clamp_min(0)
        lengths = torch.tensor(cache.lengths, device=features.device)
        # The pair of a draft of depth d stands where its parent's feature does: at M - 1 + d, M pairs being committed.
        positions = (lengths + depth - 1)[:, None].expand(-1, n)
        columns = max(cache.lengths) + read + n
        slots = torch.arange(columns, device=features.device)
        full = (slots < lengths[:, None])[:, None, :].expand(-1, n, -1).clone()
        for row, length in enumerate(cache.lengths):
            full[row, :, length : length + read + n] = mask[:n, : read + n]
        predicted: Tensor = drafter.head(
            drafter.target.embed(tokens).to(features.dtype),
            features[:, above],
            positions,
            full[:, None],
            cache,
            offset=read,
        )
        return predicted


class _Grower:
    """The trees of a round while they grow, level by level, all rows at once."""

    def __init__(self, drafter: EagleDrafter, shape: TreeShape, contexts: Sequence[Context]) -> None:
        self.drafter = drafter
        self.shape = shape
        self.contexts = contexts
        self.tokens = torch.full((len(contexts), len(shape.parents)), -1)
        self.tokens[:, 0] = torch.tensor([c.ids[-1] for c in contexts])
        self._laws: list[list[Tensor]] = [[] for _ in contexts]
        self._law_row: dict[int, int] = {}
        self._place: dict[int, int] = {}  # a node's place among its level's nodes that have children

    def parents_seen(self, nodes: Sequence[int]) -> list[int]:
        """Where the parents of `nodes` stood among the nodes that the level above gave features for."""
        return [self._place[self.shape.parents[n]] for n in nodes]

    def grow(self, nodes: list[int], features: Tensor) -> None:
        """Choose the children of `nodes` from the head's features [B, n, H] behind them."""
        self._place = {n: i for i, n in enumerate(nodes)}
        known = len(self._law_row)
        self._law_row.update({n: known + i for i, n in enumerate(nodes)})
        drafter, vocab = self.drafter, self.drafter.head.draft_vocab
        logits = drafter.readout(features.to(drafter.target.info.dtype))
        widest = max(len(self.shape.children[n]) for n in nodes)
        for row, context in enumerate(self.contexts):
            if self.shape.depths[nodes[0]] >= context.max_depth:
                continue  # a neighbour's tree is deeper: this row must make no random decision on its account
            law, mine, ids = context.law, logits[row], vocab
            prefixes = None
            if law.needs_prefix:  # processors expect the whole vocabulary
                prefixes, mine, ids = self._prefixes(row, nodes), self._over_all(mine, -math.inf), None
            if law.greedy or not drafter.sampled:
                scores = law.scores(mine, prefixes)
                chosen = scores.topk(min(widest, scores.shape[-1]), dim=-1).indices
            else:
                probs = law.probs(mine, prefixes)
                self._laws[row].append(probs)
                chosen = context.source.draw_distinct(probs, widest)
            if ids is not None:
                chosen = torch.where(chosen >= 0, ids.to(chosen.device)[chosen], -1)
            self._place_children(row, nodes, chosen.tolist())

    def _over_all(self, values: Tensor, rest: float) -> Tensor:
        """`values` [R, Vd] over the draft vocabulary as [R, V]; every other token has `rest`."""
        vocab, size = self.drafter.head.draft_vocab, self.drafter.target.info.vocab_size
        if vocab is None or values.shape[-1] == size:
            return values
        return values.new_full((len(values), size), rest).index_copy_(1, vocab, values)

    def _place_children(self, row: int, nodes: Sequence[int], chosen: list[list[int]]) -> None:
        """A child of a node that is not there, or without a token to take, is not there either."""
        placed: list[int] = []
        values: list[int] = []
        for node, tokens in zip(nodes, chosen, strict=True):
            if self.tokens[row, node] >= 0:
                children = self.shape.children[node][: len(tokens)]
                placed.extend(children)
                values.extend(tokens[: len(children)])
        self.tokens[row, placed] = torch.tensor(values, dtype=torch.long)

    def _prefixes(self, row: int, nodes: Sequence[int]) -> list[Tensor]:
        ids = torch.tensor(list(self.contexts[row].ids))
        return [torch.cat((ids, self.tokens[row, list(self.shape.path(n)[1:])].clamp_min(0))) for n in nodes]

    def tree(self, row: int) -> DraftTree:
        """The finished tree of a row, within the row's own limit of depth."""
        tokens, depths = self.tokens[row].tolist(), self.shape.depths
        limit = self.contexts[row].max_depth
        keep = [n for n, t in enumerate(tokens) if t >= 0 and depths[n] <= limit]
        index = {n: i for i, n in enumerate(keep)}
        shape = TreeShape(tuple(-1 if n == 0 else index[self.shape.parents[n]] for n in keep))
        chosen = self.tokens[row, keep]
        if not self._laws[row]:
            return DraftTree(chosen, shape)
        rows = tuple(self._law_row.get(n, -1) if depths[n] < limit else -1 for n in keep)
        return DraftTree(chosen, shape, self._over_all(torch.cat(self._laws[row]), 0.0), rows)
