"""The processes of one run on this machine: started, monitored and stopped together.

Each one runs `python -m inweave train` with the complete configuration and reads its rank and the world size from the
environment, as under torchrun. Only the first one writes to the terminal; the output of another is printed if that one
failed first. They run in separate sessions, so that a Ctrl-C reaches them only through this process, and exactly once.

Modules are never imported from the working directory, where `python -m` alone would look first: a dataset's folder may
hold a file of any name.
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

from inweave.files.paths import printable

#: seconds for the other processes to exit after one has failed, before they are killed
GRACE = 10.0


def launch(processes: int, configuration: str, as_json: bool) -> int:
    """Run all processes; return 0 if all succeeded, else the exit code of the first that failed."""
    with tempfile.TemporaryDirectory(prefix="inweave-train-") as folder:
        file = Path(folder) / "train.toml"
        file.write_text(configuration, "utf-8")
        command = [sys.executable, "-P", "-m", "inweave", "train", str(file), *(["--json"] if as_json else [])]
        port = free_port()
        started = [_start(command, rank, processes, port, Path(folder)) for rank in range(processes)]

        def forward(number: int, frame: FrameType | None) -> None:
            for each in started:
                if each.poll() is None:
                    each.send_signal(number)

        handlers = {signal.SIGINT: forward, signal.SIGTERM: forward}
        if hasattr(signal, "SIGHUP"):  # the terminal closed; in their own sessions they would not notice
            handlers[signal.SIGHUP] = lambda *_: forward(signal.SIGTERM, None)
        before = {
            number: signal.signal(number, handler)
            for number, handler in handlers.items()
            if signal.getsignal(number) is not signal.SIG_IGN  # ignored under nohup, or in a shell's background
        }
        try:
            failed = _wait(started)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for each in started:
                if each.poll() is None:
                    each.kill()
                each.wait()
        if failed is None:
            return 0
        if failed:  # not rank 0, so its output has not been printed yet
            for stream in ("out", "err"):
                output = (Path(folder) / f"{failed}.{stream}").read_text("utf-8", "replace").strip()
                if output:
                    typer.echo("\n".join(map(printable, output.splitlines())), err=stream == "err")
        code = started[failed].returncode
        return code if code >= 0 else 128 - code


def _wait(started: list[subprocess.Popen[bytes]]) -> int | None:
    """Return the rank that failed first, and not because of another one; None if all succeeded."""
    from inweave.training.distributed.env import LOST

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
    culprits = [rank for rank in failed if started[rank].returncode != LOST]
    if 0 in culprits:  # it has printed the reason itself
        return 0
    return next(iter(culprits or failed), None)


def _start(command: list[str], rank: int, processes: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    variables = {
        "WORLD_SIZE": processes, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": processes,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    threads = max((os.cpu_count() or 1) // processes, 1)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "PYTHONSAFEPATH": "1",  # for processes that a library starts in turn
        **{name: str(value) for name, value in variables.items()},
    }
    if rank == 0:
        return subprocess.Popen(command, env=environment, start_new_session=True)
    with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=err, start_new_session=True)


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
