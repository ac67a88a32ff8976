"""Studies: variations that differ in one thing, data and runs that are made once, tables, and a curve's arithmetic."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import tiny
from eaglekit.bench.lossless import tiny_head
from eaglekit.cli.main import app
from eaglekit.errors import DataError, InputError
from eaglekit.models.head import HeadConfig
from eaglekit.models.hf import HFTarget
from eaglekit.train.features.live import LiveFeatures
from eaglekit.train.judge import study
from eaglekit.train.judge.evaluate import simulate, standard_shapes
from eaglekit.train.judge.study import Study
from eaglekit.train.judge.variations import KINDS, variations
from eaglekit.train.options import SynthesisOptions, TrainOptions
from eaglekit.train.report.curve import Fit, student_quantile
from eaglekit.train.report.study_report import difference, judge, markdown, report_of
from eaglekit.train.text.dataset import Dialogue

OPTIONS = TrainOptions(epochs=1, batch_tokens=512, vocabulary=64, heldout=3, warmup_steps=1, linear_start=False)
SYNTHESIS = SynthesisOptions(max_prompt_tokens=48, max_new_tokens=16, batch_size=8)
PROMPTS = [[3, 4, 5], [100, 101], [70, 71, 72, 73]]
WORDS = "red green blue apple stone river cloud seven eight nine".split()


# --- variations


@pytest.mark.parametrize("kind", KINDS)
def test_variations_differ_from_the_baseline_in_exactly_one_thing(kind: str) -> None:
    base = TrainOptions()
    first, *others = variations(kind, base)
    config = tiny.llama().config
    shape = asdict(HeadConfig.for_target(config))
    assert len({v.name for v in (first, *others)}) == 1 + len(others) > 1
    assert not first.head and not first.options and first.share == 1
    assert kind == "text" or (first.name, first.origin) == ("baseline", "")
    for v in others:
        now, options = asdict(HeadConfig.for_target(config, **v.head)), asdict(replace(base, **v.options))
        changed = [k for k in shape if shape[k] != now[k]] + [k for k, x in asdict(base).items() if options[k] != x]
        changed += [
            f.name for f in fields(v) if f.name in ("origin", "share") and getattr(v, f.name) != getattr(first, f.name)
        ]
        assert len(changed) == 1 or v.name == "paper", (v.name, changed)
        assert v.name == Path(v.name).name and v.name.isascii()


# --- the curve


def test_students_quantiles_are_those_of_the_tables() -> None:
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042}
    assert {n: round(student_quantile(0.975, n), 3) for n in table} == table
    assert student_quantile(0.5, 3) == pytest.approx(0, abs=1e-9)


def test_points_on_a_line_are_extrapolated_along_it() -> None:
    tokens = [1e4 * 2**k for k in range(5)]
    fit = Fit.of(tokens, [0.5 + 0.2 * math.log(t) for t in tokens])
    assert (fit.slope, fit.intercept, fit.residual) == pytest.approx((0.2, 0.5, 0.0), abs=1e-9)
    assert fit.at(6e7) == pytest.approx(0.5 + 0.2 * math.log(6e7)) and fit.margin(6e7) == pytest.approx(0, abs=1e-6)
    found = fit.to_dict([1e7])
    assert found["slope_per_doubling"] == pytest.approx(0.2 * math.log(2), abs=1e-4)
    assert found["extrapolated"] == [{"tokens": 1e7, "tau": round(fit.at(1e7), 4), "margin_95": 0.0}]


def test_the_fit_is_the_textbooks() -> None:
    tokens, values = [100.0, 200.0, 400.0, 1000.0], [1.0, 1.4, 1.3, 1.9]
    fit, x = Fit.of(tokens, values), np.log(tokens)
    slope, intercept = np.polyfit(x, values, 1)
    assert (fit.slope, fit.intercept) == pytest.approx((slope, intercept))
    design = np.stack([np.ones(4), x], 1)  # the general formula: s² (1 + x0' (X'X)^-1 x0)
    s2 = np.sum((values - design @ [intercept, slope]) ** 2) / 2
    x0 = np.array([1.0, math.log(5000)])
    margin = 4.302653 * math.sqrt(s2 * (1 + x0 @ np.linalg.inv(design.T @ design) @ x0))
    assert fit.margin(5000) == pytest.approx(margin, rel=1e-5) and fit.residual == pytest.approx(math.sqrt(s2))


def test_prediction_intervals_hold_new_points_as_often_as_they_say() -> None:
    rng, tokens = random.Random(0), [1e5 * 2**k for k in range(5)]
    held = 0
    for _ in range(800):
        noisy = [2 + 0.1 * math.log(t) + rng.gauss(0, 0.05) for t in (*tokens, 1e7)]
        fit = Fit.of(tokens, noisy[:5])
        held += abs(fit.at(1e7) - noisy[5]) <= fit.margin(1e7)
    assert 0.925 < held / 800 < 0.975


@pytest.mark.parametrize("tokens", [[1e3, 2e3], [5.0, 5.0, 5.0], [0.0, 1.0, 2.0], []])
def test_too_few_points_are_no_curve(tokens: list[float]) -> None:
    with pytest.raises(InputError, match="expected three points or more that differ"):
        Fit.of(tokens, [1.0] * len(tokens))


# --- judging and tables


def test_judging_counts_every_prompt() -> None:
    target = HFTarget(tiny.llama(vocab_size=8, eos_token_id=7, seed=9).eval(), "tiny")
    head = tiny_head(target, 3)
    examples = list(study.answer_prompts(target, tiny.tokenizer(), [[1, 2, 3], [4, 4], [2]], max_new_tokens=30,
                                         progress=lambda s: None))  # fmt: skip
    matrices = study.read_embedding(target), study.read_readout(target, print)
    found, whole = judge(head, examples, *matrices), simulate(head, examples, *matrices, standard_shapes())
    assert found["tau"] == {k: round(v, 4) for k, v in whole.tau.items()} and len(found["n_alpha"]) == 5
    for row, example in zip(found["counts"], examples, strict=True):
        alone = simulate(head, [example], *matrices, standard_shapes())
        assert row[0] == alone.tokens
        assert [row[0] / max(1, r) for r in row[1:]] == pytest.approx(list(alone.tau.values()))


def test_differences_are_paired_by_prompt() -> None:
    rng = random.Random(1)
    mine = [[t, rng.randint(t // 3, t // 2), t // 2] for t in (rng.randint(40, 200) for _ in range(60))]
    theirs = [[t, r + rng.randint(0, 3), t // 2] for t, r, _ in mine]

    def tau(rows: list[list[int]]) -> float:
        return sum(r[0] for r in rows) / sum(r[1] for r in rows)

    value, error = difference(mine, theirs, "chain")
    assert value == pytest.approx(tau(mine) - tau(theirs)) and difference(mine, mine, "tree") == (0.0, 0.0)
    left = [tau(mine[:i] + mine[i + 1 :]) - tau(theirs[:i] + theirs[i + 1 :]) for i in range(60)]
    jackknife = math.sqrt(59 / 60 * sum((x - sum(left) / 60) ** 2 for x in left))
    assert error == pytest.approx(jackknife, rel=0.05)
    assert difference(mine[:1], theirs[:1], "chain")[1] is None


def test_a_report_has_the_curve_only_if_there_are_three_points() -> None:
    facts = {"study": "curve", "target": "t", "files": ["a"], "options": asdict(OPTIONS),
             "judged_by": {"prompts": 2, "answer_tokens": 9}}  # fmt: skip
    run = {"label": "x", "parameters": 1000, "steps": 5, "seconds": 1.0, "n_alpha": [0.5] * 5,
           "counts": [[10, 5, 4], [20, 9, 8]]}  # fmt: skip
    runs = [{**run, "name": f"r{t}", "tokens": t, "tau": {"chain": 1 + t / 1e3, "tree": 2.0}} for t in (100, 200, 400)]
    assert "curve" not in report_of(facts, runs[:2], (1000,)) and "curve" not in report_of(facts, runs)
    report = report_of(facts, runs, (10_000_000,))
    assert report["runs"][1]["difference"]["tree"] == {"tau": 0.0, "standard_error": 0.0}
    text = markdown(report)
    assert "| r100 | x | 1,000 | 100 | 5 | 1 | 1.100 | 2.000 |  | 0.500 0.500" in text
    assert "+0.000 ± 0.000" in text and "10 M tokens: " in text


# --- whole studies


def write_dialogues(path: Path, count: int = 60) -> Path:
    rng = random.Random(0)
    with path.open("w") as f:
        for _ in range(count):
            said = [" ".join(rng.choices(WORDS, k=3)) for _ in range(3)]
            roles = ("user", "assistant", "user")
            messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
            f.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return HFTarget(tiny.llama().eval(), "tiny")


def run(target: HFTarget, kind: str, files: list[Path], output: Path, **changes: Any) -> dict[str, Any]:
    values = {"prompts": PROMPTS, "options": OPTIONS, **changes}
    shared = {name: values.pop(name) for name in ("prompts", "options")}
    made = Study(
        target, tiny.tokenizer(), "tiny", files, output=output, synthesis=SYNTHESIS, progress=lambda s: None, **shared
    )
    return made.run(kind, **values)


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("made again")


def test_what_was_made_is_not_made_again(target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, output = [write_dialogues(tmp_path / "d.jsonl")], tmp_path / "study"
    trained: list[str] = []
    held: set[tuple[tuple[int, ...], ...]] = set()
    train = study.train

    def counting(head: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        trained.append(kwargs["metadata"]["study"])
        rows = study.split_rows(source, kwargs["options"].heldout, kwargs["options"].seed)[1]
        held.add(tuple(tuple(source.tokens(row).tolist()) for row in rows))
        return train(head, source, *args, **kwargs)

    monkeypatch.setattr(study, "train", counting)
    some = run(target, "layers", files, output, only=["baseline", "layers-0.5"])
    assert [r["name"] for r in some["runs"]] == trained == ["baseline", "layers-0.5"]
    baseline, half = some["runs"]
    assert half["head"] == {"mlp": False} and half["parameters"] < baseline["parameters"]
    assert baseline["tokens"] == half["tokens"] and baseline["steps"] == half["steps"] > 1
    assert baseline["difference"] == {} and half["difference"]["tree"]["standard_error"] is not None
    assert json.loads((output / "layers.json").read_text())["runs"] == some["runs"]
    assert (output / "layers.md").read_text().count("\n| ") == 3  # the head of the table, and two runs
    assert some["judged_by"]["prompts"] == 3

    monkeypatch.setattr(study, "answer_prompts", refuse)
    monkeypatch.setattr("eaglekit.train.features.live._stock_reader", lambda *_: refuse)
    again = run(target, "layers", files, output, only=["layers-2"])
    assert trained[2:] == ["layers-2"] and again["runs"][:2] == some["runs"] and len(again["runs"]) == 3
    curve = run(target, "curve", files, output)
    assert trained[3:] == ["part-of-2", "part-of-4", "part-of-8", "part-of-16"]
    assert len(held) == 1 and len(held.pop()) == curve["heldout"]  # the same answers, however little is trained on
    assert curve["runs"][0] == {**baseline, "label": "all tokens"}
    tokens = [r["tokens"] for r in curve["runs"]]
    assert tokens == sorted(tokens, reverse=True) and set(curve["curve"]) == {"chain", "tree"}
    pytest.importorskip("matplotlib")
    assert (output / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_was_stopped_goes_on_and_ends_the_same(target: HFTarget, tmp_path: Path) -> None:
    files, output = [write_dialogues(tmp_path / "d.jsonl")], tmp_path / "study"
    whole = run(target, "layers", files, output, only=["baseline"])["runs"][0]
    (output / "runs" / "baseline" / "result.json").unlink()  # killed after the last step
    again = run(target, "layers", files, output, only=["baseline"])["runs"][0]
    assert {**again, "seconds": 0} == {**whole, "seconds": 0}


def test_other_arguments_need_another_folder(target: HFTarget, tmp_path: Path) -> None:
    files, output = [write_dialogues(tmp_path / "d.jsonl", 30)], tmp_path / "study"
    run(target, "layers", files, output, only=["baseline"])
    with pytest.raises(DataError, match=r"runs/baseline: .*epochs 1 there, 2 now"):
        run(target, "layers", files, output, only=["baseline"], options=replace(OPTIONS, epochs=2))
    with pytest.raises(DataError, match=r"judging: .*prompts"):
        run(target, "layers", files, output, only=["baseline"], prompts=PROMPTS[:2])
    with pytest.raises(InputError, match=r"no variation .layer-2.; expected baseline, layers-0\.5"):
        run(target, "layers", files, output, only=["layer-2"])
    with pytest.raises(InputError, match="study 'depth': expected one of inputs, text"):
        run(target, "depth", files, output)
    with pytest.raises(DataError, match="no dialogue that begins with a prompt"):
        (tmp_path / "t.jsonl").write_text('{"text": "red green blue"}\n')
        run(target, "text", [tmp_path / "t.jsonl"], tmp_path / "other")


def test_given_and_own_answers_to_the_same_first_turns(
    target: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[tuple[tuple[int, ...], int, bool]]] = {}
    train = study.train

    def watching(head: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        rows = [(tuple(source.tokens(row).tolist()), row.spans[0][0], row.greedy) for row in source.dialogues]
        seen[kwargs["metadata"]["study"]] = rows
        return train(head, source, *args, **kwargs)

    monkeypatch.setattr(study, "train", watching)
    report = run(target, "text", [write_dialogues(tmp_path / "d.jsonl")], tmp_path / "study", tokens=900)
    given, generated = (set(seen[name]) for name in ("given", "generated"))
    held = given & generated
    assert len(held) == report["heldout"] and all(greedy for _, _, greedy in held)
    asked = {ids[:start] for ids, start, _ in held}
    theirs, own = ({ids[:start] for ids, start, _ in rows - held} for rows in (given, generated))
    assert not asked & (theirs | own)  # what is held out is not trained on, whoever answered it
    assert len(theirs & own) > 0.5 * len(theirs)
    decode = tiny.tokenizer().decode
    assert all(decode(ids[start:]).removesuffix("<end>").split()[0] in WORDS for ids, start, _ in given - held)
    assert not all(decode(ids[start:]).removesuffix("<end>").split()[:1] in [[w] for w in WORDS]
                   for ids, start, _ in generated - held)  # fmt: skip
    a, b = (run["tokens"] for run in report["runs"])
    assert abs(a - b) <= 2 * (SYNTHESIS.max_prompt_tokens + SYNTHESIS.max_new_tokens)


# --- the command


def test_the_command_prints_the_table(tmp_path: Path) -> None:
    folder, _ = tiny.on_disk(tmp_path)
    data = write_dialogues(tmp_path / "d.jsonl", 30)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"turns": ["hello"]}\n{"turns": ["a river"]}\n')
    args = ["study", "inputs", "--data", str(data), "--prompts", str(prompts), "--output", str(tmp_path / "study")]
    args += ["--target", str(folder), "--epochs", "1", "--max-new-tokens", "12", "--vocabulary", "64", "--heldout", "2"]
    result = CliRunner().invoke(app, [*args, "--only", "token"])
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("# Study: inputs\n") and "| token | token |" in result.stdout
    assert "judging: 2 of 2 prompts" in result.stderr and "token: " in result.stderr
    bad = [
        (["depth", *args[2:]], "expected one of inputs, text"),
        ([*args[1:], "--only", "x"], "no variation 'x'"),
        ([*args[1:], "--data", str(tmp_path / "none.jsonl")], "none.jsonl: no such file"),
    ]
    for wrong, said in bad:
        result = CliRunner().invoke(app, ["study", *wrong])
        assert (result.exit_code, result.stdout) == (2, "") and said in result.stderr


def test_a_subset_reads_as_its_source(target: HFTarget) -> None:
    source = LiveFeatures(target, [Dialogue([1, 2, 3, 4], [(1, 4)]), Dialogue([5, 6, 7], [(1, 3)])])
    part = study.Subset(source, source.dialogues[1:])
    (row,) = part.dialogues
    assert torch.equal(part.read([row])[0], source.read(source.dialogues)[1])
