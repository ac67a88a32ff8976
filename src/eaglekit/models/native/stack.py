"""Matrices and stacks of the compiled backend; see `models/stack.py` for what they promise."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eaglekit.errors import InputError
from eaglekit.models.native.abi import LayerStruct, MatrixStruct, PassStruct, StackStruct, declare
from eaglekit.models.native.memory import WEIGHTS_MEMORY, floats
from eaglekit.models.stack import (
    ACTIVATIONS,
    Caches,
    LayerWeights,
    Plan,
    RotaryTables,
    StackShape,
    Weights,
    block_of,
    check_weights,
    quantize,
)

_PANEL = 32
_KINDS = {"fp32": 0, "fp16": 1, "int8": 2}


class NativeMatrix:
    """See `Matrix`; in panels of 32 outputs, see `kernels.cpp`."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor, weights: Weights) -> None:
        count, width = weight.shape
        if width % 16:
            raise InputError(f"a matrix with {width} inputs: compiled kernels need a multiple of 16")
        self.quantized = weights == "int8"
        self.shape, self._library = (count, width), library
        self._kept: list[Tensor] = []
        padded = -(-count // _PANEL) * _PANEL
        dtype, group = {
            "fp32": (torch.float32, 1), "fp16": (torch.float16, 1), "int8": (torch.int8, 4)
        }[weights]  # fmt: skip
        panels = WEIGHTS_MEMORY.take((padded // _PANEL, width // group, _PANEL, group), dtype)
        scale = floats(padded).zero_() if self.quantized else None
        self._blocks = width // block_of(width)
        sums = torch.zeros(self._blocks, padded, dtype=torch.int32, device="cpu") if self.quantized else None
        for start in range(0, count, _PANEL * 32):  # a part at a time: no second copy of a large matrix
            part = weight[start : start + _PANEL * 32]
            if scale is not None and sums is not None:
                part, outputs = quantize(part.float())
                scale[start : start + len(part)] = outputs
                by_block = part.view(len(part), self._blocks, -1).sum(2, dtype=torch.int32)
                sums[:, start : start + len(part)] = 128 * by_block.T
            short = -len(part) % _PANEL
            part = part.to(dtype)
            part = torch.cat((part, part.new_zeros(short, width))) if short else part
            split = part.view(-1, _PANEL, width // group, group).transpose(1, 2)
            panels[start // _PANEL : start // _PANEL + len(split)] = split
        self.struct = MatrixStruct(
            count, width, _KINDS[weights], block_of(width), self._keep(panels), self._keep(scale), self._keep(sums)
        )

    def _keep(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        self._kept.append(tensor)
        return tensor.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        """See `Matrix`.

        Raises:
            InputError: x has another width.
        """
        if x.dim() != 2 or x.shape[1] != self.shape[1]:
            raise InputError(
                f"rows of shape {list(x.shape)} for a matrix {list(self.shape)}; expected [T, {self.shape[1]}]"
            )
        x = x.float().contiguous()
        out = floats(len(x), self.shape[0])
        q = torch.empty(x.shape, dtype=torch.uint8, device="cpu") if self.quantized else None
        scale = floats(len(x), self._blocks) if self.quantized else None
        self._library.ek_product(
            ctypes.addressof(self.struct), len(x), x.data_ptr(), 0 if q is None else q.data_ptr(),
            0 if scale is None else scale.data_ptr(), out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out


class NativeStack:
    """See `Stack`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        shape: StackShape,
        layers: Iterable[LayerWeights],
        weights: Weights,
        tables: RotaryTables,
    ) -> None:
        self._library, self._shape, self._tables = library, shape, tables
        self._kept: list[Any] = []
        built = [self._layer(layer, weights) for layer in layers]
        self._layers = (LayerStruct * len(built))(*built)
        self._struct = StackStruct(
            len(built), shape.hidden, shape.inner, shape.heads, shape.kv, shape.dim, ACTIVATIONS[shape.activation],
            self._layers, shape.eps, shape.dim**-0.5,
        )  # fmt: skip

    def _layer(self, layer: LayerWeights, weights: Weights) -> LayerStruct:
        def vector(x: Tensor | None) -> int:
            if x is None:
                return 0
            x = x.detach().float().contiguous().clone()
            self._kept.append(x)
            return x.data_ptr()

        def matrix(x: Tensor) -> MatrixStruct:
            made = NativeMatrix(self._library, x.detach(), weights)
            self._kept.append(made)
            return made.struct

        q_norm, k_norm = layer.head_norms or (None, None)
        return LayerStruct(
            vector(layer.input_norm), matrix(layer.qkv), vector(layer.qkv_bias), vector(q_norm), vector(k_norm),
            matrix(layer.out), vector(layer.mlp_norm), matrix(layer.gate_up), matrix(layer.down),
        )  # fmt: skip

    def run(self, x: Tensor, plan: Plan, caches: Caches, streams: dict[int, Tensor] | None = None) -> None:
        """See `Stack`."""
        copies = None
        if streams:
            copies = (ctypes.c_void_p * self._struct.layers)()
            for number, stream in streams.items():
                if number < self._struct.layers:
                    copies[number] = stream.data_ptr()
        given, _room = self._pass(x, plan, caches, copies)
        self._library.ek_stack(ctypes.addressof(self._struct), ctypes.addressof(given))

    def _pass(self, x: Tensor, plan: Plan, caches: Caches, copies: Any = None) -> tuple[PassStruct, Any]:
        """What the library is told of a pass, and the scratch memory that must live as long."""
        shape, count = self._shape, len(plan.row)
        tables = self._tables.upto(int(plan.position.max()) + 1)
        narrow = max(shape.hidden, shape.inner, shape.heads * shape.dim)
        wide = max(2 * shape.inner, (shape.heads + 2 * shape.kv) * shape.dim)
        # y, wide, delta, scales, and int8 rows: one allocation
        scales = narrow // 64 + 1
        room = floats(count, narrow + wide + shape.hidden + scales + -(-narrow // 4))
        y = room.data_ptr()
        q = y + 4 * count * (narrow + wide + shape.hidden + scales)
        given = PassStruct(
            count, caches.values.shape[3], torch.get_num_threads(), caches.values.stride(0),
            plan.row.ctypes.data, plan.slot.ctypes.data, plan.position.ctypes.data, plan.prefix.ctypes.data,
            plan.path.ctypes.data, plan.seen.ctypes.data, tables[0].data_ptr(), tables[1].data_ptr(),
            caches.keys.data_ptr(), caches.values.data_ptr(), x.data_ptr(), y, y + 4 * count * narrow,
            y + 4 * count * (narrow + wide), q, y + 4 * count * (narrow + wide + shape.hidden),
            0 if copies is None else ctypes.addressof(copies),
        )  # fmt: skip
        return given, (room, tables)  # the tables may be replaced by longer ones meanwhile


class NativeBackend:
    """See `Backend`."""

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = declare(library)

    def matrix(self, weight: Tensor, weights: Weights) -> NativeMatrix:
        """See `Backend`."""
        check_weights(weights)
        return NativeMatrix(self._library, weight.detach(), weights)

    def stack(
        self, shape: StackShape, layers: Iterable[LayerWeights], weights: Weights, tables: RotaryTables
    ) -> NativeStack:
        """See `Backend`."""
        check_weights(weights)
        if shape.why_not():
            raise InputError(f"compiled kernels cannot compute {shape.why_not()}; expected weights='stock'")
        return NativeStack(self._library, shape, layers, weights, tables)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Backend`."""
        y = torch.empty_like(x)
        self._library.ek_norm(*x.shape, x.data_ptr(), weight.data_ptr(), eps, y.data_ptr())
        return y

    def move(self, caches: Caches, row: int, sources: Sequence[int], target: int) -> None:
        """See `Backend`."""
        layers, _, kv, length, dim = caches.values.shape
        source = np.asarray(sources, dtype=np.int32)
        self._library.ek_move(
            layers, caches.values.stride(0), kv, dim, length, row, len(source), source.ctypes.data, target,
            caches.keys.data_ptr(), caches.values.data_ptr(),
        )  # fmt: skip
