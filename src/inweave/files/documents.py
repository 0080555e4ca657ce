"""JSON of strangers: bounded in size, nesting, number of values and digits before anything else looks at it.

    format_json(document)      as text that is safe to print: whatever is not printable is escaped, as JSON escapes it

    read_json(path)            an object from a file
    parse_json(text, where)    any value from a text; ``where`` names it in errors

    nesting   at most 64: everything that walks a document may recurse
    digits    at most 300 per integer, so that each of them can become a float
    values    at most 1,000,000: two bytes of JSON can become a hundred in memory

A number such as 1e999, which would become infinity, and the words NaN and Infinity are refused: they could not be
written again. Where other programs write them (configurations of models), ``finite=False`` accepts them.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

from inweave.errors import FormatError
from inweave.files.paths import ErrorClass, is_plain, printable_path
from inweave.files.reading import read_bytes

MAX_JSON = 64 * 1024 * 1024
MAX_DEPTH = 64
MAX_DIGITS = 300
MAX_VALUES = 1_000_000


def read_json(
    path: str | os.PathLike[str], limit: int = MAX_JSON, *, error: ErrorClass = FormatError, finite: bool = True
) -> dict[str, object]:
    """Return a JSON object from a file of at most ``limit`` bytes."""
    document = parse_json(read_bytes(path, limit, error=error), printable_path(path), error=error, finite=finite)
    if not isinstance(document, dict):
        raise error(f"{printable_path(path)}: a JSON object was expected")
    return document


def parse_json(
    text: str | bytes,
    where: str,
    *,
    error: ErrorClass = FormatError,
    finite: bool = True,
    values: int = MAX_VALUES,
) -> Any:
    """Return the value of a JSON text; raise an ``error`` that starts with ``where`` if it is invalid."""
    if isinstance(text, bytes):
        count = text.count(b",") + text.count(b"[") + text.count(b"{")
    else:
        count = text.count(",") + text.count("[") + text.count("{")
    if count > values:
        raise error(f"{where}: more than {values:,} values; at most {values:,} are accepted")
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        checks = {"parse_float": _number, "parse_constant": _constant} if finite else {}
        document = json.loads(text, parse_int=_integer, **checks)  # type: ignore[arg-type]
    except RecursionError:
        raise error(f"{where}: not valid JSON: nested too deeply") from None
    except UnicodeDecodeError as problem:
        raise error(f"{where}: not valid JSON: byte {problem.start} is not UTF-8") from None
    except (ValueError, MemoryError) as problem:
        raise error(f"{where}: not valid JSON: {str(problem)[:200]}") from None
    if not _is_shallow(document):
        raise error(f"{where}: nested more than {MAX_DEPTH} deep")
    return document


def format_json(document: object, indent: int | None = None) -> str:
    """Return a document as JSON that is safe to print: no control character, no change of direction, no lone surrogate.

    A number that is not finite is null.
    """
    try:
        text = json.dumps(document, indent=indent, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(document), indent=indent, ensure_ascii=False, allow_nan=False)
    if is_plain(text):
        return text
    return "".join(c if c == "\n" or is_plain(c) else json.dumps(c)[1:-1] for c in text)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {_finite(name): _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits):,} digits; at most {MAX_DIGITS} are accepted")
    return int(digits)


def _number(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:40]} is too large")
    return number


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _is_shallow(document: object) -> bool:
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return True
    return False
