"""A module that is imported at its first use, and is the real one from then on."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest

from inweave.models.lazy_imports import RARELY_USED, defer_imports

NAME = "xml.sax.saxutils"  # of the standard library; any module of a package that does not import it


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = importlib.import_module("xml.sax")
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.delattr(package, "saxutils", raising=False)
    yield


def test_a_statement_in_the_block_imports_nothing() -> None:
    with defer_imports({NAME: ()}):
        import xml.sax.saxutils

        assert not hasattr(sys.modules[NAME], "__file__")
    assert NAME not in sys.modules
    assert importlib.import_module(NAME).escape("<") == "&lt;"
    assert xml.sax.saxutils.escape("<") == "&lt;", "the package has it once it is imported"


def test_an_attribute_imports_the_real_module_at_once() -> None:
    with defer_imports({NAME: ()}):
        from xml.sax.saxutils import escape

        real = sys.modules[NAME]
        assert escape("<") == "&lt;" and real.__file__ is not None
    assert sys.modules[NAME] is real


def test_a_module_that_is_there_stays() -> None:
    real = importlib.import_module(NAME)
    with defer_imports({NAME: ()}):
        assert sys.modules[NAME] is real
    assert sys.modules[NAME] is real


def test_an_error_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError), defer_imports({NAME: ()}):
        1 / 0  # noqa: B018
    assert NAME not in sys.modules


def test_a_library_that_is_missing_is_missing() -> None:
    with defer_imports({"no_such_library.part": ()}), pytest.raises(ImportError):
        sys.modules["no_such_library.part"].anything  # noqa: B018
    assert "no_such_library.part" not in sys.modules


def test_a_substitute_imports_the_module_when_it_is_called() -> None:
    with defer_imports({NAME: ["escape"]}):
        from xml.sax.saxutils import escape
    assert NAME not in sys.modules
    assert escape("<", entities={"l": "m"}) == "&mt;"
    assert NAME in sys.modules


def test_a_submodule_of_a_deferred_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[:2] == ["xml", "sax"]]:
        monkeypatch.delitem(sys.modules, name)
    with defer_imports({"xml.sax": ["parse"]}):
        from xml.sax import parse

        assert "xml.sax.handler" not in sys.modules
        from xml.sax.expatreader import ExpatParser

        assert parse is not sys.modules["xml.sax"].parse and ExpatParser is not None
    assert hasattr(sys.modules["xml.sax"], "__file__")


def test_every_deferred_name_is_of_its_module() -> None:
    for module, substitutes in RARELY_USED.items():
        library = pytest.importorskip(module)
        assert all(callable(getattr(library, name)) for name in substitutes), module
