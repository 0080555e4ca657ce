"""Nothing that a file says controls the terminal: JSON, tables, errors and configurations are escaped."""

from __future__ import annotations

import json
import tomllib
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inweave.adapter import Tensor
from inweave.cli.app import app
from inweave.cli.console import print_facts, print_json, print_lines
from inweave.files.documents import format_json
from inweave.formats.files import write_file

#: every kind of dangerous character: C0, DEL, C1, direction, joiners, separators, tags, surrogates, private use
HOSTILE = [
    *map(chr, (*range(0x20), *range(0x7F, 0xA1), 0xAD, 0x61C, 0x180E, *range(0x200B, 0x2010), *range(0x2028, 0x202F))),
    *map(chr, (*range(0x2060, 0x2070), 0xFEFF, 0xFFF9, 0xFFFB, 0xE0001, 0xE007F, 0xE000, 0xF0000, 0x1D173)),
]  # fmt: skip
TEXT = "a" + "".join(HOSTILE) + "b"
QUIET = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def assert_harmless(text: str) -> None:
    loud = [hex(ord(c)) for c in text if c != "\n" and unicodedata.category(c) in QUIET]
    assert loud == []


def test_json_is_escaped_and_says_the_same() -> None:
    document: Any = {TEXT: [TEXT, {"x": TEXT + "\ud800"}], "grün 日本 👍": 1.5}
    for indent in (None, 2):
        text = format_json(document, indent)
        assert_harmless(text)
        assert json.loads(text) == document
        assert "grün 日本 👍" in text
        text.encode("utf-8")
    assert json.loads(format_json({"a": [float("inf"), float("nan"), 1.0]})) == {"a": [None, None, 1.0]}


def test_what_is_printed_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"name": TEXT})
    print_facts(TEXT, [(TEXT, TEXT)])
    print_lines([TEXT, TEXT], limit=1, more=TEXT)
    output = capsys.readouterr()
    assert_harmless(output.out + output.err)


def test_a_file_that_is_full_of_them(tmp_path: Path) -> None:
    """Inspected, converted, hashed and checked; as a table, as JSON and as an error."""
    name = "".join(c for c in TEXT if c not in "\0/\ud800")
    text = "".join(c for c in TEXT if not 0xD800 <= ord(c) < 0xE000)
    folder = tmp_path / name[:40]
    folder.mkdir()
    metadata = {"ss_output_name": text, "ss_base_model_version": text, text: text, "modelspec.title": text,
                "ss_tag_frequency": json.dumps({text: {text: 3}}), "sshs_model_hash": text}  # fmt: skip
    tensors = {
        "lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight": Tensor("F32", (4, 320, 1, 1), bytes(5120)),
        "lora_unet_down_blocks_0_attentions_0_proj_in.lora_up.weight": Tensor("F32", (320, 4, 1, 1), bytes(5120)),
    }
    path = write_file(folder / f"{name[40:80]}.safetensors", tensors, metadata)
    runs = [
        ["inspect", str(path), "--keys"], ["hash", str(path)], ["check", str(path), "--base", "sd1.5"],
        ["check", str(path), "--base", "flux1-dev"], ["check", str(path), "--base", name],
        ["inspect", str(folder / name[:30])], ["convert", str(path), name, "--to", "kohya"],
        ["convert", str(path), str(folder / "x.safetensors"), "--to", "kohya"],
    ]  # fmt: skip
    for arguments in runs:
        for extra in ([], ["--json"]):
            result = CliRunner().invoke(app, [*arguments, *extra])
            assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)
            assert_harmless(result.output)
            if extra:
                json.loads(result.stdout)


def test_configurations_are_escaped_and_say_the_same() -> None:
    from inweave.training.config.toml import format_toml_value

    value = "".join(c for c in TEXT if not 0xD800 <= ord(c) < 0xE000)
    text = format_toml_value({value: [value]})
    assert_harmless(text)
    assert tomllib.loads(f"x = {text}")["x"] == {value: [value]}
