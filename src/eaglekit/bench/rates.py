"""Whole answers against each other: methods, phases of a round, the engine alone, batches, other engines.

Contract: every function gives plain data. What is compared alternates prompt by prompt, in an order that rotates, after
a warm-up of each. A rate counts new tokens over seconds from the prompt's ids to the last token; a ratio is taken
prompt by prompt on seconds per token, and reported as median, 10th and 90th percentile. All is greedy.

`models` are one target in several formats of weights, by format; `stock` is the transformers model that they were made
from, in float32; `prompts` are token ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eaglekit.api import Model
from eaglekit.bench.rivals import Rival
from eaglekit.bench.run import Answer, MethodSpec, answer, spread
from eaglekit.bench.scripted import ScriptedDrafter, expected_tau
from eaglekit.core.random import GeneratorSource
from eaglekit.core.stats import Stats
from eaglekit.core.tree import TreeShape
from eaglekit.drafters.eagle import EagleDrafter
from eaglekit.engine.decode import Session
from eaglekit.engine.drafter import Drafter, PlainDrafter
from eaglekit.engine.stopping import Stopper
from eaglekit.errors import InputError
from eaglekit.models.fast import FastTarget
from eaglekit.models.rows import FastRows

Prompts = Sequence[Sequence[int]]
Progress = Callable[[str], None]
Caller = Callable[[Sequence[int], int], Answer]
"""Answers a prompt with at most so many tokens."""
TREES = ("paper", "chain:5")
_WARM_UP = 16  # tokens of the answer that is not counted


@dataclass
class Column:
    """A method with a format of weights, and its answers."""

    method: str
    weights: str
    answers: list[Answer] = field(default_factory=list)

    @property
    def per_token(self) -> list[float]:
        """Seconds per new token, prompt by prompt."""
        return [a.seconds / max(1, len(a.ids)) for a in self.answers]

    @property
    def stats(self) -> Stats:
        """Of all answers together."""
        total = Stats()
        for one in self.answers:
            if one.stats is not None:
                total.add(one.stats)
        return total

    def over(self, other: Column) -> dict[str, float]:
        """How many times as fast as `other`."""
        return spread([b / a for a, b in zip(self.per_token, other.per_token, strict=True)])

    def identical(self, other: Column) -> int:
        """Prompts on which both gave the same ids."""
        return sum(a.ids == b.ids for a, b in zip(self.answers, other.answers, strict=True))

    def numbers(self) -> dict[str, Any]:
        """What it did."""
        return {
            "method": self.method,
            "weights": self.weights,
            "tokens": sum(len(a.ids) for a in self.answers),
            "seconds": round(sum(a.seconds for a in self.answers), 3),
            "tokens_per_second": spread([1 / s for s in self.per_token]),
        }


Run = tuple[Column, Caller]


def alternate(runs: Sequence[Run], prompts: Prompts, max_new_tokens: int, progress: Progress | None) -> None:
    """Let all answer each prompt in turn; the order rotates."""
    for _, call in runs:
        call(prompts[0], min(_WARM_UP, max_new_tokens))
    for number, prompt in enumerate(prompts):
        for i in range(len(runs)):
            column, call = runs[(i + number) % len(runs)]
            column.answers.append(call(prompt, max_new_tokens))
        if progress is not None:
            progress(f"{number + 1} of {len(prompts)} prompts")


def _run(method: str, weights: str, model: Model, stock: Any = None) -> Run:
    """A method as `MethodSpec` reads it; `transformers` stops where `model` does."""
    spec = MethodSpec.parse(method)

    def call(ids: Sequence[int], count: int) -> Answer:
        return answer(model, list(ids), spec, max_new_tokens=count, seed=0, stock=stock)

    return Column(method, weights), call


def decode(
    models: Mapping[str, Model],
    stock: Any,
    prompts: Prompts,
    *,
    methods: Sequence[str] = ("auto", "eagle:paper", "eagle:chain:5"),
    max_new_tokens: int = 256,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """transformers, plain decoding and `methods` (as `MethodSpec` reads them) in every format.

    Returns:
        `methods`, a list: method, weights, tokens, seconds, tokens_per_second, and where it applies over_transformers,
        over_plain (of the same weights), tau, and how many greedy answers are identical to plain decoding's.
    """
    stock_run = _run("transformers", "stock", next(iter(models.values())), stock)
    plain = {w: _run("plain", w, model) for w, model in models.items()}
    runs = [stock_run]
    for weights, model in models.items():
        runs += [plain[weights], *(_run(method, weights, model) for method in methods)]
    alternate(runs, prompts, max_new_tokens, progress)
    rows = []
    for column, _ in runs:
        row = column.numbers()
        if column is not stock_run[0]:
            base = plain[column.weights][0]
            row["over_transformers"] = column.over(stock_run[0])
            row["tau"] = round(column.stats.tau, 4)
            if column is not base:
                row["over_plain"] = column.over(base)
                row["identical"] = column.identical(base)
        row["of"] = len(prompts)
        rows.append(row)
    return {"prompts": len(prompts), "max_new_tokens": max_new_tokens, "methods": rows}


def phases(
    models: Mapping[str, Model],
    prompts: Prompts,
    *,
    trees: Sequence[str] = TREES,
    max_new_tokens: int = 256,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Where the time of a round goes, with EAGLE and plainly.

    Returns:
        `rounds`, a list: method, weights, tau, rounds, and for each phase but the prefill the milliseconds `ms` and the
        `share` of a round; `outside` is the share of all that is not the target's pass.
    """
    labels = ["plain", *(f"eagle:{tree}" for tree in trees)]
    runs = [_run(label, w, model) for w, model in models.items() for label in labels]
    alternate(runs, prompts, max_new_tokens, progress)
    rows = []
    for column, _ in runs:
        stats = column.stats
        seconds = {k: v for k, v in stats.seconds.items() if k != "prefill"}
        total, rounds = sum(seconds.values()) or 1.0, max(1, stats.rounds)
        rows.append(
            {
                "method": column.method,
                "weights": column.weights,
                "tau": round(stats.tau, 4),
                "rounds": stats.rounds,
                "ms": {k: round(1e3 * v / rounds, 4) for k, v in seconds.items()},
                "share": {k: round(v / total, 4) for k, v in seconds.items()},
                "outside": round(1 - seconds["verify"] / total, 4),
            }
        )
    return {"prompts": len(prompts), "rounds": rows}


def fixed_length(model: Model, drafter: Drafter, prompt: Sequence[int], count: int) -> Answer:
    """A greedy answer of exactly `count` tokens: no end of text ends it."""
    start = time.perf_counter()
    session, stats = Session(model.target, drafter, len(prompt) + count), Stats()
    pieces = session.generate(
        prompt,
        law=model.law(len(prompt)),
        source=GeneratorSource.seeded(0),
        stopper=Stopper(max_new_tokens=count),
        stats=stats,
    )
    ids = [token for piece in pieces for token in piece.token_ids]
    return Answer(ids, time.perf_counter() - start, stats)


def scripted(
    models: Mapping[str, Model],
    prompts: Prompts,
    *,
    alpha: float = 0.8,
    steps: int = 5,
    max_new_tokens: int = 256,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The engine alone: a drafter that costs what the head costs and is right with probability `alpha` at each step.

    Answers have `max_new_tokens` tokens, whatever ends a text.

    Returns:
        `expected_tau`, and `formats`, a list: weights, tokens_per_second, plain_tokens_per_second, over_plain, tau of
        the rounds with a whole chain, their number, tau_of_all, and the answers identical to plain decoding's;
        over_plain_at_expected_tau is the median ratio without the luck of the dice, that is times expected_tau / tau.

    Raises:
        InputError: a model has no head.
    """
    shape, rows = TreeShape.chain(steps), []
    for weights, model in models.items():
        whole: list[int] = []
        eagle = model.drafter("eagle", shape)
        if not isinstance(eagle, EagleDrafter):
            raise InputError(f"scripted: got a {type(eagle).__name__}, expected an EagleDrafter")
        plain, engine = Column("plain", weights), Column("scripted", weights)
        for number, prompt in enumerate(prompts):
            script = [*prompt, *fixed_length(model, PlainDrafter(), prompt, max_new_tokens).ids]
            drafter = ScriptedDrafter(eagle, script, alpha, seed + number)
            if not number:
                fixed_length(model, drafter, prompt, min(_WARM_UP, max_new_tokens))
                drafter.rounds.clear()
            pair: list[tuple[Column, Drafter]] = [(plain, PlainDrafter()), (engine, drafter)]
            for column, method in pair if number % 2 == 0 else pair[::-1]:
                column.answers.append(fixed_length(model, method, prompt, max_new_tokens))
            whole += drafter.rounds
        if progress is not None:
            progress(f"{weights} done")
        tau, expected = sum(whole) / len(whole) if whole else 0.0, expected_tau(alpha, steps)
        ratio = engine.over(plain)
        rows.append(
            {
                "weights": weights,
                "tokens_per_second": engine.numbers()["tokens_per_second"],
                "plain_tokens_per_second": plain.numbers()["tokens_per_second"],
                "over_plain": ratio,
                "over_plain_at_expected_tau": round(ratio["median"] * expected / tau, 4) if tau else None,
                "tau": round(tau, 4) if tau else None,
                "whole_rounds": len(whole),
                "tau_of_all": round(engine.stats.tau, 4),
                "identical": engine.identical(plain),
                "of": len(prompts),
            }
        )
    return {
        "alpha": alpha,
        "steps": steps,
        "expected_tau": round(expected_tau(alpha, steps), 4),
        "max_new_tokens": max_new_tokens,
        "prompts": len(prompts),
        "formats": rows,
    }


@torch.inference_mode()
def batch_answers(target: FastTarget, prompts: Prompts, count: int) -> list[list[int]]:
    """Greedy answers of exactly `count` tokens to all prompts at once: one row each, one token per row and pass."""
    slots, lengths = list(range(len(prompts))), [len(p) for p in prompts]
    rows = FastRows(target, len(prompts), max(lengths) + count)
    features = torch.stack([f[-1] for f in rows.read(prompts, slots)])
    tokens = target.lm_head(features).argmax(-1).tolist()
    answers = [[token] for token in tokens]
    for _ in range(count - 1):
        tokens = target.lm_head(rows.step(slots, tokens, lengths)).argmax(-1).tolist()
        lengths = [length + 1 for length in lengths]
        for mine, token in zip(answers, tokens, strict=True):
            mine.append(token)
    return answers


def batch(
    models: Mapping[str, Model],
    stock: Any,
    prompts: Prompts,
    *,
    sequences: int = 32,
    max_new_tokens: int = 128,
    repeats: int = 3,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Many sequences at once, against transformers `generate` with one, in turn.

    Returns:
        `formats`, a list: weights, tokens_per_second of all sequences together, over_transformers, and how many of the
        first rows are identical to plain decoding alone; and transformers' own tokens_per_second.

    Raises:
        InputError: a target is not a `FastTarget`.
    """
    texts = [prompts[i % len(prompts)] for i in range(sequences)]
    targets: dict[str, FastTarget] = {}
    for weights, model in models.items():
        if not isinstance(model.target, FastTarget):
            raise InputError(
                f"batch: {model.target.info.name} is no fast target with {weights}; leave this section out"
            )
        targets[weights] = model.target
    one, call = _run("transformers", "stock", next(iter(models.values())), stock)
    call(prompts[0], min(_WARM_UP, max_new_tokens))
    for target in targets.values():
        batch_answers(target, texts, 2)
    rates: dict[str, list[float]] = {weights: [] for weights in models}
    first: dict[str, list[list[int]]] = {}
    for number in range(repeats):
        one.answers.append(call(prompts[number % len(prompts)], max_new_tokens))
        for weights, target in targets.items():
            start = time.perf_counter()
            answers = batch_answers(target, texts, max_new_tokens)
            rates[weights].append(sequences * max_new_tokens / (time.perf_counter() - start))
            first[weights] = answers[:2]
        if progress is not None:
            progress(f"{number + 1} of {repeats}")
    rows = []
    for weights, model in models.items():
        alone = [fixed_length(model, PlainDrafter(), p, max_new_tokens).ids for p in texts[:2]]
        ratios = [rate * seconds for rate, seconds in zip(rates[weights], one.per_token, strict=True)]
        rows.append(
            {
                "weights": weights,
                "tokens_per_second": spread(rates[weights]),
                "over_transformers": spread(ratios),
                "identical": sum(a == b for a, b in zip(first[weights], alone, strict=True)),
                "of": len(alone),
            }
        )
    return {
        "sequences": sequences,
        "max_new_tokens": max_new_tokens,
        "transformers": one.numbers()["tokens_per_second"],
        "formats": rows,
    }


def against_rivals(
    models: Mapping[str, Model],
    rivals: Sequence[Rival],
    prompts: Prompts,
    *,
    methods: Sequence[str] = ("plain", "auto"),
    max_new_tokens: int = 256,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Other engines on the same checkpoint, prompts and threads, alternating with ours.

    A rival makes as many tokens as plain decoding with the first format does, whatever it would say.

    Returns:
        `methods`, a list: method, weights, tokens_per_second, and by rival's name `over`; the rivals have rows too.
    """
    lengths: dict[tuple[int, ...], int] = {}
    reference = next(iter(models.values()))

    def length(ids: Sequence[int], most: int) -> int:
        key = tuple(ids)
        if key not in lengths:
            lengths[key] = len(reference.generate(list(ids), max_new_tokens=max_new_tokens, method="plain").token_ids)
        return max(1, min(most, lengths[key]))

    def rival_call(rival: Rival) -> Caller:
        def call(ids: Sequence[int], count: int) -> Answer:
            count = length(ids, count)
            start = time.perf_counter()
            made = rival.generate(list(ids), count)
            return Answer([-1] * made, time.perf_counter() - start, None)  # some rivals give text only

        return call

    for prompt in prompts:
        length(prompt, max_new_tokens)
    ours = [_run(method, w, model) for w, model in models.items() for method in methods]
    theirs = [(Column(rival.name, rival.version), rival_call(rival)) for rival in rivals]
    alternate([*ours, *theirs], prompts, max_new_tokens, progress)
    rows = [{**mine.numbers(), "over": {other.method: mine.over(other) for other, _ in theirs}} for mine, _ in ours]
    return {
        "prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "methods": [*rows, *(other.numbers() for other, _ in theirs)],
    }
