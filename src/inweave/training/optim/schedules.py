"""Learning-rate schedules: a multiplier for every step, as pure functions.

    step < warmup    (step + 1) / warmup                            never 0, and 1 at the last step of the warm-up
    afterwards       t = (step - warmup) / (total - warmup)         0 at the first such step, 1 at step = total
      constant       1
      linear         1 - t
      polynomial     (1 - t)^power
      cosine         (1 + cos(pi u)) / 2                            u = t; with r cycles: u = fraction of r t
      rex            (1 - t) / (1 - 0.9 t)                          Chen et al., arXiv 2107.04197
      low            low + (1 - low) curve                          ends at `lr_min_ratio`
      a class of torch.optim.lr_scheduler, with its own arguments: its own rates, computed ahead for the whole run

Steps are 0 .. total - 1, so the last one still trains; step = total returns the end of the curve.
"""

from __future__ import annotations

import json
import math
import warnings
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from inweave.errors import ConfigError
from inweave.training.config.fields import TORCH_SCHEDULERS
from inweave.training.config.types import warmup_in_steps

if TYPE_CHECKING:
    from inweave.training.config.schema import TrainConfig

KINDS = ("constant", "cosine", "linear", "polynomial", "rex")
_CYCLING = ("torch.optim.lr_scheduler.CyclicLR", "torch.optim.lr_scheduler.OneCycleLR")


def learning_rate(
    step: int,
    total: int,
    kind: str = "constant",
    warmup: int | float = 0,
    restarts: int = 1,
    power: float = 1.0,
    low: float = 0.0,
) -> float:
    """Return the multiplier of the learning rate at ``step`` of ``total``.

    ``warmup``    a whole number of steps, or a fraction of all steps (a float below 1, rounded to whole steps)
    ``restarts``  cosine: the number of cycles
    ``power``     polynomial: its exponent
    ``low``       the multiplier at which the curve ends; a constant has none
    """
    warm = warmup_steps(total, warmup)
    _check(step, total, kind, restarts, power)
    if step < warm:
        return (step + 1) / warm
    done, left = step - warm, total - warm
    if kind == "constant":
        return 1.0
    if kind == "cosine":
        # integers up to the division: a restart must not be missed by an ulp
        u = done * restarts % left / left if done < left else 1.0
        curve = 0.5 + 0.5 * math.cos(math.pi * u)
    elif kind == "rex":
        curve = (left - done) / (left - 0.9 * done)
    else:
        curve = math.pow(1 - done / left, power if kind == "polynomial" else 1.0)
    return low + (1 - low) * curve


def warmup_steps(total: int, warmup: int | float) -> int:
    """Return ``warmup`` in whole steps; raises ConfigError if it leaves no steps to train."""
    if total < 1:
        raise ConfigError(f"there must be at least 1 step, got {total}")
    if not math.isfinite(warmup) or (warmup != int(warmup) and not 0 < warmup < 1):
        raise ConfigError(f"warmup must be a whole number of steps or a fraction below 1, got {warmup!r}")
    steps = warmup_in_steps(warmup, total)
    if not 0 <= steps < total:
        raise ConfigError(f"warmup must leave steps to train: {warmup!r} is {steps} of {total} steps")
    return steps


def _check(step: int, total: int, kind: str, restarts: int, power: float) -> None:
    problems = []
    if kind not in KINDS:
        problems.append(f"unknown schedule {kind!r}; choose one of {', '.join(KINDS)}")
    if not 0 <= step <= total:
        problems.append(f"step must be in 0 .. {total}, got {step}")
    if restarts < 1:
        problems.append(f"restarts must be 1 or more, got {restarts}")
    if not (math.isfinite(power) and power > 0):
        problems.append(f"power must be a positive number, got {power!r}")
    if problems:
        raise ConfigError(problems)


def learning_rate_at(config: TrainConfig, step: int, total: int) -> float:
    """Return the multiplier of the configured learning rate at a step."""
    warm = warmup_steps(total, config.warmup_steps(total))
    if config.lr_scheduler in TORCH_SCHEDULERS and step >= warm:
        arguments = json.dumps(config.lr_scheduler_args, sort_keys=True)
        return _torch_rates(config.lr_scheduler, arguments, config.learning_rate, total - warm)[step - warm]
    kind = "constant" if config.lr_scheduler in TORCH_SCHEDULERS else config.lr_scheduler
    return learning_rate(step, total, kind, warm, config.cosine_cycles, config.polynomial_power, config.lr_min_ratio)


@lru_cache(maxsize=8)
def _torch_rates(name: str, arguments: str, rate: float, count: int) -> tuple[float, ...]:
    """Return the multipliers of ``count`` steps and of the one after them, by a scheduler of torch itself."""
    options = json.loads(arguments)
    if name in _CYCLING and options.setdefault("cycle_momentum", True):
        raise ConfigError(
            f"lr_scheduler: {name} changes the optimizer's momentum too; add cycle_momentum = false to "
            "lr_scheduler_args to change the learning rate alone"
        )
    if name in _CYCLING[1:] and not {"total_steps", "epochs", "steps_per_epoch"} & options.keys():
        options["total_steps"] = count + 1
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate)
    rates = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no optimizer step is made before the scheduler's
            scheduler = getattr(torch.optim.lr_scheduler, name.rpartition(".")[2])(optimizer, **options)
            for _ in range(count + 1):
                rates.append(float(optimizer.param_groups[0]["lr"]) / rate)
                scheduler.step()
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        if len(rates) <= count:
            where = f"after {len(rates)} steps of {count}: " if rates else ""
            raise ConfigError(f"lr_scheduler_args: {name} with {arguments}: {where}{error}") from None
    if not all(math.isfinite(each) and each >= 0 for each in rates):
        raise ConfigError(f"lr_scheduler_args: {name} with {arguments}: the learning rate becomes negative or infinite")
    return tuple(rates)


def rates(config: TrainConfig, total: int, until: int) -> list[float]:
    """Return the multipliers of all steps before ``until``."""
    return [learning_rate_at(config, step, total) for step in range(until)]
