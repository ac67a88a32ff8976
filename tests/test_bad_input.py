"""Bad input that once got through: each is one clear error now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tiny
from eaglekit.api import check_method, parse_tree
from eaglekit.bench.tasks import read_tasks
from eaglekit.errors import DataError, InputError
from eaglekit.models.fast import fast_target, why_not_fast
from eaglekit.models.native import native
from eaglekit.train.config_file import read_config
from eaglekit.train.text.forms import read_rows


@pytest.mark.parametrize("tree", ["+lookup:3", "chain:2+lookup:3+lookup:3", "lookup:0", "chain:2+lookup:65"])
def test_a_tree_with_odd_lookup_is_named_as_it_was_typed(tree: str) -> None:
    with pytest.raises(InputError) as e:
        parse_tree(tree)
    assert repr(tree) in str(e.value)


def test_lookup_takes_no_tree_of_a_head() -> None:
    with pytest.raises(InputError, match="lookup:N"):
        check_method("lookup", "chain:3")
    assert check_method("lookup", "lookup:5")[1] == 5


@pytest.mark.parametrize("row", ['{"messages": 5}', '{"turns": ["\\ud800"]}', '{"prompt": "\\ud800"}'])
def test_a_prompt_that_is_no_text_names_file_and_line(row: str, tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(row + "\n")
    with pytest.raises(DataError, match=r"q\.jsonl:1"):
        read_tasks(file)


@pytest.mark.parametrize(
    "row",
    [{"text": "\ud800"}, {"turns": ["\ud800"]}, {"messages": [{"role": "user", "content": "\ud800"}]}],
    ids=["text", "turns", "messages"],
)
def test_half_a_character_in_training_text_names_file_and_line(row: dict[str, object], tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"d\.jsonl:1"):
        list(read_rows(file))


@pytest.mark.parametrize("text", ["epochs: 2026-02-31", "epochs: !!int x", "epochs: !!timestamp x", "[" * 3000])
def test_yaml_that_cannot_be_read_is_one_error(text: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match="not YAML"):
        read_config(file, {"epochs": None})


def test_a_product_with_rows_of_another_width_is_refused() -> None:
    backend = native()
    if backend is None:
        pytest.skip("no compiled kernels")
    with pytest.raises(InputError, match="expected"):
        backend.matrix(torch.ones(32, 64), "int8")(torch.ones(1, 16))


def test_counts_that_make_no_model_are_left_to_the_stock_loader() -> None:
    config = tiny.llama().config
    for name in ("num_hidden_layers", "num_key_value_heads", "max_position_embeddings"):
        kept = getattr(config, name)
        setattr(config, name, 0)
        assert why_not_fast(config) == "odd counts"
        setattr(config, name, kept)


def test_kernels_do_not_depend_on_torch_s_default_dtype() -> None:
    model = tiny.llama(hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
    ids = [torch.tensor([1, 2, 3])]
    target = fast_target(model, "int8")
    wanted = target.open(1, 8).prefill(ids).logits
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = fast_target(model, "int8").open(1, 8).prefill(ids).logits
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.dtype == torch.float32 and torch.equal(got, wanted)
