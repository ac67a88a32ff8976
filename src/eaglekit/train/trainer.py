"""Train a draft head on stored features.

Contract: everything follows from the data, the options and the seed. A checkpoint holds weights, optimizer, generator
and place in the data; a run that was interrupted and resumed ends with the same weights, bit for bit, as one that was
not. The head with the best simulated acceptance on held-out greedy continuations is kept, not the last one.

The cross-entropy runs over the tokens most frequent in the training text (`vocabulary`), which makes a step several
times cheaper; they become the head's draft vocabulary, so that drafting costs less too. Which device is trained on
follows from the tensors of the target; data, noise and checkpoints are made on the CPU, the same for all devices.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eaglekit.errors import DataError, HeadError
from eaglekit.models.checkpoint import save_head
from eaglekit.models.head import EagleHead, check_draft_vocab
from eaglekit.train.evaluate import Acceptance, Example, simulate, standard_shapes
from eaglekit.train.features import FeatureStore, StoredDialogue
from eaglekit.train.objective import Batch, LossWeights, compute_losses
from eaglekit.train.options import TrainOptions
from eaglekit.train.start import linear_start

Row = tuple[FeatureStore, StoredDialogue]


@dataclass(frozen=True)
class TrainResult:
    """What came out.

    Attributes:
        best: Acceptance of the head that was kept.
        best_step: The optimizer step it was taken after.
        steps: Optimizer steps in all.
        tokens: Tokens read, every epoch counted, padding not.
        data_tokens: Tokens of the training dialogues, each counted once.
        trained_tokens: Of these, answer tokens that a loss was computed on.
        seconds: Wall time of this run.
    """

    best: Acceptance
    best_step: int
    steps: int
    tokens: int
    data_tokens: int
    trained_tokens: int
    seconds: float


def split_rows(stores: Sequence[FeatureStore], heldout: int, seed: int) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows): `heldout` greedy dialogues of one answer are set aside, one in ten at most.

    Which ones depends on their tokens and the seed, so that a dialogue once held out mostly stays so as data grows.

    Raises:
        DataError: there is no greedy dialogue, or nothing is left to train on.
    """
    rows = [(store, row) for store in stores for row in store.dialogues if row.length >= 3]
    greedy = [i for i, (_, row) in enumerate(rows) if row.greedy and len(row.spans) == 1]
    greedy.sort(key=lambda i: zlib.crc32(rows[i][0].tokens(rows[i][1]).numpy().tobytes(), seed))
    kept = set(greedy[: min(heldout, max(1, len(rows) // 10))])
    train = [row for i, row in enumerate(rows) if i not in kept]
    if not kept or not train:
        raise DataError(
            f"{len(rows)} dialogues, {len(greedy)} of them greedy answers of the target: expected at least one "
            "greedy answer to judge the head by, and others to train on. Let the target answer prompts (--synthesize)"
        )
    return train, [rows[i] for i in sorted(kept)]


def frequent_tokens(rows: Sequence[Row], count: int, vocabulary: int) -> Tensor:
    """int64 [min(count, vocabulary)], ascending: the answer tokens met most often, then the lowest ids."""
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for store, row in rows:
        ids = store.tokens(row)
        for start, end in row.spans:
            counts += torch.bincount(ids[start:end], minlength=vocabulary)
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[: min(count, vocabulary)].sort().values


def plan_epoch(rows: Sequence[Row], batch_tokens: int, seed: int) -> list[list[int]]:
    """Indices of each batch, in random order: at most `batch_tokens` tokens with padding.

    Rows whose answers start at similar places, and of these rows of similar length, are put together: unrolled steps
    leave out what lies before the first answer of a batch, and little is padded.
    """
    rng = random.Random(seed)
    order = list(range(len(rows)))
    rng.shuffle(order)
    batches: list[list[int]] = []
    for start in range(0, len(order), 2048):
        window = sorted(order[start : start + 2048], key=lambda i: rows[i][1].spans[0][0])
        for part in range(0, len(window), 128):
            batch: list[int] = []
            for i in sorted(window[part : part + 128], key=lambda i: -rows[i][1].length):
                longest = rows[batch[0]][1].length if batch else rows[i][1].length
                if batch and longest * (len(batch) + 1) > batch_tokens:
                    batches.append(batch)
                    batch = []
                batch.append(i)
            batches.append(batch)
    rng.shuffle(batches)
    return batches


def collate(rows: Sequence[Row]) -> Batch:
    """Pad dialogues into a batch; see `Batch` for what is trained."""
    length = max(row.length for _, row in rows) - 2
    shape = (len(rows), length)
    width = rows[0][0].features(rows[0][1]).shape[-1]
    tokens = torch.zeros(shape, dtype=torch.long)
    labels = torch.zeros(shape, dtype=torch.long)
    features = torch.zeros(*shape, width, dtype=torch.bfloat16)
    targets = torch.zeros(*shape, width, dtype=torch.bfloat16)
    trained = torch.zeros(shape, dtype=torch.bool)
    for b, (store, row) in enumerate(rows):
        ids, true, n = store.tokens(row), store.features(row), row.length - 2
        tokens[b, :n], labels[b, :n] = ids[1:-1], ids[2:]
        features[b, :n], targets[b, :n] = true[:-1], true[1:]
        for start, end in row.spans:
            trained[b, start - 1 : min(end - 2, n)] = True
    return Batch(tokens, features, targets, labels, trained)


def feature_scale(rows: Sequence[Row], seed: int) -> float:
    """Standard deviation of the features of up to 64 dialogues."""
    some = random.Random(seed).sample(range(len(rows)), min(64, len(rows)))
    return float(torch.cat([rows[i][0].features(rows[i][1]) for i in some]).float().std())


def learning_rate(step: int, total: int, options: TrainOptions) -> float:
    """The rate of optimizer step `step` (from 0) of `total`."""
    warm = min(1.0, (step + 1) / max(1, options.warmup_steps))
    place = min(1.0, step / max(1, total))
    cosine = options.final_rate + (1 - options.final_rate) * 0.5 * (1 + math.cos(math.pi * place))
    return options.learning_rate * warm * cosine


def train(
    head: EagleHead,
    stores: Sequence[FeatureStore],
    embedding: Tensor,
    readout: Tensor,
    output: Path,
    *,
    options: TrainOptions,
    metadata: dict[str, Any] | None = None,
    resume: bool = False,
    progress: Callable[[str], None] = print,
) -> TrainResult:
    """Train `head` (float32) in place and keep the best one in the folder `output`.

    Args:
        head: A new head, or one to go on with; it is moved to the device of `readout`.
        stores: Training dialogues.
        embedding: [vocabulary, E], the target's frozen embeddings, on the same device as `readout`.
        readout: [V, H], the matrix of the target's frozen `lm_head`.
        output: Gets `config.json` and `model.safetensors` (the best head, float16), `checkpoint.pt` and `log.jsonl`.
        options: See `TrainOptions`.
        metadata: Goes into the head's configuration. A run is resumed only with the same.
        resume: Go on from `checkpoint.pt`, if there is one.
        progress: Called with a line of text now and then.

    Raises:
        DataError: there is nothing to train on or to judge by.
        HeadError: the checkpoint is of another run, or training diverged.
    """
    began = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    rows, held = split_rows(stores, options.heldout, options.seed)
    examples: list[Example] = [(s.tokens(r), s.features(r), r.spans[0][0]) for s, r in held]
    dtype = torch.bfloat16 if options.bfloat16 else torch.float32
    common = frequent_tokens(rows, options.vocabulary, len(readout))
    head.draft_vocab = check_draft_vocab(common, len(readout))
    device = readout.device
    head.to(device)
    small, table, full = readout[common.to(device)].to(dtype), embedding.to(dtype), readout.float()
    weights = LossWeights(
        options.regression,
        options.classification,
        options.step_weights,
        options.noise,
        feature_scale(rows, options.seed),
    )
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=options.learning_rate, betas=options.betas, weight_decay=options.weight_decay, fused=True
    )
    generator = torch.Generator().manual_seed(options.seed)
    total = max(1, round(len(plan_epoch(rows, options.batch_tokens, options.seed * 7919)) * options.epochs))
    data_tokens = sum(r.length for _, r in rows)
    trained_tokens = sum(max(0, e - 1 - s) for _, r in rows for s, e in r.spans)
    step = tokens = best_step = 0
    best: Acceptance | None = None
    state_file = output / "checkpoint.pt"
    facts = {"options": asdict(options), "rows": len(rows), "data_tokens": data_tokens}
    identity = {**facts, "metadata": metadata or {}}
    if resume and state_file.exists():
        state = torch.load(state_file, weights_only=True, map_location="cpu")
        if state.get("identity") != identity:
            raise HeadError(f"{state_file}: written with another target, options or data; use another output folder")
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"])
        step, tokens, best_step = state["step"], state["tokens"], state["best_step"]
        best = None if state["best"] is None else Acceptance(*state["best"])
    progress(
        f"{len(rows)} dialogues, {data_tokens} tokens, {trained_tokens} trained; {len(held)} held out; {total} steps; "
        f"feature scale {weights.scale:.2f}"
    )
    if step == 0 and options.linear_start:
        linear_start(head, rows, embedding, seed=options.seed)
    head.train()
    saved = time.monotonic()
    mean = [0.0] * (2 * len(options.step_weights))
    counted, since, read = 0, time.monotonic(), 0
    epoch = passed = 0  # epochs may differ in their number of batches
    while step < total:
        plan = plan_epoch(rows, options.batch_tokens, options.seed * 7919 + epoch)
        place, passed, epoch = max(0, step - passed), passed + len(plan), epoch + 1
        for indices in plan[place:]:
            if step >= total:
                break
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, total, options)
            batch = collate([rows[i] for i in indices]).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=options.bfloat16):
                losses = compute_losses(head, batch, table, small, weights, generator)
            optimizer.zero_grad()
            if losses.total.requires_grad:
                losses.total.backward()
                norm = torch.nn.utils.clip_grad_norm_(head.parameters(), options.clip)
                if not bool(torch.isfinite(norm)):
                    raise HeadError(f"diverged at step {step}: lower the learning rate, {options.learning_rate}")
                optimizer.step()
            step += 1
            count = sum(rows[i][1].length for i in indices)
            tokens, read, counted = tokens + count, read + count, counted + 1
            mean = [m + x for m, x in zip(mean, (*losses.regression, *losses.classification), strict=True)]
            if step % options.eval_every == 0 or step == total:
                rate = read / (time.monotonic() - since)
                now = simulate(head, examples, embedding, full, standard_shapes())
                if best is None or now.tau["tree"] > best.tau["tree"]:
                    best, best_step = now, step
                    save_head(head, output, metadata={**(metadata or {}), "training": {**facts, "step": step}})
                _log(output, progress, step, total, rate, [m / counted for m in mean], now)
                mean, counted, since, read = [0.0] * len(mean), 0, time.monotonic(), 0
            if time.monotonic() - saved > options.checkpoint_minutes * 60 or step == total:
                _save_state(state_file, head, optimizer, generator, identity, step, tokens, best_step, best)
                saved = time.monotonic()
    assert best is not None
    seconds = time.monotonic() - began
    return TrainResult(best, best_step, step, tokens, data_tokens, trained_tokens, seconds)


def _save_state(
    path: Path,
    head: EagleHead,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    identity: dict[str, Any],
    step: int,
    tokens: int,
    best_step: int,
    best: Acceptance | None,
) -> None:
    state = {
        "head": head.state_dict(),
        "optimizer": optimizer.state_dict(),
        "generator": generator.get_state(),
        "identity": identity,
        "step": step,
        "tokens": tokens,
        "best_step": best_step,
        "best": None if best is None else (best.tau, best.n_alpha, best.tokens),
    }
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def _log(
    output: Path,
    progress: Callable[[str], None],
    step: int,
    total: int,
    rate: float,
    losses: Sequence[float],
    now: Acceptance,
) -> None:
    half = len(losses) // 2
    line = {"step": step, "regression": losses[:half], "classification": losses[half:], **asdict(now)}
    with (output / "log.jsonl").open("a", encoding="utf-8") as f:
        f.write(json.dumps(line) + "\n")
    progress(
        f"step {step}/{total}  {rate:.0f} tokens/s  regression {_join(losses[:half])}  "
        f"classification {_join(losses[half:])}  "
        f"τ chain {now.tau['chain']:.3f} tree {now.tau['tree']:.3f}  n-α {_join(now.n_alpha)}"
    )


def _join(numbers: Sequence[float]) -> str:
    return " ".join(f"{x:.3f}" for x in numbers)
