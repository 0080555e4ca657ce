"""`--reference a.png b.png`: every image that follows is a reference, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from inweave.cli.options import with_repeated_option


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--reference a.png b.PNG --seed 3", "--reference a.png --reference b.PNG --seed 3"),
        ("a_prompt --reference a.png", "a_prompt --reference a.png"),
        ("--reference a.png a_prompt", "--reference a.png a_prompt"),
        ("--reference a.png prompt.png", "--reference a.png prompt.png"),  # no such file
        ("--reference=a.png b.PNG -o b.PNG", "--reference=a.png --reference b.PNG -o b.PNG"),
        (
            "--reference missing.png a.png --reference b.PNG",
            "--reference missing.png --reference a.png --reference b.PNG",
        ),
        ("--reference a.png -- b.PNG", "--reference a.png -- b.PNG"),
        ("--init a.png b.PNG", "--init a.png b.PNG"),
    ],
)
def test_images_that_follow(words: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "b.PNG"):
        Path(name).touch()
    assert with_repeated_option(words.split(), "--reference") == expected.split()
