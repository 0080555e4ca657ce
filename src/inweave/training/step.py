"""One update of the weights: a function of static tensors.

    for each micro-batch   loss = task.loss(inputs);  (scale * share * loss).backward()      share = 1 / all micro-batches
    all processes          grads = sum of their grads
    once                   norm, clip, optimizer, loss scale, average; where the norm is not finite nothing changes

Inputs are copied into buffers that stay where they are (one set a shape); gradients, values and optimizer state are flat
buffers; no number comes to the host: losses and counters are read when somebody asks. A step that runs out of memory is
begun again with every micro-batch cut in two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from inweave.errors import ConfigError, MemoryBudgetError
from inweave.training.config.schema import TrainConfig
from inweave.training.distributed.world import World
from inweave.training.memory.oom import needing, out_of_memory
from inweave.training.optim.adamw import Optimizer, make_optimizer
from inweave.training.optim.ema import Ema
from inweave.training.optim.flat import FlatParameters
from inweave.training.optim.loss_scale import LossScaler, clip
from inweave.training.tasks.base import Task, Tensors, number_for


class Step:
    """Everything an update reads and writes."""

    def __init__(self, task: Task, flat: FlatParameters, config: TrainConfig, world: World) -> None:
        self.task, self.flat, self.config, self.world = task, flat, config, world
        device = flat.values.device
        self.optimizer: Optimizer = make_optimizer(
            config.optimizer, flat, weight_decay=config.weight_decay, betas=config.betas, epsilon=config.epsilon,
            args=config.optimizer_args,
        )  # fmt: skip
        self.ema = Ema(flat, config.ema_decay) if config.ema_decay else None
        half = getattr(task, "dtype", torch.float32) == torch.float16
        self.scaler = LossScaler(device) if half else None
        self.rate = torch.zeros((), device=device)
        self.loss = torch.zeros((), device=device)
        self.norm = torch.zeros((), device=device)
        self.bad = torch.zeros((), dtype=torch.int64, device=device)
        self.bad_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.split = 1  # into how many pieces micro-batches are cut, after memory ran out
        self._buffers: dict[tuple[object, ...], Tensors] = {}

    def run(self, number: int, rate: float, batches: Sequence[Tensors]) -> None:
        """Update ``number``, at this learning rate, from this process's micro-batches."""
        self.rate.fill_(rate)
        self._within_memory(lambda: self._accumulate(number, batches), batches)
        with needing("update the adapter", 'set optimizer = "adamw8bit"'):  # some of it may be done: no second try
            self._update()

    @torch.no_grad()
    def judge(self, batch: Tensors) -> torch.Tensor:
        """The loss of a batch that nothing is learnt from."""
        total = torch.zeros_like(self.loss)

        def add() -> None:
            total.zero_()
            for piece, part in _pieces(batch, self.split):
                total.add_(self.task.loss(self._placed(piece)), alpha=part)

        self._within_memory(add, [batch])
        return total

    def _accumulate(self, number: int, batches: Sequence[Tensors]) -> None:
        self.flat.zero_grads()
        self.loss.zero_()
        share = 1.0 / (len(batches) * self.world.size)
        for micro, batch in enumerate(batches):
            place = micro * self.world.size + self.world.rank
            for count, (piece, part) in enumerate(_pieces(batch, self.split)):
                # dropout, the adapter's or the model's own, is the only thing drawn inside a step
                torch.manual_seed(number_for(self.config.seed, number, place, count, "dropout"))
                loss = self.task.loss(self._placed(piece))
                factor = share * part
                scaled = loss * factor if self.scaler is None else loss * (factor * self.scaler.scale)
                scaled.backward()  # type: ignore[no-untyped-call]
                self.loss += loss.detach() * factor

    def _update(self) -> None:
        self.world.add_up(self.flat.grads)
        self.world.add_up(self.loss)
        scale = 1.0 if self.scaler is None else self.scaler.scale
        grad_scale, ok, norm = clip(self.flat.grads, self.config.max_grad_norm or None, scale)
        ok = ok & self.loss.isfinite()
        self.norm.copy_(norm)
        self.optimizer.step(self.rate, grad_scale, ok)
        if self.scaler is not None:
            self.scaler.update(ok)
        if self.ema is not None:
            self.ema.update(ok)
        self.bad.add_(~ok)
        self.bad_in_a_row.copy_(torch.where(ok, 0, self.bad_in_a_row + 1))

    def _placed(self, batch: Tensors) -> Tensors:
        """The batch in buffers at fixed addresses."""
        key = tuple((name, tuple(value.shape), value.dtype) for name, value in batch.items())
        if key not in self._buffers:
            self._buffers[key] = {name: value.to(self.task.device, copy=True) for name, value in batch.items()}
            return self._buffers[key]
        for name, value in batch.items():
            self._buffers[key][name].copy_(value, non_blocking=True)
        return self._buffers[key]

    def _within_memory(self, work: Callable[[], None], batches: Sequence[Tensors]) -> None:
        """Do ``work``, with smaller pieces each time that memory runs out."""
        while True:
            try:
                with _attention(self.task.device):
                    return work()
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                told = " ".join(str(error).split())
            # outside of the handler: the error holds its frames, and they hold what was computed
            if self.config.shard:  # the other processes wait inside the network, and would not begin again
                raise MemoryBudgetError(
                    f'out of memory; set gradient_checkpointing = "full", or lower batch_size or resolution ({told})'
                )
            largest = max(_rows(batch) for batch in batches)
            self.flat.zero_grads()
            self._buffers.clear()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if self.split >= largest:
                raise MemoryBudgetError(
                    f'out of memory with one example at a time; set gradient_checkpointing = "full" or lower resolution ({told})'
                )
            self.split *= 2

    # state

    def state(self) -> Tensors:
        found = {f"values.{name}": value for name, value in self.flat.state().items()}
        found |= {f"optimizer.{name}": value for name, value in self.optimizer.state().items()}
        if self.ema is not None:
            found |= {f"ema.{name}": value for name, value in self.ema.state().items()}
        if self.scaler is not None:
            found |= {f"scaler.{name}": value for name, value in self.scaler.state().items()}
        counters = {"bad": self.bad, "bad_in_a_row": self.bad_in_a_row, "split": torch.tensor(self.split)}
        return found | counters

    def load(self, tensors: Tensors) -> None:
        def part(prefix: str) -> Tensors:
            return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

        # batches of unequal size may make unequal numbers of pieces
        if self.config.shard and int(tensors["split"]) > 1:
            raise ConfigError(
                "shard: this run computes its batches in pieces, since memory ran out; go on without shard"
            )
        self.flat.load(part("values."))
        self.optimizer.load(part("optimizer."))
        if self.ema is not None:
            self.ema.load(part("ema."))
        if self.scaler is not None:
            self.scaler.load(part("scaler."))
        self.bad.copy_(tensors["bad"])
        self.bad_in_a_row.copy_(tensors["bad_in_a_row"])
        self.split = int(tensors["split"])  # another split adds up in another order


def _attention(device: torch.device) -> AbstractContextManager[object]:
    """On a GPU without cuDNN's kernel: its backward pass reads beyond its memory at 4,608 tokens of 128 (Flux)."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _rows(batch: Tensors) -> int:
    return len(next(iter(batch.values())))


def _pieces(batch: Tensors, split: int) -> list[tuple[Tensors, float]]:
    """The batch cut along its first axis, and how much of it each piece is."""
    if split == 1:
        return [(batch, 1.0)]
    rows = {name: value.chunk(split) for name, value in batch.items()}
    made = [{name: parts[i] for name, parts in rows.items()} for i in range(len(next(iter(rows.values()))))]
    return [(piece, _rows(piece) / _rows(batch)) for piece in made]
