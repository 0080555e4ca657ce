"""The JSON of a request, read strictly: what two readers could understand differently is refused.

refused    NaN and infinity, numbers beyond floating point, repeated names, nesting that exhausts the stack,
           halves of surrogate pairs (no text can hold them: not a database, not a file, not an answer)
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from fastapi import Request

from inweave.errors import ConfigError

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


async def json_body(request: Request) -> Any:
    """The JSON of a request; `ConfigError` where it is not strictly valid."""
    return parse_json(await request.body())


def parse_json(content: bytes | str) -> Any:
    """JSON from outside."""
    try:
        text = content if isinstance(content, str) else content.decode(json.detect_encoding(content))
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_unique)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except RecursionError:
        raise ConfigError("the body is nested too deeply") from None
    except ValueError:  # also what cannot be decoded or encoded
        raise ConfigError("the body is not valid JSON") from None


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
