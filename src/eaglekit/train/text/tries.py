"""What came of each try of `self_talk`: a line of its file, the counts, and which dialogues are like earlier ones.

Contract: a file holds the tries from 0 on, in order, a JSON object each: `messages`, `ids`, `spans` and `greedy` of a
dialogue, or why it was `dropped`.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eaglekit.errors import DataError
from eaglekit.jsonl import read_lines
from eaglekit.train.options import SelfTalkOptions
from eaglekit.train.text.dataset import Dialogue
from eaglekit.train.text.forms import Message


@dataclass(frozen=True)
class Try:
    """A line of the file.

    Attributes:
        number: From 0, in order.
        dialogue: What came out, or None.
        messages: The same as text.
        dropped: Why there is no dialogue; empty if there is one.
        shortened: Why it has fewer turns than were asked for; empty if it has as many.
    """

    number: int
    dialogue: Dialogue | None
    messages: list[Message]
    dropped: str = ""
    shortened: str = ""

    def to_line(self) -> str:
        """Its line, without the line feed."""
        row: dict[str, Any] = {"try": self.number}
        if self.dialogue is None:
            row |= {"dropped": self.dropped}
        else:
            d = self.dialogue
            row |= {"messages": self.messages, "ids": d.ids, "spans": d.spans, "greedy": d.greedy}
            row |= {"shortened": self.shortened} if self.shortened else {}
        return json.dumps(row, ensure_ascii=False, separators=(",", ":"))


@dataclass
class Report:
    """What the tries so far gave, earlier runs included."""

    tries: int = 0
    kept: int = 0
    turns: int = 0
    tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    shortened: int = 0

    def count(self, done: Try) -> None:
        """Add a try."""
        self.tries += 1
        if done.dialogue is None:
            self.dropped[done.dropped] += 1
            return
        self.kept += 1
        self.turns += len(done.dialogue.spans)
        self.tokens += sum(end - start for start, end in done.dialogue.spans)
        self.shortened += bool(done.shortened)

    def summary(self) -> str:
        """All counts in a line."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items()))
        return (
            f"self-talk: {self.kept} dialogues, {self.turns} answers of {self.tokens} tokens, from {self.tries} tries; "
            f"{self.dropped.total()} dropped{f' ({reasons})' if reasons else ''}, {self.shortened} shortened"
        )


class Seen:
    """Shingles of the dialogues kept so far; one in four, chosen by their hash, stands for all."""

    def __init__(self, options: SelfTalkOptions) -> None:
        self.words, self.shared = options.shingle_words, options.shared
        self.hashes: set[int] = set()

    def add(self, messages: Sequence[Message]) -> bool:
        """Keep a dialogue; False, and nothing kept, if it is a near duplicate."""
        words = re.findall(r"\w+", " ".join(m["content"] for m in messages).lower())
        runs = {" ".join(words[i : i + self.words]) for i in range(max(1, len(words) - self.words + 1))}
        every = {zlib.crc32(run.encode("utf-8", "replace")) for run in runs}
        hashes = {h for h in every if h % 4 == 0} or {min(every)}
        if len(hashes & self.hashes) > self.shared * len(hashes):
            return False
        self.hashes |= hashes
        return True


def read_tries(path: Path) -> Iterator[Try]:
    """The tries of a file that `self_talk` wrote.

    Raises:
        DataError: see `read_lines`; or a line is no try, or not the next one.
    """
    for expected, (number, row) in enumerate(read_lines(path)):
        try:
            if row["try"] != expected:
                raise ValueError(f"try {row['try']}, expected {expected}")
            if "dropped" in row:
                yield Try(expected, None, [], str(row["dropped"]))
                continue
            spans = [(int(a), int(b)) for a, b in row["spans"]]
            messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in row["messages"]]
            dialogue = Dialogue(list(map(int, row["ids"])), spans, bool(row["greedy"]))
            done = Try(expected, dialogue, messages, shortened=str(row.get("shortened", "")))
        except (ValueError, KeyError, TypeError) as e:
            raise DataError(f"{path}:{number}: not a try of self-talk ({e}); delete the file and run again") from None
        yield done
