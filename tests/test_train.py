"""Training: losses, unrolled steps against real drafting, data, features, resuming."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eaglekit.core.tree import TreeShape
from eaglekit.errors import DataError, HeadError, InputError, UnsupportedModelError
from eaglekit.models.checkpoint import load_head, read_config, save_head
from eaglekit.models.head import EagleHead, HeadCache, HeadConfig
from eaglekit.models.hf import HFTarget
from eaglekit.train.dataset import Dialogue, encode_dialogue, encode_prompt
from eaglekit.train.evaluate import simulate, standard_shapes
from eaglekit.train.features import FeatureStore, FeatureWriter, extract, read_index
from eaglekit.train.objective import (
    Batch,
    LossWeights,
    TargetLaw,
    add_noise,
    classification_loss,
    compute_losses,
    losses_of,
    regression_loss,
    step_masks,
    unroll,
)
from eaglekit.train.options import SynthesisOptions, TrainOptions
from eaglekit.train.pipeline import read_readout, train_head
from eaglekit.train.start import linear_start
from eaglekit.train.synthesize import read_dialogues, synthesize
from eaglekit.train.trainer import collate, plan_epoch, split_rows, train
from families import new_model
from tiny import llama, tokenizer

VOCAB, WIDTH = 40, 16
CONFIG = HeadConfig(
    hidden_size=WIDTH, embedding_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    intermediate_size=24, vocab_size=VOCAB,
)  # fmt: skip


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def new_head(noise: float = 0.3) -> EagleHead:
    head = EagleHead(CONFIG, torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return head


def new_batch(seed: int = 0) -> Batch:
    """Two rows of 12 inputs: row 0 is trained from input 3 on, row 1 from 5 to 8 and padded from 9 on."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (2, 12), generator=generator)
    features = random(2, 13, WIDTH, seed=seed + 1)
    trained = torch.zeros(2, 12, dtype=torch.bool)
    trained[0, 3:] = True
    trained[1, 5:9] = True
    return Batch(tokens, features[:, :-1].clone(), features[:, 1:].clone(), tokens.roll(-1, 1), trained)


EMBEDDING, READOUT = random(VOCAB, WIDTH, seed=7), random(VOCAB, WIDTH, seed=8)


# --- losses


def test_the_true_feature_has_no_regression_loss_and_the_targets_entropy() -> None:
    features = random(9, WIDTH)
    law = TargetLaw.of(features, READOUT)
    entropy = torch.distributions.Categorical(logits=features @ READOUT.T).entropy()
    assert float(regression_loss(features, features, 2.0)) == 0.0
    torch.testing.assert_close(classification_loss(features, law), entropy.mean(), rtol=1e-4, atol=1e-5)


def test_losses_and_gradients_are_the_textbook_ones() -> None:
    true, predicted = random(300, WIDTH), random(300, WIDTH, seed=1).requires_grad_()
    classification_loss(predicted, TargetLaw.of(true, READOUT)).mul(3.0).backward()
    gradient, predicted.grad = predicted.grad, None
    p = (true @ READOUT.T).softmax(-1)
    loss = -(p * (predicted @ READOUT.T).log_softmax(-1)).sum(-1).mean()
    (3.0 * loss).backward()
    torch.testing.assert_close(gradient, predicted.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(classification_loss(predicted.detach(), TargetLaw.of(true, READOUT)), loss.detach())
    x = (predicted.detach() - true).abs() / 2.0
    wanted = torch.where(x < 1, 0.5 * x * x, x - 0.5).mean()
    torch.testing.assert_close(regression_loss(predicted.detach(), true, 2.0), wanted)


def test_noise_is_uniform_and_seeded() -> None:
    zeros = torch.zeros(2000, WIDTH)
    noise = add_noise(zeros, 0.1, torch.Generator().manual_seed(0))
    assert float(noise.abs().max()) <= 0.1
    assert abs(float(noise.std()) - 0.1 / 3**0.5) < 1e-3
    assert torch.equal(noise, add_noise(zeros, 0.1, torch.Generator().manual_seed(0)))
    elsewhere = add_noise(zeros.to("meta"), 0.1, torch.Generator().manual_seed(0))  # drawn on the CPU, then moved
    assert elsewhere.device.type == "meta"


def test_every_tensor_of_a_batch_moves() -> None:
    moved = new_batch().to("meta")
    assert len(vars(moved)) == 5
    assert {t.device.type for t in vars(moved).values()} == {"meta"}


def losses_and_gradient(batch: Batch) -> tuple[float, Tensor]:
    head = new_head()
    losses = compute_losses(head, batch, EMBEDDING, READOUT, LossWeights(noise=0.0), torch.Generator())
    losses.total.backward()
    return float(losses.total.detach()), torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None])


def test_masked_and_padded_positions_change_nothing() -> None:
    loss, gradient = losses_and_gradient(new_batch())
    other = new_batch()
    for t in (other.tokens, other.labels):
        t[1, 9:] = 0  # padding, and what follows the answer
    other.features[1, 9:] = 99.0
    other.targets[1, 9:] = -99.0
    other.targets[0, :3] = 55.0  # the prompt's own targets
    other.targets[1, :5] = 55.0
    loss2, gradient2 = losses_and_gradient(other)
    assert loss == loss2
    assert torch.equal(gradient, gradient2)
    wider = Batch(*(torch.cat((t, torch.zeros_like(t[:, :4])), 1) for t in new_batch().__dict__.values()))
    loss3, gradient3 = losses_and_gradient(wider)
    assert loss3 == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(gradient3, gradient, rtol=1e-3, atol=1e-5)


def test_where_drafting_starts_is_trained(tmp_path: Path) -> None:
    writer = FeatureWriter(tmp_path, WIDTH)
    writer.append(Dialogue(list(range(10)), [(4, 10)], True), random(10, WIDTH))
    writer.append(Dialogue(list(range(9)), [(2, 4), (6, 9)], False), random(8, WIDTH))
    writer.close()
    store = FeatureStore(tmp_path, WIDTH)
    batch = collate([(store, row) for row in store.dialogues])
    # Input j holds token j + 1 and is judged by the law of token j + 2. Input 3 is the end of the first prompt.
    assert batch.trained[0].tolist() == [False, False, False, True, True, True, True, True]
    assert batch.trained[1].nonzero()[:, 0].tolist() == [1, 5, 6]
    assert batch.tokens[0].tolist() == list(range(1, 9))
    assert batch.labels[0].tolist() == list(range(2, 10))
    assert torch.equal(batch.features[0, 1:], batch.targets[0, :-1])
    loss, _ = losses_and_gradient(new_batch())
    moved = new_batch()
    moved.targets[0, 3] += 1.0
    assert losses_and_gradient(moved)[0] != loss


def test_step_masks_need_the_whole_chain() -> None:
    trained = torch.tensor([[False, True, True, True, False, True, True]])
    masks = [m[0].int().tolist() for m in step_masks(trained, 3)]
    assert masks == [[0, 1, 1, 1, 0, 1, 1], [0, 0, 1, 1, 0, 0, 1], [0, 0, 0, 1, 0, 0, 0]]


def test_step_weights_and_shares() -> None:
    targets, masks = random(1, 6, WIDTH), [torch.ones(1, 6, dtype=torch.bool)] * 2
    outputs = [random(1, 6, WIDTH, seed=s) for s in (1, 2)]
    losses = losses_of(outputs, masks, targets, READOUT, LossWeights(0.25, 0.75, (1.0, 0.5), scale=2.0))
    wanted = sum(
        w * (0.25 * r + 0.75 * c) for w, r, c in zip((1.0, 0.5), losses.regression, losses.classification, strict=True)
    )
    assert float(losses.total) == pytest.approx(wanted, rel=1e-5)


# --- unrolled steps are drafting


def draft(head: EagleHead, ids: Tensor, features: Tensor, root: int, steps: int) -> list[Tensor]:
    """Predicted features along the true tokens, as a drafter makes them from true features up to `root`."""
    cache = HeadCache(head.config, 1, len(ids) + steps)
    e = EMBEDDING[ids][None]
    y = head(e[:, 1 : root + 2], features[None, : root + 1], torch.arange(root + 1)[None], cache=cache)[:, -1:]
    cache.advance([root + 1])
    out = [y[0, 0]]
    for s in range(1, steps):
        y = head(e[:, root + s + 1, None], y, torch.tensor([[root + s]]), cache=cache, offset=s - 1)
        out.append(y[0, 0])
    return out


def test_unrolled_steps_equal_drafting_with_the_cache() -> None:
    head = new_head().eval().requires_grad_(False)
    ids, features = torch.randint(VOCAB, (14,), generator=torch.Generator().manual_seed(0)), random(13, WIDTH)
    outputs = unroll(head, EMBEDDING[ids[1:-1]][None], features[None, :12], 4)
    for root in (0, 3, 8):
        for s, wanted in enumerate(draft(head, ids, features, root, 4)):
            torch.testing.assert_close(outputs[s][0, root + s], wanted, rtol=1e-4, atol=1e-4)
    cropped = unroll(head, EMBEDDING[ids[1:-1]][None], features[None, :12], 4, first=3)
    for s in range(1, 4):
        torch.testing.assert_close(cropped[s][0, 3 + s :], outputs[s][0, 3 + s :], rtol=1e-4, atol=1e-4)
        assert not cropped[s][0, :3].any()


def test_texts_shorter_than_a_chain_can_be_unrolled() -> None:
    head = new_head().eval().requires_grad_(False)
    e, features = random(1, 8, WIDTH), random(1, 8, WIDTH, seed=1)
    whole = unroll(head, e, features, 5)
    for n in (1, 2, 3):
        for s, y in enumerate(unroll(head, e[:, :n], features[:, :n], 5)):
            torch.testing.assert_close(y[:, s:], whole[s][:, s:n], rtol=1e-4, atol=1e-4)


def test_simulated_acceptance_equals_drafting() -> None:
    head = new_head(0.1).train()
    ids, features = torch.randint(6, (60,), generator=torch.Generator().manual_seed(0)), random(59, WIDTH)
    readout = READOUT.clone()
    readout[6:] = 0.0  # six tokens compete, so that drafts are accepted now and then
    shapes = {**standard_shapes(), "two": TreeShape.from_choices([[0], [1], [0, 0], [0, 1], [1, 0]])}
    result = simulate(head, [(ids, features, 5)], EMBEDDING, readout, shapes)
    assert head.training
    for name, shape in shapes.items():
        root, rounds, new = 4, 0, 0
        while root < 58:
            node = accepted = 0
            with torch.no_grad():
                chain = draft(head, ids, features, root, min(shape.max_depth, 58 - root))
            for s, y in enumerate(chain):
                rank = (readout @ y).argsort(descending=True).tolist().index(int(ids[root + s + 2]))
                if rank >= len(shape.children[node]):
                    break
                node = shape.children[node][rank]
                accepted += 1
            step = min(accepted + 1, 58 - root)
            rounds, new, root = rounds + 1, new + step, root + step
        assert result.tau[name] == pytest.approx(new / rounds), name
        assert new == result.tokens == 54
    assert result.tau["chain"] < result.tau["tree"]


# --- data


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


def test_answers_are_found_by_the_chat_template() -> None:
    tok = tokenizer()
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "ok"},
    ]
    dialogue = encode_dialogue(tok, talk, 100)
    assert dialogue is not None
    assert [tok.decode(dialogue.ids[a:b]) for a, b in dialogue.spans] == ["hello<end>", "ok<end>"]
    assert tok.decode(dialogue.ids[: dialogue.spans[0][0]]) == tok.decode(encode_prompt(tok, talk[:1]))
    short = encode_dialogue(tok, talk, dialogue.spans[0][0] + 2)
    assert short is not None
    assert [b - a for a, b in short.spans] == [2]
    assert encode_dialogue(tok, talk[:1], 100) is None
    tok.chat_template = None
    plain = encode_dialogue(tok, talk, 100)
    assert plain is not None
    assert tok.decode(plain.ids).startswith("hi\n\nhello\n\nmore")


# --- features and answers


@pytest.mark.parametrize("fast", [True, False])
def test_answers_resume_where_they_stopped(tmp_path: Path, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr("eaglekit.train.generate.is_fast", lambda model: False)
    model = llama(head_dim=32).eval()
    prompts = [[i + 1, i + 2, *range(i)] for i in range(13)]
    options = SynthesisOptions(max_prompt_tokens=13, max_new_tokens=6, batch_size=4, temperatures=(0.0, 1.0))
    path, store = tmp_path / "a.jsonl", tmp_path / "f"

    def run(max_batches: int | None) -> int:
        writer = FeatureWriter(store, 32)
        try:
            return synthesize(
                model, prompts, path, eos_ids=[256], pad_id=0, options=options, max_batches=max_batches,
                on_features=writer.append,
            )  # fmt: skip
        finally:
            writer.close()

    assert run(1) == 4
    with path.open("a") as f:
        f.write('{"prompt": [1, 2')  # a line that a kill cut off
    assert run(None) == 8
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
    lines(path, {"prompt": [1]})
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


def test_a_store_of_another_width_is_not_filled_up(tmp_path: Path) -> None:
    writer = FeatureWriter(tmp_path, 8)
    writer.append(Dialogue([1, 2, 3], [(1, 3)], True), random(2, 8))
    writer.close()
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(DataError, match=r"features\.bin: 32 bytes, shorter than the 64"):
        FeatureWriter(tmp_path, 16)
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}


def test_features_are_stored_and_cut_off_writes_repaired(tmp_path: Path) -> None:
    model = llama().eval()
    dialogues = [Dialogue(list(range(5 + i)), [(2, 5 + i)], i == 0) for i in range(3)]
    writer = FeatureWriter(tmp_path, 32)
    extract(model, dialogues[:2], writer)
    writer.close()
    for name in ("features.bin", "tokens.bin", "index.jsonl"):
        with (tmp_path / name).open("ab") as f:
            f.write(b'{"tokens": 7')
    writer = FeatureWriter(tmp_path, 32)
    assert writer.count == 2
    extract(model, dialogues[2:], writer)
    writer.close()
    store = FeatureStore(tmp_path, 32)
    for row, dialogue in zip(store.dialogues, dialogues, strict=True):
        assert store.tokens(row).tolist() == dialogue.ids
        assert (row.spans, row.greedy) == (tuple(dialogue.spans), dialogue.greedy)
        with torch.no_grad():
            wanted = model.model(torch.tensor([dialogue.ids])).last_hidden_state[0, :-1]
        torch.testing.assert_close(store.features(row).float(), wanted, rtol=0.1, atol=0.1)
    with (tmp_path / "features.bin").open("rb+") as f:
        f.truncate(10)
    with pytest.raises(DataError, match="shorter than"):
        FeatureStore(tmp_path, 32)
    lines(tmp_path / "index.jsonl", {"tokens": 3})
    with pytest.raises(DataError, match=r"index\.jsonl:1"):
        read_index(tmp_path)
    with pytest.raises(DataError, match="nothing to train on"):
        FeatureStore(tmp_path / "none", 32)


# --- the trainer

OPTIONS = TrainOptions(
    epochs=2.5, batch_tokens=60, warmup_steps=2, vocabulary=24, heldout=2, eval_every=3, checkpoint_minutes=0.0,
    bfloat16=False, linear_start=False, learning_rate=2e-3,
)  # fmt: skip


def new_store(path: Path) -> FeatureStore:
    writer = FeatureWriter(path, WIDTH)
    generator = torch.Generator().manual_seed(0)
    for i in range(14):
        n = 8 + i
        ids = torch.randint(VOCAB, (n,), generator=generator)
        # Features that follow from the tokens, so that there is something to learn.
        writer.append(Dialogue(ids.tolist(), [(3, n)], i % 2 == 0), EMBEDDING[ids] + 0.5 * EMBEDDING[ids.roll(1)])
    writer.close()
    return FeatureStore(path, WIDTH)


def run(store: FeatureStore, output: Path, options: TrainOptions = OPTIONS, **arguments: Any) -> tuple[EagleHead, Any]:
    head = EagleHead(CONFIG, torch.Generator().manual_seed(1))
    arguments = {"metadata": {"target": "t"}, **arguments}
    result = train(head, [store], EMBEDDING, READOUT, output, options=options, **arguments)
    return head, result


def test_training_learns_and_keeps_the_best(tmp_path: Path) -> None:
    store = new_store(tmp_path / "f")
    said: list[str] = []
    before = torch.get_rng_state()
    head, result = run(store, tmp_path / "out", replace(OPTIONS, epochs=10.0, learning_rate=5e-3), progress=said.append)
    assert torch.equal(before, torch.get_rng_state())
    assert head.training
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == result.steps
    assert sum(log[-1]["classification"]) < 0.8 * sum(log[0]["classification"])
    assert result.best.tau["tree"] == max(line["tau"]["tree"] for line in log)
    kept = load_head(tmp_path / "out")
    assert kept.dtype == torch.float16
    own = read_config(tmp_path / "out")["eaglekit"]
    assert (own["target"], own["training"]["step"]) == ("t", result.best_step)
    train_rows, held = split_rows([store], 2, OPTIONS.seed)
    assert result.data_tokens == sum(r.length for _, r in train_rows)
    assert len(held) == 1
    assert all(row.greedy for _, row in held)
    assert len(said) == 1 + len(log)


def test_interrupted_training_ends_with_the_same_weights(tmp_path: Path) -> None:
    store = new_store(tmp_path / "f")
    whole, result = run(store, tmp_path / "a", progress=lambda s: None)

    def stop(line: str) -> None:
        if line.startswith("step 6/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(store, tmp_path / "b", progress=stop)
    state = torch.load(tmp_path / "b" / "checkpoint.pt", weights_only=True)
    assert 0 < state["step"] < result.steps
    resumed, again = run(store, tmp_path / "b", progress=lambda s: None, resume=True)
    assert all(torch.equal(x, y) for x, y in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert (again.best, again.best_step, again.tokens) == (result.best, result.best_step, result.tokens)
    files = [(tmp_path / d / "model.safetensors").read_bytes() for d in "ab"]
    assert files[0] == files[1]
    with pytest.raises(HeadError, match="another target, options or data"):
        run(store, tmp_path / "b", replace(OPTIONS, clip=1.0), resume=True)
    with pytest.raises(HeadError, match="another target, options or data"):
        run(store, tmp_path / "b", resume=True, metadata={"target": "u"})


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_start_finds_what_is_linear(tmp_path: Path, bias: bool) -> None:
    store = new_store(tmp_path)  # f_{j+1} = e(t_{j+1}) + 0.5 e(t_j): linear in e(t_{j+1}) alone to a good part
    rows = [(store, row) for row in store.dialogues]
    batch = collate(rows)
    losses = []
    for fit in (False, True):
        head = EagleHead(replace(CONFIG, fc_bias=bias), torch.Generator().manual_seed(1))
        if fit:
            linear_start(head, rows, EMBEDDING, seed=0, ridge=1e-2)
        with torch.no_grad():
            fc = head.fc(torch.cat((EMBEDDING[batch.tokens], batch.features.float()), -1))
        losses.append(float(regression_loss(fc[batch.trained], batch.targets[batch.trained])))
    assert losses[1] < 0.3 * losses[0]


def test_epochs_cover_everything_once(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    rows = [(store, row) for row in store.dialogues]
    for seed in range(3):
        plan = plan_epoch(rows, 60, seed)
        assert sorted(i for batch in plan for i in batch) == list(range(len(rows)))
        assert all(len(b) == 1 or len(b) * max(rows[i][1].length for i in b) <= 60 for b in plan)
    assert plan_epoch(rows, 60, 0) != plan_epoch(rows, 60, 1)


def test_options_that_cannot_work_are_named() -> None:
    with pytest.raises(InputError, match=r"epochs is 0.*step_weights is empty.*nor both 0"):
        TrainOptions(epochs=0, step_weights=(), regression=0, classification=0)


def test_nothing_to_judge_by_is_an_error(tmp_path: Path) -> None:
    writer = FeatureWriter(tmp_path, WIDTH)
    writer.append(Dialogue(list(range(9)), [(2, 9)], False), random(8, WIDTH))
    writer.close()
    with pytest.raises(DataError, match="0 of them greedy"):
        split_rows([FeatureStore(tmp_path, WIDTH)], 2, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("linear", [True, False])
def test_training_runs_on_the_device_of_the_target(tmp_path: Path, linear: bool) -> None:
    store = new_store(tmp_path / "f")
    options = replace(OPTIONS, linear_start=linear)
    said: list[str] = []
    here, result = run(store, tmp_path / "a", options, progress=said.append)
    head = EagleHead(CONFIG, torch.Generator().manual_seed(1))
    tables = EMBEDDING.cuda(), READOUT.cuda()
    there = train(head, [store], *tables, tmp_path / "b", options=options, progress=said.append)
    assert head.fc.weight.is_cuda
    assert there.steps == result.steps
    for x, y in zip(here.parameters(), head.parameters(), strict=True):
        torch.testing.assert_close(x, y.cpu(), rtol=1e-2, atol=1e-3)
    # A checkpoint can be gone on with elsewhere.
    resumed, _ = run(store, tmp_path / "b", options, resume=True, progress=said.append, metadata=None)
    assert all(torch.equal(x, y.cpu()) for x, y in zip(resumed.parameters(), head.parameters(), strict=True))


# --- from text to a head


class Job:
    """A small training job in `folder`; each call of `run` may change something."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
        talks = [[{**m, "content": m["content"] * n} for m in talk] for n in (1, 2, 3)]
        self.rows = [*({"turns": [f"say {i}"]} for i in range(16)), *({"conversations": t} for t in talks)]
        self.arguments: dict[str, Any] = {
            "target_name": "tiny",
            "files": [lines(folder / "p.jsonl", *self.rows)],
            "output": folder / "out",
            "options": replace(OPTIONS, epochs=1.0, batch_tokens=120, bfloat16=True),
            "synthesis": SynthesisOptions(max_new_tokens=12, batch_size=4),
            "answers": 12,
            "progress": lambda s: None,
        }
        self.store = folder / "out" / "data" / "features"

    def run(self, model: Any = None, **changes: Any) -> Any:
        target = HFTarget(llama(head_dim=32) if model is None else model, "tiny")
        return train_head(target, tokenizer(), **{**self.arguments, **changes})


def test_from_text_to_a_head(tmp_path: Path) -> None:
    job, model = Job(tmp_path), llama(head_dim=32)
    weights = {n: t.clone() for n, t in model.state_dict().items()}
    result = job.run(model)
    assert len(read_index(job.store)) == 15
    head = load_head(tmp_path / "out")
    assert (head.config.hidden_size, head.config.vocab_size) == (32, 260)
    assert all(torch.equal(weights[n], t) for n, t in model.state_dict().items())
    again = job.run(resume=True)
    assert (again.best, again.steps) == (result.best, result.steps)
    assert len(read_index(job.store)) == 15


def test_data_of_another_call_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run()
    tuned = llama(head_dim=32)
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight.add_(0.1)
    other = lines(tmp_path / "q.jsonl", *job.rows[1:])
    synthesis: SynthesisOptions = job.arguments["synthesis"]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"model": llama(hidden_size=64)}, "hidden size 32 there, 64 now"),
        ({"model": tuned}, "weights"),
        ({"target_name": "huge"}, "target tiny there, huge now"),
        ({"files": [other]}, "data files, tokens of the data"),
        ({"synthesis": replace(synthesis, max_new_tokens=9)}, "max_new_tokens 12 there, 9 now"),
        ({"synthesis": replace(synthesis, seed=1)}, "seed 0 there, 1 now"),
    ]
    before = {f: f.read_bytes() for f in (tmp_path / "out" / "data").rglob("*") if f.is_file()}
    for changes, said in refused:
        with pytest.raises(DataError, match=rf"\({said}.*\); use another --output, or delete .*data$"):
            job.run(**changes)
    assert before == {f: f.read_bytes() for f in (tmp_path / "out" / "data").rglob("*") if f.is_file()}
    (tmp_path / "out" / "data" / "source.json").unlink()
    with pytest.raises(DataError, match=r"source\.json is missing"):
        job.run()
    shutil.rmtree(tmp_path / "out" / "data")
    job.run(files=[other])


def test_a_head_is_trained_on_what_its_call_asks_for(tmp_path: Path) -> None:
    job, fresh = Job(tmp_path), Job(tmp_path)
    small = {"answers": 8, "given_tokens": 1}
    wanted = fresh.run(output=tmp_path / "other", **small)
    job.run()
    assert len(read_index(job.store)) == 15
    less = job.run(**small)
    assert (less.data_tokens, less.steps, less.best) == (wanted.data_tokens, wanted.steps, wanted.best)
    assert job.run().data_tokens > less.data_tokens


def test_a_dialogue_that_occurs_twice_is_trained_on_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    said: list[str] = []
    job.run(files=[lines(tmp_path / "q.jsonl", *job.rows, *job.rows)], answers=None, progress=said.append)
    unique = len(FeatureStore(job.store, 32).by_tokens())
    assert unique < len(read_index(job.store))  # greedy answers to the same prompt
    counts = next(line for line in said if "held out" in line).split()
    assert int(counts[0]) + int(counts[6]) == unique, counts


def test_a_head_to_start_from_must_fit(tmp_path: Path) -> None:
    job = Job(tmp_path)
    save_head(EagleHead(CONFIG), tmp_path / "head", metadata={})
    with pytest.raises(HeadError, match="features 16 against 32; embeddings 16 against 32; vocabulary 40 against 260"):
        job.run(init=tmp_path / "head")
    assert not job.store.exists()


@pytest.mark.parametrize(
    ("family", "capped"), [("llama", False), ("granite", False), ("cohere", False), ("opt", False), ("gemma2", True)]
)
def test_the_training_law_is_the_targets(family: str, capped: bool) -> None:
    target, said = HFTarget(new_model(family), family), []
    readout = read_readout(target, said.append)
    assert ["soft-caps" in line for line in said] == [True] * capped
    features = random(6, target.info.hidden_size) * (0.01 if capped else 1.0)
    torch.testing.assert_close(features @ readout.T, target.lm_head(features), rtol=1e-3, atol=1e-4)
    if family == "llama":
        assert torch.equal(readout, target.model.lm_head.weight)


def test_an_output_matrix_with_a_bias_is_refused(tmp_path: Path) -> None:
    model = llama()
    model.lm_head = torch.nn.Linear(32, 260)
    with pytest.raises(UnsupportedModelError, match="not a plain matrix"):
        Job(tmp_path).run(model)
