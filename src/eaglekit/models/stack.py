"""Decoder layers for CPUs: what is computed, said once for all backends.

A pass has no padding: the tokens of all rows stand one after the other, T in all, and a `Plan` says where each belongs
and what it sees. Backends (`models/native`, compiled; `models/portable.py`, PyTorch operators) promise that a
token's result does not depend on the other tokens of its pass, on where in the caches its keys lie, or on the row: a
token read as a node of a tree equals the same token read alone. `native` promises it bit for bit.

Formats of matrices (`Weights`): fp32; fp16, with float32 activations; int8, with a scale per output, and activations
rounded to int8 in blocks with a scale each (the largest magnitude is 127), so that sums are whole numbers.

Glossary: T tokens of a pass, H hidden width, D head width, L slots of a cache, a multiple of 64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from eaglekit.core.tree import TreeShape
from eaglekit.errors import InputError

Weights = Literal["fp32", "fp16", "int8"]
WEIGHTS: tuple[str, ...] = get_args(Weights)
TILE = 16  # slots whose keys lie side by side
_BLOCK = 64  # slots per row are a multiple of this
HEAD_DIMS = (32, 64, 96, 128, 256)
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1}


@dataclass(frozen=True)
class LayerWeights:
    """A decoder layer, any float dtype.

    Attributes:
        input_norm: [H]; None where the layer's input goes to its attention as it is.
        qkv: [(heads + 2 kv) D, H].
        qkv_bias: [(heads + 2 kv) D] or None.
        head_norms: Of queries and of keys, [D] each, or None.
        out: [H, heads D].
        mlp_norm: [H].
        gate_up: [2 F, H], the gate first.
        down: [H, F].
    """

    input_norm: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class StackShape:
    """What all layers have in common.

    Attributes:
        hidden: H.
        inner: F, width of the MLP.
        heads: Query heads.
        kv: Key/value heads.
        dim: D.
        activation: One of `ACTIVATIONS`.
        eps: Of the norms.
    """

    hidden: int
    inner: int
    heads: int
    kv: int
    dim: int
    activation: str
    eps: float

    def why_not(self) -> str:
        """What backends cannot compute about it; empty if nothing."""
        if self.activation not in ACTIVATIONS:
            return f"activation {self.activation}"
        if self.dim not in HEAD_DIMS:
            return f"heads of width {self.dim}"
        return "widths that are no multiples of 16" if self.hidden % 16 or self.inner % 16 else ""


@dataclass(frozen=True)
class Plan:
    """Where the T tokens of a pass stand, and what each sees.

    Attributes:
        row: int32 [T]: row of the caches.
        slot: int32 [T]: where its key and value are written.
        position: int32 [T]: its position in the text.
        prefix: int32 [T]: it sees the slots from 0 to prefix - 1,
        path: int32 [T+1]: and then `seen[path[t]]` … `seen[path[t+1] - 1]`, ascending, its own slot last if any.
        seen: int32.
    """

    row: np.ndarray
    slot: np.ndarray
    position: np.ndarray
    prefix: np.ndarray
    path: np.ndarray
    seen: np.ndarray


@dataclass(frozen=True)
class Caches:
    """Keys [layers, B, kv, L/16, D, 16] and values [layers, B, kv, L, D], float32, not initialised."""

    keys: Tensor
    values: Tensor

    @staticmethod
    def allocate(layers: int, shape: StackShape, batch: int, max_length: int) -> Caches:
        """Room for `max_length` slots per row; memory is taken as it is written to.

        Caches of many rows come from NumPy, which asks the system for huge pages: writing keys touches many pages. One
        row's do not: a short text in a long row would take the memory of the whole row.
        """
        tiles = -(-max_length // _BLOCK) * (_BLOCK // TILE)
        sizes = (layers, batch, shape.kv, tiles, shape.dim, TILE), (layers, batch, shape.kv, tiles * TILE, shape.dim)
        if batch == 1:
            return Caches(*(torch.empty(size, dtype=torch.float32, device="cpu") for size in sizes))
        return Caches(*(torch.from_numpy(np.empty(size, dtype=np.float32)) for size in sizes))

    def read(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [layers, kv, length, D] of a row's first slots, copied."""
        keys = self.keys[:, row].transpose(-1, -2).flatten(2, 3)
        return keys[:, :, :length].contiguous(), self.values[:, row, :, :length].clone()


class RotaryTables:
    """cos and sin [positions, D/2], float32, which grow with the longest position met.

    Args:
        frequencies: [D/2].
        factor: On cos and sin.
    """

    def __init__(self, frequencies: Tensor, factor: float = 1.0) -> None:
        self._frequencies, self._factor = frequencies.float(), factor
        self._tables = (torch.empty(0, len(frequencies)),) * 2

    def upto(self, positions: int) -> tuple[Tensor, Tensor]:
        """Tables of at least so many rows."""
        tables = self._tables
        if len(tables[0]) < positions:
            count = max(positions, 2 * len(tables[0]), 1024)
            # The stock angle, in float32; its cosine in float64, so that an entry does not depend on the table's size.
            angles = (torch.arange(count, dtype=torch.float32)[:, None] * self._frequencies).double()
            cos, sin = ((f(angles).float() * self._factor).contiguous() for f in (torch.cos, torch.sin))
            tables = self._tables = (cos, sin)
        return tables


class Matrix(Protocol):
    """A packed matrix [N, K]."""

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [T, K] to float32 [T, N]."""
        ...


class Stack(Protocol):
    """Packed decoder layers."""

    def run(self, x: Tensor, plan: Plan, caches: Caches, streams: dict[int, Tensor] | None = None) -> None:
        """Read T tokens.

        Args:
            x: Inputs, float32 [T, H]; replaced by the residual stream behind the last layer.
            plan: Where they stand.
            caches: Of the rows in the plan; the tokens' keys and values are written there.
            streams: Its entries k, tensors [T, H], are filled with the stream that enters layer k.
        """
        ...


class Backend(Protocol):
    """A way to compute."""

    name: str

    def matrix(self, weight: Tensor, weights: Weights) -> Matrix:
        """`weight` [N, K] packed.

        Raises:
            InputError: the format cannot be computed here.
        """
        ...

    def stack(self, shape: StackShape, layers: Iterable[LayerWeights], weights: Weights, tables: RotaryTables) -> Stack:
        """`layers` packed, one at a time.

        Raises:
            InputError: the format or the shape cannot be computed here.
        """
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm of x, float32 [T, H]."""
        ...

    def move(self, caches: Caches, row: int, sources: Sequence[int], target: int) -> None:
        """Copy a row's slots `sources`, ascending, none below its place, to the slots from `target` on."""
        ...


def check_weights(weights: str) -> None:
    """Raise InputError unless `weights` is a format."""
    if weights not in WEIGHTS:
        raise InputError(f"weights {weights!r}: expected one of {', '.join(WEIGHTS)}")


def block_of(width: int) -> int:
    """Inputs of a matrix that share a scale as int8: the largest of 192, 128, 64 that divides `width`, else all."""
    return next((block for block in (192, 128, 64) if width % block == 0), width)


def quantize(x: Tensor, levels: int = 127) -> tuple[Tensor, Tensor]:
    """Float32 x [..., width] as int8 within ± `levels`, and the scale [...] of each row."""
    top = x.abs().amax(-1, keepdim=True)
    values = (x * torch.where(top > 0, levels / top, 0.0)).round_().to(torch.int8)
    return values, top[..., 0] / levels


@dataclass(frozen=True)
class _Shape:
    """A tree's part of a `Plan`, relative to its row's length."""

    depths: np.ndarray
    path: np.ndarray
    seen: np.ndarray
    chain: bool

    @staticmethod
    def of(shape: TreeShape) -> _Shape:
        paths = [shape.path(node) for node in range(len(shape.parents))]
        ends = np.cumsum([0, *map(len, paths)])
        flat = [node for path in paths for node in path]
        depths, path, seen = (np.asarray(n, dtype=np.int32) for n in (shape.depths, ends, flat))
        chain = shape.parents == tuple(range(-1, len(shape.parents) - 1))
        return _Shape(depths, path, seen, chain)


class Planner:
    """Makes `Plan`s of trees; remembers those that it has met."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], _Shape] = {}

    def trees(self, rows: Sequence[int], starts: Sequence[int], shapes: Sequence[TreeShape]) -> Plan:
        """Node i of a row's tree goes to slot start + i, sees the slots before start, and its path."""
        parts = [self._part(*item) for item in zip(rows, starts, shapes, strict=True)]
        return parts[0] if len(parts) == 1 else join(parts)

    def _part(self, row: int, start: int, shape: TreeShape) -> Plan:
        known = self._known.get(shape.parents)
        if known is None:
            if len(self._known) > 256:
                self._known.clear()
            known = self._known[shape.parents] = _Shape.of(shape)
        count = len(known.depths)
        if known.chain:
            return chain(row, start, count)
        slot = np.arange(start, start + count, dtype=np.int32)
        same = np.full(count, start, dtype=np.int32)
        return Plan(np.full(count, row, np.int32), slot, known.depths + np.int32(start), same, known.path,
                    known.seen + np.int32(start))  # fmt: skip


def chain(row: int, start: int, count: int) -> Plan:
    """The plan of `count` tokens of a row, each seeing all before it."""
    slot = np.arange(start, start + count, dtype=np.int32)
    nothing = np.zeros(count + 1, dtype=np.int32)
    return Plan(np.full(count, row, dtype=np.int32), slot, slot, slot + np.int32(1), nothing, nothing)


def join(parts: Sequence[Plan]) -> Plan:
    """One plan of several rows'."""
    offsets = np.cumsum([0, *(int(p.path[-1]) for p in parts)], dtype=np.int32)
    path = [p.path[:-1] + offset for p, offset in zip(parts, offsets, strict=False)]
    row, slot, position, prefix = (
        np.concatenate([getattr(p, name) for p in parts]) for name in ("row", "slot", "position", "prefix")
    )
    seen = np.concatenate([*(p.seen[: int(p.path[-1])] for p in parts), np.zeros(1, dtype=np.int32)])
    return Plan(row, slot, position, prefix, np.concatenate([*path, offsets[-1:]]), seen)
