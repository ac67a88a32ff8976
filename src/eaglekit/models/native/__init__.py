"""The compiled backend: `kernels.cpp`, called once per pass; see `models/stack.py` for what it promises.

`native()` compiles the source once, in a few seconds, and keeps the result in the cache directory (`build`). It runs on
the threads of PyTorch's own OpenMP pool. A library that cannot be built, kept or loaded, or that fails its proof
(`proof`), means None, and `why_not()` says why.
"""

from __future__ import annotations

import ctypes
import subprocess
from functools import cache

import torch
from torch import Tensor

from eaglekit.errors import EaglekitError
from eaglekit.models.native.build import compiled
from eaglekit.models.native.head import MOST_TOP, GrowLevel, NativeGrower, NativeHead
from eaglekit.models.native.proof import proven
from eaglekit.models.native.stack import NativeBackend, NativeMatrix, NativeStack
from eaglekit.models.portable import PortableBackend
from eaglekit.models.stack import Backend

__all__ = [
    "MOST_TOP",
    "GrowLevel",
    "NativeBackend",
    "NativeGrower",
    "NativeHead",
    "NativeMatrix",
    "NativeStack",
    "default_backend",
    "native",
    "top",
    "why_not",
]

_reason = ""


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
        backend = NativeBackend(ctypes.CDLL(str(compiled())))
        if not proven(backend):
            raise OSError("the compiled kernels give other results than PyTorch")
    except (OSError, subprocess.SubprocessError, EaglekitError, AttributeError) as e:
        _reason = " ".join(str(e).split())[:300]
        return None
    return backend


def default_backend() -> Backend:
    """The fastest backend that this machine has."""
    return native() or PortableBackend()
