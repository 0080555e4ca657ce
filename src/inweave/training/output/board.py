"""TensorBoard's event files, written here: a few bytes a number need no library, and each is on the disk at once.

    file     events.out.tfevents.<seconds>.<nanoseconds>; TensorBoard reads the files of a folder in the order of names
    record   length (u64)  crc(length)  event  crc(event)      little-endian; crc: CRC-32C, rotated and shifted (u32)
    event    1: time (f64)  2: step  3: version (text)  5: summary  7: session
    summary  1: value {1: tag (text)  2: number (f32)}, again for more
    session  1: 1, a start: what earlier files say of this step and later ones counts no more

A field is its number and kind in one byte, then what it holds (protocol buffers).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from pathlib import Path

VERSION = b"brain.Event:2"
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, lowest bit first


def _table() -> tuple[int, ...]:
    found = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        found.append(byte)
    return tuple(found)


_TABLE = _table()


class Board:
    """The event file of a run that goes on after step ``since``."""

    def __init__(self, folder: Path, since: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        seconds, rest = divmod(time.time_ns(), 10**9)
        self._file = (folder / f"events.out.tfevents.{seconds:010d}.{rest:09d}").open("xb")
        self._write(0, _bytes(3, VERSION))
        self._write(since + 1, _bytes(7, _whole(1, 1)))

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [_bytes(1, _bytes(1, tag.encode()) + _float(2, number)) for tag, number in numbers.items()]
        if values:
            self._write(step, _bytes(5, b"".join(values)))

    def close(self) -> None:
        self._file.close()

    def _write(self, step: int, what: bytes) -> None:
        event = _double(1, time.time()) + _whole(2, step) + what
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checked(length) + event + _checked(event))
        self._file.flush()


def _checked(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


# fields


def _whole(number: int, value: int) -> bytes:
    return bytes([number << 3]) + _varint(value)


def _double(number: int, value: float) -> bytes:
    return bytes([number << 3 | 1]) + struct.pack("<d", value)


def _bytes(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


def _float(number: int, value: float) -> bytes:
    return bytes([number << 3 | 5]) + struct.pack("<f", value)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that there are more."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
