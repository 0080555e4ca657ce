"""Inside `serve`: APIs and the HTTP layer use the service and plain data, never the parts behind it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVE = Path(__file__).parents[2] / "src" / "inweave" / "serve"
OUTER = sorted([*(SERVE / "api").rglob("*.py"), *(SERVE / "http").rglob("*.py")])
#: rooms that only the service may import
HIDDEN = ("sandbox", "planner", "storage", "engine", "jobs.store", "jobs.files", "jobs.signals", "jobs.schema")
#: attributes of the service that tests and the server use, but no API
PARTS = {"store", "library", "sandbox", "dispatchers", "signals", "planner", "conversions", "uploads", "runs"}


def violations(source: str) -> Iterator[str]:
    """Yield every import of a hidden room, and every use of a part of the service."""
    for node in ast.walk(ast.parse(source)):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        for module in modules:
            if any(f"{module}.".startswith(f"inweave.serve.{room}.") for room in HIDDEN):
                yield module
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("service", "service_of(request)"):
            if node.attr in PARTS or node.attr.startswith("_"):
                yield ast.unparse(node)


@pytest.mark.parametrize("path", OUTER, ids=lambda path: str(path.relative_to(SERVE)))
def test_no_api_reaches_past_the_service(path: Path) -> None:
    assert [*violations(path.read_text("utf-8"))] == []


def test_such_a_reach_is_seen() -> None:
    assert [*violations("from inweave.serve.jobs.store import JobStore")]
    assert [*violations("from inweave.serve import engine")]
    assert [*violations("import inweave.serve.sandbox.client")]
    assert [*violations("service.store.jobs()")] == ["service.store"]
    assert [*violations("service_of(request)._uploads")] == ["service_of(request)._uploads"]
    assert not [*violations("from inweave.serve.jobs.job import Job\nservice.jobs.get(x)\nservice.settings")]
