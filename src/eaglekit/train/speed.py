"""How fast training is and how much memory it takes here, on text that means nothing.

Contract: `measure_training` is to run in a process of its own, whose peak of memory it reports. Dialogues are random
ids with the sizes of real ones, features are what the target says to them, the recipe is the default one: time and
memory do not depend on what the numbers mean. A training reads features from disk, or asks the target for those of
every batch: `features_tokens_per_second` is what the latter makes alone.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eaglekit.models.hf import HFTarget
from eaglekit.train.features.live import extract
from eaglekit.train.features.store import FeatureFacts, FeatureStore, FeatureWriter
from eaglekit.train.head.trainer import peak_memory_mb, train
from eaglekit.train.options import TrainOptions
from eaglekit.train.pipeline import new_head, read_embedding, read_readout
from eaglekit.train.text.dataset import Dialogue

_LENGTHS = (96, 160, 256, 384)  # tokens of a dialogue; its last two thirds are the answer


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
    facts = FeatureFacts(target.info.hidden_size)
    with tempfile.TemporaryDirectory() as folder:
        writer = FeatureWriter(Path(folder, "features"), facts)
        began = time.monotonic()
        extract(target, dialogues, writer.append)
        reading = time.monotonic() - began
        writer.close()
        # What tables and blocks of the loss take comes on top of the target.
        before = peak_memory_mb(target.info.device)
        never = 1_000_000
        made = replace(given, epochs=1.0, heldout=1, eval_every=never, patience=0, log_every=never)
        result = train(
            new_head(target, 0, {}),
            FeatureStore(Path(folder, "features"), facts),
            read_embedding(target),
            read_readout(target, lambda line: None),
            Path(folder, "head"),
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
