"""Notations of values in other trainers' files: true or "True", 3 or "3", ["a=1"] or "a=1", "512,768" or [512, 768].

A value of another kind raises `ValueError` with a message about it.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from typing import Any

from inweave.checked import for_message

#: values of a setting that asks for nothing; False and 0.0 are equal to 0
OFF: tuple[Any, ...] = (None, "", 0, [], {}, ())
_OFF_TEXT = ("false", "none", "null", "0", "0.0", "no", "off")


def is_off(value: Any) -> bool:
    """Return whether a value asks for nothing: empty, zero, false, or the text of one of these."""
    return value in OFF or (isinstance(value, str) and value.strip().lower() in _OFF_TEXT)


def normalize_name(value: Any) -> str:
    """Return a name without case and punctuation: AdamW8bit, ADAMW_8BIT and adamw-8bit are the same."""
    return "".join(
        letter for letter in (value if isinstance(value, str) else for_message(value))[:100].lower() if letter.isalnum()
    )


def parse_bool(value: Any) -> bool:
    text = normalize_name(value)
    if text in ("true", "1", "yes", "on"):
        return True
    if text in ("false", "0", "no", "off", "none"):
        return False
    raise ValueError(f"expected true or false, got {for_message(value)}")


def parse_number(value: Any) -> float:
    try:
        if (
            isinstance(value, int | float | str)
            and not isinstance(value, bool)
            and math.isfinite(parsed := float(value))
        ):
            return parsed
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"expected a number, got {for_message(value)}")


def number_or(value: Any, default: float) -> float:
    """Return the number of a setting, 0 included, and ``default`` where there is none."""
    return default if value is None or value == "" else parse_number(value)


def parse_int(value: Any) -> int:
    if (parsed := parse_number(value)) != int(parsed):
        raise ValueError(f"expected a whole number, got {for_message(value)}")
    return int(parsed)


def parse_pairs(value: Any) -> dict[str, str]:
    """Return the table that ["a=1", "b=2"], 'a=1 "b=2"' or a table means."""
    if isinstance(value, Mapping):
        return {str(name): each for name, each in value.items()}
    listed = words(value) if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(each, str) and "=" in each for each in listed):
        raise ValueError(f'expected a list such as ["name=value"], got {for_message(value)}')
    pairs = (each.partition("=") for each in listed)
    return {name.strip(): text.strip().strip("'\"") for name, _, text in pairs}


def names(text: str) -> tuple[str, ...]:
    """Return the names in a text, for tables that are lists of them."""
    return tuple(text.split())


def words(text: str) -> list[str]:
    """Return the words of a command line; an unbalanced quote is ignored."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.replace('"', "").split()


def parse_scalar(value: Any) -> Any:
    """Return the value of text such as true, 3 or 0.5; other text is returned unchanged."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            parsed = kind(value)
        except ValueError:
            continue
        return parsed if math.isfinite(parsed) else value
    return value


def parse_sizes(value: Any) -> list[int]:
    """Return the sides of 1024, "1024,1024", "512x768" or [512, 768]."""
    listed = value.replace("x", ",").split(",") if isinstance(value, str) else value
    sides = [parse_int(each) for each in (listed if isinstance(listed, list | tuple) else [listed])]
    if not sides or min(sides) < 1:
        raise ValueError(f"expected a size, got {for_message(value)}")
    return sides


def with_setting_name(message: str, settings: Mapping[str, Any]) -> str:
    """Prefix a message about a value with the names of the settings that contain it."""
    names = []
    for name, value in settings.items():
        parts = re.split(r"[,x]", value) if isinstance(value, str) else value if isinstance(value, list) else []
        if any(message.endswith(for_message(each)) for each in (value, *parts)) and not message.startswith(name):
            names.append(name)
    return f"{', '.join(names[:3])}: {message}" if names else message
