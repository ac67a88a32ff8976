"""Decoding: a prefill, then rounds of propose, forward_tree, verify, commit, observe.

Invariant of a `Session` between calls: with `ids` = x_0 … x_M, the target's cache holds x_0 … x_{M-1}, the drafter
has seen their features paired with x_1 … x_M, and x_M is the root of the next tree. Plain decoding is the same, with
a tree that is a root alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from eaglekit.core.random import RandomSource
from eaglekit.core.sampling import Law
from eaglekit.core.stats import Stats
from eaglekit.core.tree import DraftTree, TreeShape
from eaglekit.core.verify import Verdict, verify
from eaglekit.engine.drafter import Context, Drafter, DrafterState, observe
from eaglekit.engine.stopping import Piece, Stopper
from eaglekit.errors import InputError
from eaglekit.models.target import Target, TargetState

# Tokens that a conversation's caches are opened for at first; a context limit may be a hundred times that.
_FIRST_ROOM = 4096


@dataclass(frozen=True)
class Round:
    """What one round emitted.

    Attributes:
        tokens: At least one.
        logprobs: The target's own log-probability of each, if it was asked for.
        shape: The tree that was verified, or None for the prefill.
        verdict: What became of it.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    shape: TreeShape | None = None
    verdict: Verdict | None = None


class Session:
    """The caches of one conversation; a new prompt re-reads only what differs from the tokens already read.

    Args:
        target: The model.
        drafter: The speculative method.
        max_length: Most tokens that prompt and answer may hold together.
    """

    def __init__(self, target: Target, drafter: Drafter, max_length: int) -> None:
        self.target = target
        self.drafter = drafter
        self.max_length = min(max_length, target.info.max_length)
        self.ids: list[int] = []
        self._room = 0  # tokens that the states were opened for
        self._target_state: TargetState | None = None
        self._drafter_state: DrafterState | None = None

    def generate(
        self,
        prompt: Sequence[int],
        *,
        law: Law,
        source: RandomSource,
        stopper: Stopper,
        stats: Stats,
        logprobs: bool = False,
    ) -> Iterator[Piece]:
        """Answer `prompt`, yielding the new tokens of each round that `stopper` lets through.

        Whatever ends it early (an error, an interrupt, a caller that stops reading) leaves the session usable.
        """
        stats.prompt_tokens += len(prompt)
        if stopper.finished:
            return
        check_prompt(prompt, stopper.remaining, self.max_length, self.target)
        self._make_room(len(prompt) + stopper.remaining)
        clock = _Clock(stats)
        try:
            first = True
            while not stopper.finished:
                with clock.busy():
                    if first:
                        emitted = self._start(prompt, law, source, stats, clock, logprobs)
                    else:
                        emitted = self._step(law, source, stopper.remaining, clock, logprobs)
                    piece = stopper.push(emitted.tokens, emitted.logprobs)
                if emitted.shape is not None and emitted.verdict is not None:
                    stats.observe(emitted.shape, emitted.verdict, len(piece.token_ids))
                stats.new_tokens += len(piece.token_ids)
                stats.first_tokens += len(piece.token_ids) if first else 0
                first = False
                yield piece
        except GeneratorExit:
            raise
        except BaseException:
            self.reset()
            raise

    def reset(self) -> None:
        """Forget everything."""
        self.ids, self._target_state, self._drafter_state = [], None, None

    def restore(self, ids: Sequence[int]) -> None:
        """Bring the session to where it would be after emitting the last of `ids`."""
        self._make_room(len(ids))
        self._read(ids[:-1], lambda _: [ids[-1]])

    @property
    def target_state(self) -> TargetState:
        """The target's caches."""
        return self._states()[0]

    @property
    def drafter_state(self) -> DrafterState:
        """The drafter's caches."""
        return self._states()[1]

    def _make_room(self, tokens: int) -> None:
        """Open states twice as large when they are outgrown: a long conversation is read again now and then."""
        if tokens > self._room:
            self.reset()
            self._room = min(self.max_length, max(tokens, 2 * self._room, _FIRST_ROOM))

    def _states(self) -> tuple[TargetState, DrafterState]:
        if self._target_state is None or self._drafter_state is None:
            room = self._room + self.drafter.max_draft_tokens + 1
            self._target_state = self.target.open(1, room, self.drafter.layers)
            self._drafter_state = self.drafter.open(1, room)
        return self._target_state, self._drafter_state

    def _start(
        self,
        prompt: Sequence[int],
        law: Law,
        source: RandomSource,
        stats: Stats,
        clock: _Clock,
        logprobs: bool,
    ) -> Round:
        """Read the prompt and draw the first token."""
        root = DraftTree.root_only(prompt[-1])
        with clock.phase("prefill"):
            logits, tokens, kept = self._read(prompt, lambda row: verify(root, row, law, prompt, source).tokens)
        stats.cached_prompt_tokens += kept
        return Round(tokens, _logprobs(tokens, logits) if logprobs else None)

    def _read(
        self, prompt: Sequence[int], choose: Callable[[Tensor], Sequence[int]]
    ) -> tuple[Tensor, tuple[int, ...], int]:
        """Read what is new of `prompt`, and let `choose` draw the root from the logits [1, V] behind it.

        Returns:
            Those logits, the root, and how many tokens were read before.
        """
        target, drafter = self._states()
        # The pair (feature, token one step ahead) of the last token kept must be right too: hence one token less.
        keep = max(0, min(_common_prefix(self.ids, prompt) - 1, len(prompt) - 1))
        target.truncate([keep])
        drafter.truncate([keep])
        out = target.prefill([torch.tensor(list(prompt[keep:]))])
        tokens = tuple(choose(out.logits[0]))
        ahead = [*prompt[keep + 1 :], *tokens]
        layers = {k: v[0] for k, v in out.layers.items()}
        drafter.commit([observe(out.features[0], layers, range(len(ahead)), ahead)])
        self.ids = [*prompt, *tokens]
        return out.logits[0], tokens, keep

    def _step(self, law: Law, source: RandomSource, remaining: int, clock: _Clock, logprobs: bool) -> Round:
        """One round: every one emits at least one token."""
        target, drafter = self._states()
        with clock.phase("draft"):
            context = Context(self.ids, law, source, self._max_depth(target, remaining))
            tree = drafter.propose([context])[0]
        with clock.phase("verify"):
            out = target.forward_tree([tree])
        with clock.phase("accept"):
            verdict = verify(tree, out.logits[0], law, self.ids, source)
            target.commit([verdict.nodes])
            layers = {k: v[0] for k, v in out.layers.items()}
            drafter.commit([observe(out.features[0], layers, verdict.nodes, verdict.tokens)])
        self.ids.extend(verdict.tokens)
        scores = _logprobs(verdict.tokens, out.logits[0, list(verdict.nodes)]) if logprobs else None
        return Round(verdict.tokens, scores, tree.shape, verdict)

    def _max_depth(self, target: TargetState, remaining: int) -> int:
        """No draft is worth making that the answer's limit, the context's or the target's positions would forbid."""
        limits = [remaining - 1, self.max_length - len(self.ids)]
        exact = target.depth_limit(0)
        return max(0, min(limits if exact is None else [*limits, exact]))


def check_prompt(prompt: Sequence[int], max_new_tokens: int, max_length: int, target: Target) -> None:
    """Refuse, before any computation, a prompt that cannot be answered.

    Raises:
        InputError: the prompt is empty or too long, or holds ids that the target does not have.
    """
    if not prompt:
        raise InputError("prompt: it has no tokens; give at least one")
    if len(prompt) + max_new_tokens > max_length:
        room = max_length - len(prompt)
        advice = f" or set max_new_tokens to {room} or less" if room > 0 else ""
        raise InputError(
            f"prompt: {len(prompt)} tokens and max_new_tokens={max_new_tokens} make {len(prompt) + max_new_tokens}, "
            f"but the context holds {max_length}; shorten the prompt{advice}"
        )
    size = target.info.vocab_size
    bad = next((t for t in prompt if not 0 <= t < size), None)
    if bad is not None:
        raise InputError(f"prompt: token id {bad} is not in the target's vocabulary (0 to {size - 1})")


def _logprobs(tokens: tuple[int, ...], logits: Tensor) -> tuple[float, ...]:
    """`logits` [k, V]: one row per token."""
    rows = torch.log_softmax(logits.float(), -1)
    index = torch.tensor(tokens, device=rows.device)[:, None]
    return tuple(rows.gather(-1, index)[:, 0].tolist())


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class _Clock:
    """Adds wall time to the phases of `stats`; time spent by the consumer of a stream is not counted."""

    def __init__(self, stats: Stats) -> None:
        self.seconds = stats.seconds
        self._named = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] += spent
            self._named += spent

    @contextmanager
    def busy(self) -> Iterator[None]:
        start, self._named = time.perf_counter(), 0.0
        try:
            yield
        finally:
            self.seconds["rest"] += time.perf_counter() - start - self._named
