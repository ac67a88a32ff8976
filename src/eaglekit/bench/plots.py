"""The picture of a speed report: cost of a pass by nodes, by context, and time by phase.

Contract: it reads nothing but the report that `bench/speed.py` makes; a part that was not measured has no panel.
matplotlib is imported when a picture is drawn, without its global state, and is needed for nothing else.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eaglekit.errors import InputError

_COLOURS = {"stock": "#888888", "fp32": "#1f5fa8", "fp16": "#2a9d6f", "int8": "#c8512b"}
_PHASES = {"draft": "#c8512b", "verify": "#1f5fa8", "accept": "#2a9d6f", "rest": "#bbbbbb"}


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(report: Mapping[str, Any], path: Path) -> bool:
    """Write the picture to `path`, a PNG file; False if nothing of it was measured.

    Raises:
        InputError: matplotlib is not installed.
    """
    if not available():
        raise InputError("a picture needs matplotlib; pip install matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: list[tuple[Callable[[Any, Any], None], Any]] = [
        (panel, report["sections"][name])
        for name, panel in (("cost", _cost), ("context", _context), ("phases", _phases))
        if name in report["sections"]
    ]
    if not panels:
        return False
    figure = Figure(figsize=(5.2 * len(panels), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (panel, data) in enumerate(panels, 1):
        panel(figure.add_subplot(1, len(panels), number), data)
    machine = report["machine"]
    figure.suptitle(f"{report['target']}, {machine['cpu']}, threads: {machine['threads']}", fontsize=9)
    figure.savefig(path, dpi=130)
    return True


def _cost(axes: Any, data: Mapping[str, Any]) -> None:
    for label, entries in data["passes"].items():
        nodes = [e["nodes"] for e in entries]
        axes.plot(nodes, [e["ms"]["median"] for e in entries], "o-", ms=3, label=label, color=_COLOURS.get(label))
        low, high = ([e["ms"][p] for e in entries] for p in ("p10", "p90"))
        axes.fill_between(nodes, low, high, alpha=0.15, color=_COLOURS.get(label), linewidth=0)
    axes.set(title="Cost of a pass", xlabel=f"nodes, behind {data['context']} tokens", ylabel="ms")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _context(axes: Any, data: Mapping[str, Any]) -> None:
    styles = dict(zip(map(str, data["nodes"]), ("-", "--", ":", "-."), strict=False))
    for label, entries in data["passes"].items():
        for nodes, style in styles.items():
            times = [e["ms"][nodes]["median"] for e in entries]
            name = f"{label}, {nodes} node{'s' if nodes != '1' else ''}"
            axes.plot([e["context"] for e in entries], times, style, marker="o", ms=3, label=name,
                      color=_COLOURS.get(label))  # fmt: skip
    axes.set(title="Time per step", xlabel="tokens of context", ylabel="ms")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)


def _phases(axes: Any, data: Mapping[str, Any]) -> None:
    rows = data["rounds"]
    names = [f"{row['method'].removeprefix('eagle:')} {row['weights']}" for row in rows]
    left = [0.0] * len(rows)
    for phase, colour in _PHASES.items():
        widths = [row["ms"].get(phase, 0.0) for row in rows]
        axes.barh(names, widths, left=left, label=phase, color=colour)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set(title="Time of a round", xlabel="ms")
    axes.legend(fontsize=8)
