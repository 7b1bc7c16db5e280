"""Imports only go down: each module has a floor and names nothing above it (architecture.md)."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGE: Final = ROOT / "wscope_jax"

# Top-level name -> (floor, place within the floor). A module may name what is on a lower floor,
# what stands before it on its own floor, and its own place.
FLOORS: Final = {
    **dict.fromkeys(
        (
            "errors",
            "arguments",
            "forks",
            "interruption",
            "progress",
            "cgroups",
            "cores",
            "sizes",
            "search",
            "layout",
            "placement",
            "roofline",
        ),
        (0, 0),
    ),
    **dict.fromkeys(
        ("partial", "sampling", "stopping", "step_plan", "compiled", "demo_text", "strict_json"),
        (0, 0),
    ),
    **dict.fromkeys(("_ffi", "views", "ops", "devices", "pools", "dispatcher", "experts"), (1, 0)),
    **dict.fromkeys(("checkpoint", "tokenizer", "chat", "chat_worker", "machine"), (1, 0)),
    "work": (0, 1),
    "token_ids": (1, 1),
    "rows": (1, 1),
    "calls": (1, 2),
    "footprint": (0, 1),
    "attention": (2, 0),
    "schedules": (2, 1),
    "policies": (2, 2),
    "regions": (3, 0),
    "evictions": (3, 1),
    "prompts": (3, 2),
    "decoding": (3, 2),
    "cache": (3, 3),
    "models": (4, 0),
    "memory_plan": (5, 0),
    "configurations": (5, 0),
    "calibration": (5, 0),
    "settings": (5, 0),
    "caches": (5, 1),
    "programs": (5, 1),
    "steps": (5, 2),
    "generation": (5, 3),
    "forced": (5, 2),
    "engine": (5, 4),
    "cli": (6, 0),
    "__main__": (6, 0),
}
# Models know neither cache nor policy.
MODELS_MAY_NAME: Final = set(
    ["layout", "errors", "arguments", "checkpoint", "experts", "schedules", "models"]
)
# Bookkeeping without tensors: pure Python, so that it can be tested by the thousand.
WITHOUT_ARRAYS: Final = {
    "errors",
    "arguments",
    "cgroups",
    "cores",
    "sizes",
    "search",
    "strict_json",
    "placement",
    "roofline",
    "stopping",
    "machine",
}


def sources() -> list[tuple[str, Path]]:
    """Every module of the package: its dotted name below `wscope_jax`, and its file.

    `models` is a link, which a walk of the package does not follow: it is walked by itself.
    """
    files = [(file, file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py")]
    files = [pair for pair in files if pair[1].parts[0] != "models"]
    files += [(file, file.relative_to(ROOT)) for file in (ROOT / "models").rglob("*.py")]
    named = [(".".join(path.with_suffix("").parts), file) for file, path in files]
    return sorted((name.removesuffix(".__init__"), file) for name, file in named)


@functools.cache
def imports(file: Path) -> tuple[str, ...]:
    """All that a file imports, wherever in it; of `from a import b` the name is `a.b`."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            assert node.module is not None
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(found)


def own_imports(file: Path) -> Iterator[str]:
    """Top-level names below `wscope_jax` that a file imports."""
    for name in imports(file):
        parts = name.split(".")
        if parts[0] == "wscope_jax" and len(parts) > 1 and not parts[1].startswith("__"):
            yield parts[1]


# The package's own `__init__` stands above all: it re-exports from every floor.
MODULES: Final = [(name, file) for name, file in sources() if name != "__init__"]


@pytest.mark.parametrize(("name", "file"), MODULES, ids=[name for name, _ in MODULES])
def test_imports_go_down(name: str, file: Path) -> None:
    top = name.split(".")[0]
    assert top in FLOORS, f"{file}: give {top} a floor in {__file__}"
    for other in own_imports(file):
        assert other in FLOORS, f"{file} imports wscope_jax.{other}, which has no floor"
        assert FLOORS[other] <= FLOORS[top], f"{file}: {top} imports {other}, which is above it"
        if top == "models":
            assert other in MODELS_MAY_NAME, f"{file}: a model imports {other}"


@pytest.mark.parametrize(("name", "file"), MODULES, ids=[name for name, _ in MODULES])
def test_top_level_models_is_not_imported(name: str, file: Path) -> None:
    assert not [other for other in imports(file) if other.split(".")[0] == "models"]


@pytest.mark.parametrize("name", sorted(WITHOUT_ARRAYS))
def test_bookkeeping_has_no_arrays(name: str) -> None:
    tops = {other.split(".")[0] for other in imports(PACKAGE / f"{name}.py")}
    assert not tops & {"jax", "flax", "numpy", "ml_dtypes"}


def test_no_cycles() -> None:
    """Within a place of a floor, too, modules form no circle."""
    known = {name for name, _ in MODULES}
    graph = {}
    for name, file in MODULES:
        below = [other.removeprefix("wscope_jax.") for other in imports(file)]
        # `from a.b import c` names the module a.b.c or something in a.b
        named = [other if other in known else other.rpartition(".")[0] for other in below]
        graph[name] = {other for other in named if other in known and other != name}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for other in graph[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


IMPORT_CHECK: Final = """
import sys, threading
import wscope_jax
for name in wscope_jax.__all__:
    getattr(wscope_jax, name)
assert threading.active_count() == 1, threading.enumerate()
bridge = sys.modules["jax._src.xla_bridge"]
assert not bridge._backends, bridge._backends
"""

HELP_CHECK: Final = """
import sys
from wscope_jax.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
heavy = {"jax", "jaxlib", "flax", "numpy", "rich", "tokenizers"} & set(sys.modules)
assert not heavy, heavy
"""


def run(program: str, *words: str) -> str:
    """Runs a program in a fresh interpreter; returns its stdout."""
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_starts_nothing() -> None:
    run(IMPORT_CHECK)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["generate", "--help"],
        ["score", "--help"],
        ["plan", "--help"],
        ["inspect", "--help"],
        ["doctor", "--help"],
    ],
)
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    assert run(HELP_CHECK, *words)


def test_the_document_names_every_module_on_its_floor() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = dict(re.findall(r"^\| (\d) \| (.*) \|$", text, re.MULTILINE))
    for name, (floor, _) in FLOORS.items():
        if not name.startswith("_"):
            assert f"`{name}`" in rows[str(floor)], name
