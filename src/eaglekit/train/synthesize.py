"""Let the target answer prompts: the on-policy text that a draft head is trained on.

Contract: prompts in, one JSON line per answered dialogue out, in a file that is only ever appended to. A run that was
killed is started again with the same arguments and goes on with the prompts that have no answer yet; the order of the
prompts follows from the prompts and the seed alone.

Targets of the plain Llama shape on a CPU are answered by `BatchLlama`, where a row that ends makes place for the next
prompt; every other family by the stock `generate` of transformers. Only the draft head's training text depends on
either, never an output that a user sees.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eaglekit.errors import DataError
from eaglekit.jsonl import read_lines
from eaglekit.train.batch_llama import BatchLlama, supports
from eaglekit.train.dataset import Dialogue, drop_torn_line
from eaglekit.train.options import SynthesisOptions

FeatureSink = Callable[[Dialogue, Tensor], None]


def plan_batches(prompts: Sequence[Sequence[int]], options: SynthesisOptions) -> list[tuple[float, list[int]]]:
    """Group prompt indices into batches of similar length: (temperature, indices) each.

    Prompts are shuffled first, then sorted by length inside windows of 16 batches, so that any prefix of the plan is a
    fair sample of the prompts while little is lost to padding.
    """
    order = [i for i, p in enumerate(prompts) if 0 < len(p) <= options.max_prompt_tokens]
    rng = random.Random(options.seed)
    rng.shuffle(order)
    window = 16 * options.batch_size
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        part = sorted(order[start : start + window], key=lambda i: len(prompts[i]))
        group = [part[i : i + options.batch_size] for i in range(0, len(part), options.batch_size)]
        rng.shuffle(group)
        batches.extend(group)
    return [(options.temperatures[i % len(options.temperatures)], batch) for i, batch in enumerate(batches)]


def synthesize(
    model: Any,
    prompts: Sequence[Sequence[int]],
    path: Path,
    *,
    eos_ids: Sequence[int],
    pad_id: int,
    options: SynthesisOptions,
    max_batches: int | None = None,
    on_progress: Callable[[int, int, int], None] | None = None,
    on_features: FeatureSink | None = None,
) -> int:
    """Answer `prompts` with `model` and append the dialogues to `path`.

    Args:
        model: A transformers causal language model.
        prompts: Token ids, chat template applied, ending where the answer starts.
        path: A JSON-lines file. Each line is `{"prompt": [...], "answer": [...], "temperature": t}`.
        eos_ids: Ids that end an answer; the first one met is kept as the answer's last token.
        pad_id: Id used for padding.
        options: See `SynthesisOptions`.
        max_batches: Stop after this many batches of the plan, or go through every prompt.
        on_progress: Called now and then with (dialogues answered in all, planned in all, answer tokens of this run).
        on_features: Called with each dialogue and its features [n - 1, H], by the fast path only: every token but the
            last was read, so that they need not be computed again. The dialogue is in the file by then: what a kill
            leaves is a dialogue without features, never features of a dialogue that is then answered once more.

    Returns:
        The number of dialogues answered by this run.

    Raises:
        DataError: `path` has a line that is no dialogue.
    """
    plan = plan_batches(prompts, options)[:max_batches]
    planned = sum(len(batch) for _, batch in plan)
    path.parent.mkdir(parents=True, exist_ok=True)
    drop_torn_line(path)
    done = {tuple(prompt) for prompt, _, _ in read_dialogues(path)} if path.exists() else set()
    work = [(t, [i for i in batch if tuple(prompts[i]) not in done]) for t, batch in plan]
    before = planned - sum(len(batch) for _, batch in work)
    answers = (
        _answer_fast(model, prompts, work, eos_ids, options, on_features)
        if supports(model)
        else _answer_stock(model, prompts, work, eos_ids, pad_id, options)
    )
    count = tokens = 0
    for finished in answers:
        lines = [
            {"prompt": list(prompts[i]), "answer": answer, "temperature": temperature}
            for i, answer, temperature in finished
        ]
        with path.open("a", encoding="utf-8") as f:
            f.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
        count += len(finished)
        tokens += sum(len(answer) for _, answer, _ in finished)
        if on_progress is not None:
            on_progress(before + count, planned, tokens)
    return count


Answer = tuple[int, list[int], float]


def _answer_stock(
    model: Any,
    prompts: Sequence[Sequence[int]],
    work: Sequence[tuple[float, list[int]]],
    eos_ids: Sequence[int],
    pad_id: int,
    options: SynthesisOptions,
) -> Iterator[list[Answer]]:
    """Batches of (prompt index, answer, temperature) by transformers' `generate`, with left padding."""
    ends = set(eos_ids)
    for number, (temperature, indices) in enumerate(work):
        if not indices:
            continue
        width = max(len(prompts[i]) for i in indices)
        ids = torch.full((len(indices), width), pad_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(indices):
            ids[row, width - len(prompts[i]) :] = torch.tensor(list(prompts[i]))
            mask[row, width - len(prompts[i]) :] = 1
        # transformers samples from the global generator: seed it per batch, so that a resumed run repeats an
        # uninterrupted one.
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(options.seed * 1_000_003 + number)
            sampling: dict[str, Any] = (
                {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
                if temperature > 0
                else {"do_sample": False}
            )
            out = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=options.max_new_tokens,
                eos_token_id=list(eos_ids),
                pad_token_id=pad_id,
                **sampling,
            ).cpu()
        finished = []
        for row, i in enumerate(indices):
            answer: list[int] = []
            for token in out[row, width:].tolist():
                answer.append(token)
                if token in ends:
                    break
            finished.append((i, answer, temperature))
        yield finished


def _choose(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
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


@torch.no_grad()
def _answer_fast(
    model: Any,
    prompts: Sequence[Sequence[int]],
    work: Sequence[tuple[float, list[int]]],
    eos_ids: Sequence[int],
    options: SynthesisOptions,
    on_features: FeatureSink | None,
) -> Iterator[list[Answer]]:
    """Groups of (prompt index, answer, temperature) by `BatchLlama`, as they end.

    Features of a group are handed on when the next group is asked for.
    """
    queue = [(temperature, i) for temperature, batch in work for i in batch]
    queue.reverse()
    if not queue:
        return
    ends = set(eos_ids)
    slots = min(2 * options.batch_size, len(queue))
    longest = max(len(prompts[i]) for _, i in queue)
    llama = BatchLlama(model, slots=slots, max_length=longest + options.max_new_tokens)
    kept = torch.zeros(slots, llama.max_length if on_features else 0, model.config.hidden_size, dtype=llama.dtype)
    lengths = torch.zeros(slots, dtype=torch.long)
    tokens = torch.zeros(slots, dtype=torch.long)
    heat = torch.zeros(slots)
    uniforms = torch.zeros(slots, options.max_new_tokens)
    rows: list[int | None] = [None] * slots  # which prompt a slot answers
    exact = [0.0] * slots  # its temperature; `heat` is the same in float32
    answers: list[list[int]] = [[] for _ in range(slots)]
    steps = torch.zeros(slots, dtype=torch.long)
    every = torch.arange(slots)
    join = max(1, slots // 8)
    while queue or any(row is not None for row in rows):
        free = [m for m in range(slots) if rows[m] is None]
        fresh: list[int] = []
        if queue and len(free) >= min(join, len(queue)):
            taken = [queue.pop() for _ in free[: len(queue)]]
            taken.sort(key=lambda item: len(prompts[item[1]]))  # rows of similar length side by side
            for m, (temperature, i) in zip(free, taken, strict=False):
                rows[m], answers[m], heat[m], exact[m] = i, [], temperature, temperature
                steps[m], lengths[m] = 0, len(prompts[i])
                seeded = torch.Generator().manual_seed(options.seed * 1_000_003 + i)
                uniforms[m] = torch.rand(options.max_new_tokens, generator=seeded)
                fresh.append(m)
            read = llama.read([prompts[rows[m] or 0] for m in fresh], fresh)
            last = torch.stack([y[-1] for y in read])
            where = torch.tensor(fresh)
            tokens[where] = _choose(llama.logits(last), heat[where], uniforms[where, 0])
            for m, y in zip(fresh, read, strict=True):
                kept[m, : len(y)] = y if on_features else y[:0]
        else:
            y = llama.step(tokens, lengths)
            if on_features:
                kept[every, lengths] = y
            tokens = _choose(llama.logits(y), heat, uniforms[every, steps])
            lengths += 1
        finished: list[Answer] = []
        read_whole: list[tuple[Dialogue, int]] = []  # the slot that holds its features
        listed = tokens.tolist()
        for m in fresh or range(slots):
            i_or_none = rows[m]
            if i_or_none is None:
                lengths[m] = steps[m] = 0
                continue
            answers[m].append(listed[m])
            steps[m] += 1
            if listed[m] in ends or len(answers[m]) == options.max_new_tokens:
                if on_features:
                    ids = [*prompts[i_or_none], *answers[m]]
                    span = (len(prompts[i_or_none]), len(ids))
                    read_whole.append((Dialogue(ids, [span], exact[m] == 0), m))
                finished.append((i_or_none, answers[m], exact[m]))
                rows[m] = None
                lengths[m] = steps[m] = 0
                heat[m] = 0
        if finished:
            yield finished
        for dialogue, m in read_whole:
            if on_features is not None:
                on_features(dialogue, kept[m, : len(dialogue.ids) - 1])


def read_dialogues(path: Path) -> Iterator[tuple[list[int], list[int], float]]:
    """Yield (prompt ids, answer ids, temperature) from a file that `synthesize` wrote.

    Raises:
        DataError: see `read_lines`; or a line is no dialogue.
    """
    for number, row in read_lines(path):
        try:
            prompt, answer = list(map(int, row["prompt"])), list(map(int, row["answer"]))
            temperature = float(row["temperature"])
        except (ValueError, KeyError, TypeError) as e:
            raise DataError(
                f"{path}:{number}: not a synthesised dialogue ({e}). Delete the line, or the file, and run again."
            ) from None
        yield prompt, answer, temperature
