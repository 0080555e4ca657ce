"""docs/pipelines.md says what became of every pipeline."""

from __future__ import annotations

import pytest

pytest.importorskip("diffusers")

from tools import pipelines_page as tool

from tests.peers import tiny_pipelines as tiny


def rows() -> list[str]:
    text = tool.PAGE.read_text("utf-8")
    table = text.split(tool.BEGIN)[1].split(tool.END)[0]
    return table.splitlines()[2:]


def test_the_page_lists_the_tiny_pipelines_as_their_tests_do() -> None:
    families = {row.split(" | ")[0].removeprefix("| "): row.split(" | ")[1] for row in rows()}
    assert {name for name, family in families.items() if family == "derived"} == set(tiny.DERIVED)
    reasons = {name: next(row for row in rows() if row.startswith(f"| {name} |")) for name in tiny.REFUSED}
    assert all(tiny.REFUSED[name] in reason and " | refused | " in reason for name, reason in reasons.items())


@pytest.mark.full
def test_the_page_is_up_to_date() -> None:
    assert rows() == [tool.row(kind) for kind in tool.pipelines()]
