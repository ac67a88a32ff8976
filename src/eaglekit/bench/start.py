"""How long it takes from nothing to the first token, and how much memory an answer needs.

Contract: every number comes from a fresh process, for this one has everything loaded already. Formats of weights
alternate. The clock runs from before the process is started to when it has its first token; it has the threads of this
one. Files are read once before, so that disks are not measured.

Memory, bytes. The peak of a process is the system's count of resident pages, mapped files included, see `resident`.
`libraries` is what was resident when everything was imported and nothing loaded. `weights` and `caches` are the tensors
that target, drafter and session hold.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eaglekit.api import Model
from eaglekit.bench.run import spread
from eaglekit.engine.decode import Session
from eaglekit.errors import InputError

_PROGRAM = """
import json, sys, time
target, head, weights, prompt, tokens = json.loads(sys.argv[1])
import eaglekit
imported = time.time()
model = eaglekit.load(target, head, device="cpu", weights=weights)
loaded = time.time()
model.generate(prompt, max_new_tokens=1)
first = time.time()
model.generate(prompt, max_new_tokens=tokens)
from eaglekit.bench.start import held
from eaglekit.models.memory import resident
print(json.dumps({"imported": imported, "loaded": loaded, "first": first, **resident(),
                  **held(model, len(prompt) + tokens)}))
"""
_IMPORTS = """
import json
import eaglekit.api, eaglekit.models.load
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
from eaglekit.models.memory import resident
print(json.dumps(resident()))
"""


def tensor_bytes(*roots: Any) -> int:
    """Bytes of all tensors that objects hold in attributes and collections, each storage once."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    rest = list(roots)
    while rest:
        item = rest.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, Mapping):
            rest.extend(item.values())
        elif isinstance(item, (list, tuple)):
            rest.extend(item)
        elif isinstance(item, torch.nn.Module) or type(item).__module__.startswith("eaglekit."):
            rest.extend(vars(item).values() if hasattr(item, "__dict__") else ())
    return sum(storages.values())


def held(model: Model, length: int) -> dict[str, int]:
    """Bytes that `model` keeps for weights, and for the caches of a text of `length` tokens."""
    drafter = model.drafter("auto", None)
    session = Session(model.target, drafter, length)
    session.restore([0, 0])  # opens the caches; what grows with use, such as tables of angles, has grown
    weights = tensor_bytes(model.target, drafter)
    everything = tensor_bytes(model.target, drafter, session.target_state, session.drafter_state)
    return {"weights": weights, "caches": everything - weights}


def measure_start(
    target: str | Path | None,
    head: str | Path | None,
    weights: Sequence[str],
    prompt: Sequence[int],
    *,
    repeats: int = 3,
    tokens: int = 64,
) -> dict[str, Any]:
    """Start processes that load and answer.

    Args:
        target: As for `eaglekit.load`; it must be fetched already.
        head: As for `eaglekit.load`.
        weights: Formats.
        prompt: Token ids.
        repeats: Processes per format.
        tokens: Of the answer behind the first token, after which memory is read.

    Returns:
        `formats`, a list: weights, seconds to the first token and of its parts, and `memory` in bytes with
        `over_held`, what the peak exceeds the libraries by over weights and caches.

    Raises:
        InputError: a process failed; its last line says why.
    """
    given = [None if x is None else str(x) for x in (target, head)]
    libraries = run_program("start", _IMPORTS)["now"]
    runs: dict[str, list[dict[str, Any]]] = {w: [] for w in weights}
    for _ in range(repeats):
        for w in weights:
            began = time.time()
            found = run_program(f"start with weights {w}", _PROGRAM, json.dumps([*given, w, list(prompt), tokens]))
            runs[w].append({**found, "began": began, "libraries": libraries})
    return {"tokens": tokens, "repeats": repeats, "formats": [_summary(w, mine) for w, mine in runs.items()]}


def run_program(what: str, program: str, *arguments: str) -> dict[str, Any]:
    """The JSON object in the last line that a Python program prints; it has as many threads as this process.

    Raises:
        InputError: it failed; `what` and its last line say why.
    """
    threads = str(torch.get_num_threads())
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise InputError(f"{what}: a process ended with {done.returncode}: {last}") from None
    return found


def _summary(weights: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def seconds(start: str, end: str) -> dict[str, float]:
        return spread([run[end] - run[start] for run in runs])

    memory = {
        name: max(values) if (values := [run[name] for run in runs if run[name] is not None]) else None
        for name in ("peak", "now", "anonymous", "libraries", "weights", "caches")
    }
    peak, libraries = memory["peak"], memory["libraries"]
    mine = (memory["weights"] or 0) + (memory["caches"] or 0)
    over = round((peak - libraries) / mine, 3) if peak is not None and libraries is not None and mine else None
    return {
        "weights": weights,
        "seconds_to_first_token": seconds("began", "first"),
        "seconds_importing": seconds("began", "imported"),
        "seconds_loading": seconds("imported", "loaded"),
        "seconds_first_token": seconds("loaded", "first"),
        "memory": {**memory, "over_held": over},
    }
