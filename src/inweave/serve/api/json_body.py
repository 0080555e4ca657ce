"""The JSON of a request, read strictly: anything that two parsers could read differently is refused.

Routes that read their body themselves call `json_body`; those that declare a model of it are of class `JsonRoute`. Both
accept the type that `curl -d` sends, and a body without a type.

refused    NaN and infinity, numbers beyond floating point, repeated names, nesting that exhausts the stack,
           NUL and halves of surrogate pairs in texts (not every database, file or answer can hold them),
           bodies that are declared as something else
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import Message

from inweave.errors import ConfigError
from inweave.serve.jobs.errors import MediaTypeError

_SUSPECT = re.compile(r"\\u(?:[dD][89a-fA-F]|0000)")
#: JSON, and the type that curl -d gives any body
_TYPE = re.compile(r"application/(([\w.+-]+\+)?json|x-www-form-urlencoded)")


async def json_body(request: Request) -> Any:
    """Return the JSON of a request; raise ConfigError if it is not strictly valid."""
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared and not _TYPE.fullmatch(declared):
        raise MediaTypeError("the body is expected as JSON: send it with Content-Type: application/json")
    return parse_json(await request.body())


class JsonRoute(APIRoute):
    """A route whose model of the body is read from JSON by the rules of this module."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def handle(request: Request) -> Response:
            content = await request.body()
            if content:
                await json_body(request)
            others = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
            scope = {**request.scope, "headers": [*others, (b"content-type", b"application/json")]}

            async def receive() -> Message:
                return {"type": "http.request", "body": content, "more_body": False}

            return await handler(Request(scope, receive))

        return handle


def parse_json(content: bytes | str) -> Any:
    """Parse untrusted JSON."""
    try:
        text = content if isinstance(content, str) else content.decode(json.detect_encoding(content))
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_unique)
        if _SUSPECT.search(text) and any("\0" in each for each in _texts(value) if each.encode() is not None):
            raise ConfigError("the body has a text with NUL in it")
        return value
    except RecursionError:
        raise ConfigError("the body is nested too deeply") from None
    except ValueError:  # also texts that cannot be decoded or encoded
        raise ConfigError("the body is not valid JSON") from None


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a value, names of fields included."""
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
