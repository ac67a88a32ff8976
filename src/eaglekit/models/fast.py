"""Llama-shaped targets on a CPU, without the overhead of stock code: packed weights, fused kernels, flat passes.

Contract: `FastTarget` is a `Target` whose logits equal the stock model's (to 1e-4 in float32), and whose every token is
computed independently of the other tokens of its pass (`models/stack.py`): with compiled kernels a
node of a tree gets the bits that plain decoding would give it, so that greedy output does not depend on drafter, tree
or batch, in any format.

A pass has no padding: the nodes of all rows stand one after the other, T in all, and a `Plan` says where each belongs.
Nothing in a pass grows with the context but attention itself.

Glossary: T tokens of a pass, H hidden width, V vocabulary, L slots of a row's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eaglekit.core.tree import DraftTree
from eaglekit.errors import InputError
from eaglekit.models.checks import NO_TREE, RowChecks, check_open, check_path, check_vocabulary
from eaglekit.models.defaults import GenerationDefaults
from eaglekit.models.native import default_backend
from eaglekit.models.stack import (
    Backend,
    Caches,
    LayerWeights,
    Matrix,
    Plan,
    Planner,
    RotaryTables,
    StackShape,
    Weights,
    chain,
    join,
)
from eaglekit.models.support import context_limit
from eaglekit.models.target import TargetInfo, TargetOutput

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # frequencies that depend on nothing but the configuration
_CHUNK = 512  # tokens of a prefill's pass


def why_not_fast(config: Any) -> str:
    """Why a model of this transformers configuration is left to the stock adapter; empty if `FastTarget` can run it."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    types = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    counts = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    checks = {
        "odd counts": all(isinstance(getattr(text, n, None), int) and getattr(text, n) > 0 for n in counts),
        f"family {text.model_type}": text.model_type in _FAMILIES and text is config,
        "a quantization_config": getattr(config, "quantization_config", None) is None,
        "a sliding window": not window and not types,
        "biases": not getattr(text, "attention_bias", False) and not getattr(text, "mlp_bias", False),
        f"RoPE {rope.get('rope_type')}": rope.get("rope_type", "default") in _ROPE_TYPES,
        "RoPE over parts of a head": (rope.get("partial_rotary_factor") or 1.0) == 1.0,
    }
    return next((reason for reason, good in checks.items() if not good), "") or _stack_shape(text).why_not()


def fast_target(model: Any, weights: Weights, name: str = "") -> FastTarget:
    """A `FastTarget` with the weights of a stock model on the CPU, which is not changed.

    Raises:
        InputError: `why_not_fast` has something against it, or the format is not available.
    """
    tensors = model.state_dict()
    return FastTarget(
        model.config,
        tensors.__getitem__,
        list(tensors),
        weights=weights,
        name=name or str(getattr(model.config, "_name_or_path", "")),
        generation=model.generation_config,
    )


@dataclass(frozen=True)
class Readout:
    """Logits [..., N] of features [..., H], by a packed matrix [N, H]."""

    matrix: Matrix

    def __call__(self, features: Tensor) -> Tensor:
        """See the class."""
        flat = self.matrix(features.reshape(-1, features.shape[-1]).float())
        return flat.view(*features.shape[:-1], flat.shape[-1])


class FastTarget:
    """See the module and `Target`.

    Args:
        config: The transformers configuration; `why_not_fast` must have nothing against it.
        weight: Gives a tensor of the checkpoint by name.
        names: Of all tensors of the checkpoint.
        weights: Format of the matrices.
        name: What messages call it.
        generation: The model's `GenerationConfig`, or None.
        backend: None for the fastest that this machine has.

    Raises:
        InputError: the configuration is not one of a model that this can run, or a format is not available.
        KeyError: the checkpoint lacks a tensor.
    """

    def __init__(
        self,
        config: Any,
        weight: Callable[[str], Tensor],
        names: Sequence[str],
        *,
        weights: Weights = "fp32",
        name: str = "",
        generation: Any = None,
        backend: Backend | None = None,
    ) -> None:
        reason = why_not_fast(config)
        if reason:
            raise InputError(f"{name}: cannot be run by the fast target ({reason}); expected weights='stock'")
        self.weights, self._config, self._generation = weights, config, generation
        self.notes: tuple[str, ...] = ()  # what a user should know about how it was loaded
        self.backend = backend or default_backend()
        self._stack_shape = _stack_shape(config)
        layers = (
            _layer(f"model.layers.{i}.", weight, config.model_type, self._stack_shape)
            for i in range(config.num_hidden_layers)
        )
        tables = RotaryTables(*_rope(config, self._stack_shape.dim))
        self.stack = self.backend.stack(self._stack_shape, layers, weights, tables)
        # Copied: a view would keep a whole mapped file in memory.
        self._norm = _checked(weight, "model.norm.weight", (config.hidden_size,)).float().clone()
        table = _checked(weight, "model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        # Copied for the same reason, and because the library reads it as it lies.
        self.embedding = table.to(torch.float32 if weights == "fp32" else torch.float16, copy=True).contiguous()
        tied = bool(getattr(config, "tie_word_embeddings", False))
        head = table
        if not tied or "lm_head.weight" in names:
            head = _checked(weight, "lm_head.weight", tuple(table.shape))
            tied = tied and torch.equal(head, table)  # one that differs is used, as transformers does
        self._head = Readout(self.backend.matrix(head, weights))
        self._output = self.embedding if tied else head  # rows of it are asked for by drafting
        self.planner = Planner()
        self._info = TargetInfo(
            name=name or config.model_type,
            model_type=config.model_type,
            hidden_size=config.hidden_size,
            embedding_size=config.hidden_size,
            vocab_size=len(table),
            num_layers=config.num_hidden_layers,
            max_length=context_limit(config),
            dtype=torch.float32,
            device=torch.device("cpu"),
        )

    @property
    def info(self) -> TargetInfo:
        """Facts about it."""
        return self._info

    def defaults(self, tokenizer: Any = None) -> GenerationDefaults:
        """What the model's own `generation_config` asks for; its configuration or the tokenizer may name the EOS."""
        return GenerationDefaults.for_model(self._config, self._generation, tokenizer, self.notes)

    def open(self, batch: int, max_length: int, layers: Sequence[int] = ()) -> FastState:
        """Empty caches for `batch` rows of at most `max_length` tokens each, tree nodes included.

        Raises:
            InputError: an argument is out of range.
        """
        check_open(self._info.name, batch, max_length, layers, self._info.num_layers)
        return FastState(self, batch, max_length, layers)

    def caches(self, batch: int, max_length: int) -> Caches:
        """Keys and values for `batch` rows of `max_length` slots."""
        return Caches.allocate(self._info.num_layers, self._stack_shape, batch, max_length)

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings of `ids` [...]: float32 [..., H]."""
        return self.embedding[ids].float()

    @property
    def lm_head(self) -> Readout:
        """Logits [..., V] of features [..., H]."""
        return self._head

    def lm_head_of(self, ids: Tensor) -> Readout:
        """A function like `lm_head` that computes the logits [..., n] of the tokens `ids` (int64 [n]) alone.

        It serves drafting: float32 matrices are kept as float16 there, which is half as much to read.
        """
        return Readout(self.backend.matrix(self._output[ids], "fp16" if self.weights == "fp32" else self.weights))

    def forward(
        self, tokens: Tensor, plan: Plan, caches: Caches, layers: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Features [T, H] of `tokens` (int64 [T]), and the residual streams [T, H] asked for."""
        x = self.embed(tokens)
        streams = {k: torch.empty_like(x) for k in layers}
        self.stack.run(x, plan, caches, streams)
        if self._info.num_layers in streams:
            streams[self._info.num_layers] = x
        return self.backend.norm(x, self._norm, self._stack_shape.eps), streams

    def check_ids(self, ids: Tensor) -> None:
        """Raise InputError if one of `ids` has no embedding."""
        check_vocabulary(self._info.name, ids, self._info.vocab_size)


class FastState(RowChecks):
    """Caches of B rows; see `TargetState`. `FastTarget.open` makes one."""

    def __init__(self, target: FastTarget, batch: int, max_length: int, layers: Sequence[int]) -> None:
        super().__init__(target.info, batch, max_length)
        self._target = target
        self._layers = tuple(layers)
        self._caches = target.caches(batch, max_length)
        self._trees: list[DraftTree | None] | None = None  # of the last pass, until committed or overwritten

    def depth_limit(self, row: int) -> int | None:
        """None: a tree of any depth can be read."""
        return None

    @torch.inference_mode()
    def prefill(self, ids: Sequence[Tensor]) -> TargetOutput:
        """Read and commit `ids[b]` (int64 [n_b], n_b >= 0) behind what row b holds already.

        Logits and features of rows without ids, and features behind a shorter row's last token, are zeros.

        Raises:
            InputError: a row would grow too long, or an id is outside the vocabulary; nothing was read.
        """
        ids = self._checked_ids(ids, self._target.check_ids)
        self._trees = None
        info, counts = self._target.info, [len(new) for new in ids]
        parts, streams = [], [[] for _ in self._layers]  # type: list[Tensor], list[list[Tensor]]
        for tokens, plan in self._chunks(ids):
            features, kept = self._target.forward(tokens, plan, self._caches, self._layers)
            parts.append(features)
            for pieces, layer in zip(streams, self._layers, strict=True):
                pieces.append(kept[layer])
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        logits = torch.zeros(len(ids), 1, info.vocab_size, dtype=info.dtype, device=info.device)
        if not parts:
            empty = torch.zeros(len(ids), 0, info.hidden_size, dtype=info.dtype, device=info.device)
            return TargetOutput(logits, empty, dict.fromkeys(self._layers, empty))
        features = _padded(torch.cat(parts), counts)
        read = [row for row, count in enumerate(counts) if count]
        logits[read, 0] = self._target.lm_head(features[read, [counts[row] - 1 for row in read]])
        layers = {k: _padded(torch.cat(p), counts) for k, p in zip(self._layers, streams, strict=True)}
        return TargetOutput(logits, features, layers)

    @torch.inference_mode()
    def forward_tree(self, trees: Sequence[DraftTree | None]) -> TargetOutput:
        """One pass over every row's tree; node i of row b stands at position `lengths[b] + depths[i]`.

        A row whose tree is None takes no part: it costs nothing, and its outputs are zeros.

        Raises:
            InputError: a tree reaches past a limit, or a token is outside the vocabulary; nothing was read.
        """
        self._check_rows("forward_tree", len(trees))
        given = [(row, tree) for row, tree in enumerate(trees) if tree is not None]
        if not given:
            raise InputError("forward_tree: every tree is None; expected at least one")
        for row, tree in given:
            self._check_room(row, len(tree.tokens), tree.shape.max_depth + 1)
            self._target.check_ids(tree.tokens)
        self._trees = None
        tokens = torch.cat([tree.tokens for _, tree in given]) if len(given) > 1 else given[0][1].tokens
        starts = [self._lengths[row] for row, _ in given]
        plan = self._target.planner.trees([row for row, _ in given], starts, [tree.shape for _, tree in given])
        features, streams = self._target.forward(tokens, plan, self._caches, self._layers)
        logits = self._target.lm_head(features)
        self._trees = list(trees)
        counts = [0 if tree is None else len(tree.tokens) for tree in trees]
        return TargetOutput(
            _padded(logits, counts), _padded(features, counts), {k: _padded(x, counts) for k, x in streams.items()}
        )

    @torch.inference_mode()
    def commit(self, nodes: Sequence[Sequence[int]]) -> None:
        """Keep, in each row, these nodes of its last tree: a path from the root down (empty: nothing is kept).

        Raises:
            InputError: there is no tree to commit, or the nodes are no path of it; nothing was kept.
        """
        self._check_rows("commit", len(nodes))
        if self._trees is None:
            raise InputError(NO_TREE)
        still = [check_path(row, *item) for row, item in enumerate(zip(nodes, self._trees, strict=True))]
        self._trees = None
        for row, (path, moved) in enumerate(zip(nodes, still, strict=True)):
            length = self._lengths[row]
            if moved < len(path):
                sources = [length + node for node in path[moved:]]
                self._target.backend.move(self._caches, row, sources, length + moved)
            self._lengths[row] = length + len(path)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget all but the first `lengths[b]` tokens of each row.

        Raises:
            InputError: a row does not hold that many; nothing was forgotten.
        """
        self._check_lengths(lengths)
        self._trees = None
        self._lengths = list(lengths)

    def committed(self, row: int = 0) -> list[Tensor]:
        """Keys and values [kv, length, D] of a row's committed tokens, layer by layer; for checks."""
        keys, values = self._caches.read(row, self._lengths[row])
        return [*keys, *values]

    def _chunks(self, ids: Sequence[Tensor]) -> Iterator[tuple[Tensor, Plan]]:
        """Passes of at most `_CHUNK` tokens that read `ids`, row after row."""
        tokens: list[Tensor] = []
        plans: list[Plan] = []
        room = _CHUNK
        for row, new in enumerate(ids):
            done = 0
            while done < len(new):
                count = min(room, len(new) - done)
                tokens.append(new[done : done + count])
                plans.append(chain(row, self._lengths[row] + done, count))
                done, room = done + count, room - count
                if not room:
                    yield torch.cat(tokens), join(plans)
                    tokens, plans, room = [], [], _CHUNK
        if tokens:
            yield torch.cat(tokens), join(plans)


def _padded(flat: Tensor, counts: Sequence[int]) -> Tensor:
    """[T, D], the rows' tokens one after the other, as [B, N, D]; zeros behind a shorter row's."""
    width = max(counts)
    if len(flat) == len(counts) * width:
        return flat.view(len(counts), width, -1)
    whole = flat.new_zeros(len(counts), width, flat.shape[1])
    start = 0
    for row, count in enumerate(counts):
        whole[row, :count] = flat[start : start + count]
        start += count
    return whole


def _stack_shape(config: Any) -> StackShape:
    return StackShape(
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=config.num_attention_heads,
        kv=config.num_key_value_heads,
        dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        activation=config.hidden_act,
        eps=config.rms_norm_eps,
    )


def _checked(weight: Callable[[str], Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of the checkpoint.

    Raises:
        KeyError: there is none, or it is not such a tensor.
    """
    found = weight(name).detach()
    if tuple(found.shape) != shape or not found.is_floating_point():
        raise KeyError(f"{name}: {found.dtype} {list(found.shape)}, expected {list(shape)}")
    return found


def _layer(prefix: str, weight: Callable[[str], Tensor], family: str, shape: StackShape) -> LayerWeights:
    """A layer from tensors called as in transformers' Llama."""
    hidden, inner, dim = shape.hidden, shape.inner, shape.dim
    widths = {"q": shape.heads * dim, "k": shape.kv * dim, "v": shape.kv * dim}

    def need(name: str, *size: int) -> Tensor:
        return _checked(weight, prefix + name, size)

    biased, normed = family == "qwen2", family == "qwen3"
    return LayerWeights(
        input_norm=need("input_layernorm.weight", hidden),
        qkv=torch.cat([need(f"self_attn.{n}_proj.weight", width, hidden) for n, width in widths.items()]),
        qkv_bias=torch.cat([need(f"self_attn.{n}_proj.bias", width) for n, width in widths.items()])
        if biased
        else None,
        head_norms=(need("self_attn.q_norm.weight", dim), need("self_attn.k_norm.weight", dim)) if normed else None,
        out=need("self_attn.o_proj.weight", hidden, widths["q"]),
        mlp_norm=need("post_attention_layernorm.weight", hidden),
        gate_up=torch.cat([need(f"mlp.{n}_proj.weight", inner, hidden) for n in ("gate", "up")]),
        down=need("mlp.down_proj.weight", hidden, inner),
    )


def _rope(config: Any, dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies [D/2] and the factor on cos and sin, as transformers computes them."""
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind == "default":
        theta: Any = rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))
        if not isinstance(theta, (int, float)) or theta <= 0:
            raise ValueError(f"rope_theta {theta!r}")
        return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies, float(factor)
