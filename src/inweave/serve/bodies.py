"""The JSON of a request, read strictly: what two readers could understand differently is refused.

refused    NaN and infinity, numbers beyond floating point, repeated names, nesting that exhausts the stack,
           NUL and halves of surrogate pairs in texts (not every database, file or answer can hold them),
           bodies that are declared as something else
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from fastapi import Request

from inweave.errors import ConfigError
from inweave.serve.errors import MediaTypeError

_SUSPECT = re.compile(r"\\u(?:[dD][89a-fA-F]|0000)")
#: JSON, and what curl -d says of any body
_TYPE = re.compile(r"application/(([\w.+-]+\+)?json|x-www-form-urlencoded)")


async def json_body(request: Request) -> Any:
    """The JSON of a request; `ConfigError` where it is not strictly valid."""
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared and not _TYPE.fullmatch(declared):
        raise MediaTypeError("Content-Type: expected application/json")
    return parse_json(await request.body())


def parse_json(content: bytes | str) -> Any:
    """JSON from outside."""
    try:
        text = content if isinstance(content, str) else content.decode(json.detect_encoding(content))
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_unique)
        if _SUSPECT.search(text) and any("\0" in each for each in _texts(value) if each.encode() is not None):
            raise ConfigError("the body has a text with NUL in it")
        return value
    except RecursionError:
        raise ConfigError("the body is nested too deeply") from None
    except ValueError:  # also what cannot be decoded or encoded
        raise ConfigError("the body is not valid JSON") from None


def _texts(value: Any) -> Iterator[str]:
    """Every text in it, names of fields included."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            waiting += (*each, *each.values())
        elif isinstance(each, list):
            waiting += each


def _refuse(name: str) -> Any:
    raise ValueError(name)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name is repeated")
    return fields
