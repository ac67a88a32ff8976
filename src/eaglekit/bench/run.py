"""Acceptance and speed on a file of prompts: every method on every prompt, in turn.

Contract: methods alternate prompt by prompt, in an order that rotates, so that a machine whose speed drifts slows all
of them alike; each is warmed up once; the same weights, prompts, limits and stopping serve all. A ratio is taken prompt
by prompt, on seconds per new token, and reported as median, 10th and 90th percentile. `transformers` is the stock
`generate` on the same checkpoint, in float32 on a CPU. Greedy ids are compared with those of the first greedy method
named.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch

from eaglekit import __version__
from eaglekit.api import Model, Prompt, parse_tree
from eaglekit.bench.lossless import best_gap, first_difference, fresh_logits
from eaglekit.bench.tasks import Task
from eaglekit.core.stats import Stats
from eaglekit.engine.decode import check_prompt
from eaglekit.errors import InputError


@dataclass(frozen=True)
class MethodSpec:
    """A column of the table: `transformers`, `plain`, `auto`, `lookup` or `eagle`; `@T` sets the temperature."""

    label: str
    kind: Literal["transformers", "plain", "auto", "lookup", "eagle"]
    tree: str | None = None
    temperature: float = 0.0

    @staticmethod
    def parse(text: str) -> MethodSpec:
        """`transformers`, `plain`, `auto`, `lookup:N` or `eagle:TREE`, each with an optional `@TEMPERATURE`.

        Raises:
            InputError: it is none of these.
        """
        body, _, heat = text.partition("@")
        kind, _, tree = body.partition(":")
        try:
            temperature = float(heat) if heat else 0.0
        except ValueError:
            temperature = -1.0
        known = kind in ("transformers", "plain", "auto", "lookup", "eagle") and not body.endswith(":")
        if not known or (tree and kind not in ("eagle", "lookup")) or not 0 <= temperature < math.inf:
            raise InputError(
                f"method {text!r}: expected transformers, plain, auto, lookup:N, eagle or eagle:TREE, "
                "with @TEMPERATURE behind it if not 0"
            )
        if kind == "eagle":
            parse_tree(tree or "paper")
        elif tree:
            tree = f"lookup:{tree}"
            parse_tree(tree)
        return MethodSpec(text, cast(Any, kind), tree or ("paper" if kind == "eagle" else None), temperature)


@dataclass
class MethodResult:
    """What a method did on all prompts."""

    spec: MethodSpec
    stats: Stats = field(default_factory=Stats)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    taus: list[float] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    differences: list[dict[str, Any]] = field(default_factory=list)

    def add(self, got: Answer) -> None:
        """Count an answer."""
        self.ids.append(got.ids)
        self.seconds.append(got.seconds)
        self.tokens.append(len(got.ids))
        if got.stats is not None:
            self.stats.add(got.stats)
            self.taus.append(got.stats.tau)


@dataclass(frozen=True)
class Answer:
    """One method's answer to one prompt."""

    ids: list[int]
    seconds: float
    stats: Stats | None


class Record:
    """Answers kept in a file of JSON lines, so that a run that was stopped goes on where it was.

    The first line holds the settings; a file of other settings is refused.

    Args:
        path: The file; made if it is not there.
        settings: What answers depend on: target, file of prompts, limit, seed.

    Raises:
        InputError: the file is of another run, or is not a record.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.known: dict[tuple[str, int], Answer] = {}
        if not path.exists() or not path.stat().st_size:
            path.write_text(json.dumps(settings) + "\n", encoding="utf-8")
            return
        lines = path.read_text(encoding="utf-8").split("\n")
        try:
            header, *rows = [json.loads(line) for line in lines[:-1]]
            for row in rows:
                stats = None if row["stats"] is None else Stats(**row["stats"])
                self.known[row["method"], row["prompt"]] = Answer(row["ids"], row["seconds"], stats)
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise InputError(f"--record {path}: not a record of a run ({e}); use another file") from None
        if header != settings:
            raise InputError(f"--record {path}: it is of a run with {header}, not {settings}; use another file")
        if lines[-1]:  # the last write was cut short
            path.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")

    def add(self, spec: MethodSpec, number: int, got: Answer) -> None:
        """Append the answer to prompt `number` (from 0)."""
        stats = None if got.stats is None else asdict(got.stats)
        row = {"method": spec.label, "prompt": number, "ids": got.ids, "seconds": got.seconds, "stats": stats}
        with self.path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")


def run(
    model: Model,
    tasks: Sequence[Task],
    specs: Sequence[MethodSpec],
    *,
    max_new_tokens: int,
    seed: int = 0,
    record: Record | None = None,
    stock: Any = None,
) -> Iterator[list[MethodResult]]:
    """Run every method on every task; yields all results so far after each task.

    Args:
        model: The target and its head.
        tasks: The prompts.
        specs: The methods.
        max_new_tokens: Limit of each answer.
        seed: Of the first prompt's sampling; the next has the next.
        record: Answers found there are not made again; new ones are added.
        stock: The stock model that `transformers` runs; None: the target's own.

    Raises:
        InputError: no methods, or two with one label, or a prompt that cannot be answered; nothing was measured.
    """
    if not specs or len({s.label for s in specs}) < len(specs):
        raise InputError("bench: give at least one method, and none twice")
    for task in tasks:
        try:
            check_prompt(model.encode(task.text), max_new_tokens, model.target.info.max_length, model.target)
        except InputError as e:
            raise InputError(f"bench: prompt {task.id}: {e}") from None
    results = [MethodResult(spec) for spec in specs]
    for spec in specs:
        answer(model, tasks[0].text, spec, max_new_tokens=min(16, max_new_tokens), seed=seed, stock=stock)
    for number, task in enumerate(tasks):
        for i in range(len(results)):
            result = results[(i + number) % len(results)]
            got = None if record is None else record.known.get((result.spec.label, number))
            if got is None:
                got = answer(
                    model, task.text, result.spec, max_new_tokens=max_new_tokens, seed=seed + number, stock=stock
                )
                if record is not None:
                    record.add(result.spec, number, got)
            result.add(got)
        _compare(model, task, results)
        yield results


def answer(
    model: Model, text: Prompt, spec: MethodSpec, *, max_new_tokens: int, seed: int, stock: Any = None
) -> Answer:
    """One answer, timed from the token ids to the last token."""
    prompt = model.encode(text)
    if spec.kind == "transformers":
        return _stock(model, stock, prompt, spec, max_new_tokens, seed)
    start = time.perf_counter()
    out = model.generate(
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=spec.temperature,
        tree=spec.tree,
        method=spec.kind,
        seed=seed,
    )
    return Answer(out.token_ids, time.perf_counter() - start, out.stats)


def _stock(model: Model, stock: Any, prompt: list[int], spec: MethodSpec, max_new_tokens: int, seed: int) -> Answer:
    module = getattr(model.target, "model", None) if stock is None else stock
    if module is None:
        raise InputError("bench: method 'transformers' needs a target that is a stock transformers model")
    own = model.defaults.sampling  # said outright: transformers would keep the 50 likeliest tokens if nothing is said
    sampling: dict[str, Any] = {"do_sample": False}
    if spec.temperature > 0:
        kept = {"top_k": own.top_k, "top_p": own.top_p, "min_p": own.min_p or None}
        sampling = {"do_sample": True, "temperature": spec.temperature, **kept}
    ids = torch.tensor([prompt], device=module.device)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        start = time.perf_counter()
        out = module.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            eos_token_id=list(model.defaults.eos_ids) or None,
            pad_token_id=(model.defaults.eos_ids or (0,))[0],
            **sampling,
        )
        seconds = time.perf_counter() - start
    return Answer(out[0, len(prompt) :].tolist(), seconds, None)


def report(model: Model, results: Sequence[MethodResult], settings: dict[str, Any]) -> dict[str, Any]:
    """All numbers, for JSON."""
    done = min(len(r.ids) for r in results)
    oracle = next((r for r in results if r.spec.temperature == 0), None)
    base = next((r for r in results if r.spec.kind == "plain" and r.spec.temperature == 0), None)
    return {
        "eaglekit": __version__,
        "settings": {**settings, "prompts": done},
        "machine": machine(),
        "target": {
            "name": model.target.info.name.rsplit("/", 1)[-1],
            "dtype": str(model.target.info.dtype).removeprefix("torch."),
            "weights": getattr(model.target, "weights", "stock"),
            "device": str(model.target.info.device),
        },
        "methods": {r.spec.label: _numbers(r, base) for r in results},
        "identity": {
            r.spec.label: {
                "identical": len(r.ids) - len(r.differences),
                "of": len(r.ids),
                "differences": r.differences,
            }
            for r in results
            if oracle is not None and r is not oracle and r.spec.temperature == 0
        },
        "oracle": None if oracle is None else oracle.spec.label,
    }


def _numbers(result: MethodResult, base: MethodResult | None) -> dict[str, Any]:
    rates = [n / s for n, s in zip(result.tokens, result.seconds, strict=True) if n]
    out: dict[str, Any] = {
        "tokens": sum(result.tokens),
        "seconds": round(sum(result.seconds), 3),
        "tokens_per_second": spread(rates),
    }
    if result.taus:
        out["tau"] = round(result.stats.tau, 4)
        out["tau_by_prompt"] = spread(result.taus)
        out["stats"] = result.stats.to_dict()
    if base is not None and result is not base:
        ratios = [
            (sb / nb) / (s / n)
            for n, s, nb, sb in zip(result.tokens, result.seconds, base.tokens, base.seconds, strict=True)
            if n and nb
        ]
        out["speedup_over_plain"] = spread(ratios)
    return out


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile, mean."""
    if not values:
        return {}
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {
        "median": round(statistics.median(ordered), 4),
        "p10": round(at(0.1), 4),
        "p90": round(at(0.9), 4),
        "mean": round(statistics.fmean(ordered), 4),
    }


def _compare(model: Model, task: Task, results: Sequence[MethodResult]) -> None:
    """Note where the newest greedy answers first differ from those of the first greedy method."""
    greedy = [r for r in results if r.spec.temperature == 0]
    for result in greedy[1:]:
        expected = greedy[0].ids[-1]
        at = first_difference(expected, result.ids[-1])
        if at is not None:
            gap = best_gap(model, model.encode(task.text), expected[:at], fresh_logits(model.target))
            result.differences.append({"prompt": task.id, "token": at, "gap": round(gap, 6)})


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            name = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), name)
    except OSError:
        pass
    return {
        "cpu": name,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def table(data: dict[str, Any]) -> str:
    """The report as a Markdown table."""
    rows = [
        "| method | tokens/s, median (10th, 90th percentile) | against plain | τ | identical ids |",
        "|---|---|---|---|---|",
    ]
    for label, m in data["methods"].items():
        rate, ratio, same = m["tokens_per_second"], m.get("speedup_over_plain"), data["identity"].get(label)
        rows.append(
            f"| {label} | {_show(rate)} | {'' if not ratio else _show(ratio) + 'x'} | "
            f"{'' if 'tau' not in m else format(m['tau'], '.2f')} | "
            f"{'' if same is None else '{} of {}'.format(same['identical'], same['of'])} |"
        )
    return "\n".join(rows)


def _show(numbers: dict[str, float]) -> str:
    return f"{numbers['median']:.2f} ({numbers['p10']:.2f}, {numbers['p90']:.2f})" if numbers else ""
