"""Trees: the paper's, static choices, chains, files; and what is said about bad ones (behaviours 16 and 17)."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from eaglekit.core.tree import MAX_DRAFT_TOKENS, DraftTree, TreeShape
from eaglekit.errors import EaglekitError, InputError, TreeError


def random_shape(seed: int, nodes: int = 20) -> TreeShape:
    rng = random.Random(seed)
    return TreeShape((-1, *(rng.randrange(i) for i in range(1, nodes))))


def choices_of(shape: TreeShape) -> list[list[int]]:
    """The ranks that lead to each draft."""
    rank = {c: i for children in shape.children for i, c in enumerate(children)}
    return [[rank[n] for n in shape.path(node)[1:]] for node in range(1, len(shape.parents))]


def test_paper_tree_has_25_drafts_in_levels_of_4_8_8_3_2_and_15_leaves() -> None:  # behaviour 16
    shape = TreeShape.paper()
    assert shape.num_draft_tokens == 25
    assert [len(level) for level in shape.levels()] == [1, 4, 8, 8, 3, 2]
    assert shape.max_depth == 5
    assert len(shape.paths) == 15
    assert not shape.is_chain


def test_paper_tree_has_exactly_the_paper_s_child_counts() -> None:  # behaviour 16
    shape = TreeShape.paper()
    counts = [[len(shape.children[n]) for n in level] for level in shape.levels()]
    assert counts == [
        [4],
        [3, 2, 2, 1],
        [3, 2, 2, 1, 0, 0, 0, 0],  # under the first child's three; under the second's first; the rest are leaves
        [3, 0, 0, 0, 0, 0, 0, 0],
        [2, 0, 0],
        [0, 0],
    ]


@pytest.mark.parametrize("shape", [TreeShape.paper(), TreeShape.chain(7), *map(random_shape, range(5))])
def test_mask_row_holds_the_node_and_its_ancestors_and_sums_to_depth_plus_one(shape: TreeShape) -> None:  # 16
    for node in range(len(shape.parents)):
        assert shape.mask[node].nonzero().flatten().tolist() == sorted(shape.path(node))
        assert int(shape.mask[node].sum()) == shape.depths[node] + 1


@pytest.mark.parametrize("seed", range(5))
def test_paths_levels_children_and_depths_agree(seed: int) -> None:
    shape = random_shape(seed)
    assert sorted(n for level in shape.levels() for n in level) == list(range(20))
    for node, parent in enumerate(shape.parents[1:], 1):
        assert node in shape.children[parent]
        assert shape.depths[node] == shape.depths[parent] + 1
    leaves = [n for n in range(20) if n not in shape.parents]
    assert [p[-1] for p in shape.paths] == leaves
    for path in shape.paths:
        assert path[0] == 0
        assert all(shape.parents[b] == a for a, b in itertools.pairwise(path))


@pytest.mark.parametrize("seed", range(5))
def test_choices_in_any_order_give_the_same_tree(seed: int) -> None:
    shape = random_shape(seed)
    choices = choices_of(shape)
    first = TreeShape.from_choices(choices)
    random.Random(seed).shuffle(choices)
    second = TreeShape.from_choices([tuple(c) for c in choices])
    assert first == second
    assert sorted(choices_of(first)) == sorted(choices)


def test_chain_is_a_chain() -> None:
    shape = TreeShape.chain(3)
    assert shape.parents == (-1, 0, 1, 2)
    assert shape.is_chain and shape.paths == ((0, 1, 2, 3),)
    assert TreeShape.root_only().is_chain and TreeShape.root_only().num_draft_tokens == 0
    assert not TreeShape.from_choices([[0], [1]]).is_chain


@pytest.mark.parametrize("steps", [0, -1, MAX_DRAFT_TOKENS + 1])
def test_a_chain_of_no_or_too_many_drafts_is_an_error(steps: int) -> None:
    with pytest.raises(TreeError, match=f"chain of {steps}: expected 1 to {MAX_DRAFT_TOKENS}"):
        TreeShape.chain(steps)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        pytest.param([], ["no nodes"], id="empty"),
        pytest.param([[0], [1], [2, 0]], ["[2, 0]", "no parent", "add [2]"], id="missing parent"),
        pytest.param([[0], [0, 0], [0, 0, 0], [0, 1, 0]], ["[0, 1, 0]", "add [0, 1]"], id="missing deep parent"),
        pytest.param([[0], [0, 0], [0, 0]], ["[0, 0]", "appears twice"], id="duplicate"),
        pytest.param([[0], [2]], ["[2]", "gap in rank", "add [1]"], id="gap among the root's children"),
        pytest.param([[0], [0, 1]], ["[0, 1]", "gap in rank", "add [0, 0]"], id="gap deeper down"),
        pytest.param([[0], []], ["[]", "list of ranks"], id="no ranks"),
        pytest.param([[0], [-1]], ["[-1]", "list of ranks"], id="negative"),
        pytest.param([[0], [0.0]], ["[0.0]", "list of ranks"], id="float"),
        pytest.param([[0], [True]], ["[True]", "list of ranks"], id="bool"),
        pytest.param([[0], "01"], ["'01'", "list of ranks"], id="string"),
        pytest.param([[0], 1], ["node 1", "list of ranks"], id="number"),
        pytest.param([[0], None], ["None", "list of ranks"], id="null"),
        pytest.param([[i] for i in range(MAX_DRAFT_TOKENS + 1)], [str(MAX_DRAFT_TOKENS + 1)], id="too many"),
    ],
)
def test_bad_choices_are_an_error_that_names_the_node(choices: Any, words: list[str]) -> None:  # behaviour 17
    with pytest.raises(TreeError) as error:
        TreeShape.from_choices(choices)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("parents", "words"),
    [
        pytest.param((), "root", id="empty"),
        pytest.param((0,), "root", id="no root"),
        pytest.param((-1, 1), "node 1 has parent 1", id="own parent"),
        pytest.param((-1, 0, 3, 0), "node 2 has parent 3", id="parent behind child"),
        pytest.param((-1, 0, -1), "node 2 has parent -1", id="two roots"),
    ],
)
def test_bad_parents_are_an_error_that_names_the_node(parents: tuple[int, ...], words: str) -> None:  # behaviour 17
    with pytest.raises(TreeError, match=words):
        TreeShape(parents)


def test_tree_errors_are_input_and_value_errors() -> None:
    for kind in (InputError, EaglekitError, ValueError):
        with pytest.raises(kind):
            TreeShape.from_choices([])


def test_parse_knows_names_chains_and_files(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([[0], [1], [0, 0]]), encoding="utf-8")
    assert TreeShape.parse("paper") == TreeShape.paper()
    assert TreeShape.parse("chain:4") == TreeShape.chain(4)
    assert TreeShape.parse(str(file)) == TreeShape.from_choices([[0], [1], [0, 0]])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("chain:", "whole number"),
        ("chain:x", "whole number"),
        ("chain:1.5", "whole number"),
        ("chain:0", "expected 1 to"),
        ("chain:-3", "expected 1 to"),
        ("Paper", "expected 'paper', 'chain:N' or the path"),
        ("", "expected 'paper', 'chain:N' or the path"),
        ("/nowhere/tree.json", "no such tree or file"),
        ("tree\0.json", "no such tree or file"),
    ],
)
def test_parse_says_what_it_expects(spec: str, words: str) -> None:
    with pytest.raises(TreeError, match=words):
        TreeShape.parse(spec)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[[0], [1]", "not readable as JSON"),
        (b"", "not readable as JSON"),
        (b"\xff\xfe[[0]]", "not readable as JSON"),
        (b'{"choices": [[0]]}', "got dict"),
        (b"[]", "no nodes"),
        (b"[[0], [0, 1]]", "leaves a gap in rank"),
        (b"[[1]]", r"\[1\] leaves a gap"),
        (b"[[0], null]", "None is not a list of ranks"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(tmp_path: Path, content: bytes, words: str) -> None:  # behaviour 17
    file = tmp_path / "tree.json"
    file.write_bytes(content)
    with pytest.raises(TreeError, match=words) as error:
        TreeShape.parse(str(file))
    assert str(file) in str(error.value)


def test_a_directory_is_no_tree(tmp_path: Path) -> None:
    with pytest.raises(TreeError, match="no such tree or file"):
        TreeShape.parse(str(tmp_path))


@pytest.mark.parametrize("depth", range(-1, 7))
def test_limited_drops_what_is_deeper_and_nothing_else(depth: int) -> None:
    shape = TreeShape.paper()
    cut = shape.limited(depth)
    wanted = [c for c in choices_of(shape) if len(c) <= depth]
    assert sorted(choices_of(cut)) == sorted(wanted)
    assert cut.max_depth == max(0, min(depth, 5))


@pytest.mark.parametrize("seed", range(5))
def test_limited_keeps_topology_for_any_numbering(seed: int) -> None:
    shape = random_shape(seed)
    cut = shape.limited(2)
    assert Counter(map(tuple, choices_of(cut))) == Counter(tuple(c) for c in choices_of(shape) if len(c) <= 2)


def test_draft_tree_checks_its_parts() -> None:
    shape = TreeShape.chain(2)
    with pytest.raises(TreeError, match=r"\(2,\) tokens for 3 nodes"):
        DraftTree(torch.tensor([1, 2]), shape)
    with pytest.raises(TreeError, match="node 1 has children but no draft probabilities"):
        DraftTree(torch.tensor([1, 2, 3]), shape, torch.ones(1, 4) / 4, (0, -1, -1))
    with pytest.raises(TreeError, match="node 0 has children but no draft probabilities"):
        DraftTree(torch.tensor([1, 2, 3]), shape, torch.ones(1, 4) / 4, (1, 0, -1))
    with pytest.raises(TreeError, match="row_of"):
        DraftTree(torch.tensor([1, 2, 3]), shape, torch.ones(1, 4) / 4)


def test_law_of_children_is_the_row_of_the_node() -> None:
    laws = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    tree = DraftTree(torch.tensor([0, 1, 0]), TreeShape.chain(2), laws, (1, 0, -1))
    first, second = tree.law_of_children(0), tree.law_of_children(1)
    assert first is not None and second is not None
    assert torch.equal(first, laws[1])
    assert torch.equal(second, laws[0])
    assert DraftTree.root_only(3).law_of_children(0) is None
