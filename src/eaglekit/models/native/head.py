"""Draft heads of the compiled backend: reading pairs, and greedy drafts over a fixed tree, in one call each."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eaglekit.models.native.abi import HeadStruct, LevelStruct, MatrixStruct
from eaglekit.models.native.memory import floats
from eaglekit.models.native.stack import NativeMatrix, NativeStack
from eaglekit.models.stack import Caches, Plan

MOST_TOP = 64  # children that a node may have in `NativeGrower`, and largest k of `top`


class NativeHead:
    """A draft head: norms, `fc`, layers and the read-out in one call; see `models/head.py` for what these are.

    Args:
        embedding_size: E.
        fc: [H, E + H]; None for EAGLE-3, whose first layer reads E + H numbers.
        stack: The layers.
        readout: [N, H].
        bias: Of `fc`, float32 [H], or None.
        norms: Weights of the norms of embeddings [E], of features [H] and of what the read-out reads [H], or None.
    """

    def __init__(
        self,
        embedding_size: int,
        fc: NativeMatrix | None,
        stack: NativeStack,
        readout: NativeMatrix,
        *,
        bias: Tensor | None = None,
        norms: Sequence[Tensor | None] = (None, None, None),
    ) -> None:
        self.stack, self.readout, self.hidden = stack, readout, readout.shape[1]
        self.width = embedding_size + self.hidden
        vectors = [None if x is None else x.detach().float().contiguous().clone() for x in (*norms, bias)]
        self._kept = (fc, vectors)
        embed_norm, feature_norm, output_norm, added = (0 if x is None else x.data_ptr() for x in vectors)
        self.struct = HeadStruct(
            embedding_size, embed_norm, feature_norm, MatrixStruct() if fc is None else fc.struct, added,
            stack._struct, output_norm, readout.struct,
        )  # fmt: skip

    def run(self, inputs: Tensor, plan: Plan, caches: Caches, count: int) -> tuple[Tensor, Tensor]:
        """Read T pairs.

        Args:
            inputs: float32 [T, E + H]: the token's embedding, the feature; overwritten.
            plan: Where they stand.
            caches: Of the layers.
            count: How many of the last tokens' logits are wanted.

        Returns:
            Predicted features [T, H], and logits [count, N].
        """
        x = floats(len(inputs), self.hidden)
        logits = floats(count, self.readout.shape[0])
        given, _room = self.stack._pass(x, plan, caches)
        quantized, scale = self.scratch(len(inputs))
        self.stack._library.ek_draft(
            ctypes.addressof(self.struct), ctypes.addressof(given), inputs.data_ptr(), quantized.data_ptr(),
            scale.data_ptr(), count, logits.data_ptr(),
        )  # fmt: skip
        return x, logits

    def scratch(self, count: int) -> tuple[Tensor, Tensor]:
        """Memory for `count` rows of inputs as int8, and their scales."""
        return torch.empty(count, self.width, dtype=torch.uint8, device="cpu"), floats(count, self.width // 64 + 1)


@dataclass(frozen=True)
class GrowLevel:
    """A level of a tree for `NativeGrower`: its n nodes that have children; all arrays are int32.

    Attributes:
        depth: 0 for the root's level.
        offset: Nodes of this kind in the levels above, the root not counted.
        node: [n]: their numbers.
        above: [n]: places of their parents among the level above's.
        path: [n+1]: what each attends to behind the committed entries,
        seen: `seen[path[i]]` … `seen[path[i + 1] - 1]`.
        first: [n+1]: its children,
        child: `child[first[i]]` … `child[first[i + 1] - 1]`.
    """

    depth: int
    offset: int
    node: np.ndarray
    above: np.ndarray
    path: np.ndarray
    seen: np.ndarray
    first: np.ndarray
    child: np.ndarray


class NativeGrower:
    """Greedy drafts over one fixed tree for one row, in one call; its scratch memory is its own.

    Args:
        head: The head.
        levels: Of the tree, from the root's on.
        nodes: Nodes of the tree.
        table: Embeddings [V, E], float32 or float16.
        vocab: int64 [N]: token of each logit; None: logits are over all tokens.
    """

    def __init__(
        self, head: NativeHead, levels: Sequence[GrowLevel], nodes: int, table: Tensor, vocab: Tensor | None
    ) -> None:
        self._head, self._kept, self._nodes = head, (levels, table, vocab), nodes
        self._levels = (LevelStruct * len(levels))(
            *(
                LevelStruct(
                    len(level.node), level.depth, level.offset,
                    *(getattr(level, n).ctypes.data for n in ("node", "above", "path", "seen", "first", "child")),
                )
                for level in levels
            )
        )  # fmt: skip
        widest = max(len(level.node) for level in levels)
        self._depth = max(level.depth for level in levels)
        self._seen = np.zeros(max(len(level.seen) for level in levels) + 1, dtype=np.int32)
        self._x, self._logits = floats(widest, head.hidden), floats(widest, head.readout.shape[0])
        self._inputs = floats(widest, head.width)
        self._inputs_q, self._scale = head.scratch(widest)
        row, slot, position, prefix = (np.zeros(widest, dtype=np.int32) for _ in range(4))
        self._plan = Plan(row, slot, position, prefix, np.zeros(widest + 1, dtype=np.int32), self._seen)

    def grow(self, root: int, feature: Tensor, logits: Tensor, caches: Caches, length: int) -> Tensor:
        """Tokens of all nodes, int64 [nodes].

        Args:
            root: The root's token.
            feature: [H], predicted behind the root.
            logits: [N], of that feature.
            caches: Of one row.
            length: Committed entries of it.
        """
        head, (_, table, vocab) = self._head, self._kept
        self._x[0], self._logits[0] = feature, logits
        tokens = torch.empty(self._nodes, dtype=torch.int64, device="cpu")
        tokens[0] = root
        self._plan.position[0] = length + self._depth  # the tables must reach so far
        given, _room = head.stack._pass(self._x, self._plan, caches)
        head.stack._library.ek_grow(
            ctypes.addressof(head.struct), ctypes.addressof(given), table.data_ptr(),
            int(table.dtype == torch.float16), length, len(self._levels), ctypes.addressof(self._levels),
            0 if vocab is None else vocab.data_ptr(),
            self._inputs.data_ptr(), self._inputs_q.data_ptr(), self._scale.data_ptr(), self._logits.data_ptr(),
            tokens.data_ptr(),
        )  # fmt: skip
        return tokens
