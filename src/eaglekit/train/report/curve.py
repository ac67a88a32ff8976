"""A learning curve: τ against the logarithm of the training tokens, by least squares, and what it says further on.

Contract: pure arithmetic on a few points, and a picture of it; matplotlib is imported when the picture is drawn.

The model is y = a + b x + error with x = ln(tokens), errors independent and normal with one variance V. With n points,
x̄ their mean, Sxx = Σ (x - x̄)² and s² = Σ residual² / (n - 2), the estimate of V:

    ȳ and b are uncorrelated, with variances V/n and V/Sxx, so that the fitted value ȳ + b (x0 - x̄) has the variance
    V (1/n + (x0 - x̄)²/Sxx). A new point has an error of its own, of variance V, independent of the fit. So
    (new point - fitted value) / (s √(1 + 1/n + (x0 - x̄)²/Sxx)) follows Student's law with n - 2 degrees of freedom, and

    fitted value ± t(97.5 %, n - 2) · s · √(1 + 1/n + (x0 - x̄)²/Sxx)

holds a new point in 95 % of all cases. It says what a straight line would do. It does not know whether the line bends:
far behind the last point, take it as a bound on what more data of the same kind can bring, not as a promise.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglekit.errors import InputError


@dataclass(frozen=True)
class Fit:
    """A straight line through points (ln(tokens), τ).

    Attributes:
        intercept: a.
        slope: b, τ per factor e of tokens.
        residual: s, τ.
        points: n.
        mean: x̄.
        spread: Sxx.
    """

    intercept: float
    slope: float
    residual: float
    points: int
    mean: float
    spread: float

    @staticmethod
    def of(tokens: Sequence[float], values: Sequence[float]) -> Fit:
        """The line of least squares.

        Raises:
            InputError: there are less than three points, or all have the same number of tokens.
        """
        n = len(tokens)
        xs = [math.log(t) for t in tokens if t > 0]
        mean = sum(xs) / max(1, n)
        spread = sum((x - mean) ** 2 for x in xs)
        if n < 3 or len(xs) != n or len(values) != n or spread < 1e-12:
            raise InputError(f"learning curve: tokens {list(tokens)}; expected three points or more that differ")
        level = sum(values) / n
        slope = sum((x - mean) * y for x, y in zip(xs, values, strict=True)) / spread
        squares = sum((y - level - slope * (x - mean)) ** 2 for x, y in zip(xs, values, strict=True))
        return Fit(level - slope * mean, slope, math.sqrt(squares / (n - 2)), n, mean, spread)

    def at(self, tokens: float) -> float:
        """The line's value."""
        return self.intercept + self.slope * math.log(tokens)

    def margin(self, tokens: float, level: float = 0.95) -> float:
        """Half-width of the prediction interval of a new point."""
        away = (math.log(tokens) - self.mean) ** 2 / self.spread
        quantile = student_quantile(0.5 + level / 2, self.points - 2)
        return quantile * self.residual * math.sqrt(1 + 1 / self.points + away)

    def to_dict(self, further: Sequence[float]) -> dict[str, Any]:
        """The line, and what it says at `further` numbers of tokens, for JSON."""
        return {
            "intercept": round(self.intercept, 5),
            "slope_per_e": round(self.slope, 5),
            "slope_per_doubling": round(self.slope * math.log(2), 5),
            "residual": round(self.residual, 5),
            "points": self.points,
            "extrapolated": [
                {"tokens": t, "tau": round(self.at(t), 4), "margin_95": round(self.margin(t), 4)} for t in further
            ],
        }


def student_quantile(p: float, freedom: int) -> float:
    """Where Student's law with `freedom` (1 or more) degrees of freedom has reached `p`, 0.5 <= p < 1."""
    low, high = 0.0, 1.0
    while _student_law(high, freedom) < p:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_law(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def _student_law(t: float, freedom: int) -> float:
    """P(T <= t), t >= 0: the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = total = (cosine if odd else 1.0) if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    both = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 + both / 2


def draw(path: Path, runs: Sequence[Mapping[str, Any]], further: Sequence[float], title: str) -> bool:
    """Write the picture to `path`, a PNG file; False, and nothing written, without matplotlib.

    Args:
        path: The file.
        runs: Each has `tokens`, and `tau` by tree.
        further: Numbers of tokens up to which the lines go on.
        title: Above the picture.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    tokens = [run["tokens"] for run in runs]
    first, last = min(tokens), max(*tokens, *further)
    xs = [first * (last / first) ** (i / 60) for i in range(61)]
    for tree, colour in zip(runs[0]["tau"], ("#1f5fa8", "#c8512b", "#2a9d6f"), strict=False):
        fit = Fit.of(tokens, [run["tau"][tree] for run in runs])
        axes.plot(tokens, [run["tau"][tree] for run in runs], "o", color=colour, label=f"τ {tree}")
        axes.plot(xs, [fit.at(x) for x in xs], "-", color=colour, linewidth=1)
        low, high = ([fit.at(x) + sign * fit.margin(x) for x in xs] for sign in (-1, 1))
        axes.fill_between(xs, low, high, color=colour, alpha=0.13, linewidth=0)
    axes.set(xscale="log", xlabel="training tokens (shaded: 95 % prediction interval)", ylabel="τ")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    return True
