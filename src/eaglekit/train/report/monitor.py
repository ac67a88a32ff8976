"""What a user sees while data are made and a head is trained: lines, a progress bar, event files for TensorBoard.

Contract: a `Monitor` belongs to the main process; any other gets one that is not `active` and does nothing. It reads
what it is told and changes nothing. On a terminal there is a bar, redrawn every 0.2 seconds at most, with the lines
that are said above it; elsewhere there are lines alone. `OUTPUT/tensorboard` gets the numbers of the log, if the
`tensorboard` package is there.

Glossary: a line that counts says how far something is, as "answers: 5 of 100, 812 tokens" does; what stands before its
colon is its kind.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from eaglekit.train.head.trainer import Status

REDRAWN = 0.2  # seconds
SAID = 10.0  # seconds between lines that count, where they cannot overwrite each other

_COUNTING = re.compile(r"([^:]+): \d+ of \d+\b")


class Throttled:
    """Passes lines on, those that count less often: there is one for every finished answer.

    The first one of a kind is passed on, then one every `every` seconds, and the last one before a line of another
    kind or `flush`.

    Args:
        say: Called with each line that stays.
        every: Seconds.
        show: Called with lines that count in place of `say`, where they can overwrite each other; the last one of a
            kind is said all the same.
        clock: Seconds from anywhere.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        every: float = SAID,
        show: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._every, self._show, self._clock = say, every, show, clock
        self._kind, self._held, self._due = "", "", 0.0

    def __call__(self, line: str) -> None:
        """Pass `line` on, now or later or, if another of its kind follows, never."""
        counting = _COUNTING.match(line)
        kind = counting[1] if counting else ""
        if kind != self._kind:
            self.flush()
            self._kind, self._due = kind, self._clock()
        if not kind:
            self._say(line)
            return
        self._held = line
        if self._clock() < self._due:
            return
        self._due = self._clock() + self._every
        if self._show is not None:
            self._show(line)
        else:
            self._held = ""
            self._say(line)

    def flush(self) -> None:
        """Say the last line that counted, if it was not said."""
        held, self._held = self._held, ""
        if held:
            self._say(held)


class Monitor:
    """Shows what a training says; a context manager.

    Args:
        output: The folder of the head.
        log_every: Steps between the points in the event files, as in the log; there is one at every evaluation too.
        active: Whether this is the main process.
        stream: Where lines and the bar go; None: standard error.
        clock: Seconds from anywhere.
    """

    def __init__(
        self,
        output: Path,
        *,
        log_every: int = 20,
        active: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._output, self._log_every, self._active, self._clock = output, log_every, active, clock
        self._stream = sys.stderr if stream is None else stream
        self._bar: _Bar | None = None
        if active and self._stream.isatty() and os.environ.get("TERM") != "dumb":
            self._bar = _Bar(self._stream)
        show = None if self._bar is None else self._bar.show
        self._lines = Throttled(self._print, SAID if show is None else REDRAWN, show, clock)
        self._drawn = -REDRAWN
        self._events: Any = None
        self._asked = False

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def say(self, line: str) -> None:
        """Show a line of text; of lines that count some are left out, see `Throttled`."""
        if self._active:
            self._lines(line)

    def on_step(self, status: Status) -> None:
        """Show where the training is."""
        if not self._active:
            return
        now = self._clock()
        if self._bar is not None:
            last = status.step == status.steps
            due = now - self._drawn >= REDRAWN or last
            self._bar.step(status, due)
            self._drawn = now if due else self._drawn
        if not self._asked:
            self._asked = True
            self._events = self._open_events(status.step)
        if self._events is not None and (status.acceptance is not None or status.step % self._log_every == 0):
            for name, value in scalars(status).items():
                self._events.add_scalar(name, value, status.step)

    def close(self) -> None:
        """Say what was held back, end the bar and the event file."""
        self._lines.flush()
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._events is not None:
            self._events.close()
            self._events = None

    def _print(self, line: str) -> None:
        line = f"eaglekit: {line}"
        if self._bar is not None:
            self._bar.say(line)
        else:
            print(line, file=self._stream, flush=True)

    def _open_events(self, step: int) -> Any:
        """A writer whose first point is at `step`: later ones, of a run that went on behind its checkpoint, go."""
        if importlib.util.find_spec("tensorboard") is None:
            self.say("no event files for TensorBoard: they need its package; pip install tensorboard")
            return None
        try:
            writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError as e:  # there, but of no use to this torch
            self.say(f"no event files for TensorBoard: {' '.join(str(e).split())}; pip install --upgrade tensorboard")
            return None
        return writer(str(self._output / "tensorboard"), purge_step=step)


def scalars(status: Status) -> dict[str, float]:
    """The numbers of a status by the names that they have in event files."""
    found: dict[str, float] = {f"loss/regression_{k}": x for k, x in enumerate(status.regression)}
    found |= {f"loss/classification_{k}": x for k, x in enumerate(status.classification)}
    found |= {"learning_rate": status.learning_rate, "tokens_per_second": status.tokens_per_second}
    if status.acceptance is not None:
        found |= {f"acceptance/tau_{name}": x for name, x in status.acceptance.tau.items()}
        found |= {f"acceptance/n_alpha_{k}": x for k, x in enumerate(status.acceptance.n_alpha)}
    return found


def losses(status: Status) -> str:
    """The losses of the first and the last unrolled step, for a line."""
    parts = {"regression": status.regression, "classification": status.classification}
    ends = {name: [f"{x:.3f}" for x in (values[0], *values[1:][-1:])] for name, values in parts.items() if values}
    return "  ".join(f"{name} {' … '.join(values)}" for name, values in ends.items())


class _Bar:
    """Two lines at the bottom of a terminal: the bar, and losses and τ; or, while data are made, a line that counts."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, force_terminal=True, markup=False, highlight=False, emoji=False)
        # What goes to standard output stays there: it may be a file.
        self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._tau, self._counting = "", False
        self._live.start()

    def say(self, line: str) -> None:
        """Put a line above the bar; it takes the place of the line that counts."""
        if self._counting:
            self._counting = False
            self._live.update("", refresh=True)
        self._console.print(line, soft_wrap=True)

    def show(self, line: str) -> None:
        """Have a line that counts at the bottom."""
        self._counting = True
        self._live.update(self._line(f"eaglekit: {line}"), refresh=True)

    def step(self, status: Status, draw: bool) -> None:
        """Take in a status, and show it if `draw`."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        from eaglekit.train.head.trainer import duration

        if status.acceptance is not None:
            self._tau = "  τ " + "  ".join(f"{name} {value:.2f}" for name, value in status.acceptance.tau.items())
        if not draw:
            return
        self._counting = False
        row = Table.grid(padding=(0, 2))
        speed = f"{status.tokens_per_second:.0f} tokens/s"
        bar = ProgressBar(total=status.steps, completed=status.step, width=24)
        row.add_row(bar, f"step {status.step}/{status.steps}", speed, f"{duration(status.seconds_left)} left")
        self._live.update(Group(row, self._line(f"{losses(status)}{self._tau}")), refresh=True)

    def close(self) -> None:
        """Take the bar away."""
        self._live.update("")
        self._live.stop()

    def _line(self, text: str) -> Any:
        from rich.text import Text

        return Text(text, no_wrap=True, overflow="ellipsis")
