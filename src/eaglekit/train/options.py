"""The options of making training text and of training, with their defaults: the command line's too.

Nothing heavy is imported here, so that `eaglekit --help` is instant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from eaglekit.errors import InputError

FEATURE_CACHE_GB = 10.0
"""Features are kept on disk up to so many GB (10^9 bytes)."""


@dataclass(frozen=True)
class SynthesisOptions:
    """How answers are made.

    Attributes:
        max_prompt_tokens: Longer prompts (chat template included) are skipped.
        max_new_tokens: Length limit of an answer, tokens.
        batch_size: Dialogues generated together.
        temperatures: One is used per batch of the plan, in turn; 0 means greedy.
        seed: Seeds the order of the prompts and the sampling.
    """

    max_prompt_tokens: int = 256
    max_new_tokens: int = 256
    batch_size: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.7, 0.0, 1.0)
    seed: int = 0


@dataclass(frozen=True)
class SelfTalkOptions:
    """How the target writes dialogues of its own; answers are made as `SynthesisOptions` say.

    Attributes:
        turns: Most turns of the user in a dialogue; dialogues of 1, 2, ... turns are asked for in equal parts.
        max_tokens: Length limit of a dialogue, tokens, chat template included.
        max_user_tokens: A turn of the user that has not ended by then is dropped.
        user_temperature: At which the user's turns are sampled.
        loop_tokens: A turn loops in which `loop_times` runs of so many tokens are the same.
        loop_times: See there.
        shingle_words: Dialogues are compared by their runs of so many words.
        shared: The share of its runs that a dialogue may have in common with all those kept before.
    """

    turns: int = 2
    max_tokens: int = 768
    max_user_tokens: int = 128
    user_temperature: float = 1.0
    loop_tokens: int = 8
    loop_times: int = 4
    shingle_words: int = 5
    shared: float = 0.5

    def __post_init__(self) -> None:
        """Refuse values that cannot work.

        Raises:
            InputError: see there.
        """
        names = ("turns", "max_tokens", "max_user_tokens", "loop_tokens", "loop_times", "shingle_words")
        wrong = [f"{name} is {getattr(self, name)}" for name in names if getattr(self, name) < 1]
        if wrong:
            raise InputError(f"self-talk options: {'; '.join(wrong)}; expected at least 1")


@dataclass(frozen=True)
class HeadOptions:
    """The shape of a new head; see `head_options` of `models.head`, which judges them.

    Attributes:
        inputs: What it reads.
        features: "last" or "fused".
        layers: Decoder layers, 0.5 for attention alone.
        mlp_width: Factor on the width of the target's MLP.
        bias: Whether the input layer has one.
        input_norm: Whether what it reads is normed.
    """

    inputs: str = "feature+shifted-token"
    features: str = "last"
    layers: float = 1
    mlp_width: float = 1.0
    bias: bool = False
    input_norm: bool = False


@dataclass(frozen=True)
class TrainOptions:
    """How a head is trained.

    Attributes:
        epochs: Passes over the data; fractions are allowed.
        batch_tokens: Tokens per optimizer step, whatever the number of processes.
        accumulate: Passes that each process takes over its share of a step: more need less memory.
        linear_start: Fit `fc` by ridge regression before the first step; see `start`.
        learning_rate: Where a cosine starts that falls to `final_rate` of it; the first `warmup_steps` are faded in.
            The paper's is 3e-5, for widths of 4096 and more.
        warmup_steps: Linear warm-up, over a tenth of all steps at most.
        final_rate: Fraction of the peak that is left at the end.
        weight_decay: AdamW's.
        betas: AdamW's; the paper's.
        clip: Largest norm of the gradient; the paper's.
        regression: Weight of the smooth L1 distance between features.
        classification: Weight of the cross-entropy.
        step_weights: One per unrolled step.
        scaled: Measure the regression and the noise in standard deviations of the features; False is the paper's.
        noise: Half-width of the uniform noise.
        top_k: Teach the target's `top_k` most probable tokens alone, 0 for its whole law.
        ema: Judge and save an average of the weights, of which each step keeps so much, such as 0.998 (less at first);
            0 for none.
        vocabulary: Tokens that the head may draft, those met most often; the cross-entropy runs over these alone.
        heldout: Greedy dialogues set aside for evaluation.
        eval_every: Optimizer steps between evaluations.
        patience: Stop after so many evaluations without a better τ; 0 never.
        log_every: Optimizer steps between lines of the log.
        checkpoint_minutes: Time between checkpoints.
        bfloat16: Compute in bfloat16, weights and optimizer in float32.
        seed: Of the data's order, the noise and a new head's weights.
    """

    epochs: float = 3.0
    batch_tokens: int = 4096
    accumulate: int = 1
    linear_start: bool = True
    learning_rate: float = 6e-4
    warmup_steps: int = 40
    final_rate: float = 0.02
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 0.5
    regression: float = 0.5
    classification: float = 0.5
    step_weights: tuple[float, ...] = (1.0, 0.8, 0.64)
    scaled: bool = True
    noise: float = 0.1
    top_k: int = 0
    ema: float = 0.0
    vocabulary: int = 8192
    heldout: int = 48
    eval_every: int = 200
    patience: int = 0
    log_every: int = 20
    checkpoint_minutes: float = 5.0
    bfloat16: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that cannot work, all at once.

        Raises:
            InputError: see there.
        """
        positive = (
            "epochs", "batch_tokens", "accumulate", "learning_rate", "clip", "vocabulary", "heldout", "eval_every",
            "log_every",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in positive}
        wrong = [
            f"{name} is {value}, expected more than 0" for name, value in values.items() if not 0 < value < math.inf
        ]
        if self.epochs > 1e6:
            wrong.append(f"epochs is {self.epochs:g}, expected at most 1000000")
        if not 0 <= self.seed < 1 << 32:
            wrong.append(f"seed is {self.seed}, expected 0 to {(1 << 32) - 1}")
        least_0 = (
            "noise", "top_k", "patience", "warmup_steps", "weight_decay", "checkpoint_minutes", "final_rate",
            "regression", "classification",
        )  # fmt: skip
        counts = {name: getattr(self, name) for name in least_0}
        wrong += [
            f"{name} is {value}, expected 0 or more" for name, value in counts.items() if not 0 <= value < math.inf
        ]
        if not 0 <= self.ema < 1:
            wrong.append(f"ema is {self.ema}, expected 0 (none) to below 1, such as 0.998")
        if not (all(0 <= w < math.inf for w in self.step_weights) and any(self.step_weights)):
            shown = ",".join(f"{w:g}" for w in self.step_weights) or "empty"
            wrong.append(f"step_weights is {shown}, expected numbers of 0 or more, one per unrolled step: 1,0.8,0.64")
        if self.regression == self.classification == 0:
            wrong.append("regression and classification are both 0, expected one of them above 0")
        if wrong:
            raise InputError("training options: " + "; ".join(wrong))
