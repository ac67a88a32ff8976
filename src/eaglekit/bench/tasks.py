"""Prompt files: JSON lines, a first user turn in each under `turns`, `prompt`, `messages` or `conversations`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from eaglekit.errors import DataError
from eaglekit.jsonl import is_text, read_lines


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
    for number, row in islice(read_lines(path), limit):
        text = _first_turn(row)
        if text is None or not is_text(text):
            raise DataError(
                f"{path}:{number}: no prompt; expected 'turns': [\"...\"], 'prompt': \"...\", or 'messages'"
            )
        tasks.append(Task(str(row.get("question_id", row.get("id", number))), str(row.get("category", "")), text))
    if not tasks:
        raise DataError(f'{path}: no lines; expected JSON lines such as {{"turns": ["Why is the sky blue?"]}}')
    return tasks


def _first_turn(row: dict[str, Any]) -> str | None:
    turns = row.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return turns[0]
    if isinstance(row.get("prompt"), str):
        return str(row["prompt"])
    for key, role, content in (("messages", "role", "content"), ("conversations", "from", "value")):
        given = row.get(key)
        for message in given if isinstance(given, list) else ():
            if isinstance(message, dict) and (message.get(role) or message.get("role")) in ("user", "human"):
                text = message.get(content) or message.get("content")
                return text if isinstance(text, str) else None
    return None
