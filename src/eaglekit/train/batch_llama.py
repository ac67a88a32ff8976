"""A Llama forward for throughput: many rows at once over preallocated caches, for making training text.

Contract: `BatchLlama(model, slots, max_length)` takes the weights of a stock transformers Llama (without touching the
module) and reads or continues up to `slots` independent rows in bfloat16 or float32. Rows have lengths of their own;
a slot that was left can be given to another row at once. It exists because the stock `generate` spends most of its
time on concatenating caches, repeating grouped keys and computing rows that ended. Outputs that a user sees never
come from here.

Glossary: M slots, H features' width, V vocabulary, h heads, kv key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_GROUP_TOKENS = 1024
_GROUP_SLOTS = 16


def supports(model: Any) -> bool:
    """Whether `model` is of the plain Llama shape that `BatchLlama` computes."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type == "llama"
        and config.hidden_act == "silu"
        and not getattr(config, "attention_bias", False)
        and not getattr(config, "mlp_bias", False)
        and rope.get("rope_type", "default") == "default"
        and model.device.type == "cpu"
    )


def _linear(weight: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    """The product with `weight` transposed; the weight is packed once where this torch build can."""
    if weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
        empty: list[Any] = []
        call = torch.ops.mkldnn._linear_pointwise
        return lambda x: call(x, packed, None, "none", empty, "")
    return lambda x: F.linear(x, weight)


class BatchLlama:
    """Weights and caches; `lengths[m]` tokens of slot m are in the caches."""

    def __init__(
        self,
        model: Any,
        *,
        slots: int = 128,
        max_length: int = 512,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Copy and pack the weights of `model`; allocate caches for `slots` rows of `max_length` tokens."""
        config = model.config
        self.heads: int = config.num_attention_heads
        self.kv: int = config.num_key_value_heads
        self.dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps: float = config.rms_norm_eps
        self.slots = slots
        self.max_length = max_length
        self.dtype = dtype

        def cast(w: Tensor) -> Tensor:
            return w.detach().to(dtype)

        self.embedding = cast(model.get_input_embeddings().weight)
        self.head = _linear(cast(model.get_output_embeddings().weight), slots)
        self.norm = cast(model.model.norm.weight)
        self.layers = []
        for layer in model.model.layers:
            a, m = layer.self_attn, layer.mlp
            qkv = torch.cat([cast(a.q_proj.weight), cast(a.k_proj.weight), cast(a.v_proj.weight)])
            up = torch.cat([cast(m.gate_proj.weight), cast(m.up_proj.weight)])
            self.layers.append(
                (
                    cast(layer.input_layernorm.weight),
                    _linear(qkv, slots),
                    _linear(cast(a.o_proj.weight), slots),
                    cast(layer.post_attention_layernorm.weight),
                    _linear(up, slots),
                    _linear(cast(m.down_proj.weight), slots),
                )
            )
        theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta") or config.rope_theta
        inverse = 1.0 / theta ** (torch.arange(0, self.dim, 2).float() / self.dim)
        angles = torch.outer(torch.arange(max_length).float(), inverse)
        self.cos = torch.cat([angles.cos(), angles.cos()], -1).to(dtype)  # [max_length, D]
        self.sin = torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)
        shape = (len(self.layers), slots, max_length, self.kv, self.dim)
        self.keys = torch.zeros(shape, dtype=dtype)
        self.values = torch.zeros(shape, dtype=dtype)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """RoPE on x [..., heads, D]; cos and sin (sign folded in) broadcast over heads."""
        half = self.dim // 2
        swapped = torch.cat([x[..., half:], x[..., :half]], -1)
        return (x * cos).addcmul_(swapped, sin)

    def _layers(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Callable[[int, Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """The decoder over x [rows, H]; `attend(layer, q, k, v)` maps [rows, heads, D] to [rows, h·D]."""
        rotated = self.heads + self.kv
        for number, (norm1, qkv, out, norm2, up, down) in enumerate(self.layers):
            y = qkv(F.rms_norm(x, norm1.shape, norm1, self.eps)).view(-1, rotated + self.kv, self.dim)
            qk = self._rotate(y[:, :rotated], cos, sin)
            x = x + out(attend(number, qk[:, : self.heads], qk[:, self.heads :], y[:, rotated:]))
            gate, value = up(F.rms_norm(x, norm2.shape, norm2, self.eps)).chunk(2, -1)
            x = x + down(F.silu(gate).mul_(value))
        return F.rms_norm(x, self.norm.shape, self.norm, self.eps)

    @torch.no_grad()
    def read(self, ids: Sequence[Sequence[int]], slots: Sequence[int] | None = None) -> list[Tensor]:
        """Features [n_b, H] of each row of `ids`, read from position 0; kept in the caches of `slots` when given.

        Rows are read in groups small enough to stay in the processor's caches: twice as fast as all at once.
        """
        features: list[Tensor | None] = [None] * len(ids)
        order = sorted(range(len(ids)), key=lambda b: len(ids[b]))
        while order:
            size = max(1, _GROUP_TOKENS // len(ids[order[-1]]))
            group, order = order[-size:], order[:-size]
            read = self._read([ids[b] for b in group], None if slots is None else [slots[b] for b in group])
            for b, y in zip(group, read, strict=True):
                features[b] = y
        return [y for y in features if y is not None]

    def _read(self, ids: Sequence[Sequence[int]], slots: Sequence[int] | None) -> list[Tensor]:
        rows, width = len(ids), max(len(r) for r in ids)
        padded = torch.zeros(rows, width, dtype=torch.long)
        for b, row in enumerate(ids):
            padded[b, : len(row)] = torch.tensor(list(row))
        where = None if slots is None else torch.tensor(list(slots))

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (t.reshape(rows, width, -1, self.dim) for t in (q, k, v))
            if where is not None:
                self.keys[number, where, :width] = k
                self.values[number, where, :width] = v
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return y.transpose(1, 2).reshape(rows * width, -1)

        cos = self.cos[:width].repeat(rows, 1)[:, None]
        sin = self.sin[:width].repeat(rows, 1)[:, None]
        y = self._layers(self.embedding[padded.flatten()], cos, sin, attend).view(rows, width, -1)
        return [y[b, : len(row)] for b, row in enumerate(ids)]

    @torch.no_grad()
    def step(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Read one token per slot: `tokens` int64 [M] at positions `lengths` int64 [M]; features [M, H]."""
        m = self.slots
        where = torch.arange(m) * self.max_length + lengths
        groups = []
        for start in range(0, m, _GROUP_SLOTS):  # each group pays for its own longest row only
            rows = slice(start, start + _GROUP_SLOTS)
            longest = int(lengths[rows].max()) + 1
            hidden = torch.arange(longest)[None] > lengths[rows, None]
            mask = torch.zeros(len(hidden), 1, 1, longest, dtype=self.dtype)
            groups.append((rows, longest, mask.masked_fill_(hidden[:, None, None], float("-inf"))))

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[number], self.values[number]
            keys.view(-1, self.kv * self.dim)[where] = k.reshape(m, -1)
            values.view(-1, self.kv * self.dim)[where] = v.reshape(m, -1)
            q = q[:, :, None]
            parts = [
                F.scaled_dot_product_attention(
                    q[rows],
                    keys[rows, :longest].transpose(1, 2),
                    values[rows, :longest].transpose(1, 2),
                    attn_mask=mask,
                    enable_gqa=True,
                )
                for rows, longest, mask in groups
            ]
            return torch.cat(parts).reshape(m, -1)

        return self._layers(self.embedding[tokens], self.cos[lengths][:, None], self.sin[lengths][:, None], attend)

    def logits(self, features: Tensor) -> Tensor:
        """Logits [rows, V] of features [rows, H]."""
        return self.head(features)
