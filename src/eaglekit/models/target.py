"""The `Target` protocol: what decoding needs of a model, and nothing else.

Glossary and shapes:

    B    rows (requests) in a state; each row has a length of its own
    N    nodes of the widest tree in a pass, root included; narrower rows are padded and their padding is meaningless
    H    width of the features (what `lm_head` reads: the last hidden state after the final norm)
    V    vocabulary size, the width of the logits

A `Target` is stateless and can be shared. A `TargetState` holds the caches of one caller. Its invariant: after every
verb, the caches of row b hold exactly the first `lengths[b]` committed tokens, as a fresh prefill of them would;
nodes of a tree that was not committed yet lie behind and are overwritten by the next pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from eaglekit.core.tree import DraftTree


@dataclass(frozen=True)
class TargetOutput:
    """What a pass of the target gives.

    Attributes:
        logits: [B, N, V] in the target's dtype. After a prefill N is 1: the logits behind each row's last token.
        features: [B, N, H] in the target's dtype. After a prefill N is the number of tokens read by the longest row.
        layers: For each layer id asked for, [B, N, H]: the residual stream that enters layer k (k=0: the embeddings,
            k=number of layers: the last layer's output before the final norm), as `hidden_states[k]` of transformers.
    """

    logits: Tensor
    features: Tensor
    layers: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TargetInfo:
    """Facts about a target.

    Attributes:
        name: Where it was loaded from.
        model_type: The family, as in its configuration.
        hidden_size: H.
        embedding_size: Width of `embed`'s output (H for nearly every family).
        vocab_size: V, rows of the output matrix.
        num_layers: Decoder layers.
        max_length: Most tokens that a row may hold (the context limit).
        dtype: Of weights and features.
        device: Where passes run; inputs are moved there.
    """

    name: str
    model_type: str
    hidden_size: int
    embedding_size: int
    vocab_size: int
    num_layers: int
    max_length: int
    dtype: torch.dtype
    device: torch.device


class TargetState(Protocol):
    """Caches of B rows, owned by one caller."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed tokens of each row."""
        ...

    def prefill(self, ids: Sequence[Tensor]) -> TargetOutput:
        """Read and commit `ids[b]` (int64 [n_b], n_b >= 0) behind what row b holds already.

        Raises:
            InputError: a row would grow past the state's `max_length`.
        """
        ...

    def forward_tree(self, trees: Sequence[DraftTree]) -> TargetOutput:
        """One pass over every row's tree; node i of row b stands at position `lengths[b] + depths[i]`.

        Commits nothing: calling it again with another tree gives what it would have given at first.
        """
        ...

    def commit(self, nodes: Sequence[Sequence[int]]) -> None:
        """Keep, in each row, these nodes of its last tree: a path from the root down (empty: nothing is kept)."""
        ...

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget all but the first `lengths[b]` tokens of each row."""
        ...

    def depth_limit(self, row: int) -> int | None:
        """The deepest tree that one pass can read exactly from where `row` stands, or None for any depth."""
        ...


class Target(Protocol):
    """A frozen decoder."""

    @property
    def info(self) -> TargetInfo:
        """Facts about it."""
        ...

    def open(self, batch: int, max_length: int, layers: Sequence[int] = ()) -> TargetState:
        """Empty caches for `batch` rows of at most `max_length` tokens each, tree nodes included.

        Args:
            batch: Rows.
            max_length: Tokens per row that buffers are allocated for.
            layers: Ids of the layers whose residual streams every pass is to return.
        """
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings of `ids` [...]: [..., embedding_size]."""
        ...

    def lm_head(self, features: Tensor) -> Tensor:
        """Logits [..., V] of `features` [..., H], with the model's own scaling and soft-capping."""
        ...

    def lm_head_of(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        """A function like `lm_head` that computes the logits [..., n] of the tokens `ids` (int64 [n]) alone."""
        ...
