"""The proof that a library has to pass before it is used."""

from __future__ import annotations

import torch
from torch import Tensor

from eaglekit.core.tree import TreeShape
from eaglekit.models.portable import PortableBackend
from eaglekit.models.stack import (
    Backend,
    Caches,
    LayerWeights,
    Planner,
    RotaryTables,
    StackShape,
    Weights,
    chain,
)


def proven(backend: Backend) -> bool:
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
