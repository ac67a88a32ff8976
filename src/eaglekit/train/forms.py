"""Rows of training files: which form a row has is seen by looking at its keys.

Contract: a file is JSON lines, gzipped when its name ends in `.gz`, or parquet when it ends in `.parquet`. A row has
one of these keys, the first of them that is there counts, and other keys are ignored:

    turns          ["user text", ...]                          prompts; the first one alone is used
    messages       [{"role": "user", "content": "..."}, ...]   a dialogue, or a prompt if nothing is answered in it
    conversations  the same, or [{"from": "human", "value": "..."}, ...] (ShareGPT: human, gpt, system)
    text           "..."                                       plain text

Whatever is wrong is a `DataError` that names the file and the line (of a parquet file the row, from 1).

Glossary: a conversation is a list of messages with "role" (user, assistant or system) and "content"; a row is either
that or a plain text.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eaglekit.errors import DataError
from eaglekit.jsonl import is_text, read_lines

Message = dict[str, str]
Row = list[Message] | str

_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system"}


def read_rows(path: Path, on_bad: Callable[[DataError], None] | None = None) -> Iterator[Row]:
    """The rows of a file, read as they are asked for; a row of `turns` gives its first turn alone.

    Args:
        path: The file.
        on_bad: Called with what is wrong with a row, which is then left out, in place of raising it. A file that cannot
            be read on is an error all the same.

    Raises:
        DataError: see `read_lines`; or a row has none of the forms; or parquet cannot be read here.
    """
    rows = _read_parquet(path) if path.suffix == ".parquet" else read_lines(path, on_bad)
    for number, row in rows:
        try:
            yield _parsed(row, f"{path}:{number}")
        except DataError as e:
            if on_bad is None:
                raise
            on_bad(e)


def _parsed(row: dict[str, Any], where: str) -> Row:
    row = {key: value for key, value in row.items() if value is not None}  # a parquet row has every column
    if "turns" in row:
        turns = row["turns"]
        if isinstance(turns, list) and turns and all(isinstance(t, str) and t.strip() and is_text(t) for t in turns):
            return [{"role": "user", "content": turns[0]}]
        raise DataError(f"{where}: expected 'turns' to be a list of texts that are not empty; got {_shown(turns)}")
    for key in ("messages", "conversations"):
        if key in row:
            return _conversation(row[key], key, where)
    text = row.get("text")
    if isinstance(text, str) and text.strip() and is_text(text):
        return text
    if text is not None:
        raise DataError(f"{where}: expected 'text' to be a text that is not empty; got {_shown(text)}")
    raise DataError(
        f'{where}: expected one of "turns": ["..."], "messages": [{{"role": "user", "content": "..."}}, ...], '
        f'"conversations" of that kind or with from and value, and "text": "..."; got keys {sorted(row)}'
    )


def _conversation(given: Any, key: str, where: str) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise DataError(f"{where}: expected '{key}' to be a list of messages; got {_shown(given)}")
    messages = []
    for place, message in enumerate(given):
        values = message if isinstance(message, dict) else {}
        role, content = values.get("role") or values.get("from"), values.get("content")
        content = values.get("value") if content is None else content
        if not isinstance(role, str) or role not in _ROLES or not isinstance(content, str) or not is_text(content):
            raise DataError(
                f"{where}: expected messages with a role (or from) of {', '.join(_ROLES)}, and a text as content (or "
                f"value); message {place} of '{key}' is {_shown(message)}"
            )
        messages.append({"role": _ROLES[role], "content": content})
    if all(m["role"] == "system" for m in messages):
        raise DataError(f"{where}: expected '{key}' to have a message of the user; got system messages alone")
    return messages


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _read_parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number from 1, row) of a parquet file."""
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(
            f"{path}: parquet cannot be read without pyarrow; pip install pyarrow, or give JSON lines"
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in file.iter_batches())
            for number, row in enumerate(rows, 1):
                yield number, row
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; expected a parquet file") from None
    except (OSError, ValueError) as e:  # pyarrow's own errors are of these kinds
        reason = " ".join(str(e).split())[:200]
        raise DataError(f"{path}:{number + 1}: cannot be read on from here ({reason}); get the file again") from None
