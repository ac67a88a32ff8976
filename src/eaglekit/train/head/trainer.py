"""Train a draft head on features of its target.

Contract: everything follows from the data, the options and the seed. A checkpoint holds weights, optimizer and place
in the data; a run that was interrupted and resumed ends with the same weights, bit for bit, as one that was not. The
head with the best simulated acceptance on held-out greedy continuations is kept, not the last one.

What an optimizer step reads is a set of dialogues of about `batch_tokens` tokens, chosen without regard to how many
processes there are. Each process takes its share, in as many passes as `accumulate` says; losses are divided by
counts of the whole set, and the noise of a dialogue is drawn from its own seed. So more processes, sharding and
accumulation change nothing but the rounding of sums.

The cross-entropy runs over the tokens most frequent in the training text (`vocabulary`), which makes a step several
times cheaper; they become the head's draft vocabulary, so that drafting costs less too. Data, noise and checkpoints
are made on the CPU, the same for all devices.
"""

from __future__ import annotations

import json
import math
import os
import random
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eaglekit.errors import DataError, HeadError, InputError
from eaglekit.jsonl import read_lines
from eaglekit.models.checkpoint import save_head
from eaglekit.models.head import EagleHead
from eaglekit.models.memory import resident
from eaglekit.models.store import write_json
from eaglekit.train.features.provenance import digest_of_ids, digest_of_weights, shape_of_head
from eaglekit.train.features.store import FeatureSource, StoredDialogue, differences
from eaglekit.train.head.objective import Batch, LossWeights, compute_losses, pairs_of, step_masks, uniform
from eaglekit.train.head.processes import Processes, whole
from eaglekit.train.head.start import linear_start
from eaglekit.train.judge.evaluate import Acceptance, examples_of, simulate, standard_shapes
from eaglekit.train.options import TrainOptions
from eaglekit.train.text.dataset import drop_torn_line

_FREE = ("accumulate", "checkpoint_minutes", "log_every")
"""Options that may be others when a training is gone on with."""


@dataclass(frozen=True)
class TrainResult:
    """What came out.

    Attributes:
        best: Acceptance of the head that was kept.
        best_step: The optimizer step it was taken after.
        steps: Optimizer steps in all.
        tokens: Tokens read, every epoch counted.
        data_tokens: Tokens of the training dialogues, each counted once.
        trained_tokens: Of these, answer tokens that a loss was computed on.
        seconds: Wall time of training, of all runs of it.
        tokens_per_second: Tokens read in a second of training, evaluations left out.
        peak_memory_mb: The most memory that this process has held, of the accelerator where there is one.
        new_steps: Steps of this run; 0 if it had ended before, and nothing was written.
    """

    best: Acceptance
    best_step: int
    steps: int
    tokens: int
    data_tokens: int
    trained_tokens: int
    seconds: float
    tokens_per_second: float
    peak_memory_mb: float
    new_steps: int


@dataclass(frozen=True)
class Status:
    """Where a training is, after an optimizer step.

    Attributes:
        step: Steps done.
        steps: Steps in all.
        tokens: Tokens read.
        tokens_per_second: Of late.
        seconds_left: Estimate, evaluations included.
        learning_rate: Of this step.
        regression: For each unrolled step, the mean smooth L1 distance.
        classification: For each unrolled step, the mean cross-entropy, nats.
        acceptance: Measured after this step; None after most.
    """

    step: int
    steps: int
    tokens: int
    tokens_per_second: float
    seconds_left: float
    learning_rate: float
    regression: tuple[float, ...]
    classification: tuple[float, ...]
    acceptance: Acceptance | None = None

    def line(self) -> str:
        """The same in a line of text."""
        said = (
            f"step {self.step}/{self.steps}  {self.tokens_per_second:.0f} tokens/s  {duration(self.seconds_left)} left"
            f"  regression {_join(self.regression)}  classification {_join(self.classification)}"
        )
        if self.acceptance is None:
            return said
        tau = "  ".join(f"{name} {value:.3f}" for name, value in self.acceptance.tau.items())
        return f"{said}  τ {tau}  n-α {_join(self.acceptance.n_alpha)}"


def check_output(output: Path, resume: bool) -> None:
    """See that `output` is a folder that can be written, and makes it; without `resume` it must hold no training.

    Raises:
        InputError: it is not; nothing was changed.
    """
    state = output / "checkpoint.pt"
    if state.exists() and not resume:
        raise InputError(
            f"{state}: there is a training already; go on with it (--resume), use another --output, or delete this file"
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as e:
        raise InputError(
            f"--output {output}: cannot be written ({e.strerror}); expected a folder, or a name for a new one"
        ) from None


def split_rows(source: FeatureSource, heldout: int, seed: int) -> tuple[list[StoredDialogue], list[StoredDialogue]]:
    """(training rows, held-out rows): `heldout` greedy dialogues of one answer are set aside, one in ten at most.

    Which ones depends on their tokens and the seed, so that a dialogue once held out mostly stays so as data grows.

    Raises:
        DataError: there is no greedy dialogue, or nothing is left to train on.
    """
    rows = [row for row in source.dialogues if row.length >= 3]
    greedy = [i for i, row in enumerate(rows) if row.greedy and len(row.spans) == 1]
    greedy.sort(key=lambda i: zlib.crc32(source.tokens(rows[i]).numpy().tobytes(), seed))
    kept = set(greedy[: min(heldout, max(1, len(rows) // 10))])
    train = [row for i, row in enumerate(rows) if i not in kept]
    if not kept or not train:
        raise DataError(
            f"{len(rows)} distinct dialogues, {len(greedy)} of them greedy answers of the target: expected at least "
            "one greedy answer to judge the head by, and others to train on. Let the target answer more prompts"
        )
    return train, [rows[i] for i in sorted(kept)]


def frequent_tokens(source: FeatureSource, rows: Sequence[StoredDialogue], count: int, vocabulary: int) -> Tensor:
    """int64 [min(count, vocabulary)], ascending: the answer tokens met most often, then the lowest ids."""
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for first in range(0, len(rows), 4096):
        some = rows[first : first + 4096]
        answers = [source.tokens(row)[start:end] for row in some for start, end in row.spans]
        counts += torch.bincount(torch.cat(answers), minlength=vocabulary)
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[: min(count, vocabulary)].sort().values


def plan_epoch(rows: Sequence[StoredDialogue], batch_tokens: int, seed: int) -> list[list[int]]:
    """Indices of each batch: all rows in random order, `batch_tokens` tokens at most, but one row at least."""
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    batches: list[list[int]] = [[]]
    tokens = 0
    for i in order:
        if batches[-1] and tokens + rows[i].length > batch_tokens:
            batches.append([])
            tokens = 0
        batches[-1].append(i)
        tokens += rows[i].length
    return batches


def share(indices: Sequence[int], rows: Sequence[StoredDialogue], parts: int) -> list[list[int]]:
    """`indices` in `parts` lists of similar numbers of tokens; some are empty where there are few rows."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for i in indices if parts == 1 else sorted(indices, key=lambda i: (-rows[i].length, i)):
        least = sizes.index(min(sizes))
        shares[least].append(i)
        sizes[least] += rows[i].length
    return shares


def trained_inputs(row: StoredDialogue) -> Tensor:
    """Which inputs of a dialogue are trained, bool [n - 2]; see `objective`."""
    trained = torch.zeros(row.length - 2, dtype=torch.bool)
    for start, end in row.spans:
        trained[start - 1 : end - 2] = True
    return trained


def count_trained(rows: Sequence[StoredDialogue], steps: int) -> list[int]:
    """Trained inputs of each unrolled step."""
    trained = [trained_inputs(row) for row in rows]
    return [int(mask.sum()) for mask in step_masks(torch.cat(trained), [len(t) for t in trained], steps)]


def collate(
    head: EagleHead,
    source: FeatureSource,
    rows: Sequence[StoredDialogue],
    noise: Tensor | None = None,
    seeds: Sequence[int] = (),
) -> Batch:
    """Lay dialogues end to end.

    Args:
        head: What is trained: it decides what it reads.
        source: Where the rows come from.
        rows: One at least.
        noise: [W], half-width of the noise in each column of the features; None for none.
        seeds: Of each row's noise.
    """
    tokens, features, targets = [], [], []
    for place, (row, values) in enumerate(zip(rows, source.read(rows), strict=True)):
        ids, read, true = pairs_of(head, source.tokens(row), values.float())
        if noise is not None:
            read = read + uniform(read.shape, torch.Generator().manual_seed(seeds[place])) * noise
        tokens.append(ids)
        features.append(read)
        targets.append(true)
    trained = torch.cat([trained_inputs(row) for row in rows])
    lengths = tuple(len(t) for t in tokens)
    return Batch(torch.cat(tokens), torch.cat(features), torch.cat(targets), trained, lengths)


def feature_scales(source: FeatureSource, rows: Sequence[StoredDialogue], seed: int, width: int) -> list[float]:
    """Standard deviations of each `width` columns of the features of up to 64 dialogues."""
    some = random.Random(seed).sample(range(len(rows)), min(64, len(rows)))
    columns = torch.cat([f.float() for f in source.read([rows[i] for i in some])])
    return [float(part.std()) for part in columns.split(width, dim=1)]


def learning_rate(step: int, total: int, options: TrainOptions) -> float:
    """The rate of optimizer step `step` (from 0) of `total`."""
    warm = min(1.0, (step + 1) / max(1, min(options.warmup_steps, total // 10)))
    place = min(1.0, step / max(1, total))
    cosine = options.final_rate + (1 - options.final_rate) * 0.5 * (1 + math.cos(math.pi * place))
    return options.learning_rate * warm * cosine


class _Objective(nn.Module):
    """The loss as a module, so that its gradients can be averaged over processes."""

    def __init__(self, head: EagleHead, embedding: Tensor, readout: Tensor, weights: LossWeights) -> None:
        super().__init__()
        self.head = head
        self._frozen = (embedding, readout)  # in a tuple: neither parameters nor buffers
        self._weights = weights

    def forward(self, batch: Batch | None, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The loss of a share of a batch, which may be empty, and its parts [2, S]."""
        if batch is None:
            return self._nothing(), torch.zeros(2, len(counts))
        losses = compute_losses(self.head, batch, *self._frozen, self._weights, counts)
        total = losses.total if losses.total.requires_grad else self._nothing()
        return total, losses.parts.cpu()

    def _nothing(self) -> Tensor:
        return sum((p.sum() * 0.0 for p in self.head.parameters()), torch.zeros(()))


@dataclass
class _Place:
    """How far a training is."""

    step: int = 0
    tokens: int = 0
    best_step: int = 0
    best: Acceptance | None = None
    seconds: float = 0.0
    busy: float = 0.0  # of the seconds, without evaluations


@dataclass
class _Lately:
    """What happened since the last line of the log; seconds without evaluations."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    parts: Tensor | None = None

    def add(self, seconds: float, tokens: int, parts: Tensor) -> None:
        self.seconds, self.tokens, self.steps = self.seconds + seconds, self.tokens + tokens, self.steps + 1
        self.parts = parts if self.parts is None else self.parts + parts


def train(
    head: EagleHead,
    source: FeatureSource,
    embedding: Tensor,
    readout: Tensor,
    output: Path,
    *,
    options: TrainOptions,
    metadata: dict[str, Any] | None = None,
    resume: bool = False,
    processes: Processes | None = None,
    progress: Callable[[str], None] = print,
    on_step: Callable[[Status], None] | None = None,
) -> TrainResult:
    """Train `head` (float32) in place and keep the best one in the folder `output`.

    Args:
        head: A new head, or one to go on with; it is moved to the device of `readout`.
        source: Training dialogues and their features.
        embedding: [vocabulary, E], the target's frozen embeddings, on the same device as `readout`.
        readout: [V, H], the matrix of the target's frozen `lm_head`.
        output: Gets `config.json` and `model.safetensors` (the best head, float16), `checkpoint.pt`, `log.jsonl` and
            `training.json` (the result, with memory and tokens per second).
        options: See `TrainOptions`.
        metadata: Goes into the head's configuration. A run is resumed only with the same.
        resume: Go on from `checkpoint.pt`, if there is one.
        processes: Who trains along; None: whoever a launcher started, this process alone without one.
        progress: Called with a line of text now and then; by the main process alone.
        on_step: Called after every optimizer step; by the main process alone.

    Raises:
        DataError: there is nothing to train on or to judge by.
        HeadError: the checkpoint is of another run, or training diverged.
        InputError: there is a training in `output`, which is not gone on with; or it cannot be written.
    """
    processes = processes or Processes(readout.device)
    return _Trainer(
        head, source, embedding, readout, output, options, metadata or {}, processes, progress, on_step, resume
    ).run()


class _Trainer:
    def __init__(
        self,
        head: EagleHead,
        source: FeatureSource,
        embedding: Tensor,
        readout: Tensor,
        output: Path,
        options: TrainOptions,
        metadata: dict[str, Any],
        processes: Processes,
        progress: Callable[[str], None],
        on_step: Callable[[Status], None] | None,
        resume: bool,
    ) -> None:
        self.head, self.source, self.output, self.options, self.metadata = head, source, output, options, metadata
        self.processes = processes
        self.progress, self.on_step = progress, on_step
        check_output(output, resume)
        self.rows, held = split_rows(source, options.heldout, options.seed)
        self.held = examples_of(source, held) if processes.main else []  # it alone judges
        dtype = torch.bfloat16 if options.bfloat16 else torch.float32
        common = frequent_tokens(source, self.rows, options.vocabulary, len(readout))
        self.device = readout.device
        head.to(self.device)
        head.adopt(common, readout)
        self.embedding, self.readout = embedding, readout.float()
        width = head.config.hidden_size
        scales = feature_scales(source, self.rows, options.seed, width) if options.scaled else []
        self.scale = scales[0] if scales else 1.0
        read = len(head.config.feature_layers)
        columns = (scales[1:] if read else scales[:1]) if scales else [1.0] * max(1, read)
        self.noise = torch.tensor(columns).repeat_interleave(width) * options.noise if options.noise else None
        weights = LossWeights(
            options.regression, options.classification, options.step_weights, self.scale, options.top_k
        )
        # What is judged and saved: the head itself, or a copy that gets averaged or gathered weights.
        self.judged = head
        if options.ema or processes.sharded:
            self.judged = EagleHead(head.config, draft_vocab=common).to(self.device)
        self.state_file = output / "checkpoint.pt"
        start = digest_of_weights(head, None)
        self.resumed = resume and self.state_file.exists()
        if options.linear_start and not self.resumed:
            linear_start(head, source, self.rows, embedding, seed=options.seed)
        small = readout[common.to(self.device)].to(dtype)
        self.objective = processes.wrap(_Objective(head, embedding.to(dtype), small, weights))
        self.parameters = list(self.objective.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=options.learning_rate,
            betas=options.betas,
            weight_decay=options.weight_decay,
            fused=True,
        )
        self.average = [p.detach().clone() for p in self.parameters] if options.ema else []
        first = plan_epoch(self.rows, options.batch_tokens, self._epoch_seed(0))
        self.total = max(1, round(len(first) * options.epochs))
        self.data_tokens = sum(row.length for row in self.rows)
        self.facts = {"options": asdict(options), "rows": len(self.rows), "data_tokens": self.data_tokens}
        # How often something is done, and in how many passes, changes no weight.
        recipe = {name: value for name, value in asdict(options).items() if name not in _FREE}
        ids = digest_of_ids(source.tokens(row).tolist() for row in (*self.rows, *held))
        made_of = {"data": ids, "metadata": metadata, "first weights": start}
        self.identity = {**made_of, **recipe, **shape_of_head(head.config)}
        self.drafted = len(common)
        self.place = _Place()
        self.log = output / "log.jsonl"

    def run(self) -> TrainResult:
        began = time.monotonic()
        trained = count_trained(self.rows, 1)[0]
        if self.resumed:
            self._load()
        if self.processes.main:
            _cut_log(self.log, self.place.step)
            self.progress(
                f"{len(self.rows)} dialogues, {self.data_tokens} tokens, {trained} trained; {len(self.held)} held out; "
                f"{self.total} steps; feature scale {self.scale:.2f}; draft vocabulary {self.drafted}"
            )
        self.head.train()
        first, read, before = self.place.step, self.place.tokens, self.place.seconds
        lately = _Lately()
        saved = time.monotonic()
        for indices in self._batches():
            if self._stopped():
                break
            start = time.monotonic()
            rate, parts = self._step(indices)
            place, count = self.place, sum(self.rows[i].length for i in indices)
            place.step, place.tokens = place.step + 1, place.tokens + count
            lately.add(time.monotonic() - start, count, parts)
            place.busy += time.monotonic() - start
            found = None
            if place.step % self.options.eval_every == 0 or place.step == self.total:
                found = self._judge()
            left = (time.monotonic() - began) / (place.tokens - read) * self._tokens_left()
            status = self._status(lately, rate, left, found)
            if self.processes.main and self.on_step is not None:
                self.on_step(status)
            if found is not None or place.step % self.options.log_every == 0:
                self._report(status)
                lately = _Lately()
            last = place.step == self.total or self._stopped()
            place.seconds = before + time.monotonic() - began
            if self.processes.from_main(time.monotonic() - saved > self.options.checkpoint_minutes * 60) or last:
                self._save()
                saved = time.monotonic()
        place = self.place
        assert place.best is not None
        result = TrainResult(
            place.best,
            place.best_step,
            place.step,
            place.tokens,
            self.data_tokens,
            trained,
            place.seconds,
            place.tokens / place.busy if place.busy else 0.0,
            peak_memory_mb(self.device),
            place.step - first,
        )
        report = self.output / "training.json"
        if self.processes.main and not result.new_steps and report.exists():
            self.progress(f"{self.output}: this training had ended before; nothing was done")
        elif self.processes.main:
            facts = {**asdict(result), **self.facts, "heldout": len(self.held), "processes": self.processes.count}
            machine = {"device": str(self.device), "threads": torch.get_num_threads()}
            write_json(report, {**facts, **machine})
        self.processes.wait()
        return result

    def _epoch_seed(self, epoch: int) -> int:
        return self.options.seed * 7919 + epoch

    def _batches(self) -> Iterator[list[int]]:
        """Rows of each step from here to the end; epochs may differ in their number of batches."""
        epoch = passed = 0
        while True:
            plan = plan_epoch(self.rows, self.options.batch_tokens, self._epoch_seed(epoch))
            for number, indices in enumerate(plan, passed):
                if number >= self.place.step:
                    yield indices
            passed, epoch = passed + len(plan), epoch + 1

    def _tokens_left(self) -> float:
        return self.place.tokens / self.place.step * (self.total - self.place.step)

    def _stopped(self) -> bool:
        """Whether all steps are done, or too many evaluations found nothing better."""
        place, options = self.place, self.options
        waited = place.step - place.best_step
        return place.step >= self.total or 0 < options.patience * options.eval_every <= waited

    def _step(self, indices: Sequence[int]) -> tuple[float, Tensor]:
        """One optimizer step on these rows: its learning rate, and the losses' parts [2, S]."""
        options, processes, step = self.options, self.processes, self.place.step
        rate = learning_rate(step, self.total, options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        counts = count_trained([self.rows[i] for i in indices], len(options.step_weights))
        shares = share(indices, self.rows, processes.count * options.accumulate)
        mine = shares[processes.rank :: processes.count]
        parts = torch.zeros(2, len(counts))
        self.optimizer.zero_grad()
        for number, some in enumerate(mine):
            if not some and processes.count == 1:
                continue
            batch = self._batch(some, step) if some else None  # outside autocast: it may ask the target for features
            with (
                processes.syncing(self.objective, number == len(mine) - 1),
                torch.autocast(self.device.type, torch.bfloat16, enabled=options.bfloat16),
            ):
                loss, found = self.objective(batch, counts)
                (loss * processes.count).backward()  # gradients are averaged over processes; shares add up
                parts += found
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, options.clip)
        if not bool(torch.isfinite(whole(norm))):
            raise HeadError(
                f"diverged at step {step}: the gradient is not finite; lower the learning rate, "
                f"{options.learning_rate}, or what is far above its default: weights of losses, noise, weight decay"
            )
        self.optimizer.step()
        if self.average:
            # Early on the average forgets faster: the first weights are far from any that are good.
            decay = min(options.ema, (step + 1) / (step + 10))
            torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - decay)
        return rate, processes.sum(parts.to(self.device)).cpu()

    def _batch(self, indices: Sequence[int], step: int) -> Batch:
        # The noise of a row follows from the step and its place in the data, whoever computes it.
        base = (self.options.seed * 1_000_003 + step) * len(self.rows)
        rows, seeds = [self.rows[i] for i in indices], [(base + i) % (1 << 63) for i in indices]
        return collate(self.head, self.source, rows, self.noise, seeds).to(self.device)

    def _judge(self) -> Acceptance:
        """Measure the acceptance of what would be kept now, and keep it if it is the best."""
        place = self.place
        if self.judged is not self.head:
            with torch.no_grad():
                for kept, value in zip(self.judged.parameters(), self.average or self.parameters, strict=True):
                    kept.copy_(whole(value.detach()))
        found: Acceptance | None = None
        if self.processes.main:
            found = simulate(self.judged, self.held, self.embedding, self.readout, standard_shapes())
        found = self.processes.from_main(found)
        assert found is not None
        if place.best is None or found.tau["tree"] > place.best.tau["tree"]:
            place.best, place.best_step = found, place.step
            if self.processes.main:
                training = {**self.facts, "step": place.step}
                save_head(self.judged, self.output, metadata={**self.metadata, "training": training})
        return found

    def _status(self, lately: _Lately, rate: float, left: float, found: Acceptance | None) -> Status:
        assert lately.parts is not None
        regression, classification = (lately.parts / lately.steps).tolist()
        speed, place = lately.tokens / lately.seconds, self.place
        return Status(
            place.step, self.total, place.tokens, speed, left, rate, tuple(regression), tuple(classification), found
        )

    def _report(self, status: Status) -> None:
        if self.processes.main:
            with self.log.open("a", encoding="utf-8") as f:
                f.write(json.dumps(asdict(status)) + "\n")
            if status.acceptance is not None:
                self.progress(status.line())

    def _save(self) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        whole_on_cpu = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.objective, self.optimizer, options=whole_on_cpu)
        average = [whole(tensor).cpu() for tensor in self.average]
        if self.processes.main:
            place = {**vars(self.place), "best": None if self.place.best is None else asdict(self.place.best)}
            state = {"identity": self.identity, "model": model, "optimizer": optimizer, "average": average}
            temporary = self.state_file.with_suffix(".tmp")
            torch.save({**state, "place": place}, temporary)
            os.replace(temporary, self.state_file)
        self.processes.wait()

    def _load(self) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        path = self.state_file
        try:
            state = torch.load(path, weights_only=True, map_location="cpu")
            there = state["identity"]
        except Exception as e:  # torch raises many kinds: zip errors, end of file, unpickling refused
            reason = (str(e).splitlines() or [type(e).__name__])[0][:160]
            raise HeadError(f"{path}: not readable ({reason}); delete it, and train without --resume") from None
        wrong = differences(there, self.identity)
        if wrong:
            raise HeadError(f"{path}: of another target, options or data ({wrong}); use another --output folder")
        set_state_dict(
            self.objective,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )
        with torch.no_grad():
            if self.average:
                for average, parameter, value in zip(self.average, self.parameters, state["average"], strict=True):
                    average.copy_(_like(value, parameter))
        place = state["place"]
        best = place.pop("best")
        self.place = _Place(**place, best=None if best is None else Acceptance(**best))


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, sharded as `parameter` is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def _cut_log(path: Path, step: int) -> None:
    """Keep the lines up to `step`: a run that was killed had gone on behind its last checkpoint."""
    if path.exists():
        drop_torn_line(path)
        rows = (row for _, row in read_lines(path, lambda bad: None))
        kept = [row for row in rows if isinstance(row.get("step"), int) and row["step"] <= step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        os.replace(temporary, path)


def peak_memory_mb(device: torch.device) -> float:
    """The most memory held so far, MB: by torch of an accelerator, else by this process (0 if the system is silent)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return (resident()["peak"] or 0) / 1e6


def duration(seconds: float) -> str:
    """As [hours:]minutes:seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _join(numbers: Sequence[float]) -> str:
    return " ".join(f"{x:.3f}" for x in numbers)
