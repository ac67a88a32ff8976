"""Studies: heads that differ in one thing, trained on the same data and judged by the same answers.

Contract: `Study.run` leaves a table of `variations` in its folder, for people and as JSON. What was made is found
again: stopped at any time and called again with the same arguments, a study goes on where it was, and studies of
several kinds share a folder, its data and its baseline.

    data/             text and features, see `pipeline`; `text` has its own, text/data/, and text/*.jsonl it is made of
    judging/          the target's greedy answers to the prompts that heads are judged by, with features: a store
    runs/<name>/      a head, as `train` leaves it; `source.json`, what it is made of; `result.json` once it is done
    <kind>.json       every number
    <kind>.md         the table; `curve.png` besides, where matplotlib is installed

All runs of a study hold out the same answers of the training data to choose their best step by, at most a tenth of
what the smallest of them is trained on; no dialogue with the prompt of one that is held out is trained on. The numbers
of the table are of the prompts given for that, which are no part of the training data.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eaglekit.errors import DataError, InputError
from eaglekit.models.checkpoint import load_head
from eaglekit.models.hf import HFTarget
from eaglekit.models.store import write_json
from eaglekit.train.features.provenance import claim, digest_of_ids, shape_of_head
from eaglekit.train.features.store import (
    FeatureFacts,
    FeatureSource,
    FeatureStore,
    FeatureWriter,
    StoredDialogue,
    Subset,
)
from eaglekit.train.head.processes import Processes
from eaglekit.train.head.trainer import split_rows, train
from eaglekit.train.judge.eval_head import answer_prompts
from eaglekit.train.judge.evaluate import Example, examples_of
from eaglekit.train.judge.variations import SMALLEST_SHARE, Variation, variations
from eaglekit.train.options import SynthesisOptions, TrainOptions
from eaglekit.train.pipeline import new_head, prepare, read_embedding, read_readout
from eaglekit.train.report.curve import draw
from eaglekit.train.report.study_report import judge, markdown, report_of
from eaglekit.train.text.dataset import Dialogue, RefusedError, count_of, cut_dialogue, encode_dialogue, encode_prompt
from eaglekit.train.text.forms import Message, read_rows

FURTHER = (10_000_000, 60_000_000)
"""Numbers of training tokens that a learning curve is extrapolated to; 60 million are about the paper's."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class _Data:
    """What a study's heads are trained on and judged by.

    Attributes:
        source: All dialogues.
        held: Those that no head is trained on.
        pools: The others, by origin ("" for all), in the seed's order.
        tokens: A share of 1: tokens, prompts included.
        examples: The answers that heads are judged by.
        embedding: See `train`.
        readout: See `train`.
    """

    source: FeatureSource
    held: list[StoredDialogue]
    pools: dict[str, list[StoredDialogue]]
    tokens: int
    examples: list[Example]
    embedding: Tensor
    readout: Tensor

    def rows(self, variation: Variation) -> list[StoredDialogue]:
        """What it is trained on: a smaller share is a part of every greater one."""
        return _first(self.pools[variation.origin], variation.share * self.tokens)


@dataclass(frozen=True)
class Study:
    """What the studies of a folder share.

    Attributes:
        target: The target; it is not changed.
        tokenizer: Its tokenizer.
        target_name: Recorded in the heads.
        files: See `prepare`; of `text`, dialogues.
        prompts: Token ids of the prompts that heads are judged by, unlike the training text.
        output: The folder.
        options: Of the baseline's training.
        synthesis: Of the answering; its longest answer is that of judging, too.
        progress: Called with a line of text now and then.
    """

    target: HFTarget
    tokenizer: Any
    target_name: str
    files: Sequence[Path]
    prompts: Sequence[Sequence[int]]
    output: Path
    options: TrainOptions
    synthesis: SynthesisOptions
    progress: Progress = print

    def run(
        self, kind: str, *, tokens: int = 0, answers: int | None = None, only: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Train and judge every variation, and write the tables.

        Args:
            kind: One of `KINDS`.
            tokens: Of the dialogues that the baseline is trained on, prompts included; 0 for all.
            answers: See `prepare`; means nothing for `text`.
            only: Names of the variations to run; empty for all. The table has those and the ones that are done.

        Returns:
            What `<kind>.json` holds.

        Raises:
            InputError: there is no such study or variation; and see `prepare`.
            DataError: the folder is of another target, other text or other options; and see `prepare`, `train`.
        """
        made = variations(kind, self.options)
        if Processes(self.target.info.device).count > 1:
            raise InputError("study: got several processes, expected one; start it without torchrun")
        if unknown := sorted(set(only) - {v.name for v in made}):
            raise InputError(f"study {kind}: no variation {unknown[0]!r}; expected {', '.join(v.name for v in made)}")
        if tokens < 0:
            raise InputError(f"study: {tokens} tokens; expected a number of at least 1, or 0 for all")
        data = self._prepare(kind, tokens, answers)
        options = replace(self.options, heldout=len(data.held))
        results = []
        for variation in made:
            done = (self.output / "runs" / variation.name / "result.json").exists()
            if done or not only or variation.name in only:
                results.append(self._run(variation, data, options))
        facts = {
            "study": kind,
            "target": self.target_name,
            "files": [file.name for file in self.files],
            "tokens": data.tokens,
            "judged_by": {
                "prompts": len(data.examples),
                "answer_tokens": sum(len(ids) - start for ids, _, start in data.examples),
            },
            "heldout": len(data.held),
            "options": asdict(options),
        }
        compared = bool(results) and results[0]["name"] == made[0].name
        report = report_of(facts, results, FURTHER if kind == "curve" else (), compared)
        write_json(self.output / f"{kind}.json", report)
        (self.output / f"{kind}.md").write_text(markdown(report), encoding="utf-8")
        if "curve" in report:
            title = f"{self.target_name}: {len(data.examples)} prompts, {options.epochs:g} epochs"
            if not draw(self.output / "curve.png", results, FURTHER, title):
                self.progress("curve.png is left out: it needs matplotlib (pip install matplotlib)")
        return report

    def _prepare(self, kind: str, tokens: int, answers: int | None) -> _Data:
        """Everything that is made once; as many answers are held out as the smallest part of the data lets `train`."""
        options, seed = self.options, self.options.seed
        readout, embedding = read_readout(self.target, self.progress), read_embedding(self.target)
        folder, files, given = self.output, self.files, set[tuple[int, ...]]()
        if kind == "text":
            folder, answers = self.output / "text", None
            files, given = _write_pairs(self.tokenizer, files, folder, tokens, self.synthesis, seed)
        prepared = prepare(
            self.target,
            self.tokenizer,
            target_name=self.target_name,
            files=files,
            folder=folder / "data",
            synthesis=self.synthesis,
            answers=answers,
            heldout=options.heldout,
            given_tokens=0 if kind == "text" else tokens,
            seed=seed,
            progress=self.progress,
        )
        source = prepared.source
        rest, held = split_rows(source, options.heldout, seed)
        asked = {_prompt(source, row) for row in held}
        rest = [row for row in rest if _prompt(source, row) not in asked]
        random.Random(seed).shuffle(rest)
        pools = {"": rest}
        if given:
            theirs = [tuple(source.tokens(row).tolist()) in given for row in rest]
            pools["given"] = [row for row, there in zip(rest, theirs, strict=True) if there]
            pools["generated"] = [row for row, there in zip(rest, theirs, strict=True) if not there]
        most = min(sum(row.length for row in pool) for pool in pools.values())
        size = min(tokens, most) if tokens else most
        smallest = min(len(_first(pool, size * SMALLEST_SHARE)) for pool in pools.values())
        if not smallest:
            raise DataError(f"study {kind}: {len(rest)} dialogues to train on; expected more, from more --data")
        # These are the first ones that `train` would choose, too, whichever of the others it is given.
        _, held = split_rows(source, min(len(held), max(1, smallest // 10)), seed)
        return _Data(source, held, pools, size, self._judging(prepared.facts), embedding, readout)

    def _judging(self, facts: FeatureFacts) -> list[Example]:
        """The target's greedy answers to the prompts, made once; features are float16."""
        folder, longest = self.output / "judging", self.synthesis.max_new_tokens
        claim(folder, {**asdict(facts), "prompts": digest_of_ids(self.prompts), "max_new_tokens": longest}, True)
        store = folder / "features"
        writer = FeatureWriter(store, facts)
        try:
            known = FeatureStore(store, facts, verify=False) if writer.count else None
            there = {_prompt(known, row) for row in known.dialogues} if known else set()
            missing = [prompt for prompt in dict.fromkeys(map(tuple, self.prompts)) if prompt not in there]
            if missing or not self.prompts:
                for ids, features, start in answer_prompts(
                    self.target,
                    self.tokenizer,
                    missing,
                    max_new_tokens=longest,
                    progress=lambda line: self.progress(f"judging: {line}"),
                ):
                    writer.append(Dialogue(ids.tolist(), [(start, len(ids))], True), features)
        finally:
            writer.close()
        kept = FeatureStore(store, facts)
        return examples_of(kept, kept.dialogues)

    def _run(self, variation: Variation, data: _Data, options: TrainOptions) -> dict[str, Any]:
        """Train and judge one head, unless that is done: what `result.json` holds."""
        folder, rows = self.output / "runs" / variation.name, data.rows(variation)
        head = new_head(self.target, options.seed, variation.head)
        options = replace(options, **variation.options)
        made_of = {
            "target": self.target_name,
            "training tokens": digest_of_ids(data.source.tokens(row).tolist() for row in (*data.held, *rows)),
            "judging tokens": digest_of_ids(ids.tolist() for ids, _, _ in data.examples),
            **shape_of_head(head.config),
            **asdict(options),
        }
        claim(folder, made_of, True)
        file = folder / "result.json"
        if file.exists():
            self.progress(f"{variation.name}: done before")
            try:
                return {**json.loads(file.read_bytes()), "label": variation.label}
            except ValueError as e:
                raise DataError(f"{file}: not JSON ({e}); delete it: the head beside it is judged again") from None
        trained = train(
            head,
            Subset(data.source, [*data.held, *rows]),
            data.embedding,
            data.readout,
            folder,
            options=options,
            metadata={"target": self.target_name, "study": variation.name},
            resume=True,
            progress=lambda line: self.progress(f"{variation.name}: {line}"),
        )
        best = load_head(folder, dtype=torch.float32).to(data.readout.device)
        result = {
            "name": variation.name,
            "label": variation.label,
            "head": dict(variation.head),
            "options": dict(variation.options),
            "parameters": sum(p.numel() for p in best.parameters()),
            "dialogues": len(rows),
            "tokens": trained.data_tokens,
            "answer_tokens": trained.trained_tokens,
            "steps": trained.steps,
            "best_step": trained.best_step,
            "seconds": round(trained.seconds, 1),
            "heldout_tau": {name: round(value, 4) for name, value in trained.best.tau.items()},
            **judge(best, data.examples, data.embedding, data.readout),
        }
        write_json(file, result)
        said = ", ".join(f"{name} {value:.3f}" for name, value in result["tau"].items())
        self.progress(f"{variation.name}: τ {said}")
        return result


def _prompt(source: FeatureSource, row: StoredDialogue) -> tuple[int, ...]:
    return tuple(source.tokens(row)[: row.spans[0][0]].tolist())


def _first(rows: Sequence[StoredDialogue], tokens: float) -> list[StoredDialogue]:
    """The first rows that have `tokens` together."""
    return list(rows[: count_of((row.length for row in rows), tokens)])


def _write_pairs(
    tokenizer: Any, files: Sequence[Path], folder: Path, tokens: int, synthesis: SynthesisOptions, seed: int
) -> tuple[list[Path], set[tuple[int, ...]]]:
    """Files with the first turns of dialogues, answered and not, and the ids of the answered ones.

    Dialogues are taken in the seed's order until they have `tokens` (0: all of them), and a tenth more, as some will be
    held out.

    Raises:
        DataError: there is no dialogue.
    """
    longest = synthesis.max_prompt_tokens + synthesis.max_new_tokens
    found: list[list[Message]] = []
    for file in files:
        for row in read_rows(file):
            end = 0 if isinstance(row, str) else next((i for i, m in enumerate(row) if m["role"] == "assistant"), 0)
            if end and row[end - 1]["role"] == "user":  # type: ignore[index]
                found.append(list(row[: end + 1]))  # type: ignore[arg-type]
    random.Random(seed).shuffle(found)
    total, chosen, ids = 0, [], set()
    for messages in found:
        if tokens and total >= 1.1 * tokens:
            break
        try:
            short = len(encode_prompt(tokenizer, messages)) <= synthesis.max_prompt_tokens
            dialogue = cut_dialogue(encode_dialogue(tokenizer, messages), longest) if short else None
        except RefusedError:
            continue
        if dialogue is not None and tuple(dialogue.ids) not in ids:
            chosen.append(messages)
            ids.add(tuple(dialogue.ids))
            total += len(dialogue.ids)
    if not chosen:
        raise DataError(
            f"study text: {', '.join(map(str, files))}: no dialogue that begins with a prompt of at most "
            f"{synthesis.max_prompt_tokens} tokens and its answer; expected 'messages' or 'conversations'"
        )
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "given.jsonl", folder / "prompts.jsonl"
    for path, cut in zip(made, (None, -1), strict=True):
        lines = (json.dumps({"messages": messages[:cut]}, ensure_ascii=False) + "\n" for messages in chosen)
        path.write_text("".join(lines), encoding="utf-8")
    return list(made), ids
