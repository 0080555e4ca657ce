"""A run from beginning to end: prepare, step, save, sample, validate, finish. It can stop anywhere and go on exactly.

Nothing random outlives a step: every number drawn depends on (seed, step, micro-batch) alone, the order of the data on
(seed, epoch). So a checkpoint is the weights, the optimizer and a step number, and 20 steps, a kill and 20 more are the
same bits as 40.

    after a step    log (log_every), validate, save (save_every), sample (sample_every), in this order
    validate        when a checkpoint is due; without checkpoints once an epoch; and at the end
    what is drawn, validated and written is the average of the weights where one is kept, without dropout
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from inweave.errors import ConfigError, InweaveError, TargetError
from inweave.targets.index import ModelIndex
from inweave.training.adapters.attach import NAME, Trained, add_networks, gathered
from inweave.training.adapters.summary import shape_of
from inweave.training.checkpoint.resume import base_of, check_same
from inweave.training.checkpoint.store import State, alone, named, newest, save_state, tidy
from inweave.training.config.schema import TrainConfig
from inweave.training.data.batches import total_steps
from inweave.training.distributed.world import World
from inweave.training.memory.meta import Meter
from inweave.training.memory.oom import needing
from inweave.training.optim.flat import FlatParameters
from inweave.training.optim.schedules import share_of
from inweave.training.output.adapter_file import described, no_validation, refuse_existing, store, sweep, written
from inweave.training.output.log import Drawn, Journal, Pace, Tell
from inweave.training.output.signals import Interrupts
from inweave.training.step import Step
from inweave.training.tasks.base import Task, generator_for

ASK_SECONDS = 4.0  # between questions of several processes whether to stop: launchers kill after 30
DONE, STOPPED = "all steps are done", "stopped on request"

Sample = Callable[[int], list[Drawn]]


@dataclass(slots=True)
class Finished:
    """``path``: the adapter; ``reason``: why it ended; ``losses``: of the steps since it was started or resumed."""

    path: Path
    step: int
    losses: list[float] = field(default_factory=list)
    reason: str = DONE
    seconds: float = 0.0
    bad: int = 0
    validation: list[tuple[int, float]] = field(default_factory=list)


class Run:
    """Holds a task, its adapters and everything that is saved."""

    def __init__(
        self, task: Task, model: Any, index: ModelIndex, config: TrainConfig, world: World | None = None
    ) -> None:
        if config.validation_split and not task.held_out:
            raise ConfigError(no_validation(config))
        self.task, self.model, self.index, self.config = task, model, index, config
        self.world = world or World()
        self.base = base_of(getattr(model, "networks", task.networks))
        self.trained: Trained = add_networks(task.networks, config, index)
        self.flat = FlatParameters(self.trained.parameters, self.trained.multipliers, task.device)
        self.step = Step(task, self.flat, config, self.world)
        self._per_step = per_step = config.gradient_accumulation * self.world.size
        self.total = total_steps(len(task.order), per_step, steps=config.steps, epochs=config.epochs)
        share_of(config, 0, self.total)  # a warm-up as long as the run is told before it
        self.number = 0  # steps done
        self.started = time.time()
        self.validation: list[tuple[int, float]] = []
        self.output = Path(config.output)
        self.states = self.output / f"{config.name}-state"
        self._validate_every = config.save_every or -(-len(task.order) // per_step)
        self.meter: Meter | None = None  # of steps whose memory was planned
        self.base_hashes: Future[dict[str, str]] | None = None  # of the base, for the metadata; they take a while
        self.choices: list[str] = []  # what was decided for the user, and why
        self.told: list[tuple[str, str]] = []  # (event, text) to begin the log with
        self._notes: list[str] | None = None  # what to say of the beginning; None before it
        self._lock: TextIO | None = None
        self._stop = 0
        self._ask_at, self._last_asked = 0, (0, time.perf_counter())
        self._losses: list[torch.Tensor] = []

    # going on

    def resume(self, wanted: str) -> int:
        """Take over the newest checkpoint ("auto") or a given one; returns the step the run goes on from."""
        if self.world.first:
            self._lock = self._lock or alone(self.states)
            tidy(self.states)
            sweep(self.output, self.config.name)
        self.world.wait()
        try:
            self._notes = self._begin(wanted)
            self._agree()
        except BaseException:
            self._release()
            raise
        return self.number

    def _agree(self) -> None:
        """All processes go on from one step, or they would learn different things and wait for each other."""
        device = self.task.device
        least, most = self.world.least(self.number, device), -self.world.least(-self.number, device)
        if least != most:
            raise ConfigError(
                f"resume: some processes found step {least} and others step {most}; all of them need the same `output`, on a "
                "disk they share"
            )

    def _begin(self, wanted: str) -> list[str]:
        """Load what there is to go on from; what to say about it."""
        state, damaged = None, list[str]()
        if wanted != "never":
            state, damaged = newest(self.states) if wanted == "auto" else named(Path(wanted))
            refuse_existing(self.config, wanted)
        if state is None:
            refuse_existing(self.config, wanted)
            return [] if wanted == "never" else [f"there is no checkpoint in {self.states}: it begins at step 0"]
        check_same(state.facts, self._facts(), self.config, state.step)
        self.step.load(state.tensors)
        self.number = state.step
        self.started = state.facts.get("started", self.started)
        self.validation = [(int(step), float(loss)) for step, loss in state.facts.get("validation", [])]
        return [*damaged, f"from step {self.number}"]

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _facts(self) -> dict[str, Any]:
        config = self.config.model_dump(mode="json")
        config["steps"], config["epochs"] = self.total, None
        config["gradient_accumulation"] = (
            self.world.size * self.config.gradient_accumulation
        )  # of all processes together
        return {
            "config": config, "data": self.task.fingerprint(), "base": self.base, "started": self.started,
            "validation": self.validation,
        }  # fmt: skip

    def save(self) -> None:
        """A checkpoint of now; only the first process writes."""
        if self.world.first:
            save_state(self.states, State(self.number, self.step.state(), self._facts()), self.config.keep_last)
        self.world.wait()

    # the loop

    def train(self, *, sample: Sample | None = None, tell: Tell | None = None) -> Finished:
        """All steps that are left, then the file."""
        begun = time.perf_counter()
        if self._notes is None:
            self.resume(self.config.resume)
        journal: Journal | None = None
        losses: list[float] = []
        devices = [self.task.device] if self.task.device.type == "cuda" else []
        try:
            if self.world.first:
                path = self.output / f"{self.config.name}.jsonl"
                journal = Journal(path, since=self.number, tensorboard=self.config.tensorboard, tell=tell)
                resumed = "resumed" if self.number else "begins"
                said = [("memory", text) for text in self.choices] + [(resumed, text) for text in self._notes or []]
                for event, text in (*self.told, *said):
                    journal.write({"event": event, "step": self.number, "text": text})
            with Interrupts(self._ask), torch.random.fork_rng(devices):  # whoever calls keeps the global generator
                reason = self._loop(journal, sample, losses)
                losses += self._read_losses()
                self.save()
                path = self._store(self._file("" if reason != STOPPED else f"-{self.number:06d}"))
            if journal is not None:
                journal.write({"event": "finished", "step": self.number, "text": reason, "path": str(path)})
        finally:
            if journal is not None:
                journal.close()
            self._release()
        seconds = time.perf_counter() - begun
        return Finished(path, self.number, losses, reason, seconds, int(self.step.bad), list(self.validation))

    def _loop(self, journal: Journal | None, sample: Sample | None, losses: list[float]) -> str:
        """Steps until there is a reason to stop."""
        config, pace = self.config, Pace(self.total, self.number)
        if self._due() and self.world.any(not written(self._file(f"-{self.number:06d}")), self.task.device):
            self._store(self._file(f"-{self.number:06d}"))  # the run ended between the checkpoint and its adapter
        while True:
            if config.patience and _stuck([loss for _, loss in self.validation], config.patience):
                best = min(self.validation, key=lambda entry: entry[1])
                kept = self._file("-best")
                shown = kept.name if kept.is_file() else kept.stem
                there = f", and {shown} is of then" if self.world.any(written(kept), self.task.device) else ""
                return (
                    f"no better validation loss for {config.patience} times; the best was {best[1]:.4f} at step {best[0]}"
                    f"{there}"
                )
            if self.number >= self.total:
                self._check_health(journal, self.total)
                return DONE
            if self._asked():
                return STOPPED
            self._measured(journal)
            last, told = self.number == self.total, self.number % config.log_every == 0
            if last or told:
                losses += self._read_losses()
                if journal is not None:
                    journal.write(self._record(losses[-1], pace))
            if last or told or self.task.device.type == "cpu":  # elsewhere reading a counter makes the host wait
                self._check_health(journal)
            if config.validation_split and (last or self.number % self._validate_every == 0):
                self.validation.append((self.number, self.validate()))
                if config.patience and self.validation[-1][1] <= min(loss for _, loss in self.validation):
                    self._store(self._file("-best"))
                if journal is not None:
                    journal.write({"event": "validation", "step": self.number, "validation": self.validation[-1][1]})
            if self._due():
                self.save()
                self._store(self._file(f"-{self.number:06d}"))
            if sample is not None and config.sample_every and self.number % config.sample_every == 0:
                self._sampled(sample, journal)

    def _due(self) -> bool:
        """Whether a checkpoint and its adapter belong to the step just done."""
        every = self.config.save_every
        return bool(every) and 0 < self.number < self.total and self.number % every == 0

    def _measured(self, journal: Journal | None) -> None:
        """One update, and a word on memory where there is something to say."""
        pieces = self.step.split
        found = None
        if self.meter is not None:
            found = self.meter(self._one)
        else:
            self._one()
        if journal is not None and found is not None:
            journal.write({"step": self.number, **found})
        if journal is not None and self.step.split != pieces:
            told = f"it ran out; from now on a batch is computed in {self.step.split} pieces and added up"
            journal.write({"event": "memory", "step": self.number, "text": told})

    def _one(self) -> None:
        """One update."""
        config, world = self.config, self.world
        batches = self.task.order.step(
            self.number, accumulation=config.gradient_accumulation, world=world.size, rank=world.rank
        )
        drawn = []
        for micro, batch in enumerate(batches):
            place = micro * world.size + world.rank
            drawn.append(self.task.draw(batch, generator_for(config.seed, self.number, place)))
        self.step.run(self.number, config.learning_rate * share_of(config, self.number, self.total), drawn)
        self.number += 1
        self._losses.append(self.step.loss.clone())

    def _ask(self) -> int:
        self._stop += 1
        return self._stop

    def _asked(self) -> bool:
        """Whether to stop; processes must agree, and ask each other every few seconds."""
        if self.world.size > 1:
            if self.number < self._ask_at:
                return False
            now = time.perf_counter()
            done, seconds = self.number - self._last_asked[0], now - self._last_asked[1]
            steps = int(ASK_SECONDS * done / max(seconds, 1e-9))
            self._ask_at = self.number + self.world.least(max(min(steps, 100), 1), self.task.device)
            self._last_asked = self.number, now
        return self.world.any(self._stop > 0, self.task.device)

    def _read_losses(self) -> list[float]:
        found: list[float] = torch.stack(self._losses).tolist() if self._losses else []
        self._losses.clear()
        return found

    def _record(self, loss: float, pace: Pace) -> dict[str, Any]:
        rate, eta = pace.at(self.number)
        device = self.task.device
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        found: dict[str, Any] = {
            "step": self.number, "total": self.total, "loss": loss, "lr": float(self.step.rate), "norm": float(self.step.norm),
            "rate": rate, "eta": eta, "memory": memory, "bad": int(self.step.bad), "time": time.time(),
        }  # fmt: skip
        if self.step.scaler is not None:
            found["loss_scale"] = float(self.step.scaler.scale)
        if self.step.split > 1:
            found["split"] = self.step.split
        return found

    def _check_health(self, journal: Journal | None, most: int | None = None) -> None:
        """Stop where no step has been taken for too long; bad steps change nothing, so what is saved is good."""
        row = int(self.step.bad_in_a_row)
        if row < (most or self.config.max_skipped_steps):
            return
        causes = {
            "fp16": "fp16 overflows: train in bf16 or fp32",
            "fp32": "the learning rate is too high, or the data holds NaN",
        }
        half = "fp16" if self.step.scaler is not None else self.config.precision
        likely = causes.get(half, "the learning rate is too high for this model and rank")
        if journal is not None:
            journal.write({"event": "stopped", "step": self.number, "text": f"{row} steps without finite numbers"})
        self.save()
        try:
            path = self._store(self._file(f"-{self.number:06d}"), wide=True)  # what grew so far may be beyond fp16
            kept = f"the adapter from before them is {path}: go on from it under another name (start_from)"
        except TargetError:
            kept = "and the adapter from before them holds numbers beyond all precisions: begin again"
        raise InweaveError(
            f"{row} steps in a row had a loss or gradients that are not finite, so nothing was learnt from them; {kept}. "
            f"Likely: {likely}"
        )

    def validate(self) -> float:
        """The mean loss of what is held out, always with the same random numbers."""
        batches = self.task.held_out
        found = torch.zeros(len(batches), device=self.task.device)
        with self._evaluating():
            for number, counts in self.world.turns(len(batches), together=self.config.shard):
                drawn = self.task.draw(batches[number], generator_for(self.config.seed, -2, number))
                loss = self.step.judge(drawn)
                if counts:
                    found[number] = loss
        self.world.add_up(found)  # everybody else's are zeros: the same number as of one process
        sizes = torch.tensor([float(len(batch)) for batch in batches], device=found.device)
        return float((found * sizes).sum() / sizes.sum())

    # what others see

    def _sampled(self, sample: Sample, journal: Journal | None) -> None:
        """Pictures are worth less than the run: one that fails is told and left out."""
        if self.world.first or self.config.shard:
            events: list[dict[str, Any]]
            try:
                with self._evaluating():
                    events = [drawn.record() for drawn in sample(self.number)]
            except Exception as error:
                if self.config.shard and not isinstance(error, OSError):
                    raise  # the other processes wait inside the network for this one
                events = [{"event": "sample failed", "text": f"{type(error).__name__}: {' '.join(str(error).split())}"}]
            if journal is not None:
                for event in events:
                    journal.write({"step": self.number, **event})
            if self.task.device.type == "cuda":
                torch.cuda.empty_cache()
        self.world.wait()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The weights that are saved, and nothing dropped; afterwards everything is as it was."""
        modes = [(module, module.training) for network in self.task.networks.values() for module in network.modules()]
        with self._best_weights():
            for network in self.task.networks.values():
                network.eval()
            try:
                yield
            finally:
                for module, mode in modes:
                    module.training = mode

    def _best_weights(self) -> Any:
        return (self.step.ema or self.step.optimizer).eval_weights()

    def _file(self, ending: str) -> Path:
        return self.output / f"{self.config.name}{ending}.safetensors"

    def _store(self, path: Path, *, wide: bool = False) -> Path:
        """The adapter of now; the average of the weights where one is kept. ``wide``: in float32."""
        if self.world.first:
            advice = "the checkpoint has it: free some memory and go on with --resume auto"
            with needing(f"write {path}, the adapter of step {self.number}", advice), self._best_weights():
                adapter = gathered(self.task.networks)
            data = self.task.metadata() | {"ss_num_batches_per_epoch": str(len(self.task.order))}
            steps = self.number, self.total, len(self.task.order) / self._per_step
            shape = shape_of(self.task.networks, NAME)
            told = described(self.config, shape, self.model, steps, self.started, data)
            told |= self.base_hashes.result() if self.base_hashes is not None else {}
            config = self.config.model_copy(update={"save_dtype": "fp32"}) if wide else self.config
            path = store(adapter, path, config, self.index, told)
        self.world.wait()
        return path


def _stuck(values: list[float], patience: int) -> bool:
    return len(values) > patience and min(values[-patience:]) >= min(values[:-patience])
