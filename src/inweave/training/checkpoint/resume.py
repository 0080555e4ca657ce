"""Resuming: the checkpoint a run starts from, and whether the run is the one that wrote it.

    settings   those with the fact resume="same" must be equal, unless they have no effect (`unused_settings`)
    steps      may be more or fewer than before, but not fewer than are done. If the learning rate depends on the length
               of the run, steps that are done keep the rate they had, and the others follow the schedule of the new
               length, which is logged
    data       the same images and captions, at any path
    base       the same weights, compared by digests of all tensors, at any path

A checkpoint of an earlier version has a digest of 64 values of each tensor of the base, or none and is compared by the
path: a note in the log says which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from inweave.errors import ConfigError, amount
from inweave.files.paths import is_folder, printable
from inweave.training.checkpoint.facts import ensure_run_state
from inweave.training.checkpoint.store import State, checkpoints, load_named, load_newest, lock, recover
from inweave.training.config.fields import names_where
from inweave.training.config.schema import TrainConfig
from inweave.training.config.unused import unused_settings
from inweave.training.data.digests import Digests
from inweave.training.distributed.world import World
from inweave.training.optim.schedules import learning_rate_at, rates
from inweave.training.output.adapter_file import adapter_exists, remove_leftovers


class ResumePoint:
    """The checkpoint a run starts from. ``notes``: for the log; ``folder_lock``: on its folder, until `release`."""

    def __init__(
        self, folder: Path, state: State | None = None, notes: Sequence[str] = (), folder_lock: TextIO | None = None
    ) -> None:
        self.folder, self.notes = folder, notes
        self._state, self._lock = state, folder_lock
        self.config = None if state is None else _config_of(state)

    def take(self) -> State | None:
        """Return the state, None at step 0, and forget it: its tensors take as much memory as the run's own."""
        state, self._state = self._state, None
        return state

    def acquire(self, world: World) -> None:
        """Lock the folder of the run, which the first process does for all."""
        if world.first and self._lock is None:
            self._lock = lock(self.folder)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _config_of(state: State) -> Mapping[str, Any]:
    """Return the configuration of the run that wrote a checkpoint, and the ``split`` of its batches."""
    return {**state.facts.get("config", {}), "split": int(state.tensors["split"])}


def state_folder(config: TrainConfig) -> Path:
    return Path(config.output) / f"{config.name}-state"


def open_resume_point(config: TrainConfig, world: World, source: str | None = None) -> ResumePoint:
    """Read the checkpoint to resume from, once; needs no model. A folder that exists is locked and recovered first.

    ``source``: overrides `TrainConfig.resume`. Outputs of another run are refused. Nothing is created: a run that is
    refused leaves no trace.
    """
    source = source or config.resume
    folder = state_folder(config)
    folder_lock = lock(folder) if world.first and is_folder(folder) else None
    try:
        if world.first:
            if folder_lock is not None:
                recover(folder)
            remove_leftovers(Path(config.output), config.name)
        world.wait()
        state, notes = _find(source, folder)
        if problem := existing_output(config, source):
            raise ConfigError(problem)
    except BaseException:
        if folder_lock is not None:
            folder_lock.close()
        raise
    if state is not None:
        notes.append(f"from step {state.step}")
    elif source != "never":
        notes.append(f"there is no checkpoint in {folder}: training starts at step 0")
    return ResumePoint(folder, state, notes, folder_lock)


def resumed_config(config: TrainConfig) -> Mapping[str, Any] | None:
    """Return the configuration of the run that would be resumed; does not lock or change anything."""
    state, _ = _find(config.resume, state_folder(config))
    return None if state is None else _config_of(state)


def _find(source: str, folder: Path) -> tuple[State | None, list[str]]:
    if source == "never":
        return None, []
    state, notes = load_newest(folder) if source == "auto" else load_named(Path(source))
    return (None if state is None else ensure_run_state(state)), notes


def existing_output(config: TrainConfig, source: str | None = None) -> str:
    """Return why this run would overwrite an earlier one; empty if it resumes it, or if there is none."""
    source = source or config.resume
    folder, file = state_folder(config), Path(config.output) / f"{config.name}.safetensors"
    path = Path(source).resolve()
    own = source not in ("auto", "never") and folder.resolve() in (path, *path.parents)
    if own or (source == "auto" and checkpoints(folder)):
        return ""
    otherwise = "or use another name (--name) or output"
    if checkpoints(folder):
        return (
            f'{folder}: contains checkpoints of an earlier run; resume it with resume = "auto" (--resume), {otherwise}'
        )
    if adapter_exists(file):
        return f"{file}: the adapter exists, and there is no checkpoint to resume from; move it, {otherwise}"
    return ""


def ensure_same_step(step: int, world: World, device: torch.device) -> None:
    """Raise unless all processes resume from one step: they would train on different data and wait for each other."""
    least, most = world.least(step, device), -world.least(-step, device)
    if least != most:
        raise ConfigError(
            f"resume: some processes have step {least} and others step {most}; all of them need the same `output`, on "
            "a disk they share"
        )


def _quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def ensure_resumable(
    then: Mapping[str, Any], now: Mapping[str, Any], config: TrainConfig, step: int, sampled: str = ""
) -> list[str]:
    """Raise ConfigError if the facts of a checkpoint of ``step`` are those of another run, naming every difference.

    ``sampled``: the digest of the base that earlier versions saved. Returns notes for the log about a run that gets
    longer or shorter, and about a base that was not compared as a whole.
    """
    before, today = dict(then.get("config", {})), dict(now["config"])
    length, total = before.get("steps"), today["steps"]
    if length and step <= total:
        before["steps"] = total
    has_digest = "base" in then
    by_content = names_where(resume="content") if has_digest else {"dataset"}
    free = names_where(resume="free") | by_content | unused_settings(config)
    problems = [
        f"{name}: this run was started with {_quoted(before.get(name))}, now it is {_quoted(today.get(name))}; "
        "resume with the same value, or start a new run under another name"
        for name in sorted({*before, *today} - free)
        if _value(before, name) != today.get(name)
    ]
    if step > total:
        problems = [each for each in problems if not each.startswith("steps:")]
        problems.append(
            f"steps: {step} steps are done, and {total} are set; set more of them, or resume an earlier checkpoint by "
            "its path"
        )
    if not problems and then.get("data") != now["data"]:
        problems.append(
            "dataset: it is not the one this run was started with; start a new run under another name (--name)"
        )
    if not problems and has_digest:
        problems += _base_problems(then["base"], now["base"], sampled)
    if problems:
        raise ConfigError(problems)
    notes = _length_notes(config, step, length, total) if length and length != total else []
    if not isinstance(then.get("base"), dict):
        compared = "64 values of each tensor" if has_digest else "its path"
        notes.append(
            f"the checkpoint is of an earlier version: of the base only {compared} could be compared; the next "
            "checkpoint has digests of all values"
        )
    return notes


def _base_problems(then: Digests | str, now: Digests, sampled: str) -> list[str]:
    if isinstance(then, str):
        others, which = then != sampled, ""
    else:
        names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
        others, which = (
            bool(names),
            f" ({amount(len(names), 'tensor')}, such as {', '.join(map(printable, names[:3]))})",
        )
    problem = f"model: its weights are not those this run was started with{which}; start a new run under another name"
    return [f"{problem} (--name)"] if others else []


def _value(before: Mapping[str, Any], name: str) -> Any:
    """Return a setting of a checkpoint; one that did not exist then had its default."""
    if name in before or name not in TrainConfig.model_fields:
        return before.get(name)
    default = TrainConfig.model_fields[name].get_default(call_default_factory=True)
    return list(default) if isinstance(default, tuple) else default


def _length_notes(config: TrainConfig, step: int, length: int, total: int) -> list[str]:
    """Return notes for the log about another number of steps and its effect on the learning rate."""
    change = "extended" if total > length else "shortened"
    note = f"the run is {change} from {length} to {total} steps"
    if 0 < config.text_encoder_stop < 1:
        before, after = config.encoder_steps(length), config.encoder_steps(total)
        note += f"; text encoders, which stopped training after {before} steps, stop after {after}"
    if rates(config, length, step) == rates(config, total, step):
        same = learning_rate_at(config, step, length) == learning_rate_at(config, step, total)
        if config.lr_scheduler == "constant" or same:
            return [note]
    last = config.learning_rate * learning_rate_at(config, max(step - 1, 0), length)
    following = config.learning_rate * learning_rate_at(config, step, total)
    warmup = f", warmup = {config.warmup:g}" if config.warmup else ""
    return [
        note,
        f'lr_scheduler = "{config.lr_scheduler}"{warmup} depends on the number of steps: the {step} steps that are '
        f"done followed the schedule of {length}, the others follow that of {total}; the learning rate goes from "
        f"{last:.3g} to {following:.3g}",
    ]
