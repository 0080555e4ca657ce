"""Which world a process was launched into, as launchers say it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from inweave.errors import ConfigError
from inweave.training.distributed.env import launched
from inweave.training.distributed.world import World, join

NAMES = (
    "WORLD_SIZE", "RANK", "LOCAL_RANK", "PMI_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU",
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("names", [("WORLD_SIZE", "RANK"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")])
def test_every_launcher_is_understood(names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched() == (1, 0) and join() == World()
    for name, value in zip(names, ("3", "2"), strict=True):
        monkeypatch.setenv(name, value)
    assert launched() == (3, 2)


def test_one_process_instead_of_several_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `accelerate launch --cpu --num_processes 2` tells the only process it starts."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    assert join("cpu") == World(), "and of --num_processes 1"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ConfigError, match=r"started one process instead of several.*inweave train --gpus 2"):
        join("cpu")


def test_cpu_from_the_launcher_is_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert World().device(None) is None and World().device("auto") == "auto"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert World().device(None) == World().device("auto") == "cpu"
    assert World().device("cuda:1") == "cuda:1"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "False")
    assert World().device(None) is None


def test_processes_of_an_mpi_join() -> None:
    """Two real processes with what OpenMPI's mpirun tells them."""
    program = (
        "import torch; from inweave.training.distributed.world import join; world = join('cpu');"
        "total = torch.tensor(float(world.rank + 1));"
        "world.add_up(total); least = world.least(9 - world.rank, total.device);"
        "print(world.size, world.rank, float(total), least); world.leave()"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={
            **os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            **{f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")},
            **{f"OMPI_COMM_WORLD_{name}": str(rank) for name in ("RANK", "LOCAL_RANK")},
        })
        for rank in (0, 1)
    ]  # fmt: skip
    assert [each.communicate(timeout=120)[0].split() for each in started] == [["2", rank, "3.0", "8"] for rank in "01"]


LAST = """
import sys
from inweave.errors import InweaveError
from inweave.training.distributed.world import join
world = join("cpu")
if world.rank:
    sys.exit(1)
try:
    world.wait()
except InweaveError as error:
    print(type(error).__name__, str(error)[:45])
"""


def test_a_lost_peer_is_reported() -> None:
    """Not the words of a library about a socket."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    started = [
        subprocess.Popen([sys.executable, "-c", LAST], stdout=subprocess.PIPE, text=True, env={
            **os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), **environment,
        })
        for rank in (0, 1)
    ]  # fmt: skip
    assert (
        started[0].communicate(timeout=120)[0].strip() == "LostPeerError another process of this run ended; see its ow"
    )
    started[1].communicate(timeout=60)
