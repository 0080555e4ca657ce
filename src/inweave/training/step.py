"""One update of the weights.

    for each micro-batch   stage its tensors in static buffers, the rows' seeds of dropout among them, then `micro_step`:
                           loss = task.loss(inputs);  (loss_scale * share * loss).backward()    share = 1 / all micro-batches
    all processes          sum gradients and losses
    text encoders          have no gradient, and keep their values, after the update at which they stop
    once                   `apply_gradients`: norm, clip, optimizer, norms of the weights, loss scale, EMA; skipped where the
                           gradients' norm is not finite

`micro_step` and `apply_gradients` are functions of tensors at fixed addresses: inputs, gradients, values, optimizer state
and counters stay where they are, no number comes to the host, and nothing is decided there; other libraries' optimizers read numbers on
the host, so with them `apply_gradients` is never recorded. What is decided on the host is
outside of them: copying inputs, and splitting micro-batches after memory ran out, which restarts the update.

Parameters are float32. On a GPU a micro-batch begins by rounding all of them to the model's dtype, in one kernel, and layers use
these copies until it ends: whatever was written to the parameters before (an update, a checkpoint, EMA) is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from inweave.errors import ConfigError, FormatError, MemoryBudgetError
from inweave.layers import fused, lora_layers
from inweave.ops.attention import recorded_choices
from inweave.training.checkpoint.facts import COUNTERS
from inweave.training.config.schema import TrainConfig
from inweave.training.distributed.world import World
from inweave.training.execution.capture import StepGraphs
from inweave.training.execution.choices import capture_problems, choice_problems, describe_choices
from inweave.training.execution.compilation import CompiledBlocks, choose, compile_problems, saves_time
from inweave.training.execution.kernels import choices_to_keep, deterministic_hints, step_kernels
from inweave.training.execution.oom import oom_hint, out_of_memory
from inweave.training.memory.speed import recording_pays
from inweave.training.optim.adamw import Optimizer, make_optimizer
from inweave.training.optim.ema import Ema
from inweave.training.optim.flat import FlatParameters, collect_gradients, hold
from inweave.training.optim.loss_scale import LossScaler, clip
from inweave.training.optim.rounding import RoundedFactors
from inweave.training.optim.weight_norms import limit_norms
from inweave.training.tasks.base import Task, Tensors, seed_for

DROPOUT = "dropout_seeds"  # the input that seeds the adapter's dropout: two numbers per row


class StaticInputs:
    """Batches on the device at fixed addresses, one set of buffers per shape."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[object, ...], Tensors] = {}

    def stage(self, batch: Tensors) -> Tensors:
        """Copy a batch into its buffers and return them."""
        key = shapes_of(batch)
        if key not in self._buffers:
            self._buffers[key] = {name: value.to(self._device, copy=True) for name, value in batch.items()}
            return self._buffers[key]
        for name, value in batch.items():
            # from other memory the host would wait until all earlier work on the device is done, and then prepare the next batch
            pinned = value.pin_memory() if self._device.type == "cuda" and not value.is_cuda else value
            self._buffers[key][name].copy_(pinned, non_blocking=True)
        return self._buffers[key]

    def clear(self) -> None:
        self._buffers.clear()


class Step:
    """Everything an update reads and writes."""

    def __init__(self, task: Task, flat: FlatParameters, config: TrainConfig, world: World) -> None:
        self.task, self.flat, self.config, self.world = task, flat, config, world
        device = flat.values.device
        self.optimizer: Optimizer = make_optimizer(
            config.optimizer, flat, weight_decay=config.weight_decay, betas=config.betas, epsilon=config.epsilon,
            args=config.optimizer_args, learning_rate=config.learning_rate,
        )  # fmt: skip
        self.ema = Ema(flat, config.ema_decay) if config.ema_decay else None
        self._dtype: torch.dtype = getattr(task, "dtype", torch.float32)
        self.scaler = LossScaler(device) if self._dtype == torch.float16 else None
        self.inputs = StaticInputs(task.device)
        self.rate = torch.zeros((), device=device)
        self.share = torch.zeros((), device=device)  # of the loss, for the micro-batch being computed
        self.loss = torch.zeros((), device=device)
        self.norm = torch.zeros((), device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        layers = [layer for network in task.networks.values() for layer in lora_layers(network).values()]
        self._branches = [layer.branch(name) for layer in layers for name in layer.adapters]
        self._dropping = [branch for branch in self._branches if branch.drops]
        for branch in self._dropping:
            branch.layer_number = torch.tensor(branch.layer_number, device=task.device)
        self.blocks = CompiledBlocks(task.networks, deterministic=config.deterministic)
        halves = self._dtype in (torch.bfloat16, torch.float16) and task.device.type in fused.DEVICES
        self._rounded = RoundedFactors(flat, task.networks, self._dtype) if halves else None
        self.graphs = StepGraphs(task.device, enabled=config.graph != "off" and not self.capture_problems)
        self._recording_seconds = 0.0  # of the graphs' seconds: those that were logged
        self.attention: dict[str, str] = {}  # which kernel computes which shape
        self.encoder_steps: int | None = None  # updates that train text encoders; None: all
        self.split = 1  # into how many parts a micro-batch is split, after memory ran out

    @property
    def capture_problems(self) -> list[str]:
        """Why forward and backward passes of this run cannot be captured in CUDA graphs; empty if they can."""
        return capture_problems(self.config, self.task.device)

    @property
    def compile_problems(self) -> list[str]:
        """Why the blocks of this run cannot be compiled; empty if they can."""
        return compile_problems(self.task.networks, self.config, self.task.device)

    def require_choices(self) -> None:
        """Raise where a setting is "on" and cannot be."""
        if problems := choice_problems(self.task.networks, self.config, self.task.device):
            raise ConfigError(problems)

    def choose_graphs(self, steps: int) -> None:
        """Record nothing in a run of ``steps`` that is too short to make up for it, unless the setting is "on"."""
        pays = recording_pays(steps, steps * self.config.gradient_accumulation, len(self.task.order.sizes))
        self.graphs.enabled &= self.config.graph == "on" or pays

    def compile(self, model: Any, steps: int, *, before: bool | None) -> list[str]:
        """Compile the blocks if that suits a run of ``steps``; returns what to say. ``before``: the resumed run's choice."""
        saves = before is None and saves_time(model, self.task.order, self.config, steps)
        chosen, notes = choose(self.config.compile, self.compile_problems, saves=saves, before=before)
        if chosen:
            self.blocks.start()
        return notes

    def choice_notes(self, steps: int) -> list[tuple[str, str]]:
        """What the log of a run of ``steps`` begins with about how they are executed; without a GPU there is no choice."""
        if self.task.device.type != "cuda":
            return []
        compiled = len(self.blocks.blocks) if self.blocks.active else 0
        against = self.capture_problems, self.compile_problems
        sizes, recorded = len(self.task.order.sizes), self.graphs.enabled
        text = describe_choices(self.config, steps, sizes=sizes, recorded=recorded, compiled=compiled, against=against)
        hints = deterministic_hints(self._dtype) if self.config.deterministic else []
        return [("speed", each) for each in (text, *hints)]

    def keep_attention(self, recorded: Mapping[str, str]) -> list[str]:
        """Compute attention by the kernels of the resumed run's checkpoint; returns what to say where that cannot be."""
        self.attention, notes = choices_to_keep(recorded, self.task.device, deterministic=self.config.deterministic)
        return notes

    # one update

    def run(self, number: int, rate: float, batches: Sequence[Tensors]) -> None:
        """Do update ``number`` at this learning rate, from this process's micro-batches."""
        self.rate.fill_(rate)
        self._retry_split(lambda: self._accumulate(number, batches), batches)
        with oom_hint("update the adapter", 'set optimizer = "adamw8bit"'):  # it may be half done: no second try
            self.world.add_up(self.flat.grads)
            self.world.add_up(self.loss)
            stopped = self.encoder_steps is not None and number >= self.encoder_steps
            with hold(self.flat, "te") if stopped else nullcontext():
                if self.optimizer.capturable:
                    self.graphs.run("update", self.apply_gradients)
                else:
                    self.apply_gradients()

    def micro_step(self, inputs: Tensors) -> None:
        """Forward and backward of one micro-batch: add its share to `loss` and to the flat gradients."""
        with self.kernels(), self.rounded_factors():
            loss = self.task.loss(inputs)
            scaled = loss * (self.share if self.scaler is None else self.share * self.scaler.scale)
            with collect_gradients(self._leaves()) if self.blocks.active else nullcontext():
                scaled.backward()  # type: ignore[no-untyped-call]
        self.loss += loss.detach() * self.share

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """The kernels of a step. Not around a replay: in a function mode every read of a tensor's attribute is a call into Python."""
        with (
            step_kernels(self.task.device, deterministic=self.config.deterministic),
            recorded_choices(self.attention),
        ):
            yield

    def rounded_factors(self) -> AbstractContextManager[None]:
        """Inside the block layers compute with copies of their factors in the model's dtype, rounded here and now."""
        if self._rounded is None:
            return nullcontext()
        recomputed = self.config.gradient_checkpointing != "off"
        return self._rounded.active(shared=not recomputed and not self.blocks.active)

    def _leaves(self) -> list[torch.Tensor]:
        """What autograd may have a gradient for."""
        return [*self.flat.parameters.values(), *(self._rounded.leaves() if self._rounded is not None else ())]

    def apply_gradients(self) -> None:
        """Clip the gradients and update parameters, optimizer, loss scale, EMA and counters."""
        scale = 1.0 if self.scaler is None else self.scaler.scale
        grad_scale, ok, norm = clip(self.flat.grads, self.config.max_grad_norm or None, scale)
        ok = ok & self.loss.isfinite()
        self.norm.copy_(norm)
        self.optimizer.step(self.rate, grad_scale, ok)
        if self.config.scale_weight_norms:
            limit_norms(self._branches, self.config.scale_weight_norms, ok)
        if self.scaler is not None:
            self.scaler.update(ok)
        if self.ema is not None:
            self.ema.update(ok)
        self.skipped.add_(~ok)
        self.skipped_in_a_row.copy_(torch.where(ok, 0, self.skipped_in_a_row + 1))

    @torch.no_grad()
    def eval_loss(self, batch: Tensors) -> torch.Tensor:
        """Return the loss of a batch without training on it."""
        total = torch.zeros_like(self.loss)

        def evaluate() -> None:
            total.zero_()
            for part, share in _split(batch, self.split):
                inputs = {name: value for name, value in self.inputs.stage(part).items() if name != DROPOUT}
                with self.kernels(), self.rounded_factors():
                    total.add_(self.task.loss(inputs), alpha=share)

        self._retry_split(evaluate, [batch])
        return total

    def new_events(self, split: int) -> Iterator[dict[str, str]]:
        """What there is to log about the update just done; before it micro-batches were split into ``split`` parts."""
        yield from self.blocks.new_events()
        if (seconds := self.graphs.seconds) > self._recording_seconds and len(self.graphs):
            took, self._recording_seconds = seconds - self._recording_seconds, seconds
            text = f"steps on a size of batch were recorded as CUDA graphs, which took {took:.1f} s"
            yield {"event": "graph", "text": text}
        if problem := self.graphs.new_problem():
            yield {
                "event": "graph failed",
                "text": f"steps cannot be recorded as CUDA graphs and run eagerly: {problem}",
            }
        if self.split != split:
            text = f"out of memory; from now on micro-batches are split into {self.split} parts"
            yield {"event": "memory", "text": text}

    def figures(self) -> dict[str, float | int | None]:
        """What the log says about the update that was just done; reading it makes the host wait."""
        device = self.task.device
        figures = {
            "lr": float(self.rate),
            "grad_norm": float(self.norm),
            "memory": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            "skipped_steps": int(self.skipped),
        }
        if self.scaler is not None:
            figures["loss_scale"] = float(self.scaler.scale)
        if self.split > 1:
            figures["split"] = self.split
        return figures

    # what the host decides

    def _accumulate(self, number: int, batches: Sequence[Tensors]) -> None:
        self.flat.zero_grads()
        self.loss.zero_()
        share = 1.0 / (len(batches) * self.world.size)
        for micro, batch in enumerate(batches):
            position = micro * self.world.size + self.world.rank
            for count, (part, fraction) in enumerate(_split(batch, self.split)):
                inputs = dict(self.inputs.stage(part))
                self._seed_dropout(inputs.pop(DROPOUT, None))
                self.share.fill_(share * fraction)
                # for a model's own dropout; the adapter's is seeded by row, so that splitting changes rounding only
                torch.manual_seed(seed_for(self.config.seed, number, position, count, "dropout"))
                size = shapes_of(inputs)
                with self.blocks.call(size):
                    can_split = _rows(part) > 1 and not self.config.shard
                    self.graphs.run(size, partial(self.micro_step, inputs), can_split=can_split)

    def _seed_dropout(self, row_seeds: torch.Tensor | None) -> None:
        for branch in self._dropping:
            branch.row_seeds = row_seeds

    def _retry_split(self, work: Callable[[], None], batches: Sequence[Tensors]) -> None:
        """Do ``work``, with micro-batches split further each time that memory runs out, and eagerly if compiling fails."""
        while True:
            try:
                return work()
            except Exception as error:
                memory = out_of_memory(error)
                if not memory and not self.blocks.compiling:
                    raise
                reason = " ".join(str(error).split())
            # outside of the handler: the error holds its frames, and they hold what was computed
            if not memory:
                self.blocks.stop(reason)
                self.graphs.clear()
                continue
            if self.config.shard:  # the other processes wait inside the network and would not start over
                raise MemoryBudgetError(
                    f'out of memory; set gradient_checkpointing = "full", or lower batch_size or resolution ({reason})'
                )
            largest = max(_rows(batch) for batch in batches)
            self.flat.zero_grads()
            self.inputs.clear()
            self.graphs.clear()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if self.split >= largest:
                raise MemoryBudgetError(
                    f'out of memory with one example at a time; set gradient_checkpointing = "full" or lower resolution ({reason})'
                )
            self.split *= 2

    # state

    def state(self) -> Tensors:
        tensors = {f"values.{name}": value for name, value in self.flat.state().items()}
        tensors |= {f"optimizer.{name}": value for name, value in self.optimizer.state().items()}
        if self.ema is not None:
            tensors |= {f"ema.{name}": value for name, value in self.ema.state().items()}
        if self.scaler is not None:
            tensors |= {f"scaler.{name}": value for name, value in self.scaler.state().items()}
        counters = {
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "split": torch.tensor(self.split),
        }
        return tensors | counters

    def load(self, tensors: Tensors) -> None:
        def part(prefix: str) -> Tensors:
            return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

        known = ("values.", "optimizer.", "ema.", "scaler.")
        extra = [name for name in tensors if not name.startswith(known) and name not in COUNTERS]
        unused = [name for name, used in (("ema.", self.ema), ("scaler.", self.scaler)) if used is None and part(name)]
        if extra or unused:
            raise FormatError(f"the saved state has {(extra or unused)[0]!r}, which does not belong to this run")
        # batches of unequal size may be split into unequal numbers of parts
        if self.config.shard and int(tensors["split"]) > 1:
            raise ConfigError("shard: this run splits its micro-batches, since memory ran out; resume it without shard")
        self.flat.load(part("values."))
        self.optimizer.load(part("optimizer."))
        if self.ema is not None:
            self.ema.load(part("ema."))
        if self.scaler is not None:
            self.scaler.load(part("scaler."))
        self.skipped.copy_(tensors["skipped"])
        self.skipped_in_a_row.copy_(tensors["skipped_in_a_row"])
        self.split = int(tensors["split"])  # another split adds up in another order


def shapes_of(batch: Tensors) -> tuple[object, ...]:
    """What decides which buffers, and which graph, a batch uses."""
    return tuple((name, tuple(value.shape), value.dtype) for name, value in batch.items())


def _rows(batch: Tensors) -> int:
    return len(next(iter(batch.values())))


def _split(batch: Tensors, parts: int) -> list[tuple[Tensors, float]]:
    """Split a batch along its first axis; with each part, its fraction of the batch."""
    if parts == 1:
        return [(batch, 1.0)]
    chunks = {name: value.chunk(parts) for name, value in batch.items()}
    split = [{name: rows[i] for name, rows in chunks.items()} for i in range(len(next(iter(chunks.values()))))]
    return [(part, _rows(part) / _rows(batch)) for part in split]
