"""The compiled backend: `kernels.cpp`, called once per pass; see `models/stack.py` for what it promises.

`native()` compiles the source once, in a few seconds, and keeps the result in the cache directory under a name that has
everything in it that matters: the source, the compiler, the processor. It runs on the threads of PyTorch's own OpenMP
pool. A library that cannot be built, kept or loaded, or that fails its proof, means None, and `why_not()` says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eaglekit.core.tree import TreeShape
from eaglekit.errors import EaglekitError, InputError
from eaglekit.models.portable import PortableBackend
from eaglekit.models.stack import (
    ACTIVATIONS,
    Backend,
    Caches,
    LayerWeights,
    Plan,
    Planner,
    RotaryTables,
    StackShape,
    Weights,
    block_of,
    chain,
    check_weights,
    quantize,
)
from eaglekit.models.store import cache_dir, sha256

_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-fno-math-errno", "-ffp-contract=fast", "-w")
_PANEL = 32
_KINDS = {"fp32": 0, "fp16": 1, "int8": 2}
_reason = ""


class _Matrix(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int64) for n in ("n", "k", "kind", "block")] + [
        (n, ctypes.c_void_p) for n in ("weight", "scale", "sums")
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("input_norm", ctypes.c_void_p),
        ("qkv", _Matrix),
        *((name, ctypes.c_void_p) for name in ("bias", "q_norm", "k_norm")),
        ("out", _Matrix),
        ("mlp_norm", ctypes.c_void_p),
        ("gate_up", _Matrix),
        ("down", _Matrix),
    ]


class _Stack(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_int64) for n in ("layers", "hidden", "inner", "heads", "kv", "dim", "activation")),
        ("layer", ctypes.POINTER(_Layer)),
        ("eps", ctypes.c_float),
        ("softmax_scale", ctypes.c_float),
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_int64) for n in ("tokens", "length", "threads", "layer_stride")),
        *((n, ctypes.c_void_p) for n in ("row", "slot", "position", "prefix", "path", "seen", "cos", "sin")),
        *((n, ctypes.c_void_p) for n in ("keys", "values", "x", "y", "wide", "delta", "q", "q_scale", "streams")),
    ]


def _floats(*size: int) -> Tensor:
    """Memory for the library, whatever the user's default dtype and device are."""
    return torch.empty(size, dtype=torch.float32, device="cpu")


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
        panels = _memory.take((padded // _PANEL, width // group, _PANEL, group), dtype)
        scale = _floats(padded).zero_() if self.quantized else None
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
        self.struct = _Matrix(
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
        out = _floats(len(x), self.shape[0])
        q = torch.empty(x.shape, dtype=torch.uint8, device="cpu") if self.quantized else None
        scale = _floats(len(x), self._blocks) if self.quantized else None
        self._library.ek_product(
            ctypes.addressof(self.struct), len(x), x.data_ptr(), 0 if q is None else q.data_ptr(),
            0 if scale is None else scale.data_ptr(), out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out


class _Memory:
    """Memory for weights, in chunks that the system backs with huge pages: a pass reads all of it.

    NumPy asks for huge pages from 4 MB on; most matrices are smaller. A chunk is given back when nothing of it is used.
    """

    _CHUNK = 64 << 20

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = np.empty(0, dtype=np.uint8)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor that is not initialised, at a multiple of 64 bytes."""
        size = -(-math.prod(shape) * dtype.itemsize // 64) * 64
        with self._lock:
            if size > len(self._rest):
                if size >= self._CHUNK // 4:  # a chunk of its own
                    return self._aligned(size)[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
                self._rest = self._aligned(self._CHUNK).numpy()
            part, self._rest = self._rest[:size], self._rest[size:]
        return torch.from_numpy(part)[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    @staticmethod
    def _aligned(size: int) -> Tensor:
        raw = np.empty(size + 64, dtype=np.uint8)
        start = -raw.ctypes.data % 64
        return torch.from_numpy(raw[start : start + size])


_memory = _Memory()


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
        self._layers = (_Layer * len(built))(*built)
        self._struct = _Stack(
            len(built), shape.hidden, shape.inner, shape.heads, shape.kv, shape.dim, ACTIVATIONS[shape.activation],
            self._layers, shape.eps, shape.dim**-0.5,
        )  # fmt: skip

    def _layer(self, layer: LayerWeights, weights: Weights) -> _Layer:
        def vector(x: Tensor | None) -> int:
            if x is None:
                return 0
            x = x.detach().float().contiguous().clone()
            self._kept.append(x)
            return x.data_ptr()

        def matrix(x: Tensor) -> _Matrix:
            made = NativeMatrix(self._library, x.detach(), weights)
            self._kept.append(made)
            return made.struct

        q_norm, k_norm = layer.head_norms or (None, None)
        return _Layer(
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

    def _pass(self, x: Tensor, plan: Plan, caches: Caches, copies: Any = None) -> tuple[_Pass, Any]:
        """What the library is told of a pass, and the scratch memory that must live as long."""
        shape, count = self._shape, len(plan.row)
        tables = self._tables.upto(int(plan.position.max()) + 1)
        narrow = max(shape.hidden, shape.inner, shape.heads * shape.dim)
        wide = max(2 * shape.inner, (shape.heads + 2 * shape.kv) * shape.dim)
        # y, wide, delta, scales, and int8 rows: one allocation
        scales = narrow // 64 + 1
        room = _floats(count, narrow + wide + shape.hidden + scales + -(-narrow // 4))
        y = room.data_ptr()
        q = y + 4 * count * (narrow + wide + shape.hidden + scales)
        given = _Pass(
            count, caches.values.shape[3], torch.get_num_threads(), caches.values.stride(0),
            plan.row.ctypes.data, plan.slot.ctypes.data, plan.position.ctypes.data, plan.prefix.ctypes.data,
            plan.path.ctypes.data, plan.seen.ctypes.data, tables[0].data_ptr(), tables[1].data_ptr(),
            caches.keys.data_ptr(), caches.values.data_ptr(), x.data_ptr(), y, y + 4 * count * narrow,
            y + 4 * count * (narrow + wide), q, y + 4 * count * (narrow + wide + shape.hidden),
            0 if copies is None else ctypes.addressof(copies),
        )  # fmt: skip
        return given, (room, tables)  # the tables may be replaced by longer ones meanwhile


class NativeHead:
    """An EAGLE head: `fc`, layers and the read-out in one call.

    Args:
        fc: [H, E + H].
        bias: Of `fc`, float32 [H], or None.
        stack: The layers.
        readout: [N, H].
    """

    def __init__(self, fc: NativeMatrix, bias: Tensor | None, stack: NativeStack, readout: NativeMatrix) -> None:
        self.fc, self.bias, self.stack, self.readout = fc, bias, stack, readout
        # The leading arguments of the library's functions.
        self.pointers = (
            ctypes.addressof(fc.struct), 0 if bias is None else bias.data_ptr(), ctypes.addressof(stack._struct),
            ctypes.addressof(readout.struct),
        )  # fmt: skip

    def run(self, inputs: Tensor, plan: Plan, caches: Caches, count: int) -> tuple[Tensor, Tensor]:
        """Read T pairs.

        Args:
            inputs: float32 [T, E + H]: the token's embedding, the feature.
            plan: Where they stand.
            caches: Of the layers.
            count: How many of the last tokens' logits are wanted.

        Returns:
            Predicted features [T, H], and logits [count, N].
        """
        x = _floats(len(inputs), self.fc.shape[0])
        logits = _floats(count, self.readout.shape[0])
        given, _room = self.stack._pass(x, plan, caches)
        quantized = torch.empty(inputs.shape, dtype=torch.uint8, device="cpu") if self.fc.quantized else None
        scale = _floats(len(inputs), self.fc.shape[1] // 64 + 1) if self.fc.quantized else None
        self.stack._library.ek_draft(
            *self.pointers, ctypes.addressof(given), inputs.data_ptr(),
            0 if quantized is None else quantized.data_ptr(), 0 if scale is None else scale.data_ptr(), count,
            logits.data_ptr(),
        )  # fmt: skip
        return x, logits


class _Level(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_int64) for n in ("count", "depth", "offset")),
        *((n, ctypes.c_void_p) for n in ("node", "above", "path", "seen", "first", "child")),
    ]


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
        self._levels = (_Level * len(levels))(
            *(
                _Level(
                    len(level.node), level.depth, level.offset,
                    *(getattr(level, n).ctypes.data for n in ("node", "above", "path", "seen", "first", "child")),
                )
                for level in levels
            )
        )  # fmt: skip
        widest = max(len(level.node) for level in levels)
        self._depth = max(level.depth for level in levels)
        self._seen = np.zeros(max(len(level.seen) for level in levels) + 1, dtype=np.int32)
        self._x, self._logits = _floats(widest, head.fc.shape[0]), _floats(widest, head.readout.shape[0])
        self._inputs = _floats(widest, head.fc.shape[1])
        self._inputs_q = torch.empty(widest, head.fc.shape[1], dtype=torch.uint8, device="cpu")
        self._scale = _floats(widest, head.fc.shape[1] // 64 + 1)
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
            *head.pointers, ctypes.addressof(given), table.data_ptr(), int(table.dtype == torch.float16), length,
            len(self._levels), ctypes.addressof(self._levels), 0 if vocab is None else vocab.data_ptr(),
            self._inputs.data_ptr(), self._inputs_q.data_ptr(), self._scale.data_ptr(), self._logits.data_ptr(),
            tokens.data_ptr(),
        )  # fmt: skip
        return tokens


class NativeBackend:
    """See `Backend`."""

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        p, i, f = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        for name, arguments in {
            "ek_stack": (p, p),
            "ek_product": (p, i, p, p, p, p, i),
            "ek_draft": (p, p, p, p, p, p, p, p, i, p),
            "ek_top": (i, i, i, p, p),
            "ek_grow": (p, p, p, p, p, p, i, i, i, p, p, p, p, p, p, p),
            "ek_norm": (i, i, p, p, f, p),
            "ek_move": (i, i, i, i, i, i, i, p, i, p, p),
        }.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        self._library = library

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


MOST_TOP = 64  # children that a node may have in `NativeGrower`, and largest k of `top`


def top(x: Tensor, k: int) -> Tensor:
    """Places of the k largest of each row of x [R, N], largest first: int64 [R, k]."""
    fits = x.device.type == "cpu" and x.dtype == torch.float32 and 1 <= k <= min(MOST_TOP, x.shape[1])
    backend = native() if fits else None
    if backend is None:
        return x.topk(k, dim=-1).indices
    x = x.contiguous()
    found = torch.empty(len(x), k, dtype=torch.int64, device="cpu")
    backend._library.ek_top(*x.shape, k, x.data_ptr(), found.data_ptr())
    return found


def why_not() -> str:
    """Why `native()` gave None; empty if it did not."""
    return _reason


@cache
def native() -> NativeBackend | None:
    """The compiled backend, or None; see `why_not`."""
    global _reason
    _reason = ""
    try:
        backend = NativeBackend(ctypes.CDLL(str(_compiled())))
        if not _proven(backend):
            raise OSError("the compiled kernels give other results than PyTorch")
    except (OSError, subprocess.SubprocessError, EaglekitError, AttributeError) as e:
        _reason = " ".join(str(e).split())[:300]
        return None
    return backend


def default_backend() -> Backend:
    """The fastest backend that this machine has."""
    return native() or PortableBackend()


def _compiled() -> Path:
    """The shared library: kept from an earlier start, or compiled now."""
    source = Path(__file__).with_name("kernels.cpp")
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    openmp = _torch_openmp()
    facts = (source.read_bytes(), compiler, openmp, _FLAGS, platform.machine(), _processor())
    folder = cache_dir() / "kernels"
    library = folder / f"kernels-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"
    digest = library.with_suffix(".sha256")
    if library.exists() and digest.exists() and digest.read_text(encoding="utf-8") == sha256(library):
        return library  # a damaged one would end the process when it is mapped
    if compiler is None:
        raise OSError("no C++ compiler was found (c++, g++ or clang++)")
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        # The very OpenMP runtime that torch has loaded: two pools of threads would fight for the cores.
        parallel = ("-fopenmp", "-x", "none", openmp) if openmp else ()
        command = [compiler, *_FLAGS, "-x", "c++", str(source), *parallel, "-o", temporary]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise OSError(f"{compiler} failed: {done.stderr[-200:]}")
        digest.write_text(sha256(Path(temporary)), encoding="utf-8")
        os.replace(temporary, library)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return library


def _torch_openmp() -> str:
    """The GNU OpenMP runtime that comes with torch, or an empty string."""
    package = Path(torch.__file__).parent
    found = [f for folder in (package / "lib", package.parent / "torch.libs") for f in folder.glob("libgomp*.so*")]
    return str(min(found)) if found else ""


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
        return "".join(line for line in lines if line.startswith(("flags", "Features", "model name")))
    except OSError:
        return platform.processor()


def _proven(backend: NativeBackend) -> bool:
    """Whether a small tree gives what PyTorch gives, and each of its paths, read alone, the same bits."""
    random = torch.Generator().manual_seed(0)
    shape = StackShape(hidden=64, inner=96, heads=4, kv=2, dim=32, activation="silu", eps=1e-6)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random).div_(size[-1] ** 0.5)

    layers = [
        LayerWeights(
            torch.ones(64), normal(256, 64), None, None, normal(64, 128), torch.ones(64), normal(192, 64),
            normal(64, 96),
        )
        for _ in range(2)
    ]  # fmt: skip
    tables = RotaryTables(torch.rand(16, generator=random))
    prompt, x = torch.randn(70, 64, generator=random), torch.randn(5, 64, generator=random)
    tree, path = TreeShape((-1, 0, 0, 2, 3)), [0, 2, 3, 4]

    def run(backend: Backend, weights: Weights, alone: bool) -> Tensor:
        stack, caches = backend.stack(shape, layers, weights, tables), Caches.allocate(2, shape, 1, 80)
        stack.run(prompt.clone(), chain(0, 0, 70), caches)
        y = x[path].clone() if alone else x.clone()
        if not alone:
            stack.run(y, Planner().trees([0], [70], [tree]), caches)
        for i in range(len(path) if alone else 0):
            stack.run(y[i : i + 1], chain(0, 70 + i, 1), caches)
        return y

    formats: tuple[Weights, ...] = ("fp32", "fp16", "int8")
    return all(torch.equal(run(backend, w, False)[path], run(backend, w, True)) for w in formats) and bool(
        torch.allclose(run(backend, "fp32", False), run(PortableBackend(), "fp32", False), atol=1e-4)
    )
