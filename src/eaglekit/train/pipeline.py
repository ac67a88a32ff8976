"""From text files to a trained head: what `eaglekit train` runs.

Contract: `train_head` takes a proven target and files, and leaves the best head in `output`. Everything on the way is
kept in `output/data` and is not made twice: `answers.jsonl` (the target's answers) or `talks.jsonl` (dialogues that it
wrote by itself, where no files are given), `features/` (a store) and `source.json` (what these were made from: a call
with another target or other text is refused). Stopped at any time and called again with the same arguments and
`resume`, it goes on where it was. More answers or more given text may be asked for later, or less: a head is trained on
the dialogues that its own call asks for.

Features are kept on disk if they fit a limit, or read on the fly; a head's weights do not depend on which. They come
for free while the target answers, but only if they are sure to fit whatever the answers' lengths. Which of the two
follows from the arguments alone, so that a call that goes on with an earlier one decides as that one did.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eaglekit.errors import DataError, InputError, UnsupportedModelError
from eaglekit.models.checkpoint import check_fit, load_head, read_config
from eaglekit.models.head import EagleHead, HeadConfig, head_options
from eaglekit.models.hf import HFTarget
from eaglekit.train.features.live import LiveFeatures, extract
from eaglekit.train.features.provenance import claim, describe, digest_of_data, digest_of_ids
from eaglekit.train.features.store import FeatureFacts, FeatureSink, FeatureSource, FeatureStore, FeatureWriter, Subset
from eaglekit.train.head.processes import Processes
from eaglekit.train.head.trainer import Status, TrainResult, check_output, train
from eaglekit.train.options import FEATURE_CACHE_GB, HeadOptions, SelfTalkOptions, SynthesisOptions, TrainOptions
from eaglekit.train.report.card import CardInfo, Count, DataFacts, write_card
from eaglekit.train.text.dataset import Dialogue, TrainingText, count_of, read_training_text
from eaglekit.train.text.overlap import find_overlaps, training_texts
from eaglekit.train.text.self_talk import self_talk
from eaglekit.train.text.synthesize import plan_batches, read_dialogues, synthesize
from eaglekit.train.text.tries import read_tries

Wanted = dict[tuple[int, ...], Dialogue]
"""Token ids -> the dialogue, in the order in which a trainer gets them."""


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
    feature_cache_gb: float = FEATURE_CACHE_GB,
    shape: HeadOptions | None = None,
    init: Path | None = None,
    resume: bool = False,
    processes: Processes | None = None,
    card: CardInfo | None = None,
    progress: Callable[[str], None] = print,
    on_step: Callable[[Status], None] | None = None,
) -> TrainResult:
    """Make training text, read its features, train a head on the target's device.

    Args:
        target: The target; it is not changed.
        tokenizer: Its tokenizer.
        target_name: Recorded in the head.
        files: See `prepare`.
        output: Folder of the head and of everything on the way.
        options: Of the training.
        synthesis: Of the answering.
        answers: See `prepare`.
        given_tokens: See `prepare`.
        talk: See `prepare`.
        skip_bad: See `prepare`.
        feature_cache_gb: See `prepare`.
        shape: Of a new head.
        init: A head to start from, in place of random weights.
        resume: Go on with an interrupted training.
        processes: Who trains along, see `train`. The main one makes the data; the target is on each one's device.
        card: What the head's card says besides what the run knows; one is written in any case, see `write_card`.
        progress: Called with a line of text now and then; by the main process alone.
        on_step: See `train`.

    Raises:
        DataError: a file cannot be used, names file and line; or `output/data` is of another target or other text.
        InputError: see `prepare` and `head_options`; or `init` and `shape` exclude each other.
        HeadError: `init` is no head, or does not fit the target; and see `train`.
        UnsupportedModelError: the target's `lm_head` is not a matrix, or its layers are no wider features.
    """
    processes = processes or Processes(target.info.device)
    if not processes.main:
        progress = _silent
    check_output(output, resume)
    readout = read_readout(target, progress)
    if init is None:
        head = new_head(target, options.seed, shape_of(target, shape or HeadOptions()))
    else:
        if shape not in (None, HeadOptions()):
            raise InputError(f"train: the head of {init} has a shape of its own, got {shape}; leave out one of the two")
        head = load_head(init, dtype=torch.float32).requires_grad_(True)
        check_fit(head.config, target.info)
        made_for = (read_config(init).get("eaglekit") or {}).get("target")
        if made_for not in (None, target_name):
            progress(f"{init}: this head was made for {made_for}; it is gone on with for {target_name}")
        options = replace(options, linear_start=False)
    with processes.main_first():
        prepared = prepare(
            target,
            tokenizer,
            target_name=target_name,
            files=files,
            folder=output / "data",
            synthesis=synthesis,
            answers=answers,
            heldout=options.heldout,
            given_tokens=given_tokens,
            talk=talk,
            skip_bad=skip_bad,
            layers=head.config.feature_layers,
            feature_cache_gb=feature_cache_gb,
            seed=options.seed,
            main=processes.main,
            progress=progress,
        )
    overlaps = []
    if card is not None and card.evaluation and processes.main:
        overlaps = find_overlaps(card.evaluation, training_texts(files, output / "data" / "talks.jsonl"))
        for overlap in overlaps:
            progress(overlap.line())
    result = train(
        head,
        prepared.source,
        read_embedding(target),
        readout,
        output,
        options=options,
        metadata={"target": target_name},
        resume=resume,
        processes=processes,
        progress=progress,
        on_step=on_step,
    )
    if processes.main and (result.new_steps or not (output / "README.md").exists()):
        write_card(output, data=prepared.data, info=card, files=files, init=init, overlaps=overlaps, progress=progress)
    return result


def _silent(line: str) -> None:
    """What other processes than the main one say."""


def shape_of(target: HFTarget, shape: HeadOptions) -> dict[str, Any]:
    """What a head of this shape has otherwise than `HeadConfig.for_target` says."""
    usual = HeadConfig.for_target(target.model.config)
    return head_options(
        num_target_layers=target.info.num_layers, intermediate_size=usual.intermediate_size, **asdict(shape)
    )


def new_head(target: HFTarget, seed: int, overrides: Mapping[str, Any]) -> EagleHead:
    """A head for the target, with the seed's weights and what `overrides` of `HeadConfig` say."""
    info = target.info
    sizes = {"hidden_size": info.hidden_size, "embedding_size": info.embedding_size, "vocab_size": info.vocab_size}
    config = HeadConfig.for_target(target.model.config, **{**sizes, **overrides})
    return EagleHead(config, torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Prepared:
    """What `prepare` made.

    Attributes:
        source: Dialogues and features.
        facts: What the features are of.
        cached: Whether they are on disk.
        data: What the dialogues are.
    """

    source: FeatureSource
    facts: FeatureFacts
    cached: bool
    data: DataFacts


def prepare(
    target: HFTarget,
    tokenizer: Any,
    *,
    target_name: str,
    files: Sequence[Path],
    folder: Path,
    synthesis: SynthesisOptions,
    answers: int | None,
    heldout: int,
    given_tokens: int = 0,
    talk: SelfTalkOptions | None = None,
    skip_bad: bool = False,
    layers: Sequence[int] = (),
    feature_cache_gb: float = FEATURE_CACHE_GB,
    seed: int = 0,
    main: bool = True,
    progress: Callable[[str], None] = print,
) -> Prepared:
    """Make training text and, if they fit, its features on disk; what is there already is not made again.

    Args:
        target: The target; it is not changed.
        tokenizer: Its tokenizer.
        target_name: Recorded in the folder.
        files: See `forms`. Prompts are answered by the target, dialogues and texts are used as they are; where there
            are no prompts, the target answers openings of those, to judge the head by. Without files the target writes
            dialogues by itself.
        folder: Of everything that is made.
        synthesis: Of the answering.
        answers: How many prompts, in the seed's order, the target answers; None for all, of openings for `heldout`.
            Without files, how many dialogues it writes.
        heldout: See `answers`.
        given_tokens: How many tokens of given dialogues and texts are used; 0 for all.
        talk: Of the dialogues that the target writes by itself.
        skip_bad: Leave out rows of `files` that cannot be read, and say how many.
        layers: Residual streams that go with the features, see `FeatureFacts`.
        feature_cache_gb: Features of this call's dialogues are kept on disk if they take at most so many GB (10^9
            bytes), else read on the fly; 0 for always the latter.
        seed: Of the choice of given dialogues.
        main: False in the other processes of a run: nothing is written; everything is there, made by the main one.
        progress: Called with a line of text now and then.

    Raises:
        DataError: a file cannot be used, names file and line; or `folder` is of another target or other text, or a
            file of it is damaged.
        InputError: there are neither files nor `answers`; or the target cannot talk by itself; or there is not room
            for answers in its context; or a number makes no sense.
    """
    info, talk = target.info, talk or SelfTalkOptions()
    if not files and answers is None:
        raise InputError(
            "train: nothing to train on; expected files of text (--data FILE), or how many dialogues the target shall "
            "write by itself (--synthesize N)"
        )
    if not 0 <= feature_cache_gb < math.inf:
        raise InputError(f"--feature-cache-gb {feature_cache_gb}: expected a number of GB; 0 keeps nothing on disk")
    asked, synthesis = synthesis, _within_context(synthesis, info.max_length)
    text = TrainingText()
    longest = synthesis.max_prompt_tokens + synthesis.max_new_tokens
    if files:
        text = read_training_text(
            tokenizer, files, max_prompt_tokens=synthesis.max_prompt_tokens, max_tokens=longest, skip_bad=skip_bad
        )
        progress(text.summary(longest))
    facts = describe(target, tokenizer, target_name, layers)
    source = {
        "target": target_name,
        "hidden size": info.hidden_size,
        "vocabulary size": info.vocab_size,
        "weights": facts.weights,
        "data files": [digest_of_data(file) for file in files],
        "tokens of the data": digest_of_ids([*text.prompts, *(d.ids for d in text.given)]),
        **asdict(asked),
        **({} if files else {"chat template": str(tokenizer.chat_template), **asdict(talk)}),
    }
    claim(folder, source, main)
    given = _chosen(text.given, given_tokens, seed)
    prompts = text.prompts or text.openings
    most = answers if text.prompts or answers is not None else heldout
    planned = [prompts[i] for _, batch in plan_batches(prompts, synthesis, most) for i in batch]

    limit, cost = feature_cache_gb * 1e9, 2 * facts.width
    tokens = sum(len(d.ids) for d in given) + sum(len(p) + synthesis.max_new_tokens for p in planned)
    tokens += 0 if files else (answers or 0) * min(talk.max_tokens, info.max_length)
    store, cached = folder / "features", tokens * cost <= limit
    if main:
        progress(_estimate(tokens, facts.width, feature_cache_gb, cached))
    writer = FeatureWriter(store, facts) if main and cached else None
    sink = None if writer is None or layers else writer.append  # what comes for free has no streams
    try:
        if not files:
            wanted = _talk(target, tokenizer, answers or 0, folder, sink, synthesis, talk, main, progress)
        else:
            wanted = _answer(target, tokenizer, prompts, planned, most, folder, sink, synthesis, main, progress)
        own = list(wanted.values())
        for dialogue in given:
            wanted.setdefault(tuple(dialogue.ids), dialogue)
        tokens = sum(map(len, wanted))
        if not cached and tokens * cost <= limit:
            cached = True
            progress(f"features: {tokens} tokens after all, {tokens * cost / 1e9:.3g} GB, which are kept on disk")
        if main and cached:
            writer = writer or FeatureWriter(store, facts)
            known = FeatureStore(store, facts, verify=False).by_tokens() if writer.count else {}
            missing = [dialogue for ids, dialogue in wanted.items() if ids not in known]
            extract(
                target,
                missing,
                writer.append,
                layers=layers,
                on_progress=lambda n, of: progress(f"features: {n} of {of} tokens"),
            )
    finally:
        if writer is not None:
            writer.close()
    data = DataFacts(
        text.summary(longest).removeprefix("data: ") if files else "",
        greedy=Count.of(d for d in own if d.greedy),
        sampled=Count.of(d for d in own if not d.greedy),
        given=Count.of(list(wanted.values())[len(own) :]),
    )
    if cached:
        return Prepared(_stored(store, facts, wanted, verify=not main), facts, cached, data)
    if main and (store / "manifest.json").exists():
        progress(f"features: {store}, of an earlier call, is not used; the numbers are the same. It may be deleted")
    return Prepared(LiveFeatures(target, list(wanted.values()), layers), facts, cached, data)


def _within_context(options: SynthesisOptions, context: int) -> SynthesisOptions:
    """The options with prompts that leave room for answers.

    Raises:
        InputError: there is not room for a prompt.
    """
    room = context - options.max_new_tokens
    if room < 1:
        raise InputError(
            f"answers of {options.max_new_tokens} tokens do not fit the target's context of {context}; "
            "ask for fewer with --max-new-tokens"
        )
    return replace(options, max_prompt_tokens=min(options.max_prompt_tokens, room))


def _chosen(given: Sequence[Dialogue], most: int, seed: int) -> list[Dialogue]:
    """Dialogues of about `most` tokens (0: all), in the seed's order."""
    order = list(given)
    random.Random(seed).shuffle(order)
    return order[: count_of((len(d.ids) for d in order), most or math.inf)]


def _estimate(tokens: int, width: int, limit: float, cached: bool) -> str:
    """A line for people."""
    size = f"features: at most {tokens} tokens x {width} x 2 bytes = {tokens * width * 2 / 1e9:.3g} GB on disk"
    if cached:
        return f"{size}, within --feature-cache-gb {limit:g}: kept there"
    memory = f"{max(1, round(tokens * 4 / 1e6))} MB of memory for ids"
    less = "unless it turns out less, " if limit else ""
    return (
        f"{size}, over --feature-cache-gb {limit:g}: {less}read on the fly, which takes {memory} and a pass of the "
        "target over every batch"
    )


def _stored(path: Path, facts: FeatureFacts, wanted: Wanted, verify: bool) -> Subset:
    """The store, with the dialogues of `wanted` alone, as they are there and in that order.

    Raises:
        DataError: see `FeatureStore`; or one is missing.
    """
    store = FeatureStore(path, facts, verify)
    known = store.by_tokens()
    missing = sum(ids not in known for ids in wanted)
    if missing:
        raise DataError(f"{path}: {missing} of {len(wanted)} dialogues are missing; run the main process first")
    rows = [replace(known[ids], spans=tuple(d.spans), greedy=d.greedy) for ids, d in wanted.items()]
    return Subset(store, rows)


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


def _answer(
    target: HFTarget,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    planned: Sequence[Sequence[int]],
    most: int | None,
    folder: Path,
    sink: FeatureSink | None,
    options: SynthesisOptions,
    main: bool,
    progress: Callable[[str], None],
) -> Wanted:
    """Let the target answer, if `main`, with the end tokens that decoding stops at: dialogues of `planned` prompts."""
    path = folder / "answers.jsonl"
    if prompts and main:
        eos_ids = target.defaults(tokenizer).eos_ids
        synthesize(
            target.model,
            prompts,
            path,
            eos_ids=eos_ids,
            pad_id=pad_id(tokenizer, eos_ids),
            options=options,
            most=most,
            on_progress=lambda done, of, tokens: progress(f"answers: {done} of {of}, {tokens} tokens"),
            on_features=sink,
        )
    asked = set(map(tuple, planned))
    wanted: Wanted = {}
    for prompt, answer, temperature in read_dialogues(path) if path.exists() else ():
        if tuple(prompt) in asked:
            ids = [*prompt, *answer]
            wanted.setdefault(tuple(ids), Dialogue(ids, [(len(prompt), len(ids))], temperature == 0))
    return wanted


def _talk(
    target: HFTarget,
    tokenizer: Any,
    count: int,
    folder: Path,
    sink: FeatureSink | None,
    synthesis: SynthesisOptions,
    options: SelfTalkOptions,
    main: bool,
    progress: Callable[[str], None],
) -> Wanted:
    """Let the target write `count` dialogues, if `main`; these dialogues."""
    path = folder / "talks.jsonl"
    if main:
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
            on_progress=lambda now: progress(f"self-talk: {now.kept} of {count} dialogues, {now.tokens} tokens"),
            on_features=sink,
        )
        progress(report.summary())
    dialogues = [done.dialogue for done in read_tries(path) if done.dialogue is not None][:count]
    return {tuple(dialogue.ids): dialogue for dialogue in dialogues}


def pad_id(tokenizer: Any, eos_ids: Sequence[int]) -> int:
    """The id that pads batches: the tokenizer's, else one that ends answers."""
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (*eos_ids, 0)[0])
