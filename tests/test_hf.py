"""The Hugging Face adapter: trees, caches, rows, limits, refusals, over tiny models of many families."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from eaglekit.core.tree import DraftTree, TreeShape
from eaglekit.errors import InputError, TargetError, UnsupportedModelError
from eaglekit.models.hf import HFTarget
from eaglekit.models.load import load_hf
from eaglekit.models.state import HFState
from families import BOUNDARY, FAMILIES, VOCAB, new_model, shared_model

EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)
# A spine of 14 with a leaf beside each of its nodes: deeper than the windows.
COMB = TreeShape((-1, *(max(0, 2 * (i // 2) - 1) for i in range(28))))
TOLERANCE = 1e-4  # absolute; logits are of order one
STRAINED = {"llama", "mistral-window", "gemma2", "qwen2-window", "phi3-longrope", "gpt2", "opt", "mixtral-window"}


def target_of(family: str) -> HFTarget:
    return HFTarget(shared_model(family), family)


def plain(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits [n, V] of a stock call without a cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]


def some_ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(2, VOCAB) for _ in range(n)]


def some_tree(rng: random.Random, state: HFState, row: int = 0, shape: TreeShape | None = None) -> DraftTree:
    """Random tokens in a tree, the paper's by default, no deeper than the row allows."""
    shape = shape or TreeShape.paper()
    limit = state.depth_limit(row)
    shape = shape if limit is None else shape.limited(limit)
    return DraftTree(torch.tensor(some_ids(rng, len(shape.parents))), shape)


def chain_tree(steps: int) -> DraftTree:
    return DraftTree(torch.arange(3, 4 + steps), TreeShape.chain(steps))


def random_shape(rng: random.Random, nodes: int) -> TreeShape:
    return TreeShape((-1, *(rng.randrange(i) for i in range(1, nodes))))


def assert_close(got: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(got, wanted, atol=tolerance, rtol=0)


def cached(state: HFState, row: int = 0) -> list[Tensor]:
    """Every buffer's committed part."""
    return [x[row, :, : state.lengths[row]] for layer in state._cache.layers for x in (layer.keys, layer.values)]


@EACH_FAMILY
def test_each_node_equals_a_stock_call_on_its_path(family: str) -> None:
    rng, target = random.Random(0), target_of(family)
    state, ids = target.open(1, 100), some_ids(rng, 20)
    out = state.prefill([torch.tensor(ids)])
    assert_close(out.logits[0], plain(target.model, ids)[-1:])
    assert_close(target.lm_head(out.features)[0], plain(target.model, ids))
    for shape in (None, None, COMB):
        tree = some_tree(rng, state, shape=shape)
        out = state.forward_tree([tree])
        assert torch.equal(target.lm_head(out.features), out.logits)
        for path in tree.shape.paths:
            wanted = plain(target.model, ids + tree.tokens[list(path)].tolist())[len(ids) :]
            assert_close(out.logits[0, list(path)], wanted)
        path = rng.choice([p for p in tree.shape.paths if len(p) == tree.shape.max_depth + 1])
        state.commit([path])
        ids += tree.tokens[list(path)].tolist()
    assert state.lengths == (len(ids),)
    tokens = torch.tensor([ids[:5]])
    assert torch.equal(target.embed(tokens), target.model.get_input_embeddings()(tokens))
    assert target.embed(tokens).shape[-1] == target.info.embedding_size


@EACH_FAMILY
def test_caches_equal_a_fresh_prefill_after_any_rounds(family: str) -> None:
    rng, target = random.Random(1), target_of(family)
    state, ids = target.open(1, 120), some_ids(rng, 14)
    state.prefill([torch.tensor(ids)])
    for step in range(9):
        tree = some_tree(rng, state, shape=random_shape(rng, rng.randrange(1, 12)))
        state.forward_tree([some_tree(rng, state)])  # commits nothing
        state.forward_tree([tree])
        path = tree.shape.path(rng.randrange(len(tree.tokens))) if step % 4 else ()
        state.commit([path])
        ids += tree.tokens[list(path)].tolist()
        if step == 5:
            ids = ids[:-3]
            state.truncate([len(ids)])
            more = some_ids(rng, 5)
            state.prefill([torch.tensor(more)])
            ids += more
    fresh, probe = target.open(1, 120), some_tree(rng, state)
    fresh.prefill([torch.tensor(ids)])
    got, wanted = state.forward_tree([probe]), fresh.forward_tree([probe])
    assert_close(got.logits, wanted.logits)
    assert_close(got.features, wanted.features, 2e-4)
    assert len(cached(state)) == 2 * target.info.num_layers
    for a, b in zip(cached(state), cached(fresh), strict=True):
        assert_close(a, b)


def speculate(state: HFState, prompt: list[int], count: int, hints: list[int], rng: random.Random) -> list[int]:
    """Greedy decoding with trees of random tokens, some replaced by `hints`, the tokens that are likely right."""
    new = [int(state.prefill([torch.tensor(prompt)]).logits[0, 0].argmax())]
    while len(new) < count:
        tree = some_tree(rng, state)
        tree.tokens[0] = new[-1]
        for node in rng.choice(tree.shape.paths)[1:]:
            if rng.random() < 0.8 and len(new) + tree.shape.depths[node] <= len(hints):
                tree.tokens[node] = hints[len(new) + tree.shape.depths[node] - 1]
        best, path = state.forward_tree([tree]).logits[0].argmax(-1).tolist(), [0]
        while nexts := [c for c in tree.shape.children[path[-1]] if tree.tokens[c] == best[path[-1]]]:
            path.append(nexts[0])
        state.commit([path])
        new += [best[node] for node in path]
    return new[:count]


@EACH_FAMILY
def test_greedy_decoding_equals_generate(family: str) -> None:
    rng, target = random.Random(2), target_of(family)
    prompt = some_ids(rng, 12)
    full = target.model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 12), do_sample=False, max_new_tokens=32
    )
    wanted = full[0, 12:].tolist()
    assert len(wanted) == 32
    assert speculate(target.open(1, 80), prompt, 32, wanted, rng) == wanted


@EACH_FAMILY
def test_rows_of_a_batch_equal_rows_alone(family: str) -> None:
    rng, target = random.Random(3), target_of(family)
    prompts = [some_ids(rng, n) for n in (9, BOUNDARY + 1, 21)]
    batch, alone = target.open(3, 90, layers=(1,)), [target.open(1, 90, layers=(1,)) for _ in prompts]
    together = batch.prefill([torch.tensor(p) for p in prompts])
    for row, (prompt, state) in enumerate(zip(prompts, alone, strict=True)):
        out, n = state.prefill([torch.tensor(prompt)]), len(prompt)
        assert_close(together.logits[row], out.logits[0], 1e-5)
        assert_close(together.features[row, :n], out.features[0], 1e-5)
        assert_close(together.layers[1][row, :n], out.layers[1][0], 1e-5)
    for step in range(4):
        trees: list[DraftTree | None] = [
            some_tree(rng, batch, row, random_shape(rng, rng.randrange(1, 14))) for row in range(3)
        ]
        if step == 2:
            trees[0] = None  # takes no part
        together, paths = batch.forward_tree(trees), []
        for row, (tree, state) in enumerate(zip(trees, alone, strict=True)):
            path: tuple[int, ...] = ()
            if tree is not None:
                out, n = state.forward_tree([tree]), len(tree.tokens)
                assert_close(together.logits[row, :n], out.logits[0], 1e-5)
                assert_close(together.features[row, :n], out.features[0], 2e-5)
                assert_close(together.layers[1][row, :n], out.layers[1][0], 1e-5)
                path = tree.shape.path(rng.randrange(n)) if rng.random() < 0.8 else ()
                state.commit([path])
            paths.append(path)
        batch.commit(paths)
        assert together.logits.isfinite().all()
    assert batch.lengths == tuple(s.lengths[0] for s in alone)
    for row, state in enumerate(alone):
        for a, b in zip(cached(batch, row), cached(state), strict=True):
            assert_close(a, b, 1e-5)


@EACH_FAMILY
def test_layers_are_the_hidden_states_of_transformers(family: str) -> None:
    rng, target = random.Random(4), target_of(family)
    n = target.info.num_layers
    state, ids = target.open(1, 64, layers=range(n + 1)), some_ids(rng, 15)
    got = state.prefill([torch.tensor(ids)]).layers
    other, last = copy.deepcopy(target.model), []  # asking transformers leaves hooks on a model
    blocks = next(m for m in other.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == n)
    blocks[-1].register_forward_hook(lambda _, args, out: last.append(out if torch.is_tensor(out) else out[0]))
    with torch.no_grad():
        wanted = other(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    for k in range(n):
        assert_close(got[k], wanted[k])
    assert_close(got[n], last[0])
    tree = some_tree(rng, state, shape=TreeShape.chain(3))
    got = state.forward_tree([tree]).layers
    with torch.no_grad():
        ids = ids + tree.tokens.tolist()
        wanted = other(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    assert_close(got[n], last[1][:, 15:])
    assert_close(got[1], wanted[1][:, 15:])


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral-window", "gpt2"])
def test_the_model_is_not_modified(family: str) -> None:
    model = new_model(family).train()

    def facts() -> tuple[Any, ...]:
        modules = [
            (name, sorted(vars(m)), [len(v) for k, v in sorted(vars(m).items()) if k.endswith("hooks")])
            for name, m in model.named_modules()
        ]
        return modules, list(model.state_dict()), str(model.config.to_dict()), str(model.generation_config.to_dict())

    before, weights = facts(), {k: v.clone() for k, v in model.state_dict().items()}
    random_state = torch.random.get_rng_state()
    target, rng = HFTarget(model), random.Random(5)
    state = target.open(2, 60, layers=(0, 2))
    state.prefill([torch.tensor(some_ids(rng, 20)), torch.tensor(some_ids(rng, 3))])
    trees = [some_tree(rng, state), some_tree(rng, state)]
    state.forward_tree(trees)
    state.commit([trees[0].shape.paths[0], trees[1].shape.paths[-1]])
    assert facts() == before
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert not any(m.training for m in model.modules())  # the one change, and documented


@pytest.mark.parametrize("family", sorted(STRAINED))
def test_a_prefill_in_chunks_equals_one_pass(family: str) -> None:
    rng, model = random.Random(6), shared_model(family)
    ids = [torch.tensor(some_ids(rng, n)) for n in (40, 7)]
    small, large = HFTarget(model, prefill_chunk=9).open(2, 64, (1,)), HFTarget(model).open(2, 64, (1,))
    got, wanted = small.prefill(ids), large.prefill(ids)
    assert_close(got.logits, wanted.logits)
    assert_close(got.features, wanted.features)
    assert_close(got.layers[1], wanted.layers[1])
    assert_close(got.logits[0], plain(model, ids[0].tolist())[-1:])


def test_rows_may_join_later_or_read_nothing() -> None:
    rng, target = random.Random(7), target_of("mistral-window")
    state, none = target.open(2, 64), torch.tensor([], dtype=torch.int64)
    first, second = some_ids(rng, 15), some_ids(rng, 6)
    out = state.prefill([none, none])
    assert out.logits.shape == (2, 1, VOCAB) and out.features.shape == (2, 0, 48)
    state.prefill([torch.tensor(first), none])
    out = state.prefill([none, torch.tensor(second)])
    assert state.lengths == (15, 6)
    assert_close(out.logits[1], plain(target.model, second)[-1:])
    state.truncate([0, 6])
    out = state.prefill([torch.tensor(second), torch.tensor(first)])
    assert_close(out.logits[0], plain(target.model, second)[-1:])
    assert_close(out.logits[1], plain(target.model, second + first)[-1:])


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_the_context_limit(family: str) -> None:
    rng, target = random.Random(8), target_of(family)
    limit = target.info.max_length
    assert limit == 128
    state, ids = target.open(1, limit + 40), some_ids(rng, limit - 4)
    state.prefill([torch.tensor(ids)])
    tree = some_tree(rng, state, shape=TreeShape.chain(4))
    for call in (
        lambda: state.forward_tree([tree]),
        lambda: state.prefill([torch.tensor([1] * 5)]),
        lambda: state.prefill([torch.tensor([VOCAB])]),
        lambda: state.forward_tree([DraftTree.root_only(-1)]),
        lambda: state.prefill([]),
        lambda: state.commit([[0]]),
        lambda: state.truncate([limit]),
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert state.lengths == (limit - 4,)
    tree = some_tree(rng, state, shape=TreeShape.paper().limited(3))
    out = state.forward_tree([tree])
    path = tree.shape.paths[-1]
    assert_close(out.logits[0, path[-1]], plain(target.model, ids + tree.tokens[list(path)].tolist())[-1])
    with pytest.raises(InputError, match="not a path"):
        state.commit([[0, len(tree.tokens) - 1]])
    state.commit([path])
    with pytest.raises(InputError, match="open it with a larger"):
        target.open(1, 4).prefill([torch.tensor([1] * 5)])


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_a_full_row_beside_a_wide_tree(family: str) -> None:
    rng, target = random.Random(11), target_of(family)
    ids = [some_ids(rng, 29), some_ids(rng, 4)]
    state = target.open(2, 30)  # room for one node in the first row, for 26 in the second
    state.prefill([torch.tensor(i) for i in ids])
    trees = [DraftTree.root_only(7), some_tree(rng, state)]
    out = state.forward_tree(trees)
    assert_close(out.logits[0, :1], plain(target.model, [*ids[0], 7])[-1:])
    path = trees[1].shape.paths[0]
    assert_close(out.logits[1, list(path)], plain(target.model, ids[1] + trees[1].tokens[list(path)].tolist())[4:])
    state.commit([[0], path])
    with pytest.raises(InputError, match="open it with a larger"):
        state.forward_tree(trees)


def test_an_exception_in_a_pass_leaves_the_state_usable() -> None:
    rng, model = random.Random(9), new_model("llama")
    target = HFTarget(model)
    state, ids = target.open(1, 64, layers=(2,)), some_ids(rng, 10)
    state.prefill([torch.tensor(ids)])

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    tree = some_tree(rng, state)
    state.forward_tree([tree])
    hook = model.model.layers[1].mlp.register_forward_hook(fail)
    for call in (lambda: state.forward_tree([tree]), lambda: state.prefill([torch.tensor([3, 4])])):
        with pytest.raises(RuntimeError, match="luck"):
            call()
        with pytest.raises(InputError, match="no tree"):
            state.commit([[0]])
        assert state.lengths == (10,)
    hook.remove()
    path = tree.shape.paths[0]
    out = state.forward_tree([tree])
    assert_close(out.logits[0, list(path)], plain(model, ids + tree.tokens[list(path)].tolist())[10:])
    assert not model.model.layers[1]._forward_hooks


def test_longrope_is_exact_on_both_sides_of_its_boundary() -> None:
    rng, target = random.Random(10), target_of("phi3-longrope")
    assert target.boundary == BOUNDARY
    state, ids = target.open(1, 100), some_ids(rng, BOUNDARY - 2)
    state.prefill([torch.tensor(ids)])
    assert state.depth_limit(0) == 1
    with pytest.raises(InputError, match="depth_limit"):
        state.forward_tree([chain_tree(2)])
    for _ in range(6):  # over the boundary, a token at a time
        token = some_ids(rng, 1)
        ids += token
        out = state.forward_tree([DraftTree.root_only(token[0])])
        assert_close(out.logits[0], plain(target.model, ids)[-1:])
        state.commit([[0]])
    assert state.depth_limit(0) is None
    state.truncate([BOUNDARY - 5])  # and back
    ids = ids[: BOUNDARY - 5]
    assert state.depth_limit(0) == 4
    tree = chain_tree(4)
    out = state.forward_tree([tree])
    assert_close(out.logits[0], plain(target.model, ids + tree.tokens.tolist())[len(ids) :])


def test_longrope_survives_an_exception_while_a_row_is_read_again() -> None:
    rng, model = random.Random(12), new_model("phi3-longrope")
    state, ids = HFTarget(model).open(1, 64), some_ids(rng, BOUNDARY)
    state.prefill([torch.tensor(ids)])

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    hook = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="luck"):
        state.forward_tree([DraftTree.root_only(5)])
    hook.remove()
    state.truncate([BOUNDARY - 2])
    out = state.forward_tree([DraftTree.root_only(5)])
    assert_close(out.logits[0], plain(model, [*ids[: BOUNDARY - 2], 5])[-1:])


def test_gradients_flow_through_lm_head_and_passes_record_none() -> None:
    target = target_of("granite")
    features = torch.randn(3, 48, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target.lm_head(features).sum().backward()
    assert features.grad is not None and features.grad.abs().sum() > 0
    target.model.zero_grad()
    state = target.open(1, 20)
    out = state.prefill([torch.tensor([4, 5, 6])])
    assert not out.features.requires_grad and not out.logits.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_accepted(dtype: torch.dtype) -> None:
    target = HFTarget(new_model("gemma3").to(dtype))
    state = target.open(2, 60)
    state.prefill([torch.tensor([5] * 20), torch.tensor([6] * 3)])
    out = state.forward_tree([chain_tree(3), chain_tree(1)])
    assert out.logits.dtype == out.features.dtype == target.info.dtype == dtype
    assert out.logits.isfinite().all()


class SlotModel(tf.LlamaModel):
    """A family whose positions are cache slots, whatever it is told."""

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_family_that_is_not_exact_is_refused_by_the_proof() -> None:
    model = new_model("llama")
    model.model.__class__ = SlotModel
    with pytest.raises(UnsupportedModelError, match=r"no exact tree attention.*differs"):
        HFTarget(model, "slots")
    model = new_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match=r"flash_attention_2.*attn_implementation='sdpa'"):
        HFTarget(model)


_REFUSED = {
    "mamba": (tf.MambaConfig, {}, "recurrent"),
    "rwkv": (tf.RwkvConfig, {}, "recurrent"),
    "jamba": (tf.JambaConfig, {}, "hybrid"),
    "qwen3_next": (tf.Qwen3NextConfig, {}, "hybrid"),
    "recurrent_gemma": (tf.RecurrentGemmaConfig, {}, "hybrid"),
    "lfm2": (tf.Lfm2Config, {}, "hybrid"),
    "llama4_text": (tf.Llama4TextConfig, {}, "chunked"),
    "bloom": (tf.BloomConfig, {}, "ALiBi"),
    "mpt": (tf.MptConfig, {}, "ALiBi"),
    "falcon": (tf.FalconConfig, {"alibi": True}, "ALiBi"),
    "gpt_neo": (tf.GPTNeoConfig, {}, "local"),
    "t5": (tf.T5Config, {}, "encoder-decoder"),
    "clip_text_model": (tf.CLIPTextConfig, {}, "not a causal language model"),
}


@pytest.mark.parametrize("family", _REFUSED)
def test_families_are_refused_by_name_from_their_configuration(family: str, tmp_path: Any) -> None:
    cls, changes, reason = _REFUSED[family]
    cls(**changes).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        load_hf(tmp_path)
    message = str(caught.value)
    assert family in message and str(tmp_path) in message and "expected" in message and "\n" not in message


def test_loading_from_a_directory(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    model = new_model("llama-tied")
    model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    capfd.readouterr()
    logging: Any = tf.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    target, tokenizer = load_hf(str(tmp_path), device="cpu")
    assert capfd.readouterr() == ("", "")
    assert before == (logging.get_verbosity(), logging.is_progress_bar_enabled())
    assert tokenizer is None
    assert target.info.dtype == torch.float32 and target.info.name == str(tmp_path)
    assert not any(p.requires_grad for p in target.model.parameters())
    assert target.defaults().eos_ids == ()
    assert load_hf(tmp_path, dtype="bfloat16")[0].info.dtype == torch.bfloat16


def test_what_cannot_be_loaded_is_one_line_with_advice(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    whole, broken, lacking, empty = (tmp_path / n for n in ("whole", "broken", "lacking", "empty"))
    model = new_model("llama")
    for path in (whole, broken, lacking):
        model.save_pretrained(path)
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    state = model.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    model.save_pretrained(lacking, state_dict=state)
    empty.mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text("{not json")
    for source, pattern in (
        (broken, "cannot be read"),
        (lacking, "1 weights are missing, model.layers.1.mlp.up_proj.weight"),
        (empty, "config.json"),
        (tmp_path / "odd", "cannot be read"),
        (tmp_path / "nowhere", "no such directory"),
        (whole / "config.json", "a file"),
        ("nobody/no-such-model", "hf download nobody/no-such-model"),
    ):
        with pytest.raises(TargetError, match=pattern) as caught:
            load_hf(source)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="abacus"):
        load_hf(whole, device="abacus")
    with pytest.raises(InputError, match="float12"):
        load_hf(whole, dtype="float12")


def test_verbs_have_the_signatures_of_the_protocol() -> None:
    from eaglekit.models.target import Target, TargetState

    for protocol, real in ((Target, HFTarget), (TargetState, HFState)):
        for name, verb in inspect.getmembers(protocol, inspect.isfunction):
            if not name.startswith("_"):
                assert list(inspect.signature(verb).parameters) == list(
                    inspect.signature(getattr(real, name)).parameters
                )
