"""From text files to a trained head: what `eaglekit train` runs.

Contract: `train_head` takes a proven target and files, and leaves the best head in `output`. Everything on the way is
kept in `output/data` and is not made twice: `answers.jsonl` (the target's answers) or `talks.jsonl` (dialogues that it
wrote by itself, where no files are given), `features/` (a store) and `source.json` (what these were made from: a call
with another target or other text is refused). Stopped at any time and called again with the same arguments and
`resume`, it goes on where it was. More answers or more given text may be asked for later, or less: a head is trained on
the dialogues that its own call asks for.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eaglekit.errors import DataError, InputError, UnsupportedModelError
from eaglekit.jsonl import read_lines
from eaglekit.models.checkpoint import check_fit, load_head
from eaglekit.models.head import EagleHead, HeadConfig
from eaglekit.models.hf import HFTarget
from eaglekit.train.dataset import Dialogue, TrainingText, read_training_text
from eaglekit.train.features import FeatureStore, FeatureWriter, extract
from eaglekit.train.options import SelfTalkOptions, SynthesisOptions, TrainOptions
from eaglekit.train.self_talk import self_talk
from eaglekit.train.synthesize import plan_batches, read_dialogues, synthesize
from eaglekit.train.trainer import TrainResult, train
from eaglekit.train.tries import read_tries


def train_head(
    target: HFTarget,
    tokenizer: Any,
    *,
    target_name: str,
    files: Sequence[Path],
    output: Path,
    options: TrainOptions,
    synthesis: SynthesisOptions,
    answers: int | None = None,
    given_tokens: int = 0,
    talk: SelfTalkOptions | None = None,
    skip_bad: bool = False,
    init: Path | None = None,
    resume: bool = False,
    progress: Callable[[str], None] = print,
) -> TrainResult:
    """Make training text, read its features, train a head on the target's device.

    Args:
        target: The target; it is not changed.
        tokenizer: Its tokenizer.
        target_name: Recorded in the head.
        files: See `forms`. Prompts are answered by the target, dialogues and texts are used as they are; where there
            are no prompts, the target answers openings of those, to judge the head by. Without files the target writes
            dialogues by itself.
        output: Folder of the head and of everything on the way.
        options: Of the training.
        synthesis: Of the answering.
        answers: How many prompts, in the seed's order, the target answers; None for all, of openings for as many as
            are held out. Without files, how many dialogues it writes.
        given_tokens: How many tokens of given dialogues and texts are used; 0 for all.
        talk: Of the dialogues that the target writes by itself.
        skip_bad: Leave out rows of `files` that cannot be read, and say how many.
        init: A head to start from, in place of random weights.
        resume: Go on with an interrupted training.
        progress: Called with a line of text now and then.

    Raises:
        DataError: a file cannot be used, names file and line; or `output/data` is of another target or other text.
        InputError: there are neither files nor `answers`; or the target cannot talk by itself.
        HeadError: `init` is no head, or does not fit the target; and see `train`.
        UnsupportedModelError: the target's `lm_head` is not a matrix.
    """
    model, info = target.model, target.info
    talk = talk or SelfTalkOptions()
    if not files and answers is None:
        raise InputError(
            "train: nothing to train on; expected files of text (--data FILE), or how many dialogues the target shall "
            "write by itself (--synthesize N)"
        )
    readout = read_readout(target, progress)
    if init is None:
        config = HeadConfig.for_target(
            model.config,
            hidden_size=info.hidden_size,
            embedding_size=info.embedding_size,
            vocab_size=info.vocab_size,
        )
        head = EagleHead(config, torch.Generator().manual_seed(options.seed))
    else:
        head = load_head(init, dtype=torch.float32).requires_grad_(True)
        check_fit(head.config, info)
        options = replace(options, linear_start=False)
    text = TrainingText()
    if files:
        longest = synthesis.max_prompt_tokens + synthesis.max_new_tokens
        text = read_training_text(
            tokenizer, files, max_prompt_tokens=synthesis.max_prompt_tokens, max_tokens=longest, skip_bad=skip_bad
        )
        progress(text.summary(longest))
    given = text.given
    folder = output / "data"
    source = {
        "target": target_name,
        "hidden size": info.hidden_size,
        "vocabulary size": info.vocab_size,
        "weights": _digest_of_weights(model),
        "data files": [_digest_of_file(file) for file in files],
        "tokens of the data": _digest_of_ids([*text.prompts, *(d.ids for d in given)]),
        **asdict(synthesis),
        **({} if files else {"chat template": str(tokenizer.chat_template), **asdict(talk)}),
    }
    _claim(folder, source)
    store = folder / "features"
    writer = FeatureWriter(store, info.hidden_size)
    try:
        if files:
            prompts = text.prompts or text.openings
            most = answers if text.prompts or answers is not None else options.heldout
            wanted = _answer(target, tokenizer, prompts, folder / "answers.jsonl", writer, synthesis, most, progress)
        else:
            wanted = _talk(target, tokenizer, answers or 0, folder / "talks.jsonl", writer, synthesis, talk, progress)
        random.Random(options.seed).shuffle(given)
        total = 0
        for dialogue in given:
            if given_tokens and total >= given_tokens:
                break
            total += len(dialogue.ids)
            wanted.setdefault(tuple(dialogue.ids), dialogue)
        known = FeatureStore(store, info.hidden_size).by_tokens() if writer.count else {}
        missing = [dialogue for ids, dialogue in wanted.items() if ids not in known]
        extract(model, missing, writer, on_progress=lambda n, of: progress(f"features: {n} of {of} tokens"))
    finally:
        writer.close()
    stored = FeatureStore(store, info.hidden_size)
    stored.dialogues = [row for ids, row in stored.by_tokens().items() if ids in wanted]
    return train(
        head,
        [stored],
        read_embedding(target),
        readout,
        output,
        options=options,
        metadata={"target": target_name},
        resume=resume,
        progress=progress,
    )


@torch.no_grad()
def read_embedding(target: HFTarget) -> Tensor:
    """float32 [vocabulary, E], the target's input embeddings."""
    rows = target.model.get_input_embeddings().weight.shape[0]
    return target.embed(torch.arange(rows, device=target.info.device)).float()


@torch.no_grad()
def read_readout(target: HFTarget, progress: Callable[[str], None]) -> Tensor:
    """W, float32 [V, H], with which the target's law is softmax(W f): its output matrix times its logits' scale.

    Soft-capped logits are not linear in f: W is what they are without the cap, which is reported.

    Raises:
        UnsupportedModelError: there is no such matrix.
    """
    info = target.info
    weight = getattr(target.model.get_output_embeddings(), "weight", None)
    shape = (info.vocab_size, info.hidden_size)
    refusal = UnsupportedModelError(
        f"{info.name}: no head can be trained for it: its lm_head is not a plain matrix {list(shape)} without bias, "
        "which training reads laws off; use another target"
    )
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or tuple(weight.shape) != shape:
        raise refusal
    probe = torch.randn(8, info.hidden_size, generator=torch.Generator().manual_seed(0)).to(info.device, weight.dtype)
    probe = probe / (probe @ weight.T).abs().max()

    def fit(size: float) -> tuple[float, float]:
        """The factor from products with the matrix, `size` at most, to logits; what is left, relative to these."""
        products, logits = (probe * size @ weight.T).float(), target.lm_head(probe * size).float()
        factor = (products * logits).sum() / products.square().sum()
        return float(factor), float((logits - factor * products).norm() / logits.norm())

    factor, left = fit(0.1)  # far below any cap
    if not left < 0.05:
        raise refusal
    if abs(fit(1000.0)[0] / factor - 1) > 0.02:
        progress(f"{info.name} soft-caps its logits; training leaves the cap out, which can only cost acceptance")
    plain = weight.detach().float()
    return plain if abs(factor - 1) < 1e-3 else plain * factor  # rounding makes a factor of 1 inexact


def _claim(folder: Path, source: Mapping[str, Any]) -> None:
    """Note in `folder` what its files are made from, or see that they are made from the same.

    Raises:
        DataError: they are not; says what differs.
    """
    file = folder / "source.json"
    now = json.loads(json.dumps(source))
    if file.exists():
        there: dict[str, Any] = next((row for _, row in read_lines(file)), {})
        wrong = [_difference(key, there.get(key), now.get(key)) for key in {**now, **there}]
        differences = ", ".join(text for text in wrong if text)
    else:
        made = any((folder / name).exists() for name in ("answers.jsonl", "features"))
        differences = "source.json is missing" if made else ""
    if differences:
        raise DataError(
            f"{folder}: made for another target or from other data ({differences}); "
            f"use another --output, or delete {folder}"
        )
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(source) + "\n", encoding="utf-8")
        os.replace(temporary, file)


def _difference(key: str, there: Any, now: Any) -> str:
    """Nothing where both are the same; values that nobody could read are left out."""
    if there == now:
        return ""
    return key if max(len(str(there)), len(str(now))) > 40 else f"{key} {there} there, {now} now"


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _digest_of_ids(rows: Iterable[Sequence[int]]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(array("q", [len(row), *row]).tobytes())
    return digest.hexdigest()


def _digest_of_weights(model: Any) -> str:
    """Of a few numbers of each: names alone do not tell a fine-tuned model from the one that it was made from."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(name.encode() + weight.detach().flatten()[:64].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _answer(
    target: HFTarget,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    path: Path,
    writer: FeatureWriter,
    options: SynthesisOptions,
    answers: int | None,
    progress: Callable[[str], None],
) -> dict[tuple[int, ...], Dialogue]:
    """Let the target answer, with the end tokens that decoding stops at: token ids -> each dialogue asked for."""
    if not prompts:
        return {}
    eos_ids = target.defaults(tokenizer).eos_ids
    batches = None if answers is None else -(-answers // options.batch_size)
    synthesize(
        target.model,
        prompts,
        path,
        eos_ids=eos_ids,
        pad_id=pad_id(tokenizer, eos_ids),
        options=options,
        max_batches=batches,
        on_progress=lambda done, of, tokens: progress(f"answers: {done} of {of}, {tokens} tokens"),
        on_features=writer.append,
    )
    planned = {tuple(prompts[i]) for _, batch in plan_batches(prompts, options)[:batches] for i in batch}
    wanted: dict[tuple[int, ...], Dialogue] = {}
    for prompt, answer, temperature in read_dialogues(path) if path.exists() else ():
        if tuple(prompt) in planned:
            ids = [*prompt, *answer]
            wanted.setdefault(tuple(ids), Dialogue(ids, [(len(prompt), len(ids))], temperature == 0))
    return wanted


def _talk(
    target: HFTarget,
    tokenizer: Any,
    count: int,
    path: Path,
    writer: FeatureWriter,
    synthesis: SynthesisOptions,
    options: SelfTalkOptions,
    progress: Callable[[str], None],
) -> dict[tuple[int, ...], Dialogue]:
    """Let the target write `count` dialogues: token ids -> each of them."""
    eos_ids = target.defaults(tokenizer).eos_ids
    report = self_talk(
        target.model,
        tokenizer,
        path,
        count,
        eos_ids=eos_ids,
        pad_id=pad_id(tokenizer, eos_ids),
        synthesis=synthesis,
        options=options,
        max_length=target.info.max_length,
        on_progress=lambda report: progress(f"self-talk: {report.kept} of {count} dialogues, {report.tokens} tokens"),
        on_features=writer.append,
    )
    progress(report.summary())
    dialogues = [done.dialogue for done in read_tries(path) if done.dialogue is not None][:count]
    return {tuple(dialogue.ids): dialogue for dialogue in dialogues}


def pad_id(tokenizer: Any, eos_ids: Sequence[int]) -> int:
    """The id that pads batches: the tokenizer's, else one that ends answers."""
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (*eos_ids, 0)[0])
