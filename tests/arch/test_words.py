"""The vocabulary: names tell what a thing is, and the spelling is American, as in the libraries around us."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: participles that hide what they hold: a conditioning, a message, a path, a list?
BARE = {
    "told", "found", "said", "taken", "shown", "meant", "beside", "given", "asked", "wanted", "judged", "learnt", "noted",
    "kept", "drawn", "spelt", "heard", "held", "opposite", "stabilised",
}  # fmt: skip
BRITISH = re.compile(
    r"\b\w*(?:normalis|recognis|initialis|serialis|optimis|quantis|regularis|organis|tokenis|summaris|minimis|maximis"
    r"|parametris|stabilis|synchronis|customis|utilis|generalis|behaviour|favour|neighbour|colour|honour|learnt|spelt"
    r"|artefact|judgement|whilst)\w*",
    re.IGNORECASE,
)


def identifiers(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
    return {name.strip("_") for name in names}


def test_no_name_is_a_bare_participle() -> None:
    paths = sorted((ROOT / "src").rglob("*.py"))
    used = {path.name: sorted(BARE & identifiers(ast.parse(path.read_text("utf-8")))) for path in paths}
    assert {name: words for name, words in used.items() if words} == {}


def test_the_spelling_is_american() -> None:
    paths = sorted((ROOT / "src").rglob("*.py"))
    used = {path.name: sorted({m.group() for m in BRITISH.finditer(path.read_text("utf-8"))}) for path in paths}
    assert {name: words for name, words in used.items() if words} == {}
