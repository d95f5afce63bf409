"""Imports only point down. The house is drawn in docs/design.md, section "Rooms"; this is the same drawing as a table.

A room imports itself, its basement and what lies on lower floors; rooms on one floor do not know each other. Imports
inside functions and under TYPE_CHECKING count as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "bamboo_ds"

FLOORS = [
    {"cli"},
    {"initialize"},
    {"engine", "simulator"},
    {"module", "schedule", "comm", "models", "checkpoint"},
    {"world", "cloud"},
    {"elastic"},
    {"store"},
    {"plan"},
    {"config"},
    {"errors", "importing", "clock"},
]
"""From the roof down."""

WIRING = {"", "initialize", "initialization", "patch", "patching", "__main__"}
"""The modules of the room `initialize`, the only one that knows all others; "" is the front door, __init__.py."""

PURE = {"plan", "config", "errors", "importing", "clock", "store", "elastic", "cloud"}
"""Rooms that must load in well under a second: torch and deepspeed only inside a function, if at all."""

FLOOR_OF = {room: number for number, floor in enumerate(FLOORS) for room in floor}


def room_of(dotted: str) -> str:
    """Return the room of a module such as ``bamboo_ds.plan.seeds``."""
    name = [*dotted.split("."), ""][1]
    return "initialize" if name in WIRING else name


def module_name(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(node: ast.AST, *, package: str) -> Iterator[str]:
    """Yield the dotted names that an import statement may load."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")
        base = ".".join(above[: len(above) - node.level + 1]) if node.level else ""
        origin = ".".join(part for part in (base, node.module) if part)
        # `from bamboo_ds import engine` names a room, `from bamboo_ds import initialize` perhaps a function of it.
        yield from (f"{origin}.{alias.name}" for alias in node.names)


def violations(source: str, *, module: str, is_package: bool = False) -> list[str]:
    """Return every import of a module's source that does not point down."""
    own = room_of(module)
    package = module if is_package else module.rpartition(".")[0]
    found = []
    for node in ast.walk(ast.parse(source)):
        for name in imported(node, package=package):
            if name.split(".")[0] != "bamboo_ds" or room_of(name) == own:
                continue
            room = room_of(name) if room_of(name) in FLOOR_OF else "initialize"
            if FLOOR_OF[room] <= FLOOR_OF[own]:
                found.append(f"{module}:{getattr(node, 'lineno', 0)}: {own} must not import {name}")
    return found


def heavy_at_import(source: str) -> list[str]:
    """Return the imports of torch and deepspeed that run when the module is loaded."""
    names = [name for node in top_level(ast.parse(source)) for name in imported(node, package="")]
    return [name for name in names if name.split(".")[0] in ("torch", "deepspeed")]


def top_level(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module that run when it is loaded: all but the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from top_level(child)


FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [module_name(path) for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_point_down(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert violations(source, module=module_name(path), is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize("path", [path for path in FILES if room_of(module_name(path)) in PURE], ids=str)
def test_rooms_that_decide_load_without_torch(path: Path) -> None:
    assert heavy_at_import(path.read_text(encoding="utf-8")) == []


def test_every_module_has_a_room() -> None:
    assert [name for name in NAMES if room_of(name) not in FLOOR_OF] == []


def test_every_package_is_one() -> None:
    folders = {path.parent for path in FILES}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("bamboo_ds.plan.membership", "import bamboo_ds.engine"),
        ("bamboo_ds.plan.membership", "from bamboo_ds.schedule import train"),
        ("bamboo_ds.plan.membership", "from bamboo_ds import schedule"),
        ("bamboo_ds.plan.membership", "from ..engine import pipeline"),
        ("bamboo_ds.plan.membership", "def later():\n    from bamboo_ds.comm.links import Link"),
        ("bamboo_ds.plan.membership", "import typing\nif typing.TYPE_CHECKING:\n    import bamboo_ds.module.layers"),
        ("bamboo_ds.comm.links", "from bamboo_ds.module import layers"),
        ("bamboo_ds.schedule.train", "from bamboo_ds.engine.buffers import Buffers"),
        ("bamboo_ds.engine.pipeline", "import bamboo_ds"),
        ("bamboo_ds.engine.pipeline", "from bamboo_ds import initialize"),
        ("bamboo_ds.engine.pipeline", "from bamboo_ds import BambooPipelineModule"),
        ("bamboo_ds.engine.pipeline", "from bamboo_ds.cli.main import app"),
        ("bamboo_ds.errors", "from bamboo_ds.config import BambooConfig"),
        ("bamboo_ds.errors", "from bamboo_ds.clock import Clock"),
        ("bamboo_ds.patch", "from bamboo_ds.cli import main"),
    ],
)
def test_a_seeded_violation_is_found(module: str, line: str) -> None:
    assert len(violations(line, module=module)) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("bamboo_ds.cli.bench.parity", "from bamboo_ds import initialize\nimport bamboo_ds.engine.pipeline"),
        ("bamboo_ds.patch", "from bamboo_ds.initialize import initialize"),
        ("bamboo_ds.engine.pipeline", "from bamboo_ds.comm.links import Link\nfrom . import buffers\nimport torch"),
        ("bamboo_ds.plan.membership", "from bamboo_ds.errors import BambooError\nfrom .seeds import layer_seed"),
    ],
)
def test_imports_that_point_down_pass(module: str, line: str) -> None:
    assert violations(line, module=module) == []


def test_a_seeded_heavy_import_is_found() -> None:
    assert heavy_at_import("try:\n    import torch.nn\nexcept ImportError:\n    pass") == ["torch.nn"]
    assert heavy_at_import("def later():\n    import torch") == []
