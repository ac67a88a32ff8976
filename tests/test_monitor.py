"""What a user sees of a training: lines that are held back, the bar of a terminal, event files."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eaglekit.train.head.trainer import Status
from eaglekit.train.judge.evaluate import Acceptance
from eaglekit.train.report.monitor import REDRAWN, SAID, Monitor, Throttled, losses
from test_train import OPTIONS, new_store, run

STATUS = Status(20, 40, 8000, 812.4, 83.0, 6e-4, (0.5, 0.25, 0.125), (3.0, 4.0, 5.0))
JUDGED = replace(STATUS, step=40, acceptance=Acceptance({"chain": 1.5, "tree": 2.25}, (0.5, 0.25), 99, {}))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name, value in {"TERM": "xterm", "COLUMNS": "100", "LINES": "20"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


@pytest.fixture
def no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if tensorboard were not installed."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)


# --- lines that count


def test_lines_that_count_are_said_now_and_then_and_the_last_one_always() -> None:
    said: list[str] = []
    clock = Clock()
    say = Throttled(said.append, 10.0, clock=clock)
    for i in range(1, 26):  # one a second: at 0, 10 and 20 seconds, then the last
        say(f"answers: {i} of 100, {i * 7} tokens")
        clock.now += 1
    say("features: at most 3 of these")
    assert said == [
        "answers: 1 of 100, 7 tokens",
        "answers: 11 of 100, 77 tokens",
        "answers: 21 of 100, 147 tokens",
        "answers: 25 of 100, 175 tokens",
        "features: at most 3 of these",
    ]


def test_each_kind_begins_at_once_and_nothing_is_said_twice() -> None:
    said: list[str] = []
    say = Throttled(said.append, 10.0, clock=Clock())
    lines = [
        "answers: 1 of 2",
        "features: 5 of 9 tokens",
        "features: 9 of 9 tokens",
        "answers: 2 of 2",
        "step 1: 3",
    ]
    for line in lines:
        say(line)
    say.flush()
    say.flush()
    assert said == lines
    say("step 1: 3")  # what does not count is never held back
    assert said == [*lines, lines[-1]]


def test_where_lines_overwrite_each_other_the_last_one_stays() -> None:
    said: list[str] = []
    shown: list[str] = []
    clock = Clock()
    say = Throttled(said.append, 0.2, shown.append, clock)
    for i in range(1, 8):
        say(f"answers: {i} of 7")
        clock.now += 0.09
    assert (said, shown) == ([], ["answers: 1 of 7", "answers: 4 of 7", "answers: 7 of 7"])
    say.flush()
    assert said == ["answers: 7 of 7"]


# --- without a terminal


def test_lines_alone_where_there_is_no_terminal(tmp_path: Path) -> None:
    stream, clock = io.StringIO(), Clock()
    with Monitor(tmp_path, stream=stream, clock=clock, active=True) as monitor:
        for i in range(1, 4):
            monitor.say(f"answers: {i} of 3")
        monitor.on_step(STATUS)
        monitor.say(JUDGED.line())
        clock.now += SAID
        monitor.say("features: 1 of 8 tokens")
        monitor.say("features: 8 of 8 tokens")
    lines = stream.getvalue().splitlines()
    if importlib.util.find_spec("tensorboard") is None:
        assert "tensorboard" in lines.pop(2)
    told = ["answers: 1 of 3", "answers: 3 of 3", JUDGED.line(), "features: 1 of 8 tokens", "features: 8 of 8 tokens"]
    assert lines == [f"eaglekit: {line}" for line in told]


def test_other_processes_say_and_write_nothing(tmp_path: Path, terminal: Terminal) -> None:
    with Monitor(tmp_path, stream=terminal, active=False) as monitor:
        monitor.say("data: 3 rows")
        monitor.on_step(JUDGED)
    assert terminal.getvalue() == ""
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tensorboard_is_said_once(tmp_path: Path, no_events: None) -> None:
    stream = io.StringIO()
    with Monitor(tmp_path, stream=stream) as monitor:
        monitor.on_step(STATUS)
        monitor.on_step(JUDGED)
    assert stream.getvalue().count("pip install tensorboard") == len(stream.getvalue().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_tensorboard_that_torch_cannot_use_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there")

    def import_module(name: str) -> None:
        raise ImportError("TensorBoard logging requires TensorBoard version 1.15 or above")

    monkeypatch.setattr(importlib, "import_module", import_module)
    stream = io.StringIO()
    with Monitor(tmp_path, stream=stream) as monitor:
        monitor.on_step(STATUS)
    assert "requires TensorBoard version 1.15 or above; pip install --upgrade tensorboard" in stream.getvalue()


# --- on a terminal


def test_the_bar_says_where_the_training_is(tmp_path: Path, terminal: Terminal, no_events: None) -> None:
    with Monitor(tmp_path, stream=terminal, clock=Clock()) as monitor:
        monitor.on_step(replace(JUDGED, step=20))
        drawn = terminal.getvalue()
    for part in (
        "step 20/40", "812 tokens/s", "1:23 left", "regression 0.500 … 0.125", "classification 3.000 … 5.000",
        "τ chain 1.50  tree 2.25",
    ):  # fmt: skip
        assert part in drawn
    assert losses(replace(STATUS, regression=(0.5,), classification=(3.0,))) == "regression 0.500  classification 3.000"


def test_the_bar_is_redrawn_every_so_often_and_at_the_end(tmp_path: Path, terminal: Terminal, no_events: None) -> None:
    clock = Clock()
    with Monitor(tmp_path, stream=terminal, clock=clock) as monitor:
        drawn = []
        for step in range(1, 41):
            before = terminal.tell()
            monitor.on_step(replace(STATUS, step=step))
            drawn += [step] if terminal.tell() > before else []
            clock.now += REDRAWN / 8 + 1e-9
    assert drawn == [1, 9, 17, 25, 33, 40]


def test_lines_go_above_the_bar_and_counting_ones_over_each_other(
    tmp_path: Path, terminal: Terminal, no_events: None
) -> None:
    clock = Clock()
    with Monitor(tmp_path, stream=terminal, clock=clock) as monitor:
        for i in (1, 2, 3):
            monitor.say(f"answers: {i} of 3")
        monitor.say("64 dialogues [red] :smile:")
        told = terminal.getvalue()
        assert told.count("answers: 1 of 3") == 1  # shown, then overwritten
        assert "answers: 2 of 3" not in told
        assert told.count("eaglekit: answers: 3 of 3") == 1  # for good
        assert told.rstrip().endswith("eaglekit: 64 dialogues [red] :smile:")  # as it is, and nothing old below
        monitor.on_step(STATUS)
        before = terminal.tell()
        monitor.say(JUDGED.line())
        after = terminal.getvalue()[before:]
        assert after.index(JUDGED.line()) < after.index("step 20/40  8")
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1  # the cursor is back


# --- event files


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(folder))
    read.Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_event_files_hold_the_log_and_go_on_where_a_run_does(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    output, store = tmp_path / "out", new_store(tmp_path / "f")
    options = replace(OPTIONS, epochs=4.0, log_every=2)

    def train_on(resume: bool, stop: int = 0) -> None:
        with Monitor(output, log_every=2, stream=io.StringIO()) as monitor:

            def on_step(status: Status) -> None:
                monitor.on_step(status)
                if status.step == stop:
                    raise KeyboardInterrupt

            run(store, output, options, resume=resume, progress=monitor.say, on_step=on_step)

    with pytest.raises(KeyboardInterrupt):
        train_on(False, stop=8)
    saved = events(output / "tensorboard")["learning_rate"]
    assert saved[-1][0] == 8
    train_on(True)
    rows = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    found = events(output / "tensorboard")
    wanted: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        values = {"learning_rate": row["learning_rate"]}
        values |= {f"loss/{kind}_{k}": x for kind in ("regression", "classification") for k, x in enumerate(row[kind])}
        if row["acceptance"]:
            values |= {f"acceptance/tau_{name}": x for name, x in row["acceptance"]["tau"].items()}
            values |= {f"acceptance/n_alpha_{k}": x for k, x in enumerate(row["acceptance"]["n_alpha"])}
        for tag, value in values.items():
            wanted.setdefault(tag, []).append((row["step"], pytest.approx(value, rel=1e-5)))
    assert len(rows) > 5 and {"acceptance/tau_chain", "acceptance/tau_tree"} < wanted.keys()
    assert {tag: points for tag, points in found.items() if tag != "tokens_per_second"} == wanted
    assert [step for step, _ in found["tokens_per_second"]] == [row["step"] for row in rows]
