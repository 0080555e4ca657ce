"""Service times of the embedded model: loading it, reading a LoRA, making an image.

load    until the model can be used
read    an image with a LoRA that is not in memory, minus the next one with the same LoRA; the median of all LoRAs
runs    images with a LoRA that is in memory
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from inweave.generate.config import GenerateConfig, parse_loras
from inweave.generate.pipeline import pipeline
from inweave.models import embedded

STEPS = 8


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """Seconds of each kind of work."""

    load: float
    read: float
    runs: tuple[float, ...]


def measure_service_times(device: torch.device, progress: Callable[[str], None], rounds: int = 3) -> ServiceTimes:
    """Measure the embedded model with the LoRAs that come with it."""
    progress(f"loading {embedded.NAME}")
    started = time.perf_counter()
    pipe = pipeline(embedded.NAME, device=str(device))
    load = time.perf_counter() - started

    def image(lora: str) -> float:
        started = time.perf_counter()
        pipe(GenerateConfig(prompt="a red apple", loras=parse_loras([lora]), steps=STEPS, seed=7))
        return time.perf_counter() - started

    names = sorted(path.stem for path in (embedded.folder() / "loras").glob("*.safetensors"))
    image(names[0])  # warm up: kernel plans and the like
    reads, runs = [], []
    for number in range(rounds):
        progress(f"images with LoRAs, round {number + 1} of {rounds}")
        for name in names:
            first, again = image(name), image(name)
            reads.append(max(0.0, first - again))
            runs.append(again)
    return ServiceTimes(load, median(reads), tuple(runs))
