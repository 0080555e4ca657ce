"""The training loop: resume, train, validate, save, sample, finish. A run can stop anywhere and resume exactly.

No random state outlives a step: every random number depends on (seed, epoch, example) alone, the order of the data on
(seed, epoch). So splitting a batch changes rounding only, a checkpoint is the weights, the optimizer and a step number,
and 20 steps, a kill and 20 more give the same bits as 40: always on the CPU, and on a GPU if `deterministic` is set.

    after a step    log (log_every), validate, save, sample, in this order, each by steps or by epochs (`intervals`)
    validate        at its own interval, else with every checkpoint, else once per epoch; and at the end
    checkpoints     and their adapters are kept while they are among the last keep_last, or milestones (keep_every)
    weights         samples, validation and files use the EMA weights if there are any, without dropout
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from inweave.errors import ConfigError, FormatError, InweaveError, TargetError
from inweave.models.families.base import Tensors
from inweave.ops.tensors.oom import oom_hint
from inweave.targets.index import ModelIndex
from inweave.training.adapters.attach import NAME, TrainableSet, attach_adapters, collect_adapters
from inweave.training.adapters.summary import shape_of
from inweave.training.checkpoint import resume
from inweave.training.checkpoint.schedule import CheckpointSchedule
from inweave.training.checkpoint.store import State, checkpoints
from inweave.training.config.schema import TrainConfig
from inweave.training.config.validation import run_problems
from inweave.training.data.batches import Position, epoch_length, total_steps
from inweave.training.data.digests import base_digests, sampled_digest
from inweave.training.data.intervals import Interval
from inweave.training.distributed.stop import StopVote
from inweave.training.distributed.world import World
from inweave.training.memory.meter import StepMeter
from inweave.training.optim.flat import FlatParameters
from inweave.training.optim.schedules import learning_rate_at
from inweave.training.output.adapter_file import adapter_exists, prune_adapters, save_adapter
from inweave.training.output.log import OnRecord, Throughput, TrainLog
from inweave.training.output.loss_history import LossHistory
from inweave.training.output.metadata import base_hashes, training_metadata
from inweave.training.output.result import DONE, STOPPED, TrainResult
from inweave.training.output.trackers import wandb_run
from inweave.training.step import DROPOUT, Step
from inweave.training.tasks.base import Task, generators_for, no_validation
from inweave.training.tasks.evaluation import Sample, evaluation_mode, sample_events

VALIDATION = -2  # in place of the epoch number
#: precision -> why losses or gradients are probably not finite
_LIKELY_CAUSES = {
    "fp16": "fp16 overflows: train in bf16 or fp32",
    "fp32": "the learning rate is too high, or the data contains NaN",
}


class Run:
    """A task, its adapters, and everything that is saved.

    ``split``: the parts a micro-batch is split into, unless a checkpoint says otherwise; ``meter``: compares the memory
    of a step with the plan; ``base_file``: the checkpoint of the base, whose hashes go into the metadata;
    ``checkpoint_seconds``: the longest time between two checkpoints.
    """

    def __init__(
        self,
        task: Task,
        model: Any,
        index: ModelIndex,
        config: TrainConfig,
        world: World | None = None,
        *,
        split: int = 1,
        meter: StepMeter | None = None,
        base_file: Path | None = None,
        checkpoint_seconds: float = math.inf,
    ) -> None:
        problems = [no_validation(config)] if config.validation_split and not task.held_out else []
        if problems := [*run_problems(config), *problems]:
            raise ConfigError(problems)
        self.task, self.model, self.index = task, model, index
        self.world = world or World()
        networks = getattr(model, "networks", task.networks)
        self.base = base_digests(networks, getattr(task, "digests", None))
        self._sampled = getattr(task, "sampled_digest", None) or sampled_digest(networks)
        self.trainable: TrainableSet = attach_adapters(task.networks, config, index)
        if self.trainable.dialect:
            config = config.model_copy(update={"dialect": self.trainable.dialect})
        self.config = config
        self.flat = FlatParameters(self.trainable.parameters, self.trainable.multipliers, task.device)
        batches = self._batches_per_step = config.gradient_accumulation * self.world.size
        epoch = epoch_length(len(task.order), batches, config.epoch_steps)
        self.total = total_steps(epoch, batches, steps=config.steps, epochs=config.epochs)
        self.step = Step(task, self.flat, config, self.world, steps=self.total, split=split)
        learning_rate_at(config, 0, self.total)  # refuses a warm-up as long as the run
        self.number = 0  # steps done
        self.started = time.time()
        self._numbered: set[str] = set()  # suffixes of the adapters of steps that this run has written
        self.validation: list[tuple[int, float]] = []
        self.output = Path(config.output)
        folder = resume.state_folder(config)
        self.schedule = CheckpointSchedule(folder, config.keep_last, config.keep_every, checkpoint_seconds)
        interval = partial(Interval, batches_per_step=batches, batches_per_epoch=epoch)
        self._save_interval = interval(config.save_every, config.save_every_epochs)
        self._sample_interval = interval(config.sample_every, config.sample_every_epochs)
        often = interval(config.validate_every, config.validate_every_epochs)
        self._validate_interval = often or self._save_interval or interval(-(-len(task.order) // batches), 0)
        self._meter, self._base_file = meter or StepMeter(task.device), base_file
        self.notes = [("output", note) for note in self.trainable.notes]  # (event, text) at the start of the log
        self._resume_point: resume.ResumePoint | None = None
        self._resume_notes: list[str] = []
        self._grows = False  # continues a run that was finished
        self.stop = StopVote(self.world, task.device)
        self.losses = LossHistory()

    # resume and save

    def resume(self, source: resume.ResumePoint | str) -> int:
        """Continue from an open checkpoint, the newest one ("auto") or the one at a path; returns its step."""
        point = resume.open_resume_point(self.config, self.world, source) if isinstance(source, str) else source
        self._resume_point, self._resume_notes = point, [*point.notes]
        try:
            point.acquire(self.world)
            compiled = None
            if (state := point.take()) is not None:
                compiled = bool(state.facts.get("compiled", False))
                self._load(state)
            resume.ensure_same_step(self.number, self.world, self.task.device)
            self._resume_notes += self.step.compile(self.model, before=compiled)
        except BaseException:
            point.release()
            raise
        return self.number

    def _load(self, state: State) -> None:
        self._resume_notes += resume.ensure_resumable(
            state.facts, self._facts(), self.config, state.step, self._sampled
        )
        self._grows = state.step == state.facts.get("config", {}).get("steps") < self.total
        try:
            self.step.load(state.tensors)
        except FormatError as error:
            raise FormatError(f"{self.schedule.folder}: the checkpoint of step {state.step}: {error}") from None
        self.number = state.step
        self.started = state.facts.get("started", self.started)
        self._numbered = {*state.facts.get("adapters", ()), self._step_suffix}  # written after its checkpoint
        self.losses.load(state.facts.get("losses", []))
        self.validation = [(int(step), float(loss)) for step, loss in state.facts.get("validation", [])]
        self._resume_notes += self.step.keep_attention(state.facts.get("attention", {}))

    def _facts(self) -> dict[str, Any]:
        """Return what identifies the run in a checkpoint."""
        config = self.config.model_dump(mode="json")
        config["steps"], config["epochs"] = self.total, None
        config["gradient_accumulation"] = self._batches_per_step  # of all processes together
        return {
            "config": config, "data": self.task.fingerprint(), "base": self.base, "started": self.started,
            "validation": self.validation, "losses": self.losses.recent, "compiled": self.step.blocks.active,
            "attention": self.step.attention, "adapters": sorted(self._numbered),
        }  # fmt: skip

    def save_checkpoint(self, *, interim: bool = False) -> None:
        """Save the current step; only the first process writes. ``interim``: keep it until the next checkpoint."""
        if self.world.first:
            self.schedule.save(State(self.number, self.step.state(), self._facts()), interim=interim)
        self.schedule.restart_clock()
        self.world.wait()

    def save_adapter(self, suffix: str = "", *, float32: bool = False) -> Path:
        """Write the current adapter, with EMA weights if there are any. ``float32`` overrides `save_dtype`."""
        path, batches = self._adapter_path(suffix), len(self.task.order)
        self._numbered |= {suffix} & {self._step_suffix}
        if self.world.first:
            advice = "the checkpoint has it: free some memory and resume with --resume"
            with oom_hint(f"write {path}, the adapter of step {self.number}", advice), self._eval_weights():
                adapter = collect_adapters(self.task.networks)
            data = self.task.metadata() | {"ss_num_batches_per_epoch": str(batches)}
            steps = self.number, self.total, batches / self._batches_per_step
            shape = shape_of(self.task.networks, NAME)
            metadata = training_metadata(self.config, shape, self.model, steps, self.started, data)
            metadata |= self._base_hashes.result()
            config = self.config.model_copy(update={"save_dtype": "fp32"}) if float32 else self.config
            path = save_adapter(adapter, path, config, self.index, metadata)
        self.world.wait()
        return path

    @cached_property
    def _base_hashes(self) -> Future[dict[str, str]]:
        """The hashes of the base file, computed in the background."""
        return ThreadPoolExecutor(1, "inweave-hash").submit(base_hashes, self._base_file)

    def _save(self) -> None:
        """Save a checkpoint and its adapter, then remove adapters without a checkpoint if `keep_last` is set."""
        self.save_checkpoint()
        self.save_adapter(self._step_suffix)
        self._prune_adapters()

    def _prune_adapters(self) -> None:
        if self.world.first and self.config.keep_last and "keep_last" in self.config.explicit_fields:
            suffixes = {path.name.removeprefix("step") for path in checkpoints(self.schedule.folder)}
            gone, folders = self._numbered - suffixes, self.config.dialect == "peft"
            prune_adapters(self.output, self.config.name, gone, folders=folders)
            self._numbered &= suffixes

    def _adapter_path(self, suffix: str = "") -> Path:
        return self.output / f"{self.config.name}{suffix}.safetensors"

    @property
    def _step_suffix(self) -> str:
        return f"-{self.number:06d}"

    # the loop

    def train(self, *, sample: Sample | None = None, on_record: OnRecord | None = None) -> TrainResult:
        """Train the remaining steps, then write the adapter."""
        start = time.perf_counter()
        if self._resume_point is None:
            self.resume(self.config.resume)
        assert self._resume_point is not None
        if self.world.first:
            _ = self._base_hashes  # starts hashing
        devices = [self.task.device] if self.task.device.type == "cuda" else []
        with ExitStack() as resources:
            resources.callback(self._resume_point.release)
            write = self._open_log(on_record, resources)
            with self.stop, torch.random.fork_rng(devices):  # the caller's random state is not touched
                reason = self._train_steps(write, sample)
                self.save_checkpoint()
                path = self.save_adapter("" if reason != STOPPED else self._step_suffix)
                self._prune_adapters()
            write({"event": "finished", "step": self.number, "text": reason, "path": str(path)})
        seconds = time.perf_counter() - start
        losses, skipped = self.losses.read, int(self.step.skipped)
        return TrainResult(path, self.number, losses, reason, seconds, skipped, list(self.validation))

    def _train_steps(self, write: OnRecord, sample: Sample | None) -> str:
        """Train until there is a reason to stop, and return it."""
        config, throughput = self.config, Throughput(self.total, self.number)
        missing = self.world.any(not adapter_exists(self._adapter_path(self._step_suffix)), self.task.device)
        if missing and (self._grows or self._save_due()):
            # the end of the shorter run, whose file will be replaced; or it ended between a checkpoint and its adapter
            self.save_adapter(self._step_suffix)
        while True:
            if reason := self._stop_reason(write):
                return reason
            self._train_step_measured(write)
            last, log_due = self.number == self.total, self.number % config.log_every == 0
            if last or log_due:
                self.losses.fetch()
                if self.world.first:
                    write(self.losses.record(self.number, self.total, throughput, self.step.figures()))
            if last or log_due or self.task.device.type == "cpu":  # elsewhere reading a counter makes the host wait
                self._ensure_finite_steps(write, config.max_skipped_steps)
            if config.validation_split and (last or self._validate_interval.due(self.number)):
                self._validate(write)
            if self._save_due():
                self._save()
            elif self.schedule.timed and not last and self.world.any(self.schedule.overdue, self.task.device):
                self.save_checkpoint(interim=True)
            if sample is not None and self._sample_interval.due(self.number):
                self._sample(sample, write)

    def train_step(self) -> None:
        """Update the weights once."""
        config, world = self.config, self.world
        batches = self.task.order.step_positions(
            self.number, accumulation=config.gradient_accumulation, world=world.size, rank=world.rank
        )
        inputs = [self._sample_batch(batch) for batch in batches]
        self._round_from_half()
        self.step.run(self.number, config.learning_rate * learning_rate_at(config, self.number, self.total), inputs)
        self.number += 1
        self.losses.add(self.step.loss)

    def _round_from_half(self) -> None:
        """Let layers round (`qat`) in the second half of the run: the first half is that of any other run."""
        rounding = self.trainable.rounding
        rounds = 2 * (self.number + 1) > self.total
        if rounding is not None and rounding.active != rounds:
            rounding.active = rounds
            self.step.graphs.clear()  # of other operations

    def _sample_batch(self, positions: Sequence[Position]) -> Tensors:
        """Return the tensors of a batch; the randomness of an example depends on its own position."""
        generators = generators_for(self.config.seed, positions)
        inputs = self.task.sample_batch(tuple(example for _, example, _ in positions), generators)
        if self.config.drops:
            seeds = torch.cat([torch.randint(2**31, (1, 2), generator=each) for each in generators])
            inputs = {**inputs, DROPOUT: seeds}
        return inputs

    def _train_step_measured(self, write: OnRecord) -> None:
        """Update the weights, and log what is new about memory, graphs and compiled blocks."""
        split = self.step.split
        measured = self._meter(self.train_step)
        for event in (*measured, *self.step.new_events(split)):
            write({"step": self.number, **event})

    def _save_due(self) -> bool:
        """Return whether a checkpoint and its adapter are due after the step just done."""
        return 0 < self.number < self.total and self._save_interval.due(self.number)

    def _stop_reason(self, write: OnRecord) -> str:
        """Return why to stop before the next step; empty to continue."""
        patience = self.config.patience
        losses = [loss for _, loss in self.validation]
        if patience and len(losses) > patience and min(losses[-patience:]) >= min(losses[:-patience]):
            step, loss = min(self.validation, key=lambda entry: entry[1])
            best = self._adapter_path("-best")
            name = best.name if best.is_file() else best.stem
            file = f", saved as {name}" if self.world.any(adapter_exists(best), self.task.device) else ""
            return f"no better validation loss for {patience} times; the best was {loss:.4f} at step {step}{file}"
        if self.number >= self.total:
            self._ensure_finite_steps(write, self.total)
            return DONE
        return STOPPED if self.stop.agreed(self.number) else ""

    def _ensure_finite_steps(self, write: OnRecord, limit: int) -> None:
        """Raise if too many steps in a row were skipped; they change nothing, so the saved weights are good."""
        count = int(self.step.skipped_in_a_row)
        if count < limit:
            return
        precision = "fp16" if self.step.scaler is not None else self.config.precision
        cause = _LIKELY_CAUSES.get(precision, "the learning rate is too high for this model and rank")
        text = f"{count} steps in a row were skipped: their loss or gradients were not finite"
        write({"event": "stopped", "step": self.number, "text": text})
        self.save_checkpoint()
        try:
            path = self.save_adapter(self._step_suffix, float32=True)  # its weights may be beyond the range of fp16
            outcome = f"the adapter from before them is {path}: continue from it under another name (start_from)"
        except TargetError:
            outcome = "the adapter from before them has values beyond the range of float32: start over"
        raise InweaveError(
            f"{count} steps in a row had a loss or gradients that are not finite and were skipped; {outcome}. "
            f"Likely cause: {cause}"
        )

    # validate and sample

    def validate(self) -> float:
        """Return the mean loss of the validation batches, always with the same random numbers."""
        batches = self.task.held_out
        losses, weights = torch.zeros(2, len(batches), device=self.task.device)
        with self._evaluation():
            for number, counts in self.world.turns(len(batches), together=self.config.shard):
                inputs = self._sample_batch([(VALIDATION, example, 0) for example in batches[number]])
                loss = self.step.eval_loss(inputs)
                if counts:
                    losses[number], weights[number] = loss, self.step.weight(inputs)
        for each in (losses, weights):  # the other processes' entries are zero, so the result is that of one process
            self.world.add_up(each)
        return float((losses * weights).sum() / weights.sum())

    def _validate(self, write: OnRecord) -> None:
        loss = self.validate()
        self.validation.append((self.number, loss))
        if self.config.patience and loss <= min(each for _, each in self.validation):
            self.save_adapter("-best")
        write({"event": "validation", "step": self.number, "validation": loss})

    def _sample(self, sample: Sample, write: OnRecord) -> None:
        if self.world.first or self.config.shard:
            for event in sample_events(sample, self.number, self._evaluation(), shard=self.config.shard):
                write({"step": self.number, **event})
            if self.task.device.type == "cuda":
                torch.cuda.empty_cache()
        self.world.wait()

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        with self.step.blocks.eager(), evaluation_mode(self.task.networks, self._eval_weights()):
            yield

    def _eval_weights(self) -> AbstractContextManager[None]:
        return (self.step.ema or self.step.optimizer).eval_weights()

    # the log

    def _open_log(self, on_record: OnRecord | None, resources: ExitStack) -> OnRecord:
        """Open the log and write what was decided before the first step; only the first process has one."""
        if not self.world.first:
            return lambda record: None
        config, path = self.config, self.output / f"{self.config.name}.jsonl"
        trackers: dict[str, Any] = {"tensorboard": config.tensorboard, "wandb": wandb_run(config)}
        log = TrainLog(path, since=self.number, on_record=on_record, **trackers)
        resources.callback(log.close)
        resumed = [("resumed" if self.number else "started", note) for note in self._resume_notes]
        for event, text in (*self.notes, *self.step.mode_notes(), *resumed):
            log.write({"event": event, "step": self.number, "text": text})
        return log.write
