"""Head files: strict reading, exact round trips, errors of one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eaglekit.bench.lossless import tiny_head
from eaglekit.errors import HeadError
from eaglekit.models.checkpoint import check_fit, load_head, read_config, save_head, save_reference
from eaglekit.models.head import EagleHead, HeadConfig
from eaglekit.models.target import TargetInfo
from eaglekit.testing import TableTarget

CONFIG = HeadConfig(
    hidden_size=16, embedding_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8, intermediate_size=24,
    vocab_size=30, rope_theta=1e5,
)  # fmt: skip


def build(seed: int = 0, **changes: Any) -> EagleHead:
    vocab = torch.arange(changes["readout_size"]) if changes.get("readout_size") else None
    return EagleHead(HeadConfig(**{**CONFIG.__dict__, **changes}), torch.Generator().manual_seed(seed), vocab)


def saved(path: Path, **changes: Any) -> Path:
    save_head(build(**changes), path, metadata={"target": "tiny"})
    return path


def edit(path: Path, **tensors: torch.Tensor | None) -> None:
    """Change, add or (None) remove tensors of a saved head; `__` in a name stands for a dot."""
    state = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        key = name.replace("__", ".")
        if tensor is None:
            del state[key]
        else:
            state[key] = tensor
    save_file(state, path / "model.safetensors")


def same(a: EagleHead, b: EagleHead) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(x[n].dtype == y[n].dtype and torch.equal(x[n], y[n]) for n in x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("changes", [{}, {"fc_bias": True}, {"num_hidden_layers": 2}, {"embedding_size": 8}])
def test_round_trip(tmp_path: Path, dtype: torch.dtype, changes: dict[str, Any]) -> None:
    head = build(**changes)
    save_head(head, tmp_path, metadata={"target": "tiny", "note": 1}, dtype=dtype)
    back = load_head(tmp_path)
    assert back.config == head.config
    assert same(back, head.to(dtype))
    assert not back.training
    assert not any(p.requires_grad for p in back.parameters())
    own = read_config(tmp_path)["eaglekit"]
    assert own == {
        "format": 1, "method": "eagle", "embedding_size": head.config.embedding_size, "target": "tiny", "note": 1,
    }  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


VARIANTS: list[dict[str, Any]] = [
    {"inputs": "feature+token", "fc_bias": True}, {"inputs": "feature"}, {"inputs": "token"},
    {"inputs": "token", "embedding_size": 64}, {"mlp": False}, {"mlp": False, "num_hidden_layers": 2},
    {"input_norm": True}, {"inputs": "feature", "input_norm": True}, {"inputs": "token", "input_norm": True},
    {"feature_layers": (1, 4)}, {"feature_layers": (0, 2, 3), "input_norm": True, "embedding_size": 8},
    {"feature_layers": (1, 2), "inputs": "feature", "mlp": False},
    {"feature_layers": (0, 1), "fuse_norms": True}, {"output_norm": True, "readout_size": 6},
    {"method": "eagle3", "feature_layers": (1, 2, 4), "input_norm": True, "output_norm": True, "fuse_norms": True,
     "readout_size": 11, "num_hidden_layers": 2, "embedding_size": 8},
]  # fmt: skip
EACH_VARIANT = pytest.mark.parametrize("changes", VARIANTS, ids=str)


@EACH_VARIANT
def test_variants_are_kept_in_our_format_and_refused_in_the_reference_s(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    head = build(**changes)
    with torch.no_grad():
        for number, parameter in enumerate(head.parameters()):
            parameter.add_(0.01 * number)
    save_head(head, tmp_path / "a", metadata={"target": "tiny"})
    back = load_head(tmp_path / "a")
    assert (back.draft_vocab is None) == (not changes.get("readout_size"))
    assert back.config == head.config
    assert same(back, head.half())
    own = read_config(tmp_path / "a")["eaglekit"]
    kept = {k: list(v) if isinstance(v, tuple) else v for k, v in changes.items() if k in (
        "method", "inputs", "mlp", "input_norm", "feature_layers", "fuse_norms", "output_norm", "readout_size"
    )}  # fmt: skip
    size = head.config.embedding_size
    assert own.pop("draft_vocab_sha256", "").isalnum() == bool(changes.get("readout_size"))
    assert own == {"format": 1, "method": "eagle", "embedding_size": size, **kept, "target": "tiny"}
    with pytest.raises(HeadError, match=r"reference's format has no head with .*keep it in eaglekit's own") as caught:
        save_reference(back, tmp_path / "b", torch.zeros(30, size))
    assert all(name in str(caught.value) for name in kept) and not (tmp_path / "b").exists()


@EACH_VARIANT
def test_a_variant_under_another_s_configuration_is_not_read(tmp_path: Path, changes: dict[str, Any]) -> None:
    """All variants but "feature+token" have tensors of their own."""
    saved(tmp_path, **changes)
    raw = json.loads((tmp_path / "config.json").read_text())
    dropped = {k: v for k, v in raw["eaglekit"].items() if k in ("format", "embedding_size", "target")}
    dropped["method"] = "eagle"
    (tmp_path / "config.json").write_text(json.dumps({**raw, "eaglekit": dropped}))
    if changes.get("inputs") == "feature+token":
        assert load_head(tmp_path).config.inputs == "feature+shifted-token"
        return
    with pytest.raises(
        HeadError, match=r"not the head that its config\.json|an EAGLE-3 head|not an EAGLE head"
    ) as caught:
        load_head(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("inputs", "everything", "inputs is 'everything'"),
        ("inputs", ["token"], "inputs is"),
        ("mlp", "no", "mlp is 'no'; expected true or false"),
        ("input_norm", 1, "input_norm is 1"),
        ("feature_layers", [2, 1], "two or more ascending layer ids"),
        ("feature_layers", 3, "two or more ascending layer ids"),
        ("feature_layers", [[1], [2]], "two or more ascending layer ids"),
        ("feature_layers", [1, 2], r"missing fuse.weight \[16, 32\]"),
        ("input_norm", True, r"missing embed_layernorm.weight \[16\]; missing hidden_layernorm.weight \[16\]"),
        ("mlp", False, r"unexpected layers.0.mlp.down_proj.weight \[16, 24\]"),
        ("inputs", "feature", r"fc.weight is \[16, 32\], expected \[16, 16\]"),
    ],
)
def test_variants_that_a_configuration_only_claims(tmp_path: Path, key: str, value: Any, words: str) -> None:
    saved(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["eaglekit"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(HeadError, match=words):
        load_head(tmp_path)


@pytest.mark.parametrize("bias", [True, False])
def test_ours_reference_ours_is_bit_exact(tmp_path: Path, bias: bool) -> None:
    save_head(build(fc_bias=bias), tmp_path / "a", metadata={})
    first = load_head(tmp_path / "a")
    embeddings = torch.randn(30, 16)
    save_reference(first, tmp_path / "b", embeddings)
    state = torch.load(tmp_path / "b" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(state["embed_tokens.weight"], embeddings.half())
    assert json.loads((tmp_path / "b" / "config.json").read_text())["bias"] is bias
    second = load_head(tmp_path / "b")
    assert second.config == first.config
    save_head(second, tmp_path / "c", metadata={})
    assert same(load_head(tmp_path / "c"), first)
    files = [(tmp_path / d / "model.safetensors").read_bytes() for d in "ac"]
    assert files[0] == files[1]


def test_reference_with_prefixes_and_without_a_bias_key(tmp_path: Path) -> None:
    head = build(fc_bias=True)
    state = {f"module.model.{n}": t for n, t in head.state_dict().items()}
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    torch.save(state, tmp_path / "pytorch_model.bin")
    plain = {
        "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
        "vocab_size": 30, "rms_norm_eps": 1e-5, "rope_theta": 1e5, "max_position_embeddings": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(plain))
    back = load_head(tmp_path)
    assert back.config == head.config
    assert same(back, head)


def test_everything_wrong_is_listed_at_once(tmp_path: Path) -> None:
    saved(tmp_path)
    edit(
        tmp_path,
        layers__0__self_attn__q_proj__weight=None,
        layers__0__mlp__up_proj__weight=torch.zeros(5, 5),
        lm_head__weight=torch.zeros(30, 16),
        embed_tokens__weight=torch.zeros(31, 16),
    )
    with pytest.raises(HeadError) as e:
        load_head(tmp_path)
    text = str(e.value)
    for part in (
        "missing layers.0.self_attn.q_proj.weight [16, 16]",
        "layers.0.mlp.up_proj.weight is [5, 5], expected [24, 16]",
        "unexpected lm_head.weight [30, 16]",
        "embed_tokens.weight is [31, 16], expected [30, 16]",
    ):
        assert part in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "tensors",
    [
        {"d2t": torch.zeros(8)},
        {"midlayer__self_attn__q_proj__weight": torch.zeros(16, 32)},
        {"fc__weight": torch.zeros(16, 48)},
    ],
)
def test_an_eagle3_head_is_named_as_such(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    saved(tmp_path)
    edit(tmp_path, **tensors)
    with pytest.raises(HeadError, match="EAGLE-3"):
        load_head(tmp_path)


def test_a_wide_embedding_is_not_mistaken_for_eagle3(tmp_path: Path) -> None:
    assert load_head(saved(tmp_path, embedding_size=40)).config.embedding_size == 40


def test_weights_that_are_not_numbers(tmp_path: Path) -> None:
    saved(tmp_path)
    edit(tmp_path, fc__weight=torch.full((16, 32), float("nan"), dtype=torch.float16))
    with pytest.raises(HeadError, match=r"not finite numbers in fc\.weight"):
        load_head(tmp_path)
    head = build()
    with torch.no_grad():
        head.fc.weight[0, 0] = 1e6  # infinite in half precision
    with pytest.raises(HeadError, match="not finite"):
        save_head(head, tmp_path, metadata={})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(HeadError, match="no such folder"):
        load_head(tmp_path / "nowhere")
    with pytest.raises(HeadError, match=r"config\.json: cannot be read"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(HeadError, match="not JSON"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(HeadError, match="expected a JSON object"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 16}')
    with pytest.raises(HeadError, match="neither model"):
        load_head(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(HeadError, match="not readable"):
        load_head(tmp_path)
    saved(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(HeadError, match="not readable") as e:
        load_head(tmp_path)
    assert "\n" not in str(e.value)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return print, ("ran",)

    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(HeadError, match="not readable"):
        load_head(tmp_path)


def test_missing_keys_and_other_versions(tmp_path: Path) -> None:
    saved(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k not in ("vocab_size",)}))
    with pytest.raises(HeadError, match="no vocab_size"):
        load_head(tmp_path)
    raw["eaglekit"]["format"] = 2
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(HeadError, match="format 2"):
        load_head(tmp_path)


def test_fit() -> None:
    info = TargetInfo("tiny", "llama", 16, 16, 30, 2, 64, torch.float32, torch.device("cpu"))
    check_fit(CONFIG, info)
    other = TargetInfo("big", "llama", 32, 32, 31, 2, 64, torch.float32, torch.device("cpu"))
    with pytest.raises(HeadError, match="features 16 against 32; embeddings 16 against 32; vocabulary 30 against 31"):
        check_fit(CONFIG, other)
    check_fit(build(feature_layers=(0, 2)).config, info)
    with pytest.raises(HeadError, match=r"reads the streams \[1, 3\], but tiny has 2 layers, and so streams 0 to 2"):
        check_fit(build(feature_layers=(1, 3)).config, info)


def test_saving_replaces_a_head_and_an_unwritable_place_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, seed=1)
    save_head(build(seed=2), tmp_path, metadata={})
    assert same(load_head(tmp_path), build(seed=2).half())
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadError, match="cannot be written"):
        save_head(build(), tmp_path / "file", metadata={})
    with pytest.raises(HeadError, match=r"\[3, 16\]; this head was made for \[30, 16\]"):
        save_reference(build(), tmp_path, torch.zeros(3, 16))


def test_a_draft_vocabulary_is_kept_and_checked(tmp_path: Path) -> None:
    head = tiny_head(TableTarget(vocab_size=9), 0, draft_vocab=[0, 3, 8])
    save_head(head, tmp_path, metadata={})
    kept = load_head(tmp_path).draft_vocab
    assert kept is not None and kept.dtype == torch.int64 and kept.tolist() == [0, 3, 8]
    for wrong in ([], [3, 0], [3, 3], [-1, 2], [4, 9], [0.0, 1.0], [[1, 2]]):
        with pytest.raises(HeadError, match="ascending token ids from 0 to 8"):
            tiny_head(TableTarget(vocab_size=9), 0, draft_vocab=wrong)


def test_a_draft_vocabulary_of_another_head_is_found_out(tmp_path: Path) -> None:
    for name, ids in (("a", [0, 3, 8]), ("b", [0, 4, 8])):
        save_head(tiny_head(TableTarget(vocab_size=9), 0, draft_vocab=ids), tmp_path / name, metadata={})
    shutil.copy(tmp_path / "b" / "model.safetensors", tmp_path / "a")
    with pytest.raises(HeadError, match="its draft vocabulary is not the one"):
        load_head(tmp_path / "a")
