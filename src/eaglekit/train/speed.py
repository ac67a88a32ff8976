"""How fast training is and how much memory it takes here, on text that means nothing.

Contract: `measure_training` is to run in a process of its own, whose peak of memory it reports. Dialogues are random
ids with the sizes of real ones, features are what the target says to them, the recipe is the default one: time and
memory do not depend on what the numbers mean. A training reads features from disk, or asks the target for those of
every batch: `features_tokens_per_second` is what the latter makes alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eaglekit.models.hf import HFTarget
from eaglekit.train.dataset import Dialogue
from eaglekit.train.features import FEATURE_DTYPE, StoredDialogue
from eaglekit.train.live import extract
from eaglekit.train.options import TrainOptions
from eaglekit.train.pipeline import new_head, read_embedding, read_readout
from eaglekit.train.trainer import peak_memory_mb, train

_LENGTHS = (96, 160, 256, 384)  # tokens of a dialogue; its last two thirds are the answer


class _Held:
    """Dialogues with their features in memory. See `FeatureSource`."""

    def __init__(self, dialogues: Sequence[Dialogue], features: Sequence[Tensor]) -> None:
        self._ids = [torch.tensor(d.ids) for d in dialogues]
        self._features = [f[: len(d.ids) - 1].to(FEATURE_DTYPE) for d, f in zip(dialogues, features, strict=True)]
        self.dialogues: Sequence[StoredDialogue] = [
            StoredDialogue(i, len(d.ids), tuple(d.spans), d.greedy) for i, d in enumerate(dialogues)
        ]

    def tokens(self, row: StoredDialogue) -> Tensor:
        return self._ids[row.number]

    def read(self, rows: Sequence[StoredDialogue]) -> list[Tensor]:
        return [self._features[row.number].clone() for row in rows]


def measure_training(target: HFTarget, *, steps: int = 12, options: TrainOptions | None = None) -> dict[str, Any]:
    """Train a new head for some steps.

    Args:
        target: Gives features, embeddings and the read-out; training runs on its device.
        steps: Optimizer steps, about.
        options: Of the training, whose lengths do not count; None: the defaults.

    Returns:
        Tokens per second of training and of reading features, peak memory in MB before training (target, features) and
        at its end, steps, tokens, and what they were measured with.
    """
    given = options or TrainOptions()
    generator = torch.Generator().manual_seed(0)
    dialogues: list[Dialogue] = []
    total = 0
    while total < steps * given.batch_tokens:
        n = min(_LENGTHS[len(dialogues) % len(_LENGTHS)], target.info.max_length)
        ids = torch.randint(target.info.vocab_size, (n,), generator=generator).tolist()
        dialogues.append(Dialogue(ids, [(n // 3, n)], len(dialogues) < 2))
        total += n
    features: list[Tensor] = []
    began = time.monotonic()
    extract(target, dialogues, lambda _, values: features.append(values.to(FEATURE_DTYPE)))
    reading = time.monotonic() - began
    # What tables and blocks of the loss take comes on top of the target.
    before = peak_memory_mb(target.info.device)
    with tempfile.TemporaryDirectory() as folder:
        never = 1_000_000
        made = replace(given, epochs=1.0, heldout=1, eval_every=never, patience=0, log_every=never)
        result = train(
            new_head(target, 0, {}),
            _Held(dialogues, features),
            read_embedding(target),
            read_readout(target, lambda line: None),
            Path(folder),
            options=made,
            progress=lambda line: None,
        )
    return {
        "tokens_per_second": result.tokens_per_second,
        "features_tokens_per_second": total / reading,
        "peak_memory_mb": result.peak_memory_mb,
        "peak_memory_mb_before": before,
        "steps": result.steps,
        "tokens": result.tokens,
        "batch_tokens": made.batch_tokens,
        "accumulate": made.accumulate,
        "vocabulary": made.vocabulary,
        "unrolled_steps": len(made.step_weights),
        "bfloat16": made.bfloat16,
        "threads": torch.get_num_threads(),
    }
