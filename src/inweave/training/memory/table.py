"""The ways to do a run, as a table from the smallest on the device to the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from inweave.training.config.schema import TrainConfig
from inweave.training.memory.candidates import Candidate, blocks_of, fits, formats
from inweave.training.memory.estimate import Measurements
from inweave.training.memory.plan import SAME_TIME
from inweave.training.memory.speed import Speed


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One way to do a run: its differences to the configuration in words, and what it needs."""

    changes: str
    total_bytes: int
    host_bytes: int
    seconds: float


def plan_table(measurements: Measurements, config: TrainConfig, speed: Speed) -> list[PlanRow]:
    """Return ways to do a run, from the smallest on the device to the fastest: none is smaller and as fast as another.

    Gradient checkpointing is off or full, batches are whole or done one example at a time.
    """
    config = config.model_copy(update={"batch_size": config.batch_size or 1})
    cached: dict[str, Any] = {"cache_latents": True} | ({} if config.train_text_encoders else {"cache_text": True})
    images = measurements.blueprint is not None
    rows: list[PlanRow] = []
    for format in formats(measurements, config):
        modes: list[dict[str, str]] = [
            {"gradient_checkpointing": mode} for mode in dict.fromkeys((config.gradient_checkpointing, "full"))
        ]
        if config.offload_activations == "auto":
            modes.append({"gradient_checkpointing": "full", "offload_activations": "on"})
        for mode in modes:
            settings = {"quantize": format} | mode
            plain = config.model_copy(update=settings | {"offload": "off"})
            staged = plain.model_copy(update=cached if images else {})
            ways = [(plain, False), (staged, True)] if images else [(plain, False)]
            if (
                config.offload != "off"
                and not config.shard
                and config.compile != "on"
                and blocks_of(measurements, plain)
            ):
                ways.append((staged.model_copy(update={"offload": "blocks"}), True))
            for size in dict.fromkeys((config.batch_size, 1)):
                for each, stages in ways:
                    candidate = Candidate(each, stages, size)
                    needs = candidate.needs(measurements)
                    if fits(needs, None, config.ram_bytes):
                        text = ", ".join(_changes(config, candidate)) or "as configured"
                        seconds = speed.seconds(needs)
                        rows.append(PlanRow(text, needs["total_bytes"], needs["host_bytes"], seconds))
    rows.sort(key=lambda row: (row.total_bytes, row.seconds))
    best: list[PlanRow] = []
    for row in rows:
        if not best or row.seconds < best[-1].seconds / SAME_TIME:
            best.append(row)
    return best


def _changes(config: TrainConfig, candidate: Candidate) -> Iterator[str]:
    """Yield the differences of a candidate to the configuration, in words."""
    chosen = candidate.config
    if chosen.quantize != config.quantize and chosen.quantize != "off":
        yield chosen.quantize
    if chosen.offload == "blocks":
        yield "blocks streamed"
    elif candidate.staged:
        yield "encoders off the device"
    if chosen.gradient_checkpointing != config.gradient_checkpointing:
        yield f"{chosen.gradient_checkpointing} checkpointing"
    if chosen.offload_activations != config.offload_activations:
        yield "inputs of blocks in host memory"
    if candidate.parts > 1:
        yield f"batch in {candidate.parts} parts"
