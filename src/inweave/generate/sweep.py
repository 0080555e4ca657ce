"""The same request many times, with one or two settings changed: sweeps and comparisons.

    strength=0,0.5,1      all LoRAs of the request, tagged ones included, at these multiples of their strength
    seed=1,2,3            other seeds; likewise steps and guidance

One axis gives a row, two give a table. A comparison has a column without LoRAs, one for each LoRA alone, and, where
there are several, one for all of them together, always from the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inweave.errors import ConfigError
from inweave.generate.batches import Batch
from inweave.generate.config import GenerateConfig, LoraChoice
from inweave.generate.denoise import Callbacks, Progress
from inweave.generate.images import ImageInput
from inweave.generate.pipeline import Pipeline
from inweave.generate.prompt import scaled_tags, strip_tags
from inweave.generate.result import Result
from inweave.generate.sheet import Sheet

AXES: dict[str, type] = {"strength": float, "seed": int, "steps": int, "guidance": float}


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    values: tuple[float, ...]

    @staticmethod
    def parse(text: str) -> Axis:
        """Parse NAME=VALUE,VALUE,..."""
        name, equals, listed = text.partition("=")
        kind = AXES.get(name.strip())
        if kind is None or not equals:
            raise ConfigError(f"grid {text!r}: write one of {', '.join(AXES)} and its values, such as strength=0,0.5,1")
        try:
            values = tuple(kind(value) for value in listed.split(","))
        except ValueError:
            raise ConfigError(
                f"grid {text!r}: {listed!r} is not a list of {'whole ' if kind is int else ''}numbers"
            ) from None
        return Axis(name.strip(), values)

    def apply(self, config: GenerateConfig, value: float) -> GenerateConfig:
        fields = config.model_dump()
        if self.name == "strength":
            fields["loras"] = [_scaled(lora, value) for lora in config.loras]
            for name in ("prompt", "negative_prompt"):
                fields[name] = scaled_tags(fields[name], value)
        else:
            fields[self.name] = value
        return GenerateConfig(**fields)

    def label(self, value: float) -> str:
        return f"{self.name} {value:g}"

    @property
    def text(self) -> str:
        """As an option spells it."""
        return f"{self.name}={','.join(f'{value:.17g}' for value in self.values)}"


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The sheet of a sweep, and the result of every cell.

    ``record``: the settings to write into the sheet: those of the request, its axes, and those of every cell.
    """

    sheet: Sheet
    results: list[list[Result]]
    record: dict[str, Any]


def sweep(pipe: Pipeline, config: GenerateConfig, axes: Sequence[Axis], **options: Any) -> SweepResult:
    """Generate one image for every value of every axis; all are checked before the first is made."""
    if not 1 <= len(axes) <= 2:
        raise ConfigError(f"a grid has one or two axes, got {len(axes)}")
    if any(axis.name == "strength" for axis in axes) and not (config.loras or config.tagged_loras()):
        own = "; those of the pipeline itself stay unchanged" if pipe.loras else ""
        raise ConfigError(f"grid: a sweep over strength needs a LoRA of the request, in its list or its prompt{own}")
    across, down = axes[0], axes[1] if len(axes) == 2 else None
    rows = [down.apply(config, value) for value in down.values] if down else [config]
    table = [[across.apply(row, value) for value in across.values] for row in rows]
    labels = [down.label(value) for value in down.values] if down else []
    columns = [across.label(value) for value in across.values]
    return run(pipe, table, columns, labels, config, axes=[axis.text for axis in axes], **options)


def compare(pipe: Pipeline, config: GenerateConfig, **options: Any) -> SweepResult:
    """Generate the same seeds without LoRAs, with each one, and with all, those tagged in the prompts included."""
    request, config = config, _without_tags(config)
    if not config.loras:
        raise ConfigError("compare: there is no LoRA to compare with; add one with --lora")
    stacks: list[tuple[str, tuple[LoraChoice, ...]]] = [("no LoRA", ())]
    stacks += [(f"{lora.label.rpartition('/')[2]} {_strength_label(lora)}", (lora,)) for lora in config.loras]
    if len(config.loras) > 1:
        stacks.append(("all", config.loras))
    seed = config.seed if config.seed is not None else 0
    seeds = [seed + number for number in range(config.count)]
    table = [
        [config.model_copy(update={"loras": stack, "seed": each, "count": 1}) for _, stack in stacks] for each in seeds
    ]
    labels = [f"seed {each}" for each in seeds] if len(seeds) > 1 else []
    return run(pipe, table, [name for name, _ in stacks], labels, request, **options)


def run(
    pipe: Pipeline,
    table: Sequence[Sequence[GenerateConfig]],
    columns: Sequence[str],
    rows: Sequence[str],
    request: GenerateConfig,
    *,
    axes: Sequence[str] = (),
    init: ImageInput | None = None,
    mask: ImageInput | None = None,
    references: Sequence[ImageInput] | None = None,
    progress: Callable[[Progress], object] | None = None,
    cancelled: Callable[[], bool] | None = None,
    batch: Batch | None = None,
) -> SweepResult:
    """Generate a table of requests; all are prepared first, so that an invalid one stops it before any work.

    Cells that share model, stack, size, steps and sampler are made together, as many as ``batch`` says.
    ``request``: what they were made from, with ``axes``.
    """
    base = pipe.prepare(request, init, mask, references=references)
    prepared = [
        [
            replace(pipe.prepare(config, init, mask, references=references), init=base.init, mask=base.mask)
            for config in line
        ]
        for line in table
    ]
    total = sum(len(line) for line in table)
    callbacks = Callbacks(progress, cancelled=cancelled)
    made = iter(pipe.run_all([cell for line in prepared for cell in line], callbacks, batch=batch))
    results = [[next(made) for _ in line] for line in prepared]
    for result in (result for line in results for result in line):
        if result.error is not None:
            raise result.error
    cells = [[result.images[0] for result in line] for line in results]
    records = [[result.records[0]["config"] for result in line] for line in results]
    grid = {"axes": list(axes), "columns": list(columns), "rows": list(rows), "cells": total, "settings": records}
    record = pipe.record(base) | {"grid": grid}
    return SweepResult(Sheet(cells, columns, rows, request.prompts[0].text), results, record)


def _without_tags(config: GenerateConfig) -> GenerateConfig:
    """Return the same request with the LoRAs of its tags in its list."""
    tagged = config.tagged_loras()
    if not tagged:
        return config
    texts = {name: strip_tags(getattr(config, name)) for name in ("prompt", "negative_prompt")}
    return config.model_copy(update={**texts, "loras": (*config.loras, *tagged)})


def _scaled(lora: LoraChoice, factor: float) -> dict[str, Any]:
    fields = lora.model_dump(exclude_none=True)
    return fields | {name: fields[name] * factor for name in ("strength", "te", "unet") if name in fields}


def _strength_label(lora: LoraChoice) -> str:
    strengths = lora.strengths()
    te, unet = strengths["te"], strengths["unet"]
    return f"{unet:g}" if te == unet else f"{te:g}/{unet:g}"
