"""Options of a command from a YAML file: `eaglekit train --config FILE.yaml`.

Contract: the file is a mapping from option names, as on the command line without the dashes in front, to values. What
comes out are texts, which are then judged exactly as if they had been typed. Nothing heavy is imported here.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eaglekit.errors import InputError


def read_config(path: Path, options: Mapping[str, bool]) -> dict[str, str | list[str]]:
    """The options that a file sets, by name with underscores; those set to null are left out.

    Args:
        path: The file.
        options: Name of each option, with underscores -> whether it may be repeated, and so takes a list.

    Raises:
        InputError: the file cannot be read, or a key is no option, or a value cannot be one; all of them are named.
    """
    yaml: Any = importlib.import_module("yaml")  # a dependency
    try:
        with path.open("rb") as file:
            data = yaml.safe_load(file)
    except OSError as e:
        raise InputError(f"--config {path}: cannot be read ({e.strerror}); expected a YAML file") from None
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as e:  # values that are none, endless nesting
        raise InputError(f"--config {path}: not YAML ({' '.join(str(e).split())})") from None
    if not isinstance(data, dict):
        raise InputError(
            f"--config {path}: expected option names with values, such as 'epochs: 3'; got a {type(data).__name__}"
        )
    found: dict[str, str | list[str]] = {}
    wrong = []
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name not in options:
            wrong.append(f"unknown option {str(key)!r}{_near(name, options)}")
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            if isinstance(value, list) and not options[name]:
                wrong.append(f"{key}: expected one value, got a list")
            elif any(isinstance(v, (list, dict)) or v is None for v in values):
                wrong.append(f"{key}: expected {'values' if options[name] else 'a value'}, got {value!r}")
            else:
                found[name] = [str(v) for v in values] if options[name] else str(value)
    if wrong:
        raise InputError(f"--config {path}: {'; '.join(wrong)}")
    return found


def _near(name: str, options: Mapping[str, bool]) -> str:
    near = difflib.get_close_matches(name, options, cutoff=0.5)
    if not near:
        return "; eaglekit train --help lists them"
    return f"; did you mean {', '.join(n.replace('_', '-') for n in near)}?"
