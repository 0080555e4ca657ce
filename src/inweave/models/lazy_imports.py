"""Modules that a library imports at once and needs for one option are imported when they are used.

    with defer_imports("scipy.stats"):
        diffusers.EulerDiscreteScheduler   # imports scipy.stats, for the beta schedule alone: 1.5 s of every start

In the block the name is an empty module. Its first attribute access, then or later and in any thread, imports the
real one; after the block other imports find the real one, as if the name had never been imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class _Deferred(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # `inspect` asks every module for its file
            raise AttributeError(name)
        _remove(self)
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def defer_imports(*names: str) -> Iterator[None]:
    """Import modules at their first use, not where a statement in the block names them."""
    stubs = [_Deferred(name) for name in names if name not in sys.modules]
    sys.modules.update({stub.__name__: stub for stub in stubs})
    try:
        yield
    finally:
        for stub in stubs:
            _remove(stub)


def _remove(stub: ModuleType) -> None:
    if sys.modules.get(stub.__name__) is stub:
        del sys.modules[stub.__name__]
