"""Staying within `vram`: the changes that make a run fit, without changing the results of a resumed run.

A run that fits is not changed. Otherwise encoders leave the device, and of all combinations of splitting batches and
gradient checkpointing that fit, the fastest is chosen (`inweave.training.memory.speed`): few large parts that
recompute, or many small ones that do not. If none fits, the inputs of blocks that recompute are in host memory, then
blocks are streamed from there, as few of them as must be. Of those within 3 % of the fastest, the one that changes
least is chosen. AdamW's state in 8 bits and the precision come last: they change results beyond rounding, as does a
format of weights, which is chosen only for `quantize = "auto"`. If nothing fits, the error says what would help.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from inweave.errors import MemoryBudgetError
from inweave.training.config.schema import TrainConfig
from inweave.training.memory.candidates import SIZES, Candidate, candidates, fits
from inweave.training.memory.estimate import CONTEXT, GIB, HOST, RESERVE, Measurements
from inweave.training.memory.speed import Speed

SAME_TIME = 1.03  # predictions within this ratio are considered equal


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """``config`` with ``changes`` applied, the reasons for them, and the estimate of its memory.

    ``split``: the number of parts each batch is split into; ``staged``: networks take turns on the device;
    ``resident``: blocks that stay there while the others are streamed.
    """

    config: TrainConfig
    changes: Mapping[str, Any]
    reasons: tuple[str, ...]
    estimate: Mapping[str, Any]
    staged: bool
    limit: int
    split: int = 1
    resident: int = 0


def plan_run(
    measurements: Measurements,
    config: TrainConfig,
    limit: int,
    speed: Speed,
    resumed: Mapping[str, Any] | None,
    processes: int,
    examples: int = SIZES[-1],
) -> MemoryPlan:
    """Plan a new run, or one that resumes a run of the settings ``resumed``: those that affect results are kept.

    ``limit``, ``speed``: the same on all processes, so that they plan alike. ``examples``: of the dataset, of which no
    batch holds more.
    """
    settings = {name: resumed[name] for name in _kept_settings(config) if resumed and name in resumed}
    if resumed and "gradient_accumulation" in resumed:  # a checkpoint counts that of all processes
        settings["gradient_accumulation"] = max(resumed["gradient_accumulation"] // processes, 1)
    split = None if resumed is None else resumed.get("split", 1)
    planned = plan_memory(
        measurements, config.model_copy(update=settings), limit, speed, split=split, examples=examples
    )
    unchanged = [f"{n} stays {v}, as the run was started" for n, v in settings.items() if v != getattr(config, n)]
    if resumed and planned.split > 1:
        unchanged.append(f"batches stay split into {planned.split} parts, as the run was started")
    return replace(planned, reasons=(*unchanged, *planned.reasons))


def _kept_settings(config: TrainConfig) -> Iterator[str]:
    """Yield the settings that a plan may have chosen for the run that is resumed."""
    yield from ("batch_size", "precision")
    if config.quantize == "auto":
        yield "quantize"
    if "optimizer" not in config.explicit_fields:
        yield "optimizer"


def plan_memory(
    measurements: Measurements,
    config: TrainConfig,
    limit_bytes: int,
    speed: Speed,
    *,
    split: int | None = None,
    examples: int = SIZES[-1],
) -> MemoryPlan:
    """Return the fastest configuration that stays within a limit.

    ``split``: of the resumed run; then nothing may change results, not even by rounding. With batch size 0 it is also
    the fastest per example, of all batch sizes up to ``examples``.
    """
    if config.batch_size:
        return _plan_size(measurements, config, limit_bytes, speed, split)
    best: MemoryPlan | None = None
    for size in (size for size in SIZES if size <= examples):
        try:
            of_size = config.model_copy(update={"batch_size": size})
            plan = _plan_size(measurements, of_size, limit_bytes, speed, None, [size])
        except MemoryBudgetError:
            if best is None:
                raise
            break
        if best is not None and _per_example(plan, speed) > SAME_TIME * _per_example(best, speed):
            break  # what makes this size fit costs more than it brings
        best = plan
    assert best is not None
    text = f"batch_size {best.config.batch_size}: as many examples as fit without making each of them slower"
    return replace(best, changes={**best.changes, "batch_size": best.config.batch_size}, reasons=(text, *best.reasons))


def _per_example(plan: MemoryPlan, speed: Speed) -> float:
    return speed.seconds(plan.estimate) / plan.config.batch_size


def _plan_size(
    measurements: Measurements,
    config: TrainConfig,
    limit: int,
    speed: Speed,
    split: int | None,
    sizes: Sequence[int] | None = None,
) -> MemoryPlan:
    original: Mapping[str, Any] | None = None
    least: Mapping[str, Any] | None = None
    ram = config.ram_bytes
    for group in candidates(measurements, config, split, sizes):
        fitting: list[tuple[float, Candidate, dict[str, Any]]] = []
        for candidate in group:
            seconds, best, needs = candidate.evaluated(measurements, speed, limit)
            original = original or needs
            if fits(needs, limit, ram):
                fitting.append((seconds, best, needs))
                chosen = best.config
                same = chosen.gradient_checkpointing == config.gradient_checkpointing and chosen.offload != "blocks"
                if same and best.parts == 1 and chosen.quantize == config.quantize:
                    break  # nothing is faster, and the others need not be measured
            least = needs if least is None or needs["total_bytes"] < least["total_bytes"] else least
        if fitting:
            fastest = min(seconds for seconds, *_ in fitting)
            _, best, needs = next(each for each in fitting if each[0] <= SAME_TIME * fastest)
            chosen = best.config
            changes = {
                n: getattr(chosen, n) for n in TrainConfig.model_fields if getattr(chosen, n) != getattr(config, n)
            }
            assert original is not None
            reasons = tuple(_reasons(config, best, original, needs, limit, images=measurements.blueprint is not None))
            return MemoryPlan(chosen, changes, reasons, needs, best.staged, limit, best.parts, best.resident)
    assert least is not None
    raise MemoryBudgetError(_refusal(config, least, limit, images=measurements.blueprint is not None))


def limit_for(config: TrainConfig, device: torch.device) -> int | None:
    """Return the bytes a run may use: `vram`, the free memory if a setting is "auto", or None without a limit."""
    if config.vram_bytes is not None or not config.is_planned:
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


def _reasons(
    before: TrainConfig,
    best: Candidate,
    original: Mapping[str, Any],
    needs: Mapping[str, Any],
    limit: int,
    *,
    images: bool,
) -> Iterator[str]:
    """Yield one line per decision, for the log."""
    after, staged = best.config, best.staged
    if not staged and after == before and best.parts == 1:
        yield f"nothing has to change: the run needs {_gib(needs['total_bytes'])} of {_gib(limit)}"
        return
    yield f"as configured the run would need {_gib(original['total_bytes'])}, and the limit is {_gib(limit)}"
    streams = after.offload == "blocks"
    if staged and not streams and (less := original["weights_bytes"] - needs["weights_bytes"]) > 0:
        first = "images and captions are encoded first, and their encoders leave the device"
        yield f"{first}: {_gib(less)} less of weights"
    if streams and before.offload != "blocks":
        host = needs["host_bytes"] - needs["inputs_bytes"] - HOST
        micro_batches = after.gradient_accumulation * best.parts
        copied = needs["copied_per_step"] - needs["inputs_bytes"] * micro_batches
        with_encoders = " with the encoders" if images else ""
        staying = f", {best.resident} blocks stay on the device" if best.resident else ""
        yield (
            f'offload "blocks": the base is in host memory, {_gib(host)}{with_encoders}; a step copies '
            f"{_gib(copied)} to the device{staying}"
        )
    if best.parts > 1:
        yield f"batches of {before.batch_size} are computed {best.size} at a time: the same update, but for rounding"
    if after.gradient_checkpointing != before.gradient_checkpointing:
        memory = _gib(needs["activation_bytes"])
        yield (
            f'gradient_checkpointing "{after.gradient_checkpointing}": the activation memory of a step is {memory}, '
            "and it takes longer"
        )
    if after.offload_activations != before.offload_activations:
        yield (
            'offload_activations "on": the inputs of blocks are in host memory between the forward and the backward '
            f"pass, {_gib(needs['inputs_bytes'])}"
        )
    if after.quantize != before.quantize and after.quantize != "off":
        yield f"quantize {after.quantize}: the frozen weights are stored in fewer bits; this changes results slightly"
    if after.optimizer != before.optimizer:
        yield f"optimizer {after.optimizer}: AdamW with its state in 8 bits; this changes results slightly"
    if after.precision != before.precision:
        yield f"precision {after.precision}: half the bytes per number; this changes results slightly"
    yield f"the run then needs {_gib(needs['total_bytes'])}"


def _refusal(config: TrainConfig, least: Mapping[str, Any], limit: int, *, images: bool) -> str:
    parts = {name: least[f"{name}_bytes"] for name in ("weights", "trained", "activation")}
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in {**parts, "CUDA and its libraries": RESERVE}.items())
    advice = []
    if config.ram_bytes is not None and least["total_bytes"] <= limit:
        return (
            f"ram: {_gib(config.ram_bytes)} is not enough; the run fits into {_gib(limit)} of the device only with "
            f'{_gib(least["host_bytes"])} of host memory; raise ram, raise vram, or set quantize = "auto"'
        )
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
