"""What `kernels.cpp` is told, as it lies in memory: its structures, and its functions' arguments."""

from __future__ import annotations

import ctypes


class MatrixStruct(ctypes.Structure):
    """A packed matrix."""

    _fields_ = [(n, ctypes.c_int64) for n in ("n", "k", "kind", "block")] + [
        (n, ctypes.c_void_p) for n in ("weight", "scale", "sums")
    ]


class LayerStruct(ctypes.Structure):
    """A decoder layer."""

    _fields_ = [
        ("input_norm", ctypes.c_void_p),
        ("qkv", MatrixStruct),
        *((name, ctypes.c_void_p) for name in ("bias", "q_norm", "k_norm")),
        ("out", MatrixStruct),
        ("mlp_norm", ctypes.c_void_p),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
    ]


class StackStruct(ctypes.Structure):
    """Decoder layers."""

    _fields_ = [
        *((n, ctypes.c_int64) for n in ("layers", "hidden", "inner", "heads", "kv", "dim", "activation")),
        ("layer", ctypes.POINTER(LayerStruct)),
        ("eps", ctypes.c_float),
        ("softmax_scale", ctypes.c_float),
    ]


class HeadStruct(ctypes.Structure):
    """A draft head."""

    _fields_ = [
        ("embedding", ctypes.c_int64),
        ("embed_norm", ctypes.c_void_p),
        ("feature_norm", ctypes.c_void_p),
        ("fc", MatrixStruct),
        ("bias", ctypes.c_void_p),
        ("stack", StackStruct),
        ("output_norm", ctypes.c_void_p),
        ("readout", MatrixStruct),
    ]


class PassStruct(ctypes.Structure):
    """One pass over a stack."""

    _fields_ = [
        *((n, ctypes.c_int64) for n in ("tokens", "length", "threads", "layer_stride")),
        *((n, ctypes.c_void_p) for n in ("row", "slot", "position", "prefix", "path", "seen", "cos", "sin")),
        *((n, ctypes.c_void_p) for n in ("keys", "values", "x", "y", "wide", "delta", "q", "q_scale", "streams")),
    ]


class LevelStruct(ctypes.Structure):
    """One level of a tree; see `GrowLevel`."""

    _fields_ = [
        *((n, ctypes.c_int64) for n in ("count", "depth", "offset")),
        *((n, ctypes.c_void_p) for n in ("node", "above", "path", "seen", "first", "child")),
    ]


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes what the library's functions take.

    Raises:
        AttributeError: it lacks one.
    """
    p, i, f = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    for name, arguments in {
        "ek_stack": (p, p),
        "ek_product": (p, i, p, p, p, p, i),
        "ek_draft": (p, p, p, p, p, i, p),
        "ek_top": (i, i, i, p, p),
        "ek_grow": (p, p, p, i, i, i, p, p, p, p, p, p, p),
        "ek_norm": (i, i, p, p, f, p),
        "ek_move": (i, i, i, i, i, i, i, p, i, p, p),
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library
