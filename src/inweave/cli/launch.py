"""Several processes of one run on this machine: started, watched and stopped together.

Each one is `python -m inweave train` with the settled configuration, and learns from its environment which of how many it is
(as under torchrun). Only the first one writes to the terminal; what another says is shown if it was the one that failed.
They have a session of their own, so that a Ctrl-C reaches them through here, and exactly once.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

import typer

#: seconds the others get to end by themselves after one has failed: it may have told them nothing
GRACE = 10.0
#: exit code of a process that ended because another one did
LOST = 4


def launch(processes: int, configuration: str, as_json: bool) -> int:
    """The exit code: 0 if all of them ended well, else that of the first that did not."""
    with tempfile.TemporaryDirectory(prefix="inweave-train-") as place:
        file = Path(place) / "train.toml"
        file.write_text(configuration, "utf-8")
        command = [sys.executable, "-m", "inweave", "train", str(file), *(["--json"] if as_json else [])]
        port = _free_port()
        started = [_start(command, rank, processes, port, Path(place)) for rank in range(processes)]

        def passed_on(number: int, frame: FrameType | None) -> None:
            for each in started:
                if each.poll() is None:
                    each.send_signal(number)

        heard = {signal.SIGINT: passed_on, signal.SIGTERM: passed_on}
        if hasattr(signal, "SIGHUP"):  # the terminal is gone, and they have another session: they would run on
            heard[signal.SIGHUP] = lambda *_: passed_on(signal.SIGTERM, None)
        before = {
            number: signal.signal(number, handler)
            for number, handler in heard.items()
            if signal.getsignal(number)
            is not signal.SIG_IGN  # nohup, or a shell's background: it was asked not to hear
        }
        try:
            failed = _watched(started)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for each in started:
                if each.poll() is None:
                    each.kill()
                each.wait()
        if failed is None:
            return 0
        if failed:  # the first one was not it, so nothing has been said yet
            for stream in ("out", "err"):
                said = (Path(place) / f"{failed}.{stream}").read_text("utf-8", "replace").strip()
                if said:
                    typer.echo(said, err=stream == "err")
        code = started[failed].returncode
        return code if code >= 0 else 128 - code


def _watched(started: list[subprocess.Popen[bytes]]) -> int | None:
    """The number of the process that failed first and not because of another; None if all ended well."""
    failed: list[int] = []
    deadline = float("inf")
    while True:
        ended = [each.poll() for each in started]
        failed += [rank for rank, code in enumerate(ended) if code and rank not in failed]
        if failed and deadline == float("inf"):
            deadline = time.monotonic() + GRACE
        if None not in ended or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    by_itself = [rank for rank in failed if started[rank].returncode != LOST]
    if 0 in by_itself:  # it has said why itself
        return 0
    return next(iter(by_itself or failed), None)


def _start(command: list[str], rank: int, processes: int, port: int, place: Path) -> subprocess.Popen[bytes]:
    told = {
        "WORLD_SIZE": processes, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": processes,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    threads = max((os.cpu_count() or 1) // processes, 1)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ, **{name: str(value) for name, value in told.items()}}
    if rank == 0:
        return subprocess.Popen(command, env=environment, start_new_session=True)
    with (place / f"{rank}.out").open("wb") as out, (place / f"{rank}.err").open("wb") as err:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=err, start_new_session=True)


def _free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port: int = asked.getsockname()[1]
        return port
