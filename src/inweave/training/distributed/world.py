"""The processes of a run: one, or several that add up their gradients.

accelerate reads how it was launched and joins the processes, with NCCL on GPUs and gloo on CPUs:

    inweave train --gpus 2 ...                                        the shortest
    torchrun --nproc-per-node 2 -m inweave train ...
    accelerate launch --multi_gpu --num_processes 2 -m inweave train ...
    mpirun -n 2 python -m inweave train ...                           on CPUs, with MASTER_ADDR set; also through accelerate

Since all gradients are one buffer, a step needs one sum over all processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch

from inweave.errors import ConfigError, LostPeerError
from inweave.training.distributed.env import launched
from inweave.training.memory.oom import out_of_memory

#: how long processes wait for the first one, which encodes the data and draws the samples
PATIENCE = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class World:
    size: int = 1
    rank: int = 0
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def device(self, wanted: str | None) -> str | None:
        """The one of this process: several share the GPUs of a machine, one each, unless told otherwise."""
        if _on_cpu(wanted):
            return "cpu"
        if self.size == 1 or wanted not in (None, "auto", "cuda") or not torch.cuda.is_available():
            return wanted
        return f"cuda:{self.local_rank}"

    def turns(self, count: int, *, together: bool = False) -> Iterator[tuple[int, bool]]:
        """(number, whether it counts) of the things this process does out of ``count``, one after the other in turn.

        ``together``: all processes do equally many, so that nobody waits for one that has none left.
        """
        for begin in range(0, count, self.size):
            number = begin + self.rank
            if number < count or together:
                yield min(number, count - 1), number < count

    def add_up(self, tensor: torch.Tensor) -> None:
        """The sum over all processes, in place."""
        if self.size > 1:
            with _peers():
                torch.distributed.all_reduce(tensor)

    def any(self, said: bool, device: torch.device) -> bool:
        """Whether one of the processes says so; all of them get the same answer."""
        if self.size == 1:
            return said
        votes = torch.tensor(float(said), device=device)
        self.add_up(votes)
        return bool(votes > 0)

    def least(self, value: int, device: torch.device) -> int:
        """The smallest that any of the processes has."""
        if self.size == 1:
            return value
        found = torch.tensor(value, dtype=torch.int64, device=device)
        with _peers():
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN)
            return int(found)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            with _peers():
                torch.distributed.barrier()

    def leave(self) -> None:
        if self.size > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@contextmanager
def _peers() -> Iterator[None]:
    """Words for what a library says when another process is gone."""
    try:
        yield
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        told = " ".join(str(error).split())
        raise LostPeerError(
            f"another process of this run has ended, and what it said tells why ({told[:200]})"
        ) from None


def join(device: str | None = None) -> World:
    """The world this process was launched into."""
    size, _ = launched()
    if size <= 1:
        if "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ:
            raise ConfigError(
                "accelerate launch was asked for several processes and started one: on CPUs it needs MPI "
                "(--mpirun_hostfile). Write inweave train --gpus 2, or torchrun --nproc-per-node 2 -m inweave train; for one "
                "process, --num_processes 1 and no MASTER_ADDR"
            )
        return World()
    try:
        from accelerate import PartialState
    except ImportError:
        raise ConfigError("several processes need accelerate: pip install 'inweave[train]'") from None
    cpu = _on_cpu(device) or not torch.cuda.is_available()
    if not cpu and int(os.environ.get("LOCAL_RANK", "0")) >= torch.cuda.device_count():
        raise ConfigError(
            f"there are {torch.cuda.device_count()} GPUs on this machine; start as many processes at most"
        )
    state = PartialState(cpu=cpu, timeout=PATIENCE)
    if state.num_processes != size:
        raise ConfigError(
            f"{size} processes were started and {state.num_processes} joined; start them with inweave train --gpus {size}"
        )
    return World(state.num_processes, state.process_index, state.local_process_index)


def _on_cpu(wanted: str | None) -> bool:
    """Whether the configuration says so, or leaves it open and `accelerate launch --cpu` does."""
    return wanted == "cpu" or (
        wanted in (None, "auto") and os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on", "y")
    )
