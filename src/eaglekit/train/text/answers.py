"""Many answers at once, for making text: jobs in, finished answers out, new jobs whenever there are some.

Contract: `generate` takes jobs from the left of a queue that the caller owns, and yields groups of finished ones; a
caller may append jobs between two groups, also behind what looked like the last one. Targets that `FastTarget` can run
go through `FastRows`, where a row that ends makes place for the next job and a job's answer depends on the job alone.
Every other family is answered in batches by the stock `generate` of transformers; there what is sampled depends on who
shares the batch, so that equal queues give equal answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eaglekit.models.fast import FastTarget, fast_target, why_not_fast
from eaglekit.models.native import native
from eaglekit.models.rows import FastRows
from eaglekit.models.stack import Weights


@dataclass(frozen=True)
class Job:
    """A prompt to answer.

    Attributes:
        key: The caller's own.
        prompt: Ids, one at least.
        temperature: 0 is greedy.
        max_new_tokens: Length limit, 1 at least.
        ends: Ids that end an answer; the first one met is kept as its last token.
        seed: Of what is sampled.
    """

    key: int
    prompt: tuple[int, ...]
    temperature: float
    max_new_tokens: int
    ends: frozenset[int]
    seed: int


@dataclass(frozen=True)
class Finished:
    """An answered job.

    Attributes:
        job: It.
        answer: Ids, one at least.
        features: [n - 1, H] of prompt and answer, n tokens in all; None unless they came for free.
    """

    job: Job
    answer: list[int]
    features: Tensor | None = None


def is_fast(model: Any) -> bool:
    """Whether `model` is run by `FastRows`: on a CPU with compiled kernels, and of a shape that they know."""
    return model.device.type == "cpu" and not why_not_fast(model.config) and native() is not None


def generate(
    model: Any,
    queue: deque[Job],
    *,
    batch_size: int,
    max_length: int,
    pad_id: int,
    features: torch.dtype | None = None,
    weights: Weights = "int8",
) -> Iterator[list[Finished]]:
    """Answer the jobs of `queue`, and those that are appended to it.

    Args:
        model: A transformers causal language model.
        queue: Jobs; emptied. Nothing is done if it is empty at first.
        batch_size: Jobs of a batch; the fast path has room for twice as many.
        max_length: Most tokens of a job, prompt and longest answer together.
        pad_id: Id used for padding.
        features: Type of the features wanted, or None; the fast path alone gives them.
        weights: Of the fast path.
    """
    if not queue:
        return iter(())
    if is_fast(model):
        slots = min(2 * batch_size, len(queue))
        return _generate_fast(fast_target(model, weights), queue, slots, max_length, features)
    return _generate_stock(model, queue, batch_size, pad_id)


def _generate_stock(model: Any, queue: deque[Job], batch_size: int, pad_id: int) -> Iterator[list[Finished]]:
    """Batches of the first job and those behind it that have its temperature, limit and ends, with left padding."""
    while queue:
        first = queue[0]
        jobs: list[Job] = []
        others: list[Job] = []
        while queue and len(jobs) < batch_size:
            job = queue.popleft()
            alike = (job.temperature, job.max_new_tokens, job.ends) == (
                first.temperature, first.max_new_tokens, first.ends,
            )  # fmt: skip
            (jobs if alike else others).append(job)
        queue.extendleft(reversed(others))
        yield _answer_batch(model, jobs, pad_id)


def _answer_batch(model: Any, jobs: list[Job], pad_id: int) -> list[Finished]:
    first = jobs[0]
    width = max(len(job.prompt) for job in jobs)
    ids = torch.full((len(jobs), width), pad_id, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, job in enumerate(jobs):
        ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
        mask[row, width - len(job.prompt) :] = 1
    sampling: dict[str, Any] = (
        {"do_sample": True, "temperature": first.temperature, "top_k": 0, "top_p": 1.0}
        if first.temperature > 0
        else {"do_sample": False}
    )
    # transformers samples from the global generator: seed it per batch, so that a resumed run repeats an
    # uninterrupted one.
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(first.seed)
        out = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=first.max_new_tokens,
            eos_token_id=sorted(first.ends),
            pad_token_id=pad_id,
            **sampling,
        ).cpu()
    return [Finished(job, _until(row.tolist(), job.ends)) for job, row in zip(jobs, out[:, width:], strict=True)]


def _until(ids: list[int], ends: frozenset[int]) -> list[int]:
    return ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))]


def choose(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """The next token of each row, int64 [M]: the best one at temperature 0, else the law's inverse at `uniforms`."""
    tokens = logits.argmax(-1)
    rows = temperatures.nonzero()[:, 0]
    if len(rows):
        scaled = logits[rows].float().div_(temperatures[rows, None])
        total = torch.softmax(scaled, -1).cumsum_(-1)
        tokens[rows] = torch.searchsorted(total, uniforms[rows, None] * total[:, -1:], right=True)[:, 0].clamp_(
            max=logits.shape[-1] - 1
        )
    return tokens


@dataclass
class _Row:
    """A job that is being answered; `length` of its tokens were read."""

    job: Job
    length: int
    uniforms: list[float]
    answer: list[int] = field(default_factory=list)


@torch.no_grad()
def _generate_fast(
    target: FastTarget, queue: deque[Job], count: int, max_length: int, dtype: torch.dtype | None
) -> Iterator[list[Finished]]:
    """Groups of jobs by `FastRows` of `count` slots, as they end; their features are the caller's until the next."""
    rows = FastRows(target, count, max_length)
    kept = torch.zeros(count, max_length if dtype else 0, target.info.hidden_size, dtype=dtype or torch.bfloat16)
    free = list(range(count))
    busy: dict[int, _Row] = {}  # by slot
    while queue or busy:
        if queue and len(free) >= min(max(1, count // 8), len(queue)):
            fresh = [(free.pop(), _start(queue.popleft())) for _ in range(min(len(free), len(queue)))]
            read = rows.read([row.job.prompt for _, row in fresh], [slot for slot, _ in fresh])
            features = torch.stack([y[-1] for y in read])
            if dtype:
                for (slot, _), y in zip(fresh, read, strict=True):
                    kept[slot, : len(y)] = y
            busy.update(fresh)
            active = [slot for slot, _ in fresh]
        else:
            active = sorted(busy)
            now = [busy[slot] for slot in active]
            features = rows.step(active, [row.answer[-1] for row in now], [row.length for row in now])
            if dtype:
                kept[active, [row.length for row in now]] = features.to(dtype)
            for row in now:
                row.length += 1
        now = [busy[slot] for slot in active]
        chosen = choose(
            target.lm_head(features),
            torch.tensor([row.job.temperature for row in now]),
            torch.tensor([row.uniforms[len(row.answer)] for row in now]),
        ).tolist()
        finished: list[Finished] = []
        for slot, row, token in zip(active, now, chosen, strict=True):
            row.answer.append(token)
            if token in row.job.ends or len(row.answer) == row.job.max_new_tokens:
                del busy[slot]
                free.append(slot)
                length = len(row.job.prompt) + len(row.answer) - 1
                finished.append(Finished(row.job, row.answer, kept[slot, :length] if dtype else None))
        if finished:
            yield finished


def _start(job: Job) -> _Row:
    seeded = torch.Generator().manual_seed(job.seed)
    return _Row(job, len(job.prompt), torch.rand(job.max_new_tokens, generator=seeded).tolist())
