"""The grammar of prompts: weights, breaks, LoRA tags."""

from __future__ import annotations

import time

import pytest

from inweave.generate.prompt import BREAK, parse, weighted_pieces
from tests.support import stopwatch


def near(parts: list[tuple[str, float]], expected: list[tuple[str, float]]) -> None:
    assert [text for text, _ in parts] == [text for text, _ in expected]
    assert [weight for _, weight in parts] == pytest.approx([weight for _, weight in expected])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a red apple", [("a red apple", 1.0)]),
        ("a (red) apple", [("a", 1.0), ("red", 1.1), ("apple", 1.0)]),
        ("a (red:1.3) apple", [("a", 1.0), ("red", 1.3), ("apple", 1.0)]),
        ("a [red] apple", [("a", 1.0), ("red", 1 / 1.1), ("apple", 1.0)]),
        ("((red))", [("red", 1.21)]),
        ("(a (b:0.5) c:1.2)", [("a", 1.2), ("b", 0.6), ("c", 1.2)]),
        ("[(a:2)]", [("a", 2 / 1.1)]),
        (r"smile \(happy\)", [("smile (happy)", 1.0)]),
        (r"a\b (c\d) \\ e\:f", [("ab", 1.0), ("cd", 1.1), (r"\ e:f", 1.0)]),
        ("ratio 16:9", [("ratio 16:9", 1.0)]),
        (":) a smile", [(":) a smile", 1.0)]),
        ("unclosed (paren", [("unclosed", 1.0), ("paren", 1.1)]),
        ("stray) paren", [("stray) paren", 1.0)]),
        ("a BREAK b", [("a", 1.0), (BREAK, 1.0), ("b", 1.0)]),
        ("(a BREAK b:1.5)", [("a", 1.5), (BREAK, 1.0), ("b", 1.5)]),
        ("BREAKFAST", [("BREAKFAST", 1.0)]),
        ("(x:-0.5)", [("x", -0.5)]),
        ("", []),
        ("()", []),
    ],
)
def test_weights(text: str, expected: list[tuple[str, float]]) -> None:
    near(weighted_pieces(text), expected)


def test_tags_leave_the_text() -> None:
    prompt = parse("a cat <lora:pixel:0.8> sitting <lyco:ink:0.5:0.9>")
    assert prompt.text == "a cat sitting"
    assert [(tag.name, tag.te, tag.unet) for tag in prompt.tags] == [("pixel", 0.8, 0.8), ("ink", 0.5, 0.9)]
    assert not prompt.problems


def test_strength_defaults_to_one_and_may_be_named() -> None:
    tags = parse("<lora:a> <lora:b:te=0.2:unet=-1> <lora:c:unet=0.5> x").tags
    assert [(tag.te, tag.unet) for tag in tags] == [(1.0, 1.0), (0.2, -1.0), (1.0, 0.5)]


@pytest.mark.parametrize("tag", ["<lora:a:strong>", "<lora: :1>", "<lora:a:1:2:3>", "<lora:a:size=3>"])
def test_an_invalid_tag_is_a_problem_that_names_it(tag: str) -> None:
    (problem,) = parse(f"x {tag}").problems
    assert tag in str(problem)


def test_an_unknown_tag_is_reported() -> None:
    prompt = parse("x <hypernet:y:1>")
    assert prompt.text == "x"
    assert "<hypernet:y:1>" in prompt.warnings[0]


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("(a" * 8_000, True),
        ("[a" * 8_000, False),
        ("[" * 15_000 + ")" * 15_000, False),
        ("(" * 15_000 + "[" * 15_000 + ")" * 15_000, False),
        ("(" + "b" * 20_000 + ":" + "1" * 20_000, False),
        ("(a:" + "9" * 400 + ")", True),
        ("x:" + " " * 40_000, False),
        ("<" * 40_000, False),
        ("<lora:" * 8_000, False),
        ("<lora:a" + ":1" * 20_000 + ">", True),
        ("B" * 50_000, False),
        ("a" * 300_000, True),
        ("half a \ud800 pair", True),
    ],
    ids=lambda value: value[:8] if isinstance(value, str) else "",
)
def test_a_hostile_prompt_costs_no_time_and_at_most_an_error(text: str, reported: bool) -> None:
    with stopwatch(time.thread_time) as cost:
        parsed = parse(text)
    assert cost.seconds < 1.0
    assert bool(parsed.problems) == reported
    assert all(len(str(problem)) < 500 for problem in parsed.problems)


def test_brackets_of_two_kinds_close_on_their_own() -> None:
    near(weighted_pieces("(a [b) c] d"), [("a", 1.1), ("b", 1.0), ("c", 1 / 1.1), ("d", 1.0)])
    near(weighted_pieces("(a [b"), [("a", 1.1), ("b", 1.0)])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a cat, embedding:easynegative", ["embeddings"]),
        ("a [red] (apple:1.2), [a: b], ratio 16:9, SANDY, BRAND, {x}, snake_case, \\[a|b\\]", []),
        ("", []),
    ],
)
def test_syntax_of_other_programs_is_named(text: str, names: list[str]) -> None:
    warnings = parse(text).warnings
    assert len(warnings) == len(names)
    assert all(warning.startswith(name) for warning, name in zip(warnings, names, strict=True)), warnings
    assert not parse(text).problems


def test_hostile_syntax_costs_no_time() -> None:
    for text in (
        "[" * 50_000,
        "[a:" * 16_000,
        "{" * 50_000,
        "{a|" * 16_000,
        "__a" * 16_000,
        "[a|b]" * 10_000,
        "__" + "a" * 49_000,
    ):
        with stopwatch(time.thread_time) as cost:
            assert all(len(warning) < 500 for warning in parse(text).warnings)
        assert cost.seconds < 1.0
