"""Configuration text, bounded before it is parsed.

    path --read_text_file--> text --parse_toml, parse_json--> table --flatten_sections--> fields
    fields --format_toml_value--> text

Files are untrusted: their size, nesting, keys, numbers and text are limited here (`ensure_plain`), so that no other
module has to.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, FormatError
from inweave.files import documents
from inweave.files.paths import as_path
from inweave.files.reading import ensure_regular, read_text

MAX_FILE = 2**20  # bytes; real files have a few thousand
MAX_TOML = 2**18  # letters; the parser is slow
_MAX_DOTS = 2**20  # the squares of those in each line, added up: parsing a dotted key takes the square of its parts
#: half of a pair, which JSON can write and no file can hold
SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_DEPTH, _MAX_VALUES, _MAX_BITS = 64, 100_000, 128


def at_most(problems: Sequence[str], limit: int = 50) -> list[str]:
    """Return the first problems, and the number of the others: a file can cause any number."""
    return [*problems[:limit], *([f"and {len(problems) - limit} more"] if len(problems) > limit else [])]


def read_text_file(path: str | Path) -> str:
    """Return the text of a configuration file; raise if it cannot be one."""
    ensure_regular(as_path(path), ConfigError)
    text = read_text(path, MAX_FILE, newlines=False)
    if "\0" in text:
        raise FormatError(f"{path}: is not text: byte {text.index(chr(0))} is zero")
    return text


def parse_toml(text: str, where: str) -> dict[str, Any]:
    if len(text) > MAX_TOML:
        raise FormatError(f"{where}: is larger than {MAX_TOML} letters, too large for a configuration in TOML")
    if sum(line.count(".") ** 2 for line in text.split("\n")) > _MAX_DOTS:
        raise FormatError(f"{where}: has keys with too many dots")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise FormatError(f"{where}: is nested too deeply") from None
    except ValueError as error:  # a number may be too long to read, not a TOMLDecodeError
        raise ConfigError(f"{where}: is not valid TOML: {error}") from None
    ensure_plain(table, where)
    return table


def parse_json(text: str, where: str) -> Any:
    """Return the value that a JSON text holds."""
    value = documents.parse_json(text, where, error=ConfigError, finite=False)
    ensure_plain(value, where)
    return value


def ensure_plain(value: Any, where: str) -> None:
    """Raise if values are nested deeply or without end, or numbers or text cannot be printed."""
    todo: list[tuple[Any, int]] = [(value, 0)]
    count = 0
    while todo:
        each, depth = todo.pop()
        count += 1
        if depth > _MAX_DEPTH:
            raise FormatError(f"{where}: is nested too deeply")
        if count > _MAX_VALUES:
            raise FormatError(f"{where}: has too many values for a configuration")
        if isinstance(each, int) and each.bit_length() > _MAX_BITS:
            raise ConfigError(f"{where}: has a number of more than {_MAX_BITS} bits")
        if isinstance(each, str) and SURROGATE.search(each):
            raise ConfigError(f"{where}: has text with half of a surrogate pair, which cannot be written")
        if isinstance(each, Mapping):
            todo += [(inside, depth + 1) for pair in each.items() for inside in pair]
        elif isinstance(each, list | tuple | set):
            todo += [(inside, depth + 1) for inside in each]


def flatten_sections(table: Mapping[str, Any], keep: Iterable[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Move the settings in sections to the top, except those that are tables themselves (``keep``)."""
    fields: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in table.items():
        inside = value if isinstance(value, dict) and name not in keep else {name: value}
        for key, each in inside.items():
            if key in fields:
                problems.append(f"{key}: is set twice, the second time in [{name}]")
            fields[key] = each
    return fields, problems


def _toml_escape(character: str) -> str:
    """Escape a character that JSON allows and TOML does not, or that could control a terminal."""
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def format_toml_value(value: Any) -> str:
    """Return a value in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return "".join(c if c.isprintable() else _toml_escape(c) for c in json.dumps(value, ensure_ascii=False))
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{format_toml_value(str(name))} = {format_toml_value(each)}" for name, each in value.items())
            + "}"
        )
    return "[" + ", ".join(format_toml_value(each) for each in value) + "]"


def format_toml_tables(table: Mapping[str, Any], name: str) -> str:
    """Return a table of tables as sections: [name.key] for a table, [[name.key]] for each in a list."""
    plain = {key: value for key, value in table.items() if not _has_tables(value)}
    lines = [f"{_toml_key(key)} = {format_toml_value(value)}" for key, value in plain.items()]
    text = "".join(f"{line}\n" for line in lines)
    for key, value in table.items():
        inner = f"{name}.{_toml_key(key)}"
        if isinstance(value, Mapping):
            text += f"\n[{inner}]\n{format_toml_tables(value, inner)}"
        elif _has_tables(value):
            text += "".join(f"\n[[{inner}]]\n{format_toml_tables(each, inner)}" for each in value)
    return text


def _has_tables(value: Any) -> bool:
    listed = isinstance(value, list | tuple) and bool(value) and all(isinstance(each, Mapping) for each in value)
    return isinstance(value, Mapping) or listed


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else format_toml_value(key)
