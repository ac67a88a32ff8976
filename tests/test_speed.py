"""`bench speed` on a tiny fast target: sane data from every section, the scripted drafter's law, the command line.

Nothing here judges a time.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tiny
from eaglekit.api import Model
from eaglekit.bench import passes, plots, rates, rivals, speed, start, training
from eaglekit.bench.lossless import tiny_head
from eaglekit.bench.scripted import ScriptedDrafter, expected_tau, tau_variance
from eaglekit.bench.speed import Setup, SpeedOptions
from eaglekit.bench.speed_table import table
from eaglekit.cli.main import app
from eaglekit.core.tree import TreeShape
from eaglekit.drafters.eagle import EagleDrafter
from eaglekit.engine.drafter import PlainDrafter
from eaglekit.errors import InputError
from eaglekit.models.checkpoint import save_head
from eaglekit.models.fast import fast_target
from eaglekit.models.hf import HFTarget

FORMATS = ("fp32", "int8")
SIZES: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
}
QUICK = SpeedOptions(
    weights=FORMATS, trees=("chain:2",), max_new_tokens=12, repeats=2, steps=3, sequences=4, batch_tokens=6, starts=1
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of a target that the fast path can run, and of a head for it."""
    folder = tmp_path_factory.mktemp("speed")
    model = tiny.llama(**SIZES)
    model.save_pretrained(folder / "target")
    tiny.tokenizer().save_pretrained(folder / "target")
    save_head(tiny_head(HFTarget(model, "tiny"), 0), folder / "head", metadata={"target": "tiny"})
    return folder / "target", folder / "head"


@pytest.fixture(scope="module")
def setup(folders: tuple[Path, Path]) -> Setup:
    return Setup.load(str(folders[0]), str(folders[1]), QUICK, ["hello", "good day"])


@pytest.fixture(scope="module")
def model(setup: Setup) -> Model:
    return setup.models["fp32"]


def test_decode_counts_identical_answers_and_pairs_ratios(setup: Setup) -> None:
    data = rates.decode(setup.models, setup.stock, setup.prompts, methods=["auto", "eagle:paper"], max_new_tokens=12)
    rows = {(m["method"], m["weights"]): m for m in data["methods"]}
    assert set(rows) == {
        ("transformers", "stock"),
        *((m, w) for m in ("plain", "auto", "eagle:paper") for w in FORMATS),
    }
    for (method, _), row in rows.items():
        assert row["tokens"] > 0 and row["tokens_per_second"]["median"] > 0
        assert ("over_transformers" in row) == (method != "transformers")
        if method in ("auto", "eagle:paper"):
            assert row["identical"] == row["of"] == 2 and row["over_plain"]["median"] > 0


def test_a_ratio_is_taken_prompt_by_prompt() -> None:
    from eaglekit.bench.run import Answer

    slow, fast = (
        rates.Column(name, "fp32", [Answer([1, 2], s, None) for s in seconds])
        for name, seconds in (("slow", (2.0, 8.0, 6.0)), ("fast", (1.0, 2.0, 2.0)))
    )
    assert fast.over(slow)["median"] == 3 and fast.over(slow)["p90"] == 4 and fast.identical(slow) == 3


def test_methods_alternate_in_an_order_that_rotates() -> None:
    from eaglekit.bench.run import Answer

    seen: list[tuple[str, int]] = []

    def caller(name: str) -> rates.Caller:
        def call(ids: Sequence[int], count: int) -> Answer:
            seen.append((name, ids[0]))
            return Answer([0] * count, 1.0, None)

        return call

    runs = [(rates.Column(name, "fp32"), caller(name)) for name in "abc"]
    rates.alternate(runs, [[7], [8], [9]], 4, None)
    assert seen[:3] == [("a", 7), ("b", 7), ("c", 7)]  # warm-up
    assert seen[3:] == [(name, n) for n, order in ((7, "abc"), (8, "bca"), (9, "cab")) for name in order]
    assert all(len(column.answers) == 3 for column, _ in runs)


def test_cost_covers_all_sizes_and_labels(setup: Setup) -> None:
    targets = {"stock": HFTarget(setup.stock), **setup.targets}
    data = passes.cost_by_nodes(targets, nodes=(1, 2, 26, 40), context=30, repeats=3)
    assert set(data["passes"]) == {"stock", *FORMATS} and data["context"] == 30
    for entries in data["passes"].values():
        assert [e["nodes"] for e in entries] == [1, 2, 26, 40]
        assert all(0 < e["ms"]["p10"] <= e["ms"]["median"] <= e["ms"]["p90"] for e in entries)
        assert entries[0]["ratio"]["median"] == 1


def test_trees_of_every_size_are_trees() -> None:
    for nodes in (1, 2, 12, 26, 27, 64):
        assert len(passes.shape_of(nodes).parents) == nodes
    assert passes.shape_of(26) == TreeShape.paper()


def test_context_goes_as_far_as_the_limit_allows(setup: Setup) -> None:
    data = passes.cost_by_context(setup.targets, repeats=2)
    assert data["contexts"] == [128, 512]  # 1024 would leave no room for a tree
    for entries in data["passes"].values():
        assert [e["context"] for e in entries] == [128, 512] and set(entries[0]["ms"]) == {"1", "12"}
    short = passes.cost_by_context(setup.targets, contexts=(5000,), repeats=1)
    assert short["contexts"] == [1024 - 12]


def test_phases_share_a_round(setup: Setup) -> None:
    data = rates.phases(setup.models, setup.prompts, trees=["chain:2"], max_new_tokens=12)
    assert {(r["method"], r["weights"]) for r in data["rounds"]} == {
        (m, w) for m in ("plain", "eagle:chain:2") for w in FORMATS
    }
    for row in data["rounds"]:
        assert set(row["ms"]) == {"draft", "verify", "accept", "rest"}
        assert sum(row["share"].values()) == pytest.approx(1, abs=1e-3)
        assert row["outside"] == pytest.approx(1 - row["share"]["verify"], abs=1e-3)


def test_a_floor_is_the_larger_of_bytes_and_operations(setup: Setup) -> None:
    work = passes.Work.of(setup.stock)
    hidden, inner, layers, vocab = 64, 96, 2, 260
    matrices = layers * (hidden * (64 + 2 * 32) + 64 * hidden + 3 * hidden * inner) + vocab * hidden
    assert work == passes.Work(matrices, 2 * layers * 32, 2 * layers * 64)
    machine = passes.Machine(read_bytes=1e9, copy_bytes=2e9, flops=1e9)
    one = work.floor(machine, "fp32", 1, 10)
    assert one["bytes"] == 4 * matrices + 4 * 128 * 10 and one["multiply_adds"] == matrices + 256 * 10
    assert one["ms_by_bytes"] == pytest.approx(1e3 * one["bytes"] / 2e9, abs=1e-4)
    assert one["ms_by_operations"] == pytest.approx(2e3 * one["multiply_adds"] / 1e9, abs=1e-4)
    assert one["floor_ms"] == max(one["ms_by_bytes"], one["ms_by_operations"])
    slow_memory = passes.Machine(1e6, 1e6, 1e12)
    assert one["bound"] in ("bytes", "operations") and work.floor(slow_memory, "int8", 12, 10)["bound"] == "bytes"
    assert work.floor(slow_memory, "int8", 1, 0)["bytes"] * 4 == work.floor(slow_memory, "fp32", 1, 0)["bytes"]


def test_floors_set_passes_against_them(setup: Setup) -> None:
    machine = passes.measure_machine(megabytes=1, size=32, repeats=1)
    assert min(machine.read_bytes, machine.copy_bytes, machine.flops) > 0
    data = passes.floors(setup.targets, setup.stock, context=20, repeats=2, machine=passes.Machine(1e7, 1e7, 1e9))
    for entries in data["passes"].values():
        assert [e["nodes"] for e in entries] == [1, 12]
        for e in entries:
            assert e["over_floor"] == pytest.approx(e["ms"]["median"] / e["floor_ms"], abs=1e-3)


# --- the scripted drafter


def eagle(model: Model, steps: int) -> EagleDrafter:
    drafter = model.drafter("eagle", TreeShape.chain(steps))
    assert isinstance(drafter, EagleDrafter)
    return drafter


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("weights", FORMATS)
def test_the_scripted_drafter_accepts_as_many_as_expected(setup: Setup, alpha: float, weights: str) -> None:
    model, prompt, steps, count = setup.models[weights], setup.prompts[0], 5, 800
    plain = rates.fixed_length(model, PlainDrafter(), prompt, count).ids
    assert len(plain) == count
    drafter = ScriptedDrafter(eagle(model, steps), [*prompt, *plain], alpha, seed=1)
    got = rates.fixed_length(model, drafter, prompt, count)
    assert got.ids == plain
    # A round's tokens are independent draws of one law with values 1 to steps + 1. Rounds end when the answer does,
    # which moves their mean by less than one round's tokens over their number; 4.5 standard errors are passed by
    # chance once in 100,000 seeds.
    rounds = len(drafter.rounds)
    assert rounds >= count / (steps + 1) - 2
    bound = 4.5 * math.sqrt(tau_variance(alpha, steps) / rounds) + (steps + 1) / rounds * (0 < alpha < 1)
    assert abs(drafter.tau - expected_tau(alpha, steps)) <= bound + 1e-9


def test_expectation_and_variance_are_those_of_the_law() -> None:
    alpha, steps = 0.7, 4
    law = {i: alpha ** (i - 1) * (1 - alpha) for i in range(1, steps + 1)} | {steps + 1: alpha**steps}
    mean = sum(i * p for i, p in law.items())
    assert sum(law.values()) == pytest.approx(1) and expected_tau(alpha, steps) == pytest.approx(mean)
    assert expected_tau(alpha, steps) == pytest.approx((1 - alpha ** (steps + 1)) / (1 - alpha))
    assert tau_variance(alpha, steps) == pytest.approx(sum((i - mean) ** 2 * p for i, p in law.items()))


def test_a_wrong_script_costs_speed_and_nothing_else(model: Model, setup: Setup) -> None:
    prompt = setup.prompts[0]
    plain = rates.fixed_length(model, PlainDrafter(), prompt, 30).ids
    for script in ([], [*prompt, *([3] * 40)]):
        drafter = ScriptedDrafter(eagle(model, 3), script, 0.9)
        assert rates.fixed_length(model, drafter, prompt, 30).ids == plain


def test_the_scripted_drafter_reads_every_pair_that_the_head_would(model: Model, setup: Setup) -> None:
    prompt, real = setup.prompts[0], eagle(model, 3)
    plain = rates.fixed_length(model, PlainDrafter(), prompt, 20).ids
    calls: list[int] = []

    class Watching(EagleDrafter):
        def open(self, batch: int, max_length: int) -> Any:
            raise AssertionError("the scripted state opens the head's state itself")

    watching = Watching(real.head, real.target, real.shape, model=real.model)
    drafter = ScriptedDrafter(watching, [*prompt, *plain], 1.0)
    state = drafter.open(1, len(prompt) + 30)
    propose = state._eagle.propose
    state._eagle.propose = lambda contexts, shape=None: calls.append(1) or propose(contexts, shape)  # type: ignore
    target = model.target.open(1, len(prompt) + 30)
    from eaglekit.core.random import GeneratorSource
    from eaglekit.engine.drafter import Context, observe

    out = target.prefill([torch.tensor(prompt)])
    state.commit([observe(out.features[0], {}, range(len(prompt)), [*prompt[1:], plain[0]])])
    context = Context([*prompt, plain[0]], model.law(len(prompt)), GeneratorSource.seeded(0), 10)
    (tree,) = state.propose([context])
    assert calls == [1] and tree.tokens.tolist() == plain[:4]


def test_scripted_drafters_refuse_what_has_no_chain(model: Model) -> None:
    paper = model.drafter("eagle", "paper")
    assert isinstance(paper, EagleDrafter)
    with pytest.raises(InputError, match="expected a chain"):
        ScriptedDrafter(paper, [], 0.5)
    with pytest.raises(InputError, match="expected a probability"):
        ScriptedDrafter(eagle(model, 2), [], 1.5)
    with pytest.raises(InputError, match="expected 1"):
        ScriptedDrafter(eagle(model, 2), [], 0.5).open(2, 10)


def test_the_scripted_section_compares_with_plain(setup: Setup) -> None:
    data = rates.scripted(setup.models, setup.prompts, alpha=0.5, steps=3, max_new_tokens=24)
    assert data["expected_tau"] == 1.875 and [f["weights"] for f in data["formats"]] == list(FORMATS)
    for row in data["formats"]:
        assert row["identical"] == row["of"] == 2 and 1 <= row["tau"] <= 4 and row["over_plain"]["median"] > 0
        lucky = row["over_plain"]["median"] * data["expected_tau"] / row["tau"]
        assert row["over_plain_at_expected_tau"] == pytest.approx(lucky, abs=1e-3, rel=1e-3)


# --- batches, starts, rivals


def test_a_batch_says_what_each_row_says_alone(setup: Setup) -> None:
    data = rates.batch(setup.models, setup.stock, setup.prompts, sequences=5, max_new_tokens=7, repeats=2)
    assert data["sequences"] == 5 and data["transformers"]["median"] > 0
    for row in data["formats"]:
        assert row["identical"] == row["of"] == 2 and row["over_transformers"]["median"] > 0


def test_a_batch_needs_a_fast_target(setup: Setup) -> None:
    slow = Model.wrap(setup.stock, setup.models["fp32"].tokenizer)
    with pytest.raises(InputError, match="no fast target"):
        rates.batch({"fp32": slow}, setup.stock, setup.prompts)


def test_a_fresh_process_says_when_and_how_large(setup: Setup) -> None:
    data = start.measure_start(setup.target, setup.head, ["int8"], setup.prompts[0], repeats=1, tokens=4)
    (row,) = data["formats"]
    parts = sum(row[f"seconds_{p}"]["median"] for p in ("importing", "loading", "first_token"))
    assert row["seconds_to_first_token"]["median"] == pytest.approx(parts, abs=1e-3)
    memory = row["memory"]
    assert 0 < memory["weights"] < 10**7 and 0 < memory["caches"] < 10**7
    if sys.platform == "linux":
        assert memory["peak"] >= memory["now"] >= memory["anonymous"] > 0 and memory["over_held"] is not None


def test_training_is_measured_in_a_process_of_its_own(setup: Setup) -> None:
    data = training.measure(setup.target, steps=1)
    assert data["steps"] >= 1 and data["tokens"] > 1000
    assert data["tokens_per_second"] > 0 and data["features_tokens_per_second"] > 0
    assert data["peak_memory_mb"] >= data["peak_memory_mb_before"] > 100
    assert "training, tokens/s" in table({"settings": {"weights": ["int8"]}, "sections": {"train": data}})


@pytest.mark.parametrize(
    "program", ["raise SystemExit('no such thing')", "print('no JSON'); raise ValueError('no such thing')"]
)
def test_a_process_that_fails_is_one_line(program: str) -> None:
    with pytest.raises(InputError, match=r"start: a process ended with 1: .*no such thing$"):
        start.run_program("start", program)


def test_held_bytes_are_counted_once_and_caches_apart(setup: Setup) -> None:
    model = Model.wrap(fast_target(setup.stock, "fp32", "tiny"), None)
    weights = sum(p.numel() for p in setup.stock.parameters()) * 4
    short, long = start.held(model, 64), start.held(model, 640)
    # Matrices are padded to panels of 32 outputs, and there are tables of angles.
    assert weights <= short["weights"] < 2 * weights and long["weights"] == short["weights"]
    per_token = 2 * 2 * 32 * 4  # keys and values, two layers, one head of 32, float32
    assert per_token * 64 <= short["caches"] <= per_token * 192 and long["caches"] - short["caches"] == per_token * 576
    x = torch.zeros(100)
    assert start.tensor_bytes([x, {"a": x[:10], "b": (x.view(10, 10),)}], x) == 400


class Echo:
    """An engine that says what it is told."""

    name, version = "echo", "1"

    def __init__(self) -> None:
        self.counts: list[int] = []

    def generate(self, ids: Sequence[int], count: int) -> int:
        self.counts.append(count)
        return count


def test_rivals_make_as_many_tokens_as_we_do(setup: Setup) -> None:
    echo = Echo()
    data = rates.against_rivals(setup.models, [echo], setup.prompts, max_new_tokens=9)
    plain = [len(setup.models["fp32"].generate(p, max_new_tokens=9, method="plain").token_ids) for p in setup.prompts]
    assert echo.counts == [plain[0], *plain]  # one to warm up
    ours = [m for m in data["methods"] if "over" in m]
    assert {(m["method"], m["weights"]) for m in ours} == {(m, w) for m in ("plain", "auto") for w in FORMATS}
    assert all(m["over"]["echo"]["median"] > 0 for m in ours) and data["methods"][-1]["weights"] == "1"


def test_adapters_ask_for_greedy_tokens_past_any_end(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Server:
        def __init__(self, params: Any) -> None:
            asked["params"] = params

        def handle_completions(self, request: dict[str, Any]) -> Any:
            asked.update(request)
            return {"usage": {"prompt_tokens": len(request["prompt"]), "completion_tokens": request["max_tokens"]}}

    def params() -> Any:
        return SimpleNamespace(model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace())

    fake: Any = SimpleNamespace(__version__="0", Server=Server, CommonParams=params)
    monkeypatch.setitem(sys.modules, "xllamacpp", fake)
    engine = rivals.LlamaCpp(Path("a.gguf"), 3, 77)
    assert engine.generate([5, 6], 8) == 8 and engine.version == "xllamacpp 0"
    assert asked["temperature"] == 0 and asked["ignore_eos"] and not asked["cache_prompt"] and asked["prompt"] == [5, 6]
    assert asked["params"].cpuparams.n_threads == asked["params"].cpuparams_batch.n_threads == 3
    monkeypatch.setattr(Server, "handle_completions", lambda self, request: {"error": "no"})
    with pytest.raises(InputError, match=r"llama\.cpp"):
        engine.generate([5], 8)

    class Pipeline:
        def __init__(self, path: str, device: str, **options: Any) -> None:
            asked["options"] = options

        def generate(self, ids: Any, config: Any) -> Any:
            assert ids.shape == (1, 2) and not config.do_sample and config.ignore_eos
            return SimpleNamespace(tokens=[[0] * config.max_new_tokens])

    genai: Any = SimpleNamespace(__version__="9-1", LLMPipeline=Pipeline, GenerationConfig=SimpleNamespace)
    core: Any = SimpleNamespace(Tensor=lambda array: array)
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", core)
    other = rivals.OpenVino(Path("a.gguf"), 3, 77)
    assert other.generate([5, 6], 8) == 8 and asked["options"] == {"INFERENCE_NUM_THREADS": 3}


def test_without_rivals_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "RIVALS", {"no_such_engine": rivals.LlamaCpp})
    assert rivals.installed() == []
    with pytest.raises(InputError, match="no_such_engine"):
        rivals.Apart("no_such_engine", Path("a.gguf"), 1, 10)
    with pytest.raises(InputError, match="pip install"), rivals.opened(Path("a.gguf"), 1, 10):
        pass


# --- options, report, command line


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weights": ("fp8",)}, "fp8: expected fp32, fp16, int8"),
        ({"weights": ()}, "expected at least one"),
        ({"weights": ("int8", "int8")}, "twice"),
        ({"only": ("nothing",)}, "nothing: expected decode, cost"),
        ({"alpha": 1.2}, "expected a probability"),
        ({"alpha": math.nan}, "expected a probability"),
        ({"steps": 0}, "--steps 0: expected at least 1"),
        ({"steps": 2000}, "chain of 2000"),
        ({"max_new_tokens": 0, "repeats": 0}, "--max-new-tokens 0: expected at least 1; --repeats 0"),
        ({"trees": ("oak",)}, "oak"),
    ],
)
def test_bad_options_are_named(changes: dict[str, Any], said: str) -> None:
    from eaglekit.errors import EaglekitError

    with pytest.raises(EaglekitError, match=said):
        SpeedOptions(**changes)


def test_sections_follow_from_the_options() -> None:
    assert SpeedOptions().sections == tuple(s for s in speed.SECTIONS if s != "rivals")
    assert SpeedOptions(rivals=True).sections == speed.SECTIONS
    assert SpeedOptions(only=("start", "cost")).sections == ("cost", "start")
    assert SpeedOptions(only=("cost",), rivals=True).sections == ("cost", "rivals")


def test_what_cannot_be_run_is_left_out_and_said(setup: Setup) -> None:
    slow = Model.wrap(setup.stock, setup.models["fp32"].tokenizer)
    poor = Setup(None, None, {"fp32": slow}, setup.stock, setup.prompts)
    options = SpeedOptions(
        weights=("fp32",), only=("decode", "phases", "scripted", "batch", "rivals"), max_new_tokens=4, repeats=1
    )
    lines: list[str] = []
    report: dict[str, Any] = {}
    for report in speed.measure(poor, options, lines.append):
        json.dumps(report)
    assert set(report["skipped"]) == {"scripted", "batch", "rivals"} and set(report["sections"]) == {"decode", "phases"}
    assert {m["method"] for m in report["sections"]["decode"]["methods"]} == {"transformers", "plain", "auto"}
    assert "scripted: left out, it needs a draft head" in lines
    assert "auto / plain" in table(report)


def test_a_prompt_that_is_too_long_is_named_before_anything_is_measured(folders: tuple[Path, Path]) -> None:
    with pytest.raises(InputError, match="prompt 2"):
        Setup.load(str(folders[0]), str(folders[1]), QUICK, ["hi", "x" * 1100])


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def _no_process(what: str, program: str, *arguments: str) -> dict[str, Any]:
    """What a process would print; for tests of what becomes of it."""
    now = time.time()
    times = {"imported": now + 1, "loaded": now + 2, "first": now + 3}
    return {**times, "now": 5, "peak": 9, "anonymous": 4, "weights": 2, "caches": 2}


@contextmanager
def _echo(gguf: Path, threads: int, context: int) -> Iterator[list[Any]]:
    yield [Echo()]


def test_the_command_writes_json_table_and_picture(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "measure_machine", lambda: passes.Machine(1e10, 1e10, 1e11))
    monkeypatch.setattr(start, "run_program", _no_process)
    spent = {"tokens_per_second": 1.0, "features_tokens_per_second": 2.0}
    spent |= {"peak_memory_mb": 4.0, "peak_memory_mb_before": 3.0}
    monkeypatch.setattr(training, "measure", lambda target: spent)
    monkeypatch.setattr(rivals, "opened", _echo)
    monkeypatch.setattr(rivals, "installed", lambda: ["echo"])
    monkeypatch.setattr(speed, "_gguf", lambda target: Path("a.gguf"))
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "new" / "folder"
    prompts.write_text('{"prompt": "hello"}\n{"prompt": "world"}\n{"prompt": "never"}\n', encoding="utf-8")
    code, out, err = run(
        "bench", "speed", "--target", str(folders[0]), "--head", str(folders[1]), "--weights", "fp32,int8",
        "--prompts", str(prompts), "--limit", "2", "--max-new-tokens", "8", "--tree", "chain:2", "--repeats", "2",
        "--sequences", "3", "--batch-tokens", "4", "--starts", "1", "--steps", "2", "--output", str(output), "--rivals",
    )  # fmt: skip
    assert code == 0
    report = json.loads((output / "speed.json").read_text(encoding="utf-8"))
    assert report == json.loads(out.splitlines()[-1])
    assert list(report["sections"]) == list(speed.SECTIONS) and report["skipped"] == {}
    assert {"machine", "versions", "settings", "target", "eaglekit"} <= set(report)
    assert report["settings"]["prompts"] == 2 and report["settings"]["weights"] == ["fp32", "int8"]
    rows = out.splitlines()[:-1]
    assert rows[0] == "| | stock, other | fp32 | int8 |" and all(row.count("|") == rows[0].count("|") for row in rows)
    for section in speed.SECTIONS:
        assert any(row.startswith(f"| {section}: ") for row in rows)
        assert f"{section} ..." in err
    picture = output / "speed.png"
    if plots.available():
        assert picture.read_bytes().startswith(b"\x89PNG")
    else:
        assert not picture.exists() and "matplotlib" in err


def test_without_matplotlib_there_is_a_note_and_no_picture(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    args = [
        "bench",
        "speed",
        "--target",
        str(folders[0]),
        "--head",
        str(folders[1]),
        "--weights",
        "int8",
        "--repeats",
        "1",
    ]
    code, out, err = run(*args, "--only", "cost", "--output", str(tmp_path))
    assert code == 0 and "no picture" in err and not (tmp_path / "speed.png").exists() and "| cost: 64 nodes" in out
    with pytest.raises(InputError, match="matplotlib"):
        plots.draw({"sections": {}}, tmp_path / "speed.png")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--weights", "int4"], "--weights int4: expected fp32, fp16, int8"),
        (["--only", "everything"], "--only everything: expected decode"),
        (["--alpha", "2"], "--alpha 2.0: expected a probability"),
        (["--tree", "oak"], "oak"),
        (["--prompts", "/no/such/file.jsonl"], "/no/such/file.jsonl"),
        (["--output", __file__], "a file; expected a folder"),
    ],
)
def test_bad_options_are_one_line(args: list[str], said: str) -> None:
    code, out, err = run("bench", "speed", *args)
    assert code == 2 and out == "" and said in err and len(err.splitlines()) == 1


def test_bench_without_a_command_asks_for_prompts_and_keeps_its_options_to_itself() -> None:
    code, _, err = run("bench")
    assert code == 2 and "--prompts is missing" in err
    code, _, err = run("bench", "--seed", "3", "speed")
    assert code == 2 and "put --seed behind speed" in err
