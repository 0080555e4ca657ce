"""The cost of a LoRA: the time of an image with it over the time of the same image without, on the built-in model.

    base     an image of the base after an image of the base: nothing is swapped
    lora     an image with a LoRA after an image of the base: the file is looked up, checked and merged, then the
             network runs at the speed of the base
    ratio    lora / base of one round; the smallest of all rounds, since other load on the machine only adds time

On the CPU this is processor time, on a GPU wall-clock time. `LIMIT` is the ratio that a LoRA may reach.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from inweave.generate.config import GenerateConfig, parse_loras
from inweave.generate.pipeline import Pipeline

LIMIT = 1.2


def measure_cost(
    pipe: Pipeline,
    lora: str = "pixel:0.8",
    *,
    rounds: int = 5,
    steps: int = 20,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure the seconds of an image without and with ``lora``, and their smallest ratio over ``rounds``."""
    with_lora = parse_loras([lora])
    pipe(_request((), steps))  # warm up: kernel plans and the like
    pipe(_request(with_lora, steps))
    pairs: list[tuple[float, float]] = []
    for number in range(rounds):
        pipe(_request((), steps))  # removes the LoRA of the previous round
        pairs.append((_seconds(pipe, _request((), steps)), _seconds(pipe, _request(with_lora, steps))))
        if progress is not None:
            progress("cost of a LoRA", number + 1, rounds)
    base, changed = min(pairs, key=lambda pair: pair[1] / pair[0])
    return {"base": base, "lora": changed, "ratio": changed / base, "limit": LIMIT, "rounds": rounds, "steps": steps}


def _request(loras: Any, steps: int) -> GenerateConfig:
    return GenerateConfig(prompt="a red apple", loras=loras, steps=steps, seed=7)


def _seconds(pipe: Pipeline, request: GenerateConfig) -> float:
    clock = time.perf_counter if pipe.model.device.type == "cuda" else time.process_time
    started = clock()
    pipe(request)  # the images are in CPU memory: the GPU is done
    return clock() - started
