"""EAGLE: drafts from a head that predicts the target's next feature (arXiv 2401.15077).

With x_0 … x_M known and x_M the root, the head has read the pairs (f_j, x_{j+1}) for j < M; its output behind the
last one is the predicted feature of the root, whose logits (through the target's own `lm_head`) are the draft law of
the root's children. A draft x with a predicted feature f̂ of its parent becomes the pair (f̂, x), one position
further on. One pass of the head per level of the tree; pairs of drafts are dropped after the round, and accepted
tokens are read again with their true features. A variant of the head that reads residual streams of the target gets
these in the place of f_j; what else variants read otherwise is seen to in `models/draft.py`.

Children are drawn without replacement from the draft law, or, with greedy decoding, are its most probable tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eaglekit.core.sampling import Law
from eaglekit.core.tree import DraftTree, TreeShape
from eaglekit.engine.drafter import Context, Observed
from eaglekit.models.checkpoint import check_fit
from eaglekit.models.draft import Drafted, DraftModel, levels_of
from eaglekit.models.head import EagleHead
from eaglekit.models.native import top
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
        model: The head ready to work; None makes it, which copies the head and part of a matrix.

    Raises:
        HeadError: the head was made for another width or vocabulary.
    """

    def __init__(
        self,
        head: EagleHead,
        target: Target,
        shape: TreeShape,
        *,
        sampled: bool = True,
        model: DraftModel | None = None,
    ) -> None:
        check_fit(head.config, target.info)
        self.head = head
        self.target = target
        self.shape = shape
        self.sampled = sampled
        self.model = model or DraftModel(head, target)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers whose streams the head reads."""
        return self.head.config.feature_layers

    @property
    def max_draft_tokens(self) -> int:
        """Drafts in its tree."""
        return self.shape.num_draft_tokens

    def deterministic(self, law: Law) -> bool:
        """Whether drafts are the most probable tokens, rather than drawn."""
        return law.greedy or not self.sampled

    def open(self, batch: int, max_length: int) -> EagleState:
        """A state for `batch` rows of at most `max_length` tokens."""
        return EagleState(self, batch, max_length)


class EagleState:
    """The head's caches, and the pairs that were committed but not read yet."""

    def __init__(self, drafter: EagleDrafter, batch: int, max_length: int) -> None:
        self._drafter = drafter
        self._head = drafter.model.open(batch, max_length)
        self._pending: list[Observed | None] = [None] * batch
        self._last: Drafted | None = None  # the head's output behind each row's last pair

    @torch.inference_mode()
    def propose(self, contexts: Sequence[Context], shape: TreeShape | None = None) -> list[DraftTree]:
        """See `DrafterState.propose`; `shape` replaces the drafter's own tree."""
        shape = (shape or self._drafter.shape).limited(max(c.max_depth for c in contexts))
        if not shape.num_draft_tokens:
            return [DraftTree.root_only(c.ids[-1]) for c in contexts]
        self.read_pending()
        out, law = self._last, contexts[0].law
        assert out is not None
        if len(contexts) == 1 and self._drafter.deterministic(law) and not law.needs_prefix:
            tokens = self._head.grow(shape, contexts[0].ids[-1], out)
            if tokens is not None:
                return [DraftTree(tokens, shape)]
        grower = _Grower(self._drafter, shape, contexts)
        for level in levels_of(shape):
            if level.depth > 0:
                tokens = grower.tokens[:, level.nodes].clamp_min(0)
                out = self._head.read_drafts(level, tokens, out.features[:, level.above])
            grower.grow(level.nodes, out.logits)
        return [grower.tree(row) for row in range(len(contexts))]

    def commit(self, observed: Sequence[Observed]) -> None:
        """See `DrafterState.commit`."""
        pairs = zip(self._pending, observed, strict=True)
        self._pending = [new if old is None else old.then(new) for old, new in pairs]

    def truncate(self, lengths: Sequence[int]) -> None:
        """See `DrafterState.truncate`."""
        for row, length in enumerate(lengths):
            pending = self._pending[row]
            room = length - self._head.lengths[row]
            if pending is not None and room < len(pending.tokens):
                self._pending[row] = pending.part(0, room) if room > 0 else None
        self._head.truncate([min(a, b) for a, b in zip(lengths, self._head.lengths, strict=True)])

    def committed(self, row: int = 0) -> list[Tensor]:
        """Keys and values [kv, length, D] of a row's committed pairs, layer by layer; for checks."""
        return self._head.committed(row)

    def catch_up(self) -> None:
        """Read what was left unread, if it is more than a round's worth."""
        if any(p is not None and len(p.tokens) > 8 for p in self._pending):
            self.read_pending()

    @torch.inference_mode()
    def read_pending(self) -> None:
        """Read the committed pairs that were not read yet, in one pass unless there are many; all features are true."""
        for start in range(0, max((len(p.tokens) for p in self._pending if p is not None), default=0), _CHUNK):
            parts = [None if p is None else p.part(start, start + _CHUNK) for p in self._pending]
            read = [(p.tokens, self._features(p)) if p is not None and len(p.tokens) else None for p in parts]
            out, rows = self._head.read(read), [row for row, pair in enumerate(read) if pair is not None]
            if self._last is None or len(rows) == len(read):
                self._last = out
            else:
                self._last.features[rows], self._last.logits[rows] = out.features[rows], out.logits[rows]
        self._pending = [None] * len(self._pending)

    def _features(self, observed: Observed) -> Tensor:
        """What the head reads of them: the features [k, H], or the streams [k, feature_width]."""
        layers = self._drafter.layers
        return torch.cat([observed.layers[layer] for layer in layers], -1) if layers else observed.features


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

    def grow(self, nodes: Sequence[int], logits: Tensor) -> None:
        """Choose the children of `nodes` from the head's logits [B, n, Vd] behind them."""
        known = len(self._law_row)
        self._law_row.update({n: known + i for i, n in enumerate(nodes)})
        vocab = self.drafter.head.draft_vocab
        widest = max(len(self.shape.children[n]) for n in nodes)
        for row, context in enumerate(self.contexts):
            if self.shape.depths[nodes[0]] >= context.max_depth:
                continue  # a neighbour's tree is deeper: this row must make no random decision on its account
            law, mine, ids = context.law, logits[row], vocab
            prefixes = None
            if law.needs_prefix:  # processors expect the whole vocabulary
                prefixes, mine, ids = self._prefixes(row, nodes), self._over_all(mine, -math.inf), None
            if self.drafter.deterministic(law):
                scores = law.scores(mine, prefixes)
                chosen = top(scores, min(widest, scores.shape[-1]))
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
