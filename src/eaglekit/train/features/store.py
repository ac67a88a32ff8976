"""Target features of training text: where a trainer gets them from, and how they are kept on disk.

Contract: a trainer reads a `FeatureSource`: `FeatureStore` here, or `LiveFeatures`, which reads the target on the fly.
Both give the same numbers, float16.

A store is a folder with `tokens.bin` (int32), shards `features-00000.bin`, ... (float16, W per token; a dialogue lies
in one shard), `index.jsonl` (one line per dialogue) and `manifest.json`: what the features are of, and checksums. It is
only ever appended to; a dialogue is complete when its index line is. Checksums are written when a shard is full and
when a writer is closed, each with the number of bytes that it covers: what a writer that was killed had appended since
then is accepted by its size alone. A store of something else, or a damaged one, is refused.

The last token's feature is never an input nor a target, so a dialogue of n tokens has n - 1 features. float16 keeps 11
bits: features have a standard deviation near 2 and outliers near 55, and training adds far more noise.

Glossary: H the target's hidden width; W = H (1 + layers), what stands for a token: its feature f, then the residual
streams of the layers asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from eaglekit.errors import DataError, InputError
from eaglekit.jsonl import read_lines
from eaglekit.models.store import write_json
from eaglekit.train.text.dataset import Dialogue, drop_torn_line

FEATURE_DTYPE = torch.float16
FeatureSink = Callable[[Dialogue, Tensor], None]
"""Takes a dialogue of n tokens and its features [n - 1 or n, W]."""

_FORMAT = 1  # of the manifest and of what it stands for
_CONVENTION = "feature = hidden state after the final norm; layer k = hidden_states[k] of transformers"
_FIXED = {"format": _FORMAT, "layer_convention": _CONVENTION, "dtype": "float16"}


@dataclass(frozen=True)
class StoredDialogue:
    """A dialogue of a source.

    Attributes:
        number: The source's own.
        length: Tokens, n; it has n - 1 features.
        spans: Of its answers, see `Dialogue`.
        greedy: See `Dialogue`.
    """

    number: int
    length: int
    spans: tuple[tuple[int, int], ...]
    greedy: bool


class FeatureSource(Protocol):
    """Dialogues with the target's features."""

    @property
    def dialogues(self) -> Sequence[StoredDialogue]:
        """What there is, one at least; which ones and their order do not depend on the kind of source."""
        ...

    def tokens(self, row: StoredDialogue) -> Tensor:
        """Its ids, int64 [n], on the CPU."""
        ...

    def read(self, rows: Sequence[StoredDialogue]) -> list[Tensor]:
        """Features of each row, float16 [n - 1, W], on the CPU, the caller's own.

        A row with a value that float16 cannot hold, which no store takes, is given in float32.
        """
        ...


class Subset:
    """Some dialogues of a source, which is one too."""

    def __init__(self, source: FeatureSource, dialogues: Sequence[StoredDialogue]) -> None:
        self._source = source
        self.dialogues: Sequence[StoredDialogue] = list(dialogues)

    def tokens(self, row: StoredDialogue) -> Tensor:
        """See `FeatureSource`."""
        return self._source.tokens(row)

    def read(self, rows: Sequence[StoredDialogue]) -> list[Tensor]:
        """See `FeatureSource`."""
        return self._source.read(rows)


@dataclass(frozen=True)
class FeatureFacts:
    """What features are of; the manifest holds it.

    Attributes:
        hidden_size: H.
        layers: Residual streams behind f, ascending; layer k is `hidden_states[k]` of transformers.
        target: The target's name.
        weights: Digest of its weights.
        revision: Of the target on the hub, where that is known.
        tokenizer: Digest.
        chat_template: Digest.
    """

    hidden_size: int
    layers: tuple[int, ...] = ()
    target: str = ""
    weights: str = ""
    revision: str = ""
    tokenizer: str = ""
    chat_template: str = ""

    def __post_init__(self) -> None:
        """Refuse layers that are no ascending ids.

        Raises:
            InputError: see there.
        """
        if list(self.layers) != sorted({k for k in self.layers if k >= 0}):
            raise InputError(f"layers {list(self.layers)}: expected ids from 0 on, each once, in ascending order")

    @property
    def width(self) -> int:
        """W."""
        return self.hidden_size * (1 + len(self.layers))


def differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between two sets of facts, for a message; of values that nobody could read their names alone."""
    texts = []
    for key in {**now, **there}:
        old, new = there.get(key), now.get(key)
        if old != new:
            long = max(len(str(old)), len(str(new))) > 40
            texts.append(key if long else f"{key} {old} there, {new} now")
    return ", ".join(texts)


def read_index(path: Path) -> list[StoredDialogue]:
    """The complete dialogues of the store at `path`; none when there is no store.

    Raises:
        DataError: see `read_lines`; or a line of the index is not one.
    """
    return [row for row, _ in _read_index(path)]


def _read_index(path: Path) -> list[tuple[StoredDialogue, int]]:
    """Each dialogue and its shard."""
    index = path / "index.jsonl"
    rows: list[tuple[StoredDialogue, int]] = []
    for number, row in read_lines(index) if index.exists() else ():
        try:
            spans = tuple((int(a), int(b)) for a, b in row["spans"])
            dialogue = StoredDialogue(len(rows), int(row["tokens"]), spans, bool(row["greedy"]))
            rows.append((dialogue, int(row["shard"])))
        except (ValueError, KeyError, TypeError) as e:
            raise DataError(f"{index}:{number}: not an index line ({e}); delete {path} and run again") from None
    return rows


def _shard_name(number: int) -> str:
    return f"features-{number:05d}.bin"


def _sizes(path: Path, rows: Sequence[tuple[StoredDialogue, int]], width: int) -> dict[str, int]:
    """Bytes of each file that the index speaks of."""
    index = path / "index.jsonl"
    sizes = {"tokens.bin": 0, "index.jsonl": index.stat().st_size if index.exists() else 0}
    for row, shard in rows:
        name = _shard_name(shard)
        sizes["tokens.bin"] += row.length * 4
        sizes[name] = sizes.get(name, 0) + (row.length - 1) * width * 2
    return sizes


def _read_manifest(path: Path, facts: FeatureFacts) -> dict[str, dict[str, Any]]:
    """What the manifest says of files: name -> bytes and sha256 of these; nothing where there is no store yet.

    Raises:
        DataError: it is missing or no manifest, or the store is of something else; names each difference.
    """
    file = path / "manifest.json"
    if not file.exists():
        if (path / "index.jsonl").exists():
            raise DataError(f"{file}: missing, so that nobody knows what features these are; delete {path}")
        return {}
    try:
        found = json.loads(file.read_bytes())
        files = {
            str(name): {"bytes": int(r["bytes"]), "sha256": str(r["sha256"])} for name, r in found["files"].items()
        }
        there = {key: value for key, value in found.items() if key not in ("files", "width")}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise DataError(f"{file}: not a manifest ({type(e).__name__}: {e}); delete {path} and run again") from None
    now = json.loads(json.dumps({**_FIXED, **asdict(facts)}))
    if not (there.get("revision") and now["revision"]):  # a folder on disk knows none
        there["revision"] = now["revision"]
    wrong = differences(there, now)
    if wrong:
        raise DataError(f"{path}: features of something else ({wrong}); use another --output, or delete {path}")
    return files


def _hash(file: Path, digest: Any, start: int, end: int) -> Any:
    """`digest`, of the bytes before `start`, goes on to `end`."""
    if start == end:
        return digest
    with file.open("rb") as f:
        f.seek(start)
        while start < end and (block := f.read(min(1 << 20, end - start))):
            digest.update(block)
            start += len(block)
    return digest


def _check(path: Path, records: Mapping[str, Mapping[str, Any]], verify: bool = True) -> dict[str, Any]:
    """Compare files with what the manifest says: if `verify`, the digest of the bytes of each that it covers.

    Raises:
        DataError: one is too short, or damaged; says which.
    """
    _check_sizes(path, {name: record["bytes"] for name, record in records.items()})
    digests: dict[str, Any] = {}
    for name, record in records.items() if verify else ():
        digests[name] = _hash(path / name, hashlib.sha256(), 0, record["bytes"])
        found = digests[name].hexdigest()
        if found != record["sha256"]:
            raise DataError(
                f"{path / name}: damaged: SHA-256 {found} of its first {record['bytes']} bytes, expected "
                f"{record['sha256']}; delete {path} and run again"
            )
    return digests


def _check_sizes(path: Path, sizes: Mapping[str, int]) -> None:
    """Files may be longer, by a dialogue that was not written to its end.

    Raises:
        DataError: one is shorter.
    """
    for name, size in sizes.items():
        file = path / name
        found = file.stat().st_size if file.exists() else 0
        if found < size:
            raise DataError(f"{file}: {found} bytes, shorter than the {size} that it had; delete {path} and run again")


class FeatureWriter:
    """Appends dialogues to a store; one at a time may be open.

    Args:
        path: The store, which is opened or created; a dialogue that was not written to its end is cut off.
        facts: What the features are of.
        shard_bytes: A shard is closed once it has so many.

    Raises:
        DataError: the store is of something else, or damaged.
    """

    def __init__(self, path: Path, facts: FeatureFacts, shard_bytes: int = 512 << 20) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._path, self._facts, self._shard_bytes = path, facts, shard_bytes
        self._records = _read_manifest(path, facts)
        digests = _check(path, self._records)
        drop_torn_line(path / "index.jsonl")
        rows = _read_index(path)
        self._sizes = _sizes(path, rows, facts.width)
        _check_sizes(path, self._sizes)
        self._digests: dict[str, Any] = {}  # running, of what is in each file
        for name, size in self._sizes.items():
            known = self._records.get(name, {"bytes": 0})["bytes"]
            self._digests[name] = _hash(path / name, digests.get(name, hashlib.sha256()), known, size)
        self.count = len(rows)
        self._shard = rows[-1][1] if rows else 0
        self._sizes.setdefault(_shard_name(self._shard), 0)
        self._files = {name: self._open(name) for name in ("tokens.bin", "index.jsonl", _shard_name(self._shard))}
        self._write_manifest()

    def _open(self, name: str) -> Any:
        f = (self._path / name).open("ab")
        f.truncate(self._sizes[name])
        return f

    def append(self, dialogue: Dialogue, features: Tensor) -> None:
        """Add a dialogue of n tokens with `features` [n - 1 or n, W].

        Raises:
            DataError: they are not that, or float16 cannot hold one of their values.
        """
        n = len(dialogue.ids)
        kept = features[: n - 1].to(FEATURE_DTYPE).contiguous()
        if tuple(kept.shape) != (n - 1, self._facts.width):
            raise DataError(f"features {list(features.shape)} for {n} tokens of width {self._facts.width}")
        if not bool(torch.isfinite(kept).all()):
            token, place = (~torch.isfinite(kept)).nonzero()[0].tolist()
            raise DataError(
                f"feature {place} of token {token} is {float(features[token, place])}, which the float16 of a store "
                "cannot hold (65504 at most); read features on the fly: --feature-cache-gb 0"
            )
        if self._full():
            self._files.pop(_shard_name(self._shard)).close()
            self._shard += 1
            name = _shard_name(self._shard)
            self._sizes[name] = 0
            self._files[name] = self._open(name)
        line = {"tokens": n, "spans": dialogue.spans, "greedy": dialogue.greedy, "shard": self._shard}
        self._write(_shard_name(self._shard), kept.numpy().tobytes())
        self._write("tokens.bin", np.asarray(dialogue.ids, dtype=np.int32).tobytes())
        self._write("index.jsonl", (json.dumps(line, separators=(",", ":")) + "\n").encode())
        self.count += 1
        if self._full():
            self._write_manifest()

    def _full(self) -> bool:
        return self._sizes[_shard_name(self._shard)] >= self._shard_bytes

    def _write(self, name: str, data: bytes) -> None:
        self._files[name].write(data)
        self._files[name].flush()
        self._sizes[name] += len(data)
        self._digests.setdefault(name, hashlib.sha256()).update(data)

    def _write_manifest(self) -> None:
        for name, digest in self._digests.items():
            self._records[name] = {"bytes": self._sizes[name], "sha256": digest.hexdigest()}
        facts = {**_FIXED, **asdict(self._facts), "width": self._facts.width}
        write_json(self._path / "manifest.json", {**facts, "files": dict(sorted(self._records.items()))})

    def close(self) -> None:
        """Write the checksums and close the files."""
        self._write_manifest()
        for f in self._files.values():
            f.close()


@dataclass(frozen=True)
class _Place:
    """Where a dialogue lies: its first token, its shard, and its first feature there."""

    token: int
    shard: int
    feature: int


class FeatureStore:
    """Read access to a store; features stay on disk until they are used. See `FeatureSource`.

    Args:
        path: The store.
        facts: What its features are expected to be of.
        verify: Compare checksums, which takes a second per GB.

    Raises:
        DataError: it is empty, of something else, or damaged.
    """

    def __init__(self, path: Path, facts: FeatureFacts, verify: bool = True) -> None:
        self._width = facts.width
        self._path = path
        _check(path, _read_manifest(path, facts), verify)
        rows = _read_index(path)
        if not rows:
            raise DataError(f"{path}: no training dialogues; nothing to train on")
        self._sizes = _sizes(path, rows, facts.width)
        _check_sizes(path, self._sizes)
        self.dialogues: Sequence[StoredDialogue] = [row for row, _ in rows]
        self._places: list[_Place] = []
        token, features = 0, dict.fromkeys((shard for _, shard in rows), 0)
        for row, shard in rows:
            self._places.append(_Place(token, shard, features[shard]))
            token, features[shard] = token + row.length, features[shard] + row.length - 1
        self._tokens = np.memmap(path / "tokens.bin", dtype=np.int32, mode="r", shape=(token,))
        self._shards: dict[int, np.ndarray] = {}

    def by_tokens(self) -> dict[tuple[int, ...], StoredDialogue]:
        """Token ids -> the first dialogue with them."""
        rows: dict[tuple[int, ...], StoredDialogue] = {}
        for row in self.dialogues:
            rows.setdefault(tuple(self.tokens(row).tolist()), row)
        return rows

    def tokens(self, row: StoredDialogue) -> Tensor:
        """int64 [n]."""
        start = self._places[row.number].token
        return torch.from_numpy(self._tokens[start : start + row.length].astype(np.int64))

    def read(self, rows: Sequence[StoredDialogue]) -> list[Tensor]:
        """float16 [n - 1, W] of each row."""
        found = []
        for row in rows:
            place = self._places[row.number]
            part = self._mapped(place.shard)[place.feature : place.feature + row.length - 1]
            found.append(torch.from_numpy(np.array(part)))
        return found

    def _mapped(self, shard: int) -> np.ndarray:
        if shard not in self._shards:
            name = _shard_name(shard)
            shape = (self._sizes[name] // (2 * self._width), self._width)
            self._shards[shard] = np.memmap(self._path / name, dtype=np.float16, mode="r", shape=shape)
        return self._shards[shard]
