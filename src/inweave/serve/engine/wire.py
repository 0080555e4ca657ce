"""Messages between the web process and its child processes, over a pair of pipes.

    message = length of the header (4 bytes, big-endian) | header (JSON) | blobs
    header  = {"type": ..., "data": {...}, "blobs": [[path, length], ...]}

The data of a message may contain `bytes` at any depth. They follow the header as blobs: in the JSON, null takes their
place, and the path (keys and indexes) says where each one belongs. Nothing is ever unpickled. A message that exceeds
the limits ends the connection, like a closed pipe.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

MAX_HEADER = 16 * 1024 * 1024
MAX_BLOBS = 1024 * 1024 * 1024
MAX_BLOB_COUNT = 1024
BlobPath = list[str | int]


class WireError(Exception):
    """The other side closed the pipe, or sent something that is not a message."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message: its type and its data, JSON values and bytes."""

    type: str
    data: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the message as bytes."""
        blobs: list[tuple[BlobPath, bytes]] = []
        fields = {"type": self.type, "data": _without_blobs(self.data, [], blobs)}
        header = json.dumps({**fields, "blobs": [(path, len(blob)) for path, blob in blobs]}).encode()
        return b"".join((struct.pack(">I", len(header)), header, *(blob for _, blob in blobs)))


@dataclass(frozen=True, slots=True)
class MessageHeader:
    """A parsed header; ``blobs``: (path, length) of each blob that follows it."""

    type: str
    data: dict[str, Any]
    blobs: list[tuple[BlobPath, int]]

    def message(self, contents: Iterable[bytes]) -> Message:
        """Return the message, with the contents of the blobs in their places."""
        for (path, _), content in zip(self.blobs, contents, strict=True):
            place: Any = self.data
            try:
                for key in path[:-1]:
                    place = place[key]
                place[path[-1]] = content
            except (KeyError, IndexError, TypeError):
                raise WireError("not a message: a blob has no place in it") from None
        return Message(self.type, self.data)


def parse_length(text: bytes) -> int:
    """Return the length of the header that follows."""
    (length,) = struct.unpack(">I", text)
    if length > MAX_HEADER:
        raise WireError(f"a header of {length:,} bytes is larger than {MAX_HEADER:,}")
    return int(length)


def parse_header(text: bytes) -> MessageHeader:
    """Return the header in a JSON text."""
    try:
        fields = json.loads(text)
        header = MessageHeader(fields["type"], fields["data"], [(path, length) for path, length in fields["blobs"]])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"not a message: {type(error).__name__}") from None
    if not isinstance(header.type, str) or not isinstance(header.data, dict):
        raise WireError("not a message: it has no type or no data")
    valid = all(isinstance(path, list) and isinstance(length, int) and length >= 0 for path, length in header.blobs)
    if not valid or len(header.blobs) > MAX_BLOB_COUNT or sum(length for _, length in header.blobs) > MAX_BLOBS:
        raise WireError("not a message: its blobs are out of bounds")
    return header


def read_message(read: Callable[[int], bytes]) -> Message:
    """Return the next message from a blocking stream whose ``read`` returns fewer bytes only at its end."""

    def exactly(count: int) -> bytes:
        content = read(count)
        if len(content) != count:
            raise WireError("the pipe was closed")
        return content

    header = parse_header(exactly(parse_length(exactly(4))))
    return header.message([exactly(length) for _, length in header.blobs])


async def receive_message(stream: asyncio.StreamReader) -> Message:
    """Return the next message from a stream; raise WireError at its end."""
    try:
        header = parse_header(await stream.readexactly(parse_length(await stream.readexactly(4))))
        return header.message([await stream.readexactly(length) for _, length in header.blobs])
    except (asyncio.IncompleteReadError, ConnectionError):
        raise WireError("the process is gone") from None


def _without_blobs(value: Any, path: BlobPath, blobs: list[tuple[BlobPath, bytes]]) -> Any:
    """Return a value with None in place of bytes, which are appended to ``blobs``."""
    if isinstance(value, bytes):
        blobs.append((path, value))
        return None
    if isinstance(value, dict):
        return {name: _without_blobs(each, [*path, name], blobs) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_blobs(each, [*path, index], blobs) for index, each in enumerate(value)]
    return value
