"""The fast target: the stock logits, rows independent bit for bit; caches, limits, loading, kernels, packed layers."""

from __future__ import annotations

import inspect
import os
import platform
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor

import families
import tiny
from eaglekit.api import Model, load
from eaglekit.bench.lossless import tiny_head
from eaglekit.core.tree import DraftTree, TreeShape
from eaglekit.errors import InputError, TargetError
from eaglekit.models import fast as fast_module
from eaglekit.models import native as native_module
from eaglekit.models import portable as portable_module
from eaglekit.models.fast import FastState, FastTarget, fast_target, why_not_fast
from eaglekit.models.hf import HFTarget
from eaglekit.models.load import load_hf, load_target
from eaglekit.models.native import NativeMatrix, build, default_backend, native, why_not
from eaglekit.models.packed import PackedLinear, pack_linears
from eaglekit.models.portable import PortableBackend
from eaglekit.models.stack import Caches, Planner, RotaryTables, StackShape, Weights, block_of, chain, join, quantize
from fast_models import (
    BUSHY,
    CONTEXT,
    FORMATS,
    KINDS,
    VOCAB,
    assert_close,
    assert_same,
    backend_called,
    compiled,
    new_model,
    random_ids,
    random_shape,
    random_tree,
    seeded,
    shared_model,
    shared_target,
    target_over,
    with_threads,
)

EACH_KIND = pytest.mark.parametrize("kind", KINDS)
EACH_FORMAT = pytest.mark.parametrize("weights", FORMATS)
EACH_BACKEND = pytest.mark.parametrize("backend", ["native", "portable"])
PAPER = TreeShape.paper()


def plain(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits [n, V] of a stock call without a cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]


def read(state: FastState, *rows: Sequence[int]) -> Any:
    return state.prefill([torch.tensor(row, dtype=torch.int64) for row in rows])


def everything(out: Any) -> list[Tensor]:
    return [out.logits, out.features, *out.layers.values()]


# --- equal to the stock model


@EACH_BACKEND
@EACH_KIND
def test_prompts_trees_and_commits_equal_a_stock_call(kind: str, backend: str) -> None:
    g, model = seeded(0), shared_model(kind)
    target = target_over(model, backend_called(backend))
    state, ids = target.open(1, CONTEXT), random_ids(g, 70)
    out = read(state, ids)
    assert_close(out.logits[0], plain(model, ids)[-1:])
    assert_close(target.lm_head(out.features)[0], plain(model, ids))
    for shape in (PAPER, BUSHY, random_shape(g, 24)):
        tree = random_tree(g, shape)
        out = state.forward_tree([tree])
        for path in shape.paths:
            wanted = plain(model, ids + tree.tokens[list(path)].tolist())[len(ids) :]
            assert_close(out.logits[0, list(path)], wanted)
        deepest = max(shape.paths, key=lambda p: (len(p), p))
        assert deepest != tuple(range(len(deepest)))  # the commit must move keys
        state.commit([deepest])
        ids += tree.tokens[list(deepest)].tolist()
        assert state.lengths == (len(ids),)
    tokens = torch.tensor([ids[:5]])
    assert torch.equal(target.embed(tokens), model.get_input_embeddings()(tokens))


@EACH_BACKEND
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_layers_are_the_hidden_states_of_transformers(kind: str, backend: str) -> None:
    g, model = seeded(1), new_model(kind)  # asking transformers leaves hooks on a model
    target = target_over(model, backend_called(backend))
    count, ids, last = target.info.num_layers, random_ids(g, 15), []
    state = target.open(1, 64, layers=range(count + 1))
    got = read(state, ids)
    model.model.layers[-1].register_forward_hook(
        lambda _, args, out: last.append(out if torch.is_tensor(out) else out[0])
    )
    tree = random_tree(g, TreeShape.chain(3))
    with torch.no_grad():
        first = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
        longer = torch.tensor([ids + tree.tokens.tolist()])
        second = model(longer, output_hidden_states=True, use_cache=False).hidden_states
    for k in range(count):
        assert_close(got.layers[k], first[k])
    assert_close(got.layers[count], last[0])
    assert_close(got.features, first[count])  # the last one of transformers' has the final norm
    got = state.forward_tree([tree])
    for k in range(count):
        assert_close(got.layers[k], second[k][:, 15:])
    assert_close(got.layers[count], last[1][:, 15:])
    assert list(read(target.open(1, 64, layers=(count,)), ids).layers) == [count]


def test_facts_and_limits_of_the_target_are_those_of_the_adapter() -> None:
    for kind in ("llama", "qwen2-yarn-tied", "qwen3"):
        a, b = shared_target(kind).info, HFTarget(shared_model(kind), kind).info
        assert a == b
        assert shared_target(kind).defaults() == HFTarget(shared_model(kind), kind).defaults()


def test_yarn_configurations_may_state_the_length_before_scaling() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 40}
    model = new_model("llama", max_position_embeddings=40, rope_parameters=rope)
    assert HFTarget(model).info.max_length == fast_target(model, "fp32").info.max_length


def test_lm_head_of_some_tokens_is_part_of_lm_head() -> None:
    for weights in FORMATS:
        target, ids = shared_target("llama", weights), torch.tensor([0, 3, 50, 51, 100])
        features = torch.randn(2, 3, 64, generator=seeded(2))
        part = target.lm_head_of(ids)(features)
        assert part.shape == (2, 3, 5)
        # Drafting reads float32 matrices as float16.
        assert_close(part, target.lm_head(features)[..., ids], 5e-3 if weights == "fp32" else 1e-6)


# --- rows are independent, bit for bit


@EACH_FORMAT
@pytest.mark.parametrize("outputs, inputs", [(576, 960), (1536, 576), (100, 64), (33, 48), (1, 16)])
def test_a_product_of_1_to_64_rows_is_that_of_each_row(outputs: int, inputs: int, weights: Weights) -> None:
    g = seeded(3)
    x = torch.randn(64, inputs, generator=g) * torch.rand(64, 1, generator=g).exp()
    matrix = compiled().matrix(torch.randn(outputs, inputs, generator=g), weights)
    whole = matrix(x)
    assert whole.shape == (64, outputs)
    for rows in range(1, 65):
        assert torch.equal(matrix(x[:rows]), whole[:rows]), rows
        assert torch.equal(matrix(x[rows - 1 : rows]), whole[rows - 1 : rows]), rows
    for threads in (1, 2):
        for rows in (1, 5, 64):
            assert torch.equal(with_threads(threads, lambda rows=rows: matrix(x[:rows])), whole[:rows])


@EACH_BACKEND
@pytest.mark.parametrize("outputs, inputs", [(576, 960), (100, 64), (2100, 48)])
def test_products_are_those_of_the_format(outputs: int, inputs: int, backend: str) -> None:
    g, made = seeded(4), backend_called(backend)
    x, weight = torch.randn(7, inputs, generator=g), torch.randn(outputs, inputs, generator=g)
    x[2] = 0
    scale = (x.double().abs() @ weight.double().abs().T).max()
    exact = (x.double() @ weight.double().T).float()
    rounded = (x.double() @ weight.half().double().T).float()
    assert (made.matrix(weight, "fp32")(x) - exact).abs().max() < 1e-6 * scale
    assert (made.matrix(weight, "fp16")(x) - rounded).abs().max() < 1e-6 * scale
    levels = portable_module._levels() if backend == "portable" else 127
    block = block_of(inputs)
    (q, q_scale), (w, w_scale) = quantize(x.view(7, -1, block)), quantize(weight, levels)
    parts = torch.einsum("tbk,nbk->tbn", q.double(), w.double().view(outputs, -1, block))
    sums = (parts * q_scale.double()[..., None]).sum(1) * w_scale.double()
    assert (made.matrix(weight, "int8")(x) - sums).abs().max() < 1e-6 * scale


def test_formats_and_widths_that_cannot_be_packed_are_input_errors() -> None:
    for made in (PortableBackend(), compiled()):
        with pytest.raises(InputError, match="int4"):
            made.matrix(torch.ones(16, 16), "int4")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="multiple of 16"):
        compiled().matrix(torch.ones(16, 24), "fp32")
    shape = StackShape(hidden=64, inner=64, heads=4, kv=2, dim=16, activation="silu", eps=1e-6)
    with pytest.raises(InputError, match="heads of width 16"):
        compiled().stack(shape, [], "fp32", RotaryTables(torch.ones(8)))


@EACH_FORMAT
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "llama-gelu"])
@pytest.mark.parametrize("shape", [PAPER, BUSHY], ids=["paper", "bushy"])
def test_each_node_of_a_tree_is_plain_decoding_of_its_path(shape: TreeShape, kind: str, weights: Weights) -> None:
    compiled()
    g, target = seeded(5), shared_target(kind, weights)
    ids, tree, layers = random_ids(g, 60), random_tree(g, shape), (0, 2, 3)  # trees cross a block of 64 slots
    state, alone = target.open(1, 100, layers), target.open(1, 100, layers)
    read(state, ids)
    read(alone, ids)
    whole = state.forward_tree([tree])
    for path in shape.paths:
        alone.truncate([len(ids)])
        for node in path:
            out = alone.forward_tree([DraftTree.root_only(int(tree.tokens[node]))])
            alone.commit([[0]])
            for got, wanted in zip(everything(whole), everything(out), strict=True):
                assert torch.equal(got[0, node], wanted[0, 0])


@EACH_FORMAT
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_prompt_read_at_once_is_the_prompt_read_one_token_at_a_time(kind: str, weights: Weights) -> None:
    compiled()
    g, target = seeded(6), shared_target(kind, weights)
    ids = random_ids(g, 70)
    at_once, stepwise = target.open(1, 80), target.open(1, 80)
    out = read(at_once, ids)
    steps = []
    for token in ids:
        steps.append(stepwise.forward_tree([DraftTree.root_only(token)]))
        stepwise.commit([[0]])
    assert torch.equal(out.features[0], torch.cat([s.features[0] for s in steps]))
    assert torch.equal(out.logits[0], steps[-1].logits[0])
    assert_same(at_once.committed(), stepwise.committed())


@EACH_FORMAT
def test_rows_of_a_batch_are_what_each_is_alone(weights: Weights) -> None:
    compiled()
    g, target = seeded(7), shared_target("llama", weights)
    prompts = [random_ids(g, n) for n in (9, 65, 1, 30)]
    batch, alone = target.open(4, 130, (1,)), [target.open(1, 130, (1,)) for _ in prompts]
    together = read(batch, *prompts)
    for row, (prompt, state) in enumerate(zip(prompts, alone, strict=True)):
        out, n = read(state, prompt), len(prompt)
        assert torch.equal(together.logits[row], out.logits[0])
        assert torch.equal(together.features[row, :n], out.features[0])
        assert torch.equal(together.layers[1][row, :n], out.layers[1][0])
        assert not together.features[row, n:].any()
    for step in range(4):
        trees: list[DraftTree | None] = [random_tree(g, random_shape(g, 3 + 5 * row + step)) for row in range(4)]
        trees[step] = None  # takes no part
        together, paths = batch.forward_tree(trees), []
        for row, (tree, state) in enumerate(zip(trees, alone, strict=True)):
            path: tuple[int, ...] = ()
            if tree is None:
                assert not together.logits[row].any()
            else:
                out, n = state.forward_tree([tree]), len(tree.tokens)
                for a, b in zip(everything(together), everything(out), strict=True):
                    assert torch.equal(a[row, :n], b[0])
                    assert not a[row, n:].any()
                path = tree.shape.path(n - 1) if (step + row) % 3 else ()
                state.commit([path])
            paths.append(path)
        batch.commit(paths)
    assert batch.lengths == tuple(s.lengths[0] for s in alone)
    for row, state in enumerate(alone):
        assert_same(batch.committed(row), state.committed())


@EACH_FORMAT
@pytest.mark.parametrize(
    "kind", ["llama", "qwen3"]
)  # 2 and 7 heads share keys; few tokens on 2 threads go head by head
def test_results_do_not_depend_on_the_number_of_threads(kind: str, weights: Weights) -> None:
    compiled()

    def run() -> list[Tensor]:
        g, state = seeded(8), shared_target(kind, weights).open(2, 120, (1,))
        outs = [read(state, random_ids(g, 70), random_ids(g, 3))]
        outs.append(state.forward_tree([DraftTree.root_only(5), DraftTree.root_only(6)]))
        outs.append(state.forward_tree([random_tree(g, PAPER), random_tree(g, BUSHY)]))
        state.commit([PAPER.paths[-1], BUSHY.paths[0]])
        return [*(x for out in outs for x in everything(out)), *state.committed(0), *state.committed(1)]

    assert_same(with_threads(2, run), with_threads(1, run))


def test_rotary_tables_do_not_depend_on_how_far_they_reached() -> None:
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 32, 2) / 32)
    small, large = RotaryTables(frequencies, 1.5), RotaryTables(frequencies, 1.5)
    early = [t[:900].clone() for t in small.upto(900)]
    assert_same([t[:900] for t in large.upto(5000)], early)
    assert_same([t[:900] for t in small.upto(3000)], early)
    assert len(large.upto(5000)[0]) >= 5000
    angle = torch.arange(900)[:, None] * frequencies
    assert_close(early[0], 1.5 * angle.cos(), 2e-5)


# --- caches


@EACH_FORMAT
@pytest.mark.parametrize("kind", ["llama", "qwen3-tied"])
def test_caches_after_commits_are_those_of_a_fresh_prefill(kind: str, weights: Weights) -> None:
    compiled()
    g, target = seeded(9), shared_target(kind, weights)
    state, texts = target.open(2, 140), [random_ids(g, 14), random_ids(g, 55)]
    read(state, *texts)
    skipped = 0
    for step in range(9):
        trees = [random_tree(g, random_shape(g, 4 + step)), random_tree(g, (PAPER, BUSHY)[step % 2])]
        state.forward_tree([random_tree(g, PAPER), random_tree(g, PAPER)])  # commits nothing
        state.forward_tree(trees)
        paths = [t.shape.path(int(torch.randint(len(t.tokens), (), generator=g))) for t in trees]
        paths[step % 2] = () if step % 4 == 3 else paths[step % 2]
        skipped += any(path != tuple(range(len(path))) for path in paths)
        state.commit(paths)
        for row, (tree, path) in enumerate(zip(trees, paths, strict=True)):
            texts[row] += tree.tokens[list(path)].tolist()
        if step == 5:
            state.truncate([len(texts[0]) - 3, len(texts[1])])
            texts[0] = texts[0][:-3] + (more := random_ids(g, 6))
            read(state, more, [])
    assert skipped > 4
    for row, ids in enumerate(texts):
        fresh, probe = target.open(1, 140), random_tree(g, PAPER)
        read(fresh, ids)
        assert state.lengths[row] == len(ids)
        assert_same(state.committed(row), fresh.committed())
        got = state.forward_tree([probe if r == row else None for r in range(2)])
        assert torch.equal(got.logits[row], fresh.forward_tree([probe]).logits[0])


def test_caches_of_the_portable_backend_are_those_of_a_fresh_prefill() -> None:
    g, target = seeded(10), target_over(shared_model("llama"), PortableBackend())
    state, ids = target.open(1, 100), random_ids(g, 61)
    read(state, ids)
    for shape in (PAPER, BUSHY):
        tree = random_tree(g, shape)
        state.forward_tree([tree])
        state.commit([shape.paths[-1]])
        ids += tree.tokens[list(shape.paths[-1])].tolist()
    fresh = target.open(1, 100)
    read(fresh, ids)
    for a, b in zip(state.committed(), fresh.committed(), strict=True):
        assert a.shape == (2, len(ids), 32)
        assert_close(a, b, 1e-5)


@EACH_BACKEND
def test_moving_slots_copies_them_in_order(backend: str) -> None:
    shape = StackShape(hidden=64, inner=64, heads=4, kv=2, dim=32, activation="silu", eps=1e-6)
    caches = Caches.allocate(2, shape, 2, 100)
    assert caches.values.shape == (2, 2, 2, 128, 32) and caches.keys.shape == (2, 2, 2, 8, 32, 16)
    slots = torch.arange(128.0)
    caches.values.copy_(slots[:, None] + 1000 * torch.arange(2.0)[:, None, None, None, None])
    caches.keys.copy_(slots.view(8, 1, 16) + 1000 * torch.arange(2.0)[:, None, None, None, None, None])
    backend_called(backend).move(caches, 1, [31, 32, 40, 64, 99], 31)
    for row, start in ((0, [31, 32, 33, 34, 35]), (1, [31, 32, 40, 64, 99])):
        wanted = torch.tensor([*range(31), *start, *range(36, 100)]).float()
        keys, values = caches.read(row, 100)
        for layer in range(2):
            assert torch.equal(keys[layer], (wanted + 1000 * layer)[None, :, None].expand(2, -1, 32))
            assert torch.equal(values[layer], (wanted + 1000 * layer)[None, :, None].expand(2, -1, 32))


def test_a_prefill_in_passes_of_a_few_tokens_equals_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    g, target = seeded(11), shared_target("llama")
    ids = [random_ids(g, 40), random_ids(g, 7), [], random_ids(g, 20)]
    whole = target.open(4, 64, (1,))
    wanted = read(whole, *ids)
    for size in (1, 9, 47):
        monkeypatch.setattr(fast_module, "_CHUNK", size)
        state = target.open(4, 64, (1,))
        assert_same(everything(read(state, *ids)), everything(wanted))
        for row in range(4):
            assert_same(state.committed(row), whole.committed(row))


def test_rows_may_join_later_or_read_nothing() -> None:
    g, target, model = seeded(12), shared_target("mistral"), shared_model("mistral")
    state = target.open(2, 64, (2,))
    first, second = random_ids(g, 15), random_ids(g, 6)
    out = read(state, [], [])
    assert out.logits.shape == (2, 1, VOCAB) and out.features.shape == out.layers[2].shape == (2, 0, 64)
    out = read(state, first, [])
    assert not out.logits[1].any() and not out.features[1].any()
    out = read(state, [], second)
    assert state.lengths == (15, 6)
    assert_close(out.logits[1], plain(model, second)[-1:])
    state.truncate([0, 6])
    out = read(state, second, first)
    assert_close(out.logits[0], plain(model, second)[-1:])
    assert_close(out.logits[1], plain(model, second + first)[-1:])


def test_plans_of_several_rows_are_their_plans_one_after_the_other() -> None:
    planner = Planner()
    plan = planner.trees([2, 0], [7, 3], [TreeShape((-1, 0, 0, 2)), TreeShape.chain(2)])
    assert plan.row.tolist() == [2, 2, 2, 2, 0, 0, 0]
    assert plan.slot.tolist() == [7, 8, 9, 10, 3, 4, 5]
    assert plan.position.tolist() == [7, 8, 8, 9, 3, 4, 5]

    def sees(t: int) -> list[int]:
        return [*range(plan.prefix[t]), *plan.seen[plan.path[t] : plan.path[t + 1]].tolist()]

    assert [sees(t)[7:] for t in range(4)] == [[7], [7, 8], [7, 9], [7, 9, 10]]
    assert [sees(t) for t in (4, 5, 6)] == [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    joined = join([chain(1, 4, 2), chain(0, 0, 1)])
    assert joined.prefix.tolist() == [5, 6, 1] and joined.path.tolist() == [0, 0, 0, 0]
    for parents in range(300):  # forgets shapes rather than grow without end
        planner.trees([0], [0], [TreeShape((-1, 0, *(parents >> i & 1 for i in range(9))))])
    assert len(planner._known) <= 257


# --- errors


def outcome(call: Callable[[], Any]) -> str:
    """The message of the InputError that it raises, or an empty string."""
    try:
        call()
    except InputError as e:
        assert "\n" not in str(e)
        return str(e)
    return ""


def test_limits_and_mistakes_are_refused_as_by_the_adapter_and_change_nothing() -> None:
    g, model = seeded(13), shared_model("llama")
    targets = (
        FastTarget(model.config, model.state_dict().__getitem__, list(model.state_dict()), name="m"),
        HFTarget(model, "m"),
    )
    ids, good = random_ids(g, CONTEXT - 4), random_tree(g, PAPER.limited(3))
    deep, wide = random_tree(g, TreeShape.chain(4)), random_tree(g, TreeShape((-1, *[0] * 60)))
    bad_token = DraftTree(torch.tensor([3, VOCAB]), TreeShape.chain(1))
    messages: list[list[str]] = []
    for target in targets:
        state = target.open(2, CONTEXT + 40)
        read(state, ids, [5, 6])
        state.forward_tree([good, good])
        committed = state.committed() if isinstance(state, FastState) else []
        calls: dict[str, Callable[[], Any]] = {
            "prefill of one row": lambda s=state: read(s, [1]),
            "prefill over the context": lambda s=state: read(s, [1] * 5, [1]),
            "prefill of an id too large": lambda s=state: read(s, [1], [4, VOCAB]),
            "prefill of a negative id": lambda s=state: read(s, [-1], []),
            "forward_tree of three rows": lambda s=state: s.forward_tree([good] * 3),
            "forward_tree of nothing": lambda s=state: s.forward_tree([None, None]),
            "a tree over the context": lambda s=state: s.forward_tree([deep, good]),
            "a tree over the room": lambda s=state: s.forward_tree([wide, good]),
            "a token too large": lambda s=state: s.forward_tree([None, bad_token]),
            "commit of one row": lambda s=state: s.commit([[0]]),
            "open without rows": lambda t=target: t.open(0, 5),
            "open without room": lambda t=target: t.open(1, 0),
            "open with an unknown layer": lambda t=target: t.open(1, 5, (1, 4)),
            "open with a negative layer": lambda t=target: t.open(1, 5, (-1,)),
            "truncate of one row": lambda s=state: s.truncate([1]),
        }
        messages.append([outcome(call) for call in calls.values()])
        assert all(messages[-1]), dict(zip(calls, messages[-1], strict=True))
        for path in ([1], [0, len(good.tokens) - 1], [0, 0], [-1], [0, len(good.tokens)]):
            assert "path" in outcome(lambda s=state, p=path: s.commit([[0], p]))
        for lengths in ([-1, 0], [CONTEXT, 1], [5, 3]):
            assert "holds" in outcome(lambda s=state, n=lengths: s.truncate(n))
        assert state.lengths == (len(ids), 2)
        if committed:
            assert_same(state.committed(), committed)
        state.commit([good.shape.paths[0], [0]])  # the tree is still there
        assert state.lengths == (len(ids) + len(good.shape.paths[0]), 3)
        assert "commit: no tree" in outcome(lambda s=state: s.commit([[0], [0]]))
        state.forward_tree([None, good])
        assert "path" in outcome(lambda s=state: s.commit([[0], []]))  # of a row that took no part
        read(state, [], [5])
        assert "commit: no tree" in outcome(lambda s=state: s.commit([[], [0]]))
        state.forward_tree([None, good])
        state.truncate([4, 1])
        assert "commit: no tree" in outcome(lambda s=state: s.commit([[], [0]]))
    assert messages[0] == messages[1]


def test_an_exception_in_a_pass_leaves_the_state_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    g = seeded(14)
    target = fast_target(shared_model("llama"), "fp32")
    state, ids, tree = target.open(1, 64), random_ids(g, 10), random_tree(g, PAPER)
    read(state, ids)
    wanted = state.forward_tree([tree])

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(target.stack, "run", fail)
    for call in (lambda: state.forward_tree([tree]), lambda: read(state, [3, 4])):
        with pytest.raises(RuntimeError, match="luck"):
            call()
        assert "no tree" in outcome(lambda: state.commit([[0]]))
        assert state.lengths == (10,)
    monkeypatch.undo()
    assert_same(everything(state.forward_tree([tree])), everything(wanted))


def test_verbs_have_the_signatures_of_the_protocol() -> None:
    from eaglekit.models.target import Target, TargetState

    for protocol, real in ((Target, FastTarget), (TargetState, FastState)):
        for name, verb in inspect.getmembers(protocol, inspect.isfunction):
            if not name.startswith("_"):
                assert hasattr(real, name)
                if inspect.isfunction(getattr(real, name)):
                    wanted = list(inspect.signature(verb).parameters)
                    assert list(inspect.signature(getattr(real, name)).parameters) == wanted


# --- what it refuses, and how models are loaded

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "mistral's window": (tf.MistralConfig, {"sliding_window": 11}, "sliding window"),
    "qwen2's window": (
        tf.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
        "sliding window",
    ),
    "gelu": (tf.LlamaConfig, {"hidden_act": "gelu"}, "activation gelu"),
    "relu": (tf.Qwen3Config, {"hidden_act": "relu", "head_dim": 32}, "activation relu"),
    "attention biases": (tf.LlamaConfig, {"attention_bias": True}, "biases"),
    "biases of the MLP": (tf.LlamaConfig, {"mlp_bias": True}, "biases"),
    "dynamic RoPE": (tf.LlamaConfig, {"rope_parameters": _DYNAMIC}, "RoPE dynamic"),
    "partial RoPE": (tf.LlamaConfig, {"rope_parameters": _PARTIAL}, "parts of a head"),
    "odd hidden width": (tf.LlamaConfig, {"hidden_size": 72, "head_dim": 32}, "multiples of 16"),
    "odd inner width": (tf.LlamaConfig, {"intermediate_size": 100}, "multiples of 16"),
    "narrow heads": (tf.LlamaConfig, {"num_attention_heads": 4}, "heads of width 16"),
    "another family": (tf.Phi3Config, {}, "family phi3"),
    "gemma": (tf.GemmaConfig, {"head_dim": 32}, "family gemma"),
}


def saved(config: Any, folder: Path) -> Path:
    """A random model of this configuration on disk."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        tf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("what", _REFUSED)
def test_what_it_cannot_run_it_refuses_with_a_reason(what: str) -> None:
    cls, changes, reason = _REFUSED[what]
    config = cls(**{**_SMALL, **changes})
    assert reason in why_not_fast(config)
    with pytest.raises(InputError, match=f"tiny: .*{reason}.*weights='stock'"):
        FastTarget(config, {}.__getitem__, [], name="tiny")


def test_a_quantised_checkpoint_is_left_to_transformers() -> None:
    config = tf.LlamaConfig(**_SMALL)
    assert why_not_fast(config) == ""
    config.quantization_config = {"quant_method": "fp8"}
    assert "quantization_config" in why_not_fast(config)


def test_what_it_can_run_it_does_not_refuse() -> None:
    for kind in KINDS:
        assert why_not_fast(shared_model(kind).config) == ""
    assert why_not_fast(tf.Qwen2Config(**_SMALL, use_sliding_window=False, sliding_window=11)) == ""
    assert why_not_fast(tf.LlamaConfig(**_SMALL, hidden_act="gelu_new")) == ""


@pytest.mark.parametrize("what", ["mistral's window", "attention biases", "narrow heads", "odd hidden width", "gemma"])
def test_loading_what_it_refuses_gives_the_adapter(what: str, tmp_path: Path) -> None:
    cls, changes, _ = _REFUSED[what]
    folder = saved(cls(**{**_SMALL, **changes}), tmp_path)
    ids = torch.tensor([[5, 9, 3, 7, 30, 11, 2]])
    stock = load_hf(folder, device="cpu")[0]
    with torch.no_grad():
        wanted = stock.model(ids).logits
    for weights, tolerance in (("auto", 1e-6), ("stock", 1e-6), ("fp32", 1e-4), ("fp16", 1e-2), ("int8", 0.1)):
        target, tokenizer = load_target(folder, device="cpu", weights=weights)
        assert isinstance(target, HFTarget) and tokenizer is None
        packed = [m for m in target.model.modules() if isinstance(m, PackedLinear)]
        assert bool(packed) == (weights in FORMATS)
        with torch.no_grad():
            assert_close(target.model(ids).logits, wanted, tolerance)


@pytest.mark.parametrize(
    "options, pattern",
    [
        ({"weights": "int4"}, "'int4': expected auto, stock, fp32"),
        ({"weights": "int8", "dtype": "float16"}, "drop --weights"),
        ({"weights": "fp32", "dtype": torch.bfloat16}, "drop --weights"),
        ({"weights": "fp16", "device": "meta"}, "drop --weights"),
        ({"weights": "auto", "device": "abacus"}, "abacus"),
        ({"weights": "auto", "dtype": "float12"}, "float12"),
    ],
)
def test_options_that_do_not_go_together_are_input_errors(
    options: dict[str, Any], pattern: str, tmp_path: Path
) -> None:
    folder = saved(tf.LlamaConfig(**_SMALL), tmp_path)
    with pytest.raises(InputError, match=pattern) as caught:
        load_target(folder, **{"device": "cpu", **options})
    assert "\n" not in str(caught.value)


def test_each_way_to_load_a_model_that_it_can_run(tmp_path: Path) -> None:
    folder = saved(tf.LlamaConfig(**_SMALL), tmp_path)
    for weights in FORMATS:
        target = load_target(folder, device="cpu", weights=weights)[0]
        assert isinstance(target, FastTarget) and target.weights == weights
    for dtype in ("auto", "float32", torch.float32):
        target = load_target(folder, device="cpu", dtype=dtype)[0]
        if native() is not None:
            assert isinstance(target, FastTarget) and target.weights == "fp32"
    assert isinstance(load_target(folder, device="cpu", weights="stock")[0], HFTarget)
    half = load_target(folder, device="cpu", dtype="bfloat16")[0]
    assert isinstance(half, HFTarget) and half.info.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_sharded_half_precision_checkpoints_load(kind: str, tmp_path: Path) -> None:
    new_model(kind).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    stock, ids = load_hf(tmp_path, device="cpu")[0], [5, 9, 3, 7, 30, 11, 2]
    for weights in ("fp32", "fp16"):
        target = load_target(tmp_path, device="cpu", weights=weights)[0]
        assert isinstance(target, FastTarget) and target.notes == () and target.info == stock.info
        assert target.info.name == str(tmp_path)
        assert_close(read(target.open(1, 9), ids).logits[0], plain(stock.model, ids)[-1:], 1e-4)


def test_checkpoints_that_are_no_safetensors_are_read_by_the_stock_loader(tmp_path: Path) -> None:
    model = new_model("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    target = load_target(tmp_path, device="cpu", weights="fp32")[0]
    assert isinstance(target, FastTarget)
    assert_close(read(target.open(1, 9), [5, 9, 3]).logits[0], plain(model, [5, 9, 3])[-1:])


def test_the_models_own_generation_config_is_kept(tmp_path: Path) -> None:
    model = new_model("llama")
    model.generation_config.update(repetition_penalty=1.3, eos_token_id=[4, 5])
    model.save_pretrained(tmp_path)
    for weights in ("stock", "fp32"):
        defaults = load_target(tmp_path, device="cpu", weights=weights)[0].defaults()
        assert defaults.eos_ids == (4, 5) and defaults.sampling.repetition_penalty == 1.3
    (tmp_path / "generation_config.json").unlink()
    for weights in ("stock", "fp32"):
        assert load_target(tmp_path, device="cpu", weights=weights)[0].defaults().eos_ids == ()


Tensors = dict[str, Tensor]


def _without(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: v for k, v in tensors.items() if not any(part in k for part in parts)}


def _with(**new: Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, **{k.replace("__", "."): v for k, v in new.items()}}


def edited(kind: str, folder: Path, edit: Callable[[Tensors], Tensors]) -> Path:
    """A checkpoint whose tensors `edit` changes."""
    new_model(kind).save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(edit(load_file(file)), file, metadata={"format": "pt"})
    return folder


_INCOMPLETE: dict[str, tuple[str, Callable[[Tensors], Tensors]]] = {
    "a matrix": ("llama", _without("layers.1.mlp.up_proj")),
    "the last norm": ("llama", _without("model.norm")),
    "embeddings": ("llama", _without("embed_tokens")),
    "another width": ("llama", _with(model__norm__weight=torch.ones(3))),
    "a bias of another width": ("qwen2", _with(model__layers__0__self_attn__k_proj__bias=torch.ones(3))),
    "k and v biases": ("qwen2", _without("k_proj.bias", "v_proj.bias")),
    "the output matrix": ("llama", _without("lm_head")),
    "all biases": ("qwen2", _without("proj.bias")),
    "a layer's bias": ("qwen2", _without("layers.1.self_attn.q_proj.bias")),
    "all head norms": ("qwen3", _without("q_norm", "k_norm")),
    "a layer's head norm": ("qwen3", _without("layers.1.self_attn.k_norm")),
}


@pytest.mark.parametrize("what", _INCOMPLETE)
def test_missing_or_misshapen_tensors_are_the_stock_loaders_error(what: str, tmp_path: Path) -> None:
    kind, change = _INCOMPLETE[what]
    folder = edited(kind, tmp_path, change)
    with pytest.raises(TargetError) as wanted:
        load_hf(folder, device="cpu")
    with pytest.raises(TargetError) as got:
        load_target(folder, device="cpu", weights="fp32")
    assert str(got.value) == str(wanted.value)


def test_a_broken_file_is_the_stock_loaders_error(tmp_path: Path) -> None:
    new_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(TargetError, match="cannot be read"):
        load_target(tmp_path, device="cpu", weights="fp32")


def loads_like_stock(folder: Path) -> None:
    """The same logits and the same notes."""
    stock, ids = load_hf(folder, device="cpu")[0], [5, 9, 3, 7]
    target = load_target(folder, device="cpu", weights="fp32")[0]
    assert_close(read(target.open(1, 9), ids).logits[0], plain(stock.model, ids)[-1:])
    assert target.notes == stock.notes


def test_tensors_that_are_not_used_become_the_note_of_the_stock_loader(tmp_path: Path) -> None:
    extra = _with(model__zebra__weight=torch.ones(3), model__extra__weight=torch.ones(3))
    folder = edited("llama", tmp_path, extra)
    loads_like_stock(folder)
    target = load_target(folder, device="cpu", weights="fp32")[0]
    assert "2 weights of the checkpoint are not used, model.extra.weight first" in target.notes[0]
    assert target.notes[0] in Model.wrap(target).defaults.notes


def test_rotary_frequencies_in_old_checkpoints_are_no_news(tmp_path: Path) -> None:
    name = "model__layers__0__self_attn__rotary_emb__inv_freq"
    folder = edited("llama", tmp_path, _with(**{name: torch.ones(16)}))
    assert load_target(folder, device="cpu", weights="fp32")[0].notes == ()


def test_a_stored_copy_of_a_tied_matrix_is_no_news(tmp_path: Path) -> None:
    def copy(tensors: Tensors) -> Tensors:
        return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    loads_like_stock(edited("llama-tied", tmp_path, copy))


def test_a_stored_output_matrix_that_differs_is_used_though_the_configuration_ties(tmp_path: Path) -> None:
    loads_like_stock(edited("llama-tied", tmp_path, _with(lm_head__weight=torch.randn(VOCAB, 64, generator=seeded(0)))))


def test_biases_that_the_configuration_does_not_have_are_not_used(tmp_path: Path) -> None:
    widths = {"q": 128, "k": 64, "v": 64}
    biases = {
        f"model__layers__{i}__self_attn__{n}_proj__bias": torch.ones(w) for i in range(3) for n, w in widths.items()
    }
    loads_like_stock(edited("llama", tmp_path, _with(**biases)))


@pytest.mark.parametrize("prefix", ["", "consolidated."])
def test_other_safetensors_files_in_the_directory_are_not_read(prefix: str, tmp_path: Path) -> None:
    new_model("llama").save_pretrained(tmp_path)
    halves = {prefix + k: v * 0.5 for k, v in load_file(tmp_path / "model.safetensors").items()}
    save_file(halves, tmp_path / "original.safetensors", metadata={"format": "pt"})
    loads_like_stock(tmp_path)


# --- formats against each other


@EACH_KIND
def test_formats_stay_close_to_float32(kind: str) -> None:
    g = seeded(15)
    ids, tree = random_ids(g, 50), random_tree(g, PAPER)
    logits: dict[str, Tensor] = {}
    for weights in FORMATS:
        state = shared_target(kind, weights).open(1, 100)
        read(state, ids)
        logits[weights] = state.forward_tree([tree]).logits
    spread = logits["fp32"].std()
    assert 0.3 < spread < 3
    for weights, bound in (("fp16", 0.002), ("int8", 0.05)):  # of the spread, root mean square
        error = (logits[weights] - logits["fp32"]).square().mean().sqrt() / spread
        assert 1e-6 < error < bound, weights


@EACH_FORMAT
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_both_backends_agree(kind: str, weights: Weights) -> None:
    if weights == "int8" and portable_module._levels() != 127:
        pytest.skip("without VNNI the portable backend rounds weights to 7 bits")
    g, model = seeded(16), shared_model(kind)
    ids, tree = random_ids(g, 40), random_tree(g, BUSHY)
    outs = []
    for backend in (compiled(), PortableBackend()):
        state = target_over(model, backend, weights).open(1, 100, (1, 3))
        read(state, ids)
        outs.append(everything(state.forward_tree([tree])))
    # A norm that differs in its last bit may round an activation to the next of 255 levels: seldom, and that is seen.
    for a, b in zip(*outs, strict=True):
        mean, most = (1e-2, 1e-1) if weights == "int8" else (1e-4, 1e-4)
        assert (a - b).abs().mean() < mean and (a - b).abs().max() < most


@EACH_FORMAT
def test_both_backends_multiply_alike(weights: Weights) -> None:
    if weights == "int8" and portable_module._levels() != 127:
        pytest.skip("without VNNI the portable backend rounds weights to 7 bits")
    g = seeded(17)
    x, weight = torch.randn(9, 960, generator=g), torch.randn(200, 960, generator=g) / 960**0.5
    assert_close(compiled().matrix(weight, weights)(x), PortableBackend().matrix(weight, weights)(x))


def test_a_row_of_nothing_is_no_division_by_zero() -> None:
    x = torch.zeros(3, 64)
    x[1, 5] = 2.0
    for weight in (torch.zeros(40, 64), torch.eye(64)[:40]):
        for made in (compiled(), PortableBackend()):
            y = made.matrix(weight, "int8")(x)
            assert y.isfinite().all() and not y[0].any() and not y[2].any()
            assert_close(y[1], weight @ x[1])
    values, scale = quantize(torch.tensor([[0.0, 0.0], [1.0, -2.0]]))
    assert values.tolist() == [[0, 0], [64, -127]] and scale.tolist() == [0.0, pytest.approx(2 / 127)]


# --- compiling


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory, and a `native()` that was never called; afterwards all is as before."""
    library = build.compiled() if native() is not None else None
    monkeypatch.setenv("EAGLEKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native_module, "_reason", "")
    native.cache_clear()
    if library is not None:  # what a compiler would make
        (tmp_path / "ready.so").write_bytes(library.read_bytes())
    yield tmp_path
    monkeypatch.undo()
    native.cache_clear()
    native()


def pretend_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A compiler that does what `script` says with its output file `$out`; give the file in which it counts calls."""
    file, calls = folder / "c++", folder / "calls"
    file.write_text(f"#!/bin/sh\necho call >> {calls}\nfor out; do :; done\n{script}\n")
    file.chmod(0o755)
    calls.touch()
    monkeypatch.setattr(build.shutil, "which", lambda name: str(file) if name == "c++" else None)
    return calls


def kept(folder: Path) -> list[str]:
    """Files that compiling left."""
    cache = folder / "cache" / "kernels"
    return sorted(file.name for file in cache.glob("*") if file.suffix != ".sha256") if cache.exists() else []


def test_where_there_is_a_compiler_there_are_kernels() -> None:
    """Else a broken kernel would only mean that most tests are skipped."""
    if not any(build.shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler")
    assert native() is not None, why_not()


def test_kernels_are_compiled_once_into_the_cache_directory(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (fresh / "ready.so").exists():
        pytest.skip("no compiled kernels on this machine")
    calls = pretend_compiler(fresh, monkeypatch, f"cp {fresh}/ready.so $out")
    assert native() is not None and why_not() == ""
    native.cache_clear()
    assert native() is not None
    assert calls.read_text().split() == ["call"]
    names = kept(fresh)
    assert len(names) == 1 and names[0].startswith("kernels-") and names[0].endswith(".so")
    monkeypatch.setattr(build, "_processor", lambda: "another processor")
    native.cache_clear()
    assert native() is not None
    assert calls.read_text().split() == ["call"] * 2 and len(kept(fresh)) == 2


def test_without_a_compiler_there_are_no_kernels(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    assert native() is None
    assert "no C++ compiler was found (c++, g++ or clang++)" in why_not()
    assert kept(fresh) == []
    assert isinstance(default_backend(), PortableBackend)
    x = torch.tensor([[1.0, 3.0, 2.0]])
    assert native_module.top(x, 2).tolist() == [[1, 2]]


@pytest.mark.parametrize(
    "script, reason",
    [
        ("echo 'this is no C++' >&2; exit 1", "failed: this is no C++"),
        ("echo nonsense > $out", "invalid ELF header|file too short"),
        ("true", "file too short"),
    ],
)
def test_what_a_compiler_spoils_is_a_reason_and_no_crash(
    script: str, reason: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_compiler(fresh, monkeypatch, script)
    assert native() is None
    assert re.search(reason, why_not()) and "\n" not in why_not()
    assert isinstance(default_backend(), PortableBackend)


def test_a_library_that_lacks_functions_or_computes_something_else_is_not_used(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = next((c for name in ("cc", "gcc") if (c := build.shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C compiler")
    names = ("stack", "product", "draft", "top", "grow", "norm", "move")
    for text, reason in (
        ("int nothing;", "ek_stack"),
        (" ".join(f"void ek_{n}(void) {{}}" for n in names), "other results than PyTorch"),
    ):
        (fresh / "library.c").write_text(text)
        subprocess.run([compiler, "-shared", "-fPIC", "library.c", "-o", "library.so"], cwd=fresh, check=True)
        pretend_compiler(fresh, monkeypatch, f"cp {fresh}/library.so $out")
        monkeypatch.setattr(build, "_processor", lambda text=text: text)  # another library
        native.cache_clear()
        assert native() is None
        assert reason in why_not()


def test_a_cache_directory_that_cannot_be_written_is_a_reason(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_compiler(fresh, monkeypatch, f"cp {fresh}/ready.so $out")
    (fresh / "cache").write_text("a file")
    assert native() is None
    assert "cache" in why_not()


@pytest.mark.parametrize(
    "damage", [lambda _: b"not a library" * 99, lambda old: old[: len(old) // 2]], ids=["text", "cut"]
)
def test_a_damaged_library_in_the_cache_is_compiled_anew(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    compiled()
    kept = build.compiled()
    copy = tmp_path / "kernels" / kept.name
    copy.parent.mkdir()
    copy.write_bytes(damage(kept.read_bytes()))
    copy.with_suffix(".sha256").write_text(kept.with_suffix(".sha256").read_text())
    code = "from eaglekit.models.native import native, why_not; print(native() is not None, why_not())"
    done = subprocess.run(  # in a process of its own: a damaged library may end it
        [sys.executable, "-c", code],
        env={**os.environ, "EAGLEKIT_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.split() == ["True"]
    assert len(copy.read_bytes()) > len(kept.read_bytes()) // 2


def test_models_load_and_answer_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny.llama(**sizes)
    head = tiny_head(HFTarget(model), 0)
    from eaglekit.models.checkpoint import save_head

    model.save_pretrained(fresh / "target")
    tiny.tokenizer().save_pretrained(fresh / "target")
    save_head(head, fresh / "head", metadata={}, dtype=torch.float32)
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    wanted = load(fresh / "target", device="cpu", weights="stock").generate("hello", max_new_tokens=20, method="plain")
    for weights in ("auto", *FORMATS):
        loaded = load(fresh / "target", fresh / "head", device="cpu", weights=weights)
        if weights == "auto":
            assert isinstance(loaded.target, HFTarget)
        else:
            assert isinstance(loaded.target, FastTarget) and loaded.target.backend.name == "portable"
        plainly, drafted = (loaded.generate("hello", max_new_tokens=20, method=m) for m in ("plain", "eagle"))
        assert plainly.token_ids == drafted.token_ids
        if weights in ("auto", "fp32"):
            assert plainly.token_ids == wanted.token_ids
    assert native() is None and kept(fresh) == []


@pytest.mark.slow
@pytest.mark.parametrize("processor", ["x86-64", "haswell"])
def test_kernels_compile_and_hold_for_lesser_processors(
    processor: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if "slow" not in request.config.getoption("markexpr"):
        pytest.skip("compiles for half a minute; run with -m slow")
    if platform.machine() != "x86_64" or "avx2" not in build._processor():
        pytest.skip("for an x86 processor with AVX2")
    compiled()
    script = (
        "import eaglekit.models.native as n, eaglekit.models.native.build as b; "
        f"b._FLAGS = (*(f for f in b._FLAGS if f != '-march=native'), '-march={processor}'); "
        "print(n.native() is not None, n.why_not())"
    )
    environment = {**os.environ, "EAGLEKIT_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "True", done


# --- packed layers in stock models


@pytest.mark.parametrize("weights, tolerance", [("fp32", 1e-4), ("fp16", 5e-3), ("int8", 0.3)])
@pytest.mark.parametrize("family", ["gemma2", "phi3", "llama-biases-odd-head-dim", "gemma3"])
def test_a_stock_model_with_packed_layers_stays_close(family: str, weights: Weights, tolerance: float) -> None:
    model = families.new_model(family)
    ids = [random.Random(4).randrange(2, families.VOCAB) for _ in range(30)]
    wanted = plain(model, ids)
    linears = [m for m in model.modules() if type(m) is torch.nn.Linear]
    count = pack_linears(model, weights)
    assert count == len(linears) - 1
    assert [m for m in model.modules() if type(m) is torch.nn.Linear] == [model.get_output_embeddings()]
    got = plain(model, ids)
    assert_close(got, wanted, tolerance)
    if weights != "fp32":
        assert not torch.equal(got, wanted)
    assert pack_linears(model, weights) == 0


@EACH_FORMAT
@pytest.mark.parametrize("family", ["gemma2", "phi3"])
def test_drafting_over_packed_layers_changes_no_id(family: str, weights: Weights) -> None:
    model = families.new_model(family)
    pack_linears(model, weights)
    target = HFTarget(model, family)
    made = Model.wrap(target, None, tiny_head(target, 1))
    for tree in ("paper", "chain:3", BUSHY):
        prompt = [5, 9, 3, 7, 30, 11, 2]
        options: dict[str, Any] = {"max_new_tokens": 24, "repetition_penalty": 1.3}
        wanted = made.generate(prompt, method="plain", **options).token_ids
        assert len(set(wanted)) > 3
        assert made.generate(prompt, tree=tree, **options).token_ids == wanted


@EACH_FORMAT
@pytest.mark.parametrize("inputs", [64, 56])
def test_a_packed_layer_is_the_layer(inputs: int, weights: Weights) -> None:
    linear = torch.nn.Linear(inputs, 37)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=seeded(18)) / 8)
    packed = PackedLinear(linear, weights)
    assert isinstance(packed._packed, NativeMatrix) == (inputs == 64 and native() is not None)
    x = torch.randn(2, 3, inputs, generator=seeded(19))
    y = packed(x)
    assert y.shape == (2, 3, 37) and y.dtype == torch.float32
    assert_close(y, linear(x).detach(), {"fp32": 1e-5, "fp16": 5e-3, "int8": 5e-2}[weights])
    assert torch.equal(packed(x.half()), packed(x.half().float()))
    assert not any(p.requires_grad for p in packed.parameters())
    if isinstance(packed._packed, NativeMatrix):
        assert torch.equal(packed(x[1, 2]), y[1, 2])
