"""The processes of a run: one, or several that add up their gradients.

accelerate reads how it was launched (`accelerate launch`, `torchrun`, or `weft train --gpus N`) and joins the processes,
with NCCL on GPUs and gloo on CPUs. Since all gradients are one buffer, a step needs one sum over all processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch

from weft.errors import ConfigError

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
            torch.distributed.all_reduce(tensor)

    def any(self, said: bool, device: torch.device) -> bool:
        """Whether one of the processes says so; all of them get the same answer."""
        if self.size == 1:
            return said
        votes = torch.tensor(float(said), device=device)
        self.add_up(votes)
        return bool(votes > 0)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            torch.distributed.barrier()

    def leave(self) -> None:
        if self.size > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def join(device: str | None = None) -> World:
    """The world this process was launched into."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return World()
    try:
        from accelerate import PartialState
    except ImportError:
        raise ConfigError("several processes need accelerate: pip install 'weft[train]'") from None
    cpu = device == "cpu" or not torch.cuda.is_available()
    if not cpu and int(os.environ.get("LOCAL_RANK", "0")) >= torch.cuda.device_count():
        raise ConfigError(
            f"there are {torch.cuda.device_count()} GPUs on this machine; start as many processes at most"
        )
    state = PartialState(cpu=cpu, timeout=PATIENCE)
    return World(state.num_processes, state.process_index, state.local_process_index)
