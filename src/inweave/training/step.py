"""One update of the weights.

    for each micro-batch   copy its tensors, with the dropout seeds of its rows, into static buffers, then `micro_step`:
                           loss = task.loss(inputs);  (loss_scale * share * loss).backward()
                           share = 1 / all micro-batches, or where the task weighs its batches (by the tokens
                           that are trained) weight / the weight of all micro-batches
    all processes          sum gradients and losses
    text encoders          have no gradient, and keep their values, after the update at which they stop
    once                   `apply_gradients`: norm, clipping, optimizer, weight norms, loss scale, EMA; the update is
                           skipped if the norm of the gradients is not finite

`micro_step` and `apply_gradients` are functions of tensors at fixed addresses: inputs, gradients, values, optimizer
state and counters stay in place, and the host reads no number and decides nothing inside of them. Optimizers of other
libraries do read numbers on the host, so with them `apply_gradients` is never recorded. Copying inputs, and splitting
micro-batches after memory ran out, which restarts the update, happen outside of the two.

Parameters are float32. On a GPU a micro-batch begins by rounding all of them to the model's dtype, in one kernel, and
layers use these copies until it ends: they contain every earlier change of the parameters (update, checkpoint, EMA).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from inweave.errors import ConfigError, FormatError, MemoryBudgetError
from inweave.layers import fused, lora_layers
from inweave.models.families.base import Tensors
from inweave.ops.attention import recorded_choices
from inweave.ops.tensors.oom import oom_hint, out_of_memory
from inweave.training.checkpoint.facts import COUNTERS
from inweave.training.config.schema import TrainConfig
from inweave.training.distributed.world import World
from inweave.training.execution.capture import StepGraphs, capture_problems, recording_pays
from inweave.training.execution.compilation import CompiledBlocks, choose, compile_problems, saves_time
from inweave.training.execution.inputs import StaticInputs, row_count, shapes_of, split_batch
from inweave.training.execution.kernels import attention_to_keep, deterministic_hints, step_kernels
from inweave.training.execution.modes import describe_modes, mode_problems
from inweave.training.optim.adamw import Optimizer, make_optimizer
from inweave.training.optim.ema import Ema
from inweave.training.optim.flat import FlatParameters, collect_gradients, hold
from inweave.training.optim.loss_scale import LossScaler, clip
from inweave.training.optim.rounding import RoundedFactors
from inweave.training.optim.weight_norms import limit_norms
from inweave.training.tasks.base import Task, seed_for

DROPOUT = "dropout_seeds"  # the input that seeds the adapter's dropout: two numbers per row


class Step:
    """All the state that an update reads and writes.

    ``steps``: the length of the run, which decides whether graphs and compiling pay and when text encoders stop;
    without it graphs do, compiling does not, and encoders never stop. ``split``: the number of parts a micro-batch is
    split into; it doubles whenever memory runs out.
    """

    def __init__(
        self,
        task: Task,
        flat: FlatParameters,
        config: TrainConfig,
        world: World,
        *,
        steps: int | None = None,
        split: int = 1,
    ) -> None:
        if problems := mode_problems(task.networks, config, task.device):
            raise ConfigError(problems)
        self.task, self.flat, self.config, self.world, self.split = task, flat, config, world, split
        device = flat.values.device
        self.optimizer: Optimizer = make_optimizer(
            config.optimizer, flat, weight_decay=config.weight_decay, betas=config.betas, epsilon=config.epsilon,
            args=config.optimizer_args, learning_rate=config.learning_rate,
        )  # fmt: skip
        self.ema = Ema(flat, config.ema_decay) if config.ema_decay else None
        self._dtype: torch.dtype = getattr(task, "dtype", torch.float32)
        self.scaler = LossScaler(device) if self._dtype == torch.float16 else None
        #: the weight of a batch; None: all micro-batches of an update count alike, and their parts by rows
        self._weigh: Callable[[Tensors], float] | None = getattr(task, "weight", None)
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
        self._steps = steps
        self.graphs = StepGraphs(task.device, enabled=not self.capture_problems and self._graphs_pay())
        self._recording_seconds = 0.0  # the part of the graphs' seconds that was logged
        self.attention: dict[str, str] = {}  # shape -> kernel
        #: updates that train text encoders; None: all
        self._encoder_steps = None if steps is None else config.encoder_steps(steps)

    def _graphs_pay(self) -> bool:
        """Return whether steps are to be recorded if that is possible."""
        if self.config.graph != "auto" or self._steps is None:
            return self.config.graph != "off"
        micro_batches = self._steps * self.config.gradient_accumulation
        return recording_pays(self._steps, micro_batches, len(self.task.order.sizes))

    @property
    def capture_problems(self) -> list[str]:
        """Why forward and backward passes of this run cannot be captured in CUDA graphs; empty if they can."""
        return capture_problems(self.config, self.task.device)

    @property
    def compile_problems(self) -> list[str]:
        """Why the blocks of this run cannot be compiled; empty if they can."""
        return compile_problems(self.task.networks, self.config, self.task.device)

    def compile(self, model: Any, *, before: bool | None) -> list[str]:
        """Compile the blocks if that suits the run; returns notes for the log. ``before``: the resumed run's choice."""
        steps = self._steps
        saves = before is None and steps is not None and saves_time(model, self.task.order, self.config, steps)
        chosen, notes = choose(self.config.compile, self.compile_problems, saves=saves, before=before)
        if chosen:
            self.blocks.start()
        return notes

    def mode_notes(self) -> list[tuple[str, str]]:
        """Return (event, text) for the start of the log about how steps are executed; nothing without a GPU."""
        if self.task.device.type != "cuda":
            return []
        compiled = len(self.blocks.blocks) if self.blocks.active else 0
        against = self.capture_problems, self.compile_problems
        sizes, recorded = len(self.task.order.sizes), self.graphs.enabled
        text = describe_modes(
            self.config, self._steps or 0, sizes=sizes, recorded=recorded, compiled=compiled, against=against
        )
        hints = deterministic_hints(self._dtype) if self.config.deterministic else []
        return [("speed", each) for each in (text, *hints)]

    def keep_attention(self, recorded: Mapping[str, str]) -> list[str]:
        """Compute attention with the kernels of the resumed run's checkpoint; returns notes on what cannot be kept."""
        self.attention, notes = attention_to_keep(recorded, self.task.device, deterministic=self.config.deterministic)
        return notes

    # one update

    def run(self, number: int, rate: float, batches: Sequence[Tensors]) -> None:
        """Do update ``number`` at this learning rate, on this process's micro-batches."""
        self.rate.fill_(rate)
        total = self._total_weight(batches)  # of all processes, so not again if one of them splits its batches
        self._retry_split(lambda: self._accumulate(number, batches, total), batches)
        with oom_hint("update the adapter", 'set optimizer = "adamw8bit"'):  # it may be half done: no retry
            ordered = self.config.deterministic or self.loss.device.type == "cpu"
            self.world.add_up(self.flat.grads, ordered=ordered)
            self.world.add_up(self.loss, ordered=ordered)
            stopped = self._encoder_steps is not None and number >= self._encoder_steps
            with hold(self.flat, "te") if stopped else nullcontext():
                if self.optimizer.capturable:
                    self.graphs.run("update", self.apply_gradients)
                else:
                    self.apply_gradients()

    def micro_step(self, inputs: Tensors) -> None:
        """Run forward and backward of one micro-batch: add its share to `loss` and to the flat gradients."""
        with self.kernels(), self.rounded_factors():
            loss = self.task.loss(inputs)
            scaled = loss * (self.share if self.scaler is None else self.share * self.scaler.scale)
            with collect_gradients(self._leaves()) if self.blocks.active else nullcontext():
                scaled.backward()  # type: ignore[no-untyped-call]
        self.loss += loss.detach() * self.share

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Use the kernels of a step; not around a replay, since a function mode slows down every tensor attribute."""
        with (
            step_kernels(self.task.device, deterministic=self.config.deterministic),
            recorded_choices(self.attention),
        ):
            yield

    def rounded_factors(self) -> AbstractContextManager[None]:
        """Let layers compute with copies of their factors in the model's dtype, rounded when the block is entered."""
        if self._rounded is None:
            return nullcontext()
        recomputed = self.config.gradient_checkpointing != "off"
        return self._rounded.active(shared=not recomputed and not self.blocks.active)

    def _leaves(self) -> list[torch.Tensor]:
        """Return the tensors that autograd may compute a gradient for."""
        return [*self.flat.parameters.values(), *(self._rounded.leaves() if self._rounded is not None else ())]

    def apply_gradients(self) -> None:
        """Clip the gradients and update parameters, optimizer, loss scale, EMA and counters."""
        scale = 1.0 if self.scaler is None else self.scaler.scale
        limits = self.config.max_grad_norm or None, self.config.max_grad_value or None
        grad_scale, ok, norm = clip(self.flat.grads, limits[0], scale, limits[1])
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
            for part, share in split_batch(batch, self.split, self._weigh or row_count):
                inputs = {name: value for name, value in self.inputs.stage(part).items() if name != DROPOUT}
                with self.kernels(), self.rounded_factors():
                    total.add_(self.task.loss(inputs), alpha=share)

        self._retry_split(evaluate, [batch])
        return total

    def new_events(self, split: int) -> Iterator[dict[str, str]]:
        """Yield the log's events about the update just done; ``split``: the parts of a micro-batch before it."""
        yield from self.blocks.new_events()
        yield from ({"event": "dataset", "text": note} for note in self.task.new_notes())
        if (seconds := self.graphs.seconds) > self._recording_seconds and len(self.graphs):
            took, self._recording_seconds = seconds - self._recording_seconds, seconds
            text = f"the steps of a batch size were recorded as CUDA graphs, which took {took:.1f} s"
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
        """Return the log's numbers about the update just done; reading them makes the host wait."""
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

    # decisions of the host

    def weight(self, batch: Tensors) -> float:
        """Return how much a batch counts in the mean of several."""
        return self._weigh(batch) if self._weigh is not None else row_count(batch)

    def _total_weight(self, batches: Sequence[Tensors]) -> float | torch.Tensor:
        """Return the weight of all micro-batches of an update, over all processes."""
        if self._weigh is None:
            return float(len(batches) * self.world.size)
        total = sum(map(self._weigh, batches))
        if self.world.size == 1:
            return total
        shared = torch.tensor(total, dtype=torch.float64, device=self.loss.device)
        self.world.add_up(shared)
        return shared

    def _accumulate(self, number: int, batches: Sequence[Tensors], total: float | torch.Tensor | None = None) -> None:
        self.flat.zero_grads()
        self.loss.zero_()
        total = self._total_weight(batches) if total is None else total
        for micro, batch in enumerate(batches):
            position = micro * self.world.size + self.world.rank
            share = (1.0 if self._weigh is None else self._weigh(batch)) / total
            for count, (part, fraction) in enumerate(split_batch(batch, self.split, self._weigh or row_count)):
                inputs = dict(self.inputs.stage(part))
                self._seed_dropout(inputs.pop(DROPOUT, None))
                self.share.fill_(share * fraction)
                # for the model's own dropout; the adapter's is seeded by row, so that splitting changes rounding only
                torch.manual_seed(seed_for(self.config.seed, number, position, count, "dropout"))
                size = shapes_of(inputs)
                with self.blocks.call(size):
                    can_split = row_count(part) > 1 and not self.config.shard
                    self.graphs.run(size, partial(self.micro_step, inputs), can_split=can_split)

    def _seed_dropout(self, row_seeds: torch.Tensor | None) -> None:
        for branch in self._dropping:
            branch.row_seeds = row_seeds

    def _retry_split(self, work: Callable[[], None], batches: Sequence[Tensors]) -> None:
        """Do ``work``, splitting micro-batches further each time memory runs out, and eagerly if compiling fails."""
        while True:
            try:
                return work()
            except Exception as error:
                memory = out_of_memory(error)
                if not memory and not self.blocks.compiling:
                    raise
                reason = " ".join(str(error).split())
            # outside of the handler: the error holds its frames, and they hold the computed tensors
            if not memory:
                self.blocks.stop(reason)
                self.graphs.clear()
                continue
            if self.config.shard:  # the other processes wait inside the network and would not start over
                raise MemoryBudgetError(
                    f'out of memory; set gradient_checkpointing = "full", or lower batch_size or resolution ({reason})'
                )
            largest = max(row_count(batch) for batch in batches)
            self.flat.zero_grads()
            self.inputs.clear()
            self.graphs.clear()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if self.split >= largest:
                raise MemoryBudgetError(
                    'out of memory with one example at a time; set gradient_checkpointing = "full" or lower resolution '
                    f"({reason})"
                )
            self.split *= 2

    # state

    @property
    def _parts(self) -> dict[str, FlatParameters | Optimizer | Ema | LossScaler]:
        """The parts of the state, by the prefixes of their tensors in a checkpoint."""
        parts = ("values", self.flat), ("optimizer", self.optimizer), ("ema", self.ema), ("scaler", self.scaler)
        return {name: part for name, part in parts if part is not None}

    def state(self) -> Tensors:
        tensors = {f"{part}.{name}": t for part, own in self._parts.items() for name, t in own.state().items()}
        counters = self.skipped, self.skipped_in_a_row, torch.tensor(self.split)
        return tensors | dict(zip(COUNTERS, counters, strict=True))

    def load(self, tensors: Tensors) -> None:
        parts: dict[str, Tensors] = {part: {} for part in self._parts}
        for full, tensor in tensors.items():
            part, dot, name = full.partition(".")
            if dot and part in parts:
                parts[part][name] = tensor
            elif full not in COUNTERS:
                raise FormatError(f"the saved state has {full!r}, which does not belong to this run")
        # batches of unequal size may be split into unequal numbers of parts
        if self.config.shard and int(tensors["split"]) > 1:
            raise ConfigError("shard: this run splits its micro-batches, since memory ran out; resume it without shard")
        for part, own in self._parts.items():
            own.load(parts[part])
        self.skipped.copy_(tensors["skipped"])
        self.skipped_in_a_row.copy_(tensors["skipped_in_a_row"])
        self.split = int(tensors["split"])  # another split would add up in another order
