"""GGUF files as model directories that transformers reads, converted once and found again by content.

Contract: what is made of a file, and how it is kept, is `store`'s. Weights become fp32; torch and transformers are
imported only to convert, and keep their settings and their silence.

    <cache>/gguf/<start of SHA-256>/   the model directory of a GGUF; `index.json` keeps hashes by path
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eaglekit.errors import TargetError
from eaglekit.models import store


def load_gguf(path: str | Path, progress: bool = True) -> Path:
    """The model directory of any GGUF that transformers can read, converted at the first call.

    Args:
        path: The file. A copy of it elsewhere shares the directory: it is found by content.
        progress: Say on stderr what is being waited for.

    Raises:
        TargetError: no such file, not a GGUF, or not one that transformers can read.
        CacheError: the kept copy is damaged, the disk is full or cannot be written.
    """
    source = _checked_gguf(Path(path))
    index = store.cache_dir() / "gguf" / "index.json"
    known = _read_index(index)
    record = store.record_of(source, known.get(str(source)))
    entry = index.parent / record.sha256[:16]
    remedy = f"delete {entry} and run again"
    if not store.is_intact(entry, remedy):
        needed = _weights_size(source)
        with store.workspace(progress, needed) as work:
            if not store.is_intact(entry, remedy):
                store.require_space(work, needed)
                built = work / "built"
                built.mkdir()
                store.say(progress, f"converting {source.name} to a model directory, once ...")
                convert(_alone(source, work), built)
                store.install(built, entry, work, {"gguf_sha256": record.sha256})
    if known.get(str(source)) != record:
        with contextlib.suppress(OSError):  # it only saves hashing the file again
            store.write_json(index, {k: dataclasses.asdict(v) for k, v in {**known, str(source): record}.items()})
    return entry


def convert(gguf: Path, folder: Path) -> None:
    """Write the model of `gguf`, in fp32, and its tokenizer to `folder` as transformers reads them.

    Raises:
        TargetError: transformers cannot read it.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    try:
        with _silence():
            tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
            )
            model, loading = loaded
            if lacking := sorted(map(str, {*loading["missing_keys"], *loading["mismatched_keys"]})):
                raise ValueError(f"it has no usable weights for {', '.join(lacking)}")  # else random ones
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config  # the weights are no longer quantized
            model.config.save_pretrained(folder)
            model.generation_config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        weights = folder / "model.safetensors"
        save_file(_untied(model.state_dict()), weights, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", weights)  # safetensors makes it private to the user
    except Exception as error:  # whatever transformers raises on a file that it does not understand
        if store.is_disk_full(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise TargetError(
            f"transformers {transformers.__version__} cannot read {gguf.name} ({reason}); expected a GGUF of "
            "a decoder that it supports; name the model's Hugging Face directory instead"
        ) from error


def _untied(state: dict[str, Any]) -> dict[str, Any]:
    """`state` without the tensors that share their memory with an earlier one, such as a tied lm_head."""
    first: dict[int, str] = {}
    for name, tensor in state.items():
        first.setdefault(tensor.data_ptr(), name)
    return {name: state[name].contiguous() for name in first.values()}


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """No bars, warnings or logs of transformers inside; its settings are as before outside."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401  # loggers keep their import's stderr
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    sink = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stderr(sink), contextlib.redirect_stdout(sink):
        warnings.simplefilter("ignore")
        logging.set_verbosity(50)  # critical
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)


def _checked_gguf(path: Path) -> Path:
    """`path` resolved; raises TargetError unless it is a file that begins like a GGUF."""
    try:
        with path.expanduser().open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise TargetError(f"{path} cannot be read ({error.strerror}); give the path of a GGUF file") from error
    if magic != b"GGUF":
        raise TargetError(f"{path} is not a GGUF file: it begins with {magic!r}, expected b'GGUF'; download it again")
    return path.expanduser().resolve()


def _read_index(path: Path) -> dict[str, store.Record]:
    """Hashes of GGUF files by path; empty if it cannot be read, as it only saves time."""
    try:
        return {name: store.Record(**record) for name, record in json.loads(path.read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _weights_size(gguf: Path) -> int:
    """Bytes of a GGUF's weights in fp32, or a lower bound if its header cannot be read."""
    try:
        import gguf as reader

        return 4 * sum(int(tensor.n_elements) for tensor in reader.GGUFReader(gguf).tensors)
    except Exception:  # transformers says what is wrong with it, in `convert`
        return gguf.stat().st_size


def _alone(gguf: Path, work: Path) -> Path:
    """A link to `gguf` in a directory of its own, as transformers would read a `tokenizer.json` beside it."""
    link = work / "source" / gguf.name
    link.parent.mkdir()
    try:
        link.symlink_to(gguf)
    except OSError:  # not permitted on this system
        return gguf
    return link
