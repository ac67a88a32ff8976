"""Model directories on disk: made once, checked on every start; what the built-in target and GGUF files are kept in.

Contract: a *model directory* is a plain transformers directory (configuration, tokenizer, weights) with a
`manifest.json` that has every file's size, modification time and SHA-256. It is built aside, in `workspace`, and
renamed into place by `install`, so it is complete or absent; what was killed is redone, never half used. One process
builds at a time, the others wait. `is_intact` opens a complete directory without a lock, without writing: sizes are
compared, and a file whose modification time changed is hashed again. Errors of the file system become `CacheError`.
Nothing is written to stdout, and nothing slow is imported. The environment is read in `cache_dir` alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglekit.errors import CacheError, EaglekitError

_FORMAT = 1  # of the manifest and of what it stands for; a directory of another format is made anew


@dataclass(frozen=True)
class Record:
    """What is known of a file: size in bytes, modification time, SHA-256."""

    size: int
    mtime_ns: int
    sha256: str


def cache_dir() -> Path:
    """The directory of everything kept on disk: `EAGLEKIT_CACHE` if set, else the user's cache directory."""
    chosen = os.environ.get("EAGLEKIT_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("eaglekit"))


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def record_of(path: Path, known: Record | None = None) -> Record:
    """What `path` is now; hashed unless `known` has its size and modification time."""
    stat = path.stat()
    if known and (known.size, known.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
        return known
    return Record(stat.st_size, stat.st_mtime_ns, sha256(path))


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path`, which is replaced as a whole."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def is_intact(entry: Path, remedy: str, full: bool = False) -> bool:
    """Whether `entry` holds a complete model directory; False if there is none.

    Raises:
        CacheError: there is one, and a file of it is not as the manifest says.
    """
    path = entry / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["format"] != _FORMAT:
            return False
        files = {name: Record(**record) for name, record in manifest["files"].items()}
    except (FileNotFoundError, NotADirectoryError) as error:
        if entry.is_dir():
            raise CacheError(f"{entry} has no manifest.json, expected a whole directory; {remedy}") from error
        return False
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CacheError(f"{path} cannot be read as a manifest; {remedy}") from error
    except OSError as error:
        raise CacheError(f"{path} cannot be read ({error.strerror}); make it readable") from error
    now = {name: _checked_file(entry / name, record, remedy, full) for name, record in files.items()}
    if now != files:  # only modification times changed: the files were copied or touched
        manifest["files"] = {name: dataclasses.asdict(record) for name, record in now.items()}
        with contextlib.suppress(OSError):
            write_json(path, manifest)
    return True


def _checked_file(path: Path, expected: Record, remedy: str, full: bool) -> Record:
    try:
        size = path.stat().st_size
        if size != expected.size:
            raise CacheError(f"{path} is damaged: {size} bytes, expected {expected.size}; {remedy}")
        got = record_of(path, None if full else expected)
    except OSError as error:
        reason = f"{path} cannot be read ({error.strerror}), expected {expected.size} bytes"
        raise CacheError(f"{reason}; {remedy}") from error
    if got.sha256 != expected.sha256:
        raise CacheError(f"{path} is damaged: SHA-256 {got.sha256}, expected {expected.sha256}; {remedy}")
    return got


def install(built: Path, entry: Path, work: Path, source: dict[str, str]) -> None:
    """Write the manifest of `built` and give it the name `entry`, in place of what may be there."""
    files = {path.name: dataclasses.asdict(record_of(path)) for path in sorted(built.iterdir())}
    write_json(built / "manifest.json", {"format": _FORMAT, "source": source, "files": files})
    entry.parent.mkdir(exist_ok=True)
    if entry.exists():
        os.replace(entry, work / "replaced")
    os.replace(built, entry)


def say(progress: bool, line: str) -> None:
    """Tell the user on stderr, if `progress`."""
    if progress:
        print(f"eaglekit: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def workspace(progress: bool, needed: int) -> Iterator[Path]:
    """An empty directory in the cache, for the one process that may build now; gone afterwards.

    Raises:
        CacheError: the cache directory cannot be written, or has no room for the `needed` bytes.
    """
    import filelock  # slow to import, and not needed when nothing is to be built

    cache = cache_dir()
    with _disk_errors(cache, needed), contextlib.ExitStack() as cleanup:
        cache.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(cache / ".eaglekit-lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            say(progress, f"waiting for another process that prepares a model in {cache} ...")
            lock.acquire()
        cleanup.callback(lock.release)
        work = cache / ".eaglekit-work"
        shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed
        work.mkdir()
        cleanup.callback(shutil.rmtree, work, ignore_errors=True)
        yield work


@contextlib.contextmanager
def _disk_errors(cache: Path, needed: int) -> Iterator[None]:
    """Turn what the file system raises into `CacheError`."""
    try:
        yield
    except EaglekitError:
        raise
    except Exception as error:
        if is_disk_full(error):
            raise _disk_full(cache, needed) from error
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            raise CacheError(
                f"the cache directory {cache} cannot be used ({reason}); "
                "set EAGLEKIT_CACHE to a directory that you can write"
            ) from error
        raise


def require_space(work: Path, needed: int) -> None:
    """Raise CacheError unless the disk of `work` has room for `needed` bytes."""
    if shutil.disk_usage(work).free < needed:
        raise _disk_full(work.parent, needed)


def is_disk_full(error: Exception) -> bool:
    """Also true of the errors of safetensors, which are not OSErrors."""
    return getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in str(error)


def _disk_full(cache: Path, needed: int) -> CacheError:
    free = shutil.disk_usage(cache).free
    return CacheError(
        f"the disk of {cache} is full: {needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free; "
        "free some, or set EAGLEKIT_CACHE to a directory on another disk"
    )
