"""How the steps of a run are executed: what `graph` and `compile` ask for, what prevents it, what was chosen and why.

A step whose optimizer cannot be recorded is recorded up to its gradients; the optimizer then runs eagerly.

off     never
auto    where nothing prevents it and the run is long enough (`speed.recording_pays`, `compilation.saves_time`)
on      always; a run for which that is impossible is refused, before any weight is read
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from inweave.training.config.schema import TrainConfig
from inweave.training.execution.compilation import compile_problems
from inweave.training.optim.adamw import OWN_OPTIMIZERS, AdamW, AdamW8bit
from inweave.training.optim.third_party import LibraryOptimizer


def capture_problems(config: TrainConfig, device: torch.device) -> list[str]:
    """Why forward and backward passes of this run cannot be captured in CUDA graphs; empty if they can."""
    problems = []
    if device.type != "cuda":
        problems.append(f"device {device}: only CUDA devices have graphs")
    if config.shard:
        problems.append("shard: the base is gathered by hooks on the host")
    return problems


def optimizer_problem(config: TrainConfig) -> str | None:
    """Why the optimizer runs eagerly, after a recorded backward pass; None if it is recorded too."""
    optimizer: type[AdamW | AdamW8bit | LibraryOptimizer] = OWN_OPTIMIZERS.get(config.optimizer, LibraryOptimizer)
    return None if optimizer.capturable else f"{config.optimizer}: {optimizer.capture_problem}"


def choice_problems(networks: Mapping[str, nn.Module], config: TrainConfig, device: torch.device) -> list[str]:
    """Why a run must be refused: a setting is "on" and cannot be; the networks need no weights."""
    graph = capture_problems(config, device) if config.graph == "on" else []
    compiled = compile_problems(networks, config, device) if config.compile == "on" else []
    return [
        *(f'graph = "on": {each}; leave it out, and steps run eagerly' for each in graph),
        *(f'compile = "on": {each}; leave it out, and blocks run eagerly' for each in compiled),
    ]


def describe_choices(
    config: TrainConfig,
    steps: int,
    *,
    sizes: int,
    recorded: bool,
    compiled: int,
    against: tuple[Sequence[str], Sequence[str]],
) -> str:
    """What the log says about a run: whether steps are recorded, how many blocks are ``compiled``, and why not.

    ``sizes``: of batches that the run has; ``against``: what prevents recording, and compiling.
    """
    run = f"{steps} steps" if sizes == 1 else f"{steps} steps on {sizes} sizes of batch"
    graph, blocks = (
        f'{name} = "off"' if setting == "off" else "; ".join(problems) or short
        for name, setting, problems, short in (
            ("graph", config.graph, against[0], f"{run} are too few to make up for recording them"),
            ("compile", config.compile, against[1], f"compiling would take longer than it saves in {steps} steps"),
        )
    )
    problem = optimizer_problem(config)
    all_or_part = "steps are recorded as CUDA graphs"
    if problem is not None:
        all_or_part = (
            f"forward and backward passes are recorded as CUDA graphs, and the optimizer runs eagerly ({problem})"
        )
    first = all_or_part if recorded else f"steps run eagerly ({graph})"
    second = f"{compiled} blocks are compiled" if compiled else f"no blocks are compiled ({blocks})"
    return f"{first}; {second}"
