"""What a study found, as numbers and as a table.

Contract: pure functions of results. Every head of a study is judged by the same answers, so that two heads are compared
prompt by prompt: what makes a prompt easy for both drops out of their difference.

τ is tokens / rounds of all prompts together. For prompts i with T_i tokens and R_i rounds, the error of this ratio is,
to first order, the mean of (T_i - τ R_i) / R̄. The standard error of a difference of two heads is that of the mean of
the prompts' differences of these terms. It is about the choice of prompts, not of the seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from eaglekit.models.head import EagleHead
from eaglekit.train.judge.evaluate import Example, Tally, standard_shapes
from eaglekit.train.report.curve import Fit

_TREES = tuple(standard_shapes())


def judge(head: EagleHead, examples: Sequence[Example], embedding: Tensor, readout: Tensor) -> dict[str, Any]:
    """`simulate` with the counts of each example: τ, n-α, acceptance by depth and `counts`, for JSON.

    `counts` has a row per example: its tokens, then the rounds of each of the trees.
    """
    tally = Tally(head, embedding, readout, standard_shapes())
    sums = [tally.counts()]
    for example in examples:
        tally.add(example)
        sums.append(tally.counts())
    counts = [[a - b for a, b in zip(now, before, strict=True)] for before, now in pairwise(sums)]
    return {**tally.acceptance().to_dict(), "counts": counts}


def difference(
    counts: Sequence[Sequence[int]], others: Sequence[Sequence[int]], tree: str
) -> tuple[float, float | None]:
    """τ less the other's τ on the same prompts, and its standard error; None for less than two prompts."""
    column = 1 + _TREES.index(tree)

    def terms(rows: Sequence[Sequence[int]]) -> tuple[float, list[float]]:
        tokens, rounds = sum(row[0] for row in rows), max(1, sum(row[column] for row in rows))
        tau = tokens / rounds
        return tau, [(row[0] - tau * row[column]) * len(rows) / rounds for row in rows]

    (tau, mine), (other, theirs) = terms(counts), terms(others)
    n = len(mine)
    if n < 2:
        return tau - other, None
    squares = sum((a - b) ** 2 for a, b in zip(mine, theirs, strict=True))  # both have the mean 0
    return tau - other, math.sqrt(squares / (n - 1) / n)


def report_of(
    facts: Mapping[str, Any], results: Sequence[dict[str, Any]], further: Sequence[int] = (), compared: bool = True
) -> dict[str, Any]:
    """Everything about a study: `facts`, its runs with their differences from the first one, and its curve.

    Args:
        facts: Of the study.
        results: Of the runs.
        further: Numbers of tokens to extrapolate a learning curve to; empty for none.
        compared: Whether the first of them is the baseline: without it there are no differences.
    """
    runs = []
    for result in results:
        less = {}
        for tree in _TREES if compared and result is not results[0] else ():
            value, error = difference(result["counts"], results[0]["counts"], tree)
            less[tree] = {"tau": round(value, 4), "standard_error": None if error is None else round(error, 4)}
        runs.append({**result, "difference": less})
    report = {**facts, "runs": runs}
    if further and len(results) >= 3:
        fits = {tree: Fit.of([r["tokens"] for r in results], [r["tau"][tree] for r in results]) for tree in _TREES}
        report["curve"] = {tree: fit.to_dict(further) for tree, fit in fits.items()}
    return report


def markdown(report: Mapping[str, Any]) -> str:
    """The table of a report, with its conditions and its curve."""
    options, judged = report["options"], report["judged_by"]
    head = ["run", "differs in", "parameters", "tokens", "steps", "s", "τ chain", "τ tree", "Δ tree", "n-α 0 … 4"]
    lines = [
        f"# Study: {report['study']}",
        "",
        f"Target {report['target']}; data {', '.join(report['files'])}; {options['epochs']:g} epochs, seed "
        f"{options['seed']}; judged by the target's greedy answers to {judged['prompts']} other prompts, "
        f"{judged['answer_tokens']} tokens. Δ: against the first run, ± its standard error over prompts.",
        "",
        "| " + " | ".join(head) + " |",
        "|---|---" + "|--:" * (len(head) - 2) + "|",
    ]
    for run in report["runs"]:
        less = run["difference"].get("tree")
        delta = "" if less is None else f"{less['tau']:+.3f}"
        if less is not None and less["standard_error"] is not None:
            delta += f" ± {less['standard_error']:.3f}"
        cells = [
            run["name"], run["label"], f"{run['parameters']:,}", f"{run['tokens']:,}", str(run["steps"]),
            f"{run['seconds']:.0f}", f"{run['tau']['chain']:.3f}", f"{run['tau']['tree']:.3f}", delta,
            " ".join(f"{x:.3f}" for x in run["n_alpha"][:5]),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    for tree, fit in report.get("curve", {}).items():
        further = "; ".join(
            f"{e['tokens'] / 1e6:g} M tokens: {e['tau']:.2f} ± {e['margin_95']:.2f}" for e in fit["extrapolated"]
        )
        lines += [
            "",
            f"τ {tree} = {fit['intercept']:.3f} {fit['slope_per_e']:+.4f} · ln(tokens), "
            f"{fit['slope_per_doubling']:+.3f} per doubling, residual {fit['residual']:.3f} over {fit['points']} "
            f"points; the line further on (95 % prediction interval): {further}",
        ]
    return "\n".join(lines) + "\n"
