"""What a draft head is trained for, as pure functions of tensors (arXiv 2401.15077, section 3.3 and equation 1).

Conventions. A dialogue t_0 … t_{n-1} has features f_0 … f_{n-2}. Input j is `[e(t_{j+1}) ; f_j]`, its output f̂_{j+1}
is compared with f_{j+1}, and the law lm_head(f̂_{j+1}) with lm_head(f_{j+1}), the target's own law of t_{j+2}: so j
goes from 0 to n - 3. Input j is trained when t_{j+1} and t_{j+2} are tokens of one answer; for the first one trained,
f_j is the last feature of the prompt, which drafting starts from.

Unrolled training. In step 0 every input is true. In step s the feature of input j is the head's own output of step s
- 1 at j - 1, as it is s levels down in a draft; input j then sees the true keys up to j - s, one key of each step 1 …
s - 1 in between (step r's at j - s + r), and its own. Input j is trained in step s when all of j - s … j are trained.

Packing. Dialogues lie end to end without padding: the head and the losses, nearly all of the work, see T inputs in a
row. Only attention, where dialogues must not see each other, lays them side by side.

    T inputs of all dialogues of a batch, B dialogues, N inputs of the longest one, E embedding width, H feature width,
    W width of the head's input features (H, or several layers' side by side), V rows of the read-out, S unrolled steps
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eaglekit.models.head import Attend, EagleHead

_BLOCK = 1 << 23  # logits held at a time, numbers: 16 MB in bfloat16, a block that stays near the processor
_MOST_ROWS = 256


def block_rows(vocabulary: int) -> int:
    """Rows of logits computed at a time, so that a block of them is bounded whatever the vocabulary."""
    return max(8, min(_MOST_ROWS, _BLOCK // max(1, vocabulary)))


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of B dialogues, one behind the other.

    Attributes:
        tokens: int64 [T]: t_{j+1}, or t_j for a head whose tokens are not one step ahead (-1 where there is none).
        features: [T, W]: what stands in for f_j in the head's input; noise included.
        targets: [T, H]: f_{j+1}.
        trained: bool [T]: which inputs are trained.
        lengths: Inputs of each dialogue.
    """

    tokens: Tensor
    features: Tensor
    targets: Tensor
    trained: Tensor
    lengths: tuple[int, ...]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`."""
        tokens, features, targets = (t.to(device) for t in (self.tokens, self.features, self.targets))
        return Batch(tokens, features, targets, self.trained.to(device), self.lengths)


@dataclass(frozen=True)
class LossWeights:
    """How the parts add up.

    Attributes:
        regression: Of the smooth L1 distance of features; 1 in the paper.
        classification: Of the cross-entropy against the target's law; 0.1 in the paper.
        steps: Of each unrolled step; one step is the paper's teacher forcing.
        scale: Features are divided by this before they are compared: 1 in the paper, or their standard deviation.
        top_k: The target's law is cut to its `top_k` most probable tokens and made to sum to 1 again; 0 keeps all.
    """

    regression: float = 0.5
    classification: float = 0.5
    steps: tuple[float, ...] = (1.0, 0.8, 0.64)
    scale: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class Losses:
    """Result of `compute_losses`.

    Attributes:
        total: Scalar to differentiate.
        parts: float32 [2, S], without gradient: for each step, the smooth L1 distance and the cross-entropy in nats,
            summed over the trained inputs and divided by their count.
    """

    total: Tensor
    parts: Tensor


def pairs_of(head: EagleHead, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `head` reads and predicts along a dialogue of n tokens.

    Args:
        head: The head.
        ids: int64 [n].
        features: [n - 1, H], or [n - 1, H + W] with the streams of the layers that the head reads behind them.

    Returns:
        tokens int64 [n - 2], -1 where there is none; features [n - 2, W or H] that the head reads; targets [n - 2, H].
    """
    hidden = head.config.hidden_size
    read = features[:-1, hidden:] if head.config.feature_layers else features[:-1, :hidden]
    tokens = ids[1:-1] if head.shifted else F.pad(ids[1:-2], (1, 0), value=-1)
    return tokens, read, features[1:, :hidden]


def embed(embedding: Tensor, tokens: Tensor) -> Tensor:
    """Embeddings [T, E] of `tokens` int64 [T]; zeros for -1."""
    return embedding[tokens.clamp_min(0)].masked_fill(tokens[:, None] < 0, 0)


def uniform(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Noise from -1 to 1, float32, on the CPU: stretched and added to features, it teaches robustness to errors."""
    return 2.0 * torch.rand(tuple(shape), generator=generator) - 1.0


def step_masks(trained: Tensor, lengths: Sequence[int], steps: int) -> list[Tensor]:
    """Masks [T] for each unrolled step: step s needs inputs j - s … j of one dialogue trained."""
    masks = [trained]
    firsts = torch.tensor(list(accumulate(lengths, initial=0))[:-1], dtype=torch.long, device=trained.device)
    for _ in range(1, steps):
        before = F.pad(masks[-1][:-1], (1, 0))
        before[firsts] = False
        masks.append(before & trained)
    return masks


class Layout:
    """Where the inputs of some dialogues stand: flat, and side by side for attention.

    Args:
        lengths: Inputs of each dialogue.
        skipped: Inputs of each dialogue that are left out at its front.
        device: Of the tensors.

    Attributes:
        flat: int64 [T']: places of the inputs that are kept, among all inputs.
        positions: int64 [T']: index of each within its dialogue.
        first: bool [T']: whether it is the first one kept of its dialogue.
        starts: int64 [B]: `skipped`.
    """

    def __init__(self, lengths: Sequence[int], skipped: Sequence[int], device: torch.device | str) -> None:
        kept = [n - s for n, s in zip(lengths, skipped, strict=True)]
        offsets = list(accumulate(lengths, initial=0))
        self.rows, self.width = len(kept), max(kept, default=0)
        sizes = torch.tensor(kept, dtype=torch.long)
        row = torch.repeat_interleave(torch.arange(self.rows), sizes)
        place = torch.arange(len(row)) - (torch.cumsum(sizes, 0) - sizes)[row]
        starts = torch.tensor(skipped, dtype=torch.long)
        positions = place + starts[row]
        self.flat = (positions + torch.tensor(offsets, dtype=torch.long)[row]).to(device)
        self.positions, self.first, self.starts = positions.to(device), (place == 0).to(device), starts.to(device)
        self._slots = (row * self.width + place).to(device)

    def spread(self, x: Tensor) -> Tensor:
        """[1, h, T', D] as [B, h, N, D], zeros where a dialogue is shorter."""
        _, heads, _, dim = x.shape
        out = x.new_zeros(self.rows * self.width, heads, dim).index_copy(0, self._slots, x[0].transpose(0, 1))
        return out.view(self.rows, self.width, heads, dim).transpose(1, 2)

    def gather(self, x: Tensor) -> Tensor:
        """[B, h, N, D] back as [1, h, T', D]."""
        rows, heads, width, dim = x.shape
        flat = x.transpose(1, 2).reshape(rows * width, heads, dim).index_select(0, self._slots)
        return flat.transpose(0, 1)[None]


def _attend_unrolled(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], starts: Tensor) -> Tensor:
    """Attention of unrolled step s = len(keys) - 1 >= 1: queries `q` [B, h, M, D], row b's from input `starts[b]` on.

    `keys[0]` [B, kv, N, D] are the true ones, `keys[r]` [B, kv, M, D] those of step r.

    Scores against the true keys are one product; against the keys of later steps, of which each query sees one per
    step, they are M numbers per step. The first s queries of a row have no chain behind them: their outputs are finite
    and never used.
    """
    batch, heads, length, dim = q.shape
    kv, total, s = keys[0].shape[1], keys[0].shape[2], len(keys) - 1
    groups = heads // kv
    q = (q * dim**-0.5).reshape(batch, kv, groups, length, dim)
    last = starts[:, None] + torch.arange(length, device=q.device) - s  # the last true key that each query sees
    hidden = torch.arange(total, device=q.device) > last[:, :, None]
    true = torch.bmm(
        q.reshape(batch * kv, groups * length, dim), keys[0].reshape(batch * kv, total, dim).transpose(1, 2)
    ).view(batch, kv, groups, length, total)
    true = true.masked_fill(hidden[:, None, None], float("-inf"))

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


def _attention_of(
    number: int, *, layout: Layout, cached: Sequence[tuple[list[Tensor], list[Tensor]]], grouped: bool
) -> Attend:
    """A layer's attention in one unrolled step: its keys and values join those of the steps before, in `cached`."""
    keys, values = cached[number]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = layout.spread(q), layout.spread(k), layout.spread(v)
        keys.append(k)
        values.append(v)
        if len(keys) == 1:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        else:
            y = _attend_unrolled(q, keys, values, layout.starts)
        return layout.gather(y)

    return attend


def unroll(
    head: EagleHead, embeddings: Tensor, features: Tensor, lengths: Sequence[int], steps: int, skipped: Sequence[int]
) -> list[Tensor]:
    """Outputs of `steps` unrolled steps: the list's item s is [T, H], place j of a dialogue predicting its f_{j+1}.

    Args:
        head: The head.
        embeddings: [T, E] of the tokens.
        features: [T, W], true, noise included.
        lengths: Inputs of each dialogue.
        steps: S.
        skipped: For each dialogue, the first input that a chain starts from; after step 0 the inputs before it are left
            out, and are 0 in the outputs.
    """
    device, total = embeddings.device, len(embeddings)
    layouts = [Layout(lengths, [0] * len(lengths), device), Layout(lengths, skipped, device)]
    grouped = head.config.num_key_value_heads != head.config.num_attention_heads
    cached: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in head.layers]
    outputs: list[Tensor] = []
    x = features
    for s in range(steps):
        layout = layouts[min(s, 1)]
        if s == 1:
            embeddings, x = embeddings[layout.flat], x[layout.flat]
        if s:
            x = F.pad(x[:-1], (0, 0, 1, 0)).masked_fill(layout.first[:, None], 0)
        attention = partial(_attention_of, layout=layout, cached=cached, grouped=grouped)
        x = head.run(embeddings[None], x.to(embeddings.dtype)[None], layout.positions[None], attention)
        x = x[0]
        outputs.append(x if s == 0 else x.new_zeros(total, x.shape[1]).index_copy(0, layout.flat, x))
    return outputs


def regression_loss(predicted: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
    """Smooth L1 distance of `predicted` and `target` [rows, H], both divided by `scale`: mean over H, sum over rows."""
    distance = F.smooth_l1_loss(predicted.float() / scale, target.float() / scale, reduction="sum")
    return distance / predicted.shape[-1]


@dataclass(frozen=True)
class TargetLaw:
    """The target's laws at some positions, reduced to what the cross-entropy and its gradient need.

    With p = softmax(W f), the cross-entropy of a prediction f̂ that is read out by W too is logsumexp(W f̂) - f̂ · (Wᵀ p):
    the law itself, V numbers per position, is not kept, only Wᵀ p. A head with a read-out of its own needs the law.

    Attributes:
        readout: W, [V, H].
        means: float32 [rows, H]: Wᵀ p.
        probs: p [rows, V], in the dtype of `readout`, in place of `means`; else None.
    """

    readout: Tensor
    means: Tensor
    probs: Tensor | None = None

    @staticmethod
    def of(features: Tensor, readout: Tensor, top_k: int = 0, whole: bool = False) -> TargetLaw:
        """The laws at true `features` [rows, H], computed in the dtype of `readout`; cut to `top_k` tokens if not 0.

        `whole` keeps the laws themselves.
        """
        if whole:
            probs = torch.empty(len(features), len(readout), dtype=readout.dtype, device=features.device)
            for part in _blocks(len(features), readout):
                _, probs[part] = _logsum_and_law(features[part].to(readout.dtype) @ readout.T, top_k)
            return TargetLaw(readout, features[:, :0], probs)
        means = torch.empty(features.shape, dtype=torch.float32, device=features.device)
        for part in _blocks(len(features), readout):
            _, means[part] = _logsum_and_mean(features[part].to(readout.dtype), readout, top_k)
        return TargetLaw(readout, means)

    def select(self, rows: Tensor) -> TargetLaw:
        """The laws of some rows."""
        return TargetLaw(self.readout, self.means[rows], None if self.probs is None else self.probs[rows])


def _blocks(rows: int, readout: Tensor) -> Iterator[slice]:
    size = block_rows(len(readout))
    return (slice(start, start + size) for start in range(0, rows, size))


def _weights(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Largest logit [rows, 1], e^(logit - largest) in place of `logits` [rows, V], and its sum, float32 [rows, 1]."""
    if 0 < top_k < logits.shape[1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits.masked_fill_(logits < least, float("-inf"))
    top = logits.amax(-1, keepdim=True)
    weights = logits.sub_(top).exp_()
    return top, weights, weights.sum(-1, keepdim=True, dtype=torch.float32)


def _logsum_and_mean(block: Tensor, readout: Tensor, top_k: int = 0) -> tuple[Tensor, Tensor]:
    """logsumexp(W x), float32 [rows], and Wᵀ softmax(W x), float32 [rows, H], of a block x [rows, H]."""
    top, weights, total = _weights(block @ readout.T, top_k)
    mean = (weights @ readout).float().div_(total)
    return (total.log_() + top)[:, 0], mean


def _logsum_and_law(logits: Tensor, top_k: int = 0) -> tuple[Tensor, Tensor]:
    """logsumexp, float32 [rows], and softmax in place of `logits` [rows, V]."""
    top, weights, total = _weights(logits, top_k)
    law = weights.div_(total.to(weights.dtype))
    return (total.log_() + top)[:, 0], law


class _SoftCrossEntropy(torch.autograd.Function):
    """Cross-entropy, summed; the gradient, Wᵀ (softmax(W f̂) - p), is found along with the value."""

    @staticmethod
    def forward(ctx: Any, predicted: Tensor, law: TargetLaw) -> Tensor:
        gradient = torch.empty_like(predicted, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float64, device=predicted.device)
        for part in _blocks(len(predicted), law.readout):
            block = predicted[part].to(law.readout.dtype)
            logsums, means = _logsum_and_mean(block, law.readout)
            total += (logsums - (block.float() * law.means[part]).sum(-1)).sum(dtype=torch.float64)
            gradient[part] = means - law.means[part]
        ctx.save_for_backward(gradient)
        ctx.dtype = predicted.dtype
        return total.float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0]).to(ctx.dtype), None


class _OwnCrossEntropy(torch.autograd.Function):
    """The same with a read-out of the head's own, which is trained as well: W' [V, H]."""

    @staticmethod
    def forward(ctx: Any, predicted: Tensor, readout: Tensor, law: TargetLaw) -> Tensor:
        assert law.probs is not None
        weight = readout.to(law.probs.dtype)
        gradient = torch.empty_like(predicted, dtype=torch.float32)
        slope = torch.zeros_like(weight, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float64, device=predicted.device)
        for part in _blocks(len(predicted), weight):
            block, true = predicted[part].to(weight.dtype), law.probs[part]
            logits = block @ weight.T
            expected = (logits * true).sum(-1, dtype=torch.float32)
            logsums, drafted = _logsum_and_law(logits)
            total += (logsums - expected).sum(dtype=torch.float64)
            wrong = drafted.sub_(true)
            gradient[part] = wrong @ weight
            slope += wrong.T @ block
        ctx.save_for_backward(gradient, slope)
        ctx.dtypes = predicted.dtype, readout.dtype
        return total.float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient, slope), (a, b) = ctx.saved_tensors, ctx.dtypes
        return (gradient * grads[0]).to(a), (slope * grads[0]).to(b), None


def classification_loss(predicted: Tensor, law: TargetLaw, readout: Tensor | None = None) -> Tensor:
    """Cross-entropy, nats, of the draft's law against the target's, summed over rows.

    Args:
        predicted: [rows, H], what the read-out reads.
        law: The target's.
        readout: [V, H], the head's own; None: the target's, that of `law`.
    """
    loss: Tensor
    if readout is None:
        loss = _SoftCrossEntropy.apply(predicted, law)  # type: ignore[no-untyped-call]
    else:
        loss = _OwnCrossEntropy.apply(predicted, readout, law)  # type: ignore[no-untyped-call]
    return loss


def compute_losses(
    head: EagleHead,
    batch: Batch,
    embedding: Tensor,
    readout: Tensor,
    weights: LossWeights,
    counts: Sequence[int] | None = None,
) -> Losses:
    """The training loss of a batch, or of a part of one.

    Args:
        head: The head, in training mode.
        batch: See `Batch`.
        embedding: [vocabulary, E], the target's frozen embeddings.
        readout: [V, H], rows of the target's `lm_head`: all, or the tokens that are frequent in the training text.
        weights: See `LossWeights`.
        counts: Trained inputs of each step in the whole batch; None: this is the whole batch. Losses of its parts then
            sum up to the loss of the whole, and so do their gradients.
    """
    dtype = readout.dtype
    masks = step_masks(batch.trained, batch.lengths, len(weights.steps))
    skipped = [int(t.to(torch.int8).argmax()) for t in batch.trained.cpu().split(list(batch.lengths))]
    embedded = embed(embedding, batch.tokens).to(dtype)
    outputs = unroll(head, embedded, batch.features.to(dtype), batch.lengths, len(weights.steps), skipped)
    return losses_of(head, outputs, masks, batch.targets, readout, weights, counts)


def losses_of(
    head: EagleHead,
    outputs: Sequence[Tensor],
    masks: Sequence[Tensor],
    targets: Tensor,
    readout: Tensor,
    weights: LossWeights,
    counts: Sequence[int] | None = None,
) -> Losses:
    """The loss of unrolled `outputs` [T, H] against `targets` [T, H], each step over its own mask [T]."""
    device = outputs[0].device
    counts = [int(mask.sum()) for mask in masks] if counts is None else counts
    place = masks[0].cumsum(0) - 1  # of an input among the trained ones
    true = targets[masks[0]]
    own = None if head.lm_head is None else head.lm_head.weight
    law = TargetLaw.of(true, readout, weights.top_k, whole=own is not None)
    total = torch.zeros((), device=device)
    parts = torch.zeros(2, len(outputs), device=device)
    for s, (output, mask, weight, count) in enumerate(zip(outputs, masks, weights.steps, counts, strict=True)):
        rows = place[mask]
        if not len(rows):
            continue
        predicted = output[mask]
        regression = regression_loss(predicted, true[rows], weights.scale) / count
        read = predicted if head.norm is None else head.norm(predicted)
        classification = classification_loss(read, law.select(rows), own) / count
        total = total + weight * (weights.regression * regression + weights.classification * classification)
        parts[0, s], parts[1, s] = regression.detach(), classification.detach()
    return Losses(total, parts)
