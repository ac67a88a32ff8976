"""Tiny random models that `FastTarget` can run, of all families, RoPE types and groupings of heads; and comparisons."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import families
from eaglekit.core.tree import DraftTree, TreeShape
from eaglekit.models.fast import FastTarget, fast_target
from eaglekit.models.native import NativeBackend, native, why_not
from eaglekit.models.portable import PortableBackend
from eaglekit.models.stack import Backend, Weights

VOCAB = 101  # no multiple of 32, the width of a panel
CONTEXT = 160
FORMATS: tuple[Weights, ...] = ("fp32", "fp16", "int8")
BUSHY = TreeShape((-1, 0, 0, 1, 0, 2, 2, 5, 3, 1, 7, 5, 10, 0, 13, 10, 8, 12))

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


_LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 40}
_CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (tf.LlamaConfig, {}),
    "llama-tied": (tf.LlamaConfig, {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "llama-linear": (tf.LlamaConfig, _rope("linear", factor=2.0)),
    "llama-llama3": (tf.LlamaConfig, _rope("llama3", **_LLAMA3)),
    "llama-yarn": (tf.LlamaConfig, _rope("yarn", factor=4.0, original_max_position_embeddings=40)),
    "llama-gelu": (tf.LlamaConfig, {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 4}),
    "mistral": (tf.MistralConfig, {"sliding_window": None, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "qwen2": (tf.Qwen2Config, {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}),
    "qwen2-yarn-tied": (
        tf.Qwen2Config,
        {**_rope("yarn", factor=4.0, original_max_position_embeddings=40), "tie_word_embeddings": True},
    ),
    "qwen3": (tf.Qwen3Config, {"head_dim": 64, "num_attention_heads": 7, "num_key_value_heads": 1}),
    "qwen3-tied": (tf.Qwen3Config, {"tie_word_embeddings": True, **_rope("default", rope_theta=1e6)}),
}
KINDS = tuple(_CONFIGS)


def new_model(kind: str, **changes: Any) -> Any:
    """A model of its own for the caller; its weights are large enough that everything matters to the logits."""
    cls, own = _CONFIGS[kind]
    return families.made(lambda: tf.AutoModelForCausalLM.from_config(cls(**{**_SIZES, **own, **changes})), seed=3)


@functools.cache
def shared_model(kind: str) -> Any:
    """A model that tests share and do not change."""
    return new_model(kind)


@functools.cache
def shared_target(kind: str, weights: Weights = "fp32") -> FastTarget:
    """Over the fastest backend."""
    return fast_target(shared_model(kind), weights, kind)


def target_over(model: Any, backend: Backend, weights: Weights = "fp32") -> FastTarget:
    """Over `backend`."""
    tensors = model.state_dict()
    return FastTarget(model.config, tensors.__getitem__, list(tensors), weights=weights, name="tiny", backend=backend)


def compiled() -> NativeBackend:
    """The compiled backend; without one the test is skipped."""
    found = native()
    if found is None:
        pytest.skip(f"no compiled kernels: {why_not()}")
    return found


def backend_called(name: str) -> Backend:
    """By its name; the test is skipped where this machine has none."""
    return PortableBackend() if name == "portable" else compiled()


def random_ids(generator: torch.Generator, count: int, vocab: int = VOCAB) -> list[int]:
    return torch.randint(2, vocab, (count,), generator=generator).tolist()


def random_tree(generator: torch.Generator, shape: TreeShape, vocab: int = VOCAB) -> DraftTree:
    return DraftTree(torch.tensor(random_ids(generator, len(shape.parents), vocab)), shape)


def random_shape(generator: torch.Generator, nodes: int) -> TreeShape:
    return TreeShape((-1, *(int(torch.randint(i, (), generator=generator)) for i in range(1, nodes))))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_threads(count: int, call: Callable[[], Any]) -> Any:
    """What `call` returns on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return call()
    finally:
        torch.set_num_threads(before)


def assert_same(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """The same bits in each."""
    assert len(got) == len(wanted)
    for number, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(a, b), f"tensor {number} differs by {(a - b).abs().max()}"


def assert_close(got: Tensor, wanted: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(got, wanted, atol=tolerance, rtol=0)
