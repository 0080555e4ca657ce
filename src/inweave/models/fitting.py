"""Return whether a module of another library is what a fused formula was written for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def has(module: Any, **expected: Any) -> bool:
    """Return whether a module's attributes have these values, or are of these classes (a frozenset)."""
    missing = object()
    for name, expectation in expected.items():
        value = getattr(module, name, missing)
        same = type(value) in expectation if isinstance(expectation, frozenset) else value == expectation
        if not same and value is not expectation:
            return False
    return True


def has_all(module: Any, *names: str) -> bool:
    """Return whether these attributes exist and are not None."""
    return all(getattr(module, name, None) is not None for name in names)


def accepts(function: Callable[..., Any], *names: str) -> bool:
    """Return whether a function has exactly these parameters after ``self``."""
    return tuple(inspect.signature(function).parameters)[1:] == names
