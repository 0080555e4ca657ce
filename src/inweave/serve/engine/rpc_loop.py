"""The child's side of a process: messages over its standard input and output until the input ends.

    <- settings {...}        first
    <- NAME {...}            -> answer {...} | error {code, message, ...}

Standard output is for messages alone: output that libraries print goes to standard error.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, BinaryIO

from inweave.errors import InweaveError
from inweave.serve.engine.wire import Message, WireError, read_message
from inweave.serve.jobs.failures import failure_of
from inweave.serve.jobs.job import Failure

Data = dict[str, Any]


def message_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return (commands, answers): the standard streams, out of reach of libraries that print."""
    commands, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return commands, answers


def collect_less() -> None:
    """Run the garbage collector less often, as the command line does.

    Libraries create a million objects that stay, and collections while they load take 2 s of 11.
    """
    gc.set_threshold(50_000, 20, 20)
    atexit.register(gc.freeze)


def reported(error: Exception) -> Failure:
    """Return an exception for the other side; the traceback of an unexpected one goes to standard error."""
    if not isinstance(error, InweaveError):
        traceback.print_exception(error, file=sys.stderr)
    return failure_of(error)


def answer_calls(
    calls: Mapping[str, Callable[[Data], Data]],
    begin: Callable[[Data], object] = lambda settings: None,
    redact: Callable[[Data, Data], Data] = lambda call, answer: answer,
) -> None:
    """Answer every call by its name until the input ends.

    ``begin`` gets the settings; ``redact(call, answer)`` returns the answer to a call, or its error, as it may leave.
    """
    commands, answers = message_pipes()
    try:
        begin(read_message(commands.read).data)
        while True:
            call = read_message(commands.read)
            try:
                answer = Message("answer", redact(call.data, calls[call.type](call.data)))
            except Exception as error:
                answer = Message("error", redact(call.data, asdict(reported(error))))
            answers.write(answer.encode())
            answers.flush()
    except (WireError, OSError):
        return
