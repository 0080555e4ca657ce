"""Pictures drawn during training: the configuration's prompts, always from the same seed, with the adapter as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.generate.config import GenerateConfig
from weft.generate.pipeline import Pipeline
from weft.models.model import Model
from weft.train.config import TrainConfig


def sampler(model: Model, config: TrainConfig) -> Callable[[int], list[Path]]:
    """Draws the configuration's prompts with the adapter as it is, always from the same seed."""
    if not config.sample_prompts:
        raise ConfigError("sample_every is set, but there are no sample_prompts")
    prompts = list(config.sample_prompts)
    if len(prompts) == 1 and prompts[0].endswith(".txt") and Path(prompts[0]).is_file():
        prompts = [line for line in Path(prompts[0]).read_text("utf-8").splitlines() if line.strip()]
    pipe = _Live(model)
    requests = [
        GenerateConfig.of(
            prompt=prompt, seed=config.sample_seed, steps=config.sample_steps, guidance=config.sample_guidance
        )
        for prompt in prompts
    ]
    folder = Path(config.output) / "samples"

    def draw(step: int) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        found = []
        for number, request in enumerate(requests):
            path = folder / f"{config.name}-{step:06d}-{number}.png"
            pipe(request).save(path)
            found.append(path)
        return found

    return draw


class _Live(Pipeline):
    """A pipeline over a model whose adapters are layers that learn: there is nothing to weave."""

    def _run(self, request: Any, watch: Any) -> Any:
        return super()._run(replace(request, loras=[]), watch)
