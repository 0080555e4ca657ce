"""Random choices and wildcards: decided by the seed, within bounds, and resolved once and for all."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inweave.errors import ConfigError
from inweave.generate.config import GenerateConfig
from inweave.generate.prompt import parse
from inweave.generate.templates import PromptSources, configs_of
from inweave.generate.wildcards import Wildcards, escaped, has_choices, resolved


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ink").mkdir()
    (tmp_path / "colors.txt").write_text("\ufeff# warm\nred\n\n3::green\n")
    (tmp_path / "ink" / "fine.txt").write_text("{thin|thick} lines\n")
    (tmp_path / "endless.txt").write_text("__endless__ more\n")
    (tmp_path / "empty.txt").write_text("# nothing\n")
    return tmp_path


def every(text: str, wildcards: Wildcards | None = None, seeds: int = 300) -> set[str]:
    return {resolved(text, wildcards or Wildcards(), seed) for seed in range(seeds)}


def test_a_seed_chooses_the_same_words_on_every_machine() -> None:
    assert [resolved("a {red|green|blue} apple", Wildcards(), seed) for seed in (0, 1, 2, 3, 2**64 - 1)] == [
        "a green apple", "a blue apple", "a blue apple", "a red apple", "a blue apple",
    ]  # fmt: skip


def test_choices_nest_and_may_be_empty() -> None:
    assert every("{a|b {c|d}|}") == {"a", "b c", "b d", ""}


def test_several_are_picked_without_repeating_one() -> None:
    pairs = every("{2$$ and $$a|b|c}")
    assert pairs == {f"{x} and {y}" for x in "abc" for y in "abc" if x != y}
    assert {len(text.split(", ")) for text in every("{1-3$$a|b|c}")} == {1, 2, 3}
    assert every("{9$$a}") == {"a"}


def test_a_weight_makes_an_option_come_up_more_often() -> None:
    chosen = [resolved("{9::a|b}", Wildcards(), seed) for seed in range(500)]
    assert 430 < chosen.count("a") < 470


def test_a_wildcard_is_a_line_of_its_file(folder: Path) -> None:
    wildcards = Wildcards([folder])
    assert wildcards.names() == ["colors", "empty", "endless", "ink/fine"]
    assert every("__colors__ __ink/fine__", wildcards) == {
        f"{color} {line} lines" for color in ("red", "green") for line in ("thin", "thick")
    }
    assert every("__*ol*__", wildcards) == {"red", "green"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("__color__", ("no file color.txt", "did you mean 'colors'", "\\__color__")),
        ("__empty__", ("no line",)),
        ("__endless__", ("nest deeper",)),
        ("{1$$" * 60 + "a" + "}" * 60, ("nest deeper",)),
        ("{50$$" + "|".join(["__huge__"] * 50) + "}", ("more than",)),
    ],
)
def test_what_cannot_be_resolved_is_an_error(folder: Path, text: str, words: tuple[str, ...]) -> None:
    (folder / "huge.txt").write_text("x" * 49_000)
    with pytest.raises(ConfigError) as caught:
        resolved(text, Wildcards([folder]), 0)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    "text", ["{a}", "{", "}", "a | b", "\\{a|b}", "\\__colors__", "<lora:my__big__one:1>", "[a|b]"]
)
def test_plain_text_stays(text: str) -> None:
    assert not has_choices(text)
    assert resolved(text, Wildcards(), 1) == text == escaped(text)


def test_a_changing_prompt_inside_of_an_option_is_not_cut() -> None:
    assert every("{[cat|dog]|cow}") == {"[cat|dog]", "cow"}


@given(st.text(alphabet="ab{}|[]$:\\_123 ", max_size=60), st.integers(0, 2**64 - 1))
def test_any_text_resolves_and_stays_what_it_is(text: str, seed: int) -> None:
    try:
        once = resolved(text, Wildcards(), seed)
    except ConfigError:
        return
    assert resolved(once, Wildcards(), seed + 1) == once
    literal = escaped(text)
    assert resolved(literal, Wildcards(), seed) == literal


def test_escapes_are_the_characters_themselves() -> None:
    assert parse(r"a \{b|c} and \__d__").text == r"a \{b|c} and \__d__"
    assert parse(r"a \{b|c} and \__d__").pieces == (("a {b|c} and __d__", 1.0),)


def test_each_image_gets_its_own_prompt_and_records_the_template(folder: Path) -> None:
    (folder / "styles.csv").write_text('name,prompt,negative_prompt\nink,"{prompt}, __ink/fine__",photo\n')
    sources = PromptSources([folder], folder / "styles.csv")
    config = GenerateConfig(prompt="a {cat|dog}", styles=("ink",), count=8, seed=5)
    made = sources.resolve(config)
    prompts = [each.prompt for each in configs_of(made)]
    assert len(set(prompts)) > 2
    assert set(prompts) <= {f"a {animal}, {line} lines" for animal in ("cat", "dog") for line in ("thin", "thick")}
    assert [each.seed for each in configs_of(made)] == list(range(5, 13))
    assert {each.negative_prompt for each in configs_of(made)} == {"photo"}
    assert made.template is not None and made.template.styles == ("ink",) and made.template.prompt == "a {cat|dog}"
    assert sources.resolve(made) is made
    single = sources.resolve(config.model_copy(update={"seed": 9, "count": 1}))
    assert single.prompt == prompts[4], "an image of a batch is the one of its seed"


def test_a_missing_style_and_a_missing_wildcard_are_one_error(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        PromptSources([folder]).resolve(GenerateConfig(prompt="__nosuch__", styles=("inc",)))
    assert len(caught.value.problems) == 2


def test_loras_of_all_images_are_tagged() -> None:
    made = PromptSources().resolve(GenerateConfig(prompt="a {<lora:ink:1>|<lora:pixel:1>}", count=10, seed=0))
    assert {choice.name for choice in made.tagged_loras()} == {"ink", "pixel"}
