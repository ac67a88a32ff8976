"""What training data were made from: digests of targets, tokenizers and text, and the note of them in a folder."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eaglekit.errors import DataError
from eaglekit.jsonl import read_lines
from eaglekit.models.head import HeadConfig
from eaglekit.models.hf import HFTarget
from eaglekit.train.features.store import FeatureFacts, differences
from eaglekit.train.text.forms import is_dataset


def describe(target: HFTarget, tokenizer: Any, name: str, layers: Sequence[int] = ()) -> FeatureFacts:
    """What features of this target, called `name`, are of."""
    return FeatureFacts(
        hidden_size=target.info.hidden_size,
        layers=tuple(layers),
        target=name,
        weights=digest_of_weights(target.model),
        revision=str(getattr(target.model.config, "_commit_hash", None) or ""),
        tokenizer=_digest_of_tokenizer(tokenizer),
        chat_template=hashlib.sha256(str(getattr(tokenizer, "chat_template", "")).encode()).hexdigest(),
    )


def claim(folder: Path, source: Mapping[str, Any], main: bool) -> None:
    """Note in `folder` what its files are made from, if `main`, or see that they are made from the same.

    Raises:
        DataError: they are not; says what differs.
    """
    file = folder / "source.json"
    now = json.loads(json.dumps(source))
    if file.exists():
        try:
            there: dict[str, Any] = next((row for _, row in read_lines(file)), {})
        except DataError as e:
            raise DataError(f"{e}, or delete {folder} and run again") from None
        wrong = differences(there, now)
    else:
        made = any((folder / name).exists() for name in ("answers.jsonl", "talks.jsonl", "features"))
        wrong = "source.json is missing" if made or not main else ""
    if wrong:
        raise DataError(
            f"{folder}: made for another target or from other data ({wrong}); use another --output, or delete {folder}"
        )
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(source) + "\n", encoding="utf-8")
        os.replace(temporary, file)


def digest_of_data(path: Path) -> str:
    """Of a file; a dataset is told by its name, its rows by their tokens."""
    if is_dataset(path):
        return str(path)
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def digest_of_ids(rows: Iterable[Sequence[int]]) -> str:
    """Of rows of token ids, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(array("q", [len(row), *row]).tobytes())
    return digest.hexdigest()


def digest_of_weights(model: Any, numbers: int | None = 64) -> str:
    """Of the first `numbers` of each weight, of all with None.

    A few do for a large model: names alone do not tell a fine-tuned one from the one that it was made from.
    """
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(name.encode() + weight.detach().flatten()[:numbers].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def shape_of_head(config: HeadConfig) -> dict[str, Any]:
    """Its fields, as facts of a training."""
    return {f"head {name}": value for name, value in asdict(config).items()}


def _digest_of_tokenizer(tokenizer: Any) -> str:
    """Of all that decides which ids a text gets."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        facts = {"vocabulary": tokenizer.get_vocab(), "special": tokenizer.all_special_tokens}
    else:  # truncation and padding are what the last call asked for
        facts = {key: value for key, value in json.loads(fast.to_str()).items() if key not in ("truncation", "padding")}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
