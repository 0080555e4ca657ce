"""The vocabulary: names tell what a thing is, and the spelling is American, as in the libraries around us."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

from tests.arch import words
from tests.arch.layout import tree_of

ROOT = Path(__file__).parents[2]
CODE = ("src", "tests", "bench", "tools", "examples")
#: participles that hide what they hold: a conditioning, a message, a path, a list?
BARE = {
    "told", "found", "said", "taken", "shown", "meant", "beside", "given", "asked", "wanted", "judged", "learnt",
    "noted",
    "kept", "drawn", "spelt", "heard", "held", "opposite", "stabilised", "within", "needing", "alone", "named", "judge",
    "says", "tells", "wishes",
}  # fmt: skip
STEMS = (
    r"normalis|recognis|initialis|serialis|optimis|quantis|regularis|organis|tokenis|summaris|minimis|maximis|parametris"
    r"|stabilis|synchronis|customis|utilis|generalis|behaviour|favour|neighbour|colour|honour|learnt|spelt|artefact"
    r"|judgement|whilst|licence|misspelt|labell|modell|travell"
)
WORDS = r"\b(?:centre|catalogue|analyse[ds]?)\b"
BRITISH = re.compile(rf"\b\w*(?:{STEMS})\w*|{WORDS}")
#: one of these is in every such word: quick where there is none
SUSPICIOUS = (*STEMS.split("|"), "centre", "catalogue", "analyse")


def identifiers(tree: ast.AST) -> set[str]:
    """Names that the file itself gives, and attributes: what it imports is named elsewhere."""
    names: set[str] = set()
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            imported |= {alias.name for alias in node.names if alias.asname is None}
    return {name.strip("_") for name in names - imported}


def code() -> list[Path]:
    return sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py"))


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(path for folder in ("docs", *CODE) for path in (ROOT / folder).rglob("*.md"))])


def british(paths: Iterable[Path]) -> dict[str, list[str]]:
    texts = {str(path): path.read_text("utf-8").lower() for path in paths}
    suspicious = {name: text for name, text in texts.items() if any(stem in text for stem in SUSPICIOUS)}
    words_of = {name: sorted({match.group() for match in BRITISH.finditer(text)}) for name, text in suspicious.items()}
    return {name: words for name, words in words_of.items() if words}


def test_no_name_is_a_bare_participle() -> None:
    used = {str(path): sorted(BARE & identifiers(tree_of(path))) for path in code()}
    assert {name: words for name, words in used.items() if words} == {}


def test_such_a_name_is_seen() -> None:
    assert BARE & identifiers(ast.parse("def f(told): self._found = 1")) == {"told", "found"}
    assert not BARE & identifiers(ast.parse("from hypothesis import given\n@given(x)\ndef f(): ..."))


def test_the_spelling_is_american() -> None:
    """Except in a vocabulary: the tokenizer's words are as people type them, and here are the words themselves."""
    vocabularies = {Path(__file__), ROOT / "tools" / "embedded" / "tokenizer.py"}
    assert british(path for path in code() if path not in vocabularies) == {}


def test_the_documentation_is_american_too() -> None:
    assert len(pages()) > 8
    assert british(pages()) == {}


def test_prose_has_none_of_the_listed_phrases() -> None:
    """In code, tests, documentation and the page; vocabularies, a license text and a chat excepted."""
    exempt = {Path(__file__), Path(words.__file__), ROOT / "tools" / "embedded" / "train_styles.py"}
    exempt.add(ROOT / "src" / "inweave" / "models" / "families" / "qwen_image_edit.py")  # words of the model's chat
    page = ROOT / "src" / "inweave" / "serve" / "page"
    scripts = [path for path in page.rglob("*.js") if "vendor" not in path.parts]
    texts = [path for path in (*code(), *pages(), *scripts) if path not in exempt]
    assert [problem for path in texts for problem in words.phrases_in(path)] == []


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    paths = sorted((ROOT / "src").rglob("*.py"))
    assert [problem for path in paths for problem in words.descriptions_in(path)] == []


def test_such_prose_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text('def f():\n    """The client is told."""  # whoever asks\n')
    assert len(list(words.phrases_in(path))) == 2 and len(list(words.descriptions_in(path))) == 1
    examples = ("told", "Stands", "stood", "whoever", "so many", "it is no way", "of ours", "as it is", "as they are",
                "a Picture")  # fmt: skip
    assert len(examples) == len(words.PHRASES)
    for text in examples:
        path.write_text(f"text = '{text} there'\n")
        assert len(list(words.phrases_in(path))) == 1, text
