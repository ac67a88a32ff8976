"""Rows of training files: which form a row has is seen by looking at its keys.

Contract: a file is JSON lines, gzipped when its name ends in `.gz`, or parquet when it ends in `.parquet`. What is no
file but a folder, or named as datasets on the Hugging Face hub are, is read by the `datasets` library: `org/name`,
`org/name:split` (default: train) or `org/name:config:split`. A row has one of these keys, the first of them that is
there counts, and other keys are ignored:

    turns          ["user text", ...]                          prompts; the first one alone is used
    messages       [{"role": "user", "content": "..."}, ...]   a dialogue, or a prompt if nothing is answered in it
    conversations  the same, or [{"from": "human", "value": "..."}, ...] (ShareGPT: human, gpt, system)
    text           "..."                                       plain text

Whatever is wrong is a `DataError` that names the file and the line (of a parquet file or a dataset the row, from 1).

Glossary: a conversation is a list of messages with "role" (user, assistant or system) and "content"; a row is either
that or a plain text.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eaglekit.errors import DataError
from eaglekit.jsonl import is_text, read_lines

Message = dict[str, str]
Row = list[Message] | str

_KEYS = ("turns", "messages", "conversations", "text")
_SUFFIXES = (".jsonl", ".json", ".gz", ".parquet", ".txt", ".csv")  # of files, also where there is none
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WITH_SPLIT = re.compile(r"(.+?)(?::([\w.-]+))?:([\w.-]+(?:\[[^]]*\])?)")  # a split may be a slice: train[:5%]
_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system"}


def read_rows(path: Path, on_bad: Callable[[DataError], None] | None = None) -> Iterator[Row]:
    """The rows of a file or dataset, read as they are asked for; a row of `turns` gives its first turn alone.

    Args:
        path: The file, or what `is_dataset` says yes to.
        on_bad: Called with what is wrong with a row, which is then left out, in place of raising it. A file that cannot
            be read on is an error all the same.

    Raises:
        DataError: see `read_lines`; or a row has none of the forms; or parquet or the dataset cannot be read here.
    """
    name = str(path)
    if is_dataset(path):
        name, rows = _read_dataset(path)
    else:
        rows = _read_parquet(path) if path.suffix == ".parquet" else read_lines(path, on_bad)
    for number, row in rows:
        try:
            yield _parsed(row, f"{name}:{number}")
        except DataError as e:
            if on_bad is None:
                raise
            on_bad(e)


def is_dataset(path: Path) -> bool:
    """Whether `path` is no file but a folder, or the name of a dataset on the hub, with a split or not."""
    if path.is_file():
        return False
    name = _split_name(path)[0]
    return Path(name).is_dir() or (bool(_HUB_ID.fullmatch(name)) and not name.endswith(_SUFFIXES))


def require(path: Path) -> None:
    """See that there is something of this name to read; whether it can be read shows later.

    Raises:
        DataError: there is not.
    """
    if not path.is_file() and not is_dataset(path):
        raise DataError(f"{path}: no such file; expected JSON lines, parquet, or a dataset")


def _split_name(path: Path) -> tuple[str, str | None, str]:
    """Folder or id, configuration (None for the dataset's own) and split."""
    if path.is_dir():
        return str(path), None, "train"
    found = _WITH_SPLIT.fullmatch(str(path))
    return (found[1], found[2], found[3]) if found else (str(path), None, "train")


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


def _read_dataset(path: Path) -> tuple[str, Iterator[tuple[int, dict[str, Any]]]]:
    """Its name, with the split, and (row number from 1, row) of a dataset; other columns than `_KEYS` are left out."""
    folder_or_id, config, split = _split_name(path)
    name = ":".join((folder_or_id, *([config] if config else []), split))
    try:
        library: Any = importlib.import_module("datasets")
    except ImportError:
        raise DataError(
            f"{path}: no such file, and a dataset cannot be read without the datasets library; pip install datasets, "
            "or give JSON lines"
        ) from None
    try:
        data = library.load_dataset(folder_or_id, config, split=split)
    except Exception as e:  # the library raises errors of many others: of the network, of parsers, of the hub
        raise DataError(f"{name}: cannot be loaded ({_reason(e)}); {_remedy(e)}") from None
    columns = [column for column in data.column_names if column in _KEYS]
    if not columns:
        raise DataError(f"{name}: expected a column of {', '.join(_KEYS)}; got {', '.join(data.column_names)}")
    return name, enumerate(data.select_columns(columns), 1)


def _reason(error: BaseException) -> str:
    """What an error of the datasets library comes from: its own words for a broken file say nothing."""
    while type(error).__name__ == "DatasetGenerationError" and error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _remedy(error: Exception) -> str:
    if isinstance(error, ConnectionError):
        return "there is no such file or folder, and the hub cannot be reached: look at the network, or give a file"
    if isinstance(error, FileNotFoundError):
        return "expected a file, a folder of JSON lines or parquet files, or the name of a dataset on the hub"
    return "expected org/name, org/name:split or org/name:config:split, or a folder, with its split behind a colon"
