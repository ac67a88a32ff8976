"""Whether texts that a head is to be judged by are among those that it was trained on.

Contract: texts in, counts out. Texts are compared as words: case, punctuation and spacing do not count. Two texts
overlap if all their words are the same, or if they share a run of `words` words. Languages that put no spaces between
words have long ones, so that there mostly the first is found. Runs of the evaluation texts alone are held in memory.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eaglekit.errors import DataError
from eaglekit.train.text.forms import read_rows
from eaglekit.train.text.tries import read_tries

WORDS = 13


@dataclass(frozen=True)
class Overlap:
    """What was found of an evaluation file.

    Attributes:
        name: Of the file.
        texts: Its texts.
        same: Of these, those that are training texts word for word.
        shared: Of the others, those that share a run of words with some training text.
    """

    name: str
    texts: int
    same: int
    shared: int

    def line(self) -> str:
        """The same in a line of text."""
        return (
            f"overlap with {self.name}: {self.texts} texts, {self.same} the same as a training prompt, "
            f"{self.shared} more with {WORDS} words in a row of one"
        )


def find_overlaps(
    evaluation: Mapping[str, Sequence[str]], training: Iterable[str], words: int = WORDS
) -> list[Overlap]:
    """Compare the texts of each evaluation file with all training texts, which are read once."""
    whole: dict[str, set[tuple[str, int]]] = {}
    runs: dict[str, set[tuple[str, int]]] = {}
    for name, texts in evaluation.items():
        for i, text in enumerate(texts):
            found = _words(text)
            if found:
                whole.setdefault(" ".join(found), set()).add((name, i))
            for run in _runs(found, words):
                runs.setdefault(run, set()).add((name, i))
    same: set[tuple[str, int]] = set()
    shared: set[tuple[str, int]] = set()
    for text in training:
        found = _words(text)
        same |= whole.get(" ".join(found), set())
        for run in _runs(found, words):
            shared |= runs.get(run, set())
    shared -= same
    return [
        Overlap(name, len(texts), sum(n == name for n, _ in same), sum(n == name for n, _ in shared))
        for name, texts in evaluation.items()
    ]


def training_texts(files: Sequence[Path], talks: Path) -> Iterator[str]:
    """What users say in the rows of `files`, or without files in the dialogues of `talks`; plain texts as a whole.

    All rows count, also those that a training leaves out; rows that cannot be read do not.
    """
    for file in files:
        bad: list[DataError] = []
        for row in read_rows(file, bad.append):
            if isinstance(row, str):
                yield row
            else:
                yield from (m["content"] for m in row if m["role"] == "user")
    if not files and talks.exists():
        for done in read_tries(talks):
            yield from (m["content"] for m in done.messages if m["role"] == "user")


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())


def _runs(words: Sequence[str], length: int) -> Iterator[str]:
    return (" ".join(words[i : i + length]) for i in range(len(words) - length + 1))
