"""What a draft head is trained for, as pure functions of tensors (arXiv 2401.15077, section 3.3 and equation 1).

Conventions. A dialogue t_0 … t_{n-1} has features f_0 … f_{n-2}. Input j is `[e(t_{j+1}) ; f_j]`, its output f̂_{j+1}
is compared with f_{j+1}, and the law lm_head(f̂_{j+1}) with lm_head(f_{j+1}), the target's own law of t_{j+2}: so j
goes from 0 to n - 3. Input j is trained when t_{j+1} is a token of an answer: the first one trained is the last
feature of the prompt, which drafting starts from.

Unrolled training. In step 0 every input is true. In step s the feature of input j is the head's own output of step s
- 1 at j - 1, as it is s levels down in a draft; input j then sees the true keys up to j - s, one key of each step 1 …
s - 1 in between (step r's at j - s + r), and its own. Input j is trained in step s when all of j - s … j are trained.

    B rows, N inputs per row (padded), E embedding width, H feature width, V rows of the read-out, S unrolled steps
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eaglekit.models.head import EagleHead

_ROWS = 256  # rows of logits held at a time: a block that stays in the processor's caches


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of B padded dialogues.

    Attributes:
        tokens: int64 [B, N]: t_{j+1}.
        features: [B, N, H]: f_j.
        targets: [B, N, H]: f_{j+1}.
        labels: int64 [B, N]: t_{j+2}.
        trained: bool [B, N]: which inputs are trained; never a padded one.
    """

    tokens: Tensor
    features: Tensor
    targets: Tensor
    labels: Tensor
    trained: Tensor

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`."""
        return Batch(**{name: tensor.to(device) for name, tensor in vars(self).items()})


@dataclass(frozen=True)
class LossWeights:
    """How the parts add up.

    Attributes:
        regression: Of the smooth L1 distance of features; 1 in the paper.
        classification: Of the cross-entropy against the target's law; 0.1 in the paper.
        steps: Of each unrolled step; one step is the paper's teacher forcing.
        noise: Half-width of the uniform noise on input features, in units of `scale`; 0.1 in the paper.
        scale: Features are divided by this before they are compared: 1 in the paper, or their standard deviation.
    """

    regression: float = 0.5
    classification: float = 0.5
    steps: tuple[float, ...] = (1.0, 0.8, 0.64)
    noise: float = 0.1
    scale: float = 1.0


@dataclass(frozen=True)
class Losses:
    """Result of `compute_losses`.

    Attributes:
        total: Scalar to differentiate.
        regression: Per step, the mean smooth L1 distance.
        classification: Per step, the mean cross-entropy, nats.
    """

    total: Tensor
    regression: tuple[float, ...]
    classification: tuple[float, ...]


def add_noise(features: Tensor, half_width: float, generator: torch.Generator) -> Tensor:
    """`features` plus uniform noise from (-half_width, half_width): robustness to the head's own errors.

    The noise is drawn on the CPU, so that it is the same on every device.
    """
    if half_width == 0.0:
        return features
    noise = torch.rand(features.shape, generator=generator, dtype=features.dtype).to(features.device)
    return features + (2.0 * noise - 1.0) * half_width


def step_masks(trained: Tensor, steps: int) -> list[Tensor]:
    """Masks [B, N] for each unrolled step: step s needs inputs j - s … j trained."""
    masks = [trained]
    for s in range(1, steps):
        mask = masks[-1].clone()
        mask[:, :s] = False
        mask[:, s:] &= trained[:, :-s]
        masks.append(mask)
    return masks


def _attend_unrolled(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Attention of unrolled step s = len(keys) - 1 >= 1: queries `q` [B, h, M, D] of the last M inputs.

    `keys[0]` [B, kv, N, D] are the true ones, `keys[r]` [B, kv, M, D] those of step r.

    Scores against the true keys are one product; against the keys of later steps, of which each query sees one per
    step, they are M numbers per step. The first s queries have no chain behind them: their outputs are finite and
    never used.
    """
    batch, heads, length, dim = q.shape
    kv, total, s = keys[0].shape[1], keys[0].shape[2], len(keys) - 1
    groups = heads // kv
    q = (q * dim**-0.5).reshape(batch, kv, groups, length, dim)
    j = torch.arange(total, device=q.device)
    hidden = torch.zeros(length, total, dtype=q.dtype, device=q.device)
    hidden.masked_fill_(j[None, :] > j[total - length :, None] - s, float("-inf"))
    true = torch.baddbmm(
        hidden.repeat(groups, 1)[None],
        q.view(batch * kv, groups * length, dim),
        keys[0].reshape(batch * kv, total, dim).transpose(1, 2),
    ).view(batch, kv, groups, length, total)

    def shifted(x: Tensor, r: int) -> Tensor:  # [B, kv, 1, M, D]: at j, step r's row of j - s + r
        back = min(s - r, length)
        return F.pad(x[:, :, : length - back], (0, 0, back, 0))[:, :, None]

    own = [(q * shifted(keys[r], r)).sum(-1, keepdim=True) for r in range(1, s + 1)]
    weights = torch.softmax(torch.cat((true, *own), -1), -1)
    y = torch.bmm(
        weights[..., :total].reshape(batch * kv, groups * length, total), values[0].reshape(batch * kv, total, dim)
    ).view(batch, kv, groups, length, dim)
    for r in range(1, s + 1):
        y = y + weights[..., total + r - 1, None] * shifted(values[r], r)
    return y.reshape(batch, heads, length, dim)


def unroll(head: EagleHead, embeddings: Tensor, features: Tensor, steps: int, first: int = 0) -> list[Tensor]:
    """Outputs of `steps` unrolled steps: the list's item s is [B, N, H], position j holding a prediction of f_{j+1}.

    Args:
        head: The head.
        embeddings: [B, N, E] of the tokens t_{j+1}.
        features: [B, N, H], true, noise included.
        steps: S.
        first: The first input that a chain starts from; after step 0 the inputs before it are left out, and are 0 in
            the outputs.
    """
    batch, length, _ = embeddings.shape
    positions = torch.arange(length, device=embeddings.device)[None].expand(batch, -1)
    grouped = head.config.num_key_value_heads != head.config.num_attention_heads
    cached: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in head.layers]
    outputs: list[Tensor] = []
    for s in range(steps):
        if s == 1:
            embeddings, positions = embeddings[:, first:], positions[:, first:]
        if s:
            features = F.pad(outputs[-1][:, first:-1], (0, 0, 1, 0))
        x = head.fc(torch.cat((embeddings, features.to(embeddings.dtype)), -1))
        cos, sin = head.rotation(positions, x.dtype)
        for layer, (keys, values) in zip(head.layers, cached, strict=True):

            def attend(
                q: Tensor, k: Tensor, v: Tensor, keys: list[Tensor] = keys, values: list[Tensor] = values, s: int = s
            ) -> Tensor:
                keys.append(k)
                values.append(v)
                if s == 0:
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
                return _attend_unrolled(q, keys, values)

            x = layer(x, cos, sin, attend)
        outputs.append(F.pad(x, (0, 0, first, 0)) if s and first else x)
    return outputs


def regression_loss(predicted: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
    """Mean smooth L1 distance of `predicted` and `target` [rows, H], both divided by `scale`."""
    return F.smooth_l1_loss(predicted.float() / scale, target.float() / scale)


@dataclass(frozen=True)
class TargetLaw:
    """The target's laws at some positions, reduced to what the cross-entropy and its gradient need.

    With p = softmax(W f), the cross-entropy of a prediction f̂ is logsumexp(W f̂) - f̂ · (Wᵀ p): the law itself, V
    numbers per position, is not kept, only Wᵀ p.

    Attributes:
        readout: W, [V, H].
        means: float32 [rows, H]: Wᵀ p.
    """

    readout: Tensor
    means: Tensor

    @staticmethod
    def of(features: Tensor, readout: Tensor) -> TargetLaw:
        """The laws at true `features` [rows, H], computed in the dtype of `readout`."""
        means = torch.empty(features.shape, dtype=torch.float32, device=features.device)
        for start in range(0, len(features), _ROWS):
            rows = slice(start, start + _ROWS)
            _, means[rows] = _logsum_and_mean(features[rows].to(readout.dtype), readout)
        return TargetLaw(readout, means)

    def select(self, rows: Tensor) -> TargetLaw:
        """The laws of some rows."""
        return TargetLaw(self.readout, self.means[rows])


def _logsum_and_mean(block: Tensor, readout: Tensor) -> tuple[Tensor, Tensor]:
    """logsumexp(W x), float32 [rows], and Wᵀ softmax(W x), float32 [rows, H], of a block x [rows, H]."""
    logits = block @ readout.T
    top = logits.amax(-1, keepdim=True)
    weights = logits.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True, dtype=torch.float32)
    mean = (weights @ readout).float().div_(total)
    return (total.log_() + top)[:, 0], mean


class _SoftCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy; the gradient, Wᵀ (softmax(W f̂) - p), is found along with the value."""

    @staticmethod
    def forward(ctx: Any, predicted: Tensor, law: TargetLaw) -> Tensor:
        gradient = torch.empty_like(predicted, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, len(predicted), _ROWS):
            rows = slice(start, start + _ROWS)
            block = predicted[rows].to(law.readout.dtype)
            logsums, means = _logsum_and_mean(block, law.readout)
            total += (logsums - (block.float() * law.means[rows]).sum(-1)).cpu().sum(dtype=torch.float64)
            gradient[rows] = means - law.means[rows]
        ctx.save_for_backward(gradient.div_(max(1, len(predicted))))
        ctx.dtype = predicted.dtype
        return (total / max(1, len(predicted))).float().to(predicted.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0]).to(ctx.dtype), None


def classification_loss(predicted: Tensor, law: TargetLaw) -> Tensor:
    """Mean cross-entropy, nats, of the draft's law lm_head(`predicted` [rows, H]) against the target's law."""
    loss: Tensor = _SoftCrossEntropy.apply(predicted, law)  # type: ignore[no-untyped-call]
    return loss


def compute_losses(
    head: EagleHead,
    batch: Batch,
    embedding: Tensor,
    readout: Tensor,
    weights: LossWeights,
    generator: torch.Generator,
) -> Losses:
    """The training loss of a batch.

    Args:
        head: The head, in training mode.
        batch: See `Batch`.
        embedding: [vocabulary, E], the target's frozen embeddings.
        readout: [V, H], rows of the target's `lm_head`: all, or the tokens that are frequent in the training text.
        weights: See `LossWeights`.
        generator: Source of the noise.
    """
    dtype = readout.dtype
    noisy = add_noise(batch.features.to(dtype), weights.noise * weights.scale, generator)
    masks = step_masks(batch.trained, len(weights.steps))
    columns = batch.trained.any(0).nonzero()
    first = int(columns[0, 0]) if len(columns) else 0
    outputs = unroll(head, embedding[batch.tokens].to(dtype), noisy, len(weights.steps), first)
    return losses_of(outputs, masks, batch.targets, readout, weights)


def losses_of(
    outputs: Sequence[Tensor], masks: Sequence[Tensor], targets: Tensor, readout: Tensor, weights: LossWeights
) -> Losses:
    """The loss of unrolled `outputs` [B, N, H] against `targets` [B, N, H], each step over its own mask [B, N]."""
    device = outputs[0].device
    total = torch.zeros((), device=device)
    regressions, classifications = [], []
    full = torch.full(targets.shape[:2], -1, dtype=torch.long, device=device)
    full[masks[0]] = torch.arange(int(masks[0].sum()), device=device)
    true = targets[masks[0]]
    law = TargetLaw.of(true, readout)
    for output, mask, weight in zip(outputs, masks, weights.steps, strict=True):
        rows = full[mask]
        if not len(rows):
            regressions.append(0.0)
            classifications.append(0.0)
            continue
        predicted = output[mask]
        regression = regression_loss(predicted, true[rows], weights.scale)
        classification = classification_loss(predicted, law.select(rows))
        total = total + weight * (weights.regression * regression + weights.classification * classification)
        regressions.append(float(regression.detach()))
        classifications.append(float(classification.detach()))
    return Losses(total, tuple(regressions), tuple(classifications))
