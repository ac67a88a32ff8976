"""How well a head drafts what its target says: what `eaglekit eval-head` measures, without timing anything.

Contract: the target answers prompts greedily, in many rows at once where it can; what the head would have had accepted
follows from these answers and their features (`evaluate`). The numbers are those of greedy decoding with the same
target in float32, and do not depend on the machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eaglekit.errors import InputError
from eaglekit.models.head import EagleHead
from eaglekit.models.hf import HFTarget
from eaglekit.train.features.live import read_row
from eaglekit.train.judge.evaluate import Acceptance, Example, Tally, standard_shapes
from eaglekit.train.pipeline import pad_id, read_embedding, read_readout
from eaglekit.train.text.answers import Finished, Job, generate
from eaglekit.train.text.dataset import encode_prompt


@dataclass(frozen=True)
class HeadReport:
    """What `eval_head` found.

    Attributes:
        acceptance: τ, n-α and acceptance by depth.
        prompts: How many were answered.
        answer_tokens: Tokens of the answers.
        draft_vocabulary: Tokens that the head may draft.
        coverage: Share of the answers' tokens that it may draft.
    """

    acceptance: Acceptance
    prompts: int
    answer_tokens: int
    draft_vocabulary: int
    coverage: float

    def to_dict(self) -> dict[str, Any]:
        """These numbers, for JSON."""
        return {
            "prompts": self.prompts,
            "answer_tokens": self.answer_tokens,
            **self.acceptance.to_dict(),
            "draft_vocabulary": self.draft_vocabulary,
            "coverage": round(self.coverage, 4),
        }

    def table(self) -> str:
        """The same for people."""
        found = self.acceptance
        rows = [f"{self.prompts} prompts, {self.answer_tokens} answer tokens, greedy"]
        rows += [
            f"τ {name}: {tau:.3f}  accepted / tried by depth: {' '.join(f'{x:.2f}' for x in found.by_depth[name])}"
            for name, tau in found.tau.items()
        ]
        rows.append(f"n-α: {' '.join(f'{x:.3f}' for x in found.n_alpha)}")
        rows.append(f"draft vocabulary: {self.draft_vocabulary} tokens, {self.coverage:.1%} of the answers' tokens")
        return "\n".join(rows)


def eval_head(
    target: HFTarget,
    tokenizer: Any,
    head: EagleHead,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 256,
    batch_size: int = 16,
    progress: Callable[[str], None] = print,
) -> HeadReport:
    """Judge `head` by the target's greedy answers to `prompts`.

    Args:
        target: The target.
        tokenizer: Its tokenizer.
        head: On the target's device, of its width and vocabulary.
        prompts: Token ids, ending where the answer starts.
        max_new_tokens: Limit of an answer, 1 at least; less where the context ends.
        batch_size: Answers made at once.
        progress: Called with a line of text now and then.

    Raises:
        InputError: there are no prompts, or one leaves no room in the context for two tokens.
        UnsupportedModelError: the target's `lm_head` is not a matrix.
    """
    readout, embedding = read_readout(target, progress), read_embedding(target)
    tally = Tally(head, embedding, readout, standard_shapes())
    allowed = torch.ones(target.info.vocab_size, dtype=torch.bool)
    if head.draft_vocab is not None:
        allowed.fill_(False)[head.draft_vocab.cpu()] = True
    done = tokens = covered = 0
    for example in answer_prompts(
        target,
        tokenizer,
        prompts,
        layers=head.config.feature_layers,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        progress=progress,
    ):
        answer = example[0][example[2] :]
        done, tokens, covered = done + 1, tokens + len(answer), covered + int(allowed[answer].sum())
        tally.add(example)
    return HeadReport(tally.acceptance(), done, tokens, int(allowed.sum()), covered / max(1, tokens))


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of a prompt, as `generate` reads it: in the chat template, where there is one."""
    if tokenizer.chat_template:
        return encode_prompt(tokenizer, [{"role": "user", "content": text}])
    return list(tokenizer(text)["input_ids"])


def answer_prompts(
    target: HFTarget,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    layers: Sequence[int] = (),
    max_new_tokens: int = 256,
    batch_size: int = 16,
    progress: Callable[[str], None] = print,
) -> Iterator[Example]:
    """The target's greedy answers with their features, in float32, as they get ready.

    Args:
        target: The target.
        tokenizer: Its tokenizer.
        prompts: See `eval_head`.
        layers: Residual streams that go with the features, ascending; each answer is then read once more.
        max_new_tokens: See `eval_head`.
        batch_size: See `eval_head`.
        progress: See `eval_head`.

    Raises:
        InputError: see `eval_head`.
    """
    info = target.info
    if not prompts or max_new_tokens < 1:
        raise InputError(
            f"eval-head: got {len(prompts)} prompts, {max_new_tokens} new tokens; expected at least 1 each"
        )
    for place, prompt in enumerate(prompts, 1):
        if not 1 <= len(prompt) <= info.max_length - 2:
            raise InputError(
                f"eval-head: prompt {place} has {len(prompt)} tokens; expected 1 to {info.max_length - 2}, the context "
                f"of {info.name} less two; leave it out"
            )
    ends = frozenset(target.defaults(tokenizer).eos_ids)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    queue = deque(
        Job(i, tuple(prompts[i]), 0.0, min(max_new_tokens, info.max_length - len(prompts[i])), ends, 0) for i in order
    )
    groups = generate(
        target.model,
        queue,
        batch_size=batch_size,
        max_length=max(len(job.prompt) + job.max_new_tokens for job in queue),
        pad_id=pad_id(tokenizer, sorted(ends)),
        features=None if layers else torch.float32,
        weights="fp32",
    )
    done = tokens = 0
    for group in groups:
        for finished in group:
            ids = torch.tensor([*finished.job.prompt, *finished.answer])
            done, tokens = done + 1, tokens + len(finished.answer)
            yield ids, _features(target, finished, layers), len(finished.job.prompt)
        progress(f"{done} of {len(prompts)} prompts, {tokens} tokens")


def _features(target: HFTarget, finished: Finished, layers: Sequence[int]) -> torch.Tensor:
    """[n - 1, H (1 + layers)] of prompt and answer; read once more if they did not come with the answer."""
    if finished.features is not None:
        return finished.features
    return read_row(target, [*finished.job.prompt, *finished.answer][:-1], layers)
