"""The same promises on a GPU; skipped where there is none."""

from __future__ import annotations

import pytest
import torch

import tiny
from eaglekit.api import Model
from eaglekit.bench import lossless
from eaglekit.bench.lossless import tiny_head
from eaglekit.models.hf import HFTarget

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


def on_gpu(dtype: torch.dtype = torch.float32) -> Model:
    target = HFTarget(tiny.llama().to("cuda", dtype), "tiny")
    return Model.wrap(target, tiny.tokenizer(), tiny_head(target, 0).to("cuda", dtype))


@pytest.mark.parametrize("tree", ["paper", "chain:5"])
def test_greedy_ids_equal_plain_decoding_s(tree: str) -> None:
    model = on_gpu()
    plain = model.generate("hello", max_new_tokens=64, method="plain").token_ids
    assert model.generate("hello", max_new_tokens=64, tree=tree).token_ids == plain


def test_the_whole_check_passes() -> None:
    findings = list(lossless.check(on_gpu(), lossless.CheckOptions.quick()))
    assert all(f.passed for f in findings), [f.detail for f in findings if not f.passed]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_decodes_and_repeats_with_a_seed(dtype: torch.dtype) -> None:
    model = on_gpu(dtype)
    runs = [model.generate("hello", max_new_tokens=32, temperature=0.8, seed=5).token_ids for _ in range(2)]
    assert runs[0] == runs[1] and len(runs[0]) > 1
