"""Where an answer ends, and what of it is text: decided in one place for every method.

A `Stopper` is fed the tokens of each round. It looks at them one by one, as step-wise decoding would, and cuts at the
first end-of-text id, at the token that completes a stop string, or at the limit; what a round emitted behind that
point reaches nobody. An end-of-text id is the last of the answer's ids and has no text. A stop string's tokens stay
in the ids, its text is cut. Text that may still turn out to be the beginning of a stop string, or half a character,
is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from eaglekit.errors import InputError

FinishReason = Literal["stop", "length", "closed"]
Decode = Callable[[list[int]], str]
"""Token ids -> text, without special tokens."""


@dataclass(frozen=True)
class Piece:
    """A part of an answer, ready to be shown: nothing of it is ever taken back."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...] | None = None


class Detokenizer:
    """Text of a growing list of ids, at a cost that does not grow with it."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # decoding begins here: enough context for the spaces between words to come out right
        self._done = 0  # ids before this one have been turned into text

    def push(self, token: int) -> str:
        """The text that `token` adds; empty while a character is incomplete."""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._done])
        after = self._decode(self._ids[self._start :])
        if after.endswith("\ufffd") or len(after) <= len(before):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return after[len(before) :]


class Stopper:
    """Ends one answer.

    Args:
        max_new_tokens: The limit; 0 ends it before it begins.
        eos_ids: Ids that end it.
        stop: Strings that end it.
        decode: Needed for text and for stop strings; without it pieces have no text.
    """

    def __init__(
        self,
        *,
        max_new_tokens: int,
        eos_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        decode: Decode | None = None,
    ) -> None:
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
            raise InputError(f"max_new_tokens={max_new_tokens!r}: expected a whole number from 0")
        if any(not isinstance(s, str) or not s for s in stop):
            raise InputError(f"stop={list(stop)!r}: expected strings that are not empty")
        if stop and decode is None:
            raise InputError("stop: stop strings need a tokenizer, and this target has none; use eos ids")
        self.remaining = max_new_tokens
        self.finish_reason: FinishReason | None = None if max_new_tokens else "length"
        self._eos = frozenset(eos_ids)
        self._stop = tuple(stop)
        self._detokenizer = None if decode is None else Detokenizer(decode)
        self._held = ""

    @property
    def finished(self) -> bool:
        """Whether the answer has ended."""
        return self.finish_reason is not None

    def push(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> Piece:
        """Take a round's tokens; give back what belongs to the answer and can be shown now."""
        kept: list[int] = []
        shown = ""
        for token in tokens:
            if self.finished:
                break
            kept.append(token)
            self.remaining -= 1
            if token in self._eos:
                self.finish_reason = "stop"
            else:
                shown += self._push_text(token)
            if not self.finished and self.remaining == 0:
                self.finish_reason = "length"
        if self.finished:
            shown, self._held = shown + self._held, ""
        return Piece(tuple(kept), shown, None if logprobs is None else tuple(logprobs[: len(kept)]))

    def _push_text(self, token: int) -> str:
        if self._detokenizer is None:
            return ""
        self._held += self._detokenizer.push(token)
        found = [i for i in (self._held.find(s) for s in self._stop) if i >= 0]
        if found:
            self.finish_reason = "stop"
            self._held = self._held[: min(found)]
        safe = len(self._held) - (0 if found else self._possible_stop())
        shown, self._held = self._held[:safe], self._held[safe:]
        return shown

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        return max(
            (n for s in self._stop for n in range(1, min(len(s), len(self._held) + 1)) if self._held.endswith(s[:n])),
            default=0,
        )
