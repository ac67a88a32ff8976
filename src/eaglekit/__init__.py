"""EAGLE speculative sampling for Hugging Face decoders: the same output distribution in fewer passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eaglekit.errors import (
    CacheError,
    DataError,
    EaglekitError,
    HeadError,
    InputError,
    TargetError,
    TreeError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from eaglekit.api import Chat, Generation, Model, Stream, load
    from eaglekit.core.stats import Stats
    from eaglekit.core.tree import DraftTree, TreeShape

__version__ = "0.1.0"

# Where each public name lives; loaded at first use, so that `import eaglekit` costs nothing.
_LAZY = {
    "Chat": "eaglekit.api",
    "DraftTree": "eaglekit.core.tree",
    "Generation": "eaglekit.api",
    "Model": "eaglekit.api",
    "Stats": "eaglekit.core.stats",
    "Stream": "eaglekit.api",
    "TreeShape": "eaglekit.core.tree",
    "load": "eaglekit.api",
}

__all__ = [
    "CacheError",
    "Chat",
    "DataError",
    "DraftTree",
    "EaglekitError",
    "Generation",
    "HeadError",
    "InputError",
    "Model",
    "Stats",
    "Stream",
    "TargetError",
    "TreeError",
    "TreeShape",
    "UnsupportedModelError",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'eaglekit' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "errors"])
