"""Draft heads: EAGLE, one small decoder layer that predicts the target's next feature, and EAGLE-3.

Contract: pure functions of tensors and a `HeadCache`; the head has no embeddings, and unless it says so no read-out of
its own: those are the frozen target's. EAGLE (arXiv 2401.15077, section 3): the input at position j is `[e_{j+1} ;
f_j]`, the embedding of the token one step ahead, then the feature; the output is the predicted feature f̂_{j+1}, which
the target's `lm_head` turns into the law of token j+2 and which is fed straight back as a feature: no final norm, no
norm before the first layer's attention. The position of a node is the index of its feature. Parameter names are those
of the reference's checkpoints.

Variants, all off by default; position, output and feeding back stay the same:

    inputs          the paper's ablation: `[e_j ; f_j]` (zeros for e_0), f_j alone, or e_{j+1} alone
    mlp             without it a layer is attention alone, half a layer
    input_norm      RMS norms of the embedding and of the feature before `fc`
    feature_layers  residual streams of the target in place of its feature, side by side in ascending order, which
                    `fuse` maps to the width of a feature; the head's own predictions are fed back without it
    fuse_norms      RMS norms of each stream before `fuse`
    output_norm     an RMS norm between the head's output and the read-out; what is fed back has no such norm
    readout_size    rows of a read-out of the head's own, `lm_head`, one per token of its draft vocabulary

EAGLE-3 (arXiv 2503.01840, section 3) is the method in which the last five are on and there is no `fc`: the first
layer's attention reads the normed embedding and the normed feature side by side, and adds to the feature as it is. Its
output is no feature of the target's, and is trained by tokens alone.

Glossary: B rows, N new nodes, E embedding width, H feature width, h heads, kv key/value heads, D head width, L keys
seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eaglekit.errors import HeadError, InputError

METHODS = ("eagle", "eagle3")
INPUTS = ("feature+shifted-token", "feature+token", "feature", "token")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True)
class HeadConfig:
    """A head's shape.

    Attributes:
        hidden_size: H, width of the features; the target's.
        embedding_size: E, width of the target's input embeddings.
        num_attention_heads: h.
        num_key_value_heads: kv, a divisor of h.
        head_dim: D.
        intermediate_size: Width of the MLP.
        vocab_size: V of the target it was trained for.
        num_hidden_layers: Decoder layers; the paper's head has one.
        hidden_act: The MLP's gate, one of `ACTIVATIONS`.
        rms_norm_eps: Added to the mean square in the norms.
        rope_theta: Base of the rotary embedding.
        rope_scaling: None for plain RoPE, or a transformers `rope_scaling` mapping (`rope_type`, `factor`, ...).
        max_position_embeddings: The length it was meant for; nothing depends on it but some RoPE scalings.
        fc_bias: Whether `fc` has a bias.
        inputs: What `fc` reads at position j, one of `INPUTS`: f_j and e_{j+1}; f_j and e_j; f_j; e_{j+1}.
        mlp: Whether layers have an MLP; False is "half a layer", and `intermediate_size` then means nothing.
        input_norm: Whether there are RMS norms on what `fc` reads.
        feature_layers: Ids of two or more residual streams, ascending, k being the one that enters layer k
            (`hidden_states[k]` of transformers), that stand in the feature's place; empty: the feature.
        method: One of `METHODS`; "eagle3" has no `fc`, and asks for `feature_layers`, `input_norm` and `output_norm`.
        fuse_norms: Whether each of `feature_layers` is normed before `fuse`.
        output_norm: Whether the output is normed before the read-out.
        readout_size: Rows of the head's own `lm_head`; 0: the target's is used.
    """

    hidden_size: int
    embedding_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_hidden_layers: int = 1
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_position_embeddings: int = 2048
    fc_bias: bool = False
    inputs: str = INPUTS[0]
    mlp: bool = True
    input_norm: bool = False
    feature_layers: tuple[int, ...] = ()
    method: str = "eagle"
    fuse_norms: bool = False
    output_norm: bool = False
    readout_size: int = 0

    def __post_init__(self) -> None:
        for name in (
            "hidden_size", "embedding_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "intermediate_size", "vocab_size", "num_hidden_layers", "max_position_embeddings",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise HeadError(f"head configuration: {name} is {value!r}; expected a whole number of at least 1")
        if self.num_hidden_layers > 128:
            raise HeadError(f"head configuration: {self.num_hidden_layers} layers; a draft head has a few, at most 128")
        for name in ("rms_norm_eps", "rope_theta"):
            number = getattr(self, name)
            if not isinstance(number, (int, float)) or not 0 < number < math.inf:
                raise HeadError(f"head configuration: {name} is {number!r}; expected a number above 0")
        if self.num_attention_heads % self.num_key_value_heads:
            raise HeadError(
                f"head configuration: {self.num_attention_heads} attention heads are not a multiple of "
                f"{self.num_key_value_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise HeadError(f"head configuration: head_dim is {self.head_dim}; RoPE needs an even number")
        if self.hidden_act not in ACTIVATIONS:
            raise HeadError(
                f"head configuration: hidden_act is {self.hidden_act!r}; expected one of {', '.join(ACTIVATIONS)}"
            )
        if self.inputs not in INPUTS:
            raise HeadError(f"head configuration: inputs is {self.inputs!r}; expected one of {', '.join(INPUTS)}")
        for name in ("fc_bias", "mlp", "input_norm", "fuse_norms", "output_norm"):
            if not isinstance(getattr(self, name), bool):
                raise HeadError(f"head configuration: {name} is {getattr(self, name)!r}; expected true or false")
        ids = self.feature_layers
        whole = isinstance(ids, tuple) and all(isinstance(k, int) and not isinstance(k, bool) and k >= 0 for k in ids)
        if not whole or len(ids) == 1 or any(a >= b for a, b in pairwise(ids)):
            raise HeadError(
                f"head configuration: feature_layers is {ids!r}; expected two or more ascending layer ids, or none"
            )
        if ids and not self.reads_features:
            raise HeadError(
                f"head configuration: feature_layers {list(ids)} with inputs {self.inputs!r}, which has no feature; "
                "leave one of them out"
            )
        if self.fuse_norms and not ids:
            raise HeadError("head configuration: fuse_norms without feature_layers, which they are for")
        size = self.readout_size
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= self.vocab_size:
            raise HeadError(
                f"head configuration: readout_size is {size!r}; expected 0 (the target's own) to {self.vocab_size}"
            )
        if self.method not in METHODS:
            raise HeadError(f"head configuration: method is {self.method!r}; expected one of {', '.join(METHODS)}")
        if self.method == "eagle3":
            good = {
                "feature_layers": bool(ids), "input_norm": self.input_norm, "output_norm": self.output_norm,
                "fc_bias": not self.fc_bias, "inputs": self.inputs == INPUTS[0],
            }  # fmt: skip
            wrong = [f"{name} {getattr(self, name)!r}" for name, fits in good.items() if not fits]
            if wrong:
                raise HeadError(
                    f"head configuration: an EAGLE-3 head with {', '.join(wrong)}; expected feature_layers, input_norm "
                    f"and output_norm, no fc_bias, and inputs {INPUTS[0]!r}"
                )

    @property
    def reads_features(self) -> bool:
        """Whether `fc` reads features."""
        return self.inputs != "token"

    @property
    def reads_embeddings(self) -> bool:
        """Whether `fc` reads embeddings."""
        return self.inputs != "feature"

    @property
    def feature_width(self) -> int:
        """Width of what stands in the place of a true feature: H, or as many H as there are `feature_layers`."""
        return self.hidden_size * max(1, len(self.feature_layers))

    @property
    def has_fc(self) -> bool:
        """Whether `fc` maps what the head reads to H; an EAGLE-3 head's attention reads it as it is."""
        return self.method != "eagle3"

    @property
    def fc_width(self) -> int:
        """Width of what `fc` reads, or an EAGLE-3 head's first layer."""
        return self.embedding_size * self.reads_embeddings + self.hidden_size * self.reads_features

    @staticmethod
    def for_target(config: Any, **overrides: Any) -> HeadConfig:
        """The paper's head for a target: one layer of the target's own shape, as far as a head can have it.

        A head always has a gated MLP and RoPE over whole heads: where the target has no such thing, or rotates parts of
        its heads only, the head gets Llama's.

        Args:
            config: The target's transformers configuration.
            **overrides: Fields to set otherwise; `head_options` makes those of the variants.
        """
        text = config.get_text_config(decoder=True)

        def first(*names: str, default: Any) -> Any:
            return next((v for v in (getattr(text, name, None) for name in names) if v), default)

        rope = dict(getattr(text, "rope_parameters", None) or {})
        if any(isinstance(v, Mapping) for v in rope.values()):  # one set per layer type: take full attention's
            rope = dict(rope.get("full_attention") or next(iter(rope.values())))
        theta = rope.pop("rope_theta", None) or first("rope_theta", default=10000.0)
        part = rope.pop("partial_rotary_factor", None) or first("partial_rotary_factor", default=1.0)
        scaling = rope or getattr(text, "rope_scaling", None)
        if scaling is not None and (_rope_type(scaling) == "default" or part != 1.0):
            scaling = None
        act = first("hidden_act", "hidden_activation", "activation_function", default="silu")
        heads = text.num_attention_heads
        groups = first("num_key_value_heads", default=heads)
        dim = first("head_dim", default=max(1, text.hidden_size // heads))
        made = HeadConfig(
            hidden_size=text.hidden_size,
            embedding_size=text.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=heads if heads % groups else groups,
            head_dim=dim + dim % 2,
            intermediate_size=first("intermediate_size", "n_inner", "ffn_dim", default=text.hidden_size * 8 // 3),
            vocab_size=text.vocab_size,
            hidden_act=act if act in ACTIVATIONS else "silu",
            rms_norm_eps=float(first("rms_norm_eps", default=1e-5)),
            rope_theta=float(theta),
            rope_scaling=scaling,
            max_position_embeddings=first("max_position_embeddings", default=2048),
        )
        return replace(made, **overrides)


def head_options(
    *,
    num_target_layers: int,
    intermediate_size: int,
    layers: float = 1,
    mlp_width: float = 1.0,
    inputs: str = INPUTS[0],
    features: str = "last",
    bias: bool = False,
    input_norm: bool = False,
    method: str = METHODS[0],
    feature_layers: Sequence[int] = (),
    kv_heads: int = 0,
    own_readout: bool | None = None,
) -> dict[str, Any]:
    """Overrides for `HeadConfig.for_target` from what a user types.

    Args:
        num_target_layers: Of the target.
        intermediate_size: Of the target's own MLP, see `HeadConfig.for_target`.
        layers: Decoder layers, or 0.5 for attention alone.
        mlp_width: Factor on `intermediate_size`; the result is rounded to a multiple of 16.
        inputs: One of `INPUTS`.
        features: "last", the target's feature; or "fused", residual streams, see `fused_layers`.
        bias: Whether `fc` has a bias.
        input_norm: Whether there are norms before `fc`.
        method: One of `METHODS`. "eagle3" fuses features, norms what it reads, and has a read-out of its own.
        feature_layers: Streams to fuse, in place of `fused_layers`.
        kv_heads: Key/value heads, 0 for as many as the target has.
        own_readout: Whether the head has an `lm_head` of its own; None: an EAGLE-3 head has.

    Raises:
        InputError: a value is none of these, or two of them exclude each other.
    """
    if layers != 0.5 and not (1 <= layers <= 128 and layers == int(layers)):
        raise InputError(f"head layers: got {layers:g}; expected 0.5 (attention alone) or a whole number from 1 to 128")
    if not 0 < mlp_width <= 64:
        raise InputError(f"head MLP width: got {mlp_width:g}; expected a factor above 0, at most 64, for example 0.5")
    if layers == 0.5 and mlp_width != 1:
        raise InputError(f"head MLP width {mlp_width:g} with 0.5 layers, which have no MLP; leave one of them out")
    if inputs not in INPUTS:
        raise InputError(f"head inputs: got {inputs!r}; expected one of {', '.join(INPUTS)}")
    if features not in ("last", "fused"):
        raise InputError(f"head features: got {features!r}; expected last or fused")
    if method not in METHODS:
        raise InputError(f"head method: got {method!r}; expected one of {', '.join(METHODS)}")
    eagle3 = method == "eagle3"
    if eagle3 and (inputs != INPUTS[0] or bias or layers == 0.5):
        raise InputError(
            "head method eagle3: it reads features and shifted tokens, has no bias and an MLP; leave out --inputs, "
            "--bias and --layers 0.5"
        )
    if feature_layers and not (eagle3 or features == "fused"):
        raise InputError("head feature layers: they are for fused features; say --features fused or --method eagle3")
    if kv_heads < 0:
        raise InputError(f"head key/value heads: got {kv_heads}; expected a divisor of the attention heads, or 0")
    if features == "fused" and inputs == "token":
        raise InputError("head features 'fused' with inputs 'token', which have no feature; leave one of them out")
    width = intermediate_size if mlp_width == 1 else max(16, round(intermediate_size * mlp_width / 16) * 16)
    fused = eagle3 or features == "fused"
    streams = tuple(sorted(feature_layers)) or (fused_layers(num_target_layers) if fused else ())
    return {
        "num_hidden_layers": max(1, int(layers)),
        "mlp": layers != 0.5,
        "intermediate_size": width,
        "inputs": inputs,
        "feature_layers": streams,
        "fc_bias": bias,
        "input_norm": input_norm or eagle3,
        "method": method,
        "fuse_norms": eagle3,
        "output_norm": eagle3,
        # How many rows is known when the draft vocabulary is, see `EagleHead.adopt`.
        "readout_size": int(eagle3 if own_readout is None else own_readout),
        **({"num_key_value_heads": kv_heads} if kv_heads else {}),
    }


def fused_layers(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's choice of streams of a target with so many layers: low, middle and high.

    Raises:
        InputError: there is no layer.
    """
    if num_layers < 1:
        raise InputError(f"fused features: a target of {num_layers} layers; expected at least 1")
    middle = num_layers // 2
    # Where the paper's choice is no ascending one, an even spread.
    low, high = (2, num_layers - 3) if num_layers > 6 else (num_layers // 4, num_layers)
    return tuple(sorted({low, middle, high}))


def _rope_type(scaling: Mapping[str, Any]) -> str:
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def rope_frequencies(config: HeadConfig) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [D/2], and the factor on cos and sin."""
    scaling = config.rope_scaling
    if scaling is None or _rope_type(scaling) == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / config.rope_theta**exponents, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = _rope_type(scaling)
    if kind not in ROPE_INIT_FUNCTIONS:
        raise HeadError(
            f"head configuration: RoPE scaling {kind!r} is unknown; expected one of {', '.join(ROPE_INIT_FUNCTIONS)}"
        )
    llama = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_theta": config.rope_theta, **scaling, "rope_type": kind},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](llama, torch.device("cpu"))
    return frequencies.float(), float(factor)


def check_draft_vocab(ids: Tensor | None, vocab_size: int) -> Tensor | None:
    """`ids` as int64, if it can be a draft vocabulary.

    Raises:
        HeadError: it is not a list of ascending token ids of the target.
    """
    if ids is None:
        return None
    good = ids.dim() == 1 and len(ids) > 0 and not ids.is_floating_point()
    if not good or ids[0] < 0 or ids[-1] >= vocab_size or not bool((ids[1:] > ids[:-1]).all()):
        raise HeadError(
            f"draft vocabulary: {ids.dtype}, shape {list(ids.shape)}: expected a list of ascending token ids from 0 to "
            f"{vocab_size - 1}; convert or train the head again"
        )
    return ids.long()


class HeadCache:
    """Keys and values of the head for B rows.

    The first `lengths[b]` entries of row b are committed; `forward` writes new ones behind them and commits nothing.
    """

    def __init__(
        self,
        config: HeadConfig,
        batch: int,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate room for `max_length` entries per row, uncommitted tree nodes included."""
        shape = (batch, config.num_key_value_heads, max_length, config.head_dim)
        layers = range(config.num_hidden_layers)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.lengths = [0] * batch
        self.max_length = max_length

    def advance(self, counts: Sequence[int]) -> None:
        """Commit the first `counts[b]` entries behind row b's length."""
        self.truncate([n + c for n, c in zip(self.lengths, counts, strict=True)], grow=True)

    def truncate(self, lengths: Sequence[int], *, grow: bool = False) -> None:
        """Forget all but the first `lengths[b]` entries of each row."""
        for old, new in zip(self.lengths, lengths, strict=True):
            if not 0 <= new <= (self.max_length if grow else old) or (grow and new < old):
                raise InputError(f"head cache: length {new} for a row of {old}, of at most {self.max_length}")
        self.lengths = list(lengths)

    def write(self, layer: int, keys: Tensor, values: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """Put `keys`, `values` [B, kv, N, D] at `lengths[b] + offset` and return the L first entries of all rows."""
        new = keys.shape[2]
        end = max(self.lengths) + offset + new
        if end > self.max_length:
            raise InputError(
                f"head cache: {end} entries needed, room for {self.max_length}; open it with a larger max_length"
            )
        k, v = self.keys[layer], self.values[layer]
        first = self.lengths[0]
        if all(n == first for n in self.lengths):
            k[:, :, first + offset : end] = keys
            v[:, :, first + offset : end] = values
        else:
            for b, length in enumerate(self.lengths):
                start = length + offset
                k[b, :, start : start + new] = keys[b]
                v[b, :, start : start + new] = values[b]
        return k[:, :, :end], v[:, :, :end]


class _Attention(nn.Module):
    def __init__(self, config: HeadConfig, width: int) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.heads, self.kv, self.dim = config.num_attention_heads, config.num_key_value_heads, dim
        self.q_proj = nn.Linear(width, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv * dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        batch, nodes, _ = x.shape
        qk = torch.cat((self.q_proj(x), self.k_proj(x)), -1).view(batch, nodes, self.heads + self.kv, self.dim)
        a, b = qk.transpose(1, 2).chunk(2, -1)
        qk = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        v = self.v_proj(x).view(batch, nodes, self.kv, self.dim).transpose(1, 2)
        y = attend(qk[:, : self.heads], qk[:, self.heads :], v)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, nodes, self.heads * self.dim))
        return out


class _MLP(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class _Layer(nn.Module):
    def __init__(self, config: HeadConfig, number: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = _Attention(config, config.fc_width if number == 0 and not config.has_fc else hidden)
        self.mlp = _MLP(config) if config.mlp else None
        self.input_layernorm = _Norm(hidden, eps) if number > 0 else None
        self.post_attention_layernorm = _Norm(hidden, eps) if config.mlp else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, read: Tensor | None = None) -> Tensor:
        """The stream behind the layer; its attention reads `read`, where that is not the stream `x` itself."""
        if read is None:
            read = x if self.input_layernorm is None else self.input_layernorm(x)
        x = x + self.self_attn(read, cos, sin, attend)
        if self.mlp is None or self.post_attention_layernorm is None:
            return x
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class EagleHead(nn.Module):
    """The draft head.

    A new one has random weights; the feature half of `fc` starts at the identity, and `fuse` gives the last stream.

    Args:
        config: Its shape.
        generator: Initialises the weights (seed 0 when None); the global generator is not used.
        draft_vocab: int64 [Vd], ascending: the tokens that it may draft, or None for all. Logits over a few thousand
            tokens cost a fraction of those over all, and what is emitted follows the target's law just the same.
    """

    inv_freq: Tensor
    draft_vocab: Tensor | None

    def __init__(
        self,
        config: HeadConfig,
        generator: torch.Generator | None = None,
        draft_vocab: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            hidden, eps = config.hidden_size, config.rms_norm_eps
            embed_norm, feature_norm = (
                config.input_norm and reads for reads in (config.reads_embeddings, config.reads_features)
            )
            streams = config.feature_layers if config.fuse_norms else ()
            self.fuse_norms = nn.ModuleList(_Norm(hidden, eps) for _ in streams)
            self.fuse = nn.Linear(config.feature_width, hidden, bias=False) if config.feature_layers else None
            self.embed_layernorm = _Norm(config.embedding_size, eps) if embed_norm else None
            self.hidden_layernorm = _Norm(hidden, eps) if feature_norm else None
            self.fc = nn.Linear(config.fc_width, hidden, bias=config.fc_bias) if config.has_fc else None
            self.layers = nn.ModuleList(_Layer(config, i) for i in range(config.num_hidden_layers))
            self.norm = _Norm(hidden, eps) if config.output_norm else None
            self.lm_head = nn.Linear(hidden, config.readout_size, bias=False) if config.readout_size else None
        self.to_empty(device="cpu")
        frequencies, self.rope_factor = rope_frequencies(config)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.register_buffer("draft_vocab", check_draft_vocab(draft_vocab, config.vocab_size), persistent=False)
        size = config.vocab_size if self.draft_vocab is None else len(self.draft_vocab)
        if config.readout_size not in (0, size) and self.draft_vocab is not None:
            raise HeadError(
                f"head: its own lm_head has {config.readout_size} rows, its draft vocabulary {size} tokens; expected "
                "as many"
            )
        self._initialise(generator or torch.Generator().manual_seed(0))

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        hidden = self.config.hidden_size
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith("bias") or name == "fuse.weight":
                parameter.zero_()
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
        if self.config.reads_features and self.fc is not None:
            self.fc.weight[:, -hidden:] = torch.eye(hidden)
        if self.fuse is not None:
            self.fuse.weight[:, -hidden:] = torch.eye(hidden)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return next(self.parameters()).device

    @torch.no_grad()
    def adopt(self, draft_vocab: Tensor, readout: Tensor) -> None:
        """Take a draft vocabulary, and for a read-out of the head's own the target's rows as its first weights.

        Args:
            draft_vocab: int64 [Vd], ascending token ids.
            readout: [V, H], the target's.

        Raises:
            HeadError: it is no draft vocabulary.
        """
        self.draft_vocab = check_draft_vocab(draft_vocab, self.config.vocab_size)
        if self.lm_head is not None:
            rows = readout[draft_vocab.to(readout.device)].to(self.device, self.dtype)
            self.config = replace(self.config, readout_size=len(rows))
            self.lm_head = nn.Linear(rows.shape[1], len(rows), bias=False, device=self.device, dtype=self.dtype)
            self.lm_head.weight.copy_(rows)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EagleHead:
        # The frequencies stay in float32 whatever the weights are cast to: half precision cannot tell positions apart.
        kept = self._buffers.get("inv_freq")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if kept is not None and self.inv_freq.dtype != torch.float32:
            self.inv_freq = kept.to(self.inv_freq.device)
        return self

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Give cos and sin [B, 1, N, D/2] of `positions` [B, N], any size, computed in float32."""
        angles = positions[:, None, :, None] * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.rope_factor != 1.0:
            cos, sin = cos * self.rope_factor, sin * self.rope_factor
        return cos.to(dtype), sin.to(dtype)

    @property
    def shifted(self) -> bool:
        """Whether the tokens that it reads are one step ahead of the features; False: those of the same place."""
        return self.config.inputs != "feature+token"

    def fc_input(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """What `fc` reads, or the first layer of a head without one: [..., fc_width].

        Args:
            embeddings: [..., E]: of the tokens one step ahead; unless `shifted`, of the features' own tokens, zeros for
                the first of a text.
            features: [..., H]; or, of a head with `feature_layers`, their streams [..., feature_width].
        """
        parts = []
        if self.config.reads_embeddings:
            parts.append(embeddings if self.embed_layernorm is None else self.embed_layernorm(embeddings))
        if self.config.reads_features:
            features = self.fused(features)
            parts.append(features if self.hidden_layernorm is None else self.hidden_layernorm(features))
        return torch.cat(parts, -1)

    def fused(self, features: Tensor) -> Tensor:
        """Features [..., H] of what a head is given: these, or streams [..., feature_width] of its `feature_layers`."""
        if self.fuse is None or features.shape[-1] == self.config.hidden_size:
            return features
        out: Tensor = self.fuse(self.fuse_input(features))
        return out

    def fuse_input(self, streams: Tensor) -> Tensor:
        """What `fuse` reads of streams [..., feature_width]: the same, each normed if there are norms for them."""
        if not self.fuse_norms:
            return streams
        parts = streams.split(self.config.hidden_size, -1)
        return torch.cat([norm(x) for norm, x in zip(self.fuse_norms, parts, strict=True)], -1)

    def run(self, embeddings: Tensor, features: Tensor, positions: Tensor, attend: Callable[[int], Attend]) -> Tensor:
        """All layers: [B, N, H] of embeddings and features, see `forward`; `attend(i)` is layer i's attention."""
        x = self.fused(features)
        read: Tensor | None = self.fc_input(embeddings, x)
        if self.fc is not None:
            x, read = self.fc(read), None
        cos, sin = self.rotation(positions, x.dtype)
        for number, layer in enumerate(self.layers):
            x = layer(x, cos, sin, attend(number), read if number == 0 else None)
        return x

    def read_out(self, features: Tensor, readout: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits [..., Vd] of predictions [..., H]; `readout` is the target's, over the draft vocabulary."""
        x = features if self.norm is None else self.norm(features)
        return readout(x) if self.lm_head is None else self.lm_head(x)

    def forward(
        self,
        embeddings: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: HeadCache | None = None,
        offset: int = 0,
    ) -> Tensor:
        """Predict the next feature of every node.

        Args:
            embeddings: [B, N, E], of the tokens one step ahead, see `fc_input`.
            features: [B, N, H], true ones or this head's own predictions; or streams, see `fc_input`.
            positions: int64 [B, N]: the index of each node's feature.
            mask: bool [B, 1, N, L]: the keys that each node sees, itself included; L = max(lengths) + offset + N,
                key l of row b being cache entry l. None: everything in the cache up to the node itself.
            cache: Where the nodes' keys and values are written, at `lengths[b] + offset`; nothing is committed.
            offset: Uncommitted nodes written behind `lengths` before these.

        Returns:
            [B, N, H].

        Raises:
            InputError: the cache is full.
        """
        nodes = positions.shape[1]
        causal = mask is None and cache is None and nodes > 1
        if cache is not None and mask is None:
            mask = self._causal_mask(cache, nodes, offset)
        grouped = self.config.num_key_value_heads != self.config.num_attention_heads

        def attention(number: int) -> Attend:
            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                if cache is not None:
                    k, v = cache.write(number, k, v, offset)
                return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)

            return attend

        return self.run(embeddings, features, positions, attention)

    def _causal_mask(self, cache: HeadCache, nodes: int, offset: int) -> Tensor | None:
        """Mask [B, 1, N, L], or None where every node sees everything."""
        starts = [n + offset for n in cache.lengths]
        end = max(starts) + nodes
        if nodes == 1 and min(starts) == end - 1:
            return None
        device = self.inv_freq.device
        last = torch.tensor(starts, device=device)[:, None] + torch.arange(nodes, device=device)
        return (torch.arange(end, device=device) <= last[:, :, None])[:, None]
