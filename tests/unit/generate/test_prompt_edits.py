"""Prompts that change between steps and composed prompts: the text of each step, and its conditioning."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inweave.errors import ConfigError
from inweave.generate.config import GenerateConfig
from inweave.generate.pipeline import Pipeline, pipeline
from inweave.generate.prompt import parse, weighted_pieces
from inweave.generate.prompt_edits import MAX_PARTS, compose, literal
from tests.support import stopwatch

QUICK: dict[str, Any] = {"steps": 2, "seed": 7, "width": 64, "height": 64}


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    yield pipeline("inweave/emoji", device="cpu")


def texts(prompt: str, steps: int = 4) -> list[str]:
    """What each step reads, of a prompt of one part."""
    (part,) = compose(prompt).parts
    return [part.at(step, steps) for step in range(steps)]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a [dog:cat:0.5] here", ["a dog here", "a dog here", "a cat here", "a cat here"]),
        ("a [dog:cat: 3 ]", ["a dog", "a dog", "a dog", "a cat"]),
        ("[dog:cat:.25]", ["dog", "cat", "cat", "cat"]),
        ("[dog:cat:0.75] x", ["dog x", "dog x", "dog x", "cat x"]),
        ("a [big:2] cat", ["a cat", "a cat", "a big cat", "a big cat"]),
        ("a [big::2] cat", ["a big cat", "a big cat", "a cat", "a cat"]),
        ("[:cat:2]", ["", "", "cat", "cat"]),
        ("[dog:cat:99]", ["dog"] * 4),
        ("[dog:cat:-3]", ["cat"] * 4),
        ("[dog|cat]", ["dog", "cat", "dog", "cat"]),
        ("[dog|cat|cow] x", ["dog x", "cat x", "cow x", "dog x"]),
        ("a [big|] cat", ["a big cat", "a cat", "a big cat", "a cat"]),
        ("[a:[b:c:0.75]:0.25]", ["a", "b", "b", "c"]),
        ("[[a|b]:c:2]", ["a", "b", "c", "c"]),
        ("[[a:b:2]|c]", ["a", "c", "b", "c"]),
        ("[(a:1.2):b:0.5]", ["(a:1.2)", "(a:1.2)", "b", "b"]),
        ("([a:b:2]:1.3)", ["(a:1.3)", "(a:1.3)", "(b:1.3)", "(b:1.3)"]),
        ("[[a]:b:2]", ["[a]", "[a]", "b", "b"]),
        ("[a, b (c), d:e:2]", ["a, b (c), d", "a, b (c), d", "e", "e"]),
        (r"[a\:b:c\|d:2]", ["a:b", "a:b", "c|d", "c|d"]),
        ("[a BREAK b:c:2]", ["a BREAK b", "a BREAK b", "c", "c"]),
    ],
)
def test_what_each_step_reads(prompt: str, expected: list[str]) -> None:
    assert texts(prompt) == expected
    assert not compose(prompt).composed


@pytest.mark.parametrize(
    "prompt",
    [
        "a [red] (apple:1.2)", "[a: b]", "ratio 16:9", r"\[a:b:0.5\]", r"\[a|b\]", "a | b", "a:b:0.5", "(a:b:0.5)",
        "(a|b)",
        "[a (b:c:0.5]", "[a:b:half]", "[a:b:0.5", "a:b:0.5]", "SANDY BRAND and sand", "", "a cat :1.2", "[a", "a]",
        "[[a]:x]",
    ],
)  # fmt: skip
def test_other_brackets_are_weights_and_text_as_before(prompt: str) -> None:
    parsed = parse(prompt)
    assert parsed.composition is None
    assert parsed.pieces == tuple(weighted_pieces(prompt))
    assert parsed.at(0, 4) == ((parsed.pieces, 1.0),)
    assert parsed.warnings == () == parsed.problems


@given(st.text(alphabet="ab[]():|\\ 0.5AND,", max_size=40))
def test_any_text_has_words_at_every_step_or_is_refused(prompt: str) -> None:
    parsed = parse(prompt)
    for step in range(3):
        assert parsed.problems or parsed.at(step, 3)
    assert literal(literal(prompt)) == literal(prompt)
    # what is written as plain text is plain text
    assert parse(literal(prompt)).composition is None


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("a cat AND a dog", [("a cat", 1.0), ("a dog", 1.0)]),
        ("a cat :1.2 AND a dog: 0.5 AND (x:1.1)", [("a cat", 1.2), ("a dog", 0.5), ("(x:1.1)", 1.0)]),
        ("a cat AND a dog :-0.5", [("a cat", 1.0), ("a dog", -0.5)]),
        ("a cat AND a dog:0", [("a cat", 1.0)]),
        ("a:0 AND b:0", [("a", 0.0)]),
        ("a AND", [("a", 1.0), ("", 1.0)]),
        ("(a AND b", [("(a", 1.0), ("b", 1.0)]),
        (r"a\:2 AND b", [(r"a\:2", 1.0), ("b", 1.0)]),
        ("[a:b:0.5] AND c", [("a", 1.0), ("c", 1.0)]),
        ("a\nAND\nb", [("a", 1.0), ("b", 1.0)]),
    ],
)
def test_parts_of_a_composition(prompt: str, parts: list[tuple[str, float]]) -> None:
    assert [(part.at(0, 4), part.weight) for part in compose(prompt).parts] == parts


def test_what_has_no_meaning_is_named() -> None:
    assert "inside of brackets" in parse("(a AND b:1.2)").warnings[0]
    assert "negative prompt" in parse("a AND b", negative=True).warnings[0]
    assert "too many parts" in parse("[a:b:c:0.5]").warnings[0]
    assert "in all steps" in parse("[<lora:pixel:1> a:b:0.5]").warnings[0]
    assert not parse("<lora:pixel:1> [a:b:0.5]").warnings
    assert f"at most {MAX_PARTS}" in str(parse(" AND ".join("abcdefghijklmnopqrstuvwxyz")).problems[0])
    assert "deep" in str(parse("[a|" * 60 + "]" * 60).problems[0])
    assert "beyond" in str(parse("a:1e1 AND b:99999999").problems[0])


@pytest.mark.parametrize(
    "text",
    [
        "[a|b]" * 9_000, "[a:1" * 10_000 + "]" * 10_000, "[a|" * 10_000 + "]" * 10_000, "([" * 10_000 + "])" * 10_000,
        "(" * 20_000 + "]" * 20_000, "a AND " * 8_000, "[" + "a|" * 20_000 + "]", "[a:b:" + "9" * 40_000 + "]",
        "[" * 20_000 + "a|b" + "]" * 20_000,
    ],
    ids=lambda text: text[:9],
)  # fmt: skip
def test_a_hostile_prompt_costs_no_time(text: str) -> None:
    with stopwatch(time.thread_time) as cost:
        parsed = parse(text)
        if not parsed.problems:
            parsed.at(3, 10)
    assert cost.seconds < 1.0


def image(pipe: Pipeline, prompt: str, **settings: object) -> bytes:
    return pipe(prompt, **QUICK | settings).images[0].tobytes()


def test_an_edit_at_its_ends_is_one_of_its_texts(pipe: Pipeline) -> None:
    apple, cat = image(pipe, "red apple"), image(pipe, "cat face")
    assert image(pipe, "[red apple:cat face:0]") == image(pipe, "[red apple:cat face:0.1]") == cat
    assert image(pipe, "[red apple:cat face:1.0]") == image(pipe, "[red apple:cat face:2]") == apple
    assert image(pipe, "[cat face:0]") == image(pipe, "[cat face|cat face]") == cat
    half = image(pipe, "[red apple:cat face:0.5]")
    assert half == image(pipe, "[red apple:cat face:1]") == image(pipe, "[red apple|cat face]") != apple != cat != half


def test_negative_prompts_change_too(pipe: Pipeline) -> None:
    plain = image(pipe, "cat face", negative_prompt="red")
    assert image(pipe, "cat face", negative_prompt="[blue:red:0]") == plain
    assert image(pipe, "cat face", negative_prompt="[blue:red:0.5]") != plain


def test_steps_are_those_that_are_made(pipe: Pipeline) -> None:
    start = pipe("pizza", **QUICK).images[0]
    edited, plain = (
        pipe(prompt, init=start, strength=0.5, sampler="heun", **QUICK | {"steps": 4}).images[0].tobytes()
        for prompt in ("[red apple:cat face:2]", "red apple")
    )
    assert edited == plain  # two steps of four are made, so the text never changes


def test_a_part_of_no_weight_changes_nothing(pipe: Pipeline) -> None:
    cat = image(pipe, "cat face")
    assert image(pipe, "cat face AND red apple :0") == image(pipe, "red apple:0 AND cat face:1") == cat
    both = image(pipe, "cat face AND red apple")
    assert both != cat != image(pipe, "cat face AND red apple:0.5") != both
    assert image(pipe, "cat face :0 AND red apple:0") == image(pipe, "", negative_prompt="") != cat


def test_a_composition_without_guidance_is_refused(pipe: Pipeline) -> None:
    with pytest.raises(ConfigError, match=r"AND.*guidance.*above 1.*it is 1"):
        pipe("cat face AND red apple", guidance=1, **QUICK)
    assert pipe("cat face AND red apple :0", guidance=1, **QUICK).images


def test_the_prompt_is_recorded_as_it_was_written(pipe: Pipeline) -> None:
    prompt = "[red apple:cat face:0.5] AND blue :0.5"
    result = pipe(GenerateConfig(prompt=prompt, **QUICK))
    assert result.records[0]["config"]["prompt"] == prompt
    assert GenerateConfig(**result.records[0]["config"]).prompt == prompt
