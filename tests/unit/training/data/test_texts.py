"""Texts for language models, from paragraphs and from JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inweave.errors import ConfigError, FormatError
from inweave.training.data.texts import TextReport, read_texts


def test_texts_that_cannot_be_read_name_the_line(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(
        '{"text": "fine"}\n{"prompt": "no completion"}\n[1]\n{"text": 5}\n{"completion": "\u2028 is not a line end"}\n'
    )
    with pytest.raises(ConfigError) as caught:
        read_texts(file)
    assert [str(problem).split(":")[0].split(", ")[1] for problem in caught.value.problems] == [
        "line 2",
        "line 3",
        "line 4",
    ]
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match="not a readable text file"):
        read_texts(file)
    with pytest.raises(FormatError, match="not a readable text file"):
        read_texts(tmp_path / "none.txt")
    other = tmp_path / "t.txt"
    other.write_bytes("\ufeffone\r\ntwo\r\n \r\n\r\n\r\nthree\n".encode())
    assert read_texts(other) == [("", "one\ntwo"), ("", "three")]


def test_prompts_and_other_extensions(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    rows = [{"prompt": "the cat sat", "completion": " on the mat"}, {"text": "the dog"}]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", "utf-8")
    assert read_texts(file) == [("the cat sat", " on the mat"), ("", "the dog")]
    with pytest.raises(ConfigError, match=r"dataset: .*\.txt or \.jsonl"):
        read_texts(tmp_path / "t.csv")


def test_a_report_in_lines_and_as_json() -> None:
    report = TextReport(2, 3, 1200, 1000, 1, 2, 8)
    assert report.as_dict()["loss_tokens"] == 1000
    assert report.lines()[0] == "2 texts, 3 examples of 1,200 tokens; the loss covers 1,000"
