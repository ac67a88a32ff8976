"""Judging a head without timing: the numbers of real decoding, and the command."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tiny
from eaglekit.api import Model
from eaglekit.bench.lossless import tiny_head
from eaglekit.cli import main as cli
from eaglekit.cli.main import app
from eaglekit.core.stats import Stats
from eaglekit.errors import InputError
from eaglekit.models.checkpoint import save_head
from eaglekit.models.head import INPUTS, EagleHead, check_draft_vocab
from eaglekit.models.hf import HFTarget
from eaglekit.train.judge.eval_head import eval_head
from eaglekit.train.options import SelfTalkOptions

PROMPTS = [[1, 2, 3], [4, 4, 1, 2, 0, 6], [2], [3, 0, 5, 5]]


def decoded(model: Model, tree: str, limit: int) -> Stats:
    total = Stats()
    for prompt in PROMPTS:
        total.add(model.generate(prompt, method="eagle", tree=tree, max_new_tokens=limit).stats)
    return total


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("vocabulary", [None, [0, 2, 3, 5, 6]])
def test_the_numbers_are_those_of_decoding(fast: bool, vocabulary: list[int] | None) -> None:
    # Eight tokens, so that a random head is right now and then.
    changes = {"seed": 4, "head_dim": 32} if fast else {"seed": 9}
    target = HFTarget(tiny.llama(vocab_size=8, eos_token_id=7, **changes).eval(), "tiny")
    head = tiny_head(target, 3)
    if vocabulary is not None:
        head.draft_vocab = check_draft_vocab(torch.tensor(vocabulary), 8)
    said: list[str] = []
    report = eval_head(target, tiny.tokenizer(), head, PROMPTS, max_new_tokens=40, batch_size=2, progress=said.append)
    model = Model.wrap(target, None, head)
    found = report.acceptance
    assert found.tokens > 40 and 0.02 < found.n_alpha[0] < 0.98
    for name, tree in (("chain", "chain:5"), ("tree", "paper")):
        stats = decoded(model, tree, 40)
        assert found.tau[name] == pytest.approx(stats.tau)
        # Where the limit cuts an answer off, decoding drafts no token for the last place.
        assert found.by_depth[name][: len(stats.acceptance)] == pytest.approx(stats.acceptance, abs=0.06)
        assert report.answer_tokens == stats.new_tokens == found.tokens + len(PROMPTS)
    allowed = range(8) if vocabulary is None else vocabulary
    answers = [t for p in PROMPTS for t in model.generate(p, method="plain", max_new_tokens=40).token_ids]
    assert report.coverage == pytest.approx(sum(t in allowed for t in answers) / len(answers))
    assert (report.prompts, report.draft_vocabulary) == (4, len(allowed))
    assert said[-1] == f"4 of 4 prompts, {report.answer_tokens} tokens"


@pytest.mark.parametrize(
    "changes",
    [
        *({"inputs": name} for name in INPUTS[1:]),
        {"feature_layers": (0, 2), "input_norm": True},
        {"mlp": False},
        {"num_hidden_layers": 2},
        {
            "method": "eagle3", "feature_layers": (0, 1, 2), "input_norm": True, "output_norm": True,
            "fuse_norms": True, "readout_size": 6, "draft_vocab": [0, 1, 2, 3, 5, 6],
        },
    ],
    ids=str,
)  # fmt: skip
def test_the_numbers_of_every_variant_are_those_of_decoding(changes: dict[str, Any]) -> None:
    target = HFTarget(tiny.llama(vocab_size=8, eos_token_id=7, seed=9).eval(), "tiny")
    head = tiny_head(target, 3, **changes)
    report = eval_head(target, tiny.tokenizer(), head, PROMPTS, max_new_tokens=40, progress=lambda s: None)
    model = Model.wrap(target, None, head)
    assert report.acceptance.tokens > 40
    for name, tree in (("chain", "chain:5"), ("tree", "paper")):
        assert report.acceptance.tau[name] == pytest.approx(decoded(model, tree, 40).tau)


def test_requests_that_cannot_be_carried_out() -> None:
    target = HFTarget(tiny.llama(vocab_size=8, eos_token_id=7).eval(), "tiny")
    head = tiny_head(target, 3)
    with pytest.raises(InputError, match="0 prompts"):
        eval_head(target, tiny.tokenizer(), head, [])
    with pytest.raises(InputError, match="prompt 2 has 255 tokens; expected 1 to 254"):
        eval_head(target, tiny.tokenizer(), head, [[1], [1] * 255])
    report = eval_head(target, tiny.tokenizer(), head, [[1] * 254], progress=lambda s: None)  # two tokens are left
    assert report.answer_tokens <= 2


# --- the command line


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target, head = tiny.on_disk(tmp_path_factory.mktemp("models"))
    return ["--target", str(target), "--head", str(head)]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"turns": ["hello", "more"]}\n{"prompt": "world"}\n{"messages": [{"role": "user", "content": "a"}]}\n'
    )
    return file


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_eval_head_prints_a_table_and_writes_json(where: list[str], prompts: Path, tmp_path: Path) -> None:
    out_file = tmp_path / "out.json"
    args = ["eval-head", "--prompts", str(prompts), *where, "--max-new-tokens", "12"]
    code, out, err = run(*args, "--json", str(out_file))
    data = json.loads(out_file.read_text(encoding="utf-8"))
    assert code == 0 and "3 of 3 prompts" in err
    assert data["prompts"] == 3 and data["file"] == "prompts.jsonl" and data["max_new_tokens"] == 12
    assert set(data["tau"]) == set(data["acceptance_by_depth"]) == {"chain", "tree"} and len(data["n_alpha"]) == 5
    assert data["coverage"] == 1 and data["draft_vocabulary"] == 260
    assert f"τ tree: {data['tau']['tree']:.3f}" in out and "100.0% of the answers' tokens" in out
    code, out, _ = run(*args, "--limit", "1")
    assert code == 0 and out.startswith("1 prompts")
    with pytest.MonkeyPatch.context() as patch:
        read: list[Any] = []
        patch.setattr("eaglekit.train.judge.eval_head.generate", lambda model, queue, **_: read.extend(queue) or [])
        plain = tmp_path / "plain"
        shutil.copytree(where[1], plain)
        for file in plain.glob("*chat_template*"):
            file.unlink()
        run("eval-head", "--prompts", str(prompts), "--target", str(plain), *where[2:])
        assert sorted(tiny.tokenizer().decode(job.prompt) for job in read) == ["a", "hello", "world"]


def test_a_bad_request_to_eval_head_is_one_line(where: list[str], prompts: Path, tmp_path: Path) -> None:
    save_head(
        EagleHead(tiny_head(HFTarget(tiny.llama(hidden_size=64), "t"), 0).config), tmp_path / "other", metadata={}
    )
    good = ["--prompts", str(prompts)]
    bad: list[tuple[list[str], str]] = [
        (["--prompts", "/no/such.jsonl", *where], "no such file"),
        ([*good, *where, "--max-new-tokens", "0"], "--max-new-tokens 0"),
        ([*good, *where, "--json", str(tmp_path)], "expected a file in a folder"),
        ([*good, *where[:2]], "--head DIR"),
        ([*good, *where[:2], "--head", str(tmp_path / "none")], "no such folder"),
        ([*good, *where[:2], "--head", str(tmp_path / "other")], "features 64 against 32"),
    ]
    for args, said in bad:
        code, out, err = run("eval-head", *args)
        assert (code, out) == (2, "") and said in err and err.strip().count("\n") == 0, err


# --- train: options from a file, and no data


SHORT = (
    "max-new-tokens: 12\nepochs: 1\nbatch_tokens: 256\nvocabulary: 64\nheldout: 2\nlearning-rate: 6e-4\n"
    "linear-start: no\n"
)


def trained(folder: Path) -> dict[str, Any]:
    options: dict[str, Any] = json.loads((folder / "config.json").read_text())["eaglekit"]["training"]["options"]
    return options


def test_options_may_come_from_a_file_and_the_command_line_wins(where: list[str], tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("nonsense\n" + "".join(json.dumps({"turns": [f"question {i}"]}) + "\n" for i in range(24)))
    config, output = tmp_path / "c.yaml", tmp_path / "head"
    config.write_text(f"{SHORT}data: [{data}]\noutput: {output}\ntarget: {where[1]}\nskip-bad: true\ninit: null\n")
    code, out, err = run("train", "--config", str(config), "--epochs", "2.5")
    assert code == 0 and out.startswith(f"{output}: τ on held-out answers"), err
    assert "data: 24 rows: 24 prompts, 0 dialogues or texts; 1 bad rows skipped" in err
    options = trained(output)
    assert [options[k] for k in ("epochs", "batch_tokens", "learning_rate", "linear_start")] == [2.5, 256, 6e-4, False]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "epoch: 3\nlearning_rat: 1",
            "unknown option 'epoch'; did you mean epochs?; unknown option 'learning_rat'; did",
        ),
        ("config: other.yaml", "unknown option 'config'"),
        ("zzz: 1", "unknown option 'zzz'; eaglekit train --help lists them"),
        ("epochs: [1, 2]", "epochs: expected one value, got a list"),
        ("data: [[a]]", "data: expected values"),
        ("- epochs", "got a list"),
        ("", "got a NoneType"),
        ("a: [", "not YAML"),
    ],
)
def test_a_bad_configuration_is_one_line(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(content)
    code, out, err = run("train", "--config", str(file), "--output", str(tmp_path))
    assert (code, out) == (2, "") and said in err and err.strip().count("\n") == 0, err
    assert err.startswith(f"eaglekit: error: --config {file}: ")


def test_a_missing_configuration_and_a_value_of_another_kind(where: list[str], tmp_path: Path) -> None:
    code, _, err = run("train", "--config", str(tmp_path / "c.yaml"), "--output", str(tmp_path))
    assert code == 2 and "cannot be read (No such file" in err
    (tmp_path / "c.yaml").write_text("heldout: 2.5")
    code, _, err = run("train", "--config", str(tmp_path / "c.yaml"), "--output", str(tmp_path), "--synthesize", "9")
    assert code == 2 and "heldout" in err and "valid integer" in err


def test_the_default_of_turns_is_the_librarys() -> None:
    assert inspect.signature(cli.train).parameters["turns"].default == SelfTalkOptions().turns


def test_a_head_from_a_models_name_alone(where: list[str], tmp_path: Path) -> None:
    config, output = tmp_path / "c.yaml", tmp_path / "head"
    config.write_text(SHORT)
    args = ["train", *where[:2], "--config", str(config), "--output", str(output)]
    code, out, err = run(*args)
    assert code == 2 and "--data FILE" in err and "--synthesize N" in err and out == ""
    code, out, err = run(*args, "--synthesize", "20", "--turns", "1")
    assert code == 0 and "self-talk: 20 dialogues, 20 answers" in err, err
    code, out, _ = run("generate", "hello", *where[:2], "--head", str(output), "--max-new-tokens", "8", "--json")
    assert code == 0 and json.loads(out)["token_ids"]
