"""The reference is built from docstrings: public functions document their arguments, results and errors."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import inweave

PUBLIC = {name: getattr(inweave, name) for name in inweave.__all__}
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
CLASSES = {name: value for name, value in PUBLIC.items() if inspect.isclass(value) and not issubclass(value, Exception)}


def missing(function: Callable[..., Any], text: str) -> Iterator[str]:
    """Yield what the docstring of a function leaves out."""
    signature = inspect.signature(function)
    for name in signature.parameters:
        if name not in ("self", "cls") and not re.search(rf"^ +\*{{0,2}}{name}: ", text, re.MULTILINE):
            yield f"argument {name}"
    if signature.return_annotation not in (None, "None") and not re.search(r"\b(?:Returns|Yields):\n", text):
        yield "Returns"
    if "Raises:\n" not in text:
        yield "Raises"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_document_arguments_results_and_errors(name: str) -> None:
    assert list(missing(FUNCTIONS[name], FUNCTIONS[name].__doc__ or "")) == []


@pytest.mark.parametrize("name", CLASSES)
def test_public_classes_document_how_they_are_made(name: str) -> None:
    """Fields of data classes and settings have descriptions of their own; other classes list their arguments."""
    value = CLASSES[name]
    assert value.__doc__, "no docstring"
    if dataclasses.is_dataclass(value) or hasattr(value, "model_fields") or getattr(value, "_is_protocol", False):
        return
    text = f"{value.__doc__}\n{value.__init__.__doc__ or ''}"
    assert [each for each in missing(value.__init__, text) if each.startswith("argument")] == []


@pytest.mark.parametrize("name", CLASSES)
def test_public_methods_have_docstrings(name: str) -> None:
    methods = inspect.getmembers(CLASSES[name], inspect.isfunction)
    own = [each for each in methods if not each[0].startswith("_") and each[1].__module__.startswith("inweave")]
    assert [method for method, function in own if not inspect.getdoc(getattr(CLASSES[name], method))] == []
