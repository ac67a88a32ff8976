"""Target features of training text, kept on disk and mapped into memory.

Contract: a store is a folder with `tokens.bin` (int32), `features.bin` (bfloat16, H per token) and `index.jsonl` (one
line per dialogue). It is only ever appended to; a dialogue is complete when its index line is. Features come for free
while the target answers (`FeatureWriter.append`), or from teacher-forced passes over given text (`extract`).

The last token's feature is never an input nor a target, so a dialogue of n tokens is stored with n - 1 features.
bfloat16 keeps 8 bits: features have a standard deviation near 2 and outliers near 55, and training adds far more noise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eaglekit.errors import DataError
from eaglekit.jsonl import read_lines
from eaglekit.models.fast import fast_target
from eaglekit.models.rows import FastRows
from eaglekit.train.dataset import Dialogue, drop_torn_line
from eaglekit.train.generate import is_fast

_READ_SLOTS = 16


@dataclass(frozen=True)
class StoredDialogue:
    """Where a dialogue lies in a store.

    Attributes:
        start: Its first token's place in `tokens.bin`.
        feature_start: Its first feature's place in `features.bin`.
        length: Tokens, n; it has n - 1 features.
        spans: Of its answers, see `Dialogue`.
        greedy: See `Dialogue`.
    """

    start: int
    feature_start: int
    length: int
    spans: tuple[tuple[int, int], ...]
    greedy: bool


def read_index(path: Path) -> list[StoredDialogue]:
    """The complete dialogues of the store at `path`; none when there is no store.

    Raises:
        DataError: see `read_lines`; or a line of the index is not one.
    """
    index = path / "index.jsonl"
    if not index.exists():
        return []
    rows: list[StoredDialogue] = []
    start = 0
    for number, row in read_lines(index):
        try:
            spans = tuple((int(a), int(b)) for a, b in row["spans"])
            rows.append(StoredDialogue(start, start - len(rows), int(row["tokens"]), spans, bool(row["greedy"])))
        except (ValueError, KeyError, TypeError) as e:
            raise DataError(f"{index}:{number}: not an index line ({e}); delete the folder and run again") from None
        start += rows[-1].length
    return rows


def _check_sizes(path: Path, rows: Sequence[StoredDialogue], hidden_size: int) -> dict[str, int]:
    """Bytes that `rows` take in each file; a file may be longer, by a dialogue that was not written to its end.

    Raises:
        DataError: a file is shorter.
    """
    tokens = sum(row.length for row in rows)
    sizes = {"tokens.bin": tokens * 4, "features.bin": (tokens - len(rows)) * hidden_size * 2}
    for name, size in sizes.items():
        file = path / name
        found = file.stat().st_size if file.exists() else 0
        if found < size:
            raise DataError(f"{file}: {found} bytes, shorter than the {size} that the index needs; delete {path}")
    return sizes


class FeatureWriter:
    """Appends dialogues to a store."""

    def __init__(self, path: Path, hidden_size: int) -> None:
        """Open or create the store at `path`; a dialogue that was not written to its end is cut off.

        Raises:
            DataError: the index is wrong, or a file is shorter than the index says.
        """
        path.mkdir(parents=True, exist_ok=True)
        self.hidden_size = hidden_size
        drop_torn_line(path / "index.jsonl")
        rows = read_index(path)
        self.count = len(rows)
        sizes = _check_sizes(path, rows, hidden_size)
        self._files = []
        for name in ("features.bin", "tokens.bin", "index.jsonl"):
            f = (path / name).open("ab")
            if name in sizes:
                f.truncate(sizes[name])
            self._files.append(f)

    def append(self, dialogue: Dialogue, features: Tensor) -> None:
        """Add a dialogue of n tokens with `features` [n - 1 or n, H]."""
        n = len(dialogue.ids)
        kept = features[: n - 1].to(torch.bfloat16).contiguous()
        if tuple(kept.shape) != (n - 1, self.hidden_size):
            raise DataError(f"features {list(features.shape)} for {n} tokens of width {self.hidden_size}")
        line = {"tokens": n, "spans": dialogue.spans, "greedy": dialogue.greedy}
        for f, data in zip(
            self._files,
            (
                kept.view(torch.int16).numpy().tobytes(),
                np.asarray(dialogue.ids, dtype=np.int32).tobytes(),
                (json.dumps(line, separators=(",", ":")) + "\n").encode(),
            ),
            strict=True,
        ):
            f.write(data)
            f.flush()
        self.count += 1

    def close(self) -> None:
        """Close the files."""
        for f in self._files:
            f.close()


class FeatureStore:
    """Read access to a store; features stay on disk until they are used."""

    def __init__(self, path: Path, hidden_size: int) -> None:
        """Map the store at `path`.

        Raises:
            DataError: it is empty, or its files are shorter than its index says.
        """
        self.dialogues = read_index(path)
        if not self.dialogues:
            raise DataError(f"{path}: no training dialogues; nothing to train on")
        _check_sizes(path, self.dialogues, hidden_size)
        tokens = sum(row.length for row in self.dialogues)
        self._tokens = np.memmap(path / "tokens.bin", dtype=np.int32, mode="r", shape=(tokens,))
        shape = (tokens - len(self.dialogues), hidden_size)
        self._features = np.memmap(path / "features.bin", dtype=np.int16, mode="r", shape=shape)

    def by_tokens(self) -> dict[tuple[int, ...], StoredDialogue]:
        """Token ids -> the first dialogue with them."""
        rows: dict[tuple[int, ...], StoredDialogue] = {}
        for row in self.dialogues:
            rows.setdefault(tuple(self.tokens(row).tolist()), row)
        return rows

    def tokens(self, row: StoredDialogue) -> Tensor:
        """int64 [n]."""
        return torch.from_numpy(self._tokens[row.start : row.start + row.length].astype(np.int64))

    def features(self, row: StoredDialogue) -> Tensor:
        """bfloat16 [n - 1, H]."""
        part = self._features[row.feature_start : row.feature_start + row.length - 1]
        return torch.from_numpy(np.array(part)).view(torch.bfloat16)


def extract(
    model: Any,
    dialogues: Sequence[Dialogue],
    writer: FeatureWriter,
    *,
    group_tokens: int = 8192,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Add `dialogues` to a store, with features from teacher-forced passes of `model`.

    Args:
        model: A transformers causal language model.
        dialogues: What to add, in this order.
        writer: The store.
        group_tokens: About how many tokens are read in one call.
        on_progress: Called with (tokens read, tokens in all).
    """
    total = sum(len(d.ids) for d in dialogues)
    read = _reader(model, max((len(d.ids) for d in dialogues), default=1))
    done = 0
    for group in _groups(dialogues, group_tokens):
        for dialogue, features in zip(group, read([d.ids for d in group]), strict=True):
            writer.append(dialogue, features)
            done += len(dialogue.ids)
        if on_progress is not None:
            on_progress(done, total)


def _groups(dialogues: Sequence[Dialogue], size: int) -> Iterator[list[Dialogue]]:
    group: list[Dialogue] = []
    tokens = 0
    for dialogue in dialogues:
        group.append(dialogue)
        tokens += len(dialogue.ids)
        if tokens >= size:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _reader(model: Any, max_length: int) -> Callable[[Sequence[Sequence[int]]], list[Tensor]]:
    """Reader: ids -> features of each row, [n, H]."""
    if is_fast(model):
        rows = FastRows(fast_target(model, "int8"), _READ_SLOTS, max_length)

        def read_fast(ids: Sequence[Sequence[int]]) -> list[Tensor]:
            parts = [ids[i : i + _READ_SLOTS] for i in range(0, len(ids), _READ_SLOTS)]
            return [features for part in parts for features in rows.read(part, range(len(part)))]

        return read_fast
    base = model.base_model

    def read(ids: Sequence[Sequence[int]]) -> list[Tensor]:
        # Row by row: right padding would change some families' positions, and a group's rows differ in length.
        with torch.no_grad():
            return [
                base(input_ids=torch.tensor([list(row)], device=model.device), use_cache=False)
                .last_hidden_state[0]
                .cpu()
                for row in ids
            ]

    return read
