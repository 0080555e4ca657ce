"""Modules that a library imports at once and needs for one option are imported when they are used.

    with defer_imports():
        diffusers.EulerDiscreteScheduler   # imports scipy.stats, for the beta schedule alone: 1.5 s of every start

In the block the name is an empty module. Its first attribute access, then or later and in any thread, imports the
real one; after the block other imports find the real one, as if the name had never been imported. A statement
`from module import function` is such an access, unless the function is listed: then its substitute imports the module
when it is called.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

#: module -> the functions with substitutes: what diffusers and transformers import wherever scipy is installed
RARELY_USED: Mapping[str, Collection[str]] = {
    "scipy.stats": (),  # schedulers: the beta schedule
    "scipy.integrate": (),  # schedulers: LMS
    "scipy.optimize": ("linear_sum_assignment",),  # losses of object detection
}


def _substitute(module: str, name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments, **options)

    return call


class _Deferred(ModuleType):
    def __init__(self, name: str, substitutes: Collection[str]) -> None:
        super().__init__(name)
        self.__dict__.update({each: _substitute(name, each) for each in substitutes})
        # every statement `from module import name` looks for the path, and does not read it
        self.__dict__["__path__"] = _Folders(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks every module for its file
            raise AttributeError(name)
        return getattr(self.real(), name)

    def real(self) -> ModuleType:
        _remove(self)
        return importlib.import_module(self.__name__)


class _Folders:
    """The path of a deferred package, read when one of its submodules is imported."""

    def __init__(self, package: _Deferred) -> None:
        self.package = package

    def __iter__(self) -> Iterator[str]:
        return iter(getattr(self.package.real(), "__path__", ()))


@contextmanager
def defer_imports(modules: Mapping[str, Collection[str]] = RARELY_USED) -> Iterator[None]:
    """Import modules at their first use, not where a statement in the block names them."""
    stubs = [_Deferred(name, substitutes) for name, substitutes in modules.items() if name not in sys.modules]
    sys.modules.update({stub.__name__: stub for stub in stubs})
    try:
        yield
    finally:
        for stub in stubs:
            _remove(stub)


def _remove(stub: ModuleType) -> None:
    if sys.modules.get(stub.__name__) is stub:
        del sys.modules[stub.__name__]
