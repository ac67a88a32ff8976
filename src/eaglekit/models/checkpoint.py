"""Reading and writing draft heads, strictly.

Contract: a head is a folder with `config.json` and `model.safetensors` (ours) or `pytorch_model.bin` (the reference's,
SafeAILab/EAGLE; read with `weights_only=True`). Every tensor that the configuration calls for must be there in its
shape, and no other; all problems are listed in one `HeadError`. Files are written beside their place and moved there,
so that a reader never sees half a file.

Our `config.json` has the plain Llama keys that other engines read, and an `eaglekit` key:

    format          1
    method          "eagle" or "eagle3"
    embedding_size  width of the target's embeddings
    inputs, mlp, input_norm, feature_layers, fuse_norms, output_norm, readout_size
                    what is not the default's, see `models/head.py`
    ...             whatever the caller adds: the target's name, provenance, training facts

Tensor names and shapes are those of the reference. It stores `fc.bias` unless its configuration has `"bias": false`;
whether there is a bias is decided here by the tensor. A stored copy of `embed_tokens.weight` is checked for shape and
left aside: embeddings are the target's. Variants add `fuse.weight`, `fuse_norms.N.weight`, `embed_layernorm.weight`,
`hidden_layernorm.weight`, `norm.weight` and `lm_head.weight`, or leave out what they do not have; the reference's
format cannot hold them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as dump_safetensors
from torch import Tensor

from eaglekit.errors import HeadError
from eaglekit.models.head import METHODS, EagleHead, HeadConfig
from eaglekit.models.target import TargetInfo

FORMAT_VERSION = 1
DRAFT_VOCAB = "draft_vocab"  # int32 [Vd], in our own format only
_PREFIXES = ("module.", "model.")
# Fields of the configuration, kept in our own key.
_VARIANTS = ("method", "inputs", "mlp", "input_norm", "feature_layers", "fuse_norms", "output_norm", "readout_size")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def save_head(
    head: EagleHead, path: Path | str, *, metadata: Mapping[str, Any], dtype: torch.dtype = torch.float16
) -> None:
    """Write `head` to the folder `path` in our format.

    Args:
        head: The head.
        path: A folder; made if need be.
        metadata: JSON values for the `eaglekit` key: target, provenance, training facts.
        dtype: Of the stored tensors.

    Raises:
        HeadError: the weights are not finite in `dtype`, or the folder cannot be written.
    """
    state = _finite({n: t.detach().to("cpu", dtype).contiguous() for n, t in head.state_dict().items()}, str(path))
    config = _plain_config(head.config, dtype)
    if head.draft_vocab is not None:
        state[DRAFT_VOCAB] = head.draft_vocab.to("cpu", torch.int32)
        metadata = {**metadata, "draft_vocab_sha256": _digest(state[DRAFT_VOCAB])}
    own = {"format": FORMAT_VERSION, "method": head.config.method, "embedding_size": head.config.embedding_size}
    config["eaglekit"] = {**own, **_variant(head.config), **metadata}
    _write(Path(path), "model.safetensors", dump_safetensors(state, metadata={"format": "pt"}))
    _write(Path(path), "config.json", _json(config))


def save_reference(head: EagleHead, path: Path | str, embed_tokens: Tensor) -> None:
    """Write `head` in the reference's format, with the target's `embed_tokens` [V, E], in the head's own dtype.

    That format has no draft vocabulary: it is left out, and the head then drafts over all tokens.

    Raises:
        HeadError: the format cannot hold this head, `embed_tokens` has another shape than the head was made for, or the
            folder cannot be written.
    """
    variant = ", ".join(f"{name} {value!r}" for name, value in _variant(head.config).items())
    if variant:
        raise HeadError(
            f"{path}: the reference's format has no head with {variant}, and its code would compute another one from "
            "these weights; keep it in eaglekit's own format"
        )
    expected = (head.config.vocab_size, head.config.embedding_size)
    if tuple(embed_tokens.shape) != expected:
        raise HeadError(f"embeddings are {list(embed_tokens.shape)}; this head was made for {list(expected)}")
    state = {n: t.detach().cpu().contiguous() for n, t in head.state_dict().items()}
    state["embed_tokens.weight"] = embed_tokens.detach().to("cpu", head.dtype).contiguous()

    def dump(temporary: Path) -> None:
        torch.save(state, temporary)

    _write(Path(path), "pytorch_model.bin", dump)
    _write(Path(path), "config.json", _json(_plain_config(head.config, head.dtype)))


def load_head(path: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> EagleHead:
    """Read a head in our format or the reference's, ready for evaluation.

    Args:
        path: Its folder.
        dtype: Of the weights, or None for the stored one. Never the target's by itself.
        device: Where to put it.

    Raises:
        HeadError: nothing usable is there; the message lists everything that is wrong.
    """
    folder = Path(path)
    raw = read_config(folder)
    state = _read_tensors(folder)
    draft_vocab = state.pop(DRAFT_VOCAB, None)
    noted = (raw.get("eaglekit") or {}).get("draft_vocab_sha256")
    if noted is not None and (draft_vocab is None or _digest(draft_vocab) != noted):
        raise HeadError(
            f"{folder}: its draft vocabulary is not the one that config.json speaks of (SHA-256 {noted}); the files "
            "are of two heads, or damaged: get both again"
        )
    if (raw.get("eaglekit") or {}).get("method") != "eagle3":
        _refuse_eagle3(folder, raw, state)
    config = _head_config(folder, raw, state)
    expected = _shapes(config)
    problems = _differences(expected, state, config)
    if problems:
        raise HeadError(f"{folder}: not the head that its config.json describes: " + "; ".join(problems))
    state = _finite({n: state[n] for n in expected}, str(folder))
    try:
        head = EagleHead(config, draft_vocab=draft_vocab)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as e:
        reason = f"{type(e).__name__}: {e}"
        raise HeadError(f"{folder}: its config.json makes no head ({reason}); check its rope_scaling") from None
    if config.readout_size and head.draft_vocab is None and config.readout_size != config.vocab_size:
        raise HeadError(
            f"{folder}: an lm_head of {config.readout_size} rows and no draft vocabulary that says which of the "
            f"{config.vocab_size} tokens they are; get both files again"
        )
    stored = state["layers.0.self_attn.q_proj.weight"].dtype
    head.to(dtype=dtype or (stored if stored.is_floating_point else torch.float32), device=device)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(state[name])
    return head.eval().requires_grad_(False)


def read_config(path: Path | str) -> dict[str, Any]:
    """The head's `config.json`; our facts are under its key `eaglekit`, if it is one of ours.

    Raises:
        HeadError: no such folder, no such file, or no JSON object in it.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise HeadError(f"{folder}: no such folder; expected a draft head: config.json and model.safetensors")
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise HeadError(f"{file}: cannot be read ({e.strerror}); a draft head needs it") from None
    except (ValueError, RecursionError) as e:
        raise HeadError(f"{file}: not JSON ({e}); download or convert the head again") from None
    if not isinstance(raw, dict):
        raise HeadError(f"{file}: a {type(raw).__name__}, expected a JSON object")
    own = raw.get("eaglekit")
    if own is not None and (not isinstance(own, dict) or own.get("format") != FORMAT_VERSION):
        found = own.get("format") if isinstance(own, dict) else own
        raise HeadError(f"{file}: format {found!r}; this version of eaglekit reads {FORMAT_VERSION}: upgrade eaglekit")
    if own is not None and own.get("method") not in METHODS:
        raise HeadError(f"{file}: a head for method {own.get('method')!r}; expected {' or '.join(map(repr, METHODS))}")
    return raw


def check_fit(config: HeadConfig, info: TargetInfo) -> None:
    """Whether a head can draft for a target.

    Raises:
        HeadError: a width or the vocabulary differs; names both numbers of each. Or it reads layers that are not there.
    """
    pairs = {
        "features": (config.hidden_size, info.hidden_size),
        "embeddings": (config.embedding_size, info.embedding_size),
        "vocabulary": (config.vocab_size, info.vocab_size),
    }
    wrong = [f"{what} {head} against {target}" for what, (head, target) in pairs.items() if head != target]
    if wrong:
        raise HeadError(
            f"this draft head does not fit {info.name} (head against target): {'; '.join(wrong)}. "
            "Use a head trained for this target, or train one: eaglekit train"
        )
    if any(layer > info.num_layers for layer in config.feature_layers):
        raise HeadError(
            f"this draft head reads the streams {list(config.feature_layers)}, but {info.name} has {info.num_layers} "
            f"layers, and so streams 0 to {info.num_layers}. Use a head trained for this target, or train one: "
            "eaglekit train"
        )


def _variant(config: HeadConfig) -> dict[str, Any]:
    """What sets a head apart from the reference's, apart from widths."""
    default = {f.name: f.default for f in fields(HeadConfig)}
    return {n: getattr(config, n) for n in _VARIANTS if getattr(config, n) != default[n]}


def _plain_config(config: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The keys that every engine reads; RoPE in the spelling of transformers 4 and of 5."""
    kind = str(dtype).removeprefix("torch.")
    scaling = None if config.rope_scaling is None else dict(config.rope_scaling)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": config.rope_theta},
        "tie_word_embeddings": False,
        "bias": config.fc_bias,
        "torch_dtype": kind,
    }


def _head_config(folder: Path, raw: Mapping[str, Any], state: Mapping[str, Tensor]) -> HeadConfig:
    """The configuration that `raw` and the tensors' own shapes describe."""
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [key for key in needed if key not in raw]
    if missing:
        raise HeadError(f"{folder / 'config.json'}: no {', '.join(missing)}; is this a draft head?")
    own = raw.get("eaglekit") or {}
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    fc = state.get("fc.weight")
    if own.get("method") != "eagle3" and (fc is None or fc.dim() != 2):
        raise HeadError(f"{folder}: no fc.weight of two dimensions among {len(state)} tensors; not an EAGLE head")
    beside = hidden if fc is None else max(1, fc.shape[1] - hidden)
    rope = dict(raw.get("rope_parameters") or {})
    theta = raw.get("rope_theta") or rope.pop("rope_theta", None) or 10000.0
    rope.pop("rope_theta", None)
    scaling = raw.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
    variant = {name: own[name] for name in _VARIANTS if name in own}
    if isinstance(variant.get("feature_layers"), list):
        variant["feature_layers"] = tuple(variant["feature_layers"])
    try:
        return HeadConfig(
            hidden_size=hidden,
            embedding_size=own.get("embedding_size", beside),
            num_hidden_layers=raw.get("num_hidden_layers", 1),
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or hidden // heads,
            intermediate_size=raw["intermediate_size"],
            hidden_act=raw.get("hidden_act", "silu"),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(theta),
            rope_scaling=scaling,
            max_position_embeddings=raw.get("max_position_embeddings", 2048),
            vocab_size=raw["vocab_size"],
            fc_bias="fc.bias" in state,
            **variant,
        )
    except (TypeError, ValueError, ZeroDivisionError) as e:
        raise HeadError(f"{folder / 'config.json'}: unusable values ({e})") from None


def _shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a head's parameters."""
    h, d = config.hidden_size, config.head_dim
    q, kv, mlp = config.num_attention_heads * d, config.num_key_value_heads * d, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, config.fc_width)} if config.has_fc else {}
    if config.fc_bias:
        shapes["fc.bias"] = (h,)
    if config.feature_layers:
        shapes["fuse.weight"] = (h, config.feature_width)
    if config.fuse_norms:
        shapes |= {f"fuse_norms.{i}.weight": (h,) for i in range(len(config.feature_layers))}
    if config.output_norm:
        shapes["norm.weight"] = (h,)
    if config.readout_size:
        shapes["lm_head.weight"] = (config.readout_size, h)
    if config.input_norm and config.reads_embeddings:
        shapes["embed_layernorm.weight"] = (config.embedding_size,)
    if config.input_norm and config.reads_features:
        shapes["hidden_layernorm.weight"] = (h,)
    for i in range(config.num_hidden_layers):
        read = h if i or config.has_fc else config.fc_width
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (q, read), "self_attn.k_proj": (kv, read), "self_attn.v_proj": (kv, read),
            "self_attn.o_proj": (h, q),
        }  # fmt: skip
        if config.mlp:
            layer |= {"mlp.gate_proj": (mlp, h), "mlp.up_proj": (mlp, h), "mlp.down_proj": (h, mlp)}
            layer["post_attention_layernorm"] = (h,)
        if i > 0:
            layer["input_layernorm"] = (h,)
        shapes.update({f"layers.{i}.{name}.weight": shape for name, shape in layer.items()})
    return shapes


def _differences(expected: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor], config: HeadConfig) -> list[str]:
    """What is missing, of another shape, or not part of a head."""
    problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in state]
    allowed = {**expected, "embed_tokens.weight": (config.vocab_size, config.embedding_size)}
    for name, tensor in state.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue  # a constant that old versions of transformers stored
        if name not in allowed:
            problems.append(f"unexpected {name} {list(tensor.shape)}")
        elif tuple(tensor.shape) != allowed[name]:
            problems.append(f"{name} is {list(tensor.shape)}, expected {list(allowed[name])}")
    return problems


def _refuse_eagle3(folder: Path, raw: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """An EAGLE-3 head has other inputs and another layer; under EAGLE's names it would only draft nonsense."""
    hidden, fc = raw.get("hidden_size"), state.get("fc.weight")
    signs = [name for name in ("d2t", "t2d") if name in state]
    signs += ["midlayer.*"] if any(name.startswith("midlayer.") for name in state) else []
    signs += ["a config with draft_vocab_size"] if "draft_vocab_size" in raw else []
    signs += ["EAGLE-3 in architectures"] if "Eagle3" in str(raw.get("architectures")) else []
    if isinstance(hidden, int) and fc is not None and fc.dim() == 2 and fc.shape[1] >= 3 * hidden:
        # Ours may be that wide when the target's embeddings are; its configuration then says so.
        own = raw.get("eaglekit") or {}
        if own.get("embedding_size") != fc.shape[1] - hidden * (own.get("inputs") != "token"):
            signs.append(f"fc.weight of width {fc.shape[1]} for features of {hidden}")
    if signs:
        raise HeadError(f"{folder}: an EAGLE-3 head (found {', '.join(signs)}); this loader reads EAGLE heads only")


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder, with the prefixes of wrapped modules removed."""
    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    state: Any
    if safe.is_file():
        try:
            state = load_safetensors(safe.read_bytes())
        except (SafetensorError, OSError, ValueError) as e:
            raise HeadError(f"{safe}: not readable ({_first_line(e)}); the file may be cut off: get it again") from None
    elif pickled.is_file():
        try:
            state = torch.load(pickled, map_location="cpu", weights_only=True)
        except Exception as e:  # torch raises many kinds: zip errors, end of file, unpickling refused
            raise HeadError(f"{pickled}: not readable ({_first_line(e)}); the file may be cut off") from None
    else:
        raise HeadError(f"{folder}: neither model.safetensors nor pytorch_model.bin; expected a draft head")
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise HeadError(f"{pickled}: not a mapping of names to tensors")
    tensors: dict[str, Tensor] = {}
    for full, tensor in state.items():
        name = full
        while name.startswith(_PREFIXES):
            name = name.split(".", 1)[1]
        if name in tensors:
            raise HeadError(f"{folder}: tensor {name} appears twice, once as {full}")
        tensors[name] = tensor
    return tensors


def _finite(state: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    odd = sorted({str(t.dtype) for t in state.values() if t.dtype not in _DTYPES})
    if odd:
        raise HeadError(
            f"{where}: weights of {', '.join(odd)}; expected float16, bfloat16 or float32: convert the head"
        )
    bad = [name for name, t in state.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    if bad:
        raise HeadError(f"{where}: weights that are not finite numbers in {', '.join(bad)}; the head is unusable")
    return state


def _digest(draft_vocab: Tensor) -> str:
    """SHA-256 of the ids as 32-bit numbers."""
    return hashlib.sha256(draft_vocab.to(torch.int32).contiguous().numpy().tobytes()).hexdigest()


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _write(folder: Path, name: str, content: bytes | Callable[[Path], None]) -> None:
    """Put a file in its place at once."""
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            temporary.write_bytes(content)
        else:
            content(temporary)
        os.replace(temporary, folder / name)
    except OSError as e:
        raise HeadError(f"{folder / name}: cannot be written ({e.strerror})") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
