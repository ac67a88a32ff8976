"""The card of a trained head, its picture, and what it says of evaluation files."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from eaglekit.cli.main import app
from eaglekit.cli.train import _base_model
from eaglekit.errors import DataError
from eaglekit.models.checkpoint import load_head
from eaglekit.train.head.trainer import duration
from eaglekit.train.options import SelfTalkOptions
from eaglekit.train.report.card import MARKER, CardInfo, Count, DataFacts, draw_curves, write_card
from eaglekit.train.text.dataset import Dialogue
from eaglekit.train.text.overlap import Overlap, find_overlaps, training_texts
from test_train import OPTIONS, Job, lines, new_store, run
from tiny import llama, on_disk

PNG = b"\x89PNG\r\n\x1a\n"


class Trained:
    """A tiny training that has ended, and what it left."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.output = folder / "out"
        self.job = Job(folder)
        self.said: list[str] = []
        self.job.run(progress=self.said.append, **changes)

    @property
    def card(self) -> str:
        return (self.output / "README.md").read_text(encoding="utf-8")

    @property
    def training(self) -> dict[str, Any]:
        return dict(json.loads((self.output / "training.json").read_text()))

    def section(self, title: str) -> str:
        return self.card.partition(f"## {title}\n")[2].partition("\n## ")[0]

    def rows(self, title: str) -> list[list[str]]:
        """Cells of the section's tables, without the lines under their heads."""
        found = [line[2:-2].split(" | ") for line in self.section(title).splitlines() if line.startswith("| ")]
        return [row for row in found if not set("".join(row)) <= set("-| ")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    info = CardInfo(shlex.join(["eaglekit", "train", "--data", "my file.jsonl"]), "models/tiny", "me/tiny")
    return Trained(tmp_path_factory.mktemp("trained"), card=info)


def joined(numbers: list[float]) -> str:
    return " ".join(f"{x:.3f}" for x in numbers)


# --- the card


def test_the_front_matter_is_that_of_the_hub(trained: Trained) -> None:
    front = trained.card.split("---\n")[1]
    assert yaml.safe_load(front) == {
        "library_name": "eaglekit",
        "base_model": "me/tiny",
        "tags": ["eagle", "speculative-decoding", "draft-head"],
    }
    assert "# license: fill in" in front


def test_results_are_those_of_the_training(trained: Trained) -> None:
    t = trained.training
    best = t["best"]
    assert trained.rows("Results")[1:] == [
        ["chain of 5", f"**{best['tau']['chain']:.3f}**", joined(best["by_depth"]["chain"])],
        ["the paper's tree (25 drafts)", f"**{best['tau']['tree']:.3f}**", joined(best["by_depth"]["tree"])],
        ["0-α … 4-α", "", joined(best["n_alpha"])],
    ]
    log = [json.loads(line) for line in (trained.output / "log.jsonl").read_text().splitlines()]
    seen = next(row["tokens"] for row in log if row["step"] == t["best_step"])
    judged = sum(row["acceptance"] is not None for row in log)
    results = trained.section("Results")
    for part in (
        f"On {t['heldout']} held-out greedy answers of the target ({best['tokens']} tokens)",
        f"Judged once, at the end, after {t['steps']} steps ({seen} tokens seen)."
        if judged == 1
        else f"The best of {judged} evaluations, after step {t['best_step']} of {t['steps']} ({seen} tokens seen).",
        f"{t['tokens']:,} tokens read, {t['tokens_per_second']:.0f} tokens/s, {t['peak_memory_mb']:.0f} MB at most, "
        f"{duration(t['seconds'])} (processes: 1, cpu, threads: ",
    ):
        assert part in results
    assert "stopped early" not in results


def test_the_shape_is_that_of_the_head(trained: Trained) -> None:
    head = load_head(trained.output)
    assert head.draft_vocab is not None
    parameters = sum(p.numel() for p in head.parameters())
    assert f"| parameters | {parameters:,}, stored in float16" in trained.card
    assert f"| draft vocabulary | {len(head.draft_vocab)} of the target's 260 tokens |" in trained.card
    assert "1 decoder layer, width 32, 4 heads of 32 with 2 key/value heads, MLP 64; reads feature+shifted-token |" in (
        trained.card
    )


def test_how_it_was_made(trained: Trained) -> None:
    t, file = trained.training, trained.output.parent / "p.jsonl"
    assert "    eaglekit train --data 'my file.jsonl'\n" in trained.section("How it was made")
    assert re.search(r"eaglekit \d\S*, torch \d\S*, transformers \d", trained.section("How it was made"))
    assert "--target models/tiny --head" in trained.section("Use")
    data = trained.section("Data")
    assert f"{t['rows']} dialogues of {t['data_tokens']} tokens, {t['trained_tokens']} of them trained on" in data
    assert trained.rows("Data")[1] == ["`p.jsonl`", hashlib.sha256(file.read_bytes()).hexdigest()]
    assert "What they hold: 19 rows: 16 prompts, 3 dialogues or texts." in data
    kinds = {row[0]: [int(x.replace(",", "")) for x in row[1:]] for row in trained.rows("Data")[3:]}
    assert [row[0] for row in kinds.values()] == [8, 4, 3]  # batches of 4 at temperatures 0, 0.7 and 0, and those given
    assert sum(row[0] for row in kinds.values()) == t["rows"] + t["heldout"]
    assert "in turn: [0.0, 0.7, 0.0, 1.0]" in data


def test_options_that_are_not_the_default_are_named(trained: Trained) -> None:
    changed = {row[0].strip("`"): row[1].strip("`") for row in trained.rows("Options")[1:]}
    assert changed == {
        "epochs": "1.0", "batch_tokens": "120", "linear_start": "false", "learning_rate": "0.002", "warmup_steps": "2",
        "vocabulary": "24", "heldout": "2", "eval_every": "3", "checkpoint_minutes": "0.0", "max_new_tokens": "12",
        "batch_size": "4",
    }  # fmt: skip
    assert "noise 0.1" in trained.section("Options").partition("As by default: ")[2]


def test_a_training_from_python_an_early_stop_and_a_start_from_a_head(tmp_path: Path, trained: Trained) -> None:
    options = replace(OPTIONS, epochs=40.0, batch_tokens=120, eval_every=1, patience=1, learning_rate=1e-9)
    early = Trained(tmp_path, options=options, init=trained.output)
    t = early.training
    planned = json.loads((early.output / "log.jsonl").read_text().splitlines()[0])["steps"]
    assert t["steps"] < planned
    assert f"stopped early: {planned} were planned" in early.section("Results")
    assert f"It started from the head `{trained.output}`" in early.section("How it was made")
    assert "(called from Python" in early.section("How it was made")
    assert yaml.safe_load(early.card.split("---\n")[1])["base_model"] == "tiny"


def test_a_head_without_text(tmp_path: Path) -> None:
    model = llama(head_dim=32)
    model.generation_config.eos_token_id = [256, *range(24)]
    talk = SelfTalkOptions(max_tokens=120, max_user_tokens=60, shared=0.9)
    info = CardInfo(evaluation={"e.jsonl": ["what was never said"]})
    made = Trained(tmp_path, model=model, files=[], answers=5, talk=talk, card=info)
    assert re.search(
        r"No files: .* self-talk: 5 dialogues, \d+ answers of \d+ tokens, from \d+ tries", made.section("Data")
    )
    assert made.rows("Overlap with evaluation files")[1] == ["`e.jsonl`", "1", "0", "0"]


def test_a_training_that_had_ended_keeps_its_speed(tmp_path: Path) -> None:
    made = Trained(tmp_path)
    results = made.rows("Results")
    speed = json.loads((tmp_path / "out" / "training.json").read_bytes())["tokens_per_second"]
    made.job.run(resume=True)
    assert made.rows("Results") == results
    assert f"{speed:.0f} tokens/s" in made.section("Results")


def test_somebodys_own_card_is_kept(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    own = output / "README.md"
    own.write_text("# My head\n", encoding="utf-8")
    made = Trained(tmp_path)
    assert made.card == "# My head\n"
    assert made.said[-1] == f"{own}: not written by eaglekit; kept as it is"
    own.write_text(f"{MARKER}\nold\n", encoding="utf-8")
    assert write_card(output, data=DataFacts(), progress=made.said.append)
    assert made.card.count(MARKER) == 1 and "old" not in made.card.split()


def test_answers_and_tokens_are_counted() -> None:
    some = [Dialogue([1, 2, 3, 4, 5], [(1, 2), (3, 5)]), Dialogue([1, 2, 3], [(2, 3)])]
    assert Count.of(iter(some)) == Count(2, 8, 4)
    assert Count.of([]) == Count()


def test_a_wider_head_and_the_rows_of_a_file_with_a_strange_name(tmp_path: Path) -> None:
    run(new_store(tmp_path / "f"), tmp_path / "out", progress=lambda s: None)
    source = {"data files": ["abc"], "tokens of the data": "def"}
    (tmp_path / "out" / "data").mkdir()
    (tmp_path / "out" / "data" / "source.json").write_text(json.dumps(source))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["eaglekit"] |= {"mlp": False, "inputs": "feature+token", "input_norm": True, "feature_layers": [0, 1, 2]}
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    assert write_card(
        tmp_path / "out", data=DataFacts("1 row"), files=[tmp_path / "a|b.jsonl"], progress=lambda s: None
    )
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| `a\\|b.jsonl` | abc |" in card
    assert (
        "| 2 decoder layers, width 16, 4 heads of 4 with 2 key/value heads, no MLP; reads feature+token, the feature "
        "fused of residual streams 0, 1, 2, normed |"
    ) in card


# --- the picture


def test_curves_are_a_picture_where_matplotlib_is(trained: Trained) -> None:
    pytest.importorskip("matplotlib")
    data = (trained.output / "curves.png").read_bytes()
    assert data.startswith(PNG)
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert 600 < width < 2000 and 200 < height < 800 and len(data) < 200_000
    assert "![losses and τ against tokens seen](curves.png)" in trained.section("Curves")


def test_a_table_where_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    made = Trained(tmp_path)
    assert not (made.output / "curves.png").exists()
    assert "no picture of the curves: it needs matplotlib; pip install matplotlib" in made.said
    log = [json.loads(line) for line in (made.output / "log.jsonl").read_text().splitlines()]
    assert made.rows("Curves") == [
        ["tokens seen", "regression, by unrolled step", "classification", "τ chain", "τ tree"],
        *(
            [f"{row['tokens']:,}", joined(row["regression"]), joined(row["classification"])]
            + [f"{row['acceptance']['tau'][name]:.3f}" for name in ("chain", "tree")]
            for row in log
            if row["acceptance"]
        ),
    ]


def test_a_log_without_an_evaluation_is_drawn_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"tokens": 10, "regression": [0.5], "classification": [2.0], "acceptance": None}
    for log in ([], [row], [row, {**row, "tokens": 20}]):
        assert draw_curves(tmp_path / "c.png", log)
        assert (tmp_path / "c.png").read_bytes().startswith(PNG)


# --- overlap with evaluation files

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen"


@pytest.mark.parametrize(
    ("evaluation", "training", "found"),
    [
        ("Hello, World!", "hello   world", (1, 0)),
        ("hello world", "hello world again", (0, 0)),
        (LONG, LONG.upper().replace(" ", ", "), (1, 0)),
        (f"{LONG} a", f"b {LONG}.", (0, 1)),
        (f"{LONG.removeprefix('one ')} a", f"b {LONG}", (0, 0)),  # twelve words
        ("\ufb01ne \uff12", "fine 2", (1, 0)),
        ("?!", "...", (0, 0)),
        ("", "", (0, 0)),
    ],
)
def test_overlap_is_found_by_words(evaluation: str, training: str, found: tuple[int, int]) -> None:
    assert find_overlaps({"f": [evaluation]}, [training]) == [Overlap("f", 1, *found)]


def test_each_text_of_each_file_counts_once() -> None:
    files = {"a": ["same", "other", f"x {LONG}"], "b": ["same"], "c": []}
    training = ["Same", "same!", f"{LONG} y", f"z {LONG}"]
    assert find_overlaps(files, training) == [Overlap("a", 3, 1, 1), Overlap("b", 1, 1, 0), Overlap("c", 0, 0, 0)]


def test_training_texts_are_what_users_say(tmp_path: Path) -> None:
    talk = [{"role": r, "content": f"{r} {i}"} for i in (1, 2) for r in ("user", "assistant")]
    file = lines(tmp_path / "a.jsonl", {"turns": ["q"]}, {"x": 1}, {"messages": talk}, {"text": "plain"})
    talks = lines(
        tmp_path / "t.jsonl", {"try": 0, "messages": talk, "ids": [1, 2], "spans": [[1, 2]], "greedy": True},
        {"try": 1, "dropped": "loops"},
    )  # fmt: skip
    assert list(training_texts([file], talks)) == ["q", "user 1", "user 2", "plain"]
    assert list(training_texts([], talks)) == ["user 1", "user 2"]
    assert list(training_texts([], tmp_path / "none.jsonl")) == []
    with pytest.raises(DataError, match="no such file"):
        list(training_texts([tmp_path / "none.jsonl"], talks))


def test_overlap_is_said_and_written(tmp_path: Path) -> None:
    made = Trained(tmp_path, card=CardInfo(evaluation={"e.jsonl": ["SAY 3", "hihi", "new"], "f.jsonl": ["new"]}))
    assert made.rows("Overlap with evaluation files")[1:] == [
        ["`e.jsonl`", "3", "2", "0"],
        ["`f.jsonl`", "1", "0", "0"],
    ]
    assert Overlap("e.jsonl", 3, 2, 0).line() in made.said


def test_the_command_line_writes_the_card_and_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = on_disk(tmp_path)
    data = lines(tmp_path / "p.jsonl", *({"turns": [f"say {i}"]} for i in range(24)))
    judge = lines(tmp_path / "e.jsonl", {"turns": ["say 3"]}, {"prompt": "new"})
    output = tmp_path / "head"
    args = [
        "train",
        "--target",
        str(target),
        "--data",
        str(data),
        "--output",
        str(output),
        "--eval-overlap",
        str(judge),
    ]
    args += ["--max-new-tokens", "12", "--epochs", "1", "--batch-tokens", "256", "--vocabulary", "64", "--heldout", "2"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/eaglekit", *args, "a b"])
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    card = (output / "README.md").read_text(encoding="utf-8")
    assert f"\n    {shlex.join(['eaglekit', *args, 'a b'])}\n" in card
    assert f"| `{judge}` | 2 | 1 | 0 |" in card
    said = result.stderr.splitlines()
    assert f"eaglekit: overlap with {judge}: 2 texts, 1 the same as a training prompt" in result.stderr
    assert said[-1] == f"eaglekit: {output / 'README.md'} written: what this head is, and how it was made"
    assert sum(line.startswith("eaglekit: answers: ") for line in said) <= 2  # not one for each
    result = CliRunner().invoke(app, [*args[:-2], "--eval-overlap", str(tmp_path / "none.jsonl")])
    assert result.exit_code == 2 and "none.jsonl: no such file" in result.stderr


@pytest.mark.parametrize(
    ("target", "name"),
    [(None, "HuggingFaceTB/SmolLM2-135M-Instruct"), ("org/name", "org/name"), ("/a/b", ""), ("name", "")],
)
def test_the_base_model_is_a_name_on_the_hub(target: str | None, name: str) -> None:
    assert _base_model(target) == name


def test_a_folder_is_no_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert _base_model("org/name") == ""
