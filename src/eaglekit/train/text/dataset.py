"""Training text as tokens: the chat template, and which tokens are answers.

Contract: `read_training_text` makes prompts (which the target is to answer) and dialogues (used as they are) of the
rows of files, see `forms`. Nothing is left out in silence: what is cut off, dropped or skipped is counted, and
`TrainingText.summary` says so in a line.

Answers are found by rendering the chat template up to each assistant turn, never by counting tokens of a known
template: `spans` holds (first token of the answer, one past its last) of every assistant turn. Of a plain text every
token but the first is an answer: that is how models without a chat template are trained. Messages for such a model
are joined by empty lines.

Glossary: a dialogue is token ids with spans; an opening is what of a given dialogue or text stands before its first
answer: a prompt for whoever gives no prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eaglekit.errors import DataError
from eaglekit.train.text.forms import Message, read_rows

_LEAST = 3  # tokens of a dialogue: shorter ones hold no prediction to judge


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


@dataclass
class TrainingText:
    """What files hold, in the order of their rows.

    Attributes:
        prompts: Ids of each row without an answer, ending where the answer starts; also those that are too long.
        given: Dialogues and texts.
        openings: Of each of `given`.
        rows: Rows read.
        cut: Dialogues whose end was cut off.
        pieces: Texts that were cut into pieces, and how many pieces these are.
        dropped: Rows that nothing is trained on, by reason.
        bad: Rows skipped because they could not be read.
    """

    prompts: list[list[int]] = field(default_factory=list)
    given: list[Dialogue] = field(default_factory=list)
    openings: list[list[int]] = field(default_factory=list)
    rows: int = 0
    cut: int = 0
    pieces: tuple[int, int] = (0, 0)
    dropped: Counter[str] = field(default_factory=Counter)
    bad: list[DataError] = field(default_factory=list)

    def summary(self, max_tokens: int) -> str:
        """All counts in a line."""
        said = [f"{self.rows} rows: {len(self.prompts)} prompts, {len(self.given)} dialogues or texts"]
        if self.cut:
            said.append(f"{self.cut} dialogues cut to {max_tokens} tokens")
        if self.pieces[0]:
            said.append(f"{self.pieces[0]} texts cut into {self.pieces[1]} pieces of at most {max_tokens} tokens")
        if self.dropped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items()))
            said.append(f"{self.dropped.total()} dropped ({reasons})")
        if self.bad:
            said.append(f"{len(self.bad)} bad rows skipped, the first: {self.bad[0]}")
        return "data: " + "; ".join(said)


def count_of(lengths: Iterable[int], tokens: float) -> int:
    """How many of the first `lengths` it takes to have `tokens` together; all, if they have not."""
    total = count = 0
    for length in lengths:
        if total >= tokens:
            break
        total, count = total + length, count + 1
    return count


class RefusedError(DataError):
    """The chat template does not take these messages."""


def read_training_text(
    tokenizer: Any, files: Sequence[Path], *, max_prompt_tokens: int, max_tokens: int, skip_bad: bool = False
) -> TrainingText:
    """Prompts and dialogues of every row of `files`.

    Args:
        tokenizer: The target's.
        files: See `forms`.
        max_prompt_tokens: Longer prompts are counted as dropped: whoever answers prompts leaves them out.
        max_tokens: Longer dialogues are cut off, longer texts are cut into pieces.
        skip_bad: Count rows that cannot be read, in place of raising what is wrong with them.

    Raises:
        DataError: see `read_rows`; or there is nothing to train on.
    """
    found = TrainingText()
    refusal = ""
    for file in files:
        for row in read_rows(file, found.bad.append if skip_bad else None):
            found.rows += 1
            try:
                if isinstance(row, str):
                    _add_text(found, tokenizer, row, max_prompt_tokens, max_tokens)
                elif any(m["role"] == "assistant" for m in row):
                    _add_dialogue(found, tokenizer, row, max_tokens)
                else:
                    found.prompts.append(encode_prompt(tokenizer, row))
                    found.dropped["prompts that are too long"] += len(found.prompts[-1]) > max_prompt_tokens
            except RefusedError as e:
                refusal = refusal or f" ({e})"
                found.dropped["refused by the chat template"] += 1
    found.dropped = +found.dropped
    if not found.prompts and not found.given:
        raise DataError(
            f"{', '.join(map(str, files))}: nothing to train on; {found.summary(max_tokens)}{refusal}; "
            "expected prompts, dialogues or texts"
        )
    return found


def _add_text(found: TrainingText, tokenizer: Any, text: str, max_prompt_tokens: int, max_tokens: int) -> None:
    ids = list(tokenizer(text)["input_ids"])
    pieces = [part for i in range(0, len(ids), max_tokens) if len(part := ids[i : i + max_tokens]) >= _LEAST]
    for piece in pieces:
        found.given.append(Dialogue(piece, [(1, len(piece))]))
        found.openings.append(piece[: max(1, min(len(piece) // 4, max_prompt_tokens))])
    if not pieces:
        found.dropped["texts that are too short"] += 1
    elif len(ids) > max_tokens:
        found.pieces = (found.pieces[0] + 1, found.pieces[1] + len(pieces))


def _add_dialogue(found: TrainingText, tokenizer: Any, messages: Sequence[Message], max_tokens: int) -> None:
    whole = encode_dialogue(tokenizer, messages)
    dialogue = cut_dialogue(whole, max_tokens)
    if dialogue is None:
        found.dropped["without an answer that can be trained on" if not whole.spans else "answered too late"] += 1
        return
    found.cut += len(whole.ids) > max_tokens
    found.given.append(dialogue)
    found.openings.append(dialogue.ids[: dialogue.spans[0][0]])


def _render(tokenizer: Any, messages: Sequence[Message], generate: bool) -> list[int]:
    """Token ids of messages; without a chat template, their texts with an empty line in between."""
    if getattr(tokenizer, "chat_template", None):
        text = render_text(tokenizer, messages, generate)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    text = "\n\n".join(m["content"] for m in messages) + ("\n\n" if generate else "")
    return list(tokenizer(text)["input_ids"])


def render_text(tokenizer: Any, messages: Sequence[Message], generate: bool) -> str:
    """The chat template's text of messages.

    Raises:
        RefusedError: the template does not take them.
    """
    try:
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=generate, tokenize=False)
    except Exception as e:  # templates are programs of their own: they raise what they like
        raise RefusedError(f"the chat template refuses these messages: {' '.join(str(e).split())[:200]}") from None
    return str(text)


def encode_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Ids that end where the answer to the last user turn starts; what follows that turn is left out."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=len(messages) - 1)
    return _render(tokenizer, messages[: last + 1], generate=True)


def encode_dialogue(tokenizer: Any, messages: Sequence[Message]) -> Dialogue:
    """The dialogue's ids and its answers' spans.

    An answer's span is what the template adds to the prompt that precedes it: its text and the end-of-turn token, up to
    the last token that is the same whether or not another turn follows.
    """
    ids = _render(tokenizer, messages, generate=False)
    return Dialogue(ids, list(find_spans(tokenizer, messages, ids)))


def cut_dialogue(dialogue: Dialogue, max_tokens: int) -> Dialogue | None:
    """Its first `max_tokens` ids; None when no answer is left in them."""
    spans = [(start, min(end, max_tokens)) for start, end in dialogue.spans if start < max_tokens]
    kept = dialogue.ids[:max_tokens]
    return Dialogue(kept, spans, dialogue.greedy) if spans and len(kept) >= _LEAST else None


def find_spans(
    tokenizer: Any, messages: Sequence[Message], ids: Sequence[int], generate: bool = False
) -> Iterator[tuple[int, int]]:
    """Span of each answer of `messages` in `ids`, which are theirs; with `generate` they end where an answer starts."""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _common(_render(tokenizer, messages[:i], generate=True), ids)
        end = _common(_render(tokenizer, messages[: i + 1], generate=False), ids)
        if start >= end:
            start, end = _probe(tokenizer, messages, i, ids, generate)
        if 1 <= start < end:
            yield start, end


def _probe(
    tokenizer: Any, messages: Sequence[Message], place: int, ids: Sequence[int], generate: bool
) -> tuple[int, int]:
    """Span of the message at `place` where the template renders a turn otherwise once others follow.

    Some templates add thoughts to the last answer alone. What differs when this answer has another text is the answer;
    the token behind it, which ends the turn, is taken with it.
    """
    message = messages[place]
    other = [*messages[:place], {**message, "content": f"0{message['content']}0"}, *messages[place + 1 :]]
    others = _render(tokenizer, other, generate)
    start = _common(others, ids)
    return start, min(len(ids), len(ids) - _common(others[start:][::-1], ids[start:][::-1]) + 1)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def drop_torn_line(path: Path) -> None:
    """Cut off what follows the last line feed of a file that is only appended to: a kill left it there."""
    if path.exists():
        with path.open("rb+") as f:
            f.truncate(f.read().rfind(b"\n") + 1)
