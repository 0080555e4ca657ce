"""The public names: one list for the interpreter, for type checkers and for readers."""

from __future__ import annotations

import ast
import inspect
import re
import typing
from pathlib import Path

import inweave
from inweave import errors

PACKAGE = Path(inweave.__file__)


def imports_for_type_checkers() -> dict[str, str]:
    """name -> module, as the `if TYPE_CHECKING:` block imports them."""
    tree = ast.parse(PACKAGE.read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    statements = [statement for block in blocks for statement in block.body]
    assert statements and all(isinstance(statement, ast.ImportFrom) for statement in statements)
    return {
        alias.asname or alias.name: statement.module or ""
        for statement in statements
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def test_lazy_names_type_checker_imports_and_all_agree() -> None:
    assert imports_for_type_checkers() == inweave._HOME
    assert inweave.__all__ == sorted(inweave._HOME)


def test_no_public_name_is_a_submodule() -> None:
    """`inweave.name` must not depend on whether somebody imported a package of that name before."""
    packages = {path.stem for path in PACKAGE.parent.iterdir()}
    assert not packages & set(inweave.__all__)


def test_every_error_is_public_and_in_the_tree_of_the_docstring() -> None:
    classes = {
        name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)
    }
    assert classes.keys() <= set(inweave.__all__)
    assert all(getattr(inweave, name) is value for name, value in classes.items())

    tree: dict[str, str] = {}
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"    ((?:\|   |    )*(?:[|`]-- )?)(\w+)(?: {2,}\S|$)", line):
            depth = len(match[1]) // 4
            parents = [*parents[:depth], match[2]]
            tree[match[2]] = parents[depth - 1] if depth else "Exception"
    assert tree == {name: value.__base__.__name__ for name, value in classes.items() if value.__base__}


def test_every_name_in_the_docstring_of_the_package_is_public() -> None:
    mentioned = set(re.findall(r"\binweave\.(\w+)\b(?!/)", inweave.__doc__ or ""))
    assert mentioned and mentioned <= set(inweave.__all__)


def test_every_public_name_has_a_docstring_of_its_own() -> None:
    for name in inweave.__all__:
        value = getattr(inweave, name)
        docstring = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
        text = inspect.cleandoc(docstring or "")
        assert text and not text.startswith(f"{name}("), f"{name}: no docstring"  # a dataclass makes up its signature
        assert text.splitlines()[0][-1] in ".:;", f"{name}: the first line is not a sentence"


def test_what_a_public_function_returns_is_public() -> None:
    for name in inweave.__all__:
        value = getattr(inweave, name)
        if inspect.isfunction(value):
            returned = typing.get_type_hints(value)["return"]
            if isinstance(returned, type) and returned.__module__.startswith("inweave"):
                assert returned.__name__ in inweave.__all__, f"{name} returns {returned.__name__}"
