"""The draft head: its mathematics against a direct transcription, its cache, its configuration."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eaglekit.errors import HeadError, InputError
from eaglekit.models.head import EagleHead, HeadCache, HeadConfig, fused_layers, head_options, rope_frequencies
from families import FAMILIES, shared_model

CONFIG = HeadConfig(
    hidden_size=24, embedding_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=40,
    vocab_size=50, fc_bias=True,
)  # fmt: skip


def build(**changes: object) -> EagleHead:
    config = HeadConfig(**{**CONFIG.__dict__, **changes})
    head = EagleHead(config, torch.Generator().manual_seed(1)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    for parameter in head.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return head


def inputs(batch: int, nodes: int, seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(batch, nodes, CONFIG.embedding_size, generator=generator)
    features = torch.randn(batch, nodes, CONFIG.hidden_size, generator=generator)
    return embeddings, features, torch.arange(nodes)[None].repeat(batch, 1)


def transcription(head: EagleHead, embeddings: Tensor, features: Tensor) -> Tensor:
    """One row by the definition, with loops: [n, E], [n, H] -> [n, H]."""
    c, w = head.config, head.state_dict()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps).sqrt()

    def rotate(x: Tensor, position: int) -> Tensor:
        half = c.head_dim // 2
        out = x.clone()
        for i in range(half):
            angle = torch.tensor(position * c.rope_theta ** (-2 * i / c.head_dim))
            a, b = x[i], x[i + half]
            out[i] = a * angle.cos() - b * angle.sin()
            out[i + half] = b * angle.cos() + a * angle.sin()
        return out

    if features.shape[-1] > c.hidden_size:
        if c.fuse_norms:
            parts = features.split(c.hidden_size, -1)
            features = torch.cat([norm(x, w[f"fuse_norms.{i}.weight"]) for i, x in enumerate(parts)], -1)
        features = features @ w["fuse.weight"].T
    stream = features
    if c.input_norm:
        embeddings = norm(embeddings, w["embed_layernorm.weight"]) if c.inputs != "feature" else embeddings
        features = norm(features, w["hidden_layernorm.weight"]) if c.inputs != "token" else features
    both = torch.cat((embeddings, features), -1)
    x = {"feature": features, "token": embeddings}.get(c.inputs, both)
    x = x @ w["fc.weight"].T if c.method == "eagle" else x  # EAGLE-3's attention reads both as they are
    if c.fc_bias:
        x = x + w["fc.bias"]
    for layer in range(c.num_hidden_layers):
        name = f"layers.{layer}."
        y = norm(x, w[name + "input_layernorm.weight"]) if layer else x
        q, k, v = (y @ w[f"{name}self_attn.{p}_proj.weight"].T for p in "qkv")
        rows = []
        for i in range(len(x)):
            heads = []
            for h in range(c.num_attention_heads):
                g = h * c.num_key_value_heads // c.num_attention_heads
                part, shared = slice(h * c.head_dim, (h + 1) * c.head_dim), slice(g * c.head_dim, (g + 1) * c.head_dim)
                query = rotate(q[i, part], i)
                scores = torch.stack([query @ rotate(k[j, shared], j) for j in range(i + 1)]) / c.head_dim**0.5
                heads.append(scores.softmax(0) @ v[: i + 1, shared])
            rows.append(torch.cat(heads))
        x = stream if layer == 0 and c.method == "eagle3" else x
        x = x + torch.stack(rows) @ w[name + "self_attn.o_proj.weight"].T
        if not c.mlp:
            continue
        y = norm(x, w[name + "post_attention_layernorm.weight"])
        y = F.silu(y @ w[name + "mlp.gate_proj.weight"].T) * (y @ w[name + "mlp.up_proj.weight"].T)
        x = x + y @ w[name + "mlp.down_proj.weight"].T
    return x


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_definition(layers: int, bias: bool) -> None:
    head = build(num_hidden_layers=layers, fc_bias=bias)
    e, f, positions = inputs(1, 6)
    torch.testing.assert_close(head(e, f, positions)[0], transcription(head, e[0], f[0]), rtol=1e-4, atol=1e-4)


EAGLE3: dict[str, Any] = {
    "method": "eagle3", "feature_layers": (1, 2, 4), "input_norm": True, "output_norm": True, "fuse_norms": True,
    "fc_bias": False,
}  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    {"inputs": "feature+token"}, {"inputs": "feature"}, {"inputs": "token"}, {"mlp": False}, {"input_norm": True},
    {"inputs": "feature", "input_norm": True}, {"inputs": "token", "input_norm": True, "num_hidden_layers": 3},
    {"feature_layers": (1, 4)}, {"feature_layers": (0, 2, 3), "input_norm": True, "mlp": False, "num_hidden_layers": 2},
    {"feature_layers": (0, 1, 2), "inputs": "feature", "input_norm": True},
    {"feature_layers": (0, 3), "fuse_norms": True, "output_norm": True, "readout_size": 7},
    EAGLE3, {**EAGLE3, "num_hidden_layers": 2, "readout_size": 9, "fuse_norms": False},
]  # fmt: skip
EACH_VARIANT = pytest.mark.parametrize("changes", VARIANTS, ids=str)


@EACH_VARIANT
def test_variants_equal_the_definition(changes: dict[str, Any]) -> None:
    head = build(**changes)
    e, f, positions = inputs(1, 6)
    streams = torch.randn(1, 6, head.config.feature_width, generator=torch.Generator().manual_seed(9))
    for given in (f, streams) if head.config.feature_layers else (f,):  # predictions too are fed back
        torch.testing.assert_close(head(e, given, positions)[0], transcription(head, e[0], given[0]),
                                   rtol=1e-4, atol=1e-4)  # fmt: skip
        x = head.fc_input(e, given)
        first = head.layers[0].self_attn.q_proj if head.fc is None else head.fc
        assert x.shape == (1, 6, head.config.fc_width) == (1, 6, first.in_features)
    assert head.shifted == (changes.get("inputs") != "feature+token")
    assert not any(torch.isnan(p).any() for p in head.parameters())


def test_a_new_default_head_draws_its_matrices_in_the_order_of_their_names() -> None:
    """Training from a seed depends on it."""
    g, state = torch.Generator().manual_seed(7), EagleHead(CONFIG, torch.Generator().manual_seed(7)).state_dict()
    for name in ("fc", *(f"layers.0.{n}_proj" for n in (
        "self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"
    ))):  # fmt: skip
        got = state[f"{name}.weight"]
        wanted = torch.empty(got.shape).normal_(0.0, 0.02, generator=g)
        part = slice(0, CONFIG.embedding_size if name == "fc" else None)
        assert torch.equal(got[:, part], wanted[:, part]), name


def test_new_variants_start_at_the_feature_or_at_the_last_stream() -> None:
    for changes in VARIANTS:
        head = EagleHead(replace(CONFIG, **changes))
        if head.config.reads_features and head.fc is not None:
            assert torch.equal(head.fc.weight[:, -24:], torch.eye(24))
        if head.fuse is not None:
            streams = torch.randn(3, head.config.feature_width)
            assert torch.equal(head.fuse(streams), streams[:, -24:])
        assert (head.fc is None) == (changes.get("method") == "eagle3")
        norms = [p for n, p in head.named_parameters() if "norm" in n]
        assert all(bool((p == 1).all()) for p in norms)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"inputs": "tokens"},
            r"inputs is 'tokens'; expected one of feature\+shifted-token, feature\+token, feature, t",
        ),
        ({"mlp": 1}, "mlp is 1; expected true or false"),
        ({"input_norm": "yes"}, "input_norm is 'yes'; expected true or false"),
        ({"feature_layers": (3,)}, r"feature_layers is \(3,\); expected two or more ascending layer ids, or none"),
        ({"feature_layers": (3, 3)}, "two or more ascending"),
        ({"feature_layers": (3, 1)}, "two or more ascending"),
        ({"feature_layers": (-1, 1)}, "two or more ascending"),
        ({"feature_layers": (1.0, 2)}, "two or more ascending"),
        ({"feature_layers": "12"}, "two or more ascending"),
        ({"feature_layers": (1, 2), "inputs": "token"}, "inputs 'token', which has no feature"),
    ],
)
def test_variants_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(HeadError, match=words):
        replace(CONFIG, **changes)


def options(**typed: Any) -> dict[str, Any]:
    return head_options(num_target_layers=30, intermediate_size=1536, **typed)


def test_what_is_typed_becomes_overrides() -> None:
    plain = replace(CONFIG, intermediate_size=1536, fc_bias=False)
    assert replace(plain, **options()) == plain
    assert replace(plain, **options(layers=4, bias=True)) == replace(plain, num_hidden_layers=4, fc_bias=True)
    half = replace(plain, **options(layers=0.5))
    assert (half.num_hidden_layers, half.mlp) == (1, False)
    widths = {0.5: 768, 2: 3072, 0.33: 512, 0.001: 16}
    assert {w: options(mlp_width=w)["intermediate_size"] for w in widths} == widths
    assert head_options(num_target_layers=2, intermediate_size=100)["intermediate_size"] == 100  # as it is
    fused = options(features="fused", inputs="feature+token", input_norm=True)
    assert replace(plain, **fused) == replace(
        plain, feature_layers=(2, 15, 27), inputs="feature+token", input_norm=True
    )


def test_fused_layers_of_targets_of_every_depth() -> None:
    assert fused_layers(32) == (2, 16, 29) and fused_layers(8) == (2, 4, 5) and fused_layers(7) == (2, 3, 4)
    for n in range(1, 40):
        ids = fused_layers(n)
        assert 2 <= len(ids) <= 3 and ids[-1] <= n
        replace(CONFIG, feature_layers=ids)  # ascending
    with pytest.raises(InputError, match="target of 0 layers; expected at least 1"):
        fused_layers(0)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ({"layers": 0}, "layers: got 0; expected 0.5"),
        ({"layers": 1.5}, "layers: got 1.5; expected 0.5"),
        ({"layers": 129}, "layers: got 129;"),
        ({"layers": float("nan")}, "layers: got nan;"),
        ({"layers": float("inf")}, "layers: got inf;"),
        ({"mlp_width": 0}, "MLP width: got 0; expected a factor above 0"),
        ({"mlp_width": float("nan")}, "MLP width: got nan"),
        ({"mlp_width": 2, "layers": 0.5}, "width 2 with 0.5 layers"),
        ({"inputs": "embeddings"}, "inputs: got 'embeddings'; expected one of feature"),
        ({"features": "all"}, "features: got 'all'; expected last or fused"),
        ({"features": "fused", "inputs": "token"}, "'fused' with inputs 'token'"),
    ],
)
def test_options_that_cannot_be_are_named(typed: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        options(**typed)
    assert "\n" not in str(caught.value)


def test_parameter_names_and_shapes() -> None:
    shapes = {name: tuple(p.shape) for name, p in EagleHead(CONFIG).named_parameters()}
    assert shapes == {
        "fc.weight": (24, 40),
        "fc.bias": (24,),
        "layers.0.self_attn.q_proj.weight": (32, 24),
        "layers.0.self_attn.k_proj.weight": (16, 24),
        "layers.0.self_attn.v_proj.weight": (16, 24),
        "layers.0.self_attn.o_proj.weight": (24, 32),
        "layers.0.mlp.gate_proj.weight": (40, 24),
        "layers.0.mlp.up_proj.weight": (40, 24),
        "layers.0.mlp.down_proj.weight": (24, 40),
        "layers.0.post_attention_layernorm.weight": (24,),
    }


@pytest.mark.parametrize("layers", [1, 2])
def test_steps_with_a_cache_equal_one_pass(layers: int) -> None:
    head = build(num_hidden_layers=layers)
    e, f, positions = inputs(2, 9)
    whole = head(e, f, positions)
    cache = HeadCache(head.config, 2, 16)
    first = head(e[:, :4], f[:, :4], positions[:, :4], cache=cache)
    cache.advance([4, 3])  # row 1 keeps one entry less, and goes on from there
    rows = torch.tensor([[4, 5], [3, 4]])
    b = torch.arange(2)[:, None]
    second = head(e[b, rows], f[b, rows], rows, cache=cache)
    torch.testing.assert_close(first, whole[:, :4])
    torch.testing.assert_close(second, whole[b, rows])
    cache.advance([1, 2])
    cache.truncate([5, 4])
    rows = torch.tensor([[5], [4]])
    torch.testing.assert_close(head(e[b, rows], f[b, rows], rows, cache=cache), whole[b, rows])


def test_tree_levels_equal_paths() -> None:
    head = build()
    e, f, positions = inputs(1, 5)
    cache = HeadCache(head.config, 1, 16)
    head(e, f, positions, cache=cache)
    cache.advance([5])
    # Two nodes at position 5, then a child of each at position 6: keys are the prefix, the parent, itself.
    e2, f2, _ = inputs(1, 4, seed=4)
    level1 = torch.zeros(1, 1, 2, 7, dtype=torch.bool)
    level1[..., :5] = True
    level1[0, 0, 0, 5] = level1[0, 0, 1, 6] = True
    level2 = torch.zeros(1, 1, 2, 9, dtype=torch.bool)
    level2[..., :5] = True
    level2[0, 0, 0, [5, 7]] = level2[0, 0, 1, [6, 8]] = True
    a = head(e2[:, :2], f2[:, :2], torch.tensor([[5, 5]]), mask=level1, cache=cache)
    b = head(e2[:, 2:], f2[:, 2:], torch.tensor([[6, 6]]), mask=level2, cache=cache, offset=2)
    for node in range(2):
        path_e = torch.cat((e, e2[:, node : node + 1], e2[:, node + 2 : node + 3]), 1)
        path_f = torch.cat((f, f2[:, node : node + 1], f2[:, node + 2 : node + 3]), 1)
        whole = head(path_e, path_f, torch.arange(7)[None])
        torch.testing.assert_close(a[0, node], whole[0, 5])
        torch.testing.assert_close(b[0, node], whole[0, 6])
    assert cache.lengths == [5]


def test_a_chain_with_offset_needs_no_mask() -> None:
    head = build()
    e, f, positions = inputs(1, 6)
    whole = head(e, f, positions)
    cache = HeadCache(head.config, 1, 16)
    head(e[:, :4], f[:, :4], positions[:, :4], cache=cache)
    cache.advance([4])
    for offset in range(2):
        part = slice(4 + offset, 5 + offset)
        y = head(e[:, part], f[:, part], positions[:, part], cache=cache, offset=offset)
        torch.testing.assert_close(y, whole[:, part])


def test_positions_past_any_table_and_a_full_cache() -> None:
    head = build(max_position_embeddings=8)
    e, f, _ = inputs(1, 3)
    far = head(e, f, torch.tensor([[10**6, 10**6 + 1, 10**6 + 2]]))
    assert torch.isfinite(far).all()
    # Attention depends on distances alone; float32 angles near a million are good to about 0.06.
    torch.testing.assert_close(head(e, f, torch.tensor([[500, 501, 502]])), head(e, f, torch.arange(3)[None]))
    cache = HeadCache(head.config, 1, 2)
    with pytest.raises(InputError, match="3 entries needed, room for 2"):
        head(e, f, torch.arange(3)[None], cache=cache)
    with pytest.raises(InputError, match="length 3"):
        cache.truncate([3])


def test_initialisation_is_seeded_and_starts_at_the_feature() -> None:
    before = torch.get_rng_state()
    a, b = EagleHead(CONFIG), EagleHead(CONFIG)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert torch.equal(a.fc.weight[:, CONFIG.embedding_size :], torch.eye(CONFIG.hidden_size))
    assert 0.01 < float(a.layers[0].mlp.up_proj.weight.detach().std()) < 0.03
    assert not any(torch.equal(a.state_dict()[n], t) for n, t in EagleHead(
        CONFIG, torch.Generator().manual_seed(5)).state_dict().items() if "proj" in n)  # fmt: skip


def test_half_precision_keeps_exact_positions() -> None:
    head = build().to(torch.bfloat16)
    assert head.dtype == torch.bfloat16
    assert head.inv_freq.dtype == torch.float32
    e, f, positions = inputs(1, 4)
    y = head(e.bfloat16(), f.bfloat16(), positions)
    torch.testing.assert_close(y.float(), build()(e, f, positions), rtol=0.1, atol=0.3)


def test_rope_scaling_is_that_of_transformers() -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    config = HeadConfig(**{**CONFIG.__dict__, "rope_scaling": scaling})
    plain, _ = rope_frequencies(CONFIG)
    scaled, factor = rope_frequencies(config)
    assert factor == 1.0
    assert not torch.equal(plain, scaled)
    linear, _ = rope_frequencies(HeadConfig(**{**CONFIG.__dict__, "rope_scaling": {"type": "linear", "factor": 4.0}}))
    torch.testing.assert_close(linear, plain / 4)
    with pytest.raises(HeadError, match="'magic' is unknown"):
        rope_frequencies(HeadConfig(**{**CONFIG.__dict__, "rope_scaling": {"rope_type": "magic"}}))


def test_for_target() -> None:
    from transformers import GPT2Config, LlamaConfig

    llama = LlamaConfig(
        hidden_size=48, intermediate_size=96, num_attention_heads=6, num_key_value_heads=2, vocab_size=70,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4}, rms_norm_eps=1e-6,
    )  # fmt: skip
    config = HeadConfig.for_target(llama, num_hidden_layers=2)
    assert (config.hidden_size, config.head_dim, config.num_key_value_heads) == (48, 8, 2)
    assert (config.rope_theta, config.rope_scaling, config.num_hidden_layers) == (5e4, None, 2)
    scaled = LlamaConfig(
        hidden_size=48, num_attention_heads=6, rope_parameters={"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0}
    )
    assert HeadConfig.for_target(scaled).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert HeadConfig.for_target(GPT2Config(n_embd=45, n_head=5)).head_dim == 10  # even, for RoPE


def new_head_runs(config: HeadConfig) -> None:
    head = EagleHead(config).eval().requires_grad_(False)
    y = head(torch.ones(1, 5, config.embedding_size), torch.ones(1, 5, config.hidden_size), torch.arange(5)[None])
    assert y.shape == (1, 5, config.hidden_size) and bool(torch.isfinite(y).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_head(family: str) -> None:
    new_head_runs(HeadConfig.for_target(shared_model(family).config, embedding_size=20))


def test_a_scaling_of_parts_of_heads_becomes_plain_rope() -> None:
    from transformers import Phi3Config

    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6,
        "original_max_position_embeddings": 32, "partial_rotary_factor": 0.75,
    }  # fmt: skip
    target = Phi3Config(
        vocab_size=50, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, intermediate_size=96,
        pad_token_id=0, rope_parameters=rope, original_max_position_embeddings=32, max_position_embeddings=128,
    )  # fmt: skip
    config = HeadConfig.for_target(target)
    assert (config.head_dim, config.rope_scaling) == (16, None)
    new_head_runs(config)


def test_a_head_for_a_target_without_a_gated_mlp() -> None:
    from transformers import GPT2Config, OPTConfig

    assert HeadConfig.for_target(GPT2Config(n_embd=48, n_head=4)).intermediate_size == 128
    assert HeadConfig.for_target(GPT2Config(n_embd=48, n_head=4, n_inner=70)).intermediate_size == 70
    config = HeadConfig.for_target(OPTConfig(hidden_size=48, num_attention_heads=4, ffn_dim=64))
    assert (config.intermediate_size, config.hidden_act) == (64, "relu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 7}, "even"),
        ({"hidden_act": "tanhish"}, "tanhish"),
    ],
)
def test_impossible_configurations(changes: dict[str, object], message: str) -> None:
    with pytest.raises(HeadError, match=message):
        HeadConfig(**{**CONFIG.__dict__, **changes})


def test_plain_rope_does_not_import_transformers() -> None:
    code = (
        "import sys, eaglekit.models.head as h; h.EagleHead(h.HeadConfig(8, 8, 1, 1, 8, 8, 8)); "
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
