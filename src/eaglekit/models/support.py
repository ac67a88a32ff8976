"""What a configuration alone says, before any weights are read: which families can be a target, and how long a text.

What a configuration cannot tell is proven by `HFTarget` when it is made.
"""

from __future__ import annotations

from typing import Any

from eaglekit.errors import UnsupportedModelError

# Keys that only configurations of recurrent or convolutional layers have.
_STATE_KEYS = (
    "mamba_d_state", "ssm_state_size", "ssm_cfg", "state_size", "lru_width", "linear_conv_kernel_dim", "conv_L_cache",
    "conv_kernel", "conv_kernel_size", "xlstm_block_type", "n_recurrent_layers",
)  # fmt: skip
_UNLIMITED = 2**31 - 1


def refuse_unsupported(config: Any, name: str, model_class: Any = None) -> None:
    """Refuse, from the configuration alone, a family whose passes cannot read a tree.

    Args:
        config: The model's configuration.
        name: What the message calls it.
        model_class: The class that the model has, or would have.

    Raises:
        UnsupportedModelError: with the reason, on one line.
    """
    family = str(config.model_type)
    if config.is_encoder_decoder:
        raise unsupported(name, f"{family}, an encoder-decoder", "a decoder-only language model")
    text = config.get_text_config(decoder=True)
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", False):
        raise unsupported(name, f"{family} with attention in both directions", "causal attention")
    types = set(getattr(text, "layer_types", None) or ())
    if "chunked_attention" in types or getattr(text, "attention_chunk_size", None):
        raise unsupported(name, f"{family} with chunked attention", "full or sliding-window attention")
    keys = [k for k in _STATE_KEYS if getattr(text, k, None) is not None]
    other = sorted(types - {"full_attention", "sliding_attention"})
    if keys or getattr(model_class, "_is_stateful", False):
        why = f" (configuration key {keys[0]})" if keys else ""
        raise unsupported(
            name, f"{family}, a recurrent or hybrid family{why}", "attention layers only, as a state cannot branch"
        )
    if other:
        raise unsupported(name, f"{family} with layers of type {', '.join(other)}", "full or sliding attention")
    if family in ("bloom", "mpt") or getattr(text, "alibi", False):
        raise unsupported(
            name, f"{family} with ALiBi, which counts cache slots instead of positions", "rotary or learned positions"
        )
    if "local" in (getattr(text, "attention_layers", None) or ()):
        raise unsupported(name, f"{family} with local attention over cache slots", "full or sliding-window attention")


def one_line(error: object) -> str:
    """The message of `error` on one line, of at most 200 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."


def unsupported(name: str, got: str, expected: str, advice: str = "use another model") -> UnsupportedModelError:
    """The error that says why the model `name` is refused."""
    return UnsupportedModelError(f"{name}: cannot be a target: got {got}; expected {expected}; {advice}")


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """RoPE parameters: one dictionary, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [v for v in rope.values() if isinstance(v, dict)] or [dict(rope)]


def context_limit(config: Any) -> int:
    """Most tokens of a text; YaRN configurations may state the length before scaling."""
    names = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
    values = (getattr(config, name, None) for name in names)
    limit = next((v for v in values if isinstance(v, int) and v > 0), _UNLIMITED)
    for rope in rope_settings(config):
        original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
        if rope.get("rope_type") == "yarn" and original and factor:
            limit = max(limit, int(original * factor))
    return limit
