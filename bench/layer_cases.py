"""What the sweeps of a layer's kernels share: random tensors of one shape, microseconds in a CUDA graph, compiling with all cores.

ROWSxINTOxOUTxRANKxLAYERS     e.g. 4608x3072x3072x16x3: queries, keys and values of Flux, with LoRAs of rank 16
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence

import torch

from inweave.bench.timing import captured_seconds

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
#: the launches that a sweep is going to time for a shape, so that they can be compiled before
Launches = Callable[[str], Sequence[Callable[[], object]]]


class LayerCase:
    """Inputs and factors of the layers of one shape."""

    def __init__(self, name: str) -> None:
        self.rows, self.into, self.out, self.rank, self.count = map(int, name.split("x"))
        self._generator = torch.Generator(DEVICE).manual_seed(0)
        self.x = self.random(self.rows, self.into)
        self.down = self.random(self.count * self.rank, self.into)
        self.up = self.random(self.count * self.out, self.rank)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=DEVICE).to(DTYPE)


def attempt(work: Callable[[], object]) -> object:
    """What the work returns; None for tiles that do not fit the device."""
    try:
        return work()
    except Exception:
        return None


def micros(work: Callable[[], object]) -> float:
    seconds = attempt(lambda: captured_seconds(work, DEVICE, copies=10, replays=20))
    return seconds * 1e6 if isinstance(seconds, float) else float("inf")


def compile_in_parallel(launches: Launches, names: Sequence[str], parts: int = 4) -> None:
    """Compile the kernels of every shape into the cache on disk, by a process per core."""
    with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 1) - 2)) as pool:
        pool.starmap(_compile, [(launches, name, part, parts) for name in names for part in range(parts)], chunksize=1)


def _compile(launches: Launches, name: str, part: int, parts: int) -> None:
    for launch in launches(name)[part::parts]:
        attempt(launch)
    torch.cuda.synchronize(DEVICE)
