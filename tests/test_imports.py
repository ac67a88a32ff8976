"""The direction of imports, the public surface, and what `import eaglekit` does not do: tested facts."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import eaglekit

SOURCE = Path(eaglekit.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
BELOW = {"errors", "jsonl", "core", "models", "engine", "drafters", "testing", "api"}

# Layer -> the layers that it may import besides itself. `package` is `eaglekit` itself, for its version.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "jsonl": {"errors"},
    "package": {"errors"},
    "core": {"errors"},
    "models": {"errors", "core"},
    "engine": {"errors", "core", "models"},
    "drafters": {"errors", "core", "models", "engine"},
    "testing": {"core", "models"},
    "api": {"errors", "core", "models", "engine", "drafters"},
    "train": {*BELOW, "package"},
    "bench": {*BELOW, "package"},
    "serve": {*BELOW, "package"},
    "cli": {*BELOW, "package", "train", "bench", "serve"},
}
# Layers that must work without anything but torch and the standard library.
PURE = {
    "errors": set(),
    "jsonl": set(),
    "core": {"torch"},
    "engine": {"torch"},
    "drafters": {"torch"},
    "testing": {"torch"},
}


def layer_of(parts: tuple[str, ...]) -> str:
    """`parts`: names below `eaglekit`."""
    return parts[0] if parts else "package"


def layer_of_file(file: Path) -> str:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return layer_of(() if parts == ("__init__",) else parts)


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that is imported, also inside functions; not for annotations alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        else:
            yield from imports(node)


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def test_every_module_belongs_to_a_layer_of_the_map() -> None:
    assert {layer_of_file(f) for f in FILES} <= ALLOWED.keys()


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_imports_go_down_the_layers_only(file: Path) -> None:
    layer = layer_of_file(file)
    for line, name in imports(parsed(file)):
        parts = tuple(name.split("."))
        if parts[0] != "eaglekit":
            continue
        below = parts[1:] if len(parts) > 1 and parts[1] in ALLOWED else ()
        other = layer_of(below)
        assert other == layer or other in ALLOWED[layer], f"{file}:{line}: {layer} imports {name}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_pure_layers_need_torch_and_the_standard_library_alone(file: Path) -> None:
    layer = layer_of_file(file)
    if layer in PURE:
        tops = {name.split(".")[0] for _, name in imports(parsed(file))}
        assert tops - set(sys.stdlib_module_names) - {"eaglekit"} <= PURE[layer]


def test_the_import_test_sees_imports_inside_functions() -> None:
    found = list(imports(ast.parse("def f():\n    if x:\n        from eaglekit.api import load\n    import os.path")))
    assert found == [(3, "eaglekit.api.load"), (4, "os.path")]


# What a pure function has no business with. `TreeShape.parse` reads the file that a user names: the one exception.
EFFECTS = {
    "open", "Path", "read_text", "read_bytes", "write_text", "environ", "getenv", "perf_counter", "monotonic", "print",
    "input", "set_rng_state", "get_rng_state", "default_generator",
}  # fmt: skip
CORE_MODULES = {"__future__", "collections", "dataclasses", "functools", "math", "typing", "torch", "eaglekit"}
EXCEPTION = ("tree.py", "parse")


def effects(tree: ast.AST, function: str = "") -> Iterator[tuple[int, str, str]]:
    """Line, name and enclosing function of everything that is in EFFECTS."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
        if isinstance(node, ast.Name) and node.id in EFFECTS:
            yield node.lineno, node.id, inside
        if isinstance(node, ast.Attribute) and node.attr in EFFECTS:
            yield node.lineno, node.attr, inside
        yield from effects(node, inside)


@pytest.mark.parametrize("file", sorted((SOURCE / "core").glob("*.py")), ids=lambda f: f.name)
def test_core_reads_no_environment_file_or_clock(file: Path) -> None:
    found = [(name, function) for _, name, function in effects(parsed(file))]
    assert all((file.name, function) == EXCEPTION for _, function in found), found
    tops = {name.split(".")[0] for _, name in imports(parsed(file))}
    extra = {"json", "pathlib"} if file.name == EXCEPTION[0] else set()
    assert tops <= CORE_MODULES | extra


PROBE = """
import os, sys, json
before = dict(os.environ)
import {module}
wanted = {names}
for name in wanted:
    getattr({module}, name)
print(json.dumps([[m for m in {unwanted} if m in sys.modules], dict(os.environ) == before]))
"""


def probe(module: str, unwanted: list[str], names: list[str] | None = None) -> None:
    """Import a module in a fresh interpreter: it prints nothing, sets no variable, loads nothing unwanted."""
    code = PROBE.format(module=module, unwanted=unwanted, names=names or [])
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 1, lines  # the probe's own
    assert json.loads(lines[0]) == [[], True]


HEAVY = ["transformers", "fastapi", "uvicorn", "matplotlib", "gguf", "tokenizers", "typer", "rich", "jinja2"]


def test_import_eaglekit_loads_nothing_heavy_prints_nothing_and_sets_nothing() -> None:
    probe("eaglekit", [*HEAVY, "torch", "numpy", "safetensors"])


def test_using_the_public_names_loads_torch_and_no_more() -> None:
    probe("eaglekit", HEAVY, ["load", "Model", "TreeShape", "Stats"])


PUBLIC = {
    "CacheError",
    "Chat",
    "DataError",
    "DraftTree",
    "EaglekitError",
    "Generation",
    "HeadError",
    "InputError",
    "Model",
    "Stats",
    "Stream",
    "TargetError",
    "TreeError",
    "TreeShape",
    "UnsupportedModelError",
    "__version__",
    "load",
}


def test_the_public_surface_is_pinned() -> None:
    assert set(eaglekit.__all__) == PUBLIC and sorted(eaglekit.__all__) == eaglekit.__all__
    assert set(dir(eaglekit)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_can_be_resolved(name: str) -> None:
    thing = getattr(eaglekit, name)
    if name != "__version__":
        assert thing.__name__ == name and thing.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'generate'"):
        eaglekit.generate  # noqa: B018


def test_every_error_is_an_eaglekit_error_with_a_docstring() -> None:
    for name in PUBLIC:
        thing = getattr(eaglekit, name)
        if name.endswith("Error"):
            assert issubclass(thing, eaglekit.EaglekitError) and thing.__doc__
