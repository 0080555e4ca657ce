"""Arguments of public functions: one of a wrong type raises ConfigError, with its name and the expected type."""

from __future__ import annotations

from inweave.errors import ConfigError, Problem

_WORDS = {str: "text", bool: "True or False", type(None): "None"}


def expect(label: str, value: object, *types: type) -> None:
    """Raise ConfigError unless ``value`` is of one of the types."""
    if not isinstance(value, types):
        words = " or ".join(_WORDS.get(each, each.__name__) for each in types)
        raise ConfigError(Problem(label, f"expected {words}, got {type(value).__name__}"))


def expect_callable(label: str, value: object) -> None:
    """Raise ConfigError unless ``value`` is a function."""
    if not callable(value):
        raise ConfigError(Problem(label, f"expected a function, got {type(value).__name__}"))
