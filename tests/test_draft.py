"""The draft head at work: packed and in its module, level by level and whole trees; `top`; many rows at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from eaglekit.api import Model
from eaglekit.bench.lossless import tiny_head
from eaglekit.core.random import GeneratorSource
from eaglekit.core.sampling import Law, SamplingParams
from eaglekit.core.stats import Stats
from eaglekit.core.tree import TreeShape
from eaglekit.drafters.eagle import EagleDrafter
from eaglekit.engine.decode import Session
from eaglekit.engine.drafter import Context, observe
from eaglekit.engine.stopping import Stopper
from eaglekit.errors import InputError
from eaglekit.models import rows as rows_module
from eaglekit.models.draft import Drafted, DraftModel, HeadState, ModuleState, PackedState, levels_of
from eaglekit.models.head import EagleHead, HeadConfig
from eaglekit.models.hf import HFTarget
from eaglekit.models.native import MOST_TOP, top
from eaglekit.models.portable import PortableBackend
from eaglekit.models.rows import FastRows
from eaglekit.models.stack import Weights
from fast_models import (
    BUSHY,
    CONTEXT,
    FORMATS,
    VOCAB,
    assert_close,
    assert_same,
    compiled,
    random_ids,
    random_shape,
    seeded,
    shared_model,
    shared_target,
    target_over,
    with_threads,
)

EACH_FORMAT = pytest.mark.parametrize("weights", FORMATS)
PAPER = TreeShape.paper()
PART = [0, *range(3, 90, 2), 97]  # a draft vocabulary; 45 tokens, no multiple of 16
Pairs = tuple[Tensor, Tensor]

# name -> fields of the configuration, draft vocabulary
EAGLE3: dict[str, Any] = {
    "method": "eagle3", "feature_layers": (0, 2, 3), "input_norm": True, "output_norm": True, "fuse_norms": True,
}  # fmt: skip
HEADS: dict[str, tuple[dict[str, Any], list[int] | None]] = {
    "one-layer": ({}, None),
    "bias": ({"fc_bias": True}, None),
    "two-layers": ({"num_hidden_layers": 2, "num_key_value_heads": 1, "num_attention_heads": 3}, None),
    "vocabulary": ({}, PART),
    "two-layers-bias-vocabulary-yarn": (
        {
            "num_hidden_layers": 2,
            "fc_bias": True,
            "head_dim": 64,
            "hidden_act": "gelu_pytorch_tanh",
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40},
        },
        PART,
    ),
    "half-layer": ({"mlp": False}, None),
    "wide-four-layers": ({"num_hidden_layers": 4, "intermediate_size": 224}, None),
    "fused": ({"feature_layers": (0, 1, 3)}, None),
    "fused-half-layer-bias": ({"feature_layers": (1, 2), "mlp": False, "fc_bias": True}, None),
    "norms": ({"input_norm": True, "output_norm": True, "fc_bias": True}, PART),
    "fused-norms-own-readout": (
        {"feature_layers": (0, 1, 3), "fuse_norms": True, "output_norm": True, "readout_size": VOCAB}, None,
    ),
    "eagle3": ({**EAGLE3, "readout_size": len(PART)}, PART),
    "eagle3-two-layers": ({**EAGLE3, "num_hidden_layers": 2, "num_key_value_heads": 4}, None),
}  # fmt: skip
EACH_HEAD = pytest.mark.parametrize("kind", HEADS)


@functools.cache
def new_head(kind: str, half: bool = False) -> EagleHead:
    """A random head for the targets here; `half` rounds its weights to float16."""
    changes, vocab = HEADS[kind]
    config = HeadConfig(**{
        "hidden_size": 64, "embedding_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "intermediate_size": 112, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, **changes,
    })  # fmt: skip
    head = EagleHead(config, draft_vocab=None if vocab is None else torch.tensor(vocab))
    g = seeded(2)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=g) * 0.2)
            elif parameter.ndim == 1:
                parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.3)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=g) / parameter.shape[-1] ** 0.5)
            if half:
                parameter.copy_(parameter.half())
    return head.eval().requires_grad_(False)


def states(
    kind: str, half: bool = False, batch: int = 1, length: int = 120, weights: Weights = "fp32"
) -> tuple[PackedState, ModuleState]:
    """The same head packed and as a module, over one target."""
    compiled()
    target = shared_target("llama", weights)
    packed = DraftModel(new_head(kind, half), target).open(batch, length)
    module = DraftModel(new_head(kind, half), target, fast=False).open(batch, length)
    assert isinstance(packed, PackedState) and isinstance(module, ModuleState)
    return packed, module


def some_pairs(g: torch.Generator, count: int, width: int = 64) -> Pairs:
    return torch.tensor(random_ids(g, count)), torch.randn(count, width, generator=g)


def pairs_for(kind: str, g: torch.Generator, count: int) -> Pairs:
    """As wide as the head reads them."""
    return some_pairs(g, count, new_head(kind).config.feature_width)


def assert_agree(got: Drafted, wanted: Drafted, tolerance: float = 1e-4) -> None:
    assert_close(got.features.float(), wanted.features.float(), tolerance)
    assert_close(got.logits.float(), wanted.logits.float(), tolerance)


def assert_equal(got: Drafted, wanted: Drafted) -> None:
    assert_same([got.features, got.logits], [wanted.features, wanted.logits])


def read_levels(
    g: torch.Generator, both: Sequence[HeadState], shape: TreeShape, behind: Sequence[Drafted]
) -> list[list[Drafted]]:
    """What each state gives for random tokens on the inner nodes of a tree, level by level."""
    out, found = list(behind), [[] for _ in both]  # type: list[Drafted], list[list[Drafted]]
    for level in levels_of(shape)[1:]:
        tokens = torch.tensor([random_ids(g, len(level.nodes)) for _ in both[0].lengths])
        for i, state in enumerate(both):
            out[i] = state.read_drafts(level, tokens, out[i].features[:, level.above])
            found[i].append(out[i])
    return found


# --- packed and as a module


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@EACH_HEAD
def test_packed_and_module_agree(kind: str, half: bool) -> None:
    g, both = seeded(0), states(kind, half)
    for count, shape in ((65, PAPER), (1, BUSHY), (4, TreeShape.chain(6)), (7, TreeShape((-1, 0, 0, 0)))):
        pairs = pairs_for(kind, g, count)
        packed, module = (state.read([pairs]) for state in both)
        assert packed.features.shape == (1, 1, 64)
        assert packed.logits.shape == (1, 1, VOCAB if HEADS[kind][1] is None else len(PART))
        assert_agree(packed, module)
        for a, b in zip(*read_levels(g, both, shape, (packed, module)), strict=True):
            assert_agree(a, b)
        assert both[0].lengths == both[1].lengths
        for a, b in zip(both[0].committed(0), both[1].committed(0), strict=True):
            assert_close(a, b)
    assert both[0].lengths == [77]


@EACH_HEAD
def test_rows_of_unequal_length_agree_and_equal_each_alone(kind: str) -> None:
    g, both = seeded(1), states(kind, batch=3)
    alone = [states(kind)[0] for _ in range(3)]
    behind: list[Drafted] = []
    for counts in ((9, 66, 1), (0, 3, 2), (5, 1, 0), (1, 2, 3)):
        pairs = [pairs_for(kind, g, n) if n else None for n in counts]
        behind = [state.read(pairs) for state in both]
        assert_agree(*behind)
        for row, pair in enumerate(pairs):
            if pair is None:
                assert not behind[0].features[row].any() and not behind[0].logits[row].any()
            else:
                out = alone[row].read([pair])
                assert torch.equal(behind[0].features[row], out.features[0])
                assert torch.equal(behind[0].logits[row], out.logits[0])
    assert both[0].lengths == both[1].lengths == [15, 72, 6]
    out = list(behind)
    single = [Drafted(behind[0].features[r : r + 1], behind[0].logits[r : r + 1]) for r in range(3)]
    for level in levels_of(PAPER)[1:]:
        tokens = torch.tensor([random_ids(g, len(level.nodes)) for _ in range(3)])
        out = [state.read_drafts(level, tokens, o.features[:, level.above]) for state, o in zip(both, out, strict=True)]
        assert_agree(*out)
        for row in range(3):
            features = single[row].features[:, level.above]
            single[row] = alone[row].read_drafts(level, tokens[row : row + 1], features)
            assert torch.equal(out[0].features[row], single[row].features[0])
            assert torch.equal(out[0].logits[row], single[row].logits[0])
    for row in range(3):
        assert_same(both[0].committed(row), alone[row].committed(0))
        for a, b in zip(both[0].committed(row), both[1].committed(row), strict=True):
            assert_close(a, b)


def test_a_head_keeps_its_own_precision_whatever_the_targets() -> None:
    compiled()
    for weights in FORMATS:
        for half, kind in ((False, 0), (True, 1)):
            model = DraftModel(new_head("bias", half), shared_target("llama", weights))
            assert model.packed is not None
            assert model.packed.head.struct.fc.kind == kind
            assert model.packed.head.readout.struct.kind == FORMATS.index(weights)


@EACH_FORMAT
def test_a_head_over_targets_of_each_format_agrees(weights: Weights) -> None:
    g, both = seeded(3), states("vocabulary", weights=weights)
    pairs = some_pairs(g, 20)
    outs = [state.read([pairs]) for state in both]
    # The read-out rounds features to int8, which may differ in a last bit before.
    assert_close(outs[0].features, outs[1].features)
    assert_close(outs[0].logits, outs[1].logits, 2e-2 if weights == "int8" else 1e-4)


def test_heads_that_kernels_cannot_compute_stay_modules() -> None:
    compiled()
    target = shared_target("llama")
    others: tuple[dict[str, Any], ...] = (
        {"head_dim": 16}, {"hidden_act": "relu"}, {"intermediate_size": 40}, {"inputs": "feature+token"},
        {"inputs": "feature"}, {"inputs": "token"},
    )  # fmt: skip
    for changes in others:
        values = {**vars(new_head("one-layer").config), **changes}
        model = DraftModel(EagleHead(HeadConfig(**values)), target)
        assert model.packed is None and isinstance(model.open(1, 9), ModuleState)
    stock = HFTarget(shared_model("llama"), "llama")
    assert DraftModel(new_head("one-layer"), stock).packed is None
    portable = target_over(shared_model("llama"), PortableBackend())
    assert DraftModel(new_head("one-layer"), portable).packed is None
    state = DraftModel(new_head("one-layer"), target, fast=False).open(1, 60)
    assert state.grow(PAPER, 5, state.read([some_pairs(seeded(0), 3)])) is None


@EACH_HEAD
def test_truncate_then_read_again(kind: str) -> None:
    g, both = seeded(4), states(kind)
    kept, dropped, new = pairs_for(kind, g, 40), pairs_for(kind, g, 30), pairs_for(kind, g, 5)
    fresh = states(kind)[0]
    fresh.read([kept])
    wanted = fresh.read([new])
    for state in both:
        behind = state.read([kept])
        read_levels(g, [state], BUSHY, [behind])
        state.read([dropped])
        state.truncate([40])
        assert state.lengths == [40]
    outs = [state.read([new]) for state in both]
    assert_equal(outs[0], wanted)
    assert_agree(outs[0], outs[1])
    assert_same(both[0].committed(0), fresh.committed(0))
    assert all(t.shape == (new_head(kind).config.num_key_value_heads, 45, new_head(kind).config.head_dim)
               for state in both for t in state.committed(0))  # fmt: skip


def test_a_full_cache_is_an_input_error_and_nothing_is_read() -> None:
    g, both = seeded(5), states("one-layer", length=20)
    level = levels_of(PAPER)[1]
    for state in both:
        behind = state.read([some_pairs(g, 19)])
        with pytest.raises(InputError, match="room for 20") as caught:
            state.read([some_pairs(g, 2)])
        assert "\n" not in str(caught.value) and state.lengths == [19]
        with pytest.raises(InputError, match="room for 20"):
            state.read_drafts(level, torch.ones(1, len(level.nodes), dtype=torch.long), behind.features[:, level.above])
        state.read([some_pairs(g, 1)])
        assert state.lengths == [20]
    with pytest.raises(InputError, match="room for 20"):
        both[0].grow(PAPER, 5, behind)
    for state in states("one-layer", batch=2, length=20):
        with pytest.raises(InputError, match="room for 20"):
            state.read([some_pairs(g, 3), some_pairs(g, 21)])
        assert state.lengths == [0, 0]


# --- whole trees


def grow_by_levels(state: HeadState, shape: TreeShape, root: int, out: Drafted, vocab: Tensor | None) -> list[int]:
    """Tokens of a greedy tree: children are the best tokens behind their parent, the first of equal ones first."""
    tokens = torch.full((len(shape.parents),), root)
    for level in levels_of(shape):
        if level.depth:
            out = state.read_drafts(level, tokens[None, list(level.nodes)], out.features[:, level.above])
        for i, node in enumerate(level.nodes):
            children = shape.children[node]
            order = sorted(range(out.logits.shape[-1]), key=lambda t, i=i, out=out: -float(out.logits[0, i, t]))
            best = torch.tensor(order[: len(children)])
            tokens[list(children)] = best if vocab is None else vocab[best]
    return tokens.tolist()


_SHAPES = [PAPER, PAPER.limited(3), PAPER.limited(1), BUSHY, TreeShape.chain(1), TreeShape.chain(7),
           TreeShape((-1, *[0] * 45)), *(random_shape(seeded(i), 5 + 4 * i) for i in range(8))]  # fmt: skip


@EACH_FORMAT
@EACH_HEAD
def test_growing_at_once_gives_the_tokens_of_growing_level_by_level(kind: str, weights: Weights) -> None:
    g, (packed, module) = seeded(6), states(kind, half=weights == "fp16", weights=weights)
    vocab, root = new_head(kind).draft_vocab, 5
    for shape in (*_SHAPES, *_SHAPES[::-1]):
        pairs = pairs_for(kind, g, 1 + int(torch.randint(3, (), generator=g)))
        behind, other = packed.read([pairs]), module.read([pairs])
        before = packed.committed(0)
        tokens = packed.grow(shape, root, behind)
        assert tokens is not None and tokens.dtype == torch.int64 and tokens[0] == root
        assert tokens.tolist() == grow_by_levels(packed, shape, root, behind, vocab)
        if weights == "fp32":
            assert tokens.tolist() == grow_by_levels(module, shape, root, other, vocab)
        assert_same(packed.committed(0), before)
        root = int(tokens[-1])
    assert vocab is None or set(tokens[1:].tolist()) <= set(PART)


def test_growing_does_not_depend_on_the_number_of_threads() -> None:
    packed, _ = states("two-layers")
    behind = packed.read([some_pairs(seeded(7), 30)])
    one, two = (with_threads(n, lambda: packed.grow(PAPER, 5, behind)) for n in (1, 2))
    assert torch.equal(one, two)


def test_growing_behind_a_long_text_reaches_positions_that_nothing_has_met() -> None:
    g, (packed, module) = seeded(22), states("one-layer", length=1100)
    pairs, chain = some_pairs(g, 1022), TreeShape.chain(7)  # tables of angles have 1024 rows at first
    behind, other = packed.read([pairs]), module.read([pairs])
    tokens = packed.grow(chain, 5, behind)
    assert tokens is not None
    assert tokens.tolist() == grow_by_levels(module, chain, 5, other, None)


def test_states_that_cannot_grow_at_once_say_so() -> None:
    packed, _ = states("vocabulary", length=200)
    behind = packed.read([some_pairs(seeded(8), 3)])
    assert packed.grow(TreeShape((-1, *[0] * len(PART))), 5, behind) is not None
    assert packed.grow(TreeShape((-1, *[0] * (len(PART) + 1))), 5, behind) is None  # more children than tokens
    packed, _ = states("one-layer", length=200)
    behind = packed.read([some_pairs(seeded(8), 3)])
    assert packed.grow(TreeShape((-1, *[0] * MOST_TOP)), 5, behind) is not None
    assert packed.grow(TreeShape((-1, *[0] * (MOST_TOP + 1))), 5, behind) is None
    packed, _ = states("one-layer", batch=2)
    behind = packed.read([some_pairs(seeded(8), 3), some_pairs(seeded(8), 3)])
    assert packed.grow(PAPER, 5, behind) is None


@pytest.mark.parametrize("kind", ["one-layer", "vocabulary"])
def test_a_greedy_proposal_is_the_same_alone_and_in_a_batch(kind: str) -> None:
    compiled()
    g, target = seeded(9), shared_target("llama")
    drafter = EagleDrafter(new_head(kind), target, PAPER)
    texts, law = [random_ids(g, n) for n in (8, 30, 15)], Law(SamplingParams())
    batch, alone = drafter.open(3, 90), [drafter.open(1, 90) for _ in texts]
    for _round in range(3):
        observed = []
        for row, ids in enumerate(texts):
            ids.extend(random_ids(g, 1 + row))
            read = batch._head.lengths[row]
            features = torch.randn(len(ids) - 1 - read, 64, generator=g)
            observed.append(observe(features, {}, range(len(features)), ids[read + 1 :]))
            alone[row].commit([observed[-1]])
        batch.commit(observed)
        contexts = [
            Context(ids, law, GeneratorSource.seeded(0), depth) for ids, depth in zip(texts, (5, 2, 9), strict=True)
        ]
        together = batch.propose(contexts)
        for context, tree, state in zip(contexts, together, alone, strict=True):
            own = state.propose([context])[0]  # grown at once
            assert own.tokens.tolist() == tree.tokens.tolist()
            assert own.shape == tree.shape == PAPER.limited(context.max_depth)
            assert own.draft_probs is None and tree.draft_probs is None


# --- levels


@pytest.mark.parametrize("number", range(len(_SHAPES)))
def test_levels_are_what_the_parents_say(number: int) -> None:
    shape = _SHAPES[number]

    def ancestors(node: int) -> set[int]:
        """Itself included."""
        return {node} | (ancestors(shape.parents[node]) if node else set())

    inner = sorted({p for p in shape.parents if p >= 0}, key=lambda n: (len(ancestors(n)), n))
    entries = [n for n in inner if n]  # in the order in which they are read
    levels = levels_of(shape)
    assert [n for level in levels for n in level.nodes] == inner
    for number, level in enumerate(levels):
        assert level.depth == number
        assert {len(ancestors(n)) for n in level.nodes} == {number + 1}
        if number == 0:
            assert level.nodes == (0,) and level.offset == 0 and level.mask.shape == (1, 0)
            continue
        assert level.offset == entries.index(level.nodes[0])
        assert [levels[number - 1].nodes[i] for i in level.above] == [shape.parents[n] for n in level.nodes]
        visible = entries[: level.offset + len(level.nodes)]
        wanted = [[e in ancestors(n) for e in visible] for n in level.nodes]
        assert level.mask.tolist() == wanted
        path, flat = level.seen
        for i, row in enumerate(wanted):
            assert flat[path[i] : path[i + 1]].tolist() == [j for j, seen in enumerate(row) if seen]


def test_a_root_alone_has_no_levels() -> None:
    assert levels_of(TreeShape.root_only()) == ()


# --- the largest of a row


@pytest.mark.parametrize("width", [1, 5, 16, 17, 100, 257, 1000])
def test_top_is_topk_for_distinct_values(width: int) -> None:
    g = seeded(10)
    x = torch.stack([torch.randperm(width, generator=g) for _ in range(6)]).float() - width / 2
    x[1], x[2] = x[1].sort().values, x[2].sort(descending=True).values
    for k in {1, 2, 3, 10, 63, 64, width}:
        if k <= width:
            assert torch.equal(top(x, k), x.topk(k).indices), k
            assert torch.equal(top(x.T.contiguous().T, k), x.topk(k).indices)  # not contiguous


def test_top_takes_the_first_of_equal_values_first() -> None:
    compiled()
    g = seeded(11)
    for width, kinds in ((40, 3), (100, 1), (333, 7), (64, 20)):
        x = torch.randint(kinds, (8, width), generator=g).float()
        for k in (1, 7, 40):
            wanted = [sorted(range(width), key=lambda i, row=row: (-row[i], i))[:k] for row in x.tolist()]
            assert top(x, k).tolist() == wanted


def test_top_of_rows_with_infinities() -> None:
    compiled()
    x = torch.full((4, 50), -math.inf)
    x[1, 33], x[2, 3], x[2, 49], x[3] = 2.0, -5.0, math.inf, math.inf
    assert top(x, 3).tolist() == [[0, 1, 2], [33, 0, 1], [49, 3, 0], [0, 1, 2]]
    assert top(torch.tensor([[0.0, -0.0, 0.0]]), 3).tolist() == [[0, 1, 2]]


def test_top_of_rows_with_nan_gives_places_and_does_not_crash() -> None:
    g = seeded(12)
    x = torch.randn(20, 100, generator=g)
    x[torch.rand(x.shape, generator=g) < 0.3] = math.nan
    x[0] = math.nan
    for k in (1, 5, 64):
        found = top(x, k)
        assert found.shape == (20, k) and bool(((found >= 0) & (found < 100)).all())
        assert all(len(set(row)) == k for row in found.tolist())


def test_top_of_other_dtypes_and_of_many_is_topk() -> None:
    x = torch.randperm(200, generator=seeded(13)).double()[None]
    assert torch.equal(top(x, 5), x.topk(5).indices)
    assert torch.equal(top(x.float(), 150), x.topk(150).indices)


# --- drafting changes nothing


def answers(model: Model, tree: str | TreeShape, prompts: Sequence[list[int]], **options: Any) -> list[list[int]]:
    return [model.generate(p, max_new_tokens=30, tree=tree, **options).token_ids for p in prompts]


@EACH_FORMAT
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("head", ["two-layers-bias-vocabulary-yarn", "one-layer", "fused-half-layer-bias", "eagle3"])
def test_greedy_ids_are_those_of_plain_decoding(head: str, kind: str, weights: Weights) -> None:
    g, model = seeded(14), Model.wrap(shared_target(kind, weights), None, new_head(head))
    prompts = [random_ids(g, n) for n in (1, 60)]
    wanted = answers(model, "paper", prompts, method="plain")
    for tree in ("paper", "chain:4", BUSHY, TreeShape((-1, *[0] * 20))):
        assert answers(model, tree, prompts) == wanted
    wanted = answers(model, "paper", prompts, method="plain", repetition_penalty=1.3)
    assert all(len(set(ids)) > 3 for ids in wanted)
    for tree in ("paper", BUSHY):
        assert answers(model, tree, prompts, repetition_penalty=1.3) == wanted


@EACH_FORMAT
@pytest.mark.parametrize(
    "changes",
    [{"inputs": "feature+token"}, {"inputs": "feature"}, {"inputs": "token"}, {"input_norm": True},
     {"feature_layers": (0, 1, 3), "input_norm": True, "inputs": "feature+token"}, {"feature_layers": (1, 2)},
     {**EAGLE3, "readout_size": len(PART), "draft_vocab": PART}],
    ids=str,
)  # fmt: skip
def test_greedy_ids_of_variants_are_those_of_plain_decoding(changes: dict[str, Any], weights: Weights) -> None:
    """In their modules, but for the last one; the target is the fast one."""
    g, target = seeded(24), shared_target("llama", weights)
    head = tiny_head(target, 3, **({} if changes.get("input_norm") else {"draft_vocab": PART}), **changes)
    model, prompts = Model.wrap(target, None, head), [random_ids(g, n) for n in (1, 40)]
    wanted = answers(model, "paper", prompts, method="plain")
    for tree in ("paper", BUSHY, "chain:3+lookup:4"):
        assert answers(model, tree, prompts) == wanted
    assert [model.generate(p, max_new_tokens=30).token_ids for p in prompts] == wanted


def test_greedy_ids_in_float32_are_those_of_the_stock_model() -> None:
    prompt, model = random_ids(seeded(15), 20), shared_model("llama")
    with torch.no_grad():
        mask = torch.ones(1, 20)
        wanted = model.generate(torch.tensor([prompt]), attention_mask=mask, do_sample=False, max_new_tokens=30)[0, 20:]
    fast = Model.wrap(shared_target("llama"), None, new_head("one-layer"))
    assert answers(fast, "paper", [prompt]) == [wanted.tolist()]
    portable = Model.wrap(target_over(model, PortableBackend()), None, new_head("one-layer"))
    assert answers(portable, "paper", [prompt]) == [wanted.tolist()]


@EACH_FORMAT
def test_accepted_paths_that_skip_nodes_leave_the_answer_as_it_is(weights: Weights) -> None:
    """A random head of few tokens over a wide tree: drafts that are accepted are rarely the first child."""
    target = shared_target("llama-tied", weights)
    model = Model.wrap(target, None, new_head("one-layer"))
    wide = TreeShape((-1, *[0] * 60, *range(1, 61), *range(61, 121)))
    prompts = [random_ids(seeded(i), 10) for i in range(4)]
    results = [model.generate(p, max_new_tokens=40, tree=wide) for p in prompts]
    assert sum(r.stats.rounds for r in results) < 4 * 36  # some drafts were accepted
    wanted = [model.generate(p, max_new_tokens=40, method="plain") for p in prompts]
    assert [r.token_ids for r in results] == [r.token_ids for r in wanted]
    scored = model.generate(prompts[0], max_new_tokens=40, tree=wide, logprobs=True)
    assert scored.logprobs == model.generate(prompts[0], max_new_tokens=40, method="plain", logprobs=True).logprobs


@EACH_FORMAT
def test_a_seed_decides_a_sampled_answer(weights: Weights) -> None:
    model = Model.wrap(shared_target("llama", weights), None, new_head("vocabulary"))
    prompts, options = [random_ids(seeded(16), 12)], {"temperature": 0.9, "top_p": 0.95}
    for tree in ("paper", "chain:3", BUSHY):
        first = answers(model, tree, prompts, seed=5, **options)
        assert answers(model, tree, prompts, seed=5, **options) == first
        assert answers(model, tree, prompts, seed=6, **options) != first


def test_a_session_goes_on_as_a_fresh_one_would() -> None:
    """Caches that went through drafts, commits and truncation hold what a fresh reading gives: the same seed, the same
    ids and the same drafts."""
    compiled()

    target = shared_target("llama")
    drafter = EagleDrafter(new_head("two-layers"), target, PAPER)
    kept = Session(target, drafter, CONTEXT)

    def answer(session: Session, prompt: list[int], seed: int, temperature: float) -> tuple[list[int], int]:
        stats = Stats()
        stopper = Stopper(max_new_tokens=20, eos_ids=(), stop=(), decode=None)
        pieces = session.generate(
            prompt, law=Law(SamplingParams(temperature=temperature)), source=GeneratorSource.seeded(seed),
            stopper=stopper, stats=stats,
        )  # fmt: skip
        return [t for piece in pieces for t in piece.token_ids], stats.rounds

    text = random_ids(seeded(17), 10)
    for turn, temperature in enumerate((0.0, 0.8, 0.0, 0.8)):
        got = answer(kept, text, turn, temperature)
        assert got == answer(Session(target, drafter, CONTEXT), text, turn, temperature)
        fresh = target.open(1, CONTEXT)
        read = kept.ids[: kept.target_state.lengths[0]]
        fresh.prefill([torch.tensor(read)])
        assert_same(kept.target_state.committed(), fresh.committed())
        text = [*text, *got[0][:15], *random_ids(seeded(turn), 6)]


@EACH_FORMAT
@pytest.mark.parametrize("kind", ["two-layers", "fused"])
def test_the_heads_caches_after_rounds_are_those_of_a_fresh_reading(kind: str, weights: Weights) -> None:
    compiled()

    target = shared_target("qwen3", weights)
    drafter = EagleDrafter(new_head(kind), target, BUSHY)
    session = Session(target, drafter, CONTEXT)
    stopper = Stopper(max_new_tokens=50, eos_ids=(), stop=(), decode=None)
    for _ in session.generate(
        random_ids(seeded(18), 30), law=Law(SamplingParams()), source=GeneratorSource.seeded(0), stopper=stopper,
        stats=Stats(),
    ):  # fmt: skip
        pass
    ids = session.ids
    out = target.open(1, CONTEXT, drafter.layers).prefill([torch.tensor(ids[:-1])])
    features = torch.cat([out.layers[k][0] for k in drafter.layers], -1) if drafter.layers else out.features[0]
    state = session.drafter_state
    state.read_pending()
    fresh = drafter.model.open(1, CONTEXT)
    fresh.read([(torch.tensor(ids[1:]), features)])
    assert_same(state.committed(), fresh.committed(0))
    assert len(ids) == 80 and fresh.lengths == [79]


# --- many texts at once


@EACH_FORMAT
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_many_rows_read_and_step_as_each_alone(kind: str, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    monkeypatch.setattr(rows_module, "_GROUP_TOKENS", 50)
    g, target = seeded(19), shared_target(kind, weights)
    rows = FastRows(target, 6, 100)
    texts = {3: random_ids(g, 40), 0: random_ids(g, 66), 5: random_ids(g, 1), 2: random_ids(g, 9)}
    alone = {slot: target.open(1, 100) for slot in texts}

    def start(slots: Sequence[int]) -> None:
        for slot, features in zip(slots, rows.read([texts[s] for s in slots], slots), strict=True):
            alone[slot] = target.open(1, 100)
            assert torch.equal(features, alone[slot].prefill([torch.tensor(texts[slot])]).features[0])

    def step(slots: Sequence[int]) -> None:
        tokens = random_ids(g, len(slots))
        features = rows.step(slots, tokens, [len(texts[s]) for s in slots])
        for slot, token, feature in zip(slots, tokens, features, strict=True):
            texts[slot].append(token)
            assert torch.equal(feature, alone[slot].prefill([torch.tensor([token])]).features[0, 0])

    start([3, 0, 5, 2])
    for slots in ([0, 2, 3, 5], [5, 3], [0, 2, 3, 5]):
        step(slots)
    texts[0], texts[5], texts[1] = random_ids(g, 5), random_ids(g, 30), random_ids(g, 70)  # left, and given to others
    start([5, 1, 0])
    for slots in ([0, 1, 2, 3, 5], [5, 0, 1], [2]):
        step(slots)


@EACH_FORMAT
def test_many_rows_give_the_streams_behind_the_features_in_ascending_order(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled()
    monkeypatch.setattr(rows_module, "_GROUP_TOKENS", 50)
    g, target = seeded(23), shared_target("llama", weights)
    texts = [random_ids(g, n) for n in (40, 20, 7)]
    read = FastRows(target, 3, 60).read(texts, [2, 0, 1], layers=(3, 0, 2))
    for ids, got in zip(texts, read, strict=True):
        out = target.open(1, 60, (0, 2, 3)).prefill([torch.tensor(ids)])
        assert torch.equal(got, torch.cat([out.features, *(out.layers[k] for k in (0, 2, 3))], -1)[0])


def test_many_rows_over_the_portable_backend_stay_close() -> None:
    g, target = seeded(20), target_over(shared_model("llama"), PortableBackend())
    rows, texts = FastRows(target, 3, 80), [random_ids(g, 20), random_ids(g, 3)]
    alone = [target.open(1, 80) for _ in texts]
    for features, ids, state in zip(rows.read(texts, [2, 0]), texts, alone, strict=True):
        assert_close(features, state.prefill([torch.tensor(ids)]).features[0], 1e-5)
    stepped = rows.step([2, 0], [7, 8], [20, 3])
    for feature, token, state in zip(stepped, (7, 8), alone, strict=True):
        assert_close(feature, state.prefill([torch.tensor([token])]).features[0, 0], 1e-5)


def test_a_tiny_head_over_the_portable_backend_drafts_like_any_other() -> None:
    target = target_over(shared_model("qwen2"), PortableBackend(), "int8")
    model = Model.wrap(target, None, tiny_head(target, 3, draft_vocab=PART))
    prompts = [random_ids(seeded(21), 9)]
    assert answers(model, "paper", prompts) == answers(model, "paper", prompts, method="plain")
