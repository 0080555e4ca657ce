"""CUDA graphs of an update: its kernels are recorded once per shape and replayed, without Python in between.

    micro-batch    forward and backward, one graph per shape of its inputs
    update         clipping, optimizer, loss scale, EMA: one graph, unless the optimizer comes from a library

Work runs eagerly the first time a shape appears: libraries choose their kernels and Triton compiles its own. The second
time it is recorded, which computes nothing, and from then on it is replayed. All graphs share one memory pool: one runs
at a time, and their results are stored outside of the pool. Dropout needs no special care: a replay reads the current
seed of the generator.

Work that cannot be recorded (because it reads a number from the device, say) runs eagerly from then on, and the reason
is logged. If memory runs out while recording, a batch that can be split is split: half of it, recorded, is several
times as fast as all of it, run eagerly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

import torch

from inweave.ops.common.select import is_nvidia
from inweave.ops.tensors.graphs import GraphPool
from inweave.ops.tensors.oom import out_of_memory
from inweave.training.config.schema import TrainConfig
from inweave.training.optim.adamw import OWN_OPTIMIZERS, AdamW, AdamW8bit
from inweave.training.optim.third_party import LibraryOptimizer

SHORTEST_RECORDED_RUN = 20  # steps
REPLAYS_OF_A_SIZE = 10  # recording a batch size takes about as long as three eager steps on it


def capture_problems(config: TrainConfig, device: torch.device) -> list[str]:
    """Return why forward and backward passes of this run cannot be captured in CUDA graphs; empty if they can."""
    problems = []
    if not is_nvidia(device):
        problems.append(f"device {device}: only NVIDIA GPUs have CUDA graphs")
    if config.shard:
        problems.append("shard: the base is gathered by hooks on the host")
    if config.prior_prediction:
        problems.append("prior_prediction: adapters are switched off and on within a step")
    return problems


def optimizer_problem(config: TrainConfig) -> str | None:
    """Return why the optimizer runs eagerly, after a recorded backward pass; None if it is recorded too."""
    optimizer: type[AdamW | AdamW8bit | LibraryOptimizer] = OWN_OPTIMIZERS.get(config.optimizer, LibraryOptimizer)
    return None if optimizer.capturable else f"{config.optimizer}: {optimizer.capture_problem}"


def recording_pays(steps: int, micro_batches: int, sizes: int) -> bool:
    """Return whether a run is long enough to make up for recording each of its ``sizes`` of batches."""
    return steps >= SHORTEST_RECORDED_RUN and micro_batches >= REPLAYS_OF_A_SIZE * sizes


def is_recorded(config: TrainConfig, device: torch.device) -> bool:
    """Return whether the settings of a run lead to recorded steps; the sizes of its batches are not known yet."""
    if config.graph == "off" or capture_problems(config, device):
        return False
    return config.graph == "on" or config.steps is None or config.steps >= SHORTEST_RECORDED_RUN


class StepGraphs:
    """Graphs of one run on one device; ``enabled`` False runs everything eagerly."""

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled and device.type == "cuda"
        self.problem: str | None = None  # why recording was given up
        self._reported: str | None = None
        self.seconds = 0.0  # spent on recording
        self._pool = GraphPool(device)
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._seen: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, work: Callable[[], None], *, can_split: bool = False) -> None:
        """Do ``work``, which must be the same on every call with this ``key``, at fixed addresses.

        ``can_split``: the caller can retry with smaller batches, so running out of memory is raised; no graph is kept.
        """
        if not self.enabled:
            work()
        elif (graph := self._graphs.get(key)) is not None:
            graph.replay()
        elif key not in self._seen:
            self._seen.add(key)
            self._pool.run(work)
        elif (recorded := self._record(work, can_split)) is not None:
            self._graphs[key] = recorded
            recorded.replay()
        else:
            work()

    def new_problem(self) -> str | None:
        """Return why recording was given up, once; None afterwards."""
        reported, self._reported = self._reported, self.problem
        return self.problem if reported is None else None

    def clear(self) -> None:
        """Forget all graphs and their memory: addresses have changed, or the memory is needed."""
        self._graphs.clear()
        self._seen.clear()
        self._pool.release()

    def _record(self, work: Callable[[], None], can_split: bool) -> torch.cuda.CUDAGraph | None:
        started = time.perf_counter()
        try:
            return self._pool.record(work)
        except Exception as error:  # the model does something that cannot be recorded
            self.clear()
            if can_split and out_of_memory(error):
                raise
            self.problem = " ".join(str(error).split())[:300]
            self.enabled = False
            return None
        finally:
            self.seconds += time.perf_counter() - started
