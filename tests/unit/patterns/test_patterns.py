"""Patterns of files and users: `re`'s answer, in bounded time."""

from __future__ import annotations

import re
import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inweave.errors import ConfigError, FormatError
from inweave.patterns import MAX_LENGTH, PatternTable, regex
from tests.support import sized, stopwatch

ATOMS = st.sampled_from(
    ["a", "b", "A", ".", r"\.", "[ab]", "[^a]", r"\d", r"\w", r"\W", r"\s", "", "^", "$", r"\b", r"\B", r"\A", r"\Z",
        "\n", "1"]
)  # fmt: skip
QUANTIFIERS = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{0,2}", "{1,}", "{1,2}?", "{0}"])
GROUPS = st.sampled_from(
    ["({})", "(?:{})", "(?={})", "(?!{})", "(?i:{})", "(?s:{})", "(?m:{})", "(?<=a)(?:{})", "(?<!b)(?:{})"]
)


def combine(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(parts, parts).map("".join),
        st.tuples(parts, parts).map("|".join),
        st.tuples(GROUPS, parts).map(lambda pair: pair[0].format(pair[1])),
        st.tuples(parts, QUANTIFIERS).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    )


EXPRESSIONS = st.recursive(ATOMS, combine, max_leaves=8)
TEXTS = st.text("abA1. \n_", max_size=7)


@settings(max_examples=sized(400, 30_000), deadline=None)
@given(
    EXPRESSIONS, st.lists(TEXTS, min_size=1, max_size=4), st.sampled_from([0, re.IGNORECASE, re.DOTALL, re.MULTILINE])
)
def test_the_answer_is_that_of_re(pattern: str, texts: list[str], flags: int) -> None:
    expected = re.compile(pattern, flags)
    ours = regex(expected, "pattern")
    for text in texts:
        assert ours.fullmatch(text) == (expected.fullmatch(text) is not None), (pattern, text)
        assert ours.match(text) == (expected.match(text) is not None), (pattern, text)
        assert ours.search(text) == (expected.search(text) is not None), (pattern, text)


NAMES = st.lists(st.sampled_from(["a", "b", "ab", "0", "10", "a_b", "a-b"]), min_size=1, max_size=4).map(".".join)
PATTERNS = st.one_of(
    NAMES,
    NAMES.map(re.escape),
    NAMES.map("^{}".format),
    NAMES.map(lambda name: f"^{re.escape(name)}$"),
    NAMES.map(lambda name: name.replace("0", r"\d+")),
    st.sampled_from([".*", "a|b", r"\^a", "a$", "(?=a).*", "a.b", "..", "^", "", "a)(b"]),
)


@settings(max_examples=sized(200, 10_000), deadline=None)
@given(st.lists(PATTERNS, unique=True, max_size=6), st.lists(st.one_of(NAMES, TEXTS), min_size=1, max_size=5))
def test_a_table_gives_the_first_pattern_as_peft_matches_them(patterns: list[str], names: list[str]) -> None:
    table = PatternTable(patterns, "rank_pattern")
    matches = {
        (position, name): re.match(rf"(.*\.)?({pattern})$", name) is not None
        for position, pattern in enumerate(patterns)
        for name in names
    }
    for name in names:
        assert table.first(name) == next((p for p in range(len(patterns)) if matches[p, name]), None)
    lone = [p for p in range(len(patterns)) if not any(matches[p, name] for name in names)]
    assert PatternTable(patterns, "rank_pattern").unmatched(names) == lone


EXPLOSIVE = [
    "(?=(a+)+b)", ".*" * 12 + "X", "(.*){9}X", "(a+)+b", "(a|a)*b", "(a|aa)+$b", "(.*a){20}b", "(?:a?){50}a{50}b",
    "(?=(?:(?=(a+)+b)a)*b)", "(?!(a*)*b)(a*)*b", "(?<=a)(a+)+b", "((a*)*)*b", "(?i:(a+)+b)",
    "(?:(?:a{1,9}){1,9}){1,9}b",
    "(?:" * 90 + "a*" + ")*" * 90 + "b", "(\\w+\\.?)+X", "(?:a|.|[a-z])*X", "(?:(?=.*b).)*",
]  # fmt: skip


@pytest.mark.parametrize("pattern", EXPLOSIVE)
def test_no_pattern_takes_long(pattern: str) -> None:
    with stopwatch(time.thread_time) as cost:
        for text in ("a" * 300, "aa.b" * 70):
            for method in ("fullmatch", "match", "search"):
                getattr(regex(pattern, "targets"), method)(text)
    assert cost.seconds < 2


UNSUPPORTED = {
    r"(a)\1": "a backreference",
    r"(?P<x>a)(?P=x)": "a backreference",
    "(a)?(?(1)b|c)": "a conditional group",
    "(?>a+)b": "an atomic group",
    "a++b": "a possessive repeat",
    "(?=(?>a+)b)": "an atomic group",
    "(?:(?:a{99}){99}){99}": "states",
    "a{0,4000000000}": "states",
    "(": "not a regular expression",
    "(?P<a>x)(?P<a>y)": "not a regular expression",
    "(" * 4000 + ")" * 4000: "nested too deeply",
    "a" * (MAX_LENGTH + 1): f"the limit is {MAX_LENGTH:,}",
    "a{99999999999999999999}": "counts are too large",
}


@pytest.mark.parametrize("pattern", UNSUPPORTED, ids=lambda pattern: str(pattern)[:20])
def test_what_cannot_be_matched_in_bounded_time_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(FormatError, match="^rank_pattern: .*" + re.escape(UNSUPPORTED[pattern])):
        regex(pattern, "rank_pattern", FormatError)


@pytest.mark.parametrize(
    ("patterns", "check"),
    [
        ([f"model.layers.{number}.q_proj" for number in range(20_000)], "first"),
        ([f"x{number}.*y" for number in range(20_000)], "first"),
        ([f"^.*x{number}" for number in range(20_000)], "unmatched"),
        ([f"{'a' * (number % 97)}.{'b' * (number // 97)}" for number in range(20_000)], "unmatched"),
    ],
    ids=["names", "expressions", "anchored", "dots"],
)
def test_twenty_thousand_patterns_for_two_thousand_modules_end_soon(patterns: list[str], check: str) -> None:
    names = [f"model.layers.{number}.self_attn.{leaf}" for number in range(500) for leaf in ("q", "k", "v", "q_proj")]
    with stopwatch(time.thread_time) as cost:
        try:
            table = PatternTable(patterns, "rank_pattern")
            table.unmatched(names) if check == "unmatched" else [table.first(name) for name in names]
        except ConfigError as error:
            assert "steps; use fewer patterns" in str(error)
            assert not patterns[0].startswith("model")
    assert cost.seconds < 4


def test_a_long_list_of_alternatives_is_fine() -> None:
    names = [f"blocks.{number}.attn.to_q" for number in range(500)]
    rule = regex("|".join(map(re.escape, names)), "targets")
    assert all(rule.fullmatch(name) for name in names)
    assert not rule.fullmatch("blocks.500.attn.to_q")


def test_a_pattern_of_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be text"):
        regex(re.compile(b"a"), "targets")  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def quiet() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `re` warns of "[[" and repeated flags
        yield
