"""The processes of a run, forked from one that has only imported the libraries.

Launchers, which import them again in every process, are tested in `test_train_processes`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable


def run_ranks(work: Callable[[], None], size: int = 2) -> None:
    """Run ``work`` as all ranks of one world; exit with 1 as soon as any of them fails or is killed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = {_start(work, rank, size, port) for rank in range(size)}
    code = 0
    while processes:
        process, status = os.wait()
        processes.discard(process)
        if status and not code:
            code = 1
            for other in processes:
                os.kill(other, signal.SIGKILL)
    if code:
        sys.exit(code)


def _start(work: Callable[[], None], rank: int, size: int, port: int) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
                       "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
