"""The target writes dialogues by itself: training text from a model's name alone.

Contract: led by its own chat template up to where a user's text starts, the target samples that text too, then answers
it, and so on for a few turns. Each try gives one JSON line, in the order of the tries, in a file that is only ever
appended to: a dialogue, or why there is none. A run that was killed is started again with the same arguments and goes
on; which dialogues come out follows from the target, the options and the seed alone.

Left out, and counted: turns that are empty, that loop, or (of the user) that do not end; messages that the template
refuses; near duplicates of dialogues kept before. A dialogue whose later turn fails is kept without it.

Glossary: a try is one attempt at a dialogue; the header is what the template puts before a user's text, the closing
what it puts behind; a shingle is a run of words, by which dialogues are compared.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from eaglekit.errors import DataError, InputError
from eaglekit.train.features.store import FEATURE_DTYPE, FeatureSink
from eaglekit.train.options import SelfTalkOptions, SynthesisOptions
from eaglekit.train.text.answers import Finished, Job, generate, is_fast
from eaglekit.train.text.dataset import Dialogue, RefusedError, drop_torn_line, encode_prompt, find_spans, render_text
from eaglekit.train.text.forms import Message
from eaglekit.train.text.tries import Report, Seen, Try, read_tries

_PLACE = "EAGLEKIT-USER-TEXT"  # stands where a user's text goes; never read by a model


def self_talk(
    model: Any,
    tokenizer: Any,
    path: Path,
    count: int,
    *,
    eos_ids: Sequence[int],
    pad_id: int,
    synthesis: SynthesisOptions,
    options: SelfTalkOptions,
    max_length: int,
    on_progress: Callable[[Report], None] | None = None,
    on_features: FeatureSink | None = None,
) -> Report:
    """Have `count` dialogues in the file `path`.

    Args:
        model: A transformers causal language model.
        tokenizer: Its tokenizer, with a chat template.
        path: JSON lines, see `read_tries`.
        count: Dialogues wanted, those in the file included.
        eos_ids: Ids that end an answer.
        pad_id: Id used for padding.
        synthesis: Of the answers: length, temperatures (in turn), batches, seed.
        options: See `SelfTalkOptions`.
        max_length: The target's context.
        on_progress: Called when there are more dialogues, but for the last ones.
        on_features: Called with each new dialogue and its features [n - 1, H], once it is in the file, by the fast path
            only.

    Raises:
        InputError: the target has no chat template, or not room enough.
        DataError: `path` has a line that is no try; or nearly every try fails.
    """
    stage = _Stage(tokenizer, frozenset(eos_ids), synthesis, options, min(options.max_tokens, max_length))
    path.parent.mkdir(parents=True, exist_ok=True)
    drop_torn_line(path)
    report, seen = Report(), Seen(options)
    for done in read_tries(path) if path.exists() else ():
        report.count(done)
        if done.dialogue is not None:
            seen.add(done.messages)
    # Stock sampling depends on who shares a batch, so there tries go in whole waves, also behind an interruption.
    fast, wave = is_fast(model), synthesis.batch_size
    room = max(1, 2 * wave * (synthesis.max_prompt_tokens + synthesis.max_new_tokens) // stage.limit)
    number = report.tries if fast else report.tries // wave * wave
    queue: deque[Job] = deque()
    talks: dict[int, _Talk] = {}  # by number, like those that have ended and wait for their turn in the file
    ended: dict[int, _Talk] = {}

    def start(some: int) -> None:
        nonlocal number
        for _ in range(some):
            talks[number] = _Talk(number, stage)
            queue.append(talks[number].ask())
            number += 1

    while report.kept < count:
        start(min(room, count - report.kept) if fast else wave)
        groups = generate(
            model,
            queue,
            batch_size=-(-room // 2) if fast else wave,
            max_length=stage.limit,
            pad_id=pad_id,
            features=FEATURE_DTYPE if on_features else None,
        )
        for group in groups:
            for finished in group:
                talk = talks[finished.job.key]
                job = talk.go_on(finished)
                if job is not None:
                    queue.append(job)
                else:
                    ended[talk.number] = talks.pop(talk.number)
            before = report.kept
            _write(path, ended, seen, report, count, on_features)
            if report.kept == count:
                break
            if report.tries >= 64 + 20 * count:
                raise DataError(
                    f"{report.summary()}; this target hardly talks by itself: give it text with --data FILE"
                )
            if fast:
                start(min(room - len(talks), count - report.kept - len(talks) - len(ended)))
            if on_progress is not None and report.kept > before:
                on_progress(report)
    return report


def _write(
    path: Path,
    ended: dict[int, _Talk],
    seen: Seen,
    report: Report,
    count: int,
    on_features: FeatureSink | None,
) -> None:
    """Append the talks whose turn it is, up to `count` dialogues; those that are in the file already are left out."""
    for number in [n for n in ended if n < report.tries]:
        del ended[number]
    while report.tries in ended and report.kept < count:
        talk = ended.pop(report.tries)
        done = talk.result()
        if done.dialogue is not None and not seen.add(done.messages):
            done = Try(done.number, None, [], "near duplicates")
        with path.open("a", encoding="utf-8") as f:
            f.write(done.to_line() + "\n")
        report.count(done)
        if done.dialogue is not None and talk.features is not None and on_features is not None:
            on_features(done.dialogue, talk.features)


class _Stage:
    """What all tries have in common."""

    def __init__(
        self, tokenizer: Any, ends: frozenset[int], synthesis: SynthesisOptions, options: SelfTalkOptions, limit: int
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                "self-talk: this target has no chat template that would lead it to write both sides; give it text with "
                "--data FILE"
            )
        self.tokenizer, self.ends, self.synthesis, self.options, self.limit = tokenizer, ends, synthesis, options, limit
        special = {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
        self.user_ends = ends | special | frozenset(tokenizer.all_special_ids)
        header, _ = self.header([])
        if len(header) + 2 > limit:
            raise InputError(f"self-talk: {limit} tokens are too few for the chat template's {len(header)} and a text")

    def header(self, messages: Sequence[Message]) -> tuple[list[int], str]:
        """Ids before the next text of the user behind `messages`, and the first words that the template puts behind."""
        text = render_text(self.tokenizer, [*messages, {"role": "user", "content": _PLACE}], generate=False)
        before, found, behind = text.rpartition(_PLACE)
        if not found:
            raise RefusedError("the chat template does not show the user's text")
        # Tokenizers join a space with the word behind it, which is still to be written.
        ids = list(self.tokenizer(before.rstrip(" "), add_special_tokens=False)["input_ids"])
        if not ids:
            raise InputError("self-talk: the chat template puts nothing before a user's text; give prompts with --data")
        return ids, behind.strip().partition("\n")[0]

    def text(self, ids: Sequence[int], skip: bool = True) -> str:
        """Decoded `ids`, special tokens left out if `skip`."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))

    def loops(self, ids: Sequence[int]) -> bool:
        """Whether some run of `loop_tokens` tokens comes `loop_times` times."""
        n = self.options.loop_tokens
        runs = Counter(tuple(ids[i : i + n]) for i in range(len(ids) - n + 1))
        return any(times >= self.options.loop_times for times in runs.values())


class _Talk:
    """A try that goes on: `ask` gives the first job, `go_on` each next one."""

    def __init__(self, number: int, stage: _Stage) -> None:
        self.number, self.stage = number, stage
        temperatures = stage.synthesis.temperatures
        self.temperature = temperatures[number % len(temperatures)]
        self.turns = 1 + number // len(temperatures) % stage.options.turns
        self.messages: list[Message] = []
        self.dialogue: Dialogue | None = None
        self.features: Tensor | None = None
        self.closing = self.failure = ""

    def ask(self) -> Job:
        """The job of writing the user's next text."""
        header, self.closing = self.stage.header(self.messages)
        options = self.stage.options
        return self._job(header, options.user_temperature, options.max_user_tokens, self.stage.user_ends)

    def _job(self, prompt: Sequence[int], temperature: float, most: int, ends: frozenset[int]) -> Job:
        most = min(most, self.stage.limit - len(prompt))
        seed = ((self.stage.synthesis.seed * 1_000_003 + self.number) * 1_009 + len(self.messages)) % 2**63
        return Job(self.number, tuple(prompt), temperature, most, ends, seed)

    def go_on(self, finished: Finished) -> Job | None:
        """Take what was written; the next job, or None at the end."""
        try:
            return self._after_user(finished) if len(self.messages) % 2 == 0 else self._after_answer(finished)
        except RefusedError:
            return self._end("refused by the chat template")

    def _after_user(self, finished: Finished) -> Job | None:
        ids = finished.answer
        ends = ids[-1] in finished.job.ends
        text, closing, _ = self.stage.text(ids[:-1] if ends else ids, skip=False).partition(self.closing or "\0")
        text = text.strip()
        if self.stage.loops(ids):
            return self._end("loops")
        if not ends and not closing:
            return self._end("unfinished")
        if not any(c.isalnum() for c in text):
            return self._end("empty turns")
        self.messages.append({"role": "user", "content": text})
        prompt = encode_prompt(self.stage.tokenizer, self.messages)
        if len(prompt) + 1 > self.stage.limit:
            return self._end("too long")
        return self._job(prompt, self.temperature, self.stage.synthesis.max_new_tokens, self.stage.ends)

    def _after_answer(self, finished: Finished) -> Job | None:
        answer, prompt = finished.answer, list(finished.job.prompt)
        text = self.stage.text(answer).strip()
        if self.stage.loops(answer):
            return self._end("loops")
        if not any(c.isalnum() for c in text):
            return self._end("empty turns")
        ids = [*prompt, *answer]
        spans = [*find_spans(self.stage.tokenizer, self.messages, prompt, generate=True), (len(prompt), len(ids))]
        self.dialogue = Dialogue(ids, spans, self.temperature == 0)
        # The generator's rows are given to others.
        self.features = None if finished.features is None else finished.features.clone()
        self.messages.append({"role": "assistant", "content": text})
        if len(self.messages) == 2 * self.turns or answer[-1] not in finished.job.ends:
            return None
        if len(self.stage.header(self.messages)[0]) + 2 > self.stage.limit:
            return self._end("too long")
        return self.ask()

    def _end(self, failure: str) -> Job | None:
        """End here; a text of the user without an answer is left out."""
        self.failure = failure
        if len(self.messages) % 2:
            self.messages.pop()
        return None

    def result(self) -> Try:
        """What came out."""
        if self.dialogue is None:
            return Try(self.number, None, [], self.failure)
        return Try(self.number, self.dialogue, self.messages, shortened=self.failure)
