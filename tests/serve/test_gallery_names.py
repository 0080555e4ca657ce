"""Names of image files: the patterns of `--picture-names`."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.serve.gallery_names import MAX_PART, ensure_pattern, file_path, visible_name
from inweave.serve.settings import ServeSettings

WHEN = datetime.datetime(2026, 11, 19, 8, 5, 9).timestamp()
SETTINGS: dict[str, Any] = {
    "seed": 7, "steps": 20, "guidance": 7.5, "width": 512, "height": 768, "sampler": "euler", "model": "org/base",
    "prompt": "a (red:1.2) apple, on a <lora:pixel:0.8> table with many more words", "job": "job-1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("[date]/[seed]-[prompt_words]", "2026-11-19/7-a-red-1-2-apple-on-a-table"),
        ("[steps]-[cfg]-[width]x[height]", "20-7.5-512x768"),
        ("[sampler] [scheduler]", "euler none"),
        ("[model_name]/[number]", "org_base/00042"),
        ("[datetime]", "20261119080509"), ("[time]", "080509"), ("[datetime<%Y>]/[datetime<%m-%d>]/x", "2026/11-19/x"),
        ("[job]-[batch_number]", "job-1-3"), ("plain", "plain"), ("[denoising]", "none"),
        ("[prompt_hash]", "[prompt_hash]"),
    ],
)  # fmt: skip
def test_tokens_become_settings(pattern: str, expected: str) -> None:
    path = file_path(ensure_pattern(pattern), SETTINGS, WHEN, number=42, index=2)
    if pattern == "[prompt_hash]":
        assert len(path) == 8 and path != file_path(pattern, {**SETTINGS, "prompt": "another"}, WHEN)
    else:
        assert path == expected


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("", "1 to 300"), ("x" * 301, "1 to 300"), ("[nosuch]", "no token is called [nosuch]"), ("a//b", "empty"),
        ("/etc/[seed]", "empty"), ("[seed", "bracket"), ("seed]", "bracket"),
        ("[seed<%Y>]", "only datetime"), ("[datetime<%Y/%m>]", "bracket"),
        ("/".join("abcdefghi"), "at most 7 folders"), ("[]", "no token is called []"),
    ],
)  # fmt: skip
def test_wrong_patterns_are_refused_by_name(pattern: str, reason: str) -> None:
    with pytest.raises(ConfigError, match="picture_names") as caught:
        ensure_pattern(pattern)
    assert reason in str(caught.value)
    with pytest.raises(ConfigError, match="picture_names"):
        ServeSettings(picture_names=pattern)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("..", "image"), ("", "image"), (".hidden", "hidden"), ("a/b\\c:d", "a_b_c_d"), ("CON", "_CON"),
        ("nul.txt", "_nul.txt"), ("@alice", "alice"), ("x\0\n", "x__"), ("trailing. ", "trailing"), ("-rf", "rf"),
        ("\ud800", "image"), ("é" * 200, "é" * (MAX_PART // 2)), ("猫の絵", "猫の絵"),
    ],
)  # fmt: skip
def test_every_text_becomes_a_name_that_all_systems_accept(text: str, name: str) -> None:
    made = visible_name(text)
    assert (made == name or text == "\ud800") and len(made.encode()) <= MAX_PART
    assert "/" not in made and not made.startswith((".", "@"))


def test_a_prompt_cannot_name_a_folder_outside() -> None:
    settings = {"prompt": "../../etc/passwd", "seed": "../x", "model": ".."}
    for pattern in ("[prompt]", "[prompt_spaces]/[seed]", "[model_name]/[prompt_words]", "[datetime<..%D>]"):
        parts = file_path(pattern, settings, WHEN).split("/")
        assert len(parts) == pattern.count("/") + 1 and ".." not in parts, parts
