"""Inside the packages: rooms are ordered like the tiers, and no modules import each other in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "inweave"

#: package -> its rooms in the order of imports: a room may only import rooms before it
ROOMS = {
    "training": [
        "config",
        "importers",
        "data",
        "adapters",
        "optim",
        "execution",
        "memory",
        "distributed",
        "output",
        "tasks",
        "checkpoint",
        "step",
        "loop",
        "session",
    ],
    "serve": ["settings", "jobs", "engine", "sandbox", "planner", "storage", "service", "http", "api", "app", "run"],
}


def module_of(path: Path) -> str:
    name = ".".join(("inweave", *path.relative_to(SRC).with_suffix("").parts))
    return name.removesuffix(".__init__")


MODULES = {module_of(path): path for path in sorted(SRC.rglob("*.py"))}


def imported(path: Path) -> Iterator[str]:
    """Modules of this package that a file imports, also inside functions and for type checkers only."""
    pending: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while pending:
        node = pending.pop()
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            submodules = [name for alias in node.names if (name := f"{node.module}.{alias.name}") in MODULES]
            yield from submodules
            if len(submodules) < len(node.names):  # something of the module itself
                yield node.module


def room_of(module: str, package: str) -> str | None:
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and parts[1] == package else None


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_only_import_rooms_before_them(package: str) -> None:
    order = ROOMS[package]
    upward = [
        f"{module} imports {name}"
        for module, path in MODULES.items()
        if (here := room_of(module, package)) is not None
        for name in imported(path)
        if (there := room_of(name, package)) is not None and order.index(there) > order.index(here)
    ]
    assert upward == []


@pytest.mark.parametrize("package", ROOMS)
def test_every_room_has_a_place(package: str) -> None:
    folder = SRC / package
    rooms = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"__init__"} == set(ROOMS[package])


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: set(imported(path)) - {module} for module, path in MODULES.items()}
    while leaves := [module for module, names in graph.items() if not names & graph.keys()]:
        for module in leaves:
            del graph[module]
    assert graph == {}, "these modules are in a circle, or import one that is"
