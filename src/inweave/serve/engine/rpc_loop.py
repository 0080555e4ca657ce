"""The life of a helper process: it answers calls over its standard input and output until the input ends.

Standard output is for messages alone: what libraries print goes to standard error.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from inweave.serve.engine.wire import Message, WireError, read_message


def message_pipes() -> tuple[BinaryIO, BinaryIO]:
    """(commands, answers): the standard streams, out of reach of what libraries print."""
    commands, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return commands, answers


def collect_less() -> None:
    """As the command does: libraries create a million objects that stay, and collections while they load cost 2 s of 11."""
    gc.set_threshold(50_000, 20, 20)
    atexit.register(gc.freeze)


def answer_calls(begin: Callable[[dict[str, Any]], object], answer: Callable[[Message], Message]) -> None:
    """``begin`` with the settings, which come first, then ``answer`` every call."""
    commands, answers = message_pipes()
    try:
        begin(read_message(commands.read).data)
        while True:
            answers.write(answer(read_message(commands.read)).encode())
            answers.flush()
    except (WireError, OSError):
        return
