"""Memory that the library reads and writes: the same whatever the user's default dtype and device are."""

from __future__ import annotations

import math
import threading

import numpy as np
import torch
from torch import Tensor


def floats(*size: int) -> Tensor:
    """Memory for the library, whatever the user's default dtype and device are."""
    return torch.empty(size, dtype=torch.float32, device="cpu")


class Memory:
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


WEIGHTS_MEMORY = Memory()
