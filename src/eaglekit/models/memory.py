"""How much memory this process has."""

from __future__ import annotations

import sys
from pathlib import Path


def resident() -> dict[str, int | None]:
    """Bytes of this process that are in memory: `now`, at the `peak`, and now without mapped files (`anonymous`).

    What the system does not tell is None. Where Linux tells the peak since the program started (VmHWM), that is taken:
    `ru_maxrss` also remembers the process that started it.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        try:
            import resource  # Unix only
        except ImportError:
            return {"now": None, "peak": None, "anonymous": None}
        unit = 1 if sys.platform == "darwin" else 1024
        return {"now": None, "peak": unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "anonymous": None}
    found = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    wanted = {"now": "VmRSS", "peak": "VmHWM", "anonymous": "RssAnon"}
    return {name: 1024 * int(found[key][0]) if key in found else None for name, key in wanted.items()}
