"""What takes long begins first, and nothing is lost on the way."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conftest import LONG, long_first

TESTS = Path(__file__).parents[1]


def test_the_folders_that_take_long_exist() -> None:
    assert [folder for half in LONG for folder in half if not list((TESTS / folder).rglob("test_*.py"))] == []


def test_each_half_begins_with_what_takes_long() -> None:
    names = ["arch", "e2e", "golden", "laws", "page", "peers", "serve", "unit/bench", "unit/formats", "unit/training"]
    items: list[Any] = [SimpleNamespace(nodeid=f"tests/{name}/test_x.py::test_{i}") for name in names for i in range(3)]
    folders = [item.nodeid.removeprefix("tests/").partition("/test_")[0] for item in long_first(items)]
    assert sorted(folders) == sorted(name for name in names for _ in range(3))
    half = len(items) // 2
    assert folders[:9] == ["e2e"] * 3 + ["serve"] * 3 + ["unit/bench"] * 3
    assert folders[half : half + 9] == ["laws"] * 3 + ["peers"] * 3 + ["unit/training"] * 3
    assert folders[9:half] + folders[half + 9 :] == ["arch"] * 3 + ["golden"] * 3 + ["page"] * 3 + ["unit/formats"] * 3
