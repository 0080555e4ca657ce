"""The vocabulary of prose: docstrings, comments, messages, documentation and the strings of the page.

    python tests/arch/words.py src/inweave/serve docs        # file:line: phrase -> advice

Each row of `PHRASES` is a pattern with its replacement. Strings of Python code count where they contain a space: others
are names of fields, files and addresses. The first line of a function's docstring is a command ("Return ...", "Raise
if ..."), so it does not begin with a word of `NOT_VERBS`; properties and classes are described by a noun.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_UNLESS = r"(?! (?:read|written|loaded|sent|made|received|generated|stored|built|needed))"
#: (a part of the phrase: quick where it is not there, what is not written, what to write instead)
PHRASES = (
    ("told", r"\btold\b(?! apart\b)", "say who reports, passes or configures it"),
    ("stand", r"\bstands?\b(?! for\b|-In\b)", "is, appears, is listed, exists"),
    ("stood", r"\bstood\b", "is, appears, is listed, exists"),
    ("whoever", r"\bwhoever\b", "name who: the caller, the client, a reader"),
    ("so many", r"\bso many\b", "n, a number of, every n steps"),
    (" no ", r"(?<!there )\b(?:is|are|was|were) no (?!longer\b|more than\b|less than\b|fewer than\b|larger than\b)\w+",
        "is not a ..."),
    ("of ours", r"\bof ours\b", "name the thing: an InweaveError, this project's"),
    ("as it is", r"\bas it is\b" + _UNLESS, "unchanged, verbatim"),
    ("as they are", r"\bas they are\b" + _UNLESS, "unchanged, verbatim"),
    # the API has a field `pictures`, addresses, options
    ("picture", r"(?<![./\w`])(?<!--)pictures?(?![\w`/:])", "image"),
)  # fmt: skip
#: a "#" after spaces: inside a string it begins prose too, and telling them apart takes a tokenizer five times as long
_COMMENT = re.compile(r"(?:^|\s)#.*")
_PHRASES = tuple((part, re.compile(pattern, re.IGNORECASE), advice) for part, pattern, advice in PHRASES)
NOT_VERBS = frozenset((
    "the", "a", "an", "what", "whether", "where", "how", "every", "each", "all", "which", "why", "one", "as",
    "of", "from", "its", "our", "those", "these", "that", "this", "in", "inside", "on", "at", "by", "for",
    "with", "without", "after", "before", "while", "both", "another", "other", "several", "any", "everything",
    "nothing", "something", "whatever", "who", "whose", "it", "they", "there", "here", "two", "three", "only",
    "no", "not", "names", "rows", "bytes", "seconds", "milliseconds", "tensors", "modules", "fields",
    "settings", "files", "parts", "words", "options",
))  # fmt: skip
_VERB = re.compile(r"[A-Z][a-z]+(?:-[a-z]+)*\b")


@cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a Python file: several tests walk it."""
    return ast.parse(source)


def prose_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of docstrings, comments and messages of a Python file."""
    for number, line in enumerate(source.split("\n"), 1):
        if comment := _COMMENT.search(line):
            yield number, comment.group()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for offset, line in enumerate(node.value.split("\n")):
                yield node.lineno + offset, line


def phrases_in(path: Path) -> Iterator[str]:
    """Yield every listed phrase in a file, with its line and the advice."""
    text = path.read_text("utf-8")
    lines = prose_of(text) if path.suffix == ".py" else enumerate(text.splitlines(), 1)
    for number, line in lines:
        lower = line.lower()
        for part, pattern, advice in _PHRASES:
            if part in lower:
                for match in pattern.finditer(line):
                    yield f"{path}:{number}: {match.group()!r} -> {advice}"


def descriptions_in(path: Path) -> Iterator[str]:
    """Yield every function whose docstring does not begin with a verb."""
    for node in ast.walk(parsed(path.read_text("utf-8"))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any("property" in ast.unparse(each) for each in node.decorator_list):
            continue
        first = (ast.get_docstring(node) or "Return").split()[0].strip(".,:;")
        if not _VERB.fullmatch(first) or first.lower() in NOT_VERBS:
            yield f"{path}:{node.lineno}: {node.name}: the docstring begins with {first!r} -> begin with a verb"


def main() -> None:
    for argument in sys.argv[1:]:
        root = Path(argument)
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if path.suffix not in (".py", ".md", ".js") or "vendor" in path.parts:
                continue
            problems = list(phrases_in(path))
            if path.suffix == ".py" and "tests" not in path.parts:
                problems += descriptions_in(path)
            print(*problems, sep="\n", end="\n" if problems else "")


if __name__ == "__main__":
    main()
