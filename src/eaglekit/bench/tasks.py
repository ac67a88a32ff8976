"""Prompt files: JSON lines, a first user turn in each under `turns`, `prompt`, `messages` or `conversations`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglekit.errors import DataError


@dataclass(frozen=True)
class Task:
    """One prompt of a file."""

    id: str
    category: str
    text: str


def read_tasks(path: Path, limit: int | None = None) -> list[Task]:
    """The first user turn of each line of `path` (.jsonl, or .jsonl.gz).

    Raises:
        DataError: the file cannot be read, is empty, or a line holds no prompt; names file and line.
    """
    tasks: list[Task] = []
    for number, line in _lines(path):
        if limit is not None and len(tasks) == limit:
            break
        try:
            row = json.loads(line)
        except ValueError as e:
            raise DataError(f"{path}:{number}: not JSON ({e}); expected one object per line") from None
        text = _first_turn(row)
        if text is None:
            raise DataError(
                f"{path}:{number}: no prompt; expected 'turns': [\"...\"], 'prompt': \"...\", or 'messages'"
            )
        tasks.append(Task(str(row.get("question_id", row.get("id", number))), str(row.get("category", "")), text))
    if not tasks:
        raise DataError(f'{path}: no lines; expected JSON lines such as {{"turns": ["Why is the sky blue?"]}}')
    return tasks


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else None
    try:
        with opened or path.open(encoding="utf-8", newline="\n") as f:
            for number, line in enumerate(f, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, UnicodeDecodeError) as e:
        raise DataError(
            f"{path}: cannot be read ({getattr(e, 'strerror', None) or e}); expected a JSON-lines file"
        ) from None


def _first_turn(row: Any) -> str | None:
    if not isinstance(row, dict):
        return None
    turns = row.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return turns[0]
    if isinstance(row.get("prompt"), str):
        return str(row["prompt"])
    for key, role, content in (("messages", "role", "content"), ("conversations", "from", "value")):
        for message in row.get(key) or ():
            if isinstance(message, dict) and (message.get(role) or message.get("role")) in ("user", "human"):
                return str(message.get(content) or message.get("content"))
    return None
