"""The shared library: compiled once, kept in the cache directory.

Its name has everything in it that matters: the source, the compiler, the processor.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from eaglekit.models.store import cache_dir, sha256

_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-fno-math-errno", "-ffp-contract=fast", "-w")


def compiled() -> Path:
    """The shared library: kept from an earlier start, or compiled now."""
    source = Path(__file__).with_name("kernels.cpp")
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    openmp = _torch_openmp()
    facts = (source.read_bytes(), compiler, openmp, _FLAGS, platform.machine(), _processor())
    folder = cache_dir() / "kernels"
    library = folder / f"kernels-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.so"
    digest = library.with_suffix(".sha256")
    if library.exists() and digest.exists() and digest.read_text(encoding="utf-8") == sha256(library):
        return library  # a damaged one would end the process when it is mapped
    if compiler is None:
        raise OSError("no C++ compiler was found (c++, g++ or clang++)")
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        # The very OpenMP runtime that torch has loaded: two pools of threads would fight for the cores.
        parallel = ("-fopenmp", "-x", "none", openmp) if openmp else ()
        command = [compiler, *_FLAGS, "-x", "c++", str(source), *parallel, "-o", temporary]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise OSError(f"{compiler} failed: {done.stderr[-200:]}")
        digest.write_text(sha256(Path(temporary)), encoding="utf-8")
        os.replace(temporary, library)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return library


def _torch_openmp() -> str:
    """The GNU OpenMP runtime that comes with torch, or an empty string."""
    package = Path(torch.__file__).parent
    found = [f for folder in (package / "lib", package.parent / "torch.libs") for f in folder.glob("libgomp*.so*")]
    return str(min(found)) if found else ""


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
        return "".join(line for line in lines if line.startswith(("flags", "Features", "model name")))
    except OSError:
        return platform.processor()
