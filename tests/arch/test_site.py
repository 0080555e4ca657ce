"""The documentation as a site: all pages are on it, no link leads nowhere, and search knows guides and API."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tools.docs.links import problems_of

ROOT = Path(__file__).parents[2]


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.html").write_text(
        '<h1 id="top">a</h1><a href="#top">1</a><a href="#gone">2</a><a href="b/c.html#x">3</a>'
        '<a href="b/c.html#y">4</a>'
        '<a href="d.html">5</a><a href="https://example.com">6</a><script src="https://example.com/x.js"></script>'
    )
    (tmp_path / "b" / "c.html").write_text('<p id="x"></p><a href="../a.html#top">a</a><img src="lost.png">')
    assert sorted(problems_of(tmp_path)) == [
        "a.html: #gone: no such anchor", "a.html: b/c.html#y: no such anchor", "a.html: d.html: no such page",
        "a.html: loads https://example.com/x.js", "b/c.html: lost.png: no such page",
    ]  # fmt: skip


def test_the_site_holds_guides_and_api_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    pytest.importorskip("pdoc")
    command = [sys.executable, "tools/docs/build.py", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text("utf-8"))
    known = {entry["location"] for entry in index["docs"]}
    assert {"recipes.html#hardware", "training.html", "api/layers.html#inject", "api/ops.html#lora_backward"} <= known
