"""What the engine costs, section by section, and against what is there already.

    decode     tokens/s of transformers, plain decoding and EAGLE on prompts, each format of weights
    cost       a pass by number of nodes
    context    a pass by tokens of context
    phases     a round by phase, and how far passes are from what memory and arithmetic must charge
    scripted   the engine alone, with a drafter that is right with a chosen probability
    batch      many sequences at once
    start      seconds to the first token, and memory, of fresh processes
    train      tokens/s and memory of training a head, in a fresh process
    rivals     other engines on the same file, if they are installed and asked for

Contract: a section is a function of `bench/passes.py`, `bench/rates.py` or `bench/start.py` that gives plain data, and
says there how it alternates. `measure` runs sections, and yields the report after each, so that a run that is stopped
has what it measured. A section that this target cannot run is left out, and the report says why. All runs on the CPU.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from eaglekit import __version__
from eaglekit.api import Model, load, locate
from eaglekit.bench import passes, rates, rivals, start, training
from eaglekit.bench.lossless import PROMPTS
from eaglekit.bench.run import MethodSpec, machine
from eaglekit.core.tree import TreeShape
from eaglekit.engine.decode import check_prompt
from eaglekit.errors import InputError
from eaglekit.models.fast import FastTarget
from eaglekit.models.stack import WEIGHTS
from eaglekit.models.target import Target

SECTIONS = ("decode", "cost", "context", "phases", "scripted", "batch", "start", "train", "rivals")
_STOCK = {"decode", "cost", "phases", "batch"}  # sections that the stock model takes part in
_FEW_PROMPTS = 8  # of these, `phases` and `scripted` take the first


@dataclass(frozen=True)
class SpeedOptions:
    """What is measured, and how long.

    Attributes:
        weights: Formats of the target.
        only: Sections; all but the rivals if there are none.
        rivals: Whether other engines are measured too.
        trees: EAGLE's, besides what method "auto" picks.
        max_new_tokens: Limit of each answer.
        repeats: Passes of each kind in `cost`, `phases`; half as many in `context`.
        alpha: Probability of a right step in `scripted`.
        steps: Length of its chain.
        sequences: Of `batch`.
        batch_tokens: New tokens of each.
        starts: Processes per format.
        seed: Of orders and dice.

    Raises:
        InputError: an option is out of range; all that are get named.
        TreeError: there is no such tree.
    """

    weights: tuple[str, ...] = WEIGHTS
    only: tuple[str, ...] = ()
    rivals: bool = False
    trees: tuple[str, ...] = rates.TREES
    max_new_tokens: int = 256
    repeats: int = 20
    alpha: float = 0.8
    steps: int = 5
    sequences: int = 32
    batch_tokens: int = 128
    starts: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = [f"--weights {w}: expected {', '.join(WEIGHTS)}" for w in self.weights if w not in WEIGHTS]
        wrong += [f"--only {name}: expected {', '.join(SECTIONS)}" for name in self.only if name not in SECTIONS]
        for name in ("weights", "only", "trees"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                wrong.append(f"{name}: one of {', '.join(getattr(self, name))} is there twice")
        counts = ("max_new_tokens", "repeats", "steps", "sequences", "batch_tokens", "starts")
        wrong += [
            f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least 1"
            for name in counts
            if getattr(self, name) < 1
        ]
        if not (math.isfinite(self.alpha) and 0 <= self.alpha <= 1):
            wrong.append(f"--alpha {self.alpha}: expected a probability, 0 to 1")
        if not self.weights:
            wrong.append("--weights: expected at least one")
        if wrong:
            raise InputError("bench speed: " + "; ".join(wrong))
        TreeShape.chain(self.steps)
        for tree in self.trees:
            MethodSpec.parse(f"eagle:{tree}")

    @property
    def sections(self) -> tuple[str, ...]:
        """Those to be measured, in their order."""
        wanted = self.only or tuple(s for s in SECTIONS if s != "rivals")
        return tuple(s for s in SECTIONS if s in wanted or (s == "rivals" and self.rivals))


@dataclass(frozen=True)
class Setup:
    """What is measured.

    Attributes:
        target: As for `eaglekit.load`; new processes load it again.
        head: As for `eaglekit.load`.
        models: By format of weights.
        stock: The transformers model, float32; None where no section needs it.
        prompts: Token ids.
        gguf: The file that rivals read, or None.
    """

    target: str | None
    head: str | None
    models: dict[str, Model]
    stock: Any
    prompts: list[list[int]]
    gguf: Path | None = None

    @staticmethod
    def load(
        target: str | None,
        head: str | None,
        options: SpeedOptions,
        texts: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> Setup:
        """Load the target in all formats, and read the first `limit` prompts; by default those of `check`.

        Raises:
            InputError: a prompt is too long.
            EaglekitError: whatever else `eaglekit.load` raises.
        """
        from eaglekit.models.load import load_hf

        models = {w: load(target, head, device="cpu", weights=w) for w in options.weights}
        stock = load_hf(locate(target)[0], device="cpu")[0].model if _STOCK & {*options.sections} else None
        first = next(iter(models.values()))
        prompts = [first.encode(text) for text in (texts or PROMPTS)[:limit]]
        most = options.max_new_tokens
        if "batch" in options.sections:
            most = max(most, options.batch_tokens)
        for number, ids in enumerate(prompts, 1):
            try:
                check_prompt(ids, most, first.target.info.max_length, first.target)
            except InputError as e:
                raise InputError(f"bench speed: prompt {number}: {e}") from None
        return Setup(target, head, models, stock, prompts, _gguf(target) if "rivals" in options.sections else None)

    @property
    def has_head(self) -> bool:
        """Whether there is a draft head."""
        return all(model.head is not None for model in self.models.values())

    @property
    def targets(self) -> dict[str, Target]:
        """By format."""
        return {w: model.target for w, model in self.models.items()}


def _gguf(target: str | None) -> Path | None:
    if target is None:
        from eaglekit.models import builtin

        return builtin.gguf_path()
    return Path(target) if target.lower().endswith(".gguf") else None


def why_not(section: str, setup: Setup) -> str:
    """Why a section cannot be run with this target; empty if it can."""
    if section == "scripted" and not setup.has_head:
        return "it needs a draft head"
    if section == "batch" and not all(isinstance(t, FastTarget) for t in setup.targets.values()):
        return "the fast target cannot run this family"
    if section == "rivals" and setup.gguf is None:
        return "they need a GGUF file as target"
    if section == "rivals" and not rivals.installed():
        return "none is installed; pip install xllamacpp openvino-genai"
    return ""


@dataclass
class _Runner:
    """The sections as methods of no arguments."""

    setup: Setup
    options: SpeedOptions
    progress: Callable[[str], None]
    _few: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self._few = self.setup.prompts[:_FEW_PROMPTS]

    def _said(self, section: str) -> Callable[[str], None]:
        return lambda line: self.progress(f"{section}: {line}")

    @property
    def _trees(self) -> tuple[str, ...]:
        return self.options.trees if self.setup.has_head else ()

    def decode(self) -> dict[str, Any]:
        s, o = self.setup, self.options
        methods = ("auto", *(f"eagle:{tree}" for tree in self._trees))
        return rates.decode(
            s.models, s.stock, s.prompts, methods=methods, max_new_tokens=o.max_new_tokens,
            progress=self._said("decode"),
        )  # fmt: skip

    def cost(self) -> dict[str, Any]:
        from eaglekit.models.hf import HFTarget

        targets = {"stock": HFTarget(self.setup.stock), **self.setup.targets}
        return passes.cost_by_nodes(targets, repeats=self.options.repeats, seed=self.options.seed)

    def context(self) -> dict[str, Any]:
        repeats = max(1, self.options.repeats // 2)
        return passes.cost_by_context(self.setup.targets, repeats=repeats, seed=self.options.seed)

    def phases(self) -> dict[str, Any]:
        s, o = self.setup, self.options
        found = rates.phases(
            s.models, self._few, trees=self._trees, max_new_tokens=o.max_new_tokens, progress=self._said("phases")
        )
        return {**found, "floors": passes.floors(s.targets, s.stock, repeats=o.repeats, seed=o.seed)}

    def scripted(self) -> dict[str, Any]:
        o = self.options
        return rates.scripted(
            self.setup.models, self._few, alpha=o.alpha, steps=o.steps, max_new_tokens=o.max_new_tokens, seed=o.seed,
            progress=self._said("scripted"),
        )  # fmt: skip

    def batch(self) -> dict[str, Any]:
        s, o = self.setup, self.options
        return rates.batch(
            s.models, s.stock, s.prompts, sequences=o.sequences, max_new_tokens=o.batch_tokens,
            progress=self._said("batch"),
        )  # fmt: skip

    def start(self) -> dict[str, Any]:
        s, o = self.setup, self.options
        tokens = min(64, o.max_new_tokens)
        return start.measure_start(s.target, s.head, o.weights, s.prompts[0], repeats=o.starts, tokens=tokens)

    def train(self) -> dict[str, Any]:
        return training.measure(self.setup.target)

    def rivals(self) -> dict[str, Any]:
        s, o = self.setup, self.options
        assert s.gguf is not None
        context = max(map(len, s.prompts)) + o.max_new_tokens + 8
        with rivals.opened(s.gguf, torch.get_num_threads(), context) as engines:
            return rates.against_rivals(
                s.models, engines, s.prompts, max_new_tokens=o.max_new_tokens, progress=self._said("rivals")
            )


def measure(setup: Setup, options: SpeedOptions, progress: Callable[[str], None] = lambda _: None) -> Iterator[Any]:
    """Measure the sections one after the other.

    Yields:
        The report, for JSON, after each section: settings, `machine`, `versions`, `sections` by name, and `skipped`
        with reasons.

    Raises:
        InputError: a section failed on what it was given.
    """
    runner = _Runner(setup, options, progress)
    first = next(iter(setup.models.values()))
    report: dict[str, Any] = {
        "eaglekit": __version__,
        "target": first.target.info.name.rstrip("/").rsplit("/", 1)[-1],
        "head": None if not setup.has_head else "shipped" if setup.head is None else Path(setup.head).name,
        "machine": machine(),
        "versions": versions(),
        "settings": {**asdict(options), "sections": list(options.sections), "prompts": len(setup.prompts)},
        "backend": getattr(getattr(first.target, "backend", None), "name", "stock"),
        "sections": {},
        "skipped": {},
    }
    for section in options.sections:
        reason = why_not(section, setup)
        if reason:
            report["skipped"][section] = reason
            progress(f"{section}: left out, {reason}")
        else:
            progress(f"{section} ...")
            report["sections"][section] = getattr(runner, section)()
        yield report


def versions() -> dict[str, str]:
    """Of the packages that matter, as far as they are installed."""
    found = {}
    for name in ("torch", "transformers", "numpy", "xllamacpp", "openvino-genai"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
