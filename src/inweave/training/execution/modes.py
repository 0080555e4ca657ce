"""How the steps of a run are executed: the settings `graph` and `compile`, and the reasons for and against them.

off     never
auto    unless something prevents it or the run is too short (`capture.recording_pays`, `compilation.saves_time`)
on      always; a run for which that is impossible is refused before any weight is read

If the optimizer cannot be recorded, a step is recorded up to its gradients and the optimizer runs eagerly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from inweave.training.config.schema import TrainConfig
from inweave.training.execution.capture import capture_problems, optimizer_problem
from inweave.training.execution.compilation import compile_problems


def mode_problems(networks: Mapping[str, nn.Module], config: TrainConfig, device: torch.device) -> list[str]:
    """Return why a run must be refused: a setting is "on" that is impossible; the networks need no weights."""
    graph = capture_problems(config, device) if config.graph == "on" else []
    compiled = compile_problems(networks, config, device) if config.compile == "on" else []
    return [
        *(f'graph = "on": {each}; leave it out, and steps run eagerly' for each in graph),
        *(f'compile = "on": {each}; leave it out, and blocks run eagerly' for each in compiled),
    ]


def describe_modes(
    config: TrainConfig,
    steps: int,
    *,
    sizes: int,
    recorded: bool,
    compiled: int,
    against: tuple[Sequence[str], Sequence[str]],
) -> str:
    """Describe for the log whether steps are recorded, how many blocks are ``compiled``, and why not.

    ``sizes``: the number of batch sizes in the run; ``against``: the reasons against recording and against compiling.
    """
    run = f"{steps} steps" if sizes == 1 else f"{steps} steps with {sizes} batch sizes"
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
