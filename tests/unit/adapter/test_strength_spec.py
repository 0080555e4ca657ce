"""NAME:STRENGTH is one grammar, shared by every reader."""

from __future__ import annotations

import pytest

from inweave.adapter.strength_spec import StrengthSpec, parse_strength_spec
from inweave.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("style", StrengthSpec("style")),
        ("style:0.8", StrengthSpec("style", 0.8)),
        ("style: -1.5e1 ", StrengthSpec("style", -15.0)),
        ("style:0.5:0.8", StrengthSpec("style", None, {"te": 0.5, "unet": 0.8})),
        ("style:te=0.5,unet=0.8", StrengthSpec("style", None, {"te": 0.5, "unet": 0.8})),
        ("style:te=0.5:unet=0.8", StrengthSpec("style", None, {"te": 0.5, "unet": 0.8})),
        ("style:0.5:te2 = 0", StrengthSpec("style", 0.5, {"te2": 0.0})),
        ("two:parts:0.5", StrengthSpec("two:parts", 0.5)),
        ("1:2:0.5:0.8", StrengthSpec("1:2", None, {"te": 0.5, "unet": 0.8})),
        (r"C:\loras\a.safetensors", StrengthSpec(r"C:\loras\a.safetensors")),
        (r"C:\loras\a.safetensors:0.5", StrengthSpec(r"C:\loras\a.safetensors", 0.5)),
        ("C:/loras/1", StrengthSpec("C:/loras/1")),
        ("dir:with/key=1/a.safetensors", StrengthSpec("dir:with/key=1/a.safetensors")),
    ],
)
def test_specs(text: str, expected: StrengthSpec) -> None:
    assert parse_strength_spec(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a.safetensors:much", "'much' is not a strength"),
        ("a:nan", "finite"),
        ("a:te=inf", "finite"),
        ("a:te=", "not a number"),
        ("a:vae=1", "unknown component 'vae'"),
        ("a:te=1,te=2", "te is given twice"),
        (":0.5", "no name"),
    ],
)
def test_errors_name_the_spec_and_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_strength_spec(text)
    assert text in str(caught.value)


def test_the_name_of_an_existing_file_is_used_whole() -> None:
    known = {"a:0.5", "folder"}.__contains__
    assert parse_strength_spec("a:0.5", exists=known) == StrengthSpec("a:0.5")
    assert parse_strength_spec("a:0.5:0.25", exists=known) == StrengthSpec("a:0.5", 0.25)
    with pytest.raises(ConfigError, match="'fast' is not a strength"):
        parse_strength_spec("folder:fast", exists=known)


def test_the_first_colon_ends_the_name_of_a_tag() -> None:
    assert parse_strength_spec("a:0.5:dyn=4", tag=True) == StrengthSpec("a", 0.5)
    for text in ("a:strong", "a:b:0.5", " :1"):
        with pytest.raises(ConfigError):
            parse_strength_spec(text, tag=True)
    with pytest.raises(ConfigError, match="at most two"):
        parse_strength_spec("a:1:2:3", tag=True)


def test_the_strength_for_a_weaver() -> None:
    assert parse_strength_spec("a").strength == 1.0
    assert parse_strength_spec("a:0.5").strength == 0.5
    assert parse_strength_spec("a:te=0.5").strength == {"te": 0.5}
    assert parse_strength_spec("a:0.2:te=0.5").strength == {"unet": 0.2, "te": 0.5, "model": 0.2}
