"""Training text: files of prompts or dialogues, the chat template, and which tokens are answers.

Contract: files are JSON lines, gzipped when their name ends in `.gz`. A line is `{"turns": ["user text", ...]}`
(prompts that the target is to answer) or `{"conversations": [{"role": "user", "content": "..."}, ...]}` (dialogues with
given answers). Other keys are ignored. Whatever is wrong is a `DataError` that names the file and the line.

Answers are found by rendering the chat template up to each assistant turn, never by counting tokens of a known
template: `spans` holds (first token of the answer, one past its last) of every assistant turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglekit.errors import DataError
from eaglekit.jsonl import read_lines

Message = dict[str, str]


@dataclass(frozen=True)
class Dialogue:
    """Token ids and the spans of the answers in them.

    Attributes:
        ids: The whole dialogue, chat template applied.
        spans: (start, end) of each answer, in order, 1 <= start < end <= len(ids).
        greedy: Whether the answers are the target's own at temperature 0, so that drafts can be judged against them.
    """

    ids: list[int]
    spans: list[tuple[int, int]]
    greedy: bool = False


def read_conversations(path: Path) -> list[list[Message]]:
    """Messages of every line of a prompt or dialogue file; a prompt line gives its first user turn alone.

    Raises:
        DataError: see `read_lines`; or a line has neither turns nor conversations of the right kind.
    """
    conversations = []
    for number, row in read_lines(path):
        turns, given = row.get("turns"), row.get("conversations")
        if isinstance(turns, list) and turns and all(isinstance(t, str) and t.strip() for t in turns):
            conversations.append([{"role": "user", "content": turns[0]}])
        elif isinstance(given, list) and given and all(_is_message(m) for m in given):
            conversations.append([{"role": m["role"], "content": m["content"]} for m in given])
        else:
            raise DataError(
                f'{path}:{number}: expected {{"turns": ["...", ...]}} or '
                f'{{"conversations": [{{"role": "user", "content": "..."}}, ...]}}; got keys {sorted(row)}'
            )
    return conversations


def drop_torn_line(path: Path) -> None:
    """Cut off what follows the last line feed of a file that is only appended to: a kill left it there."""
    if path.exists():
        with path.open("rb+") as f:
            f.truncate(f.read().rfind(b"\n") + 1)


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in ("system", "user", "assistant")
        and isinstance(message.get("content"), str)
    )


def _render(tokenizer: Any, messages: Sequence[Message], generate: bool) -> list[int]:
    """Token ids of messages; without a chat template, their texts with an empty line in between."""
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=generate, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    text = "\n\n".join(m["content"] for m in messages) + ("\n\n" if generate else "")
    return list(tokenizer(text)["input_ids"])


def encode_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Ids that end where the answer to the last user turn starts; what follows that turn is left out."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=len(messages) - 1)
    return _render(tokenizer, messages[: last + 1], generate=True)


def encode_dialogue(tokenizer: Any, messages: Sequence[Message], max_tokens: int) -> Dialogue | None:
    """The dialogue's first `max_tokens` ids and its answers' spans; None when no answer is left in them.

    An answer's span is what the template adds to the prompt that precedes it: its text and the end-of-turn token, up to
    the last token that is the same whether or not another turn follows.
    """
    ids = _render(tokenizer, messages, generate=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _common(_render(tokenizer, messages[:i], generate=True), ids)
        end = _common(_render(tokenizer, messages[: i + 1], generate=False), ids)
        if 1 <= start < min(end, max_tokens):
            spans.append((start, min(end, max_tokens)))
    return Dialogue(ids[:max_tokens], spans) if spans else None


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
