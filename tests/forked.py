"""Programs in processes forked from one that has imported the libraries, which takes longer than most of them run.

    -> program, arguments, folder, environment (and the ends of two pipes)    <- pid, then its exit code or -signal

A program is the text of a script, and its process is real: it has pipes, an environment and a folder of its own, and
signals reach it by its pid. Starting Python and importing modules is tested by those who start a command.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
MODULES = ("torch._dynamo", "prodigyopt", "schedulefree", "inweave.cli.app", "inweave.generate.pipeline",
           "inweave.training.session", "tests.unit.training.tiny")  # fmt: skip
CLASSES = {
    "diffusers": ("AutoencoderKL", "FluxTransformer2DModel", "UNet2DConditionModel"),
    "transformers": ("CLIPTextModel", "LlamaForCausalLM", "T5EncoderModel"),
}


class ForkedProcess:
    """The part of `subprocess.Popen` that tests use."""

    def __init__(self, status: socket.socket, stdout: int, stderr: int) -> None:
        self._status = status.makefile()
        self.pid = int(self._status.readline())
        self.returncode: int | None = None
        self._texts = ["", ""]
        self._threads = [
            threading.Thread(target=self._read, args=(number, os.fdopen(pipe)), daemon=True)
            for number, pipe in enumerate((stdout, stderr))
        ]
        self._threads.append(threading.Thread(target=self._wait, daemon=True))
        for thread in self._threads:
            thread.start()

    def _read(self, number: int, pipe: IO[str]) -> None:
        with pipe:
            self._texts[number] = pipe.read()

    def _wait(self) -> None:
        with self._status:
            self.returncode = int(self._status.readline())

    def poll(self) -> int | None:
        """Return the exit code, or -signal; None while it runs."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to a process that runs."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float = 600) -> tuple[str, str]:
        """Wait for the end; return what it wrote to standard output and standard error."""
        for thread in self._threads:
            thread.join(timeout)
            if thread.is_alive():
                self.send_signal(signal.SIGKILL)
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout, self._texts[0], self._texts[1])
        return self._texts[0], self._texts[1]


def fork_program(
    program: str, *arguments: str, folder: Path = ROOT, environment: Mapping[str, str] | None = None,
    packages: tuple[Path, ...] = (),
) -> ForkedProcess:  # fmt: skip
    """Start a program with these arguments in a folder; ``environment``: in place of this process's.

    ``packages``: folders whose packages are installed there.
    """
    ours, theirs = socket.socketpair()
    (stdout, stdout_end), (stderr, stderr_end) = os.pipe(), os.pipe()
    request = {"program": program, "arguments": arguments, "folder": str(folder),
               "environment": dict(os.environ if environment is None else environment)}  # fmt: skip
    content = json.dumps(request).encode()
    with theirs:
        ends = [theirs.fileno(), stdout_end, stderr_end]
        server, _ = _server(packages)
        socket.send_fds(server, [len(content).to_bytes(4)], ends)
        server.sendall(content)
    os.close(stdout_end)
    os.close(stderr_end)
    with ours:
        return ForkedProcess(ours, stdout, stderr)


def run_forked(
    program: str, *arguments: str, folder: Path = ROOT, environment: Mapping[str, str] | None = None,
    timeout: float = 600, packages: tuple[Path, ...] = (),
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a program to its end."""
    process = fork_program(program, *arguments, folder=folder, environment=environment, packages=packages)
    output, errors = process.communicate(timeout)
    return subprocess.CompletedProcess([program, *arguments], process.returncode or 0, output, errors)


@cache
def _server(packages: tuple[Path, ...]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Return the process that forks, and the connection to it; it ends when this one does."""
    ours, theirs = socket.socketpair()
    path = [*map(str, packages), str(ROOT), *filter(None, sys.path)]
    process = subprocess.Popen(
        [sys.executable, "-c", f"from tests.forked import serve; serve({theirs.fileno()})"], cwd=ROOT,
        pass_fds=[theirs.fileno()],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))},
    )  # fmt: skip
    theirs.close()
    return ours, process


def serve(connection: int) -> None:
    """Fork a process for every request, until the connection ends."""
    from inweave.models.lazy_imports import defer_imports

    for name in MODULES:
        importlib.import_module(name)
    with defer_imports():
        for name, classes in CLASSES.items():
            for each in classes:
                getattr(importlib.import_module(name), each)
    with socket.socket(fileno=connection) as requests:
        while True:
            header, pipes, *_ = socket.recv_fds(requests, 4, 3)
            if not header:
                return
            content = b""
            while len(content) < int.from_bytes(header):
                content += requests.recv(int.from_bytes(header) - len(content))
            if not os.fork():
                requests.close()
                os._exit(_watch(json.loads(content), pipes))
            for pipe in pipes:
                os.close(pipe)
            _reap()


def _reap() -> None:
    """Collect the processes that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _watch(request: dict[str, object], pipes: list[int]) -> int:
    """Fork the process, and report its pid and its end."""
    status, *output = pipes
    if not (process := os.fork()):
        os.close(status)
        os._exit(_run(request, output))
    for pipe in output:
        os.close(pipe)
    os.write(status, f"{process}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    os.write(status, f"{code}\n".encode())
    return 0


def _run(request: dict[str, object], output: list[int]) -> int:
    """Run the program as Python runs a script; return its exit code."""
    for pipe, number in zip(output, (1, 2), strict=True):
        os.dup2(pipe, number)
        os.close(pipe)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    os.chdir(str(request["folder"]))
    sys.argv = ["-c", *request["arguments"]]  # type: ignore[misc]
    code = 0
    try:
        exec(compile(str(request["program"]), "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code
