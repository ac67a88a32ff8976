"""Loading a target and its tokenizer: from a directory in the Hugging Face format, or from the hub.

Contract: the family is judged before its weights are read; a checkpoint that lacks weights is refused; code that comes
with a model is never run. What transformers raises about unreadable files becomes one line, and its bars and reports
are not shown; its settings are as before afterwards.
"""

from __future__ import annotations

import json
import logging as stdlib_logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from eaglekit.errors import EaglekitError, InputError, TargetError
from eaglekit.models.checks import unused_weights
from eaglekit.models.fast import FastTarget, fast_target, why_not_fast
from eaglekit.models.native import native
from eaglekit.models.packed import pack_linears
from eaglekit.models.stack import WEIGHTS, Weights
from eaglekit.models.support import one_line, refuse_unsupported, unsupported

if TYPE_CHECKING:
    from eaglekit.models.hf import HFTarget


def load_target(
    path_or_id: str | Path, *, device: str = "auto", dtype: str | torch.dtype = "auto", weights: str = "auto"
) -> tuple[FastTarget | HFTarget, Any]:
    """A target and its tokenizer, by compiled kernels where they can run it and are wanted.

    Args:
        path_or_id: A directory in the Hugging Face format, or the name of a hub repository.
        device: See `load_hf`.
        dtype: See `load_hf`; float32 and "auto" only go with packed weights.
        weights: "auto", "stock", or a format of packed matrices, for CPUs: fp32, fp16, int8. Families that
            `FastTarget` cannot run keep transformers' modules, with their linear layers packed.

    Raises:
        TargetError: there is no such model, or its files cannot be read or lack weights.
        UnsupportedModelError: it cannot be a target.
        InputError: `device`, `dtype` or `weights` is not one, or they do not go together.
    """
    if weights not in ("auto", "stock", *WEIGHTS):
        raise InputError(f"weights {weights!r}: expected auto, stock, {', '.join(WEIGHTS)}")
    where, packed = pick_device(device), weights in WEIGHTS
    plain = dtype in ("auto", "float32", torch.float32)
    if packed and (where.type != "cpu" or not plain):
        raise InputError(
            f"weights {weights!r} with device {where} and dtype {dtype}: packed weights are for a CPU and float32 "
            "activations; drop --weights, or take --device cpu and --dtype auto"
        )
    if weights == "stock" or where.type != "cpu" or not plain or (weights == "auto" and native() is None):
        return load_hf(path_or_id, device=device, dtype=dtype)
    chosen = cast(Weights, weights if packed else "fp32")
    folder = Path(_locate(path_or_id))
    if folder.is_dir():
        found = _load_fast(folder, chosen)
        if found is not None:
            return found
    stock, tokenizer = load_hf(path_or_id, device=device, dtype=dtype)
    if not why_not_fast(stock.model.config):
        return fast_target(stock.model, chosen, str(path_or_id)), tokenizer
    if packed:
        pack_linears(stock.model, chosen)
    return stock, tokenizer


def _load_fast(folder: Path, weights: Weights) -> tuple[FastTarget, Any] | None:
    """A `FastTarget` from the safetensors files of `folder`, one tensor at a time; None where that cannot be."""
    import safetensors

    source = str(folder)
    config = _read_config(source)
    if why_not_fast(config):
        return None
    try:
        reader = _TensorReader(_safetensors_files(folder))
        names = [name for name in reader.names if not name.endswith("rotary_emb.inv_freq")]
        if not names:
            return None
        target = FastTarget(
            config, reader.tensor, names, weights=weights, name=source, generation=_generation_config(folder, config)
        )
        finite = target.lm_head(target.open(1, 4).prefill([torch.tensor([0, 1, 2, 3])]).features).isfinite().all()
    except (KeyError, OSError, TypeError, ValueError, RuntimeError, safetensors.SafetensorError):
        return None  # the stock loader says what is wrong
    if not finite:
        return None
    target.notes = unused_weights(source, sorted(set(names) - reader.read))
    with _quiet():
        return target, _load_tokenizer(source)


def _safetensors_files(folder: Path) -> list[Path]:
    """Those that transformers reads: one of the usual name, or the parts that an index names; none otherwise."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    try:
        parts = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(parts))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


class _TensorReader:
    """Tensors of safetensors files, one by one. Files are mapped anew now and then: what was read leaves memory.

    Args:
        files: Of one checkpoint.

    Raises:
        safetensors.SafetensorError: one of them is not such a file.
    """

    _SOME = 16 << 20  # bytes read from one mapping

    def __init__(self, files: Sequence[Path]) -> None:
        import safetensors

        self._open: Any = safetensors.safe_open
        self._where: dict[str, Path] = {}
        for file in files:
            opened: Any = self._open(file, "pt")
            self._where.update(dict.fromkeys(opened.keys(), file))
        self._mapped: tuple[Path, Any] | None = None
        self._bytes = 0
        self.names = list(self._where)
        self.read: set[str] = set()

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor.

        Raises:
            KeyError: there is none of that name.
        """
        file = self._where[name]
        if self._mapped is None or self._mapped[0] != file or self._bytes > self._SOME:
            self._mapped, self._bytes = (file, self._open(file, "pt")), 0
        found: torch.Tensor = self._mapped[1].get_tensor(name)
        self._bytes += found.nbytes
        self.read.add(name)
        return found


def _generation_config(folder: Path, config: Any) -> Any:
    """The model's `GenerationConfig`, as transformers makes it."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        with _quiet(), _as_target_error(str(folder)):
            return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(config)


def _read_config(source: str) -> Any:
    """The configuration, judged before anything else is read."""
    import transformers

    with _quiet(), _as_target_error(source):
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    return config


def load_hf(path_or_id: str | Path, *, device: str = "auto", dtype: str | torch.dtype = "auto") -> tuple[HFTarget, Any]:
    """A model and its tokenizer, from a directory or the Hugging Face hub.

    The configuration is read, and judged, before any weights are.

    Args:
        path_or_id: A directory in the Hugging Face format, or the name of a hub repository.
        device: "auto" (cuda, else mps, else cpu) or a device such as "cuda:1".
        dtype: "auto" (float32 on the CPU, the checkpoint's own elsewhere), or a dtype or its name.

    Returns:
        The target, its parameters frozen, and the tokenizer; None where the directory has none.

    Raises:
        TargetError: there is no such model, or its files cannot be read or lack weights.
        UnsupportedModelError: it cannot be a target.
        InputError: `device` or `dtype` is not one.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from eaglekit.models.hf import HFTarget

    where = pick_device(device)
    kind = _pick_dtype(dtype, where)
    source = _locate(path_or_id)
    config = _read_config(source)
    try:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    except ImportError:
        model_class = None
    refuse_unsupported(config, source, model_class)
    if model_class is None:
        raise unsupported(source, f"{config.model_type}, not a causal language model", "one that generates text")
    with _quiet(), _as_target_error(source):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=kind, output_loading_info=True, trust_remote_code=False
        )
    model, report = loaded
    if report["missing_keys"]:
        names = sorted(report["missing_keys"])
        raise TargetError(
            f"{source}: {len(names)} weights are missing, {names[0]} first; expected a complete checkpoint; "
            "copy it again"
        )
    with _quiet():
        tokenizer = _load_tokenizer(source)
    model = model.requires_grad_(False).to(where)
    target = HFTarget(model, source)
    target.notes = unused_weights(source, sorted(report["unexpected_keys"]))
    return target, tokenizer


def _locate(path_or_id: str | Path) -> str:
    """The directory with a configuration, or the hub name, that is meant."""
    path = Path(path_or_id).expanduser()
    if len(str(path)) > 4096 or any(len(part) > 255 for part in path.parts):
        raise TargetError(f"a name of {len(str(path))} characters is no path and no hub name; expected one")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise TargetError(f"{path}: a directory without config.json; expected a model in the Hugging Face format")
        return str(path)
    if path.exists():
        raise TargetError(f"{path}: a file; expected the directory that holds it, or a hub name such as org/model")
    name = str(path_or_id)
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or not name:
        raise TargetError(f"{name!r}: no such directory; expected a model's, or a hub name such as org/model")
    return name


def _load_tokenizer(source: str) -> Any:
    import transformers

    patterns = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken")
    if Path(source).is_dir() and not any(any(Path(source).glob(p)) for p in patterns):
        return None
    with _as_target_error(source):
        return transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)


@contextmanager
def _as_target_error(source: str) -> Iterator[None]:
    """Turn what transformers raises about unreadable files into one line."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, EaglekitError):
        raise
    except Exception as e:  # transformers and what it calls raise every kind on a broken file
        if Path(source).is_dir():
            raise TargetError(f"{source}: cannot be read ({one_line(e)}); check or copy its files again") from e
        raise TargetError(
            f"{source}: no such directory, and not available from the Hugging Face hub or its cache ({one_line(e)}); "
            f"check the name, or download it where there is a network: hf download {source}"
        ) from e


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from showing bars and loading reports; afterwards it is as before."""
    from transformers import utils

    logging: Any = utils.logging
    hub = stdlib_logging.getLogger("huggingface_hub")
    hub_level = hub.level
    hub.setLevel(stdlib_logging.ERROR)  # it would report every try to connect
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        hub.setLevel(hub_level)
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def pick_device(device: str) -> torch.device:
    """The device of this name; of "auto", an accelerator where there is one.

    Raises:
        InputError: it cannot be used.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ValueError, TypeError) as e:
        raise InputError(f"device {device!r}: not usable ({one_line(e)}); expected auto, cpu, cuda or mps") from None
    return torch.device(device)


def _pick_dtype(dtype: str | torch.dtype, device: torch.device) -> str | torch.dtype:
    """What transformers is asked for: a dtype, or "auto" for the checkpoint's."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in known:
        raise InputError(f"dtype {dtype!r}: expected auto, {', '.join(known)}")
    return known[dtype]
