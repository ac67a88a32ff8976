"""Training: losses, unrolled steps against real drafting, data, features, resuming."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import subprocess
import sys
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
from eaglekit.train.features.provenance import describe
from eaglekit.train.features.store import FeatureFacts, FeatureStore, FeatureWriter, read_index
from eaglekit.train.head.objective import (
    Batch,
    LossWeights,
    TargetLaw,
    block_rows,
    classification_loss,
    compute_losses,
    losses_of,
    regression_loss,
    step_masks,
    uniform,
    unroll,
)
from eaglekit.train.head.start import linear_start
from eaglekit.train.head.trainer import Status, collate, count_trained, plan_epoch, share, split_rows, train
from eaglekit.train.judge.evaluate import simulate, standard_shapes
from eaglekit.train.options import SynthesisOptions, TrainOptions
from eaglekit.train.pipeline import read_readout, train_head
from eaglekit.train.text.dataset import Dialogue
from families import new_model
from tiny import llama, tokenizer

VOCAB, WIDTH = 40, 16
CONFIG = HeadConfig(
    hidden_size=WIDTH, embedding_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    intermediate_size=24, vocab_size=VOCAB,
)  # fmt: skip


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def new_head(noise: float = 0.3, **changes: Any) -> EagleHead:
    head = EagleHead(replace(CONFIG, **changes), torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return head


def new_batch(seed: int = 0) -> Batch:
    """Two dialogues: of the first's 12 inputs the last 9 are trained, of the second's 10 those from 5 to 8."""
    tokens = torch.randint(VOCAB, (22,), generator=torch.Generator().manual_seed(seed))
    features, targets = random(22, WIDTH, seed=seed + 1), random(22, WIDTH, seed=seed + 2)
    trained = torch.zeros(22, dtype=torch.bool)
    trained[3:12] = True
    trained[17:21] = True
    return Batch(tokens, features, targets, trained, (12, 10))


def parts_of(batch: Batch) -> list[Batch]:
    """Its dialogues, each as a batch."""
    tensors = zip(*(t.split(batch.lengths) for t in vars(batch).values() if isinstance(t, Tensor)), strict=True)
    return [Batch(*parts, (length,)) for parts, length in zip(tensors, batch.lengths, strict=True)]


EMBEDDING, READOUT = random(VOCAB, WIDTH, seed=7), random(VOCAB, WIDTH, seed=8)


# --- losses


def test_the_true_feature_has_no_regression_loss_and_the_targets_entropy() -> None:
    features = random(9, WIDTH)
    law = TargetLaw.of(features, READOUT)
    entropy = torch.distributions.Categorical(logits=features @ READOUT.T).entropy()
    assert float(regression_loss(features, features, 2.0)) == 0.0
    torch.testing.assert_close(classification_loss(features, law), entropy.sum(), rtol=1e-4, atol=1e-5)


def test_losses_and_gradients_are_the_textbook_ones() -> None:
    true, predicted = random(300, WIDTH), random(300, WIDTH, seed=1).requires_grad_()
    classification_loss(predicted, TargetLaw.of(true, READOUT)).mul(3.0).backward()
    gradient, predicted.grad = predicted.grad, None
    p = (true @ READOUT.T).softmax(-1)
    loss = -(p * (predicted @ READOUT.T).log_softmax(-1)).sum()
    (3.0 * loss).backward()
    torch.testing.assert_close(gradient, predicted.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(classification_loss(predicted.detach(), TargetLaw.of(true, READOUT)), loss.detach())
    x = (predicted.detach() - true).abs() / 2.0
    wanted = torch.where(x < 1, 0.5 * x * x, x - 0.5).mean(1).sum()
    torch.testing.assert_close(regression_loss(predicted.detach(), true, 2.0), wanted)


def test_a_law_cut_to_its_likeliest_tokens() -> None:
    true, predicted = random(7, WIDTH), random(7, WIDTH, seed=1)
    p = (true @ READOUT.T).softmax(-1)
    cut = torch.where(p >= p.topk(3).values[:, -1:], p, 0)
    cut = cut / cut.sum(-1, keepdim=True)
    wanted = -(cut * (predicted @ READOUT.T).log_softmax(-1)).sum()
    torch.testing.assert_close(classification_loss(predicted, TargetLaw.of(true, READOUT, 3)), wanted)
    whole = TargetLaw.of(true, READOUT).means
    assert torch.equal(TargetLaw.of(true, READOUT, VOCAB).means, whole)
    assert not torch.equal(TargetLaw.of(true, READOUT, 3).means, whole)


def test_logits_are_held_in_blocks_of_bounded_size() -> None:
    assert block_rows(8192) == 256
    assert block_rows(262_144) * 262_144 <= 1 << 23
    assert block_rows(1 << 30) == 8


def test_noise_is_uniform_and_seeded() -> None:
    noise = uniform((2000, WIDTH), torch.Generator().manual_seed(0))
    assert -1 <= float(noise.min()) < -0.999 and 0.999 < float(noise.max()) <= 1
    assert abs(float(noise.std()) - 3**-0.5) < 1e-2 and abs(float(noise.mean())) < 1e-2
    assert torch.equal(noise, uniform((2000, WIDTH), torch.Generator().manual_seed(0)))


def test_every_tensor_of_a_batch_moves() -> None:
    moved = new_batch().to("meta")
    tensors = [t for t in vars(moved).values() if isinstance(t, Tensor)]
    assert len(tensors) == 4
    assert {t.device.type for t in tensors} == {"meta"}
    assert moved.lengths == (12, 10)


def losses_and_gradient(batch: Batch, counts: list[int] | None = None) -> tuple[float, Tensor]:
    head = new_head()
    losses = compute_losses(head, batch, EMBEDDING, READOUT, LossWeights(), counts)
    losses.total.backward()
    return float(losses.total.detach()), torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None])


def test_positions_that_are_not_trained_change_nothing() -> None:
    loss, gradient = losses_and_gradient(new_batch())
    other = new_batch()
    other.tokens[21] = 0  # what follows the answer
    other.features[21] = 99.0
    for part in (slice(0, 3), slice(12, 17), slice(21, 22)):  # what is not an answer's own
        other.targets[part] = -99.0
    loss2, gradient2 = losses_and_gradient(other)
    assert loss == loss2
    assert torch.equal(gradient, gradient2)
    other.features[1] += 1.0  # a prompt is read
    assert losses_and_gradient(other)[0] != loss


def test_dialogues_that_are_packed_do_not_see_each_other() -> None:
    batch = new_batch()
    loss, gradient = losses_and_gradient(batch)
    counts = [int(mask.sum()) for mask in step_masks(batch.trained, batch.lengths, 3)]
    assert counts == [13, 11, 9]
    parts = [losses_and_gradient(part, counts) for part in parts_of(batch)]
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(parts[0][1] + parts[1][1], gradient, rtol=1e-3, atol=1e-5)


def test_where_drafting_starts_is_trained(tmp_path: Path) -> None:
    writer = FeatureWriter(tmp_path, FeatureFacts(WIDTH))
    writer.append(Dialogue(list(range(10)), [(4, 10)], True), random(10, WIDTH))
    writer.append(Dialogue(list(range(9)), [(2, 4), (6, 9)], False), random(8, WIDTH))
    writer.close()
    store = FeatureStore(tmp_path, FeatureFacts(WIDTH))
    batch = collate(new_head(), store, store.dialogues)
    assert batch.lengths == (8, 7)
    # Input j holds token j + 1 and is judged by the law of token j + 2. Input 3 is the end of the first prompt.
    assert batch.trained[:8].tolist() == [False, False, False, True, True, True, True, True]
    assert batch.trained[8:].nonzero()[:, 0].tolist() == [1, 5, 6]
    assert batch.tokens.tolist() == [*range(1, 9), *range(1, 8)]
    assert torch.equal(batch.features[1:8], batch.targets[:7])
    assert count_trained(store.dialogues, 2) == [8, 5]
    loss, _ = losses_and_gradient(new_batch())
    moved = new_batch()
    moved.targets[3] += 1.0
    assert losses_and_gradient(moved)[0] != loss


def test_noise_follows_from_a_dialogues_own_seed(tmp_path: Path) -> None:
    store, head = new_store(tmp_path), new_head()
    noise = torch.full((WIDTH,), 0.1)
    plain = collate(head, store, store.dialogues[:3])
    both = collate(head, store, store.dialogues[:3], noise, [5, 6, 7])
    alone = collate(head, store, store.dialogues[1:2], noise, [6])
    start, length = both.lengths[0], both.lengths[1]
    assert torch.equal(both.features[start : start + length], alone.features)
    moved = (both.features - plain.features).abs()
    assert 0.05 < float(moved.max()) <= 0.1001
    assert torch.equal(both.targets, plain.targets)


def test_step_masks_need_the_whole_chain_in_one_dialogue() -> None:
    trained = torch.tensor([False, True, True, True, False, True, True])
    masks = [m.int().tolist() for m in step_masks(trained, [7], 3)]
    assert masks == [[0, 1, 1, 1, 0, 1, 1], [0, 0, 1, 1, 0, 0, 1], [0, 0, 0, 1, 0, 0, 0]]
    masks = [m.int().tolist() for m in step_masks(trained, [2, 5], 3)]
    assert masks == [[0, 1, 1, 1, 0, 1, 1], [0, 0, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0]]


def test_step_weights_and_shares() -> None:
    targets, masks = random(6, WIDTH), [torch.ones(6, dtype=torch.bool)] * 2
    outputs = [random(6, WIDTH, seed=s) for s in (1, 2)]
    losses = losses_of(new_head(), outputs, masks, targets, READOUT, LossWeights(0.25, 0.75, (1.0, 0.5), scale=2.0))
    wanted = sum(w * (0.25 * r + 0.75 * c) for w, r, c in zip((1.0, 0.5), *losses.parts.tolist(), strict=True))
    law = TargetLaw.of(targets, READOUT)
    assert float(losses.parts[0, 1]) == pytest.approx(float(regression_loss(outputs[1], targets, 2.0)) / 6, rel=1e-5)
    assert float(losses.parts[1, 0]) == pytest.approx(float(classification_loss(outputs[0], law)) / 6, rel=1e-5)
    assert float(losses.total) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("top_k", [0, 3])
def test_a_read_out_of_the_head_s_own_is_trained_along(top_k: int) -> None:
    """Value and gradients are those of the definition, by autograd."""
    features, x, own = random(5, WIDTH), random(5, WIDTH, seed=1).requires_grad_(), random(*READOUT.shape, seed=2)
    own.requires_grad_()
    law = TargetLaw.of(features, READOUT, top_k, whole=True)
    found = torch.autograd.grad(3 * classification_loss(x, law, own), (x, own))
    logits = features @ READOUT.T
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
    probs = logits.softmax(-1)
    wanted = 3 * -(probs * (x @ own.T).log_softmax(-1)).sum()
    torch.testing.assert_close(law.probs, probs)
    torch.testing.assert_close(3 * classification_loss(x, law, own), wanted)
    for a, b in zip(found, torch.autograd.grad(wanted, (x, own)), strict=True):
        torch.testing.assert_close(a, b)


def test_an_eagle3_head_learns_from_tokens_alone(tmp_path: Path) -> None:
    """Its read-out starts as the target's rows of the draft vocabulary, and is trained along."""
    head = new_head(
        method="eagle3", feature_layers=(0, 1), input_norm=True, output_norm=True, fuse_norms=True, readout_size=1
    )
    store = new_store(tmp_path / "store", layers=(0, 1))
    head.adopt(torch.arange(0, len(READOUT), 2), READOUT)
    assert torch.equal(head.lm_head.weight, READOUT[::2]) and head.config.readout_size == len(READOUT[::2])
    result = train(
        head, store, EMBEDDING, READOUT, tmp_path / "head", progress=lambda line: None,
        options=replace(OPTIONS, regression=0.0, classification=1.0, vocabulary=8, epochs=4.0),
    )  # fmt: skip
    kept = load_head(tmp_path / "head")
    assert kept.config.method == "eagle3" and kept.config.readout_size == len(kept.draft_vocab) == 8
    assert not torch.equal(kept.lm_head.weight.float(), READOUT[kept.draft_vocab].half().float())
    assert result.best.tokens > 0


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
    e = EMBEDDING[ids[1:-1]]
    outputs = unroll(head, e, features[:12], [12], 4, [0])
    for root in (0, 3, 8):
        for s, wanted in enumerate(draft(head, ids, features, root, 4)):
            torch.testing.assert_close(outputs[s][root + s], wanted, rtol=1e-4, atol=1e-4)
    # Between two others, and without what lies before the chains.
    around = [torch.cat((x[:5], x[:12], x[:7])) for x in (e, features)]
    cropped = unroll(head, *around, [5, 12, 7], 4, [1, 3, 7])
    torch.testing.assert_close(cropped[0][5:17], outputs[0], rtol=1e-4, atol=1e-4)
    for s in range(1, 4):
        torch.testing.assert_close(cropped[s][8 + s : 17], outputs[s][3 + s :], rtol=1e-4, atol=1e-4)
        assert not cropped[s][5:8].any()


def test_texts_shorter_than_a_chain_can_be_unrolled() -> None:
    head = new_head().eval().requires_grad_(False)
    e, features = random(8, WIDTH), random(8, WIDTH, seed=1)
    whole = unroll(head, e, features, [8], 5, [0])
    for n in (1, 2, 3):
        for s, y in enumerate(unroll(head, e[:n], features[:n], [n], 5, [0])):
            torch.testing.assert_close(y[s:], whole[s][s:n], rtol=1e-4, atol=1e-4)


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


# --- the trainer


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


OPTIONS = TrainOptions(
    epochs=2.5, batch_tokens=60, warmup_steps=2, vocabulary=24, heldout=2, eval_every=3, checkpoint_minutes=0.0,
    bfloat16=False, linear_start=False, learning_rate=2e-3,
)  # fmt: skip


def new_store(path: Path, seed: int = 0, layers: tuple[int, ...] = ()) -> FeatureStore:
    facts = FeatureFacts(WIDTH, layers)
    writer = FeatureWriter(path, facts)
    generator = torch.Generator().manual_seed(seed)
    for i in range(14):
        n = 8 + i
        ids = torch.randint(VOCAB, (n,), generator=generator)
        # Features that follow from the tokens, so that there is something to learn.
        features = EMBEDDING[ids] + 0.5 * EMBEDDING[ids.roll(1)]
        streams = [features * (k + 2) for k in layers]
        writer.append(Dialogue(ids.tolist(), [(3, n)], i % 2 == 0), torch.cat([features, *streams], -1))
    writer.close()
    return FeatureStore(path, facts)


def run(
    store: FeatureStore,
    output: Path,
    options: TrainOptions = OPTIONS,
    config: HeadConfig = CONFIG,
    seed: int = 1,
    **arguments: Any,
) -> tuple[EagleHead, Any]:
    head = EagleHead(config, torch.Generator().manual_seed(seed))
    arguments = {"metadata": {"target": "t"}, **arguments}
    result = train(head, store, EMBEDDING, READOUT, output, options=options, **arguments)
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
    judged = [line for line in log if line["acceptance"]]
    assert result.best.tau["tree"] == max(line["acceptance"]["tau"]["tree"] for line in judged)
    assert 0 < log[0]["seconds_left"] > log[-1]["seconds_left"] == 0
    facts = json.loads((tmp_path / "out" / "training.json").read_text())
    assert facts["peak_memory_mb"] > 100
    assert facts["tokens_per_second"] > 0
    kept = load_head(tmp_path / "out")
    assert kept.dtype == torch.float16
    own = read_config(tmp_path / "out")["eaglekit"]
    assert (own["target"], own["training"]["step"]) == ("t", result.best_step)
    train_rows, held = split_rows(store, 2, OPTIONS.seed)
    assert result.data_tokens == sum(r.length for r in train_rows)
    assert len(held) == 1
    assert all(row.greedy for row in held)
    assert len(said) == 1 + len(judged)


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_interrupted_training_ends_with_the_same_weights(tmp_path: Path, ema: float) -> None:
    store = new_store(tmp_path / "f")
    options = replace(OPTIONS, ema=ema, linear_start=True)
    whole, result = run(store, tmp_path / "a", options, progress=lambda s: None)

    def stop(line: str) -> None:
        if line.startswith("step 6/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(store, tmp_path / "b", options, progress=stop)
    state = torch.load(tmp_path / "b" / "checkpoint.pt", weights_only=True)
    assert 0 < state["place"]["step"] < result.steps
    assert json.loads((tmp_path / "b" / "log.jsonl").read_text().splitlines()[-1])["step"] == 6
    again_options = replace(options, checkpoint_minutes=9.0)  # how often something is kept changes no weight
    resumed, again = run(store, tmp_path / "b", again_options, progress=lambda s: None, resume=True)
    assert all(torch.equal(x, y) for x, y in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert (again.best, again.best_step, again.tokens) == (result.best, result.best_step, result.tokens)
    done = run(store, tmp_path / "b", options, progress=lambda s: None, resume=True)[1]
    assert (done.seconds, done.tokens_per_second) == (again.seconds, again.tokens_per_second)
    files = [(tmp_path / d / "model.safetensors").read_bytes() for d in "ab"]
    assert files[0] == files[1]
    logs = [(tmp_path / d / "log.jsonl").read_text().splitlines() for d in "ab"]
    steps = [[json.loads(line)["step"] for line in log] for log in logs]
    assert steps[0] == steps[1]  # what was logged behind the checkpoint is not there twice
    said: list[str] = []
    refused: list[tuple[dict[str, Any], str]] = [
        ({"options": replace(options, clip=1.0)}, "clip 0.5 there, 1.0 now"),
        ({"metadata": {"target": "u"}}, "metadata"),
        ({"seed": 2}, "first weights"),
        ({"config": replace(CONFIG, inputs="feature+token")}, r"head inputs feature\+shifted-token there"),
        ({"store": new_store(tmp_path / "g", seed=1)}, "data"),
    ]
    before = (tmp_path / "b" / "checkpoint.pt").read_bytes()
    for changes, why in refused:
        given = {"store": store, "options": options, **changes}
        with pytest.raises(HeadError, match=f"of another target, options or data .*{why}"):
            run(output=tmp_path / "b", progress=said.append, resume=True, **given)
    assert before == (tmp_path / "b" / "checkpoint.pt").read_bytes()
    (tmp_path / "b" / "checkpoint.pt").write_bytes(before[:1000])
    with pytest.raises(HeadError, match=r"checkpoint\.pt: not readable .*without --resume"):
        run(store, tmp_path / "b", options, progress=said.append, resume=True)
    with pytest.raises(InputError, match=r"checkpoint\.pt: there is a training already; go on with it \(--resume\)"):
        run(store, tmp_path / "b", options, progress=said.append)
    assert files[1] == (tmp_path / "b" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_start_finds_what_is_linear(tmp_path: Path, bias: bool) -> None:
    store = new_store(tmp_path)  # f_{j+1} = e(t_{j+1}) + 0.5 e(t_j): linear in e(t_{j+1}) alone to a good part
    rows = store.dialogues
    batch = collate(new_head(), store, rows)
    losses = []
    for fit in (False, True):
        head = EagleHead(replace(CONFIG, fc_bias=bias), torch.Generator().manual_seed(1))
        if fit:
            linear_start(head, store, rows, EMBEDDING, seed=0, ridge=1e-2)
        with torch.no_grad():
            fc = head.fc(torch.cat((EMBEDDING[batch.tokens], batch.features.float()), -1))
        losses.append(float(regression_loss(fc[batch.trained], batch.targets[batch.trained])))
    assert losses[1] < 0.3 * losses[0]


def test_epochs_cover_everything_once(tmp_path: Path) -> None:
    rows = new_store(tmp_path).dialogues
    for seed in range(3):
        plan = plan_epoch(rows, 60, seed)
        assert sorted(i for batch in plan for i in batch) == list(range(len(rows)))
        assert all(len(b) == 1 or sum(rows[i].length for i in b) <= 60 for b in plan)
        # No batch could have taken the next one's first row: nothing is padded, little is left over.
        pairs = itertools.pairwise(plan)
        assert all(sum(rows[i].length for i in b) + rows[after[0]].length > 60 for b, after in pairs)
    assert plan_epoch(rows, 60, 0) != plan_epoch(rows, 60, 1)


@pytest.mark.parametrize("width", [1, 3])
def test_a_small_draft_vocabulary_is_judged_as_it_drafts(width: int) -> None:
    head = new_head(0.1)
    ids, features = torch.randint(6, (60,), generator=torch.Generator().manual_seed(0)), random(59, WIDTH)
    head.draft_vocab = torch.arange(width)
    found = simulate(head, [(ids, features, 5)], EMBEDDING, READOUT, standard_shapes())
    hits = sum(int(t) < width for t in ids[6:])  # no more than these can be accepted
    rounds = found.tokens / found.tau["tree"]
    assert found.tokens - rounds <= hits


def test_shares_are_even_and_complete(tmp_path: Path) -> None:
    rows = new_store(tmp_path).dialogues
    shares = share(range(14), rows, 3)
    assert sorted(i for some in shares for i in some) == list(range(14))
    sizes = [sum(rows[i].length for i in some) for some in shares]
    assert max(sizes) - min(sizes) <= max(row.length for row in rows)
    assert share([2, 1], rows, 1) == [[2, 1]]
    assert share([2], rows, 3) == [[2], [], []]


def test_passes_of_a_step_add_up(tmp_path: Path) -> None:
    store = new_store(tmp_path / "f")
    heads = [run(store, tmp_path / str(n), replace(OPTIONS, accumulate=n), progress=lambda s: None)[0] for n in (1, 3)]
    for x, y in zip(*(head.parameters() for head in heads), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path[:0] = sys.argv[1:2]
import test_train as t
from eaglekit.train.head import trainer
from eaglekit.train.head.processes import Processes
kind, folder = sys.argv[2], Path(sys.argv[3])
processes = Processes("cpu", sharded=kind == "fsdp")
assert (processes.count, processes.sharded) == (2, kind == "fsdp")
store = t.FeatureStore(folder / "f", t.FeatureFacts(t.WIDTH))
options = t.replace(t.OPTIONS, ema=0.9, epochs=1.5)
quiet = {"processes": processes, "progress": lambda s: None}
save = trainer._Trainer._save
def save_and_stop(self):
    save(self)
    if self.place.step == 5 and not self.resumed:
        raise KeyboardInterrupt
trainer._Trainer._save = save_and_stop
try:
    t.run(store, folder / kind, options, **quiet)
except KeyboardInterrupt:
    pass
t.run(store, folder / kind, options, resume=True, **quiet)
"""


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_the_head_that_one_trains(tmp_path: Path, kind: str) -> None:
    store = new_store(tmp_path / "f")
    options = replace(OPTIONS, ema=0.9, epochs=1.5)
    _, result = run(store, tmp_path / "one", options, progress=lambda s: None)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    arguments = [str(script), str(Path(__file__).parent), kind, str(tmp_path)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    states = [torch.load(tmp_path / d / "checkpoint.pt", weights_only=True) for d in ("one", kind)]
    for x, y in zip(*(state["average"] for state in states), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
    for name, x in states[0]["model"].items():
        torch.testing.assert_close(x, states[1]["model"][name], rtol=1e-3, atol=1e-4)
    facts = json.loads((tmp_path / kind / "training.json").read_text())
    assert (facts["processes"], facts["steps"], facts["tokens"]) == (2, result.steps, result.tokens)
    assert load_head(tmp_path / kind).config == load_head(tmp_path / "one").config


def test_the_average_of_the_weights_is_what_is_judged_and_kept(tmp_path: Path) -> None:
    store = new_store(tmp_path / "f")
    options = replace(OPTIONS, ema=0.9, epochs=1.0, eval_every=1000)
    last, result = run(store, tmp_path / "a", options, progress=lambda s: None)
    kept = load_head(tmp_path / "a", dtype=torch.float32)
    plain, _ = run(store, tmp_path / "b", replace(options, ema=0.0), progress=lambda s: None)
    assert all(torch.equal(x, y) for x, y in zip(last.parameters(), plain.parameters(), strict=True))
    average = EagleHead(CONFIG, torch.Generator().manual_seed(1))
    # The same steps once more, one at a time.
    for step in range(1, result.steps + 1):
        head = EagleHead(CONFIG, torch.Generator().manual_seed(1))
        with contextlib.suppress(KeyboardInterrupt):
            train(head, store, EMBEDDING, READOUT, tmp_path / f"c{step}", options=replace(options, ema=0.0),
                  progress=lambda s: None, on_step=_Stop(step))  # fmt: skip
        decay = min(0.9, step / (step + 9))
        with torch.no_grad():
            for a, p in zip(average.parameters(), head.parameters(), strict=True):
                a.lerp_(p, 1 - decay)
    for x, y in zip(average.parameters(), kept.parameters(), strict=True):
        torch.testing.assert_close(x.detach().half().float(), y, rtol=1e-3, atol=1e-4)


class _Stop:
    """Ends a training after a step, by what a user's Ctrl-C raises."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, status: Status) -> None:
        if status.step == self.step:
            raise KeyboardInterrupt


def test_training_ends_early_when_nothing_gets_better(tmp_path: Path) -> None:
    store = new_store(tmp_path / "f")
    options = replace(OPTIONS, epochs=40.0, eval_every=2, patience=3, learning_rate=1e-9, bfloat16=False)
    _, result = run(store, tmp_path / "a", options, progress=lambda s: None)
    assert (result.best_step, result.steps) == (2, 8)
    assert run(store, tmp_path / "a", options, progress=lambda s: None, resume=True)[1].steps == 8


def test_a_folder_that_cannot_be_written_is_named_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match=r"--output .*file.*: cannot be written"):
            Job(tmp_path).run(output=output)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("step_weights", (1.0, float("inf")), "step_weights is 1,inf"),
        ("step_weights", (0.0, 0.0), "step_weights is 0,0"),
        ("regression", float("nan"), "regression is nan"),
        ("epochs", 1e308, "epochs is 1e.308, expected at most 1000000"),
        ("seed", 1 << 63, "seed is"),
    ],
)
def test_an_option_that_cannot_work_is_named(name: str, value: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        TrainOptions(**{name: value})


def test_options_that_cannot_work_are_named() -> None:
    with pytest.raises(InputError, match=r"epochs is 0.*noise is -1.*ema is 1.*step_weights is empty.*are both 0"):
        TrainOptions(epochs=0, step_weights=(), regression=0, classification=0, ema=1, noise=-1)


def test_nothing_to_judge_by_is_an_error(tmp_path: Path) -> None:
    writer = FeatureWriter(tmp_path, FeatureFacts(WIDTH))
    writer.append(Dialogue(list(range(9)), [(2, 9)], False), random(8, WIDTH))
    writer.close()
    with pytest.raises(DataError, match="0 of them greedy"):
        split_rows(FeatureStore(tmp_path, FeatureFacts(WIDTH)), 2, 0)


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
    there = train(head, store, *tables, tmp_path / "b", options=options, progress=said.append)
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
        if not changes.get("resume"):
            (self.arguments["output"] / "checkpoint.pt").unlink(missing_ok=True)
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
        ({"synthesis": replace(synthesis, max_new_tokens=9)}, ".*max_new_tokens 12 there, 9 now"),
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
    facts = describe(HFTarget(llama(head_dim=32), "tiny"), tokenizer(), "tiny")
    unique = len(FeatureStore(job.store, facts).by_tokens())
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
