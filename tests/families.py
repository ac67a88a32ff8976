"""Tiny models of many families, with fixed random weights: built in memory, nothing is downloaded.

Windows are shorter than the texts of the tests, LongRoPE's boundary lies within them, and weights are large enough that
attention matters to the logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

VOCAB = 101
WINDOW = 11
BOUNDARY = 32

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


def _config(cls: Any, **changes: Any) -> Any:
    return cls(**{**_SIZES, **changes})


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **values}


def _longrope() -> Any:
    dim = 12 // 2
    rope = _rope(
        "longrope",
        short_factor=[1.0] * dim,
        long_factor=[2.0 + i for i in range(dim)],
        original_max_position_embeddings=BOUNDARY,
    )
    return _config(tf.Phi3Config, rope_parameters=rope, original_max_position_embeddings=BOUNDARY)


_CONFIGS: dict[str, Any] = {
    "llama": lambda: _config(tf.LlamaConfig),
    "llama-tied": lambda: _config(tf.LlamaConfig, tie_word_embeddings=True),
    "llama-biases-odd-head-dim": lambda: _config(
        tf.LlamaConfig, head_dim=14, num_key_value_heads=1, attention_bias=True, mlp_bias=True
    ),
    "llama-rope-linear": lambda: _config(tf.LlamaConfig, rope_parameters=_rope("linear", factor=2.0)),
    "llama-rope-llama3": lambda: _config(
        tf.LlamaConfig,
        rope_parameters=_rope(
            "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
        ),
    ),
    "llama-rope-yarn": lambda: _config(
        tf.LlamaConfig, rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=32)
    ),
    "llama-rope-dynamic": lambda: _config(tf.LlamaConfig, rope_parameters=_rope("dynamic", factor=2.0)),
    "mistral-window": lambda: _config(tf.MistralConfig, sliding_window=WINDOW),
    "mixtral-window": lambda: _config(tf.MixtralConfig, num_local_experts=4, sliding_window=WINDOW),
    "qwen2": lambda: _config(tf.Qwen2Config),
    "qwen2-window": lambda: _config(
        tf.Qwen2Config, num_hidden_layers=4, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen3": lambda: _config(tf.Qwen3Config, head_dim=16),
    "qwen3-moe": lambda: _config(tf.Qwen3MoeConfig, head_dim=16, **_MOE),
    "gemma2": lambda: _config(
        tf.Gemma2Config,
        num_hidden_layers=4,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": lambda: _config(
        tf.Gemma3TextConfig,
        num_hidden_layers=4,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
    ),
    "phi3": lambda: _config(tf.Phi3Config),
    "phi3-longrope": _longrope,
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=None
    ),
    "gpt-neox": lambda: _config(tf.GPTNeoXConfig, rotary_pct=0.5),
    "olmo2": lambda: _config(tf.Olmo2Config),
    "granite": lambda: _config(
        tf.GraniteConfig,
        logits_scaling=3.0,
        embedding_multiplier=2.0,
        residual_multiplier=0.7,
        attention_multiplier=0.2,
    ),
    "cohere": lambda: _config(tf.CohereConfig, logit_scale=0.5),
    "starcoder2-window": lambda: _config(tf.Starcoder2Config, sliding_window=WINDOW),
    "stablelm": lambda: _config(tf.StableLmConfig, partial_rotary_factor=0.5),
    "opt": lambda: _config(tf.OPTConfig, ffn_dim=64, word_embed_proj_dim=32),
    "gpt-oss": lambda: _config(
        tf.GptOssConfig,
        num_hidden_layers=4,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        rope_parameters=_rope("default"),
    ),
    "deepseek-v3": lambda: _config(
        tf.DeepseekV3Config,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=10,
        v_head_dim=12,
        rope_parameters=_rope("default"),
    ),
}
FAMILIES = tuple(_CONFIGS)


def new_model(family: str) -> Any:
    """A model of its own for the caller, always with the same weights."""
    return made(lambda: tf.AutoModelForCausalLM.from_config(_CONFIGS[family]()), seed=7)


def made(build: Callable[[], Any], seed: int) -> Any:
    """What `build` makes, with weights that follow from the seed and are large enough to matter to the logits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
        for name, weight in model.named_parameters():
            with torch.no_grad():
                if weight.ndim > 1:
                    weight.mul_(5.0)
                elif name.endswith("bias"):
                    weight.normal_(0.0, 0.3)
                else:
                    weight.add_(torch.randn_like(weight) * 0.2)
    model.generation_config.eos_token_id = None
    return model.float().eval()


@functools.cache
def shared_model(family: str) -> Any:
    """A model that tests share and do not change."""
    return new_model(family)
