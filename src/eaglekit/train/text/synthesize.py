"""Let the target answer prompts: the on-policy text that a draft head is trained on.

Contract: prompts in, one JSON line per answered dialogue out, in a file that is only ever appended to. A run that was
killed is started again with the same arguments and goes on with the prompts that have no answer yet; the order of the
prompts follows from the prompts and the seed alone.

How answers are made is up to `generate`, on the fast path with int8 weights. Only the draft head's training text
depends on it, never an output that a user sees.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eaglekit.errors import DataError
from eaglekit.jsonl import read_lines
from eaglekit.train.features.store import FEATURE_DTYPE, FeatureSink
from eaglekit.train.options import SynthesisOptions
from eaglekit.train.text.answers import Job, generate
from eaglekit.train.text.dataset import Dialogue, drop_torn_line


def plan_batches(
    prompts: Sequence[Sequence[int]], options: SynthesisOptions, most: int | None = None
) -> list[tuple[float, list[int]]]:
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
    plan, left = [], len(order) if most is None else most
    for i, batch in enumerate(batches):
        if left > 0:
            plan.append((options.temperatures[i % len(options.temperatures)], batch[:left]))
            left -= len(batch)
    return plan


def synthesize(
    model: Any,
    prompts: Sequence[Sequence[int]],
    path: Path,
    *,
    eos_ids: Sequence[int],
    pad_id: int,
    options: SynthesisOptions,
    most: int | None = None,
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
        most: Answer so many prompts of the plan, or all of them.
        on_progress: Called now and then with (dialogues answered in all, planned in all, answer tokens of this run).
        on_features: Called with each dialogue and its features [n - 1, H], by the fast path only: every token but the
            last was read, so that they need not be computed again. The dialogue is in the file by then: what a kill
            leaves is a dialogue without features, never features of a dialogue that is then answered once more.

    Returns:
        The number of dialogues answered by this run.

    Raises:
        DataError: `path` has a line that is no dialogue.
    """
    plan = plan_batches(prompts, options, most)
    planned = sum(len(batch) for _, batch in plan)
    path.parent.mkdir(parents=True, exist_ok=True)
    drop_torn_line(path)
    done = {tuple(prompt) for prompt, _, _ in read_dialogues(path)} if path.exists() else set()
    work = [(t, [i for i in batch if tuple(prompts[i]) not in done]) for t, batch in plan]
    before = planned - sum(len(batch) for _, batch in work)
    queue = deque(
        Job(i, tuple(prompts[i]), t, options.max_new_tokens, frozenset(eos_ids), options.seed * 1_000_003 + i)
        for t, batch in work
        for i in batch
    )
    longest = max((len(job.prompt) for job in queue), default=0) + options.max_new_tokens
    kept = FEATURE_DTYPE if on_features else None
    count = tokens = 0
    for finished in generate(
        model, queue, batch_size=options.batch_size, max_length=longest, pad_id=pad_id, features=kept
    ):
        lines = [{"prompt": list(f.job.prompt), "answer": f.answer, "temperature": f.job.temperature} for f in finished]
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
        count += len(finished)
        tokens += sum(len(f.answer) for f in finished)
        if on_progress is not None:
            on_progress(before + count, planned, tokens)
        for f in finished:
            if on_features is not None and f.features is not None:
                ids = [*f.job.prompt, *f.answer]
                on_features(Dialogue(ids, [(len(f.job.prompt), len(ids))], f.job.temperature == 0), f.features)
    return count


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
