"""Activation memory of a step, predicted and measured, and the savings and the time of gradient checkpointing.

predicted   `inweave.training.memory.estimate`, from the meta device: the basis of `--vram`
measured    peak bytes of a step above those allocated before it; training measures its second step the same way
time        of an eager step; on a GPU also of one recorded as CUDA graphs, after memory was measured, since a replay
            allocates nothing
saved       the fraction of the memory of mode "off" that a mode saves
slower      its time over that of "off", as CUDA graphs where both could be recorded
peer        the same measurement of diffusers + PEFT, whose checkpointing is full or none
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from inweave.bench.models import published_blueprint
from inweave.bench.report import BenchRow
from inweave.bench.step import (
    GIB,
    PEER,
    ReadyStep,
    StepCase,
    fresh_memory,
    ready_peer,
    ready_step,
    step_config,
    without_cudnn_attention,
)
from inweave.bench.timing import wall_seconds
from inweave.training.memory.candidates import MODES
from inweave.training.memory.estimate import estimate
from inweave.training.memory.meter import StepMeter


def measure_memory(
    case: StepCase,
    device: torch.device,
    dtype: torch.dtype,
    *,
    runs: int = 5,
    modes: Sequence[str] = MODES,
    peers: bool = True,
    progress: Callable[[str], None] | None = None,
) -> tuple[list[BenchRow], list[str]]:
    """Return a row per mode of gradient checkpointing, in GiB, and notes."""
    rows: list[BenchRow] = []
    notes: list[str] = []
    first: tuple[int, float, float | None] | None = None
    for mode in modes:
        chosen = replace(case, checkpointing=mode, graph="off")
        if progress is not None:
            progress(chosen.name)
        predicted = estimate(published_blueprint(case.model), step_config(chosen, device, dtype))["activation_bytes"]
        with fresh_memory(device):
            step = ready_step(chosen, device, dtype)
            measured, eager = _measure(step, device, runs)
            recorded = _recorded(step, device, runs)
            modules, remarks = step.modules, step.notes()
            del step
        notes += [f"{mode}: {note}" for note in remarks]
        first = first or (measured, eager, recorded)
        slower = eager / first[1] if recorded is None or first[2] is None else recorded / first[2]
        theirs: dict[str, float] = {}
        if peers and mode != "selective":
            try:
                with fresh_memory(device), without_cudnn_attention():
                    theirs[PEER] = _measure(ready_peer(chosen, device, dtype, modules, "eager"), device, 1)[0] / GIB
            except Exception as error:  # a peer that fails is a result too
                notes.append(f"{PEER}, {mode}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        details = {"predicted": predicted / GIB, "predicted / measured": predicted / measured, "ms, eager": eager * 1e3}
        details |= {} if recorded is None else {"ms, CUDA graph": recorded * 1e3}
        details |= {"saved": 1 - measured / first[0], "slower": slower}
        rows.append(BenchRow(f"activation memory, {chosen.name}", "GiB", measured / GIB, theirs, None, details))
    return rows, notes


def _measure(step: ReadyStep, device: torch.device, runs: int) -> tuple[int, float]:
    """Return the bytes of the second step and the median seconds of later ones."""
    meter = StepMeter(device, 0)
    meter(step.update)
    (record,) = meter(step.update)
    return int(record["measured_bytes"]), statistics.median(wall_seconds(step.update, device, runs=runs))


def _recorded(step: ReadyStep, device: torch.device, runs: int) -> float | None:
    """Return the median seconds of the same step as CUDA graphs; None if it cannot be recorded."""
    if device.type != "cuda" or step.graphs is None:
        return None
    step.graphs.enabled = True
    seconds = statistics.median(wall_seconds(step.update, device, runs=runs, warmup=3))
    return seconds if step.graphs.enabled else None
