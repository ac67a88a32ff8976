"""How fast a head is trained here, and in how much memory; see `train.speed`. In a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eaglekit.bench.start import run_program

_PROGRAM = """
import json, sys
target, device, steps = json.loads(sys.argv[1])
from eaglekit.api import locate
from eaglekit.models.load import load_hf
from eaglekit.train.speed import measure_training
print(json.dumps(measure_training(load_hf(locate(target)[0], device=device)[0], steps=steps)))
"""


def measure(target: str | Path | None, *, device: str = "cpu", steps: int = 12) -> dict[str, Any]:
    """See `measure_training`.

    Args:
        target: As for `eaglekit.load`; it must be fetched already.
        device: Where to train.
        steps: Optimizer steps, about.

    Raises:
        InputError: the process failed; its last line says why.
    """
    return run_program("training", _PROGRAM, json.dumps([None if target is None else str(target), device, steps]))
