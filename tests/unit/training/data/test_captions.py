"""Captions: what may move, what stays, and that chance is a function of the seed."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inweave.errors import ConfigError, FormatError
from inweave.files.reading import read_foreign_text
from inweave.training.config.dataset_toml import Subset
from inweave.training.data.captions import (
    caption_file,
    caption_variants,
    choose_caption,
    example_variants,
    tag_frequency,
)
from inweave.training.data.metadata import read_metadata
from inweave.training.data.types import Example
from inweave.training.data.wildcards import CaptionRandom, expand_wildcards
from tests.support import stopwatch

FAST = settings(deadline=None, max_examples=60)
TAGS = st.lists(st.text("abcdef ", min_size=1, max_size=6).map(str.strip).filter(bool), max_size=8)


def variants_of(caption: str, *, trigger: str = "", count: int = 1, seed: int = 0, **settings: Any) -> list[str]:
    return caption_variants(caption, Subset(**settings), trigger=trigger, count=count, seed=seed)


def example(
    *captions: str, folder: str = "10_cat", regularization: bool = False, subset: Subset | None = None
) -> Example:
    return Example(Path("a.png"), captions, 1, (8, 8), None, regularization, "", subset or Subset(), folder)


@FAST
@given(TAGS, st.integers(0, 4), st.integers(1, 6), st.integers(0, 2**40))
def test_shuffling_moves_tags_and_keeps_the_first(tags: list[str], keep: int, count: int, seed: int) -> None:
    caption = ", ".join(tags)
    variants = variants_of(caption, shuffle_tags=True, keep_tokens=keep, count=count, seed=seed)
    assert len(variants) == count
    for text in variants:
        result = [tag for tag in text.split(", ") if tag]
        assert Counter(result) == Counter(tags)
        assert result[:keep] == tags[:keep]
    assert variants == variants_of(caption, shuffle_tags=True, keep_tokens=keep, count=count, seed=seed)
    assert variants[:1] == variants_of(caption, shuffle_tags=True, keep_tokens=keep, count=1, seed=seed)


def test_shuffles_differ_by_number_and_seed_and_are_the_same_everywhere() -> None:
    variants = variants_of("a, b, c, d, e, f, g", shuffle_tags=True, count=4, seed=1)
    assert len(set(variants)) == 4
    assert variants != variants_of("a, b, c, d, e, f, g", shuffle_tags=True, count=4, seed=2)
    assert variants[0] == "b, g, a, c, e, d, f"


def test_without_randomness_there_is_one_variant_with_its_punctuation() -> None:
    assert variants_of("A cat,  sleeping, on {one} mat.", count=5) == ["A cat,  sleeping, on {one} mat."]


def test_bars_keep_both_ends_in_place() -> None:
    variants = variants_of(
        "girl, red hair ||| a, b, c, d ||| masterpiece, best", shuffle_tags=True, count=6, keep_tokens=3
    )
    for text in variants:
        assert text.startswith("girl, red hair, ") and text.endswith(", masterpiece, best")
        assert sorted(text.split(", ")[2:6]) == list("abcd")
    assert len(set(variants)) > 1
    assert variants_of("girl, ||| a, b") == ["girl, a, b"]


@FAST
@given(TAGS, st.integers(0, 3), st.floats(0, 1), st.integers(0, 99))
def test_dropped_tags_leave_the_others_in_order(tags: list[str], keep: int, share: float, seed: int) -> None:
    (text,) = variants_of(", ".join(tags), tag_dropout=share, keep_tokens=keep, seed=seed)
    result = [tag for tag in text.split(", ") if tag]
    rest = iter(tags)
    assert all(tag in rest for tag in result)
    assert result[:keep] == tags[:keep]
    if share == 1:
        assert result == tags[:keep]


def test_dropout_takes_about_its_share_and_never_the_trigger() -> None:
    variants = variants_of(", ".join(f"t{n}" for n in range(40)), tag_dropout=0.25, count=50)
    share = sum(len(text.split(", ")) for text in variants) / (40 * 50)
    assert 0.7 < share < 0.8
    assert variants_of("a, sks dog, b", tag_dropout=1.0, trigger="sks") == ["sks dog"]


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a cat", "sks, a cat"),
        ("a sks cat", "a sks cat"),
        ("a photo of [trigger], sitting", "a photo of sks, sitting"),
        ("skskin, a cat", "sks, skskin, a cat"),
        ("", "sks"),
    ],
)
def test_the_trigger_is_in_every_caption_once(caption: str, expected: str) -> None:
    assert variants_of(caption, trigger="sks") == [expected]


def test_prefix_and_suffix_stay_outside() -> None:
    variants = variants_of(
        "a, b, c, d", prefix="photo of sks,", suffix="by x", shuffle_tags=True, tag_dropout=0.9, count=8, trigger="sks"
    )
    assert all(text.startswith("photo of sks,") and text.endswith("by x") for text in variants)
    assert all(text.count("sks") == 1 for text in variants)
    assert variants_of("[trigger], a cat") == ["a cat"]


def test_wildcards_choose_and_nest() -> None:
    variants = variants_of("a {red|blue|{dark|light} green} hat {x}", count=60)
    assert set(variants) == {f"a {c} hat {{x}}" for c in ("red", "blue", "dark green", "light green")}
    assert variants_of("a {red|blue} hat", wildcards=False, count=3) == ["a {red|blue} hat"]


def test_tags_that_belong_together_stay_together() -> None:
    for text in variants_of("a, b;;;c, d, e", shuffle_tags=True, count=8):
        assert "b, c" in text and ";;;" not in text
    assert variants_of("a. b. c", tag_separator=". ", shuffle_tags=True, keep_tokens=3) == ["a. b. c"]


def test_settings_without_effect_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        variants_of("a", count=0, tag_dropout=1.5, keep_tokens=-1, tag_separator="")
    assert len(caught.value.problems) == 4


def test_choosing() -> None:
    texts = ["a", "b", "c"]
    assert [choose_caption(texts, 0.1, 0.5, pick) for pick in (0.0, 0.34, 0.999999, 1.0)] == ["a", "b", "c", "c"]
    assert choose_caption(texts, 0.1, 0.0999, 0.5) == "" and choose_caption(texts, 0.1, 0.1, 0.5) == "b"
    assert choose_caption(texts, 0.0, 0.0, 0.0) == "a" and choose_caption([], 0.0, 0.5, 0.5) == ""


def test_the_settings_of_a_subset_reach_the_variants() -> None:
    subset = Subset(shuffle_tags=True, keep_tokens=1, prefix="P", suffix="S", tag_separator=";")
    variants = example_variants(example("a; b; c", "x", subset=subset), trigger="sks", count=3)
    assert len(variants) == 6 and all(text.startswith("P sks; ") and text.endswith(" S") for text in variants)
    assert all(text.split("; ")[1] == "a" for text in variants[:3])
    assert example_variants(example("a dog", regularization=True), trigger="sks") == ["a dog"]
    assert example_variants(example()) == [""]


def test_tags_are_counted_by_folder() -> None:
    result = tag_frequency([
        example("1girl, Red Hair, "), example("1girl", "1girl, smile"), example("sks", folder="5_other")
    ])  # fmt: skip
    assert result == {"10_cat": {"1girl": 2, "red hair": 1, "smile": 1}, "5_other": {"sks": 1}}


def test_captions_next_to_an_image(tmp_path: Path) -> None:
    def find(*endings: str) -> tuple[str, ...]:
        files = list(tmp_path.iterdir())
        names = {f.name.lower(): f for f in files} | {f.name: f for f in files}
        return caption_file(tmp_path / "a.b.png", names, endings).captions

    assert find(".txt") == ()
    (tmp_path / "a.b.png.txt").write_text("long name")
    assert find(".txt", ".caption") == ("long name",)
    (tmp_path / "a.b.TXT").write_bytes(b"\xef\xbb\xbf first \r\n\r\nsecond\r\n")
    assert find(".txt", ".caption") == ("first", "second")
    (tmp_path / "a.b.caption").write_text(" \n")
    assert find(".caption", ".txt") == ("first", "second")  # an empty file is not a caption
    (tmp_path / "a.b.caption").write_bytes(b"caf\xe9")
    assert find(".caption") == ("caf\u00e9",)
    (tmp_path / "a.b.caption").write_bytes(b"caf\xe9 \x01\x02")
    with pytest.raises(FormatError, match=r"a\.b\.caption: captions must be readable text: .*save it as UTF-8"):
        find(".caption")


@pytest.mark.parametrize(
    ("data", "text", "encoding"),
    [
        ("un chat \u2014 caf\u00e9".encode("cp1252"), "un chat \u2014 caf\u00e9", "windows-1252"),
        ("stra\u00dfe".encode("latin-1"), "stra\u00dfe", "windows-1252"),
        ("\u732b, cat".encode("utf-16"), "\u732b, cat", "utf-16"),
        (b"\xfe\xff" + "\u732b, cat".encode("utf-16-be"), "\u732b, cat", "utf-16"),
        ("a cat".encode("utf-16-le"), "a cat", "utf-16-le"),
        ("a cat".encode("utf-16-be"), "a cat", "utf-16-be"),
        ("a \u732b".encode("utf-32"), "a \u732b", "utf-32"),
        ("a \u732b".encode("utf-8-sig"), "a \u732b", "utf-8"),
        (b"a\0bc", "a\0bc", "utf-8"),
        (b"one\r\ntwo\r", "one\ntwo\n", "utf-8"),
    ],
)
def test_encodings_of_other_programs(data: bytes, text: str, encoding: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    assert read_foreign_text(tmp_path / "a.txt") == (text, encoding)


@pytest.mark.parametrize(
    "data", [bytes(range(256)), b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"\xff\xfe\x00", b"\xff\xfe\x00\xd8"]
)
def test_what_is_no_text_in_any_encoding_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(FormatError, match=r"is not text in UTF-8, UTF-16 or Latin-1"):
        read_foreign_text(tmp_path / "a.txt")


def test_endings_in_capitals_are_found(tmp_path: Path) -> None:
    file = tmp_path / "A.TXT"
    file.write_text("loud")
    assert caption_file(tmp_path / "A.PNG", {"A.TXT": file, "a.txt": file}, [".txt"]).captions == ("loud",)


def test_metadata_names_each_line_that_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "metadata.jsonl"
    lines = [
        '{"file_name": "a.png", "text": "one"}',
        '{"file_name": "b.png", "caption": ["x", "y"], "other": 1}',
        '{"file_name": "c.png"}',
        "",
        "{broken",
        '{"text": "no name"}',
        '{"file_name": "d.png", "text": 3}',
        '{"file_name": "a.png", "text": "again"}',
        "[" * 100000,
        '{"file_name": "a\\u0000.png"}',
    ]
    file.write_text("\n".join(lines))
    rows, wrong = read_metadata(file)
    assert rows == {"a.png": ("one",), "b.png": ("x", "y"), "c.png": ()}
    assert [problem.split()[1].rstrip(":") for problem in wrong] == ["5", "6", "7", "8", "9", "10"]


@pytest.mark.parametrize(
    "caption",
    [
        "{" + "|" * 50_000,
        "{" * 20_000 + "a|b" + "}" * 20_000,
        "{a|" * 20_000 + "}" * 20_000,
        "{a|b" * 20_000,
        "{|}" * 20_000,
        "}{" * 20_000,
    ],
)
def test_wildcards_take_time_in_proportion_to_the_caption(caption: str) -> None:
    with stopwatch(time.thread_time) as cost:
        assert len(variants_of(caption, count=1)) == 1
    assert cost.seconds < 2


@pytest.mark.parametrize("seed", range(4))
def test_wildcards_are_expanded_from_the_innermost_outward(seed: int) -> None:
    """The definition, in as many rounds as braces are deep: the same text, and as many random numbers drawn."""
    innermost = re.compile(r"\{([^{}]*\|[^{}]*)\}")
    letters = random.Random(seed)
    for number in range(500):
        caption = text = "".join(letters.choices("ab{{{}}}||", k=letters.randint(0, 24)))
        ours, theirs = CaptionRandom(seed, number, caption), CaptionRandom(seed, number, caption)
        while innermost.search(text):
            text = innermost.sub(lambda match: _choice(match[1].split("|"), theirs), text)  # noqa: B023
        assert expand_wildcards(caption, ours) == text, caption
        assert ours.unit() == theirs.unit()


def _choice(options: list[str], rng: CaptionRandom) -> str:
    return options[int(rng.unit() * len(options))]


def test_without_wildcards_the_first_caption_counts_and_braces_are_text() -> None:
    captions = ("a {red|blue} cat", "another")
    assert len(set(example_variants(example(*captions), count=20))) == 3
    assert example_variants(example(*captions, subset=Subset(wildcards=False)), count=20) == ["a {red|blue} cat"]
