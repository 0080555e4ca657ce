"""From a configuration to a trained adapter.

    inweave.train(inweave.TrainConfig.load("style.toml"))

`prepare` is the recipe: read the dataset, open the model, find the checkpoint, plan memory, refuse what cannot work, load,
encode, attach adapters, resume. No weight is read before everything that can be refused without weights was checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from inweave.errors import ConfigError, InweaveError
from inweave.exchange.load import load
from inweave.ops.tensors.device import choose_device
from inweave.training.checkpoint.resume import existing_output, open_resume_point, resumed_config
from inweave.training.config.schema import TrainConfig
from inweave.training.config.validation import run_problems
from inweave.training.distributed.fsdp import check_shard
from inweave.training.distributed.world import World, join
from inweave.training.execution.kernels import step_kernels
from inweave.training.execution.oom import oom_hint
from inweave.training.loop import Run
from inweave.training.memory.checkpointing import apply_checkpointing
from inweave.training.memory.estimate import estimate
from inweave.training.memory.meter import StepMeter
from inweave.training.memory.plan import Plan, enforce, limit_for, plan_run, remove_limit
from inweave.training.memory.quantization import quantize_denoiser
from inweave.training.memory.speed import speed_of
from inweave.training.optim.third_party import require_library
from inweave.training.output.log import OnRecord
from inweave.training.output.metadata import base_hashes
from inweave.training.output.result import TrainResult
from inweave.training.output.trackers import require_tensorboard, require_wandb
from inweave.training.tasks.diffusion_setup import DiffusionSetup
from inweave.training.tasks.evaluation import Sample
from inweave.training.tasks.language_setup import LanguageSetup, language_model_folder
from inweave.training.tasks.setup import OnProgress, Report, Setup


def train(
    config: TrainConfig,
    *,
    on_record: OnRecord | None = None,
    on_progress: OnProgress | None = None,
    world: World | None = None,
) -> TrainResult:
    """Train an adapter and write it; everything is checked before the first step.

    ``on_record(record)`` gets every record of the log, ``on_progress(activity, done, total)`` is called while images and
    captions are encoded. ``world``: the processes of a distributed run; by default as this one was launched. Raises
    `ConfigError` or `FormatError` before the run starts, `MemoryBudgetError` if it does not fit, `LostPeerError` if another
    process ended.

        result = inweave.train(inweave.TrainConfig(dataset="photos", steps=500))
    """
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"expected a TrainConfig, got {type(config).__name__}; TrainConfig.load(path) reads one from a TOML file"
        )
    world = world or join(config.device)
    try:
        run, sample = prepare(config, world, on_progress)
        return run.train(sample=sample, on_record=on_record)
    finally:
        if config.vram is not None:
            remove_limit(choose_device(world.device(config.device)))
        world.leave()


def prepare(
    config: TrainConfig,
    world: World | None = None,
    on_progress: OnProgress | None = None,
    save_seconds: float = math.inf,
) -> tuple[Run, Sample | None]:
    """Return a run that is ready to train, and what generates its samples.

    ``save_seconds``: the longest time between two checkpoints, whatever `save_every` says.
    """
    world = world or World()
    check_shard(config, world)
    check_libraries(config)
    setup = open_setup(config, choose_device(world.device(config.device)))
    checkpoint = open_resume_point(config, world)
    try:
        plan = plan_within_limit(setup, world, checkpoint.config)
        config, staged = (plan.config, plan.staged) if plan is not None else (setup.config, False)
        setup.validate(config)
        if problems := setup.problems(config):
            raise ConfigError(problems)
        if config.start_from is not None:
            load(config.start_from)
        if plan is not None:
            enforce(plan.limit, setup.device)
        loaded = setup.load(config, world, staged=staged)
        if staged:  # adapters stay where they are attached, so their network must be on the device by then
            loaded.fill_caches(world, on_progress)
        with oom_hint("hold the adapter and its optimizer", 'lower `rank`, or set optimizer = "adamw8bit"'):
            run = Run(loaded.task, loaded.model, loaded.index, config, world, save_seconds)
            run.step.split = plan.split if plan is not None else 1  # a checkpoint brings its own
            if config.quantize != "off":
                run.notes.append(("quantize", quantize_denoiser(loaded.model, config.quantize, setup.device)))
        run.resume(checkpoint)
        if not staged:
            loaded.fill_caches(world, on_progress)
        if world.first:
            run.notes += [("dataset", note) for note in loaded.notes()]
            if loaded.base_file is not None:
                run.base_hashes = ThreadPoolExecutor(1, "inweave-hash").submit(base_hashes, loaded.base_file)
        if plan is not None:
            run.notes += [("memory", reason) for reason in plan.reasons]
            run.meter = StepMeter(setup.device, plan.estimate["activation_bytes"])
        elif config.vram is not None:
            run.notes.append(("memory", _no_limit(setup.device)))
        if config.shard:
            run.notes.append(("memory", loaded.shard(world)))
        elif setup.device.type == "cuda":
            loaded.fuse_blocks()
        kernels = partial(step_kernels, setup.device, deterministic=config.deterministic)
        # adapters drop by seeds of the batch (`inweave.layers.dropout`), and the base drops nothing
        apply_checkpointing(loaded.task.networks, config.gradient_checkpointing, kernels, random=False)
        return run, loaded.sampler()
    except BaseException:
        checkpoint.release()
        raise


def check(config: TrainConfig, processes: int = 1) -> tuple[TrainConfig, Report, dict[str, Any]]:
    """Read everything but weights and train nothing: (the configuration in full, the dataset's report, an estimate)."""
    check_libraries(config)
    setup = open_setup(config, choose_device(config.device))
    setup.validate(setup.config)
    plan = plan_within_limit(setup, World(), resumed_config(config))
    config = plan.config if plan is not None else setup.config
    report, notes = setup.report(config, processes)
    needs = dict(plan.estimate if plan is not None else estimate(setup.measurable, config, **setup.sizes()))
    needs["steps"] = report.total_steps
    needs["seconds"] = report.total_steps * speed_of(setup.device, config, measured=True).seconds(needs)
    planned = plan.reasons if plan is not None else [_no_limit(setup.device)] if config.vram is not None else ()
    needs["choices"] = [*planned, *notes]
    needs["problems"] = [*setup.problems(config), *refusals(config)]
    return config, report, needs


def open_setup(config: TrainConfig, device: torch.device) -> Setup:
    """Read the dataset and open the model, without its weights."""
    folder = language_model_folder(config)
    return DiffusionSetup(config, device) if folder is None else LanguageSetup(config, device, folder)


def plan_within_limit(setup: Setup, world: World, resumed: Mapping[str, Any] | None) -> Plan | None:
    """Plan a run that stays within `vram`; None without a limit."""
    limit = limit_for(setup.config, setup.device)
    if limit is None:
        return None
    limit = world.least(limit, setup.device)  # all processes plan alike, whatever is free on each of their devices
    speed = speed_of(setup.device, setup.config)
    return plan_run(
        setup.measurable, setup.config, limit, speed, resumed=resumed, processes=world.size, **setup.sizes()
    )


def _no_limit(device: torch.device) -> str:
    return f'vram = "auto" plans for the memory that is free on a GPU, and device {device} is not one: nothing is limited or changed'


def check_libraries(config: TrainConfig) -> None:
    """Refuse settings that do not go together in a run, or that need a library which is not installed."""
    problems = run_problems(config)
    for needed, check_one in (
        (config.tensorboard, require_tensorboard),
        (config.wandb, require_wandb),
        (True, lambda: require_library(config.optimizer)),
    ):
        try:
            if needed:
                check_one()
        except ConfigError as error:
            problems += map(str, error.problems)
    if problems:
        raise ConfigError(problems)


def refusals(config: TrainConfig) -> list[str]:
    """What of the files of earlier runs would end this one before its first step."""
    problems = [problem] if (problem := existing_output(config)) else []
    try:
        _ = load(config.start_from) if config.start_from else None
    except InweaveError as error:
        problems.append(f"start_from: {error}")
    return problems
