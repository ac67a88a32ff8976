"""JSON lines, gzipped when the file's name ends in `.gz`: an object per line; a line ends at a line feed alone."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eaglekit.errors import DataError

_MARK = b"\xef\xbb\xbf"  # some editors put it in front of UTF-8


def read_lines(path: Path, on_bad: Callable[[DataError], None] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not empty; lines are read as they are asked for.

    Args:
        path: The file.
        on_bad: Called with what is wrong with a line, which is then left out, in place of raising it. A file that is
            missing or cannot be read on is an error all the same.

    Raises:
        DataError: the file is missing, truncated or corrupt, or a line is not UTF-8 or no JSON object.
    """
    number = 0
    try:
        # In binary, as text is decoded in blocks: a bad byte would be blamed on an earlier line.
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = _parsed(line.removeprefix(_MARK) if number == 1 else line, f"{path}:{number}")
                except DataError as e:
                    if on_bad is None:
                        raise
                    on_bad(e)
                    continue
                if row is not None:
                    yield number, row
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; expected a file of JSON lines") from None
    except (OSError, EOFError, zlib.error) as e:
        reason = getattr(e, "strerror", None) or e
        raise DataError(f"{path}:{number + 1}: cannot be read on from here ({reason}); get the file again") from None


def _parsed(line: bytes, where: str) -> dict[str, Any] | None:
    """The object of a line, or None if it is empty."""
    try:
        text = line.decode("utf-8")
        if not text.strip():
            return None
        row = json.loads(text)
    except UnicodeDecodeError as e:
        raise DataError(f"{where}: not UTF-8 ({e}); convert the file") from None
    except (ValueError, RecursionError) as e:
        raise DataError(f"{where}: not JSON ({e}); fix or delete the line") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: a {type(row).__name__}, expected a JSON object")
    return row


def is_text(text: str) -> bool:
    """Whether `text` can be written as UTF-8: JSON may hold halves of characters, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
