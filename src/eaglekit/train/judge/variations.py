"""What a study compares: named variations of one head and one recipe. Data, not code.

Contract: every variation differs from the first one of its study, the baseline, in one thing: the head's shape, one
option of the training, or which dialogues are trained on. The one exception is "paper": the paper's losses and noise,
without unrolling and linear start. The baseline of all studies but `text` is the same run, "baseline", so that studies
of one folder share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eaglekit.errors import InputError
from eaglekit.models.head import INPUTS
from eaglekit.train.options import TrainOptions

KINDS = ("inputs", "text", "curve", "layers", "recipe")
SMALLEST_SHARE = 1 / 16


@dataclass(frozen=True)
class Variation:
    """One run of a study.

    Attributes:
        name: Of its folder.
        label: For people.
        head: Fields of `HeadConfig` that it sets.
        options: Fields of `TrainOptions` that it sets.
        origin: Whose answers it is trained on: "given", "generated", or "" for all there are.
        share: Part of the study's tokens that it is trained on.
    """

    name: str
    label: str
    head: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    share: float = 1.0


def variations(kind: str, base: TrainOptions) -> list[Variation]:
    """Those of a study, the baseline first.

    Args:
        kind: One of `KINDS`.
        base: The options of the baseline.

    Raises:
        InputError: there is no such study.
    """
    made = (_inputs(), _text(), _curve(), _layers(), _recipe(base))
    if kind not in KINDS:
        raise InputError(f"study {kind!r}: expected one of {', '.join(KINDS)}")
    return made[KINDS.index(kind)]


def _inputs() -> list[Variation]:
    first, *others = INPUTS
    return [Variation("baseline", first), *(Variation(name, name, {"inputs": name}) for name in others)]


def _text() -> list[Variation]:
    return [
        Variation("given", "the answers of the data", origin="given"),
        Variation("generated", "the target's own answers", origin="generated"),
    ]


def _curve() -> list[Variation]:
    parts = [Variation(f"part-of-{n}", f"1/{n} of the tokens", share=1 / n) for n in (2, 4, 8, 16)]
    return [Variation("baseline", "all tokens"), *parts]


def _layers() -> list[Variation]:
    more = [Variation(f"layers-{n}", f"{n} layers", {"num_hidden_layers": n}) for n in (2, 4)]
    return [Variation("baseline", "1 layer"), Variation("layers-0.5", "0.5: no MLP", {"mlp": False}), *more]


def _recipe(base: TrainOptions) -> list[Variation]:
    depths = len(base.step_weights)
    changes: list[tuple[str, str, dict[str, Any]]] = [
        ("one-step", "teacher forcing only", {"step_weights": (1.0,)}),
        ("flat-steps", "all depths count the same", {"step_weights": (1.0,) * depths}),
        ("unscaled", "loss and noise not scaled to the features", {"scaled": False}),
        ("no-noise", "no noise", {"noise": 0.0}),
        ("classification-only", "no regression", {"regression": 0.0}),
        ("ema", "average of the weights", {"ema": 0.99}),
        ("top-k", "target's likeliest tokens only", {"top_k": 32}),
        ("random-start", "no linear start", {"linear_start": False}),
    ]
    paper = {"regression": 1.0, "classification": 0.1, "step_weights": (1.0,), "scaled": False, "linear_start": False}
    return [
        Variation("baseline", "the defaults"),
        Variation(
            "paper",
            "the paper's losses: regression 1, classification 0.1, one step, unscaled; random start",
            options=paper,
        ),
        *(Variation(name, label, options=options) for name, label, options in changes),
    ]
