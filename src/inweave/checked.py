"""Configurations that raise InweaveErrors: everything that is wrong with one is in one `ConfigError`.

    class GenerateConfig(CheckedModel): ...

    GenerateConfig(steps=0), .model_validate({...}), .model_validate_json(text), .model_copy(update={...})
        raise ConfigError, with every problem: the setting, the expected and the actual value, a similar known name

Validation of a model inside another one stays pydantic's, so that the outer one can collect all problems.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Self

from pydantic import BaseModel, ValidationError

from inweave.errors import ConfigError, Problem


class FieldError(ValueError):
    """Raised by a validator of a whole model for a problem of one of its fields."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class CheckedModel(BaseModel):
    """A pydantic model that raises `ConfigError` where pydantic would raise its own error."""

    def __init__(self, /, **fields: Any) -> None:
        self._validate(fields)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # inside another model it is not called

    def _validate(self, fields: Mapping[str, Any]) -> None:
        """Set the fields of this instance, or raise ConfigError with every problem."""
        try:
            self.__pydantic_validator__.validate_python(dict(fields), self_instance=self)
        except ValidationError as error:
            raise ConfigError(self.problems_in(error)) from None

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        if isinstance(obj, Mapping) and not options and all(isinstance(name, str) for name in obj):
            return cls(**obj)
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise ConfigError(cls.problems_in(error)) from None

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        try:
            return super().model_validate_json(json_data, **options)
        except ValidationError as error:
            raise ConfigError(cls.problems_in(error)) from None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False, check: bool = True) -> Self:
        """Return a copy with other values; ``check`` validates them, unlike pydantic."""
        copy = super().model_copy(update=update, deep=deep)
        if update and check:
            private = copy.__pydantic_private__
            copy._validate({name: getattr(copy, name) for name in copy.model_fields_set})
            object.__setattr__(copy, "__pydantic_private__", private)  # which validation resets
        return copy

    @classmethod
    def problems_in(cls, error: ValidationError) -> list[Problem]:
        """Return every problem that pydantic found."""
        return [problem_of(each, cls.model_fields) for each in error.errors(include_url=False)]


def problem_of(problem: Any, known: Iterable[str], label: str | None = None) -> Problem:
    """Return a problem that pydantic describes, in this project's words.

    ``known``: the settings that may have been meant; ``label``: the field's name in the message, if not its path.
    """
    raised = problem.get("ctx", {}).get("error")
    if isinstance(raised, FieldError):
        return raised.problem
    path = [str(part) for part in problem["loc"]]
    label = label or ".".join(path)
    if problem["type"] == "extra_forbidden":
        return Problem(label, f"there is no such setting{did_you_mean(path[-1], known)}")
    if problem["type"] == "missing":
        return Problem(label, "is required")
    text = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input ").strip()
    text = text.partition(", unable to parse")[0]  # the input is quoted anyway
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        choices = re.findall(r"'([^']*)'", str(problem["ctx"]["expected"]))
        text += f", got {for_message(problem['input'])}{did_you_mean(problem['input'], choices)}"
    if not label:  # of the whole configuration, which is not quoted
        return Problem(None, text)
    quoted = for_message(problem["input"])
    complete = "got" in text or (isinstance(problem["input"], str) and quoted in text)
    return Problem(label, text if complete else f"{text}, got {quoted}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message that suggests a similar known name, if there is one."""
    near = difflib.get_close_matches(name[:100], list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def for_message(value: Any) -> str:
    """Return a value in a form that a message may quote: always short."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return "a very large number"  # too long to be written out
    if isinstance(value, str | int | float | None):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:77]}..."
    if hasattr(value, "isoformat"):  # TOML has dates and times
        return f"the date or time {value.isoformat()}"
    return (
        "a table" if isinstance(value, Mapping) else "a list" if isinstance(value, list | tuple) else "something else"
    )
