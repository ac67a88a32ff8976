"""The backend in PyTorch operators, for machines without a C++ compiler; see `models/stack.py` for what it promises.

Matrices are packed once, by operators whose rows are independent of each other:

    fp32   oneDNN's packed product. Its kernel for a single row adds in another order, so one row is sent as two.
    fp16   FBGEMM's product of float16 weights with float32 activations.
    int8   oneDNN's product of int8 with int8; sums are whole numbers, exact in any order.

Processors without VNNI add pairs of int8 products in 16 bits, which can overflow: that is tried once per process, and
weights then get 7 bits, for which no pair overflows. All else runs in float64 and is rounded to float32 at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from eaglekit.errors import InputError
from eaglekit.models.stack import (
    ACTIVATIONS,
    TILE,
    Caches,
    LayerWeights,
    Matrix,
    Plan,
    RotaryTables,
    StackShape,
    Weights,
    block_of,
    check_weights,
    quantize,
)


class _Fp32:
    def __init__(self, weight: Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.float().contiguous(), 16)
        self._call = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        pair = torch.cat((x, x)) if len(x) == 1 else x
        out: Tensor = self._call(pair, self._weight, None, "none", [], "")
        return out[: len(x)]


class _Fp16:
    def __init__(self, weight: Tensor) -> None:
        self._weight = torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), None)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._weight)
        return out


class _Int8:
    def __init__(self, weight: Tensor) -> None:
        values, self._scale = quantize(weight.float(), _levels())
        self._block = block_of(weight.shape[1])
        self._parts = [torch.ops.onednn.qlinear_prepack(v.contiguous(), None) for v in values.split(self._block, 1)]

    def __call__(self, x: Tensor) -> Tensor:
        values, scale = quantize(x.view(len(x), -1, self._block))
        one = torch.ones(len(self._scale))
        out = torch.zeros(len(x), len(self._scale))
        for b, part in enumerate(self._parts):
            out += _qlinear(values[:, b].contiguous(), part, one) * scale[:, b, None]
        return out * self._scale


def _qlinear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    zero = torch.zeros(len(scale), dtype=torch.long)
    out: Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 0, weight, scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return out


@cache
def _levels() -> int:
    """127, or 63 where pairs of products overflow."""
    random = torch.Generator().manual_seed(0)
    weight, x = (torch.randint(-127, 128, (n, 256), generator=random, dtype=torch.int8) for n in (32, 4))
    weight[:4], x[0], x[1] = 127, 127, -127
    out = _qlinear(x, torch.ops.onednn.qlinear_prepack(weight, None), torch.ones(32))
    return 127 if torch.equal(out, (x.int() @ weight.int().T).float()) else 63


_KINDS: dict[str, Callable[[Tensor], Matrix]] = {"fp32": _Fp32, "fp16": _Fp16, "int8": _Int8}


@cache
def _why_unavailable(weights: Weights) -> str:
    """Why this build of PyTorch lacks a format; empty if it does not."""
    try:
        y = _KINDS[weights](torch.eye(32))(torch.eye(32)[:3])
    except (RuntimeError, AttributeError, NotImplementedError) as e:
        return " ".join(str(e).split())[:120]
    return "" if torch.allclose(y, torch.eye(32)[:3], atol=1e-2) else "wrong results"


class PortableBackend:
    """See `Backend`."""

    name = "portable"

    def matrix(self, weight: Tensor, weights: Weights) -> Matrix:
        """See `Backend`."""
        check_weights(weights)
        reason = _why_unavailable(weights)
        if reason:
            raise InputError(f"weights {weights!r}: not on this machine ({reason}); expected another format, or stock")
        return _KINDS[weights](weight.detach())

    def stack(
        self, shape: StackShape, layers: Iterable[LayerWeights], weights: Weights, tables: RotaryTables
    ) -> PortableStack:
        """See `Backend`."""
        return PortableStack(self, shape, layers, weights, tables)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Backend`."""
        return _norm(x, weight, eps).float()

    def move(self, caches: Caches, row: int, sources: Sequence[int], target: int) -> None:
        """See `Backend`."""
        source, to = torch.tensor(sources), target + torch.arange(len(sources))
        moved = caches.keys[:, row, :, source // TILE, :, source % TILE]
        caches.keys[:, row, :, to // TILE, :, to % TILE] = moved
        caches.values[:, row, :, to] = caches.values[:, row, :, source]


class PortableStack:
    """See `Stack`."""

    def __init__(
        self,
        backend: PortableBackend,
        shape: StackShape,
        layers: Iterable[LayerWeights],
        weights: Weights,
        tables: RotaryTables,
    ) -> None:
        self._shape, self._tables = shape, tables
        self._layers: list[tuple[LayerWeights, dict[str, Matrix]]] = []
        nothing = torch.empty(0)
        for layer in layers:
            matrices = {n: backend.matrix(getattr(layer, n), weights) for n in ("qkv", "out", "gate_up", "down")}
            # What is packed is not kept a second time.
            self._layers.append((replace(layer, qkv=nothing, out=nothing, gate_up=nothing, down=nothing), matrices))

    def run(self, x: Tensor, plan: Plan, caches: Caches, streams: dict[int, Tensor] | None = None) -> None:
        """See `Stack`."""
        eps, tables = self._shape.eps, self._tables.upto(int(plan.position.max()) + 1)
        act: Any = F.silu if not ACTIVATIONS[self._shape.activation] else lambda g: F.gelu(g, approximate="tanh")
        for number, (layer, matrix) in enumerate(self._layers):
            if streams is not None and number in streams:
                streams[number].copy_(x)
            y = x if layer.input_norm is None else _norm(x, layer.input_norm, eps).float()
            y = self._attend(layer, matrix["qkv"](y), tables, plan, caches.keys[number], caches.values[number])
            x += matrix["out"](y)
            gate, up = matrix["gate_up"](_norm(x, layer.mlp_norm, eps).float()).double().chunk(2, -1)
            x += matrix["down"]((act(gate) * up).float())

    def _attend(
        self, layer: LayerWeights, qkv: Tensor, tables: tuple[Tensor, Tensor], plan: Plan, keys: Tensor, values: Tensor
    ) -> Tensor:
        shape, count = self._shape, len(plan.row)
        heads, kv, dim = shape.heads, shape.kv, shape.dim
        qkv = qkv if layer.qkv_bias is None else qkv + layer.qkv_bias.float()
        x = qkv.view(count, heads + 2 * kv, dim)
        qk = x[:, : heads + kv].double()
        if layer.head_norms is not None:
            q_norm, k_norm = layer.head_norms
            qk = torch.cat((_norm(qk[:, :heads], q_norm, shape.eps), _norm(qk[:, heads:], k_norm, shape.eps)), 1)
        position = torch.from_numpy(plan.position).long()
        cos, sin = (table[position][:, None].double() for table in tables)
        a, b = qk.chunk(2, -1)
        qk = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).float()
        row, slot = torch.from_numpy(plan.row).long(), torch.from_numpy(plan.slot).long()
        keys[row, :, slot // TILE, :, slot % TILE] = qk[:, heads:]
        values[row, :, slot] = x[:, heads + kv :]
        out = torch.empty(count, heads * dim)
        for r in np.unique(plan.row):
            mine = np.flatnonzero(plan.row == r)
            length = int(max(plan.prefix[mine].max(), plan.slot[mine].max() + 1))
            hidden = torch.ones(len(mine), length, dtype=torch.bool)
            for i, t in enumerate(mine):
                hidden[i, : plan.prefix[t]] = False
                hidden[i, torch.from_numpy(plan.seen[plan.path[t] : plan.path[t + 1]]).long()] = False
            index = torch.from_numpy(mine)
            k = keys[r, :, : -(-length // TILE)].double().transpose(-1, -2).flatten(1, 2)[:, :length]  # [kv, L, D]
            q = qk[index, :heads].double().view(len(mine), kv, heads // kv, dim).permute(1, 2, 0, 3)
            scores = (q @ k[:, None].transpose(-1, -2)) * dim**-0.5  # [kv, group, n, L]
            weights = torch.softmax(scores.masked_fill_(hidden, -torch.inf), -1)
            y = weights @ values[r, :, :length].double()[:, None]
            out[index] = y.permute(2, 0, 1, 3).reshape(len(mine), -1).float()
        return out


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, float64."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()
