"""The process that holds a device: reads requests from its standard input, writes events to its standard output.

    -> settings {device, dtype, folders, ...}                  <- ready {pid, device}
    -> load {model}                                            <- loaded {model, error}
    -> run {job, kind, model, config, loras, ...} + inputs     <- event {job, event, data} + pictures
    -> cancel {job}                                            <- finished {job, state, result | error}

It ends when its standard input ends, so it never outlives the process that started it. Whatever libraries print goes to
standard error.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from inweave.errors import CancelledError, InweaveError
from inweave.files.confinement import confine
from inweave.serve.engine.contract import RunnerSettings, RunRequest
from inweave.serve.engine.rpc_loop import collect_less, message_pipes
from inweave.serve.engine.wire import Message, WireError, read_message
from inweave.serve.jobs.failures import failure_of
from inweave.serve.jobs.job import Event
from inweave.weights.gc_pause import collector_waits


class ModelProcess:
    """One request at a time, in the order they come; cancellation reaches the running one between two steps."""

    def __init__(self, commands: BinaryIO, answers: BinaryIO) -> None:
        self._commands, self._answers = commands, answers
        self._queue: SimpleQueue[Message] = SimpleQueue()
        self._cancelled: set[str] = set()
        self._write = threading.Lock()

    def serve(self) -> None:
        threading.Thread(target=self._read, name="inweave-commands", daemon=True).start()
        with collector_waits():
            from inweave.serve.engine.runner import Runner  # imports torch: seconds

        settings = self._queue.get().data
        confine(*map(Path, settings.pop("folders", ())))
        runner = Runner(RunnerSettings(**settings))
        self._send(Message("ready", {"pid": os.getpid(), "device": runner.device}))
        while True:
            message = self._queue.get()
            if message.type == "load":
                self._load(runner, message.data["model"])
            else:
                self._run(runner, message)

    def _read(self) -> None:
        """Commands, in a thread of their own: a cancellation must arrive while a job runs."""
        try:
            while True:
                message = read_message(self._commands.read)
                if message.type == "cancel":
                    self._cancelled.add(message.data["job"])
                else:
                    self._queue.put(message)
        except (WireError, OSError, ValueError):
            os._exit(0)  # the web process is gone: nobody waits for the result any more

    def _load(self, runner: Any, model: str) -> None:
        error = None
        try:
            runner.load(model)
        except Exception as problem:  # reported by /ready; jobs for other models may still run
            if not isinstance(problem, InweaveError):
                traceback.print_exc(file=sys.stderr)
            error = failure_of(problem).as_record()
        self._send(Message("loaded", {"model": model, "error": error}))

    def _run(self, runner: Any, message: Message) -> None:
        job = message.data["job"]
        names = message.data["inputs"]
        request = RunRequest(
            message.data["kind"], message.data["model"], message.data["config"], message.data["loras"],
            message.data["preview_every"], message.data["on_mismatch"], dict(zip(names, message.blobs, strict=True)),
            message.data["paths"], message.data["preview_first"], message.data["name"],
        )  # fmt: skip

        def emit(event: Event) -> None:
            self._send(Message("event", {"job": job, "event": event.type, "data": event.data}, event.blobs))

        try:
            if job in self._cancelled:
                raise CancelledError("cancelled before it started")
            result = runner.run(request, emit, lambda: job in self._cancelled)
            outcome: dict[str, Any] = {"state": "done", "result": result}
        except CancelledError:
            outcome = {"state": "cancelled"}
        except Exception as error:  # a bug or a lack of memory fails one job, not the process
            if not isinstance(error, InweaveError):
                traceback.print_exc(file=sys.stderr)
            outcome = {"state": "failed", "error": failure_of(error).as_record()}
        self._cancelled.discard(job)
        self._send(Message("finished", {"job": job, **outcome}))

    def _send(self, message: Message) -> None:
        with self._write:
            self._answers.write(message.encode())
            self._answers.flush()


def main() -> None:
    collect_less()
    ModelProcess(*message_pipes()).serve()


if __name__ == "__main__":
    main()
