"""Where a trainer's features come from: the store and its checks, the target read on the fly, the choice of the two."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eaglekit.errors import DataError, InputError, UnsupportedModelError
from eaglekit.models.checkpoint import save_head
from eaglekit.models.head import EagleHead, HeadConfig
from eaglekit.models.hf import HFTarget
from eaglekit.train.features.live import LiveFeatures, extract
from eaglekit.train.features.store import FeatureFacts, FeatureSource, FeatureStore, FeatureWriter, read_index
from eaglekit.train.options import HeadOptions, SelfTalkOptions, SynthesisOptions, TrainOptions
from eaglekit.train.pipeline import prepare, train_head
from eaglekit.train.text.answers import is_fast
from eaglekit.train.text.dataset import Dialogue
from eaglekit.train.text.synthesize import read_dialogues, synthesize
from families import new_model
from tiny import llama, tokenizer

WIDTH = 8
FACTS = FeatureFacts(WIDTH, target="t", weights="w", tokenizer="k", chat_template="c")
SHARD = 16 * 2 * WIDTH  # bytes of 16 features


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dialogue(number: int) -> Dialogue:
    """Of 5 tokens and one more for each `number`."""
    n = 5 + number
    return Dialogue([100 * number + i for i in range(n)], [(2, 3), (4, n)], number % 2 == 0)


def features_of(number: int, facts: FeatureFacts = FACTS) -> Tensor:
    return random(4 + number, facts.width, seed=number)


def append(writer: FeatureWriter, *numbers: int) -> None:
    for i in numbers:
        writer.append(dialogue(i), features_of(i))


def new_store(path: Path, count: int = 6) -> Path:
    writer = FeatureWriter(path, FACTS, SHARD)
    append(writer, *range(count))
    writer.close()
    return path


def assert_holds(path: Path, numbers: Sequence[int]) -> None:
    store = FeatureStore(path, FACTS)
    assert len(store.dialogues) == len(numbers)
    for row, i, features in zip(store.dialogues, numbers, store.read(store.dialogues), strict=True):
        d = dialogue(i)
        assert store.tokens(row).tolist() == d.ids
        assert (row.length, list(row.spans), row.greedy) == (len(d.ids), d.spans, d.greedy)
        assert features.dtype == torch.float16
        assert torch.equal(features, features_of(i).half())


def shards(path: Path) -> list[str]:
    return sorted(file.name for file in path.glob("features-*"))


def bytes_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


# --- the store


def test_a_store_gives_back_what_was_written_over_several_shards(tmp_path: Path) -> None:
    new_store(tmp_path)
    # 4 + 5 + 6 features fall short of 16, 7 more do not; then 8 and 9.
    assert shards(tmp_path) == ["features-00000.bin", "features-00001.bin"]
    assert [(tmp_path / name).stat().st_size // (2 * WIDTH) for name in shards(tmp_path)] == [22, 17]
    assert_holds(tmp_path, range(6))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["format"], manifest["width"], manifest["dtype"]) == (1, WIDTH, "float16")
    assert "hidden_states[k]" in manifest["layer_convention"]
    assert manifest["files"].keys() == {"index.jsonl", "tokens.bin", *shards(tmp_path)}
    store = FeatureStore(tmp_path, FACTS)
    assert store.by_tokens()[tuple(dialogue(4).ids)] == store.dialogues[4]


def test_a_store_that_is_filled_in_parts_equals_one_filled_at_once(tmp_path: Path) -> None:
    new_store(tmp_path / "a")
    for number in range(6):  # once behind a full shard too
        writer = FeatureWriter(tmp_path / "b", FACTS, SHARD)
        assert writer.count == number
        append(writer, number)
        writer.close()
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


@pytest.mark.parametrize("count", [1, 3, 4, 5])
def test_a_killed_writer_goes_on(tmp_path: Path, count: int) -> None:
    writer = FeatureWriter(tmp_path, FACTS, SHARD)
    append(writer, *range(count))
    for file in writer._files.values():  # killed: not closed as a writer is
        file.close()
    torn = [*{"tokens.bin", "index.jsonl", "features-00000.bin"}, *shards(tmp_path)]
    torn += ["features-00001.bin"] if count == 4 else []  # the next one had just been begun
    for name in set(torn) - ({"features-00000.bin"} if count >= 4 else set()):
        with (tmp_path / name).open("ab") as f:
            f.write(b'{"tokens": 7')
    writer = FeatureWriter(tmp_path, FACTS, SHARD)
    assert writer.count == count
    append(writer, *range(count, 6))
    writer.close()
    new_store(tmp_path / "whole")
    assert_holds(tmp_path, range(6))
    assert bytes_of(tmp_path / "whole") == bytes_of(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    new_store(tmp_path)
    for name in ("features-00000.bin", "features-00001.bin", "tokens.bin", "index.jsonl"):
        place = -4 if name == "index.jsonl" else 5  # still JSON: the shard's number
        flip(tmp_path / name, place)
        for opened in (FeatureWriter, FeatureStore):
            with pytest.raises(DataError, match=rf"{name}.*(damaged: SHA-256|shorter than).*delete .*{tmp_path.name}"):
                opened(tmp_path, FACTS)
        flip(tmp_path / name, place)
    assert_holds(tmp_path, range(6))
    flip(tmp_path / "features-00001.bin", 5)
    FeatureStore(tmp_path, FACTS, verify=False)


@pytest.mark.parametrize("name", ["features-00000.bin", "features-00001.bin", "tokens.bin", "index.jsonl"])
def test_a_short_file_is_named(tmp_path: Path, name: str) -> None:
    new_store(tmp_path)
    size = (tmp_path / name).stat().st_size
    with (tmp_path / name).open("rb+") as f:
        f.truncate(size - 1)
    before = bytes_of(tmp_path)
    for opened in (FeatureStore, FeatureWriter):
        with pytest.raises(DataError, match=rf"{name}: \d+ bytes, shorter than the {size} that it had; delete"):
            opened(tmp_path, FACTS)
    if name != "index.jsonl":  # whose torn line a writer cuts off
        assert bytes_of(tmp_path) == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 16}, "hidden_size 8 there, 16 now"),
        ({"layers": (0, 2)}, r"layers \[\] there, \[0, 2\] now"),
        ({"target": "u", "weights": "x"}, "target t there, u now, weights w there, x now"),
        ({"tokenizer": "x", "chat_template": "y"}, "tokenizer k there, x now, chat_template c there, y now"),
        ({"weights": "x" * 64}, r"\(weights\)"),
    ],
)
def test_a_store_of_something_else_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    new_store(tmp_path)
    before = bytes_of(tmp_path)
    for opened in (FeatureWriter, FeatureStore):
        with pytest.raises(DataError, match=rf"something else.*{said}.*; use another --output, or delete"):
            opened(tmp_path, replace(FACTS, **changes))
    assert bytes_of(tmp_path) == before


def test_a_revision_is_compared_where_it_is_known(tmp_path: Path) -> None:
    writer = FeatureWriter(tmp_path, replace(FACTS, revision="aaa"))
    append(writer, 0)
    writer.close()
    FeatureStore(tmp_path, FACTS)
    with pytest.raises(DataError, match="revision aaa there, bbb now"):
        FeatureStore(tmp_path, replace(FACTS, revision="bbb"))


def test_a_store_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to train on"):
        FeatureStore(tmp_path / "none", FACTS)
    new_store(tmp_path)
    for text in ("[]", "{", '{"files": {"a": 3}}'):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(DataError, match=r"manifest\.json: not a manifest .*; delete"):
            FeatureWriter(tmp_path, FACTS)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"manifest\.json: missing.*; delete"):
        FeatureWriter(tmp_path, FACTS)
    (tmp_path / "index.jsonl").write_text('{"tokens": 3}\n')
    with pytest.raises(DataError, match=r"index\.jsonl:1: not an index line"):
        read_index(tmp_path)


@pytest.mark.parametrize("bad", [7e4, -7e4, float("nan")])
def test_what_float16_cannot_hold_is_named_and_not_stored(tmp_path: Path, bad: float) -> None:
    writer = FeatureWriter(tmp_path, FACTS)
    features = features_of(0)
    features[2, 3] = bad
    with pytest.raises(DataError, match=rf"feature 3 of token 2 is {bad}.*float16.*--feature-cache-gb 0"):
        writer.append(dialogue(0), features)
    append(writer, 1)
    with pytest.raises(DataError, match=r"features \[5, 8\] for 12 tokens of width 8"):
        writer.append(dialogue(7), features_of(1))
    writer.close()
    assert_holds(tmp_path, [1])


def test_layers_are_ascending_ids() -> None:
    assert FeatureFacts(8, (0, 2)).width == 24
    for layers in ((2, 1), (1, 1), (-1,)):
        with pytest.raises(InputError, match="ascending"):
            FeatureFacts(8, layers)


# --- the target read for a store, and on the fly


def new_target(fast: bool) -> HFTarget:
    target = HFTarget(llama(head_dim=32 if fast else 8), "tiny")
    if fast and not is_fast(target.model):
        pytest.skip("no compiled kernels")
    return target


DIALOGUES = [Dialogue([(7 * i + j) % 250 for j in range(4 + 3 * i)], [(2, 4 + 3 * i)], i == 0) for i in range(40)]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("layers", [(), (0, 1), (1, 2)])
def test_live_features_are_the_stored_ones_bit_for_bit(tmp_path: Path, fast: bool, layers: tuple[int, ...]) -> None:
    target = new_target(fast)
    some = DIALOGUES if fast else DIALOGUES[:8]
    facts = FeatureFacts(32, layers)
    writer = FeatureWriter(tmp_path, facts, 4000)
    extract(target, some, writer.append, layers=layers, group_tokens=90)
    writer.close()
    store: FeatureSource = FeatureStore(tmp_path, facts)
    live: FeatureSource = LiveFeatures(target, some, layers)
    assert live.dialogues == store.dialogues
    assert {f.shape[-1] for f in live.read(live.dialogues)} == {32 * (1 + len(layers))}
    order = torch.randperm(len(some), generator=torch.Generator().manual_seed(0)).tolist()
    for part in (order, order[:1], order[5:8]):  # in any company
        rows = [live.dialogues[i] for i in part]
        for a, b in zip(live.read(rows), store.read(rows), strict=True):
            assert a.dtype == torch.float16
            assert torch.equal(a, b)
            assert not a.is_inference()
    for row in live.dialogues:
        assert torch.equal(live.tokens(row), store.tokens(row))


@pytest.mark.parametrize("fast", [True, False])
def test_features_are_the_targets(fast: bool) -> None:
    target, layers = new_target(fast), (0, 1, 2)
    d = DIALOGUES[6]
    seen: list[Tensor] = []
    hook = target.model.model.layers[-1].register_forward_hook(lambda _, args, out: seen.append(out))
    with torch.no_grad():
        out = target.model.model(torch.tensor([d.ids]), output_hidden_states=True)
    hook.remove()
    # Behind the last layer transformers gives the normed feature; what enters the norm is the stream.
    streams = [*out.hidden_states[:2], seen[0] if isinstance(seen[0], Tensor) else seen[0][0]]
    wanted = torch.cat([out.last_hidden_state, *streams], -1)[0, :-1]
    source = LiveFeatures(target, [d], layers)
    error = (source.read(source.dialogues)[0].float() - wanted).norm(dim=0) / wanted.norm(dim=0)
    assert float(error.max()) < (0.15 if fast else 1e-3)  # int8


def test_features_that_came_for_free_are_the_live_ones(tmp_path: Path) -> None:
    target = new_target(fast=True)
    found: list[tuple[Dialogue, Tensor]] = []
    options = SynthesisOptions(max_new_tokens=9, batch_size=3, temperatures=(0.0, 1.0))
    prompts = [[i + 1, i + 2, *range(i)] for i in range(11)]
    synthesize(
        target.model, prompts, tmp_path / "a.jsonl", eos_ids=[256], pad_id=0, options=options,
        on_features=lambda d, features: found.append((d, features.clone())),
    )  # fmt: skip
    live = LiveFeatures(target, [d for d, _ in found])
    assert len(found) == 11
    for (_, free), read in zip(found, live.read(live.dialogues), strict=True):
        assert torch.equal(free, read)


def test_live_features_beyond_float16_stay_in_float32() -> None:
    target = new_target(fast=False)
    with torch.no_grad():
        target.model.model.norm.weight[3] = 2e5
    live = LiveFeatures(target, DIALOGUES[:3])
    wide = live.read(live.dialogues)
    assert all(x.dtype == torch.float32 and bool(torch.isfinite(x).all()) for x in wide)
    assert all(float(x[:, 3].abs().max()) > 65504 for x in wide)


def test_layers_that_a_target_does_not_have_are_refused() -> None:
    target = new_target(fast=False)
    with pytest.raises(InputError, match=r"no layer 3 in tiny; expected 0 \(embeddings\) to 2"):
        LiveFeatures(target, DIALOGUES, (1, 3))
    opt = HFTarget(new_model("opt"), "opt")  # projects its last layer's output to half the width
    live = LiveFeatures(opt, DIALOGUES[:1], (0, 1))
    with pytest.raises(UnsupportedModelError, match="opt: its layers are 48 wide, its features 32"):
        live.read(live.dialogues)
    with pytest.raises(DataError, match="nothing to train on"):
        LiveFeatures(target, [])


# --- answers and their features


@pytest.mark.parametrize("fast", [True, False])
def test_answers_resume_where_they_stopped(tmp_path: Path, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr("eaglekit.train.text.answers.is_fast", lambda model: False)
    model = llama(head_dim=32).eval()
    prompts = [[i + 1, i + 2, *range(i)] for i in range(13)]
    options = SynthesisOptions(max_prompt_tokens=13, max_new_tokens=6, batch_size=4, temperatures=(0.0, 1.0))
    path, store = tmp_path / "a.jsonl", tmp_path / "f"

    def run(most: int | None) -> int:
        writer = FeatureWriter(store, FeatureFacts(32))
        try:
            return synthesize(
                model, prompts, path, eos_ids=[256], pad_id=0, options=options, most=most,
                on_features=writer.append,
            )  # fmt: skip
        finally:
            writer.close()

    assert run(3) == 3
    with path.open("a") as f:
        f.write('{"prompt": [1, 2')  # a line that a kill cut off
    assert run(None) == 9
    assert run(None) == 0
    rows = list(read_dialogues(path))
    assert sorted(map(tuple, (p for p, _, _ in rows))) == sorted(map(tuple, prompts[:12]))  # the longest is skipped
    for prompt, answer, temperature in rows:
        assert 1 <= len(answer) <= 6
        assert 256 not in answer[:-1]
        if temperature == 0 and not fast:
            with torch.no_grad():
                best = model(torch.tensor([prompt])).logits[0, -1].argmax()
            assert answer[0] == int(best)
    if fast:
        assert [(d.length, d.greedy) for d in read_index(store)] == [(len(p) + len(a), t == 0) for p, a, t in rows]
    path.write_text('{"prompt": [1]}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1: not a synthesised dialogue"):
        list(read_dialogues(path))


def test_an_answer_is_written_before_its_features(tmp_path: Path) -> None:
    path, seen = tmp_path / "a.jsonl", []

    def sink(dialogue: Dialogue, features: Tensor) -> None:
        assert dialogue.ids in [[*prompt, *answer] for prompt, answer, _ in read_dialogues(path)]
        assert features.shape == (len(dialogue.ids) - 1, 32)
        seen.append(dialogue.ids)

    options = SynthesisOptions(max_new_tokens=6, batch_size=2)
    prompts = [[i + 1, i + 2] for i in range(9)]
    synthesize(llama(head_dim=32).eval(), prompts, path, eos_ids=[256], pad_id=0, options=options, on_features=sink)
    assert seen == [[*prompt, *answer] for prompt, answer, _ in read_dialogues(path)]
    assert len(seen) == 9


# --- the choice between the two


class Preparing:
    """Data of a small run in `folder`; each call may change something."""

    def __init__(self, folder: Path, fast: bool = True) -> None:
        talks = [[{"role": r, "content": c * n} for r, c in (("user", "hi"), ("assistant", "yes"))] for n in (1, 2, 3)]
        rows = [*({"turns": [f"say {i}"]} for i in range(16)), *({"messages": talk} for talk in talks)]
        file = folder / "p.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.target, self.said = new_target(fast), list[str]()
        self.store = folder / "data" / "features"
        self.arguments: dict[str, Any] = {
            "target_name": "tiny",
            "files": [file],
            "synthesis": SynthesisOptions(max_new_tokens=12, batch_size=4),
            "answers": 12,
            "progress": self.said.append,
        }
        self.more: dict[str, Any] = {"folder": folder / "data", "heldout": 2}

    def __call__(self, **changes: Any) -> Any:
        self.said.clear()
        return prepare(self.target, tokenizer(), **{**self.arguments, **self.more, **changes})


def assert_same(a: FeatureSource, b: FeatureSource) -> None:
    assert [replace(row, number=0) for row in a.dialogues] == [replace(row, number=0) for row in b.dialogues]
    for x, y in zip(a.dialogues, b.dialogues, strict=True):
        assert torch.equal(a.tokens(x), b.tokens(y))
    for p, q in zip(a.read(a.dialogues), b.read(b.dialogues), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("fast", [True, False])
def test_both_sources_give_the_same_dialogues_in_the_same_order(tmp_path: Path, fast: bool) -> None:
    job = Preparing(tmp_path, fast)
    live = job(feature_cache_gb=0)
    assert not live.cached and not job.store.exists()
    assert any("read on the fly" in line for line in job.said)
    stored = job()
    assert stored.cached and len(read_index(job.store)) == 15
    assert any("kept there" in line for line in job.said)
    assert_same(live.source, stored.source)
    (tmp_path / "other").mkdir()
    other = Preparing(tmp_path / "other", fast)
    assert_same(other().source, stored.source)  # features that came for free, in the order of answers
    again = job(feature_cache_gb=0)
    assert not again.cached and any("of an earlier call, is not used" in line for line in job.said)
    assert_same(again.source, stored.source)


def test_features_are_kept_if_they_fit_in_the_end(tmp_path: Path) -> None:
    job = Preparing(tmp_path)
    for ids in (range(64, 250),):  # most answers end at once
        job.target.model.generation_config.eos_token_id = [256, *ids]
    job(feature_cache_gb=0)
    tokens = sum(row.length for row in job(feature_cache_gb=0).source.dialogues)
    limit = tokens * 32 * 2 / 1e9
    assert not job(feature_cache_gb=limit - 1e-9).cached
    now = job(feature_cache_gb=limit)
    assert now.cached and any(f"features: {tokens} tokens after all" in line for line in job.said)
    assert len(read_index(job.store)) == len(now.source.dialogues) == 15
    with pytest.raises(InputError, match="--feature-cache-gb -1"):
        job(feature_cache_gb=-1)


def test_layers_are_read_behind_the_answers(tmp_path: Path) -> None:
    job = Preparing(tmp_path)
    stored, live = job(layers=(0, 1)), job(layers=(0, 1), feature_cache_gb=0)
    assert stored.cached and all(f.shape[-1] == 96 for f in stored.source.read(stored.source.dialogues))
    assert_same(stored.source, live.source)
    with pytest.raises(DataError, match=r"layers \[0, 1\] there, \[\] now"):
        job()


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    job = Preparing(tmp_path)
    with pytest.raises(DataError, match=r"source\.json is missing"):
        job(main=False)
    assert not (tmp_path / "data").exists()
    for limit in (10.0, 0.0):
        first = job(feature_cache_gb=limit)
        data = tmp_path / "data"
        before = {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in data.rglob("*") if f.is_file()}
        second = job(main=False, feature_cache_gb=limit)
        assert second.cached == first.cached == (limit > 0)
        assert_same(first.source, second.source)
        assert before == {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in data.rglob("*") if f.is_file()}
    with pytest.raises(DataError, match="6 of 15 dialogues are missing; run the main process first"):
        (tmp_path / "half").mkdir()
        half = Preparing(tmp_path / "half")
        half(given_tokens=1, answers=8)
        half(given_tokens=1, answers=12, feature_cache_gb=0)
        half(main=False)


def test_prompts_leave_room_for_answers_in_the_context(tmp_path: Path) -> None:
    job = Preparing(tmp_path)
    with pytest.raises(InputError, match=r"256 tokens do not fit the target's context of 256.*--max-new-tokens"):
        job(synthesis=SynthesisOptions(max_new_tokens=256))
    assert not (tmp_path / "data").exists()
    rows = job(synthesis=SynthesisOptions(max_new_tokens=240, batch_size=4), answers=4).source.dialogues
    assert all(row.length <= 256 for row in rows)


def test_as_many_prompts_are_answered_as_were_asked_for(tmp_path: Path) -> None:
    prepared = Preparing(tmp_path)(answers=7)
    assert sum(len(row.spans) == 1 and row.greedy is not None for row in prepared.source.dialogues) >= 7
    assert len((tmp_path / "data" / "answers.jsonl").read_text().splitlines()) == 7


OPTIONS = TrainOptions(
    epochs=2.0, batch_tokens=120, warmup_steps=2, vocabulary=24, heldout=2, eval_every=3, learning_rate=2e-3
)


@pytest.mark.parametrize("shape", [HeadOptions(), HeadOptions(features="fused", input_norm=True)])
def test_a_heads_weights_do_not_depend_on_the_source(tmp_path: Path, shape: HeadOptions) -> None:
    job = Preparing(tmp_path)
    weights = []
    for name, limit in (("stored", 10.0), ("live", 0.0)):
        output = tmp_path / name
        train_head(
            job.target, tokenizer(), output=output, options=OPTIONS, feature_cache_gb=limit, shape=shape,
            **job.arguments,
        )  # fmt: skip
        assert (output / "data" / "features").exists() == (limit > 0)
        weights.append(torch.load(output / "checkpoint.pt", weights_only=True)["model"])
        assert (output / "model.safetensors").read_bytes() == (tmp_path / "stored/model.safetensors").read_bytes()
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])


def test_a_given_head_keeps_its_shape(tmp_path: Path) -> None:
    job = Preparing(tmp_path)
    config = HeadConfig.for_target(job.target.model.config, hidden_size=32, embedding_size=32, vocab_size=260)
    save_head(EagleHead(config), tmp_path / "head", metadata={})
    with pytest.raises(InputError, match="has a shape of its own"):
        train_head(
            job.target, tokenizer(), output=tmp_path / "out", options=OPTIONS, init=tmp_path / "head",
            shape=HeadOptions(layers=0.5), **job.arguments,
        )  # fmt: skip


def test_self_talk_is_read_on_the_fly_too(tmp_path: Path) -> None:
    job = Preparing(tmp_path)
    talk = SelfTalkOptions(max_tokens=120, max_user_tokens=60, shared=0.9)
    job.target.model.generation_config.eos_token_id = [256, *range(24)]
    changes = {"files": [], "answers": 5, "talk": talk}
    live = job(feature_cache_gb=0, **changes)
    assert len(live.source.dialogues) == 5
    assert any(f"at most {5 * 120} tokens" in line for line in job.said)
    assert_same(live.source, job(**changes).source)
