"""Inside the packages: the rooms of `training/` are ordered like the tiers, and no modules import each other in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "inweave"
TRAINING = SRC / "training"

#: a room of `training/` may only import rooms before it
ROOMS = (
    "config", "data", "adapters", "optim", "compilation", "choices", "memory", "distributed", "output", "tasks", "checkpoint",
    "capture",
    "kernels", "step", "loop",
    "session",
)  # fmt: skip


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


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and parts[1] == "training" else None


def test_rooms_of_training_only_import_rooms_before_them() -> None:
    upward = [
        f"{module} imports {name}"
        for module, path in MODULES.items()
        if (here := room_of(module)) is not None
        for name in imported(path)
        if (there := room_of(name)) is not None and there != here and ROOMS.index(there) > ROOMS.index(here)
    ]
    assert upward == []


def test_every_room_of_training_has_a_place() -> None:
    rooms = {path.stem for path in TRAINING.iterdir() if path.stem not in ("__init__", "__pycache__")}
    assert rooms == set(ROOMS)


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: set(imported(path)) - {module} for module, path in MODULES.items()}
    while leaves := [module for module, names in graph.items() if not names & graph.keys()]:
        for module in leaves:
            del graph[module]
    assert graph == {}, "these modules are in a circle, or import one that is"
