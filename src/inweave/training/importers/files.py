"""Parse the text of another trainer's file: a command line, JSON, TOML or YAML, recognized by its form.

JSON may have commas before a closing bracket, and a byte order mark: files that people edit by hand do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inweave.checked import for_message
from inweave.errors import ConfigError, FormatError
from inweave.training.config.toml import ensure_plain, parse_json, parse_toml
from inweave.training.importers.shell import is_command, parse_command
from inweave.training.importers.simpletuner.env import is_env, parse_env

MAX_LEAVES = 20_000
MAX_YAML = 2**16  # bytes; real ones have a few thousand, and the parser is slow
MAX_BRACKETS = 64  # open at once; the parser takes the square of their number
_TRAILING_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])')
SCRIPTS = (".sh", ".bash", ".bat", ".cmd", ".ps1")


def parse_text(text: str, path: Path) -> dict[str, Any]:
    """Return the table in a text: JSON has a brace, a command options, TOML `name = value`; others may be YAML."""
    table: Any
    text = text.removeprefix("\ufeff")
    suffix = path.suffix.lower()
    if text.lstrip()[:1] == "{":
        table = _json(text, path)
    elif suffix not in (".toml", ".yaml", ".yml") and is_env(text):
        table = parse_env(text, str(path))
    elif suffix in SCRIPTS or (suffix not in (".toml", ".yaml", ".yml") and is_command(text)):
        table = parse_command(text)
    elif re.search(r"^\s*[\w\"'.-]+\s*=", text, re.MULTILINE) and suffix not in (".yaml", ".yml"):
        table = parse_toml(text, str(path))
    else:
        table = _yaml(text, path)
    if isinstance(table, list) and any(isinstance(each, dict) for each in table):
        raise ConfigError(f"{path}: is a list, such as of folders, not a training run; set `dataset` to it")
    if not isinstance(table, dict) or not table:
        raise ConfigError(f"{path}: contains no settings")
    return table


def _json(text: str, path: Path) -> Any:
    try:
        return parse_json(text, str(path))
    except ConfigError:
        lenient = _TRAILING_COMMA.sub(lambda match: match[1] or "", text)
        if lenient == text:
            raise
        return parse_json(lenient, str(path))


def _yaml(text: str, path: Path) -> Any:
    if len(text) > MAX_YAML:
        raise FormatError(f"{path}: is larger than {MAX_YAML} bytes, too large for a configuration in YAML")
    depth = 0
    for letter in re.findall(r"[\[\]{}]", text):
        depth += 1 if letter in "[{" else -1
        if depth > MAX_BRACKETS:
            raise FormatError(f"{path}: is nested too deeply")
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(f"{path}: reading YAML needs PyYAML: pip install 'inweave[train]'") from None
    from inweave.training.importers.yaml_loader import BoundedLoader

    try:
        table = yaml.load(text, BoundedLoader)  # a safe loader
    except RecursionError:
        raise FormatError(f"{path}: is nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError, ArithmeticError, AttributeError, LookupError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{path}: is neither TOML, JSON nor YAML: {reason}") from None
    ensure_plain(table, str(path))
    return table


def leaves_of(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"a.b.0.c": 1} for {"a": {"b": [{"c": 1}]}}; lists of plain values are leaves. YAML may repeat itself."""
    leaves: dict[str, Any] = {}
    todo: list[tuple[str, Any]] = [("", table)]
    seen = 0
    while todo:
        name, value = todo.pop()
        seen += 1
        if seen > MAX_LEAVES or len(name) > 1000:
            raise ConfigError("has too many settings, or too deep ones, for a training run")
        if isinstance(value, Mapping) and value:
            inside = [(key if isinstance(key, str) else for_message(key), each) for key, each in value.items()]
        elif isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
            inside = [(str(index), each) for index, each in enumerate(value)]
        else:
            leaves[name] = value
            continue
        todo += [(f"{name}.{key}" if name else key, each) for key, each in reversed(inside)]
    return leaves
