"""Resuming: what a run starts from, and whether it is the run that wrote the checkpoint.

    settings   those with the fact resume="same" are, unless they have no effect (`unused_settings`)
    steps      may be more or fewer than before, but not fewer than are done. Where the learning rate depends on the end of
               the run, steps that are done keep the rate they had, and the others follow the schedule of the new length:
               the log says so
    data       the same images and captions, wherever they are
    base       the same weights, judged by values sampled from every one of them, wherever they are

Where data and base are the same, their paths may differ. A checkpoint without a digest of the base goes by the path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from torch import nn

from inweave.errors import ConfigError
from inweave.files.paths import is_folder
from inweave.training.checkpoint.facts import ensure_run_state
from inweave.training.checkpoint.store import State, checkpoints, load_named, load_newest, lock, recover
from inweave.training.config.fields import names_where
from inweave.training.config.schema import TrainConfig
from inweave.training.config.unused import unused_settings
from inweave.training.data.cache import sample_bits, tensor_bits
from inweave.training.distributed.world import World
from inweave.training.optim.schedules import learning_rate_at, rates
from inweave.training.output.adapter_file import adapter_exists, remove_leftovers


@dataclass(slots=True)
class ResumePoint:
    """What a run starts from. ``state``: None at step 0; ``notes``: what to report; `acquire` locks until `release`."""

    folder: Path
    state: State | None = None
    notes: list[str] = field(default_factory=list)
    _lock: TextIO | None = None

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The configuration of the run that is resumed, if one is, and the ``split`` of its batches."""
        if self.state is None:
            return None
        return {**self.state.facts.get("config", {}), "split": int(self.state.tensors["split"])}

    def acquire(self, world: World) -> None:
        """Lock the folder of the run, which the first process does for all."""
        if world.first and self._lock is None:
            self._lock = lock(self.folder)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def state_folder(config: TrainConfig) -> Path:
    return Path(config.output) / f"{config.name}-state"


def open_resume_point(config: TrainConfig, world: World, source: str | None = None) -> ResumePoint:
    """Read the checkpoint to resume from, once; needs no model. A folder that exists is locked and recovered first.

    ``source``: as `TrainConfig.resume`, which it overrides. Outputs of another run are refused. Nothing is created: a run
    that is refused leaves no trace.
    """
    source = source or config.resume
    folder = state_folder(config)
    point = ResumePoint(folder)
    try:
        if world.first:
            if is_folder(folder):
                point.acquire(world)
                recover(folder)
            remove_leftovers(Path(config.output), config.name)
        world.wait()
        point.state, point.notes = _find(source, folder)
        if problem := existing_output(config, source):
            raise ConfigError(problem)
    except BaseException:
        point.release()
        raise
    if point.state is not None:
        point.notes.append(f"from step {point.state.step}")
    elif source != "never":
        point.notes.append(f"there is no checkpoint in {folder}: training starts at step 0")
    return point


def resumed_config(config: TrainConfig) -> Mapping[str, Any] | None:
    """Return the configuration of the run that would be resumed; locks and changes nothing."""
    state, notes = _find(config.resume, state_folder(config))
    return ResumePoint(state_folder(config), state, notes).config


def _find(source: str, folder: Path) -> tuple[State | None, list[str]]:
    if source == "never":
        return None, []
    state, notes = load_newest(folder) if source == "auto" else load_named(Path(source))
    return (None if state is None else ensure_run_state(state)), notes


def existing_output(config: TrainConfig, source: str | None = None) -> str:
    """Why this run would overwrite an earlier one; empty if it resumes it, or if nothing is there."""
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


def base_digest(networks: Mapping[str, nn.Module]) -> str:
    """A digest of the weights, before adapters are attached."""
    digest = hashlib.sha256()
    for folder, network in sorted(networks.items()):
        for key, value in network.state_dict().items():
            row = (folder, key, str(value.dtype), tuple(value.shape), sample_bits(tensor_bits(value)))
            digest.update(str(row).encode())
    return digest.hexdigest()


def _quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def ensure_resumable(then: Mapping[str, Any], now: Mapping[str, Any], config: TrainConfig, step: int) -> list[str]:
    """Raise where the facts of a checkpoint of ``step`` are those of another run, naming everything that differs.

    Returns what there is to say about a run that gets longer or shorter.
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
            f"steps: {step} steps are done, and {total} are set; set more of them, or resume an earlier checkpoint by its path"
        )
    if not problems and then.get("data") != now["data"]:
        problems.append(
            "dataset: it is not the one this run was started with; start a new run under another name (--name)"
        )
    if not problems and has_digest and then["base"] != now["base"]:
        problems.append(
            "model: its weights are not those this run was started with; start a new run under another name (--name)"
        )
    if problems:
        raise ConfigError(problems)
    return _length_notes(config, step, length, total) if length and length != total else []


def _value(before: Mapping[str, Any], name: str) -> Any:
    """A setting of a checkpoint; one that is newer than the checkpoint had its default."""
    if name in before or name not in TrainConfig.model_fields:
        return before.get(name)
    default = TrainConfig.model_fields[name].get_default(call_default_factory=True)
    return list(default) if isinstance(default, tuple) else default


def _length_notes(config: TrainConfig, step: int, length: int, total: int) -> list[str]:
    """What another number of steps means for the run, and for a learning rate that depends on it."""
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
        f'lr_scheduler = "{config.lr_scheduler}"{warmup} depends on the number of steps: the {step} steps that are done followed '
        f"the schedule of {length}, the others follow that of {total}; the learning rate goes from {last:.3g} to {following:.3g}",
    ]
