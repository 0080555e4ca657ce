"""Processes of a run that learn why another one ended, or that it is lost; real ones, over gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from inweave.training.distributed.env import LOST
from inweave.training.distributed.watch import Watch
from inweave.training.distributed.world import World

WORKER = """
import os, signal, sys
from inweave.training import session
from inweave.training.distributed import watch
from inweave.training.config.schema import TrainConfig
watch.BEAT, watch.SILENCE, watch.GRACE = 0.2, 3, 2

def prepare(config, world, on_progress):
    world.wait()
    if world.rank == 1:
        {act}
    world.wait()

session.prepare = prepare
try:
    session.train(TrainConfig.of(dataset="-", device="cpu"))
except Exception as error:
    print(type(error).__name__, error)
"""


def start(act: str) -> list[subprocess.Popen[str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", WORKER.format(act=act)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": "0"},
        )
        for rank in range(2)
    ]  # fmt: skip


def test_the_error_of_another_machine_is_named() -> None:
    first, second = start("raise ValueError('no such folder: /data')")
    assert second.communicate(timeout=200)[0] == "ValueError no such folder: /data\n"
    printed = first.communicate(timeout=60)[0]
    assert printed == (
        f"LostPeerError another process of this run ended: rank 1 on {socket.gethostname()}: no such folder: /data\n"
    )


def test_a_machine_that_never_answers_ends_the_run() -> None:
    """Its connections stay open, so no collective fails, and the longest wait of one is a day."""
    first, second = start("os.kill(os.getpid(), signal.SIGSTOP)")
    try:
        printed = first.communicate(timeout=200)[1]
        assert first.returncode == LOST
        assert "error: rank 1 of this run has not answered for 3 seconds: its machine is lost" in printed
    finally:
        second.kill()
        second.wait()


@pytest.mark.parametrize("world", [World(), World(2, 1)])
def test_without_a_process_group_there_is_nothing_to_watch(world: World) -> None:
    watch, started = Watch(world), time.monotonic()
    watch.report(ValueError("unheard"))
    watch.close()
    assert not watch.active and time.monotonic() - started < 1
