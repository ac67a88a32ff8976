"""What a training leaves for whoever gets the head: a model card and the picture of its curves.

Contract: `write_card` reads what the run left in its folder (`config.json`, `model.safetensors`, `training.json`,
`log.jsonl`, `data/`) and writes `README.md` and `curves.png`. A `README.md` without `MARKER` is somebody's own and is
kept. Numbers are those of the files. matplotlib is imported when the picture is drawn; without it there is a table.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from eaglekit import __version__
from eaglekit.jsonl import read_lines
from eaglekit.models.checkpoint import DRAFT_VOCAB, read_config
from eaglekit.train.head.trainer import duration
from eaglekit.train.options import SelfTalkOptions, SynthesisOptions, TrainOptions
from eaglekit.train.text.dataset import Dialogue
from eaglekit.train.text.forms import is_dataset
from eaglekit.train.text.overlap import WORDS, Overlap
from eaglekit.train.text.tries import Report, read_tries

MARKER = "<!-- Written by eaglekit train, and again after each training; without this line it is left alone. -->"

_TREES = {"chain": "chain of 5", "tree": "the paper's tree (25 drafts)"}
_COLOURS = ("#1f5fa8", "#c8512b", "#2a9d6f", "#8a5fb0", "#888888")


@dataclass(frozen=True)
class Count:
    """Dialogues of a kind.

    Attributes:
        dialogues: How many.
        tokens: Of all of them, prompts included.
        answers: Of these, tokens of answers.
    """

    dialogues: int = 0
    tokens: int = 0
    answers: int = 0

    @staticmethod
    def of(dialogues: Iterable[Dialogue]) -> Count:
        """Count them."""
        every = list(dialogues)
        answers = sum(end - start for d in every for start, end in d.spans)
        return Count(len(every), sum(len(d.ids) for d in every), answers)


@dataclass(frozen=True)
class DataFacts:
    """What training text is made of.

    Attributes:
        summary: What the files hold and what of it was left out; empty without files.
        greedy: Dialogues whose answers are the target's own at temperature 0.
        sampled: Those with an answer of its own at another temperature.
        given: Dialogues and texts used as they are.
    """

    summary: str = ""
    greedy: Count = field(default_factory=Count)
    sampled: Count = field(default_factory=Count)
    given: Count = field(default_factory=Count)


@dataclass(frozen=True)
class CardInfo:
    """What a card says that a run does not know by itself.

    Attributes:
        command: The command line.
        target: What `--target` was; empty for the built-in target.
        base_model: The target's name on the hub; empty for the name that the head's configuration has.
        evaluation: Texts that training prompts are compared with, by the name of their file.
    """

    command: str = ""
    target: str = ""
    base_model: str = ""
    evaluation: Mapping[str, Sequence[str]] = field(default_factory=dict)


def write_card(
    output: Path,
    *,
    data: DataFacts,
    info: CardInfo | None = None,
    files: Sequence[Path] = (),
    init: Path | None = None,
    overlaps: Sequence[Overlap] = (),
    progress: Callable[[str], None] = print,
) -> bool:
    """Write the card of the head in `output`, and its picture.

    Args:
        output: The folder of a training that has ended.
        data: What it was trained on.
        info: See `CardInfo`.
        files: Those that the data came from, in the order of `data/source.json`.
        init: The head that it started from.
        overlaps: What was found of the evaluation files.
        progress: Called with a line of text now and then.

    Returns:
        Whether the card was written; False if there is another one.
    """
    run = _Run.read(output)
    drawn = draw_curves(output / "curves.png", run.log)
    if not drawn:
        progress("no picture of the curves: it needs matplotlib; pip install matplotlib")
    card = output / "README.md"
    if card.exists() and MARKER not in card.read_text(encoding="utf-8", errors="replace"):
        progress(f"{card}: not written by eaglekit; kept as it is")
        return False
    info = info or CardInfo()
    parts = [
        _front(run, info),
        _about(run),
        _use(run, info),
        _results(run),
        _curves(run, drawn),
        _origin(run, info, init),
        _data(run, data, files),
        _overlap(overlaps),
        _options(run),
        _limits(run),
    ]
    card.write_text("\n".join(part.rstrip() + "\n" for part in parts), encoding="utf-8")
    progress(f"{card} written: what this head is, and how it was made")
    return True


@dataclass(frozen=True)
class _Run:
    """What a training left; see the files."""

    output: Path
    config: dict[str, Any]
    training: dict[str, Any]
    log: list[dict[str, Any]]
    source: dict[str, Any]
    parameters: int
    drafted: int

    @staticmethod
    def read(output: Path) -> _Run:
        from safetensors import safe_open

        shapes: dict[str, list[int]] = {}
        with safe_open(output / "model.safetensors", "pt") as tensors:
            shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}
        drafted = shapes.pop(DRAFT_VOCAB, [0])[0]
        source = output / "data" / "source.json"
        return _Run(
            output,
            read_config(output),
            json.loads((output / "training.json").read_text(encoding="utf-8")),
            [row for _, row in read_lines(output / "log.jsonl")],
            json.loads(source.read_text(encoding="utf-8")) if source.exists() else {},
            sum(map(prod, shapes.values())),
            drafted,
        )

    @property
    def own(self) -> dict[str, Any]:
        """Our part of the configuration."""
        return dict(self.config["eaglekit"])

    @property
    def target(self) -> str:
        return str(self.own.get("target", "unknown"))

    @property
    def judged(self) -> list[dict[str, Any]]:
        """Lines of the log with an evaluation."""
        return [row for row in self.log if row["acceptance"]]


def _front(run: _Run, info: CardInfo) -> str:
    yaml: Any = importlib.import_module("yaml")  # a dependency
    facts = {
        "library_name": "eaglekit",
        "base_model": info.base_model or run.target,
        "tags": ["eagle", "speculative-decoding", "draft-head"],
    }
    said = yaml.safe_dump(facts, sort_keys=False, allow_unicode=True)
    licence = "# license: fill in; it follows from the licences of the target and of the training data"
    return f"---\n{said}{licence}\n---\n\n{MARKER}\n"


def _about(run: _Run) -> str:
    c, own = run.config, run.own
    layers, inputs = c["num_hidden_layers"], own.get("inputs", "feature+shifted-token")
    mlp = f"MLP {c['intermediate_size']}" if own.get("mlp", True) else "no MLP"
    streams = own.get("feature_layers")
    read = f"{inputs}, the feature fused of residual streams {', '.join(map(str, streams))}" if streams else inputs
    shape = (
        f"{layers} decoder layer{'s' if layers > 1 else ''}, width {c['hidden_size']}, {c['num_attention_heads']} "
        f"heads of {c['head_dim']} with {c['num_key_value_heads']} key/value heads, {mlp}; reads {read}"
        f"{', normed' if own.get('input_norm') else ''}"
    )
    size = (run.output / "model.safetensors").stat().st_size / 1e6
    rows = {
        "target": run.target,
        "shape": shape,
        "parameters": f"{run.parameters:,}, stored in {c['torch_dtype']} ({size:.2f} MB); embeddings and `lm_head` are "
        "the target's",
        "draft vocabulary": f"{run.drafted or c['vocab_size']:,} of the target's {c['vocab_size']:,} tokens",
        "licence": "not stated yet; see Limits",
    }
    return "\n".join(
        [
            f"# EAGLE draft head for {run.target}\n",
            f"A draft head (arXiv 2401.15077) for `eaglekit`: it proposes tokens, {run.target} checks them, and the "
            "text is the target's own. The head decides how fast that is, never what comes out.\n",
            _table(["", ""], [[key, _cell(value)] for key, value in rows.items()]),
        ]
    )


def _use(run: _Run, info: CardInfo) -> str:
    target = f" --target {shlex.quote(info.target)}" if info.target else ""
    named = f"{json.dumps(info.target, ensure_ascii=False)}, " if info.target else ""
    return f"""## Use

    eaglekit generate "Why is the sky blue?"{target} --head {shlex.quote(str(run.output))} --compare

```python
import eaglekit

model = eaglekit.load({named}head={json.dumps(str(run.output), ensure_ascii=False)})
print(model.generate("Why is the sky blue?").text)
```
"""


def _results(run: _Run) -> str:
    t = run.training
    best = t["best"]
    seen = next((row["tokens"] for row in run.log if row["step"] == t["best_step"]), None)
    planned = run.log[-1]["steps"] if run.log else t["steps"]
    early = f", stopped early: {planned:,} were planned" if t["steps"] < planned else ""
    after = f" ({seen:,} tokens seen)" if seen else ""
    rows = [
        [_TREES.get(name, name), f"**{tau:.3f}**", _numbers(best["by_depth"].get(name, ()))]
        for name, tau in best["tau"].items()
    ]
    depth = len(best["n_alpha"])
    rows.append([f"0-α … {depth - 1}-α", "", _numbers(best["n_alpha"])])
    where = t["device"] if t["device"] != "cpu" else f"cpu, threads: {t['threads']}"
    speed = (
        f"{t['tokens_per_second']:.0f} tokens/s, {t['peak_memory_mb']:.0f} MB at most, {duration(t['seconds'])} "
        f"(processes: {t['processes']}, {where}; memory of the last run, if it was resumed)"
    )
    return "\n".join(
        [
            "## Results\n",
            f"On {t['heldout']} held-out greedy answers of the target ({best['tokens']:,} tokens), temperature 0, "
            "simulated: the target's own text is known, and the head drafts along it. τ counts new tokens per target "
            "pass, the bonus token included. By depth: rounds in which a draft was accepted there, of those that tried "
            "some there. n-α: accepted / tried at depth n of a chain, over all positions as roots.\n",
            _table(["", "τ", "by depth"], rows),
            "",
            f"The best of {len(run.judged)} evaluations, after step {t['best_step']:,} of {t['steps']:,}{after}{early}."
            " These answers chose it, so that the numbers are a little optimistic."
            if len(run.judged) > 1
            else f"Judged once, at the end, after {t['steps']:,} steps{after}.",
            "",
            f"Training: {t['tokens']:,} tokens read, {speed}.",
        ]
    )


def _curves(run: _Run, drawn: bool) -> str:
    if drawn:
        return "## Curves\n\n![losses and τ against tokens seen](curves.png)"
    every = -(-len(run.judged) // 12)
    shown = run.judged[::-1][::every][::-1] if run.judged else []
    names = list(shown[0]["acceptance"]["tau"]) if shown else []
    rows = [
        [f"{row['tokens']:,}", _numbers(row["regression"]), _numbers(row["classification"])]
        + [f"{row['acceptance']['tau'][name]:.3f}" for name in names]
        for row in shown
    ]
    head = ["tokens seen", "regression, by unrolled step", "classification", *(f"τ {name}" for name in names)]
    return "## Curves\n\n" + _table(head, rows)


def _origin(run: _Run, info: CardInfo, init: Path | None) -> str:
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    command = info.command or "(called from Python: eaglekit.train.pipeline.train_head)"
    start = f" It started from the head `{init}`." if init is not None else ""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    return f"## How it was made\n\n    {command}\n\n{day}, eaglekit {__version__}, {libraries}.{start}"


def _data(run: _Run, data: DataFacts, files: Sequence[Path]) -> str:
    t, source = run.training, run.source
    lines = [
        "## Data\n",
        f"{t['rows']:,} dialogues of {t['data_tokens']:,} tokens, {t['trained_tokens']:,} of them trained on; "
        f"{t['heldout']:,} more held out.\n",
    ]
    if files:
        digests = source.get("data files", [""] * len(files))
        lines.append(
            _table(
                ["file", "SHA-256"],
                [
                    [f"`{_cell(str(file) if is_dataset(file) else file.name)}`", "a dataset" if is_dataset(file) else d]
                    for file, d in zip(files, digests, strict=True)
                ],
            )
        )
        digest = source.get("tokens of the data", "unknown")
        lines.append(f"\nTheir rows as tokens: SHA-256 {digest}.\n\nWhat they hold: {data.summary}.")
    else:
        report = Report()
        talks = run.output / "data" / "talks.jsonl"
        for done in read_tries(talks) if talks.exists() else ():
            report.count(done)
        lines.append(f"No files: the target wrote all dialogues by itself. {report.summary()}.")
    kinds = {
        "answers of the target, greedy": data.greedy,
        "dialogues with answers of the target, sampled or of several turns": data.sampled,
        "given dialogues and texts": data.given,
    }
    rows = [[k, f"{c.dialogues:,}", f"{c.tokens:,}", f"{c.answers:,}"] for k, c in kinds.items() if c.dialogues]
    lines += ["", _table(["held-out ones included", "dialogues", "tokens", "answer tokens"], rows)]
    if "temperatures" in source and data.greedy.dialogues + data.sampled.dialogues:
        temperatures = source["temperatures"]
        lines.append(f"\nTemperatures of the target's answers, in turn: {json.dumps(temperatures)}.")
    return "\n".join(lines)


def _overlap(overlaps: Sequence[Overlap]) -> str:
    if not overlaps:
        return (
            "## Overlap with evaluation files\n\nNot looked for: `eaglekit train --eval-overlap FILE` compares the "
            "training prompts with those of a file."
        )
    head = ["file", "texts", "the same as a training text", f"of the others, {WORDS} words in a row shared"]
    rows = [[f"`{_cell(o.name)}`", f"{o.texts:,}", f"{o.same:,}", f"{o.shared:,}"] for o in overlaps]
    return "\n".join(
        [
            "## Overlap with evaluation files\n",
            "First turns of these files, compared with every prompt, user turn and plain text of the training data, "
            "also those that were left out. Words alone count: neither case nor punctuation nor spacing.\n",
            _table(head, rows),
        ]
    )


def _options(run: _Run) -> str:
    used = dict(run.own["training"]["options"])
    usual = _jsonable(TrainOptions())
    made = _jsonable(SynthesisOptions()) | _jsonable(SelfTalkOptions())
    for name, value in made.items():
        if name in run.source and name not in used:
            used[name], usual[name] = run.source[name], value
    cells = {k: (json.dumps(value), json.dumps(usual.get(k))) for k, value in used.items()}
    changed = [[f"`{name}`" for name in (k, *pair)] for k, pair in cells.items() if pair[0] != pair[1]]
    same = ", ".join(f"{k} {here}" for k, (here, default) in cells.items() if here == default)
    said = _table(["option", "here", "default"], changed) if changed else "All are the defaults."
    return f"## Options\n\n{said}\n\nAs by default: {same}."


def _limits(run: _Run) -> str:
    c = run.config
    vocabulary = (
        f"- Only {run.drafted:,} of {c['vocab_size']:,} tokens are ever drafted, those most frequent in the training "
        "text. Text that needs others is right all the same, but slower.\n"
        if run.drafted and run.drafted < c["vocab_size"]
        else ""
    )
    return (
        "## Limits\n\n"
        "- The held-out answers are to prompts of the same kind as the training's. Judge the head on text that is "
        "unlike it: `eaglekit eval-head --prompts FILE`.\n"
        f"{vocabulary}"
        "- Texts much longer than those trained on, other languages and other kinds of text are extrapolation.\n"
        "- The licence of a head follows from those of its target and of its training data. Nothing here knows them: "
        "whoever passes the head on has to state it, here and above.\n"
    )


def draw_curves(path: Path, log: Sequence[Mapping[str, Any]]) -> bool:
    """Draw losses and τ against tokens seen to `path`, a PNG file; False, and nothing written, without matplotlib.

    Args:
        path: The file.
        log: Rows of `log.jsonl`.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    tokens = [row["tokens"] for row in log]
    for axes, name, title in (
        (panels[0], "regression", "Distance of features"),
        (panels[1], "classification", "Cross-entropy, nats"),
    ):
        for k in range(len(log[0][name]) if log else 0):
            colour = _COLOURS[k % len(_COLOURS)]
            axes.plot(tokens, [row[name][k] for row in log], "o-", ms=2, lw=1, color=colour, label=f"step {k + 1}")
        axes.set_title(title, fontsize=10)
    judged = [row for row in log if row["acceptance"]]
    for name, colour in zip(judged[0]["acceptance"]["tau"] if judged else (), _COLOURS, strict=False):
        values = [row["acceptance"]["tau"][name] for row in judged]
        panels[2].plot([row["tokens"] for row in judged], values, "o-", ms=3, lw=1, color=colour, label=name)
    panels[2].set_title("τ on held-out answers", fontsize=10)
    for axes in panels:
        axes.set_xlabel("tokens seen")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.25, linewidth=0.5)
        if axes.lines:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    return True


def _jsonable(options: Any) -> dict[str, Any]:
    """Its fields as they come back from a JSON file."""
    return dict(json.loads(json.dumps(asdict(options))))


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{x:.3f}" for x in values)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])
