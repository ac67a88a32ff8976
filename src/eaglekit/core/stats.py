"""What a decoding run did, in numbers whose meaning is fixed here.

Conventions:

    rounds      target passes that verified a tree (with plain decoding: passes that read one token). The prefill is not
                one of them, and the token that it gives is not counted in `tau`
    tau         mean acceptance length τ: new tokens that rounds emitted and the caller kept / rounds. It counts the
                bonus or recovered token; it does not count tokens cut off behind an end of text, a stop string or the
                limit
    tried[d]    rounds in which the walk stood at depth d of a tree and had children to try there
    accepted[d] those of them in which one child was accepted; like `kept_drafts` and `tried`, it stops where the
                answer was cut off
    n_alpha     accepted[n] / tried[n], on chains only: at step n the head's input holds n features of its own
    seconds     wall time by phase: prefill, draft, verify (the target's pass), accept (the walk and both commits), rest
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eaglekit.core.tree import TreeShape
from eaglekit.core.verify import Verdict

PHASES = ("prefill", "draft", "verify", "accept", "rest")


@dataclass
class Stats:
    """Counters of one request; several can be added up."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    new_tokens: int = 0
    first_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    kept_drafts: int = 0
    only_chains: bool = True
    tried: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def observe(self, shape: TreeShape, verdict: Verdict, kept: int) -> None:
        """Count one round, of whose tokens the first `kept` belong to the answer."""
        self.rounds += 1
        self.drafted += shape.num_draft_tokens
        self.kept_drafts += min(verdict.num_accepted, kept)
        self.only_chains &= shape.is_chain
        depth = min(kept, len(verdict.nodes) - (1 if verdict.bonus else 0))
        grow = depth - len(self.tried)
        self.tried += [0] * grow
        self.accepted += [0] * grow
        for d in range(depth):
            self.tried[d] += 1
            self.accepted[d] += d < verdict.num_accepted

    def add(self, other: Stats) -> None:
        """Add another run's counters to these."""
        for name in (
            "prompt_tokens",
            "cached_prompt_tokens",
            "new_tokens",
            "first_tokens",
            "rounds",
            "drafted",
            "kept_drafts",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.only_chains &= other.only_chains
        grow = len(other.tried) - len(self.tried)
        self.tried += [0] * grow
        self.accepted += [0] * grow
        for d, (tried, accepted) in enumerate(zip(other.tried, other.accepted, strict=True)):
            self.tried[d] += tried
            self.accepted[d] += accepted
        for phase, seconds in other.seconds.items():
            self.seconds[phase] += seconds

    @property
    def tau(self) -> float:
        """Mean acceptance length; 0 before the first round."""
        return (self.new_tokens - self.first_tokens) / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """accepted[d] / tried[d] by depth."""
        return tuple(a / t for a, t in zip(self.accepted, self.tried, strict=True) if t)

    @property
    def n_alpha(self) -> tuple[float, ...] | None:
        """n-α for n = 0, 1, …, or None if a tree was not a chain."""
        return self.acceptance if self.only_chains else None

    @property
    def total_seconds(self) -> float:
        """Wall time from the request to its last token."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of wall time, prefill included."""
        return self.new_tokens / self.total_seconds if self.total_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens that rounds emitted, per second of wall time without the prefill."""
        seconds = self.total_seconds - self.seconds["prefill"]
        return (self.new_tokens - self.first_tokens) / seconds if seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """These numbers, for JSON."""
        return {
            "new_tokens": self.new_tokens,
            "cached_prompt_tokens": self.cached_prompt_tokens,
            "rounds": self.rounds,
            "tau": round(self.tau, 4),
            "drafted": self.drafted,
            "accepted": self.kept_drafts,
            "acceptance_by_depth": [round(a, 4) for a in self.acceptance],
            "n_alpha": None if self.n_alpha is None else [round(a, 4) for a in self.n_alpha],
            "seconds": {k: round(v, 6) for k, v in self.seconds.items()},
            "tokens_per_second": round(self.tokens_per_second, 3),
            "decode_tokens_per_second": round(self.decode_tokens_per_second, 3),
        }
