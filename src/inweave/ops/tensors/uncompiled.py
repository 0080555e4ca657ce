"""Work that nothing compiles, without torch's compiler.

    with uncompiled():
        loss.backward()      # torch imports its compiler to exclude checkpointing, modes and meta kernels from it

The import takes a second and, where Triton is installed, 130 MB. In the block it is a module whose `disable` returns
the function itself, and whose only setting is the one that checkpointing reads; what torch remembers of them is
forgotten afterwards. Any other use imports the compiler.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"
#: where `torch._disable_dynamo` keeps the function that it calls
_MEMORY = "__dynamo_disable"


@contextmanager
def uncompiled() -> Iterator[None]:
    """Do without torch's compiler in the block, unless it is imported already."""
    if _NAME in sys.modules:
        yield
        return
    stub = _Compiler()
    finder = _Submodules(stub)
    sys.modules[_NAME] = stub
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        stub.remove()


class _Settings:
    """What checkpointing reads, and uses in traced code alone."""

    error_on_nested_fx_trace = True


class _Compiler(ModuleType):
    config = _Settings()

    def __init__(self) -> None:
        super().__init__(_NAME)
        self._functions: list[Any] = []
        self.__path__: list[str] = []

    def disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Return a function that is not to be compiled; for anything else ask the compiler."""
        if function is None or not recursive or options not in ({}, {"wrapping": False}):
            return self.real().disable(function, recursive, **options)
        if options:  # by `torch._disable_dynamo`, which remembers what it gets
            self._functions.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks every module for its file
            raise AttributeError(name)
        return getattr(self.real(), name)

    def remove(self) -> None:
        """Let the next import find the compiler."""
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        for function in self._functions:
            vars(function).pop(_MEMORY, None)
        self._functions.clear()

    def real(self) -> ModuleType:
        """Import the compiler."""
        self.remove()
        return importlib.import_module(_NAME)


class _Submodules(MetaPathFinder, Loader):
    """Imports the compiler before the first of its submodules."""

    def __init__(self, stub: _Compiler) -> None:
        self._stub = stub

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(f"{_NAME}.") or sys.modules.get(_NAME) is not self._stub:
            return None
        self._stub.real()
        importlib.import_module(name)
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is imported."""
