"""Inside the packages: rooms are ordered like the tiers, and no modules import each other in a circle."""

from __future__ import annotations

import pytest
from tests.arch.layout import MODULES, ROOMS, SRC, imports_of


def room_of(module: str, package: str) -> str | None:
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and parts[1] == package else None


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_only_import_rooms_before_them(package: str) -> None:
    order = list(ROOMS[package])
    upward = [
        f"{module} imports {name}"
        for module, path in MODULES.items()
        if (here := room_of(module, package)) is not None
        for name in imports_of(path)
        if (there := room_of(name, package)) is not None and order.index(there) > order.index(here)
    ]
    assert upward == []


@pytest.mark.parametrize("package", ROOMS)
def test_every_room_has_a_place(package: str) -> None:
    folder = SRC / package
    rooms = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"__init__"} == set(ROOMS[package])


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: (imports_of(path) & MODULES.keys()) - {module} for module, path in MODULES.items()}
    while leaves := [module for module, names in graph.items() if not names & graph.keys()]:
        for module in leaves:
            del graph[module]
    assert graph == {}, "these modules are in a circle, or import one that is"
