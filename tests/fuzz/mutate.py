"""Damage: of text, of bytes, and of documents. Every function takes a random generator and is nothing but a function
of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

#: what a stranger puts where something else is expected
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 0.0, -0.0, 0.5, 1e30, 1e308, -1e308, 5e-324, float("nan"), float("inf"), 2**31,
    -(2**31), 2**53, 2**63, 2**64, 10**300, 10**400, -(10**400), "", " ", "0", "-1", "nan", "1e999", "null", "true",
    "None", "auto", "all-linear", "\0", "a\0b", "\ud800", "\udcff", "\u202e", "\x9b", "\U0001f44d", "a" * 5000,
    "../../etc/passwd", "/etc/passwd", "~nosuch/x", "x" * 300, "(a+)+b", "(?=(a+)+b)", ".*" * 12, "[", "(" * 200,
    "{a|b}", "<lora:x:1>", [], {}, [[]], [None], [1, 2], ["a", "b"],
    {"a": 1}, {"": None}, [[[[[[]]]]]], {"a": {"b": {"c": {}}}}, "9" * 5000, -5, 7, "lora", "LORA", "fp16", 1000,
    10**7, [10**7] * 3,
)  # fmt: skip
WORDS = (
    "(", ")", "[", "]", "{", "}", "|", ":", "::", ",", ";", "<", ">", "<lora:", "<lora:a:1>", "AND", "BREAK", "\\",
    "\\(", '"', "'", "\n",
    "\r\n", "\t", "\0", "=", "==", ".", "..", "...", "/", "../", "~", "#", "%", "$", "&", "&a", "*a", "<<",
    "!!python/object:os.system", "---", "- ", "? ", "@", "|||", ";;;", "[trigger]", "1", "0", "-1", "1e999", "nan",
    "inf", "9" * 400, "true", "null", "é", "日本", "👍", "\ud800", "\u202e", "\x1b[2J", "\x9b", "\ufeff", "a" * 1000,
    " " * 100, "Steps: 20, ", "Negative prompt:", "Seed: ", "Size: 1x1",
)  # fmt: skip


def pick(rng: random.Random, *choices: Callable[[], Any]) -> Any:
    return rng.choice(choices)()


def text(rng: random.Random, seeds: Sequence[str], words: Sequence[str] = WORDS) -> str:
    """One of the seeds with a few edits: cut, doubled, joined with another one, words put in, many of one word."""
    value = rng.choice(seeds)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at, to = sorted(rng.randrange(len(value) + 1) for _ in range(2))
        action = rng.randrange(8)
        if action == 0:
            value = value[:at] + value[to:]
        elif action == 1:
            value = value[:to] + value[at:to] * rng.choice((1, 2, 20)) + value[to:]
        elif action == 2:
            value = value[:at] + rng.choice(seeds)[: rng.randrange(200)] + value[at:]
        elif action == 3:
            value = value[:at] + rng.choice(words) * rng.choice((1, 1, 2, 50, 2000)) + value[at:]
        elif action == 4:
            value = (
                value[:at]
                + chr(rng.choice((rng.randrange(128), rng.randrange(0x300), rng.randrange(0x110000))))
                + value[to:]
            )
        elif action == 5:
            value = value[at:to] + value[:at] + value[to:]
        else:
            value = value[:at] + rng.choice(words) + value[to if action == 6 else at :]
        value = value[:20_000]
    return value


def damaged(rng: random.Random, raw: bytes) -> bytes:
    """Bytes flipped, cut, repeated, swapped or overwritten."""
    value = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(value)) if value else 0
        action = rng.randrange(7)
        if action == 0 and value:
            value[at] ^= 1 << rng.randrange(8)
        elif action == 1 and value:
            value[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif action == 2:
            del value[at:]
        elif action == 3:
            value[at:at] = value[at : at + rng.randrange(64)] * rng.choice((1, 3))
        elif action == 4:
            del value[at : at + rng.randrange(1, 64)]
        elif action == 5:
            value[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\0\0\0\x01"))
        else:
            value[at : at + 8] = rng.randbytes(8)
    return bytes(value)


def document(rng: random.Random, seed: Any, values: Sequence[Any] = VALUES) -> Any:
    """A copy of a document with a few places changed: removed, renamed, replaced, wrapped or doubled."""
    value = _copy(seed)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        value = _changed(rng, value, values)
    return value


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copy(each) for name, each in value.items()}
    return [_copy(each) for each in value] if isinstance(value, list) else value


def _changed(rng: random.Random, value: Any, values: Sequence[Any]) -> Any:
    inside = isinstance(value, dict | list) and value and rng.random() < 0.85
    if not inside:
        # copied: the next change may be inside of it, and the values belong to all inputs
        return rng.choice((_copy(rng.choice(values)), [value], {"a": value}, _copy(rng.choice(values))))
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    action = rng.randrange(10)
    if action == 0:
        value.pop(key)
    elif action == 1 and isinstance(value, dict):
        value[str(rng.choice(values))[:600]] = value.pop(key)
    elif action == 2 and isinstance(value, dict):
        value[str(rng.choice(WORDS))] = _copy(rng.choice(values))
    elif action == 3 and isinstance(value, list):
        value += _copy(value)[:50]
    elif action < 6:
        value[key] = _copy(rng.choice(values))
    else:
        value[key] = _changed(rng, value[key], values)
    return value
