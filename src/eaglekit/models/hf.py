"""Any stock Hugging Face decoder as a `Target`, through the public arguments of its `forward` alone.

Contract: the model is the user's. It is put in eval mode and stays so; nothing else of it changes: no attribute, no
patched method, no hook after a pass. What the family does is asked of its configuration in the terms that transformers
itself uses (`layer_types`, `sliding_window`, `rope_parameters`, ...), and then proven: when a target is made, a few
tokens are run as a tree and path by path, and a family where the two differ is refused.

Glossary:

    base       the model without its output matrix; its `last_hidden_state` holds the features
    block      a decoder layer
    boundary   see `models/state.py`, which deals with LongRoPE

Dynamic NTK RoPE is constant up to the configuration's `max_position_embeddings`, which is the context limit here;
behind it stock models depend on what they ran before.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from eaglekit.core.tree import DraftTree, TreeShape
from eaglekit.models.cache import Placement, TreeCache, additive_mask
from eaglekit.models.checks import check_open, check_vocabulary
from eaglekit.models.defaults import GenerationDefaults
from eaglekit.models.state import HFState
from eaglekit.models.support import context_limit, one_line, refuse_unsupported, rope_settings, unsupported
from eaglekit.models.target import TargetInfo

# What stock code raises when it is called in a way that its family does not know.
_FAILURES = (TypeError, ValueError, RuntimeError, AttributeError, LookupError)


class HFTarget:
    """A stock Hugging Face decoder; see `Target`.

    `embed` and `lm_head` run in the caller's gradient mode, so that a draft head can be trained through them; passes of
    a state never record gradients. A model made by `load_hf` has its parameters frozen; freeze your own if you train.

    Args:
        model: A causal language model with its output matrix. It is put in eval mode.
        name: What messages call it.
        prefill_chunk: Most tokens of a row that a prefill reads in one pass.

    Raises:
        UnsupportedModelError: the family cannot read trees exactly; the message says why.
    """

    def __init__(self, model: Any, name: str = "", *, prefill_chunk: int = 512) -> None:
        self.prefill_chunk = prefill_chunk
        self._config: Any = model.config.get_text_config(decoder=True)
        self._name = name or str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
        refuse_unsupported(model.config, self._name, type(model))
        self.model = model.eval()
        self.notes: tuple[str, ...] = ()  # what a user should know about how it was loaded
        self._base: Any = model.base_model
        self._head: Any = model.get_output_embeddings()
        if self._base is model or self._head is None:
            raise unsupported(self._name, "a model without an output matrix", "a causal language model")
        attention = self._config._attn_implementation
        if attention not in ("sdpa", "eager"):
            raise unsupported(
                self._name,
                f"attention {attention!r}, which takes no tree masks",
                "sdpa or eager",
                "load the model with attn_implementation='sdpa'",
            )
        arguments = {**inspect.signature(model.forward).parameters, **inspect.signature(self._base.forward).parameters}
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"
        self._takes_cache_position = "cache_position" in arguments
        self._layer_types = tuple(sorted(set(getattr(self._config, "layer_types", None) or ())))
        self._mask_by_type = bool(self._layer_types)
        self._window: int | None = getattr(self._config, "sliding_window", None) or None
        self._blocks = _find_blocks(self._base, self._config.num_hidden_layers)
        self._embedding: Any = model.get_input_embeddings()
        self._num_ids = int(self._embedding.weight.shape[0])
        self._scaling: Callable[[Tensor], Tensor] = nn.Identity()
        self.boundary = _boundary(self._config, self._name)
        try:
            self._info = self._observe()
        except torch.OutOfMemoryError:
            raise
        except _FAILURES as e:
            raise unsupported(self._name, f"{type(e).__name__}: {one_line(e)}", "to run a plain call") from e
        self._prove()

    @property
    def info(self) -> TargetInfo:
        """Facts about it."""
        return self._info

    def defaults(self, tokenizer: Any = None) -> GenerationDefaults:
        """What the model's own `generation_config` asks for; its configuration or the tokenizer may name the EOS."""
        return GenerationDefaults.for_model(self._config, self.model.generation_config, tokenizer, self.notes)

    def open(self, batch: int, max_length: int, layers: Sequence[int] = ()) -> HFState:
        """Empty caches for `batch` rows of at most `max_length` tokens each, tree nodes included.

        `max_length` may exceed `info.max_length`: the nodes of a wide tree near the context limit need the room.

        Raises:
            InputError: an argument is out of range.
        """
        last = self._info.num_layers if self._blocks is not None else -1
        check_open(self._name, batch, max_length, layers, last)
        return HFState(self, batch, max_length, layers)

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings of `ids` [...]: [..., embedding_size], as `get_input_embeddings()` gives them."""
        embedded: Tensor = self._embedding(ids.to(self._info.device))
        return embedded

    def lm_head(self, features: Tensor) -> Tensor:
        """Logits [..., V] of `features` [..., H], with the model's own scaling and soft-capping."""
        return self._scaling(self._head(features))

    def lm_head_of(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        """A function like `lm_head` that computes the logits [..., n] of the tokens `ids` (int64 [n]) alone."""
        head, ids = self._head, ids.to(self._info.device)
        if type(head) is not nn.Linear:
            return lambda features: self.lm_head(features)[..., ids]
        with torch.no_grad():
            weight, bias = head.weight[ids], None if head.bias is None else head.bias[ids]
        return lambda features: self._scaling(nn.functional.linear(features, weight, bias))

    def check_ids(self, ids: Tensor) -> None:
        """Raise InputError if one of `ids` (on the CPU) has no embedding: devices report that badly, or not at all."""
        check_vocabulary(self._name, ids, self._num_ids)

    def forward(
        self, inputs: Tensor, visible: Sequence[Tensor], cache: TreeCache, layers: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """One forward of the base, which writes to `cache`.

        Args:
            inputs: int64 [2, R, N]: tokens and their positions.
            visible: For each row bool [n, n]; see `additive_mask`.
            cache: Told by `begin` where this pass goes.
            layers: Ids of the residual streams to return.

        Returns:
            Features [R, N, H], and [R, N, width] for each of `layers`.
        """
        tokens, positions = inputs.to(self._info.device)
        arguments: dict[str, Any] = {self._cache_argument: cache}
        if self._takes_cache_position:
            arguments["cache_position"] = positions[0]
        with torch.no_grad(), self._capture(layers) as streams:
            out = self._base(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=self._mask(cache.place, positions, visible),
                use_cache=True,
                return_dict=True,
                **arguments,
            )
        return out.last_hidden_state, streams

    def _mask(self, place: Placement, positions: Tensor, visible: Sequence[Tensor]) -> Tensor | dict[str, Tensor]:
        """What the family takes as `attention_mask`: one mask, or one for each type of layer."""
        kinds = self._layer_types or ("full_attention" if self._window is None else "sliding_attention",)
        masks: dict[int | None, Tensor] = {}  # by window

        def mask(kind: str) -> Tensor:
            # No token is further than place.length - 1 behind another: a longer window restricts nothing.
            window = self._window if kind == "sliding_attention" and place.length > (self._window or 0) else None
            if window not in masks:
                masks[window] = additive_mask(place, positions, visible, self._info.dtype, window)
            return masks[window]

        return {kind: mask(kind) for kind in kinds} if self._mask_by_type else mask(kinds[0])

    @contextmanager
    def _capture(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Residual streams of `layers` during one forward of this thread, by hooks that are gone afterwards."""
        streams: dict[int, Tensor] = {}
        handles, thread = [], threading.get_ident()

        def keep(layer: int, stream: Tensor) -> None:
            if threading.get_ident() == thread:
                streams[layer] = stream.clone()

        def entering(layer: int) -> Callable[..., None]:
            return lambda _, args, kwargs: keep(layer, args[0] if args else kwargs["hidden_states"])

        def leaving(layer: int) -> Callable[..., None]:
            return lambda _, args, out: keep(layer, out if isinstance(out, Tensor) else out[0])

        try:
            blocks: Sequence[nn.Module] = list(self._blocks or ())
            for layer in layers:
                if layer < len(blocks):
                    handles.append(blocks[layer].register_forward_pre_hook(entering(layer), with_kwargs=True))
                else:
                    handles.append(blocks[-1].register_forward_hook(leaving(layer)))
            yield streams
        finally:
            for handle in handles:
                handle.remove()

    def _stock(self, ids: Sequence[int]) -> Tensor:
        """Logits [n, V] of a plain call of the model."""
        tokens = torch.tensor([list(ids)], device=self._embedding.weight.device)
        with torch.no_grad():
            logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits[0]
        return logits

    def _observe(self) -> TargetInfo:
        """Run a few tokens: widths, dtype, and which of the known ways leads from features to the model's logits."""
        ids = [(7 * i + 11) % self._num_ids for i in range(8)]
        wanted = self._stock(ids)
        with torch.no_grad():
            tokens = torch.tensor([ids], device=self._embedding.weight.device)
            features = self._base(input_ids=tokens, use_cache=False, return_dict=True).last_hidden_state[0]
            raw = self._head(features)
        # The same numbers in the same order, so closer than a tree can be expected to come.
        fits = (s for s in _scalings(self._config) if _differ(s(raw), wanted) < _tolerance(features) / 5)
        scaling = next(fits, None)
        if scaling is None:
            raise unsupported(
                self._name,
                "logits that are not the output matrix times the features, scaled and soft-capped in a known way",
                "an exact way from features to logits",
            )
        self._scaling = scaling
        return TargetInfo(
            name=self._name,
            model_type=str(self.model.config.model_type),
            hidden_size=features.shape[-1],
            embedding_size=self._embedding(tokens).shape[-1],
            vocab_size=wanted.shape[-1],
            num_layers=int(self._config.num_hidden_layers),
            max_length=context_limit(self._config),
            dtype=features.dtype,
            device=features.device,
        )

    def _prove(self) -> None:
        """Read a branching tree, commit a branch and go on; every node must equal a plain call on its path."""
        uniform = len(self._layer_types) == 1
        problem = ""
        for by_type in (True, False) if uniform else (bool(self._layer_types),):
            self._mask_by_type = by_type
            try:
                problem = self._compare()
            except torch.OutOfMemoryError:
                raise
            except _FAILURES as e:
                problem = f"{type(e).__name__}: {one_line(e)}"
            if not problem:
                return
        raise unsupported(self._name, f"no exact tree attention ({problem})", "a node's logits to equal its path's")

    def _compare(self) -> str:
        """What is wrong with the logits of a small tree, or nothing."""
        ids = [(7 * i + 11) % self._num_ids for i in range(8)]
        tree = DraftTree(torch.tensor([(5 * i + 3) % self._num_ids for i in range(6)]), TreeShape((-1, 0, 0, 1, 2, 4)))
        state = self.open(1, len(ids) + 8)
        state.prefill([torch.tensor(ids)])
        got = state.forward_tree([tree]).logits[0]
        for path in tree.shape.paths:
            wanted = self._stock(ids + tree.tokens[list(path)].tolist())[len(ids) :]
            error = _differ(got[list(path)], wanted)
            if not error < _tolerance(got):
                return f"the path {list(path)} of a tree differs by {error:.2g} of its norm"
        path = tree.shape.paths[-1]
        state.commit([path])
        got = state.forward_tree([DraftTree.root_only(ids[0])]).logits[0]
        error = _differ(got, self._stock([*ids, *tree.tokens[list(path)].tolist(), ids[0]])[-1:])
        return "" if error < _tolerance(got) else f"what follows a committed branch differs by {error:.2g} of its norm"


def _differ(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference, relative to the norm of `wanted`; infinite where something is not finite."""
    center = wanted.float().mean(-1, keepdim=True)  # a constant added to all logits means nothing
    ratio = float((got.float() - wanted.float()).norm() / (wanted.float() - center).norm())
    return ratio if ratio == ratio else float("inf")


def _tolerance(x: Tensor) -> float:
    """What rounding may do to logits, as `_differ` measures it."""
    if x.dtype in (torch.float16, torch.bfloat16):
        return 0.1
    return 1e-4 if x.device.type == "cpu" or torch.get_float32_matmul_precision() == "highest" else 5e-3


def _find_blocks(base: nn.Module, count: int) -> nn.ModuleList | None:
    """The list of decoder layers: the outermost one of the right length."""
    lists = (m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    return next(lists, None)


def _scalings(config: Any) -> Iterator[Callable[[Tensor], Tensor]]:
    """Ways from the output matrix's product to logits that the configuration hints at; the plain one last."""
    factors = [getattr(config, key, None) for key in ("logits_scaling", "logit_scale", "output_multiplier")]
    for cap in dict.fromkeys((getattr(config, "final_logit_softcapping", None), None)):
        for factor in (*(f for f in factors if f is not None), None):
            for divide in (True, False):
                yield partial(_scale, factor=factor, divide=divide, cap=cap)


def _scale(x: Tensor, factor: float | None, divide: bool, cap: float | None) -> Tensor:
    if factor is not None:
        x = x / factor if divide else x * factor
    return x if cap is None else torch.tanh(x / cap) * cap


def _boundary(config: Any, name: str) -> int | None:
    """Positions after which LongRoPE changes its frequencies, if the context reaches further."""
    found = {
        int(rope.get("original_max_position_embeddings") or config.original_max_position_embeddings)
        for rope in rope_settings(config)
        if rope.get("rope_type", rope.get("type")) in ("longrope", "su")
    }
    if len(found) > 1:
        raise unsupported(name, f"LongRoPE with several original lengths {sorted(found)}", "one length for all layers")
    return next((b for b in found if b < context_limit(config)), None)
