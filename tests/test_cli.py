"""The command line: what reaches which stream, the exit codes, and one clear line for each mistake."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tiny
from eaglekit.cli import main as cli
from eaglekit.cli.main import app
from eaglekit.train.options import HeadOptions, SynthesisOptions, TrainOptions


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    target, head = tiny.on_disk(tmp_path_factory.mktemp("models"))
    return ["--target", str(target), "--head", str(head)]


def run(*args: str, text: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(args), input=text)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_generate_streams_text_to_stdout_and_numbers_to_stderr(where: list[str]) -> None:
    code, out, err = run("generate", "hello", *where, "--max-new-tokens", "12", "--compare")
    assert code == 0
    answer = json.loads(run("generate", "hello", *where, "--max-new-tokens", "12", "--json")[1])
    assert out == answer["text"] + "\n"
    assert re.search(
        r"12 tokens in .* tokens/s\), τ \d\.\d\d over \d+ rounds; time: prefill .*draft .*verify .*accept .*rest", err
    )
    assert "both outputs are identical (12 tokens)" in err and re.search(r"this run was \d+\.\d\dx as fast", err)


def test_json_is_one_object_with_the_documented_fields(where: list[str]) -> None:
    code, out, _ = run("generate", "hello", *where, "--max-new-tokens", "8", "--compare", "--json")
    data = json.loads(out)
    assert code == 0
    assert set(data) == {"text", "token_ids", "prompt_tokens", "finish_reason", "stats", "plain"}
    assert {"tau", "rounds", "n_alpha", "seconds"} <= set(data["stats"])
    assert data["plain"]["identical"] is True and data["plain"]["token_ids"] == data["token_ids"]


def test_the_prompt_may_come_from_a_file_or_from_standard_input(where: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hello", encoding="utf-8")
    tail = [*where, "--max-new-tokens", "6", "--json"]
    ids = [
        json.loads(run(*args, text="hello")[1])["token_ids"]
        for args in (
            ("generate", "hello", *tail),
            ("generate", "-", *tail),
            ("generate", "--prompt-file", "-", *tail),
            ("generate", "--prompt-file", str(file), *tail),
        )
    ]
    assert ids[0] == ids[1] == ids[2] == ids[3]


def test_sampling_options_reach_the_model(where: list[str]) -> None:
    base = ("generate", "hello", *where, "--max-new-tokens", "10", "--json", "--temperature", "1.5", "--seed", "3")
    one, same = (json.loads(run(*base)[1])["token_ids"] for _ in range(2))
    other = json.loads(run(*base[:-1], "4")[1])["token_ids"]
    greedy = json.loads(run("generate", "hello", *where, "--max-new-tokens", "10", "--json")[1])["token_ids"]
    top1 = json.loads(run(*base, "--top-k", "1")[1])["token_ids"]
    assert one == same != other
    assert top1 == greedy != one


def test_plain_needs_no_head(where: list[str]) -> None:
    code, out, _ = run("generate", "hello", *where[:2], "--method", "plain", "--max-new-tokens", "4", "--json")
    assert code == 0 and json.loads(out)["stats"]["tau"] == 1
    code, _, err = run("generate", "hello", *where[:2], "--max-new-tokens", "4", "--method", "eagle")
    assert code == 2 and "--head" in err and "plain" in err
    code, _, err = run("generate", "hello", *where[:2], "--max-new-tokens", "4")
    assert code == 0 and "no draft head" in err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--temperature", "nan"], "temperature=nan"),
        (["--top-p", "0", "--min-p", "2"], "top_p=0.0 (expected a number above 0, at most 1); min_p=2.0"),
        (["--top-p", "1.5"], "top_p=1.5"),
        (["--tree", "nonsense"], "expected 'paper', 'chain:N' or the path of a JSON file"),
        (["--tree", "chain:x"], "chain:5"),
        (["--max-new-tokens", "-1"], "max_new_tokens=-1"),
        (["--max-new-tokens", "5000"], "the context holds 256"),
        (["--method", "magic"], "auto, eagle, lookup, plain"),
        (["--seed", "-3"], "seed=-3"),
        (["--stop", ""], "not empty"),
        (["--raw", "--system", "x"], "--raw"),
        (["--device", "nowhere"], "nowhere"),
        (["--dtype", "int3"], "int3"),
        (["--target", "/no/such/dir"], "/no/such/dir"),
        (["--head", "/no/such/dir"], "/no/such/dir"),
        (["--prompt-file", "/no/such/file"], "not both"),
        (["--system", "a\udcff"], "not valid text"),
    ],
    ids=lambda a: "_".join(a) if isinstance(a, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(where: list[str], args: list[str], said: str) -> None:
    code, out, err = run("generate", "hello", *where, *args)
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2 and out == ""
    assert len(lines) == 1 and lines[0].startswith("eaglekit: error: ") and said in lines[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[[0], [0, 1]]", "[0, 1]"),
        ("[[0], [0]]", "[0] appears twice"),
        ("[[1]]", "[1]"),
        ("[]", "no nodes"),
        ("{}", "expected a list"),
        ("not json", "JSON"),
    ],
)
def test_a_bad_tree_file_is_named_with_its_node(where: list[str], tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "tree.json"
    file.write_text(content, encoding="utf-8")
    code, _, err = run("generate", "hello", *where, "--tree", str(file))
    assert code == 2 and "tree.json" in err and said in err and len(err.strip().splitlines()) == 1


def test_a_head_of_another_width_is_refused_with_both_numbers(where: list[str], tmp_path: Path) -> None:
    from eaglekit.bench.lossless import tiny_head
    from eaglekit.models.checkpoint import save_head
    from eaglekit.testing import TableTarget

    save_head(tiny_head(TableTarget(vocab_size=7, hidden_size=16), 0), tmp_path / "head", metadata={})
    code, _, err = run("generate", "hello", *where[:2], "--head", str(tmp_path / "head"))
    assert code == 2 and "16" in err and "32" in err and "7" in err and "260" in err


def test_deep_json_is_an_error_like_any_other(where: list[str], tmp_path: Path) -> None:
    file = tmp_path / "deep.json"
    file.write_text("[" * 100_000, encoding="utf-8")
    for args in (["generate", "hello", *where, "--tree", str(file)], ["bench", "--prompts", str(file), *where]):
        code, _, err = run(*args)
        assert code == 2 and "deep.json" in err and len(err.strip().splitlines()) == 1


def test_a_broken_target_is_one_line_and_surplus_weights_are_reported(where: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(where[1], folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for change in ({"num_attention_heads": 0}, {"hidden_size": "32"}, {"rms_norm_eps": "x"}):
        (folder / "config.json").write_text(json.dumps({**config, **change}), encoding="utf-8")
        code, _, err = run("generate", "hello", "--target", str(folder), "--method", "plain")
        assert code == 2 and err.startswith("eaglekit: error: ") and len(err.strip().splitlines()) == 1
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}), encoding="utf-8")
    code, _, err = run("generate", "hello", "--target", str(folder), "--method", "plain", "--max-new-tokens", "2")
    assert code == 0 and "weights of the checkpoint are not used, model.layers.1." in err


def test_an_answer_that_the_terminal_cannot_show_is_no_error(where: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eaglekit.cli", "generate", "hello", *where, "--max-new-tokens", "20"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr and "?" in done.stdout


def test_bench_refuses_a_prompt_that_is_too_long_before_it_measures(where: list[str], tmp_path: Path) -> None:
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts.write_text(json.dumps({"prompt": "hi"}) + "\n" + json.dumps({"id": "long", "prompt": "x" * 400}) + "\n")
    code, _, err = run("bench", "--prompts", str(prompts), *where, "--output", str(report))
    assert code == 2 and "prompt long" in err and not report.exists()


def test_chat_keeps_its_caches_and_answers_commands(where: list[str]) -> None:
    script = "hello\n/stats\n/what\nand more\n/stats\n/reset\n/stats\n"
    code, out, err = run("chat", *where, "--max-new-tokens", "6", text=script)
    assert code == 0
    assert out.count("\n") == 2 or len(out.splitlines()) >= 2
    cached = [int(n) for n in re.findall(r"(\d+) of \d+ prompt tokens from the cache", err)]
    assert cached[0] == 0 and cached[1] > 0
    assert "unknown command /what" in err and "a new conversation" in err


def test_check_says_pass_line_by_line_and_as_json(where: list[str]) -> None:
    code, out, _ = run("check", *where, "--quick", "--prompts", "1", "--draws", "30", "--json")
    data = json.loads(out)
    assert code == 0 and data["passed"] is True
    assert all({"name", "passed", "detail", "data"} <= set(f) for f in data["findings"])


def test_check_exits_with_1_on_a_planted_bug(where: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from eaglekit.core import verify

    monkeypatch.setattr(verify, "without", lambda law, token: law)
    code, out, _ = run("check", *where, "--quick", "--prompts", "1", "--draws", "30")
    assert code == 1
    assert "FAIL  law, exact" in out and out.strip().splitlines()[-1].startswith("FAIL")


def test_bench_measures_each_method_and_ends_in_json(where: list[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question_id": 1, "turns": ["hello", "more"]}\n{"prompt": "world"}\n', encoding="utf-8")
    methods = ["transformers", "plain", "eagle:paper", "eagle:chain:2", "eagle:paper@1.0"]
    options = [arg for m in methods for arg in ("--method", m)]
    report = tmp_path / "report.json"
    code, out, _ = run(
        "bench", "--prompts", str(prompts), *where, *options, "--max-new-tokens", "12", "--output", str(report)
    )
    data = json.loads(out.strip().splitlines()[-1])
    assert code == 0 and data == json.loads(report.read_text(encoding="utf-8"))
    assert list(data["methods"]) == methods and data["oracle"] == "transformers"
    assert all(i["identical"] == i["of"] == 2 for i in data["identity"].values()) and len(data["identity"]) == 3
    assert data["methods"]["plain"]["tau"] == 1 and data["methods"]["eagle:paper"]["speedup_over_plain"]["median"] > 0


def test_a_stopped_bench_goes_on_from_its_record(where: list[str], tmp_path: Path) -> None:
    prompts, record = tmp_path / "prompts.jsonl", tmp_path / "record.jsonl"
    prompts.write_text('{"prompt": "hello"}\n{"prompt": "world"}\n', encoding="utf-8")
    args = ["bench", "--prompts", str(prompts), *where, "--max-new-tokens", "8", "--record", str(record)]
    first = json.loads(run(*args, "--method", "plain")[1].strip().splitlines()[-1])
    record.write_text(record.read_text(encoding="utf-8")[:-5], encoding="utf-8")  # killed while it wrote
    code, out, _ = run(*args, "--method", "plain", "--method", "eagle:chain:2")
    second = json.loads(out.strip().splitlines()[-1])
    assert code == 0 and len(record.read_text(encoding="utf-8").splitlines()) == 1 + 4
    assert second["methods"]["plain"]["tokens"] == first["methods"]["plain"]["tokens"]
    assert second["identity"]["eagle:chain:2"]["identical"] == 2
    code, _, err = run(*args[:-3], "9", "--record", str(record), "--method", "plain")
    assert code == 2 and "use another file" in err
    before = prompts.read_bytes()
    prompts.write_bytes(before[:-1])  # not a record, and without a last newline: refused, and left as it is
    code, _, err = run("bench", "--prompts", str(prompts), *where, "--record", str(prompts))
    assert code == 2 and "use another file" in err and prompts.read_bytes() == before[:-1]


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "no lines"), ("{}\n", ":1: no prompt"), ('{"prompt": "a"}\nnonsense\n', ":2: not JSON")],
)
def test_a_bad_prompt_file_is_named_with_its_line(where: list[str], tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content, encoding="utf-8")
    code, _, err = run("bench", "--prompts", str(file), *where)
    assert code == 2 and said in err


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from eaglekit.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in ("generate", "chat", "check", "bench", "fetch"))


def test_an_interrupt_ends_with_130(where: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from eaglekit.api import Model

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Model, "stream", stop)
    assert run("generate", "hello", *where)[0] == 130


def test_a_reader_that_went_away_is_no_error(where: list[str]) -> None:
    args = " ".join([*where, "--max-new-tokens", "200"])
    done = subprocess.run(
        f"{sys.executable} -m eaglekit.cli generate hello {args} | head -c 1 > {os.devnull}",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_train_makes_a_head_that_generate_uses(where: list[str], tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"turns": [f"question {i}"]}) + "\n" for i in range(24)), encoding="utf-8")
    folder = tmp_path / "head"
    args = ["train", *where[:2], "--data", str(data), "--output", str(folder)]
    short = ["--max-new-tokens", "12", "--epochs", "1", "--batch-tokens", "256", "--vocabulary", "64", "--heldout", "2"]
    code, out, err = run(*args, *short, "--no-linear-start")
    assert code == 0 and "τ on held-out answers" in out, err
    options = json.loads((folder / "config.json").read_text())["eaglekit"]["training"]["options"]
    assert (options["linear_start"], options["learning_rate"]) == (False, TrainOptions().learning_rate)
    code, out, _ = run(
        "generate", "hello", *where[:2], "--head", str(folder), "--max-new-tokens", "8", "--compare", "--json"
    )
    assert code == 0 and json.loads(out)["plain"]["identical"] is True


def test_defaults_of_train_are_those_of_the_library() -> None:
    given = inspect.signature(cli.train).parameters
    own = {**vars(SynthesisOptions()), **vars(HeadOptions()), **vars(TrainOptions()), "step_weights": "1,0.8,0.64"}
    shared = own.keys() & given.keys()
    assert {"learning_rate", "linear_start", "max_new_tokens", "seed"} < shared
    assert {name: given[name].default for name in shared} == {name: own[name] for name in shared}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--data", "/no/such/file.jsonl"], "/no/such/file.jsonl"),
        (["--epochs", "0"], "epochs is 0"),
        (["--vocabulary", "-1", "--learning-rate", "0"], "learning_rate is 0"),
    ],
    ids=["file", "epochs", "several"],
)
def test_a_bad_training_request_is_one_line(where: list[str], tmp_path: Path, args: list[str], said: str) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"turns": ["question"]}\n', encoding="utf-8")
    code, _, err = run("train", *where[:2], "--data", str(data), "--output", str(tmp_path / "head"), *args)
    assert code == 2 and said in err and err.strip().splitlines()[-1].startswith("eaglekit: error: ")
