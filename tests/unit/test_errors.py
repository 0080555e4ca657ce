"""Errors carry problems as objects: the field that is at fault, and what is wrong with it."""

from __future__ import annotations

import pytest
from pydantic import model_validator

from inweave.arguments import expect
from inweave.checked import CheckedModel, FieldError
from inweave.errors import ConfigError, FormatError, Problem, RequestError
from inweave.generate.config import GenerateConfig


def test_a_problem_reads_as_its_field_and_its_text() -> None:
    assert str(Problem("steps", "is required")) == "steps: is required"
    assert str(Problem(None, "the body is empty")) == "the body is empty"


def test_texts_and_problems_may_be_mixed() -> None:
    error = ConfigError([Problem("steps", "is required"), "a: b"])
    assert error.problems == (Problem("steps", "is required"), Problem(None, "a: b"))
    assert str(error) == "steps: is required\na: b"
    assert ConfigError("a: b").problems == (Problem(None, "a: b"),)


def test_fields_are_renamed_and_texts_never_are() -> None:
    error = ConfigError([Problem("count", "at most 4"), Problem("steps", "count: 3"), Problem(None, "count: 3")])
    renamed = error.renamed({"count": "n"})
    assert [*map(str, renamed.problems)] == ["n: at most 4", "steps: count: 3", "count: 3"]


def test_any_error_may_name_its_field() -> None:
    assert RequestError(Problem("mask", "is empty")).field == "mask"
    assert str(FormatError(Problem("mask", "is empty"))) == "mask: is empty"
    assert RequestError("mask: is empty").field is None
    assert RequestError().field is None
    assert ConfigError([Problem("a", "b"), Problem("c", "d")]).field == "a"
    assert ConfigError([]).field is None


def test_validation_names_the_fields() -> None:
    with pytest.raises(ConfigError) as caught:
        GenerateConfig(prompt="x", steps=0, stepps=3)  # type: ignore[call-arg]
    assert [problem.field for problem in caught.value.problems] == ["steps", "stepps"]
    assert str(caught.value.problems[1]) == "stepps: there is no such setting; did you mean 'steps'?"
    with pytest.raises(ConfigError) as caught:
        GenerateConfig(prompt="<lora:a:strong> <lora:b:strong>")
    assert caught.value.field == "prompt" and str(caught.value).count("prompt: ") == 2


def test_a_validator_of_the_whole_model_can_name_a_field() -> None:
    class Pair(CheckedModel):
        low: int
        high: int

        @model_validator(mode="after")
        def _ordered(self) -> Pair:
            if self.high < self.low:
                raise FieldError(Problem("high", f"is below low, got {self.high}"))
            return self

    with pytest.raises(ConfigError) as caught:
        Pair(low=2, high=1)
    assert caught.value.problems == (Problem("high", "is below low, got 1"),)


def test_an_argument_of_a_wrong_type_is_a_problem_of_its_label() -> None:
    with pytest.raises(ConfigError) as caught:
        expect("steps", "x", int, type(None))
    assert caught.value.problems == (Problem("steps", "expected int or None, got str"),)
