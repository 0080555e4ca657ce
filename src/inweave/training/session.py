"""From a configuration to a trained adapter.

    inweave.train(inweave.TrainConfig.load("style.toml"))

`prepare` is the recipe: read the dataset, open the model, find the checkpoint, plan memory, refuse what cannot work,
load, encode, attach adapters, resume. Everything that can be checked without weights is checked before any is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from inweave.errors import ConfigError, InweaveError, LostPeerError
from inweave.exchange.load import load
from inweave.models.quantization import join_groups
from inweave.ops.tensors.device import choose_device, device_note
from inweave.ops.tensors.oom import oom_hint
from inweave.training.checkpoint.resume import existing_output, open_resume_point, resumed_config
from inweave.training.config.schema import TrainConfig
from inweave.training.config.validation import run_problems
from inweave.training.data.report import DatasetReport
from inweave.training.data.texts import TextReport
from inweave.training.distributed.fsdp import check_shard
from inweave.training.distributed.watch import Watch
from inweave.training.distributed.world import World, failed_collectives, join
from inweave.training.execution.kernels import step_kernels
from inweave.training.loop import Run
from inweave.training.memory.checkpointing import apply_checkpointing
from inweave.training.memory.estimate import moves_inputs, sum_up
from inweave.training.memory.meter import StepMeter
from inweave.training.memory.plan import MemoryPlan, enforce, limit_for, plan_run, remove_limit
from inweave.training.memory.speed import speed_of
from inweave.training.memory.table import plan_table
from inweave.training.optim.third_party import require_library
from inweave.training.output.log import OnRecord
from inweave.training.output.result import TrainResult
from inweave.training.output.trackers import require_tracker
from inweave.training.tasks.base import OnProgress
from inweave.training.tasks.diffusion_setup import DiffusionSetup
from inweave.training.tasks.evaluation import Sample
from inweave.training.tasks.language_setup import LanguageSetup, language_model_folder
from inweave.weights.streaming.activations import HostActivations

Setup = DiffusionSetup | LanguageSetup
DataReport = DatasetReport | TextReport
INPUTS_NOTE = "the inputs of checkpointed blocks are in host memory between the forward and the backward pass"


def train(
    config: TrainConfig,
    *,
    on_record: OnRecord | None = None,
    on_progress: OnProgress | None = None,
    world: World | None = None,
) -> TrainResult:
    """Train an adapter and write it; everything is checked before the first step.

        result = inweave.train(inweave.TrainConfig(dataset="photos", steps=500))

    Args:
        config: The model, the dataset and all settings of the run.
        on_record: Called with every record of the log.
        on_progress: Called as ``on_progress(activity, done, total)`` while images and captions are encoded.
        world: The processes of a distributed run; by default those this process was launched with.

    Returns:
        The path of the adapter, why the run ended, and its losses.

    Raises:
        ConfigError: A setting, the dataset or the model cannot be used; nothing was trained.
        FormatError: A file cannot be read or written.
        MemoryBudgetError: The run does not fit into memory.
        LostPeerError: Another process of a distributed run ended.
    """
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"expected a TrainConfig, got {type(config).__name__}; TrainConfig.load(path) reads one from a TOML file"
        )
    world = world or join(config.device)
    watch = Watch(world)
    try:
        with failed_collectives():
            run, sample = prepare(config, world, on_progress)
            result = run.train(sample=sample, on_record=on_record)
            if watch.active:
                world.wait()  # no process is watched any more when the first one ends, and the store with it
        return result
    except LostPeerError as error:
        raise watch.lost(error) from None
    except Exception as error:
        watch.report(error)
        raise
    finally:
        watch.close()
        if config.is_planned:
            remove_limit(choose_device(world.device(config.device)))
        world.leave()


def prepare(
    config: TrainConfig,
    world: World | None = None,
    on_progress: OnProgress | None = None,
    *,
    checkpoint_seconds: float = math.inf,
) -> tuple[Run, Sample | None]:
    """Return a run that is ready to train, and the function that generates its samples.

    ``checkpoint_seconds``: the longest time between two checkpoints, in addition to `save_every`.
    """
    world = world or World()
    check_shard(config, world)
    check_libraries(config)
    setup = open_setup(config, choose_device(world.device(config.device)), on_progress)
    checkpoint = open_resume_point(config, world)
    try:
        plan = plan_within_limit(setup, world, checkpoint.config)
        config, staged = (plan.config, plan.staged) if plan is not None else (_unplanned(setup.config), False)
        staged |= config.offload == "blocks"
        setup.validate(config)
        if problems := setup.problems(config):
            raise ConfigError(problems)
        for adapter in filter(None, (config.start_from, config.assistant)):
            load(adapter)
        if plan is not None:
            enforce(plan.limit, setup.device)
        loaded = setup.load(config, world, staged=staged)
        if staged:  # networks with adapters never move, so they must be on the device before adapters are attached
            loaded.fill_caches(world, on_progress)
        with oom_hint("hold the adapter and its optimizer", 'lower `rank`, or set optimizer = "adamw8bit"'):
            expected = [plan.estimate[f"{name}_bytes"] if plan is not None else None for name in ("activation", "host")]
            in_host = staged or moves_inputs(config)
            meter = StepMeter(setup.device, expected[0], expected[1] if in_host else None)
            run = Run(
                loaded.task, loaded.model, loaded.index, config, world, split=plan.split if plan is not None else 1,
                meter=meter, base_file=loaded.base_file, checkpoint_seconds=checkpoint_seconds,
            )  # fmt: skip
            if loaded.quantized:
                join_groups(loaded.model.denoiser)
                run.notes.append(("quantize", loaded.quantized))
        run.resume(checkpoint)
        if not staged:
            loaded.fill_caches(world, on_progress)
        if note := device_note(setup.device):
            run.notes.append(("device", note))
        run.notes += [("dataset", note) for note in (loaded.notes() if world.first else ())]
        run.notes += [("memory", note) for note in _memory_notes(plan, config, setup.device)]
        if config.shard:
            run.notes.append(("memory", loaded.shard(world)))
        elif setup.device.type == "cuda":
            loaded.fuse_blocks()
        kernels = partial(step_kernels, setup.device, deterministic=config.deterministic)
        # adapters drop by the seeds of the batch (`inweave.layers.dropout`), and the base drops nothing
        activations = HostActivations(setup.device) if moves_inputs(config) else None
        mode = config.gradient_checkpointing
        apply_checkpointing(loaded.task.networks, mode, kernels, random=False, activations=activations)
        if activations is not None:
            run.notes.append(("memory", INPUTS_NOTE))
        if config.offload == "blocks":
            run.notes.append(("memory", loaded.stream_blocks(plan.resident if plan is not None else 0)))
        return run, loaded.sampler()
    except BaseException:
        checkpoint.release()
        raise


def check(
    config: TrainConfig, processes: int = 1, on_progress: OnProgress | None = None, *, table: bool = False
) -> tuple[TrainConfig, DataReport, dict[str, Any]]:
    """Read everything but weights: return (the full configuration, the report on the dataset, an estimate).

    ``table``: the estimate has other ways to do the run too, as "plans".
    """
    check_libraries(config)
    setup = open_setup(config, choose_device(config.device), on_progress)
    setup.validate(setup.config)
    plan = plan_within_limit(setup, World(), resumed_config(config))
    requested = setup.config
    config = plan.config if plan is not None else _unplanned(requested)
    dialect, unnamed = setup.dialect(config)
    config = config.model_copy(update={"dialect": dialect})
    report, notes = setup.report(config, processes)
    notes = [*filter(None, [unnamed]), *notes]
    needs = dict(plan.estimate if plan is not None else sum_up(setup.measurements, config, staged=False))
    needs["steps"] = report.total_steps
    speed = speed_of(setup.device, config, measured=True)
    needs["seconds"] = report.total_steps * speed.seconds(needs)
    if table:
        sized = requested.model_copy(update={"batch_size": config.batch_size})
        needs["plans"] = [asdict(row) for row in plan_table(setup.measurements, sized, speed)]
    needs["choices"] = [*filter(None, [device_note(setup.device)]), *_memory_notes(plan, config, setup.device), *notes]
    needs["problems"] = [*setup.problems(config), *refusals(config)]
    return config, report, needs


def open_setup(config: TrainConfig, device: torch.device, on_progress: OnProgress | None = None) -> Setup:
    """Read the dataset and open the model, without its weights."""
    folder = language_model_folder(config)
    return DiffusionSetup(config, device, on_progress) if folder is None else LanguageSetup(config, device, folder)


def plan_within_limit(setup: Setup, world: World, resumed: Mapping[str, Any] | None) -> MemoryPlan | None:
    """Plan a run that stays within `vram`; None without a limit."""
    limit = limit_for(setup.config, setup.device)
    if limit is None:
        return None
    limit = world.least(limit, setup.device)  # all processes plan alike, however much is free on their devices
    speed = speed_of(setup.device, setup.config)
    return plan_run(setup.measurements, setup.config, limit, speed, resumed, world.size, setup.example_count)


def _unplanned(config: TrainConfig) -> TrainConfig:
    """Return the configuration of a run without a limit, for which nothing can be chosen."""
    if not config.batch_size:
        raise ConfigError('batch_size = "auto" fills the memory of a GPU, or vram; set vram, or a batch size')
    return config.model_copy(update={"quantize": "off"}) if config.quantize == "auto" else config


def _memory_notes(plan: MemoryPlan | None, config: TrainConfig, device: torch.device) -> tuple[str, ...]:
    """Return the reasons of the plan, or why there is none although `vram` is set."""
    if plan is not None:
        return plan.reasons
    unlimited = f'vram = "auto" uses the free memory of a GPU, and device {device} is not one: nothing is limited or'
    return () if config.vram is None else (f"{unlimited} changed",)


def check_libraries(config: TrainConfig) -> None:
    """Raise ConfigError if settings conflict in a run, or need a library that is not installed."""
    problems = run_problems(config)
    trackers = [partial(require_tracker, name) for name in ("tensorboard", "wandb") if getattr(config, name)]
    for require in (*trackers, partial(require_library, config.optimizer)):
        try:
            require()
        except ConfigError as error:
            problems += map(str, error.problems)
    if problems:
        raise ConfigError(problems)


def refusals(config: TrainConfig) -> list[str]:
    """Return the problems with files of earlier runs that would end this one before its first step."""
    problems = [problem] if (problem := existing_output(config)) else []
    for name, path in (("start_from", config.start_from), ("assistant", config.assistant)):
        try:
            _ = load(path) if path else None
        except InweaveError as error:
            problems.append(f"{name}: {error}")
    return problems
