"""Small stand-ins: a random Llama with a byte-level tokenizer and a chat template, in memory or on disk."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eaglekit.api import Model
from eaglekit.bench.lossless import tiny_head
from eaglekit.models.hf import HFTarget

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, then <end>, which ends an answer, and the roles: 260 ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<end>",
        additional_special_tokens=["<user>", "<assistant>", "<system>"],
    )
    fast.chat_template = TEMPLATE
    return fast


def llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """A random Llama of two layers; its weights are large enough for answers that are not all alike."""
    values: dict[str, object] = {
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 256,
        "bos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.3,
        **changes,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**values))  # type: ignore[arg-type]


def model(seed: int = 0, **changes: object) -> Model:
    """A tiny target with a random head and the byte tokenizer."""
    target = HFTarget(llama(seed, **changes), "tiny")
    return Model.wrap(target, tokenizer(), tiny_head(target, seed))


def on_disk(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Directories of a tiny target and of a head for it."""
    from eaglekit.models.checkpoint import save_head

    made = model(seed)
    target, head = folder / "target", folder / "head"
    made.target.model.save_pretrained(target)  # type: ignore[attr-defined]
    made.tokenizer.save_pretrained(target)
    assert made.head is not None
    save_head(made.head, head, metadata={"target": "tiny"})
    return target, head


def split_at_random(items: list[int], seed: int) -> list[list[int]]:
    """`items` cut into pieces of 1 to 5."""
    rng, pieces, at = random.Random(seed), [], 0
    while at < len(items):
        size = rng.randint(1, 5)
        pieces.append(items[at : at + size])
        at += size
    return pieces
