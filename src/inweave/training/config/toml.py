"""Configuration text, bounded before it is parsed.

    path --read_text_file--> text --parse_toml--> table --flatten_sections--> fields
    fields --format_toml_value--> text

A file comes from somebody else: its size, its nesting and the length of its keys are limited here, so that no parser
behind this module meets more than it can handle.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, FormatError
from inweave.files.paths import as_path

MAX_FILE = 2**20  # bytes; real files have a few thousand
_MAX_DOTS = 1000  # per line; parsing a dotted key takes time quadratic in its parts


def at_most(problems: Sequence[str], limit: int = 50) -> list[str]:
    """The first problems and the number of the others: a file can cause any number of them."""
    return [*problems[:limit], *([f"and {len(problems) - limit} more"] if len(problems) > limit else [])]


def read_text_file(path: str | Path) -> str:
    """The text of a configuration file; one that cannot be a configuration is refused."""
    try:
        if not as_path(path).is_file():
            raise ConfigError(f"{path}: there is no such file")
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if len(data) > MAX_FILE:
        raise FormatError(f"{path}: is larger than {MAX_FILE} bytes, too large for a configuration")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: is not text: byte {error.start} is not UTF-8") from None
    if "\0" in text:
        raise FormatError(f"{path}: is not text: byte {text.index(chr(0))} is zero")
    return text


def parse_toml(text: str, where: str) -> dict[str, Any]:
    if max(line.count(".") for line in text.split("\n")) > _MAX_DOTS:
        raise FormatError(f"{where}: has a line with more than {_MAX_DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise FormatError(f"{where}: is nested too deeply") from None
    except ValueError as error:  # a number may be too long to read, which is no TOMLDecodeError
        raise ConfigError(f"{where}: is not valid TOML: {error}") from None


def flatten_sections(table: Mapping[str, Any], keep: Iterable[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Sections only group: their settings move to the top, but for those that are tables themselves."""
    fields: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in table.items():
        inside = value if isinstance(value, dict) and name not in keep else {name: value}
        for key, each in inside.items():
            if key in fields:
                problems.append(f"{key}: is set twice, the second time in [{name}]")
            fields[key] = each
    return fields, problems


def format_toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON lets it stand, TOML does not
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{format_toml_value(str(name))} = {format_toml_value(each)}" for name, each in value.items())
            + "}"
        )
    return "[" + ", ".join(format_toml_value(each) for each in value) + "]"
