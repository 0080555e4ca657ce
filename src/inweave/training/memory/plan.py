"""A run within `vram`: what to do for it, alike on all processes, and without changing a run that has begun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from inweave.training.checkpoint.store import named, newest
from inweave.training.config.schema import TrainConfig
from inweave.training.distributed.world import World
from inweave.training.memory.estimate import Plan, Sized, limit_for, plan


def within_limit(
    model: Sized,
    config: TrainConfig,
    device: torch.device,
    world: World,
    side: int | None = None,
    chunks: int = 1,
) -> Plan | None:
    """What to do to stay within `vram`; None without a limit. ``side``, ``chunks``: see `plan`."""
    limit = limit_for(config, device)
    if limit is None:
        return None
    limit = world.least(limit, device)  # all processes plan alike, whatever is free on each of their devices
    begun = _begun(config)  # another share of memory may be free today: that does not change the run's numbers
    kept = {name: begun[name] for name in ("batch_size", "precision") if begun and name in begun}
    if begun and "gradient_accumulation" in begun:  # there it is that of all processes
        kept["gradient_accumulation"] = max(begun["gradient_accumulation"] // world.size, 1)
    found = plan(model, config.model_copy(update=kept), limit, same_numbers=begun is not None, side=side, chunks=chunks)
    stays = [f"{n} stays {v}, as the run began" for n, v in kept.items() if v != getattr(config, n)]
    return replace(found, reasons=(*stays, *found.reasons))


def _begun(config: TrainConfig) -> Mapping[str, Any] | None:
    """The configuration of the run that goes on, if one does."""
    if config.resume == "never":
        return None
    states = Path(config.output) / f"{config.name}-state"
    state, _ = newest(states) if config.resume == "auto" else named(Path(config.resume))
    return None if state is None else dict(state.facts.get("config", {}))
