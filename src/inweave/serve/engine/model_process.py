"""The process that holds a device and hosts a `Runner`: commands on its standard input, reports on its standard output.

It ends when its standard input ends, so it never outlives the process that started it, and when its lease has run out
(exit code ``LEASE_OVER``). The messages are described in `inweave.serve.engine.contract`.
"""

from __future__ import annotations

import os
import select
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, BinaryIO

from inweave.errors import CancelledError
from inweave.files.confinement import confine
from inweave.serve.engine.contract import (
    Cancel,
    Cancelled,
    Command,
    DeviceMemory,
    Emit,
    Finished,
    JobEvent,
    Lease,
    Load,
    Loaded,
    Ready,
    Report,
    Residency,
    Room,
    RunnerSettings,
    RunRequest,
    decode,
    encode,
)
from inweave.serve.engine.rpc_loop import collect_less, message_pipes, reported
from inweave.serve.engine.wire import WireError, read_message
from inweave.serve.jobs.private_paths import PATHS
from inweave.weights.gc_pause import collector_waits

if TYPE_CHECKING:
    from inweave.serve.engine.requests import Ended
    from inweave.serve.engine.runner import Runner


LEASE_OVER = 75
#: seconds to read a lease that has arrived while the process had no time
LEASE_GRACE = 0.2


class ModelProcess:
    """Runs requests, several together where they can be; a cancellation reaches a running one between two steps."""

    def __init__(self, commands: BinaryIO, reports: BinaryIO) -> None:
        self._commands, self._reports = commands, reports
        self._queue: SimpleQueue[RunnerSettings | Command | Report] = SimpleQueue()
        self._cancelled: set[str] = set()
        self._until: float | None = None  # of the lease; without one it runs until its input ends
        self._write = threading.Lock()
        self._finishing = ThreadPoolExecutor(1, "inweave-finish")

    def serve(self) -> None:
        """Run commands until the process ends."""
        threading.Thread(target=self._read, name="inweave-commands", daemon=True).start()
        with collector_waits():
            from inweave.ops.tensors.device import limit_threads
            from inweave.serve.engine.requests import Requests  # imports torch: seconds
            from inweave.serve.engine.runner import Runner

        settings = self._queue.get()
        assert isinstance(settings, RunnerSettings)
        confine(*map(Path, settings.folders))
        if settings.threads is not None:
            limit_threads(settings.threads)
        PATHS.add((*settings.folders, *settings.private))
        runner = Runner(settings)
        self._send(Ready(runner.device))
        requests, room, loads = Requests(runner), Room(1), list[Load]()
        while True:
            idle = not requests.busy
            while idle or not self._queue.empty():
                command, idle = self._queue.get(), False
                if isinstance(command, Load):
                    loads.append(command)
                elif isinstance(command, RunRequest):
                    requests.submit(command, self._emitter(runner, command.job), self._is_cancelled(command.job))
            while loads and not requests.busy:
                self._send(self._load(runner, loads.pop(0)))
            for ended in requests.advance():
                residency, memory = runner.residency, runner.memory
                # images are encoded while the next step is computed
                self._finishing.submit(self._finish, ended, residency, memory)
            if requests.room != room:
                room = requests.room
                self._send(room)

    def _emitter(self, runner: Runner, job: str) -> Emit:
        return lambda event: self._send(JobEvent(job, event, runner.memory))

    def _is_cancelled(self, job: str) -> Cancelled:
        return lambda: job in self._cancelled

    def _read(self) -> None:
        """Read commands in a separate thread: a cancellation must arrive while a job runs."""
        try:
            while True:
                command = decode(read_message(self._commands.read))
                if isinstance(command, Cancel):
                    self._cancelled.add(command.job)
                elif isinstance(command, Lease):
                    if self._until is None:
                        threading.Thread(target=self._end_with_lease, name="inweave-lease", daemon=True).start()
                    self._until = command.until
                else:
                    self._queue.put(command)
        except (WireError, OSError, ValueError):
            os._exit(0)  # the web process is gone, and with it the reader of any result

    def _end_with_lease(self) -> None:
        """End the process when the lease is over: another runner may have this job by now."""
        while True:
            if (rest := (self._until or 0.0) - time.monotonic()) > 0:
                time.sleep(min(rest, 1.0))
                continue
            time.sleep(LEASE_GRACE)
            unread = bool(select.select([self._commands], [], [], 0)[0])
            if not unread and (self._until or 0.0) <= time.monotonic():
                os._exit(LEASE_OVER)

    def _load(self, runner: Runner, command: Load) -> Loaded:
        try:
            runner.load(command.model)
        except Exception as error:  # reported by /ready; jobs for other models may still run
            return Loaded(command.model, reported(error), runner.memory)
        return Loaded(command.model, memory=runner.memory)

    def _finish(self, ended: Ended, residency: Residency, memory: DeviceMemory | None) -> None:
        """Report the end of a job."""
        job = ended.job
        try:
            report = Finished(job, "done", ended.finish(), residency=residency, memory=memory)
        except CancelledError:
            report = Finished(job, "cancelled", residency=residency, memory=memory)
        except Exception as error:  # a bug or a lack of memory fails one job, not the process
            report = Finished(job, "failed", error=reported(error), residency=residency, memory=memory)
        self._cancelled.discard(job)
        self._send(report)

    def _send(self, report: Report) -> None:
        content = encode(report).encode()
        with self._write:
            self._reports.write(content)
            self._reports.flush()


def main() -> None:
    collect_less()
    ModelProcess(*message_pipes()).serve()


if __name__ == "__main__":
    main()
