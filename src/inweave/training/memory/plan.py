"""Staying within `vram`: the changes that make a run fit, without changing the results of a resumed run.

A run that fits is not changed. Otherwise encoders leave the device, and of all combinations of splitting batches and
gradient checkpointing that fit, the fastest is chosen (`inweave.training.memory.speed`): few large parts that
recompute, or many small ones that do not. Of those within 3 % of the fastest, the one that changes least is chosen. The
precision comes last: it is the only change to results beyond rounding. If nothing fits, the error says what would help.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from inweave.errors import MemoryBudgetError
from inweave.training.config.schema import TrainConfig
from inweave.training.memory.estimate import CONTEXT, GIB, RESERVE, Measurements, sum_up
from inweave.training.memory.speed import Speed

MODES = ("off", "selective", "full")
SAME_TIME = 1.03  # predictions within this ratio are considered equal


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """``config`` with ``changes`` applied, the reasons for them, and the estimate of its memory.

    ``split``: the number of parts each batch is split into; ``staged``: networks take turns on the device.
    """

    config: TrainConfig
    changes: Mapping[str, Any]
    reasons: tuple[str, ...]
    estimate: Mapping[str, Any]
    staged: bool
    limit: int
    split: int = 1


def plan_run(
    measurements: Measurements,
    config: TrainConfig,
    limit: int,
    speed: Speed,
    resumed: Mapping[str, Any] | None,
    processes: int,
) -> MemoryPlan:
    """Plan a new run, or one that resumes a run of the settings ``resumed``: those that affect results are kept.

    ``limit``, ``speed``: the same on all processes, so that they plan alike.
    """
    settings = {name: resumed[name] for name in ("batch_size", "precision") if resumed and name in resumed}
    if resumed and "gradient_accumulation" in resumed:  # a checkpoint counts that of all processes
        settings["gradient_accumulation"] = max(resumed["gradient_accumulation"] // processes, 1)
    split = None if resumed is None else resumed.get("split", 1)
    planned = plan_memory(measurements, config.model_copy(update=settings), limit, speed, split=split)
    unchanged = [f"{n} stays {v}, as the run was started" for n, v in settings.items() if v != getattr(config, n)]
    if resumed and planned.split > 1:
        unchanged.append(f"batches stay split into {planned.split} parts, as the run was started")
    return replace(planned, reasons=(*unchanged, *planned.reasons))


def plan_memory(
    measurements: Measurements, config: TrainConfig, limit_bytes: int, speed: Speed, *, split: int | None = None
) -> MemoryPlan:
    """Return the fastest configuration that stays within a limit.

    ``split``: of the resumed run; then nothing may change results, not even by rounding.
    """
    original = sum_up(measurements, config, staged=False)
    least: Mapping[str, Any] | None = None
    for group in _candidates(measurements, config, split):
        fitting: list[tuple[float, TrainConfig, bool, int, dict[str, Any]]] = []
        for chosen, staged, size in group:
            parts = -(-config.batch_size // size)
            as_computed = {"batch_size": size, "gradient_accumulation": config.gradient_accumulation * parts}
            needs = sum_up(measurements, chosen.model_copy(update=as_computed), staged=staged)
            if needs["total_bytes"] <= limit_bytes:
                fitting.append((speed.seconds(needs), chosen, staged, size, needs))
                if size == config.batch_size and chosen.gradient_checkpointing == config.gradient_checkpointing:
                    break  # nothing is faster, and the others need not be measured
            least = needs if least is None or needs["total_bytes"] < least["total_bytes"] else least
        if fitting:
            fastest = min(seconds for seconds, *_ in fitting)
            _, chosen, staged, size, needs = next(each for each in fitting if each[0] <= SAME_TIME * fastest)
            changes = {
                n: getattr(chosen, n) for n in TrainConfig.model_fields if getattr(chosen, n) != getattr(config, n)
            }
            reasons = tuple(_reasons(config, chosen, original, needs, limit_bytes, staged, size))
            return MemoryPlan(chosen, changes, reasons, needs, staged, limit_bytes, -(-config.batch_size // size))
    assert least is not None
    raise MemoryBudgetError(_refusal(config, least, limit_bytes, images=measurements.blueprint is not None))


def limit_for(config: TrainConfig, device: torch.device) -> int | None:
    """Return the bytes a run may use: `vram`, the free memory if that is "auto", or None without a limit."""
    if config.vram != "auto":
        return config.vram_bytes
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def enforce(limit_bytes: int, device: torch.device) -> None:
    """Make allocations beyond the limit fail until `remove_limit`."""
    if device.type == "cuda":
        gc.collect()  # garbage of earlier runs of this process counts too
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        share = max(limit_bytes - CONTEXT, 0) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), _device_number(device))


def remove_limit(device: torch.device) -> None:
    """Remove the limit: the process may go on after the run."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, _device_number(device))


def _device_number(device: torch.device) -> int:
    """Return the index of the GPU, which `set_per_process_memory_fraction` needs."""
    return torch.cuda.current_device() if device.index is None else device.index


def _candidates(
    measurements: Measurements, config: TrainConfig, split: int | None
) -> Iterator[list[tuple[TrainConfig, bool, int]]]:
    """Yield groups of (configuration, staged, examples at a time), each from the least change to the smallest need.

    A group is tried only if nothing in the groups before it fits.
    """
    whole = config.batch_size
    sizes = [size for size in range(whole, 0, -1) if whole % size == 0] if split is None else [-(-whole // split)]
    yield [(config, False, sizes[0])]
    staged = measurements.blueprint is not None  # a language model has nothing to offload
    cached: dict[str, Any] = {"cache_latents": True} if staged else {}
    if staged and not config.train_text_encoders:
        cached["cache_text"] = True
    precisions = [config.precision]
    if measurements.own == torch.float32 and split is None:
        precisions.append("bf16")
    for precision in precisions:
        modes = MODES[MODES.index(config.gradient_checkpointing) :]
        if config.compile == "on" and config.gradient_checkpointing != "selective":  # the two do not go together
            modes = tuple(mode for mode in modes if mode != "selective")
        changes = [cached | {"gradient_checkpointing": mode, "precision": precision} for mode in modes]
        yield [(config.model_copy(update=each), staged, size) for each in changes for size in sizes]


def _reasons(
    before: TrainConfig,
    after: TrainConfig,
    original: Mapping[str, Any],
    needs: Mapping[str, Any],
    limit: int,
    staged: bool,
    size: int,
) -> Iterator[str]:
    """Yield one line per decision, for the log."""
    if not staged and after == before and size == before.batch_size:
        yield f"nothing has to change: the run needs {_gib(needs['total_bytes'])} of {_gib(limit)}"
        return
    yield f"as configured the run would need {_gib(original['total_bytes'])}, and the limit is {_gib(limit)}"
    if staged:
        yield (
            "images and captions are encoded first, and their encoders leave the device: "
            f"{_gib(original['weights_bytes'] - needs['weights_bytes'])} less of weights"
        )
    if size != before.batch_size:
        yield f"batches of {before.batch_size} are computed {size} at a time: the same update, but for rounding"
    if after.gradient_checkpointing != before.gradient_checkpointing:
        memory = _gib(needs["activation_bytes"])
        yield (
            f'gradient_checkpointing "{after.gradient_checkpointing}": the activation memory of a step is {memory}, '
            "and it takes longer"
        )
    if after.precision != before.precision:
        yield f"precision {after.precision}: half the bytes per number; this changes results slightly"
    yield f"the run then needs {_gib(needs['total_bytes'])}"


def _refusal(config: TrainConfig, least: Mapping[str, Any], limit: int, *, images: bool) -> str:
    parts = {name: least[f"{name}_bytes"] for name in ("weights", "trained", "activation")}
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in {**parts, "CUDA and its libraries": RESERVE}.items())
    advice = []
    if limit <= RESERVE:
        advice.append("CUDA and its libraries alone take more; raise the limit (vram)")
    elif parts["weights"] + RESERVE > limit:
        advice.append("the weights alone are too large; raise the limit (vram), or train another model")
    else:
        if parts["activation"] > GIB // 8 or least["caching_bytes"] + RESERVE > limit:
            advice.append("lower resolution" if images else "split the texts into shorter ones")
        if parts["trained"] > GIB // 8:
            smaller = "" if config.optimizer == "adamw8bit" else ', or set optimizer = "adamw8bit"'
            advice.append(f"lower rank{smaller}")
        if config.train_text_encoders:
            advice.append("set train_text_encoders = false")
        advice.append("raise the limit (vram)")
    return (
        f"vram: {_gib(limit)} is not enough; with batch size 1, gradient checkpointing and all encoders offloaded the "
        f"run needs {_gib(least['total_bytes'])} ({listed}); " + "; ".join(advice)
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
