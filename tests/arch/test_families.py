"""Nothing outside of `inweave.models.families` branches on a family's name: code asks the family object."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.arch.layout import tree_of

from inweave.models.families import BUILT_IN

SRC = Path(__file__).parents[2] / "src" / "inweave"
NAMES = {family.name for family in BUILT_IN}
PRESETS = {name for family in BUILT_IN for name in family.presets} - {"inweave/emoji"}
#: name tables, listings and dialects of adapter files have names of their own, some of them the same words
OTHER_NAMES = ("targets", "formats", "exchange")
FILES = sorted(
    path
    for path in SRC.rglob("*.py")
    if path.relative_to(SRC).parts[0] not in OTHER_NAMES
    and path.relative_to(SRC).parts[:2] != ("models", "families")
    and "importers" not in path.parts  # the words of other programs' settings
)


def literals(node: ast.AST | None) -> set[str]:
    """Strings that a comparison, a key or a pattern is made of."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return {text for each in node.elts for text in literals(each)}
    return set()


def decisions(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, name) of every place where a family's name decides something."""
    result: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            parts = list(node.keys)
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        elif isinstance(node, ast.Subscript):
            parts = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            parts = list(node.args) if node.func.attr in ("startswith", "endswith", "get", "count", "index") else []
        line = getattr(node, "lineno", 0)
        result += [(line, text) for part in parts for text in literals(part) if text in NAMES | PRESETS]
    return result


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_no_family_s_name_decides_anything(path: Path) -> None:
    assert decisions(tree_of(path)) == []


@pytest.mark.parametrize(
    "text",
    ["x = family == 'sd'", "x = family in ('sdxl', 'flux')", "x = {'sd3': 1}[family]", "t['flux']", "t.get('sd')",
     "match family:\n    case 'sd2':\n        pass", "family.startswith('sd3')"],
)  # fmt: skip
def test_such_a_decision_is_seen(text: str) -> None:
    assert decisions(ast.parse(text))


def test_families_are_read_without_torch() -> None:
    for path in (SRC / "models" / "families").glob("*.py"):
        for node in tree_of(path).body:
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            assert "torch" not in names, path


def test_every_family_is_complete() -> None:
    for family in BUILT_IN:
        folders = [network.folder for network in family.networks]
        assert folders[0] in ("unet", "transformer") and "vae" in folders, family.name
        assert set(family.trainable_encoders) | set(family.frozen_encoders) == {
            folder for folder in folders if folder.startswith("text_encoder")
        }
        assert all(variant.family == family.name for variant in family.variants)
        assert family.presets and family.attention and family.feed_forward and family.tokenizers
    assert len(NAMES) == len(BUILT_IN)
