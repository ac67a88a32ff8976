"""Shared stand-ins: a tiny llama with random weights, a byte-level tokenizer, a random head. Nothing is downloaded."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from eaglekit.api import Model
from eaglekit.bench.lossless import tiny_head
from eaglekit.models.head import EagleHead
from eaglekit.models.hf import HFTarget

SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")
CONTEXT = 96
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}" + (
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> tf.PreTrainedTokenizerFast:
    """One token per byte, without merges: letters, digits, punctuation, and the bytes of é, € and an emoji."""
    text = "abcdefghijklmnopqrstuvwxyz .,:!?0123456789" + "é€😀"
    to_char = pre_tokenizers.ByteLevel(add_prefix_space=False)
    chars = "".join(piece for piece, _ in to_char.pre_tokenize_str(text))
    vocab = {c: i for i, c in enumerate((*SPECIAL, *dict.fromkeys(chars)))}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = to_char
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=template
    )


def new_llama(seed: int = 0, vocab: int = 64, context: int = CONTEXT, scale: float = 8.0) -> tf.LlamaForCausalLM:
    """A tiny llama whose weights are large enough that greedy answers do not repeat one token."""
    config = tf.LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        model = tf.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02 * scale)
    return model.float().eval()


@pytest.fixture(scope="session")
def llama() -> tf.LlamaForCausalLM:
    """Shared: tests do not change it."""
    return new_llama()


@pytest.fixture(scope="session")
def target(llama: tf.LlamaForCausalLM) -> HFTarget:
    return HFTarget(llama, "tiny")


@pytest.fixture(scope="session")
def head(target: HFTarget) -> EagleHead:
    return tiny_head(target, 1)


@pytest.fixture(scope="session")
def tokenizer() -> tf.PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def model(target: HFTarget, head: EagleHead) -> Model:
    """Takes and gives token ids."""
    return Model.wrap(target, None, head)


@pytest.fixture
def talker(target: HFTarget, head: EagleHead, tokenizer: tf.PreTrainedTokenizerFast) -> Model:
    """Takes and gives text."""
    return Model.wrap(target, tokenizer, head)
