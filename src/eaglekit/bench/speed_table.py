"""A speed report as a Markdown table, for people: a column per format of weights, and one for what is not ours.

Contract: it reads nothing but the report that `bench/speed.py` makes; a section without rows here is a KeyError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def table(report: dict[str, Any]) -> str:
    """The report as a Markdown table: a column per format of weights, and one for what is not ours."""
    formats = list(report["settings"]["weights"])
    lines = [f"| | stock, other | {' | '.join(formats)} |", "|---" * (len(formats) + 2) + "|"]
    for name, data in report["sections"].items():
        for what, cells in _ROWS[name](data):
            shown = [cells.get(column, "") for column in ("stock", *formats)]
            lines.append(f"| {name}: {what} | {' | '.join(shown)} |")
    return "\n".join(lines)


_Rows = list[tuple[str, dict[str, str]]]
"""What a row is about, and its cells by column."""


def _show(numbers: dict[str, float] | None, unit: str = "") -> str:
    """Median (10th, 90th percentile)."""
    return f"{numbers['median']:.2f}{unit} ({numbers['p10']:.2f}, {numbers['p90']:.2f})" if numbers else ""


def _decode_rows(data: dict[str, Any]) -> _Rows:
    rows: _Rows = []
    for method in dict.fromkeys(m["method"] for m in data["methods"]):
        mine = [m for m in data["methods"] if m["method"] == method]
        rows.append((f"{method}, tokens/s", {m["weights"]: _show(m["tokens_per_second"]) for m in mine}))
        for key, against in (("over_transformers", "transformers"), ("over_plain", "plain")):
            if any(key in m for m in mine):
                rows.append((f"{method} / {against}", {m["weights"]: _show(m.get(key), "x") for m in mine}))
        if any("identical" in m for m in mine):
            rows.append((f"{method}, τ", {m["weights"]: f"{m['tau']:.2f}" for m in mine}))
            same = {m["weights"]: f"{m['identical']} of {m['of']}" for m in mine}
            rows.append((f"{method}, ids equal plain's", same))
    return rows


def _cost_rows(data: dict[str, Any]) -> _Rows:
    def cell(entry: dict[str, Any]) -> str:
        return f"{entry['ms']['median']:.2f} ({entry['ratio']['median']:.2f}x)"

    return [
        (f"{n} node{'s' * (n > 1)}, ms (to 1)", {label: cell(entries[i]) for label, entries in data["passes"].items()})
        for i, n in enumerate(data["nodes"])
    ]


def _context_rows(data: dict[str, Any]) -> _Rows:
    def cell(ms: dict[str, dict[str, float]]) -> str:
        return " / ".join(f"{times['median']:.2f}" for times in ms.values())

    title = " / ".join(map(str, data["nodes"]))
    return [
        (f"{c} tokens, {title} nodes, ms", {label: cell(e[i]["ms"]) for label, e in data["passes"].items()})
        for i, c in enumerate(data["contexts"])
    ]


def _phase_rows(data: dict[str, Any]) -> _Rows:
    rows: _Rows = []
    for method in dict.fromkeys(r["method"] for r in data["rounds"]):
        mine = [r for r in data["rounds"] if r["method"] == method]
        for phase in mine[0]["ms"]:
            cells = {r["weights"]: f"{r['ms'][phase]:.2f} ({r['share'][phase]:.0%})" for r in mine}
            rows.append((f"{method}, {phase}, ms per round (share)", cells))
        rows.append((f"{method}, outside the target's pass", {r["weights"]: f"{r['outside']:.0%}" for r in mine}))
    floors = data["floors"]
    rates_seen = floors["machine"]
    bandwidth = max(rates_seen["read_gb_per_second"], rates_seen["copy_gb_per_second"])
    rows.append(
        ("bandwidth, float32 rate", {"stock": f"{bandwidth} GB/s, {rates_seen['float32_gflop_per_second']} GFLOP/s"})
    )
    for i, entry in enumerate(next(iter(floors["passes"].values()))):
        cells = {
            label: f"{e[i]['floor_ms']:.2f} by {e[i]['bound']} ({e[i]['over_floor']}x)"
            for label, e in floors["passes"].items()
        }
        rows.append((f"floor of {entry['nodes']} node{'s' * (entry['nodes'] > 1)}, ms (pass / floor)", cells))
    return rows


def _scripted_rows(data: dict[str, Any]) -> _Rows:
    mine, name = data["formats"], f"α {data['alpha']}, chain:{data['steps']}"
    return [
        (f"{name}, tokens/s", {f["weights"]: _show(f["tokens_per_second"]) for f in mine}),
        (f"{name} / plain", {f["weights"]: _show(f["over_plain"], "x") for f in mine}),
        (
            f"{name} / plain, at the expected τ",
            {f["weights"]: f"{x:.2f}x" for f in mine if (x := f["over_plain_at_expected_tau"])},
        ),
        (f"τ, expected {data['expected_tau']:.2f}", {f["weights"]: f"{f['tau'] or f['tau_of_all']:.2f}" for f in mine}),
        ("ids equal plain's", {f["weights"]: f"{f['identical']} of {f['of']}" for f in mine}),
    ]


def _batch_rows(data: dict[str, Any]) -> _Rows:
    mine, name = data["formats"], f"{data['sequences']} sequences"
    own = {f["weights"]: _show(f["tokens_per_second"]) for f in mine}
    return [
        (f"{name}, tokens/s", {"stock": f"one: {_show(data['transformers'])}", **own}),
        (f"{name} / transformers with one", {f["weights"]: _show(f["over_transformers"], "x") for f in mine}),
        ("ids equal plain's", {f["weights"]: f"{f['identical']} of {f['of']}" for f in mine}),
    ]


def _start_rows(data: dict[str, Any]) -> _Rows:
    def megabytes(name: str) -> dict[str, str]:
        memory = {f["weights"]: f["memory"][name] for f in data["formats"]}
        return {w: "" if size is None else f"{size / 1e6:.0f}" for w, size in memory.items()}

    rows: _Rows = [("seconds to the first token", {f["weights"]: _show(f["seconds_to_first_token"]) for f in
                                                   data["formats"]})]  # fmt: skip
    names = {
        "peak": "peak memory",
        "libraries": "of it libraries",
        "anonymous": "at the end, without mapped files",
        "weights": "weights",
        "caches": "caches",
    }
    rows += [(f"{title}, MB", megabytes(name)) for name, title in names.items()]
    over = {f["weights"]: f["memory"]["over_held"] for f in data["formats"]}
    rows.append(
        ("(peak - libraries) / (weights + caches)", {w: "" if x is None else f"{x:.2f}x" for w, x in over.items()})
    )
    return rows


def _train_rows(data: dict[str, Any]) -> _Rows:
    return [
        ("training, tokens/s", {"stock": f"{data['tokens_per_second']:.0f}"}),
        ("features on the fly, tokens/s", {"stock": f"{data['features_tokens_per_second']:.0f}"}),
        ("peak memory, MB", {"stock": f"{data['peak_memory_mb']:.0f}"}),
        ("of it before training", {"stock": f"{data['peak_memory_mb_before']:.0f}"}),
    ]


def _rival_rows(data: dict[str, Any]) -> _Rows:
    rows: _Rows = []
    ours = [m for m in data["methods"] if "over" in m]
    for rival in (m for m in data["methods"] if "over" not in m):
        rows.append((f"{rival['method']}, tokens/s", {"stock": _show(rival["tokens_per_second"])}))
    for method in dict.fromkeys(m["method"] for m in ours):
        mine = [m for m in ours if m["method"] == method]
        rows.append((f"{method}, tokens/s", {m["weights"]: _show(m["tokens_per_second"]) for m in mine}))
        for rival in mine[0]["over"]:
            rows.append((f"{method} / {rival}", {m["weights"]: _show(m["over"][rival], "x") for m in mine}))
    return rows


_ROWS: dict[str, Callable[[dict[str, Any]], _Rows]] = {
    "decode": _decode_rows,
    "cost": _cost_rows,
    "context": _context_rows,
    "phases": _phase_rows,
    "scripted": _scripted_rows,
    "batch": _batch_rows,
    "start": _start_rows,
    "train": _train_rows,
    "rivals": _rival_rows,
}
