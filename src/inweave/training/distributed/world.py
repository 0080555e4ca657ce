"""The processes of a run: one, or several that sum their gradients.

accelerate detects how the process was launched and joins the group, with NCCL on GPUs and gloo on CPUs:

    inweave train --gpus 2 ...                                        the shortest
    torchrun --nproc-per-node 2 -m inweave train ...
    accelerate launch --multi_gpu --num_processes 2 -m inweave train ...
    mpirun -n 2 python -m inweave train ...                           on CPUs, with MASTER_ADDR set

All gradients are one buffer, so a step needs one sum over the processes, in either of two orders:

    any        one all-reduce: its order depends on the library, the topology and the place in the buffer
    of ranks   (g_0 + g_1) + g_2 ...: every process adds up its part of the buffer, then the parts are gathered; the
               same traffic, and twice the buffer in memory. Each bit is that of one process which adds up the same
               micro-batches. Used with `deterministic`, and always on the CPU
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch

from inweave.errors import ConfigError, LostPeerError
from inweave.ops.tensors.oom import out_of_memory
from inweave.training.distributed.env import launched

#: the longest wait for the first process, which encodes the data and generates the samples
PATIENCE = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class World:
    """The process group, as seen by one process; a single process needs no group."""

    size: int = 1
    rank: int = 0
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def device(self, setting: str | None) -> str | None:
        """Return the device of this process: one GPU each, unless the setting names another."""
        if _on_cpu(setting):
            return "cpu"
        if self.size == 1 or setting not in (None, "auto", "cuda") or not torch.cuda.is_available():
            return setting
        return f"cuda:{self.local_rank}"

    def turns(self, count: int, *, together: bool = False) -> Iterator[tuple[int, bool]]:
        """Yield (number, whether it counts) for this process's share of ``count`` items, which are dealt out in turn.

        ``together``: every process gets equally many, so that none waits for one that has none left.
        """
        for start in range(0, count, self.size):
            number = start + self.rank
            if number < count or together:
                yield min(number, count - 1), number < count

    def add_up(self, tensor: torch.Tensor, *, ordered: bool = False) -> None:
        """Sum over all processes, in place; ``ordered``: in the order of their ranks."""
        if self.size > 1:
            with _peers():
                if ordered and self.size > 2:  # a sum of two is the same in either order
                    _add_in_order(tensor, self.size)
                else:
                    torch.distributed.all_reduce(tensor)

    def any(self, condition: bool, device: torch.device) -> bool:
        """Return whether the condition is true on at least one process, the same on all of them."""
        if self.size == 1:
            return condition
        votes = torch.tensor(float(condition), device=device)
        self.add_up(votes)
        return bool(votes > 0)

    def least(self, value: int, device: torch.device) -> int:
        """Return the smallest value of all processes."""
        if self.size == 1:
            return value
        smallest = torch.tensor(value, dtype=torch.int64, device=device)
        with _peers():
            torch.distributed.all_reduce(smallest, torch.distributed.ReduceOp.MIN)
            return int(smallest)

    def wait(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            with _peers():
                torch.distributed.barrier()

    def leave(self) -> None:
        if self.size > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _add_in_order(tensor: torch.Tensor, size: int) -> None:
    """Sum over ``size`` processes in the order of their ranks, in place."""
    length = -(-tensor.numel() // size)  # of the part that a process adds up
    buffer = tensor.new_zeros(size * length)
    buffer[: tensor.numel()] = tensor.flatten()
    own_part = torch.empty_like(buffer)  # as each process has it
    torch.distributed.all_to_all_single(own_part, buffer)
    total, *others = own_part.view(size, length)
    for other in others:
        total += other
    torch.distributed.all_gather(list(buffer.view(size, length)), total)
    tensor.copy_(buffer[: tensor.numel()].view_as(tensor))


@contextmanager
def failed_collectives() -> Iterator[None]:
    """Turn failed collectives inside of a library, such as those of FSDP, into a LostPeerError."""
    try:
        yield
    except RuntimeError as error:
        if any(name in str(error) for name in ("gloo", "NCCL", "ProcessGroup")):
            raise _lost(error) from None
        raise


@contextmanager
def _peers() -> Iterator[None]:
    """Turn a failed collective into a LostPeerError."""
    try:
        yield
    except RuntimeError as error:
        raise _lost(error) from None


def _lost(error: RuntimeError) -> Exception:
    if out_of_memory(error):
        return error
    reason = " ".join(str(error).split())
    return LostPeerError(f"another process of this run ended; see its own message ({reason[:200]})")


def join(device: str | None = None) -> World:
    """Join the process group this process was launched into."""
    size, _ = launched()
    if size <= 1:
        if "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ:
            raise ConfigError(
                "accelerate launch started one process instead of several: on CPUs it needs MPI "
                "(--mpirun_hostfile). Use inweave train --gpus 2, or torchrun --nproc-per-node 2 -m inweave train; for "
                "one process, --num_processes 1 and no MASTER_ADDR"
            )
        return World()
    try:
        from accelerate import PartialState
    except ImportError:
        raise ConfigError("several processes need accelerate: pip install 'inweave[train]'") from None
    cpu = _on_cpu(device) or not torch.cuda.is_available()
    if not cpu and int(os.environ.get("LOCAL_RANK", "0")) >= torch.cuda.device_count():
        raise ConfigError(f"this machine has {torch.cuda.device_count()} GPUs; start at most as many processes")
    state = PartialState(cpu=cpu, timeout=PATIENCE)
    if state.num_processes != size:
        raise ConfigError(
            f"{size} processes were started and {state.num_processes} joined; start them with "
            f"inweave train --gpus {size}"
        )
    return World(state.num_processes, state.process_index, state.local_process_index)


def _on_cpu(setting: str | None) -> bool:
    """Return whether the configuration chooses the CPU, or leaves it open and `accelerate launch --cpu` does."""
    return setting == "cpu" or (
        setting in (None, "auto")
        and os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on", "y")
    )
