"""From text files to a trained head: what `eaglekit train` runs.

Contract: `train_head` takes a loaded target and files, and leaves the best head in `output`. Everything on the way is
kept in `output/data` and is not made twice: `answers.jsonl` (the target's answers) and `features/` (a store). Stopped
at any time and called again with the same arguments and `resume`, it goes on where it was.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eaglekit.errors import DataError, UnsupportedModelError
from eaglekit.models.checkpoint import load_head
from eaglekit.models.head import EagleHead, HeadConfig
from eaglekit.train.dataset import Dialogue, encode_dialogue, encode_prompt, read_conversations
from eaglekit.train.features import FeatureStore, FeatureWriter, extract
from eaglekit.train.synthesize import SynthesisOptions, read_dialogues, synthesize
from eaglekit.train.trainer import TrainOptions, TrainResult, train


def train_head(
    model: Any,
    tokenizer: Any,
    *,
    target_name: str,
    files: Sequence[Path],
    output: Path,
    options: TrainOptions,
    synthesis: SynthesisOptions,
    answers: int | None = None,
    given_tokens: int = 0,
    init: Path | None = None,
    resume: bool = False,
    progress: Callable[[str], None] = print,
) -> TrainResult:
    """Make training text, read its features, train a head.

    Args:
        model: The target, a transformers causal language model in evaluation mode; it is not changed.
        tokenizer: Its tokenizer.
        target_name: Recorded in the head.
        files: JSON lines, see `dataset`. Prompts are answered by the target; dialogues are used as they are.
        output: Folder of the head and of everything on the way.
        options: Of the training.
        synthesis: Of the answering.
        answers: How many prompts, in the seed's order, the target answers; None for all.
        given_tokens: How many tokens of given dialogues are used; 0 for all.
        init: A head to start from, in place of random weights.
        resume: Go on with an interrupted training.
        progress: Called with a line of text now and then.

    Raises:
        DataError: a file cannot be used; names file and line.
        UnsupportedModelError: the target's `lm_head` is not a plain matrix.
    """
    out = model.get_output_embeddings()
    if out is None or getattr(out, "bias", None) is not None:
        raise UnsupportedModelError(
            f"{target_name}: its lm_head is not a plain matrix; training reads laws off a matrix without bias"
        )
    prompts: list[list[int]] = []
    given: list[Dialogue] = []
    longest = synthesis.max_prompt_tokens + synthesis.max_new_tokens
    for file in files:
        for messages in read_conversations(file):
            if any(m["role"] == "assistant" for m in messages):
                dialogue = encode_dialogue(tokenizer, messages, longest)
                if dialogue is not None:
                    given.append(dialogue)
            else:
                prompts.append(encode_prompt(tokenizer, messages))
    if not prompts and not given:
        raise DataError(f"{', '.join(map(str, files))}: neither prompts nor dialogues; nothing to train on")
    folder = output / "data"
    store = folder / "features"
    writer = FeatureWriter(store, model.config.get_text_config().hidden_size)
    try:
        if prompts:
            _answer(model, tokenizer, prompts, folder / "answers.jsonl", writer, synthesis, answers, progress)
        known = _known(store, writer)
        missing = [d for d in _answered(folder / "answers.jsonl") if tuple(d.ids) not in known]
        random.Random(options.seed).shuffle(given)
        total = 0
        for dialogue in given:
            if given_tokens and total >= given_tokens:
                break
            total += len(dialogue.ids)
            if tuple(dialogue.ids) not in known:
                missing.append(dialogue)
        extract(model, missing, writer, on_progress=lambda n, of: progress(f"features: {n} of {of} tokens"))
    finally:
        writer.close()
    with torch.no_grad():
        embed = model.get_input_embeddings()
        ids = torch.arange(embed.weight.shape[0], device=embed.weight.device)
        embedding = embed(ids).float().cpu()
    config = HeadConfig.for_target(model.config, embedding_size=embedding.shape[-1])
    if init is None:
        head = EagleHead(config, torch.Generator().manual_seed(options.seed))
    else:
        head = load_head(init, dtype=torch.float32).requires_grad_(True)
        options = replace(options, linear_start=False)
    return train(
        head,
        [FeatureStore(store, config.hidden_size)],
        embedding,
        out.weight.detach().float().cpu(),
        output,
        options=options,
        metadata={"target": target_name},
        resume=resume,
        progress=progress,
    )


def _answer(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    path: Path,
    writer: FeatureWriter,
    options: SynthesisOptions,
    answers: int | None,
    progress: Callable[[str], None],
) -> None:
    """Let the target answer, with the end tokens of its generation configuration."""
    ends = getattr(model, "generation_config", None) and model.generation_config.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    eos_ids = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (eos_ids or [0])[0]
    batches = None if answers is None else -(-answers // options.batch_size)
    synthesize(
        model,
        prompts,
        path,
        eos_ids=eos_ids,
        pad_id=pad_id,
        options=options,
        max_batches=batches,
        on_progress=lambda done, of, tokens: progress(f"answers: {done} of {of}, {tokens} tokens"),
        on_features=writer.append,
    )


def _answered(path: Path) -> list[Dialogue]:
    """The target's answers as dialogues."""
    if not path.exists():
        return []
    return [
        Dialogue([*prompt, *answer], [(len(prompt), len(prompt) + len(answer))], temperature == 0)
        for prompt, answer, temperature in read_dialogues(path)
    ]


def _known(store: Path, writer: FeatureWriter) -> set[tuple[int, ...]]:
    """Token ids of the dialogues that have features already."""
    if not writer.count:
        return set()
    stored = FeatureStore(store, writer.hidden_size)
    return {tuple(stored.tokens(row).tolist()) for row in stored.dialogues}
