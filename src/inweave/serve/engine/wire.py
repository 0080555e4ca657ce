"""Messages between the web process and a model process, over a pair of pipes.

    message = length of the header (4 bytes, big-endian) | header (JSON) | blobs
    header  = {"type": ..., ..., "blobs": [length, ...]}

Nothing is ever unpickled. A message that breaks the limits ends the connection, like a closed pipe.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_HEADER = 16 * 1024 * 1024
MAX_BLOBS = 1024 * 1024 * 1024
MAX_BLOB_COUNT = 1024


class WireError(Exception):
    """The other side closed the pipe, or sent something that is no message."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message: its type, its fields and its bytes."""

    type: str
    data: dict[str, Any] = field(default_factory=dict)
    blobs: tuple[bytes, ...] = ()

    def encode(self) -> bytes:
        header = json.dumps({**self.data, "type": self.type, "blobs": [len(blob) for blob in self.blobs]}).encode()
        return b"".join((struct.pack(">I", len(header)), header, *self.blobs))


def parse_header(text: bytes) -> tuple[str, dict[str, Any], list[int]]:
    """(type, fields, lengths of the blobs)."""
    try:
        header = json.loads(text)
        kind, lengths = header.pop("type"), header.pop("blobs")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise WireError(f"not a message: {type(error).__name__}") from None
    valid = isinstance(kind, str) and isinstance(lengths, list) and len(lengths) <= MAX_BLOB_COUNT
    if not valid or not all(isinstance(length, int) and length >= 0 for length in lengths) or sum(lengths) > MAX_BLOBS:
        raise WireError("not a message: its blobs are out of bounds")
    return kind, header, lengths


def parse_length(text: bytes) -> int:
    """The length of the header that follows."""
    (length,) = struct.unpack(">I", text)
    if length > MAX_HEADER:
        raise WireError(f"a header of {length:,} bytes is larger than {MAX_HEADER:,}")
    return int(length)


def read_message(read: Callable[[int], bytes]) -> Message:
    """The next message from a blocking stream whose ``read`` returns fewer bytes only at its end."""

    def exactly(count: int) -> bytes:
        content = read(count)
        if len(content) != count:
            raise WireError("the pipe was closed")
        return content

    kind, data, lengths = parse_header(exactly(parse_length(exactly(4))))
    return Message(kind, data, tuple(exactly(length) for length in lengths))
